"""Something raises in the middle of a step: this call's requests are gone, and the engine is usable at once."""

import inspect
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from nanovllm import LLM, Parts
from nanovllm.engine.block_manager import BlockManager
from nanovllm.engine.scheduler import Scheduler
from nanovllm.engine.sequence import Sequence
from nanovllm.layers.activation import SiluAndMul
from nanovllm.layers.sampler import Sampler
from nanovllm.worker.input_batch import InputBatchBuilder
from tests.faults.engines import PROMPTS, assert_whole, build, cold, token_ids


class Boom(Exception):
    pass


class Fuse:
    """Raises `error` on the n-th call from `arm` on."""

    def __init__(self) -> None:
        self.left = 0
        self.error: BaseException = Boom("broken")

    def arm(self, count: int, error: BaseException) -> None:
        self.left, self.error = count, error

    def burn(self) -> None:
        self.left -= 1
        if self.left == 0:
            raise self.error


def with_fuse(method: Any, fuse: Fuse) -> Any:
    def wrapped(*args: Any, **options: Any) -> Any:
        fuse.burn()
        return method(*args, **options)

    return wrapped


@pytest.fixture(scope="module")
def answer(tiny_model_dir: Path) -> list[list[int]]:
    with build(tiny_model_dir) as alone:
        return [token_ids(alone.generate([prompt], cold(6), use_tqdm=False))[0] for prompt in PROMPTS]


def generate(llm: LLM) -> list[list[int]]:
    return token_ids(llm.generate(PROMPTS, cold(6), use_tqdm=False))


ERRORS = [
    torch.OutOfMemoryError("CUDA out of memory"),
    RuntimeError("DefaultCPUAllocator: can't allocate memory"),
    MemoryError(),
    KeyboardInterrupt(),
    SystemExit(3),
]


@pytest.mark.parametrize("where", ["Sampler.forward", "SiluAndMul.forward", "InputBatchBuilder.build"])
@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
def test_in_the_model_and_the_sampler(
    tiny_model_dir: Path, answer: list[list[int]], where: str, error: BaseException
) -> None:
    fuse = Fuse()
    owner = {"Sampler": Sampler, "SiluAndMul": SiluAndMul, "InputBatchBuilder": InputBatchBuilder}[where.split(".")[0]]
    method = with_fuse(getattr(owner, where.split(".")[1]), fuse)
    with build(tiny_model_dir, Parts({where: method}), num_kvcache_blocks=9, max_num_batched_tokens=8) as llm:
        for count in (1, 2, 5):
            fuse.arm(count, error)
            with pytest.raises(type(error)):
                generate(llm)
            assert_whole(llm)
            assert generate(llm) == answer
            assert_whole(llm)


@pytest.fixture(scope="module")
def tight(tiny_model_dir: Path) -> Iterator[LLM]:
    """So small that blocks are evicted and sequences preempted."""
    with build(tiny_model_dir, num_kvcache_blocks=7, max_num_batched_tokens=8) as llm:
        llm.observe(lambda record: None)  # the journal is kept as well
        yield llm


def seams() -> list[tuple[type, str]]:
    """Every method that a learner may replace with one that fails."""
    found = []
    for owner in (BlockManager, Scheduler, Sequence):
        for name, value in vars(owner).items():
            if inspect.isfunction(value) and not name.startswith("_"):
                found.append((owner, name))
    return found


@pytest.mark.parametrize(("owner", "name"), seams(), ids=lambda value: getattr(value, "__name__", value))
def test_in_any_method_of_the_bookkeeping(
    tight: LLM, answer: list[list[int]], monkeypatch: pytest.MonkeyPatch, owner: type, name: str
) -> None:
    """Also in those that the repair itself would like to use."""
    for count in (1, 3, 8):
        fuse = Fuse()
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, with_fuse(getattr(owner, name), fuse))
            fuse.arm(count, Boom("broken"))
            try:
                generate(tight)
            except Boom:
                assert fuse.left <= 0
        assert_whole(tight)
        assert generate(tight) == answer


@pytest.mark.parametrize("name", ["abort", "free", "release"])
def test_in_what_every_repair_uses(
    tight: LLM, answer: list[list[int]], monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """The method fails for good, and so does the repair that uses it; there is another one."""
    owner = Scheduler if name == "abort" else BlockManager

    def broken(*_args: Any) -> None:
        raise Boom("for good")

    def interrupt(record: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, tight.observe(interrupt):
        patch.setattr(owner, name, broken)
        with pytest.raises(KeyboardInterrupt):
            generate(tight)
    assert_whole(tight)
    assert generate(tight) == answer


def test_a_main_loop_that_ends_too_early(tiny_model_dir: Path, answer: list[list[int]]) -> None:
    def lazy(seq_ids: Any, step: Any, *_others: Any) -> list[list[int]]:
        step()
        return [[] for _ in seq_ids]

    with build(tiny_model_dir, Parts({"LLMEngine.drive": staticmethod(lazy)})) as llm:
        with pytest.raises(AssertionError, match="main loop"):
            generate(llm)
        assert_whole(llm)


@pytest.mark.parametrize("policy", ["prefill_first", "mixed"])
def test_a_request_by_hand_survives_the_failure_of_a_call(
    tiny_model_dir: Path, answer: list[list[int]], policy: str
) -> None:
    fuse = Fuse()
    parts = Parts({"Sampler.forward": with_fuse(Sampler.forward, fuse)})
    with build(tiny_model_dir, parts, scheduling_policy=policy, max_num_batched_tokens=8) as llm:
        for count in (1, 2, 4):
            number = llm.add_request(PROMPTS[0], cold(6))
            fuse.arm(count, Boom("broken"))
            with pytest.raises(Boom):
                llm.generate(PROMPTS[1:], cold(6), use_tqdm=False)
            assert [seq.seq_id for seq in llm.scheduler.waiting] == [number]
            assert token_ids(llm.generate(PROMPTS[1:], cold(6), use_tqdm=False)) == answer[1:]
            output = llm.get_output(number)
            assert output is not None and output["token_ids"] == answer[0]
            assert_whole(llm)


def test_a_failed_step_by_hand_drops_the_requests_of_that_step(tiny_model_dir: Path, answer: list[list[int]]) -> None:
    fuse = Fuse()
    with build(tiny_model_dir, Parts({"Sampler.forward": with_fuse(Sampler.forward, fuse)}), max_num_seqs=1) as llm:
        llm.add_request(PROMPTS[0], cold(6))
        other = llm.add_request(PROMPTS[1], cold(6))
        fuse.arm(2, Boom("broken"))
        llm.step()
        with pytest.raises(Boom):
            llm.step()
        assert [seq.seq_id for seq in llm.scheduler.waiting] == [other]
        results: dict[int, list[int]] = {}
        while not llm.is_finished():
            results.update(llm.step()[0])
        assert results == {other: answer[1]}
        assert_whole(llm)


def test_a_step_by_hand_that_cannot_be_planned(
    tiny_model_dir: Path, answer: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody knows whose fault it is; with all requests still there, the next step would fail like this one."""

    def broken(*_args: Any) -> None:
        raise Boom("broken")

    with build(tiny_model_dir) as llm:
        for prompt in PROMPTS:
            llm.add_request(prompt, cold(6))
        with monkeypatch.context() as patch, pytest.raises(Boom):
            patch.setattr(llm.scheduler, "schedule", broken)
            llm.step()
        assert_whole(llm)
        assert generate(llm) == answer


def test_a_stream_that_fails(tiny_model_dir: Path, answer: list[list[int]]) -> None:
    fuse = Fuse()
    with build(tiny_model_dir, Parts({"Sampler.forward": with_fuse(Sampler.forward, fuse)})) as llm:
        fuse.arm(3, Boom("broken"))
        with pytest.raises(Boom):
            list(llm.stream(PROMPTS[0], cold(6)))
        assert_whole(llm)
        assert generate(llm) == answer


@pytest.mark.parametrize("seam", ["Scheduler.__init__", "Sampler.__init__", "KVCache", "BlockManager.__init__"])
def test_an_engine_that_cannot_be_built_leaves_nothing(tiny_model_dir: Path, seam: str) -> None:
    def broken(self: Any, *args: Any, **options: Any) -> None:
        raise Boom("broken")

    seams = {seam: broken} if "." in seam else {"ModelRunner._allocate_kv_cache": broken}
    with pytest.raises(Boom):
        build(tiny_model_dir, Parts(seams))
    with build(tiny_model_dir) as llm:
        assert len(generate(llm)) == 3
