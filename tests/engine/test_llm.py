"""The course's contracts and the corner cases of the design, on a tiny model (see test_equals_transformers too)."""

import json
import pickle
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from nanovllm import LLM, Config, Parts, SamplingParams
from nanovllm.engine.events import FinishReason, StepRecord
from nanovllm.engine.sequence import Sequence
from nanovllm.errors import ConfigError, EngineBusyError, EngineDeadError, ModelNotFoundError, RequestError
from tests.engine.fake import check_invariants

COLD = 1e-6


def build(path: Path, **options: Any) -> LLM:
    settings: dict[str, Any] = {
        "dtype": "float32", "device": "cpu", "attention_backend": "torch", "kvcache_block_size": 4,
        "num_kvcache_blocks": 64, "max_model_len": 256, "seed": 0,
    }  # fmt: skip
    return LLM(str(path), **{**settings, **options})


@pytest.fixture(scope="module")
def llm(tiny_model_dir: Path) -> Iterator[LLM]:
    with build(tiny_model_dir) as engine:
        yield engine


def cold(max_tokens: int, ignore_eos: bool = True) -> SamplingParams:
    return SamplingParams(temperature=COLD, max_tokens=max_tokens, ignore_eos=ignore_eos)


def all_free(llm: LLM) -> bool:
    check_invariants(llm.scheduler)
    manager = llm.scheduler.block_manager
    return manager.num_free_blocks == manager.num_blocks and llm.is_finished()


def reference(llm: LLM, prompt: list[int], count: int) -> list[int]:
    """The same model in a pool where nothing is tight, one prompt at a time."""
    with build(Path(llm.config.model), num_kvcache_blocks=200, enable_prefix_caching=False) as alone:
        return alone.generate([prompt], cold(count), use_tqdm=False)[0]["token_ids"]


# ---- the course's interface --------------------------------------------------------------------------------------


def test_config_has_the_courses_fields_first_and_with_its_defaults(tiny_model_dir: Path) -> None:
    config = Config(str(tiny_model_dir))
    names = list(Config.__dataclass_fields__)[:11]
    assert names == [
        "model", "max_num_batched_tokens", "max_num_seqs", "max_model_len", "gpu_memory_utilization",
        "tensor_parallel_size", "enforce_eager", "hf_config", "eos", "kvcache_block_size", "num_kvcache_blocks",
    ]  # fmt: skip
    values = [getattr(config, name) for name in names[1:7]]
    assert values == [16384, 512, 2048, 0.9, 1, False], "max_model_len is cut to the model's 2048 positions"
    assert (config.eos, config.kvcache_block_size, config.num_kvcache_blocks) == (-1, 256, -1)
    assert config.hf_config.model_type == "qwen3" and not hasattr(config, "__dict__")
    with pytest.raises(TypeError):
        Config(str(tiny_model_dir), 1, 1, 1, 0.9, 1, False, None, -1, 256, -1, "cpu")  # type: ignore[misc]


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("kvcache_block_size", 100), ("kvcache_block_size", 16), ("kvcache_block_size", 0),
        ("kvcache_block_size", -256),
        ("tensor_parallel_size", 0), ("tensor_parallel_size", 9), ("max_num_seqs", 0), ("max_num_batched_tokens", 0),
        ("max_model_len", 1.5), ("gpu_memory_utilization", 0), ("gpu_memory_utilization", 1.5),
        ("num_kvcache_blocks", 0),
        ("scheduling_policy", "fair"), ("dtype", "float64"), ("attention_backend", "xformers"), ("seed", -1),
        ("enforce_eager", 1),
    ],
)  # fmt: skip
def test_config_refuses_with_the_value_in_the_message(tiny_model_dir: Path, option: str, value: Any) -> None:
    for kind in (AssertionError, ValueError, ConfigError):
        with pytest.raises(kind, match=option) as caught:
            Config(str(tiny_model_dir), **{option: value})
        assert str(value) in str(caught.value)


def test_small_blocks_need_a_backend_that_can(tiny_model_dir: Path) -> None:
    assert Config(str(tiny_model_dir), kvcache_block_size=16, attention_backend="torch").kvcache_block_size == 16
    assert Config(str(tiny_model_dir), kvcache_block_size=4, attention_backend="triton").kvcache_block_size == 4
    with pytest.raises(ConfigError, match="power of two"):
        Config(str(tiny_model_dir), kvcache_block_size=12, attention_backend="torch")


def test_a_configuration_travels_without_the_checks_that_somebody_replaced(tiny_model_dir: Path) -> None:
    """Ranks above 0 get the values; the class that a learner made exists in this process only."""
    lax = Parts({"Config.check_block_size": lambda self: None}).resolve(Config)
    config = lax(str(tiny_model_dir), kvcache_block_size=7)
    arrived = pickle.loads(pickle.dumps(config))
    assert type(arrived) is Config and arrived.kvcache_block_size == 7
    assert arrived.hf_config.to_dict() == config.hf_config.to_dict()


def test_a_missing_folder_names_the_command_that_fetches_one() -> None:
    with pytest.raises(ModelNotFoundError, match="nanovllm model"):
        LLM("no/such/folder")


@pytest.mark.parametrize("temperature", [0, 1e-10, -1.0, float("nan"), float("inf"), "1", None, True])
def test_temperature_must_be_warm_and_finite(temperature: Any) -> None:
    for kind in (AssertionError, ValueError):
        with pytest.raises(kind):
            SamplingParams(temperature=temperature)


@pytest.mark.parametrize("max_tokens", [0, -1, 1.5, True, "8", None])
def test_max_tokens_must_be_a_positive_integer(max_tokens: Any) -> None:
    with pytest.raises(ValueError, match="max_tokens"):
        SamplingParams(max_tokens=max_tokens)


def test_sampling_params_are_the_courses() -> None:
    assert list(SamplingParams.__dataclass_fields__) == ["temperature", "max_tokens", "ignore_eos"]
    assert SamplingParams() == SamplingParams(1.0, 64, False)


def test_generate_returns_dicts_in_prompt_order(llm: LLM) -> None:
    params = [cold(9), cold(2), cold(5)]
    outputs = llm.generate(["the quick", [5, 6, 7], "a block"], params, use_tqdm=False)
    assert [set(output) for output in outputs] == [{"text", "token_ids"}] * 3
    assert [len(output["token_ids"]) for output in outputs] == [9, 2, 5]
    for output, prompt in zip(outputs, ["the quick", [5, 6, 7], "a block"], strict=True):
        ids = llm.tokenizer.encode(prompt) if isinstance(prompt, str) else prompt
        assert output["token_ids"] == reference(llm, ids, len(output["token_ids"]))
        assert output["text"] == llm.tokenizer.decode(output["token_ids"], skip_special_tokens=True)
        assert output.finish_reason == "length" and output.num_prompt_tokens == len(ids)
    assert all_free(llm)


def test_a_bare_string_and_a_flat_list_of_ids_are_one_prompt(llm: LLM) -> None:
    assert len(llm.generate("the lazy dog", cold(2), use_tqdm=False)) == 1
    assert len(llm.generate([5, 6, 7], cold(2), use_tqdm=False)) == 1
    assert llm.generate([], use_tqdm=False) == []
    assert len(llm.generate(["the"], use_tqdm=False)[0]["token_ids"]) <= 64


def test_step_counts_computed_tokens_and_signs_the_phase(tiny_model_dir: Path) -> None:
    with build(tiny_model_dir, max_num_batched_tokens=6) as llm:
        assert llm.step() == ([], 0) and llm.is_finished()
        first = llm.add_request([5, 6, 7, 8], cold(1))
        second = llm.add_request([9, 10, 11, 12, 13], cold(3))
        outputs, count = llm.step()  # 4 tokens of the first prompt and 2 of the second
        assert count == 6 and [seq_id for seq_id, _ in outputs] == [first], "max_tokens=1 ends in a prefill step"
        assert llm.step() == ([], 3)
        assert llm.step() == ([], -1)
        outputs, count = llm.step()
        assert count == -1 and outputs[0][0] == second and len(outputs[0][1]) == 3
        assert llm.is_finished() and llm.step() == ([], 0)
        # The first block is cached now: 5 prompt tokens, 4 of them found, 1 computed.
        llm.add_request([9, 10, 11, 12, 13], cold(1))
        assert llm.step()[1] == 1


def test_requests_queued_by_hand_finish_in_a_generate_and_stay_retrievable(llm: LLM) -> None:
    by_hand = llm.add_request([5, 6, 7], cold(3))
    outputs = llm.generate([[8, 9]], cold(2), use_tqdm=False)
    assert len(outputs) == 1 and len(outputs[0]["token_ids"]) == 2 and llm.is_finished()
    result = llm.get_output(by_hand)
    assert result is not None and result["token_ids"] == reference(llm, [5, 6, 7], 3)
    assert llm.get_output(by_hand) is None


def test_the_engines_parts_have_the_courses_names(llm: LLM) -> None:
    assert llm.ps == [] and llm.events == []
    assert llm.tokenizer.is_fast and llm.config.eos == llm.tokenizer.eos_token_id
    assert llm.scheduler.block_manager.num_blocks == 64 and llm.model_runner.rank == 0
    seq = Sequence([1, 2, 3], SamplingParams(max_tokens=4))
    assert (seq.seq_id, seq.completion_token_ids, seq.is_finished, seq.num_scheduled_tokens) == (-1, [], False, 0)


def test_unknown_options_warn_and_name_the_nearest(tiny_model_dir: Path) -> None:
    with pytest.warns(UserWarning, match="max_num_seq'.*'max_num_seqs'"):
        build(tiny_model_dir, max_num_seq=8).exit()


def test_exit_twice_and_again(tiny_model_dir: Path) -> None:
    for _ in range(2):
        llm = build(tiny_model_dir)
        assert len(llm.generate([[5, 6]], cold(2), use_tqdm=False)[0]["token_ids"]) == 2
        llm.exit()
        llm.exit()
        with pytest.raises(EngineDeadError):
            llm.generate([[5, 6]])


# ---- chat, stream, abort -----------------------------------------------------------------------------------------


def test_chat_applies_the_template(llm: LLM) -> None:
    messages = [{"role": "user", "content": "the fox"}]
    text = llm.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    ids = llm.tokenizer.encode(text, add_special_tokens=False)
    one = llm.chat(messages, cold(4))
    assert one["token_ids"] == reference(llm, ids, 4)
    assert llm.chat([messages, messages], cold(4)) == [one, one]


def test_streamed_pieces_join_to_the_one_shot_text(llm: LLM) -> None:
    for start in range(3, 60, 7):  # random weights write bytes that rarely make whole characters: the hard case
        prompt = list(range(start, start + 5))
        whole = llm.generate([prompt], cold(24), use_tqdm=False)[0]["text"]
        pieces = list(llm.stream(prompt, cold(24)))
        assert "".join(pieces) == whole
        assert all(pieces), "no empty pieces"


def test_split_characters_are_held_back(llm: LLM) -> None:
    from nanovllm.engine.llm_engine import TextPieces

    text = "naïve 模型 🚀 done"
    ids = llm.tokenizer.encode(text)
    pieces = TextPieces(llm.tokenizer)
    got = [pieces.push(ids[:end], end == len(ids)) for end in range(1, len(ids) + 1)]
    assert "".join(got) == text and not any("\ufffd" in piece for piece in got)


def test_closing_a_stream_early_aborts_its_request(llm: LLM) -> None:
    stream = llm.stream([5, 6, 7], cold(50))
    next(stream)
    assert not llm.is_finished()
    stream.close()
    assert all_free(llm)
    del stream
    unstarted = llm.stream([5, 6, 7], cold(50))
    unstarted.close()
    assert all_free(llm)


def test_abort_in_every_state_frees_blocks_once(tiny_model_dir: Path) -> None:
    with build(tiny_model_dir, max_num_batched_tokens=8, max_num_seqs=2) as llm:
        running = llm.add_request([5, 6, 7], cold(20))
        chunked = llm.add_request(list(range(10, 30)), cold(5))
        waiting = llm.add_request([40, 41], cold(5))
        llm.step()
        assert llm.abort(waiting) and not llm.abort(waiting)
        check_invariants(llm.scheduler)
        assert llm.scheduler.running[1].is_prefilling
        assert llm.abort(chunked) and not llm.abort(chunked)
        check_invariants(llm.scheduler)
        assert llm.abort(running) and all_free(llm)
        finished = llm.add_request([5, 6, 7], cold(1))
        assert llm.step()[0][0][0] == finished
        assert not llm.abort(finished) and not llm.abort(10**6) and not llm.abort(-1)
        assert all_free(llm)


# ---- limits ------------------------------------------------------------------------------------------------------


def test_a_prompt_that_fills_the_pool_ends_with_what_fits(tiny_model_dir: Path) -> None:
    options = {"kvcache_block_size": 256, "num_kvcache_blocks": 2, "max_model_len": 2048}
    with build(tiny_model_dir, **options) as llm:
        prompt = [3 + i % 250 for i in range(512)]
        output = llm.generate([prompt], cold(8), use_tqdm=False)[0]
        assert output.finish_reason == "length" and len(output["token_ids"]) == 1
        output = llm.generate([prompt[:509]], cold(8), use_tqdm=False)[0]
        assert output.finish_reason == "length" and len(output["token_ids"]) == 4
        with pytest.raises(RequestError, match="513 tokens.*512"):
            llm.generate([[5, 6], [*prompt, 5]], cold(2), use_tqdm=False)
        neighbour = llm.add_request([5, 6], cold(2))
        with pytest.raises(RequestError):
            llm.add_request([*prompt, 5], cold(2))
        assert not llm.is_finished()
        llm.step()
        assert llm.step()[0][0][0] == neighbour
        assert len(llm.generate([[5, 6]], cold(2), use_tqdm=False)) == 1 and all_free(llm)


@pytest.mark.parametrize("policy", ["prefill_first", "mixed"])
def test_never_more_than_max_num_seqs_are_resident(tiny_model_dir: Path, policy: str) -> None:
    with build(tiny_model_dir, max_num_seqs=2, max_num_batched_tokens=7, scheduling_policy=policy) as llm:
        resident: list[int] = []
        llm.add_step_hook(lambda record: resident.append(record.num_running))
        prompts = [list(range(5 + i, 25 + i)) for i in range(4)]
        outputs = llm.generate(prompts, cold(6), use_tqdm=False)
        assert max(resident) <= 2
        for prompt, output in zip(prompts, outputs, strict=True):
            assert output["token_ids"] == reference(llm, prompt, 6)


def test_max_model_len_ends_a_sequence_and_refuses_longer_prompts(tiny_model_dir: Path) -> None:
    with build(tiny_model_dir, max_model_len=10) as llm:
        outputs = llm.generate([list(range(5, 12)), list(range(5, 15))], cold(8), use_tqdm=False)
        assert [len(output["token_ids"]) for output in outputs] == [3, 1]
        assert {output.finish_reason for output in outputs} == {"length"}
        with pytest.raises(RequestError, match="11 tokens.*max_model_len=10"):
            llm.generate([list(range(5, 16))])


@pytest.mark.parametrize(
    ("prompts", "params", "message"),
    [
        ([[]], None, "empty"),
        ([""], None, "empty"),
        ([[5, 300]], None, "300.*vocabulary"),
        ([[-1]], None, "-1.*vocabulary"),
        ([[5], [6]], [SamplingParams()], "2 prompts but 1"),
        ([[5, "a"]], None, "token ids"),
        ([[5.0]], None, "token ids"),
        ([[True]], None, "bool"),
        (5, None, "prompts must be"),
        ([[5]], "warm", "sampling_params"),
        ([[5]], [{"temperature": 1}], "SamplingParams"),
        (["\ud800"], None, "cannot be tokenized"),
    ],
)
def test_bad_requests_are_refused_before_anything_is_queued(llm: LLM, prompts: Any, params: Any, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        llm.generate(prompts, params, use_tqdm=False)
    good_first = [[5, 6], *prompts] if isinstance(prompts, list) else prompts
    with pytest.raises(RequestError):
        llm.generate(good_first, params, use_tqdm=False)
    assert all_free(llm)


def test_growth_at_the_block_edge(llm: LLM) -> None:
    """Block size 4: a second block is needed for the fifth token and not for the fourth."""
    tables: list[int] = []
    with llm.observe(lambda record: tables.append(len(record.rows[0].block_table))):
        outputs = llm.generate([[5, 6, 7]], cold(4), use_tqdm=False)
    assert tables == [1, 1, 2, 2], "computed 3, 4, 5 and 6 tokens"
    assert outputs[0]["token_ids"] == reference(llm, [5, 6, 7], 4)


def test_growth_when_the_free_list_is_empty(tiny_model_dir: Path) -> None:
    with build(tiny_model_dir, num_kvcache_blocks=4) as llm:
        preempted: list[int] = []
        llm.add_step_hook(lambda record: preempted.extend(record.preempted))
        prompts = [[5, 6, 7, 8, 9, 10], [20, 21, 22, 23, 24, 25]]  # two blocks each: the pool is full at once
        outputs = llm.generate(prompts, cold(8), use_tqdm=False)
        assert preempted and all_free(llm)
        for prompt, output in zip(prompts, outputs, strict=True):
            assert output["token_ids"] == reference(llm, prompt, 8)


def test_a_preempted_sequence_resumes_over_its_own_cached_blocks(tiny_model_dir: Path) -> None:
    with build(tiny_model_dir, num_kvcache_blocks=9) as llm:
        records: list[StepRecord] = []
        llm.observe(records.append)
        prompts = [list(range(5, 20)), list(range(30, 45))]  # 4 blocks each of 9
        outputs = llm.generate(prompts, cold(8), use_tqdm=False)
        resumed = [admission for record in records for admission in record.admitted if admission.is_resumed]
        assert resumed and resumed[0].num_cached_tokens > 0
        for record in records:
            for admission in record.admitted:
                row = next(row for row in record.rows if row.seq_id == admission.seq_id)
                assert row.num_computed_tokens == admission.num_cached_tokens
                assert row.num_scheduled_tokens == row.num_tokens - admission.num_cached_tokens
        for prompt, output in zip(prompts, outputs, strict=True):
            assert output["token_ids"] == reference(llm, prompt, 8)


@pytest.mark.parametrize("num_blocks", [4, 5, 6, 64])
def test_two_identical_prompts_in_one_step(tiny_model_dir: Path, num_blocks: int) -> None:
    with build(tiny_model_dir, num_kvcache_blocks=num_blocks) as llm:
        prompt = list(range(5, 15))  # 2 full blocks and a half
        records: list[StepRecord] = []
        llm.observe(records.append)
        outputs = llm.generate([prompt, prompt], cold(5), use_tqdm=False)
        expected = reference(llm, prompt, 5)
        assert [output["token_ids"] for output in outputs] == [expected, expected]
        assert all_free(llm)
        assert outputs[1].num_cached_tokens == 8, "the second shares the two blocks that the first computes"
        if num_blocks >= 4:
            assert len(records[0].rows) == 2, "in the very same step"


def test_generation_stops_on_any_end_token(tiny_model_dir: Path, tmp_path: Path) -> None:
    from tests.tiny_models import make_tiny_model

    folder = make_tiny_model(tmp_path / "many_ends")
    with build(folder) as llm:
        free_run = llm.generate([[5, 6, 7]], cold(12), use_tqdm=False)[0]["token_ids"]
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [free_run[3], free_run[6]]}))
    with build(folder) as llm:
        assert llm.config.eos == 2 and set(llm.config.stop_token_ids) == {free_run[3], free_run[6]}
        for end in (free_run[3], free_run[6]):
            first = free_run.index(end)
            llm.scheduler.stop_token_ids = frozenset({end})
            output = llm.generate([[5, 6, 7]], cold(12, ignore_eos=False), use_tqdm=False)[0]
            assert output["token_ids"] == free_run[: first + 1], "ids keep the end token"
            assert output.finish_reason == "stop"
        assert llm.generate([[5, 6, 7]], cold(12), use_tqdm=False)[0]["token_ids"] == free_run
    with build(folder) as llm:
        first = min(free_run.index(free_run[3]), free_run.index(free_run[6]))
        output = llm.generate([[5, 6, 7]], cold(12, ignore_eos=False), use_tqdm=False)[0]
        assert output["token_ids"] == free_run[: first + 1]
        assert llm.scheduler.stop_token_ids == {llm.config.eos, free_run[3], free_run[6]}, "the tokenizer's own as well"


# ---- staying whole -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("where", ["hook", "runner"])
def test_an_interrupt_at_step_3_leaves_the_engine_whole(llm: LLM, where: str, monkeypatch: Any) -> None:
    if where == "hook":

        def interrupt(record: StepRecord, first: int = llm.step_count) -> None:
            if record.step == first + 3:
                raise KeyboardInterrupt

        handle = llm.add_step_hook(interrupt)
    else:
        real, calls = llm.model_runner.call, [0]

        def failing(*args: Any) -> Any:
            calls[0] += 1
            if calls[0] == 3:
                raise KeyboardInterrupt
            return real(*args)

        monkeypatch.setattr(llm.model_runner, "call", failing)
    with pytest.raises(KeyboardInterrupt):
        llm.generate([[5, 6, 7], [8, 9]], cold(10), use_tqdm=False)
    assert all_free(llm)
    outputs = llm.generate([[5, 6, 7]], cold(6), use_tqdm=False)
    assert [output["token_ids"] for output in outputs] == [reference(llm, [5, 6, 7], 6)]
    assert all_free(llm)
    if where == "hook":
        handle.remove()


def test_a_failed_call_spares_requests_queued_by_hand(llm: LLM, monkeypatch: Any) -> None:
    by_hand = llm.add_request([5, 6, 7], cold(6))
    llm.step()
    real, calls = llm.model_runner.call, [0]

    def failing(*args: Any) -> Any:
        calls[0] += 1
        if calls[0] == 2:
            raise MemoryError("out of memory")
        return real(*args)

    monkeypatch.setattr(llm.model_runner, "call", failing)
    with pytest.raises(MemoryError):
        llm.generate([[8, 9, 10]], cold(6), use_tqdm=False)
    assert [seq.seq_id for seq in llm.scheduler.waiting] == [by_hand]
    llm.generate([[8, 9, 10]], cold(2), use_tqdm=False)
    result = llm.get_output(by_hand)
    assert result is not None and result["token_ids"] == reference(llm, [5, 6, 7], 6) and all_free(llm)


def test_a_raising_hook_is_reported_once_and_removed(llm: LLM) -> None:
    seen: list[int] = []

    def broken_hook(record: StepRecord) -> None:
        raise ZeroDivisionError("oops")

    llm.add_step_hook(broken_hook)
    handle = llm.add_step_hook(lambda record: seen.append(record.step))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        llm.generate([[5, 6, 7]], cold(4), use_tqdm=False)
    messages = [str(warning.message) for warning in caught if "hook" in str(warning.message)]
    assert len(messages) == 1 and "broken_hook" in messages[0] and "oops" in messages[0]
    assert len(seen) == 4
    handle.remove()
    handle.remove()
    assert llm.scheduler.journal is None, "without hooks nothing is recorded"


def test_the_same_key_replaces_a_hook(llm: LLM) -> None:
    seen: list[str] = []
    llm.add_step_hook(lambda record: seen.append("old"), key="cell")
    handle = llm.add_step_hook(lambda record: seen.append("new"), key="cell")
    llm.generate([[5, 6]], cold(2), use_tqdm=False)
    handle.remove()
    assert seen == ["new", "new"]


def test_calling_the_engine_from_a_hook_is_a_clear_error(llm: LLM) -> None:
    errors: list[BaseException] = []

    def nosy(record: StepRecord) -> None:
        assert llm.snapshot().step == record.step, "looking is allowed"
        for call in (lambda: llm.generate([[5]]), llm.step, lambda: llm.add_request([5]), lambda: llm.abort(0)):
            with pytest.raises(EngineBusyError, match="hook") as caught:
                call()
            errors.append(caught.value)

    with llm.observe(nosy):
        llm.generate([[5, 6]], cold(2), use_tqdm=False)
    assert len(errors) == 8


def test_records_tell_what_happened(tiny_model_dir: Path) -> None:
    with build(tiny_model_dir, scheduling_policy="mixed", max_num_batched_tokens=8) as llm:
        records: list[StepRecord] = []
        llm.observe(records.append)
        outputs = llm.generate([[5, 6, 7], list(range(10, 30))], cold(4), use_tqdm=False)
        assert records[0].queued == ((0, 3), (1, 20))
        assert [record.phase for record in records[:2]] == ["prefill", "mixed"]
        for record in records:
            assert record.num_prefill_tokens == sum(r.num_scheduled_tokens for r in record.rows if r.is_prefill)
            assert record.num_decode_tokens == sum(not r.is_prefill for r in record.rows)
            assert record.num_tokens <= record.token_budget == 8
        sampled = [row.sampled_token_id for record in records for row in record.rows if row.seq_id == 0]
        assert sampled == outputs[0]["token_ids"]
        computed = [token for record in records for row in record.rows if row.seq_id == 1 for token in row.token_ids]
        assert computed == [*range(10, 30), *outputs[1]["token_ids"][:-1]]
        finishes = [finish for record in records for finish in record.finished]
        assert {(f.seq_id, f.reason, f.num_completion_tokens) for f in finishes} == {
            (0, FinishReason.LENGTH, 4),
            (1, FinishReason.LENGTH, 4),
        }


def test_two_engines_interleaved_do_not_touch_each_other(tiny_model_dir: Path, tiny_llama_dir: Path) -> None:
    prompt = list(range(5, 25))
    with build(tiny_model_dir) as small, build(tiny_llama_dir, kvcache_block_size=16) as large:
        expected = [reference(small, prompt, 12), reference(large, prompt, 12)]
        for engine in (small, large):
            engine.add_request(prompt, cold(12))
        results: dict[int, list[int]] = {}
        while not (small.is_finished() and large.is_finished()):
            for number, engine in enumerate((small, large)):
                for _, token_ids in engine.step()[0]:
                    results[number] = token_ids
        assert [results[0], results[1]] == expected


def test_a_seed_repeats_the_noise(tiny_model_dir: Path) -> None:
    runs = []
    for seed in (7, 7, 8):
        with build(tiny_model_dir, seed=seed) as llm:
            runs.append(llm.generate([[5, 6, 7]] * 3, SamplingParams(max_tokens=20), use_tqdm=False))
    assert runs[0] == runs[1] != runs[2]
