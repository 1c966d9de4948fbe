"""The keys of chapter 2's quiz, recomputed from the engine."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from nanovllm import LLM, SamplingParams
from nanovllm.config import Config
from nanovllm.engine.parts import Parts
from nanovllm.engine.scheduler import Scheduler
from nanovllm.engine.sequence import Sequence
from nanovllm.errors import ConfigError
from nanovllm.workbook.oracles.scheduler import Options
from nanovllm.workbook.quizzes import answer

SMALL: dict[str, Any] = {
    "attention_backend": "torch", "kvcache_block_size": 4, "num_kvcache_blocks": 60, "dtype": "float32", "seed": 3,
}  # fmt: skip


@pytest.fixture
def llm(tiny_model_dir: Path) -> Iterator[LLM]:
    with LLM(str(tiny_model_dir), **SMALL) as engine:
        yield engine


def accepts(number: int, value: object) -> bool:
    return answer("2", number, value).text.startswith("✓")


def endless(max_tokens: int) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, ignore_eos=True)


def test_question_1_the_count_of_a_prefill(llm: LLM) -> None:
    llm.generate([[1, 2, 3, 4, 5]], endless(1), use_tqdm=False)
    llm.scheduler.block_manager.num_hit_tokens = 0
    for prompt in (range(50, 57), range(60, 65), [1, 2, 3, 4, *range(70, 75)]):
        llm.add_request(list(prompt), endless(3))
    _, num_tokens = llm.step()
    assert llm.scheduler.block_manager.num_hit_tokens == 4
    assert accepts(1, num_tokens)
    assert not accepts(1, 21)


def test_question_2_steps_of_a_generate(llm: LLM) -> None:
    before = llm.step_count
    llm.generate([[1, 2, 3], [4, 5, 6, 7]], endless(5), use_tqdm=False)
    assert accepts(2, llm.step_count - before)
    assert not accepts(2, 6)


def test_question_3_context_is_full(tiny_model_dir: Path) -> None:
    with LLM(str(tiny_model_dir), **SMALL, max_model_len=64) as llm:
        (result,) = llm.generate([list(range(60))], endless(100), use_tqdm=False)
    assert result.finish_reason == "length"
    assert accepts(3, len(result["token_ids"]))
    assert not accepts(3, 100)


def test_question_4_a_small_block_size(tiny_model_dir: Path) -> None:
    with pytest.raises(ConfigError, match="attention_backend"):
        Config(str(tiny_model_dir), kvcache_block_size=16)
    assert accepts(4, "c")


def test_question_5_two_ways_to_end() -> None:
    scheduler = Scheduler(Options(eos=2))
    reasons = []
    for generated in ([5, 6, 2], [5, 6, 7]):
        seq = Sequence([1], SamplingParams(max_tokens=3))
        for token in generated:
            seq.append_token(token)
        reasons.append(str(scheduler.stop_reason(seq)))
    assert reasons == ["stop", "length"]
    assert accepts(5, "b")


def test_question_6_order_of_a_generate(tiny_model_dir: Path) -> None:
    calls: list[str] = []
    with LLM(str(tiny_model_dir), parts=Parts({"LLM": spying(calls)}), **SMALL) as llm:
        for owner, name, letter in (
            (llm.scheduler, "add", "d"), (llm.scheduler, "schedule", "a"), (llm.scheduler, "postprocess", "c"),
            (llm.model_runner, "call", "e"),
        ):  # fmt: skip
            setattr(owner, name, noting(calls, letter, getattr(owner, name)))
        llm.generate("Hello", endless(2), use_tqdm=False)
        made = list(dict.fromkeys(calls))
    assert accepts(6, made), made
    assert not accepts(6, "d b a e c f".split())


def spying(calls: list[str]) -> type[LLM]:
    class Spy(LLM):
        """Writes down the letter of the quiz for every step of a generate."""

        encode = noting(calls, "b", LLM.encode)
        decode = noting(calls, "f", LLM.decode)

    return Spy


def noting(calls: list[str], letter: str, function: Callable[..., Any]) -> Callable[..., Any]:
    def noted(*args: Any, **options: Any) -> Any:
        calls.append(letter)
        return function(*args, **options)

    return noted
