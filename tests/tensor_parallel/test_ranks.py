"""Engines of two and three ranks: the same tokens as one rank, and failures that do not end the engine."""

import gc
import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from nanovllm import LLM, ConfigError, SamplingParams
from nanovllm.engine.parts import Parts
from nanovllm.errors import EngineDeadError, RankError
from nanovllm.layers.sampler import Sampler
from nanovllm.worker import tensor_parallel
from nanovllm.worker.message_channel import MessageChannel
from nanovllm.worker.tensor_parallel import GRACE, share_of_cores
from tests.tensor_parallel import faulty
from tests.tensor_parallel.helpers import build, cold_tokens, holdings, is_running, link_of
from tests.tensor_parallel.helpers import faulty as part
from tests.tiny_models import make_tiny_model


@pytest.fixture(scope="module")
def pair(tiny_model_dir: Path) -> Iterator[LLM]:
    """Two ranks whose embedding obeys the signals of faulty.py. No test may end it."""
    with build(tiny_model_dir, parts={"VocabParallelEmbedding": part("Embedding")}) as llm:
        yield llm


@pytest.fixture(scope="module")
def expected(tiny_model_dir: Path) -> list[list[int]]:
    with build(tiny_model_dir, 1) as llm:
        return cold_tokens(llm)


def test_two_ranks_give_the_tokens_of_one(pair: LLM, expected: list[list[int]]) -> None:
    assert cold_tokens(pair) == expected


def test_it_has_one_process_and_one_event_per_rank_above_0(pair: LLM) -> None:
    (process,) = pair.ps
    (event,) = pair.events
    assert process.is_alive() and process.pid != os.getpid() and not event.wait(0)


def test_an_engine_listens_on_loopback_only(pair: LLM) -> None:
    """Sockets of this process that wait for somebody (state 0A), by the address that they wait at."""
    mine = {link.removeprefix("socket:[").rstrip("]") for link in map(link_of, os.listdir("/proc/self/fd"))}
    sockets = [line.split() for name in ("tcp", "tcp6") for line in Path(f"/proc/net/{name}").read_text().splitlines()]
    assert {each[1].split(":")[0] for each in sockets if each[3] == "0A" and each[9] in mine} == {"0100007F"}


def test_a_warm_run_repeats_itself(pair: LLM) -> None:
    params = SamplingParams(temperature=1.0, max_tokens=8, ignore_eos=True)
    assert [len(each["token_ids"]) for each in pair.generate([[3, 4], [5]], params, use_tqdm=False)] == [8, 8]


@pytest.mark.parametrize(
    ("fault", "error", "words"),
    [
        (faulty.FAIL_ON_RANK_0, ZeroDivisionError, "planted on rank 0"),
        (faulty.FAIL_EVERYWHERE, ZeroDivisionError, "planted on rank 0"),
        (faulty.FAIL_ON_RANK_1, RankError, r"rank 1 failed in run(.|\n)*planted on rank 1"),
        (faulty.OUT_OF_MEMORY_ON_RANK_1, RankError, r"rank 1 failed in run(.|\n)*planted: out of memory"),
    ],
)
def test_a_step_that_fails_on_some_rank_is_told_and_the_next_call_is_right(
    pair: LLM, expected: list[list[int]], fault: int, error: type[Exception], words: str
) -> None:
    for _ in range(2):
        with pytest.raises(error, match=words):
            cold_tokens(pair, [[4, 5], [7, *faulty.SIGNAL, fault]])
        assert pair.is_finished()
        assert cold_tokens(pair) == expected
    manager = pair.scheduler.block_manager
    assert manager.num_free_blocks == manager.num_blocks


def test_a_failure_in_the_sampler_concerns_rank_0_alone(
    pair: LLM, expected: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    generation = pair.ranks.collectives.generation

    def broken(*args: object) -> torch.Tensor:
        raise ZeroDivisionError("planted in the sampler")

    with monkeypatch.context() as patch, pytest.raises(ZeroDivisionError):
        patch.setattr(pair.model_runner, "sample", broken)
        cold_tokens(pair)
    assert cold_tokens(pair) == expected
    assert pair.ranks.collectives.generation == generation  # nobody had to be brought together again


@pytest.mark.parametrize("layer", [0, 2])
def test_an_interrupt_in_the_middle_of_a_step(pair: LLM, expected: list[list[int]], layer: int) -> None:
    """A second Ctrl-C, or one during a bare `step()`, may strike between two collectives."""
    layers = pair.model_runner.model.model.layers

    def interrupt(*args: object) -> None:
        raise KeyboardInterrupt

    handle = layers[layer].register_forward_pre_hook(interrupt)
    with pytest.raises(KeyboardInterrupt):
        cold_tokens(pair)
    handle.remove()
    assert cold_tokens(pair) == expected


def test_a_collective_that_a_rank_does_not_come_to_can_be_left(pair: LLM, expected: list[list[int]]) -> None:
    """Gloo waits for five minutes, and in C++, where no interrupt gets through."""
    os.kill(pair.ps[0].pid, signal.SIGSTOP)
    interrupts = [threading.Timer(delay, os.kill, (os.getpid(), signal.SIGINT)) for delay in (1.0, 1.5)]
    started = time.perf_counter()
    try:
        for each in interrupts:
            each.start()
        with pytest.raises(KeyboardInterrupt):
            cold_tokens(pair)
        assert time.perf_counter() - started < 10
    finally:
        for each in interrupts:
            each.cancel()
        os.kill(pair.ps[0].pid, signal.SIGCONT)
    assert cold_tokens(pair) == expected


def test_an_interrupt_after_the_ranks_were_told_and_before_they_meet(
    pair: LLM, expected: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The step before failed, so they are to meet anew; they wait for rank 0, which does not come."""

    def interrupt(*args: object) -> None:
        raise KeyboardInterrupt

    for name in ("forward", "_join"):
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(*((pair.model_runner.model, name) if name == "forward" else (pair.ranks, name)), interrupt)
            cold_tokens(pair)
    assert cold_tokens(pair) == expected


def test_the_other_ranks_do_not_see_an_interrupt(pair: LLM, expected: list[list[int]]) -> None:
    os.kill(pair.ps[0].pid, signal.SIGINT)
    assert cold_tokens(pair) == expected
    assert pair.ps[0].is_alive()


def test_an_error_that_nobody_waited_for_is_told_at_the_next_step(pair: LLM, expected: list[list[int]]) -> None:
    with pytest.raises(RankError, match="no_such_method"):
        with pair.ranks.running("no_such_method", ()):
            pass
        cold_tokens(pair)
        cold_tokens(pair)
    assert cold_tokens(pair) == expected


def test_the_caller_keeps_its_signals_and_its_threads(pair: LLM, expected: list[list[int]]) -> None:
    assert signal.SIGINT not in signal.pthread_sigmask(signal.SIG_BLOCK, ()), "masked only while a rank is started"
    before = torch.get_num_threads()
    torch.set_num_threads(3)  # more than a rank's share of most machines
    try:
        assert cold_tokens(pair) == expected
        assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize(
    ("cores", "threads", "size", "share"), [(8, 8, 2, 4), (8, 2, 2, 2), (2, 8, 4, 1), (64, 64, 8, 8)]
)
def test_ranks_share_the_cores(
    cores: int, threads: int, size: int, share: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: 64)  # of which this process may use some
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(cores)))
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    assert share_of_cores(SimpleNamespace(size=size)) == share  # type: ignore[arg-type]


def test_a_forked_copy_of_the_caller_does_not_end_the_ranks(
    pair: LLM, expected: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(os, "getpid", lambda: -1)  # as the copy sees itself, whose finalizers run as well
        pair.ranks.stop()
        with pytest.raises(EngineDeadError, match="forked copy"):
            pair.ranks.check()
        with pair.ranks.running("exit", ()):  # nothing is sent
            pass
    assert pair.ps[0].is_alive() and cold_tokens(pair) == expected


def test_waiting_for_a_rank_ends(pair: LLM, expected: list[list[int]], monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch, pytest.raises(EngineDeadError, match=r"ranks \[1\] are not ready after"):
        patch.setattr(pair.ranks._ranks[0], "stage", "starting")
        pair.ranks.wait_ready(0.01)
    with monkeypatch.context() as patch, pytest.raises(EngineDeadError, match="were stopped"):
        patch.setattr(pair.ranks, "_is_stopped", True)
        pair.ranks.check()
    assert cold_tokens(pair) == expected


def test_joining_can_be_left_when_a_rank_dies(
    pair: LLM, expected: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A peer that is gone does not come; waiting for it cannot be interrupted, and is left to its thread."""
    over = threading.Event()

    def dead() -> None:
        raise EngineDeadError("rank 1 died")

    with monkeypatch.context() as patch, pytest.raises(EngineDeadError, match="rank 1 died"):
        patch.setattr(pair.ranks, "collectives", SimpleNamespace(generation=-1, join=lambda generation: over.wait(20)))
        patch.setattr(pair.ranks, "check", dead)
        started = time.perf_counter()
        pair.ranks._join()
    over.set()
    assert time.perf_counter() - started < 10
    assert cold_tokens(pair) == expected


def test_only_the_first_failure_of_this_step_is_told(
    pair: LLM, expected: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What else fails is a consequence, and what an older step left behind is past."""
    ranks = pair.ranks
    ranks._on_report(ranks._ranks[0], "failed", ranks._generation - 1, "an older step")
    assert cold_tokens(pair) == expected
    ranks._on_report(ranks._ranks[0], "failed", ranks._generation, "the cause")
    ranks._on_report(ranks._ranks[0], "failed", ranks._generation, "the consequence")
    with pytest.raises(RankError, match="the cause"):
        cold_tokens(pair)
    assert cold_tokens(pair) == expected


def test_ranks_are_asked_before_and_after_a_step(
    pair: LLM, expected: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a GPU, a collective that was called back from waiting for a dead peer returns numbers, but wrong ones."""
    ranks = pair.ranks
    ranks._on_report(ranks._ranks[0], "failed", ranks._generation, "meanwhile")
    with monkeypatch.context() as patch, pytest.raises(RankError, match="meanwhile"):
        patch.setattr(ranks.channel, "write", lambda *message: pytest.fail("the others were told"))
        with ranks.running("run", ()):
            pytest.fail("the step began")
    with pytest.raises(RankError, match="in the step"):
        with ranks.running("__setattr__", ("unused", 1)):
            ranks._on_report(ranks._ranks[0], "failed", ranks._generation, "in the step")
    assert cold_tokens(pair) == expected


def test_the_reason_of_a_failure_is_waited_for(
    pair: LLM, expected: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The connection breaks before the report of what broke it has been read."""
    real = pair.ranks._on_report

    def late(*report: object) -> None:
        time.sleep(0.3)
        real(*report)

    with monkeypatch.context() as patch, pytest.raises(RankError, match="planted on rank 1"):
        patch.setattr(pair.ranks, "_on_report", late)
        cold_tokens(pair, [[*faulty.SIGNAL, faulty.FAIL_ON_RANK_1]])
    assert cold_tokens(pair) == expected


def test_a_message_of_ten_megabytes(pair: LLM, expected: list[list[int]]) -> None:
    with pair.ranks.running("__setattr__", ("big", np.ones(10 << 20, np.uint8))):
        pass
    assert cold_tokens(pair) == expected


def test_another_engine_beside_it(pair: LLM, tiny_model_dir: Path, expected: list[list[int]]) -> None:
    with build(tiny_model_dir, kvcache_block_size=8, num_kvcache_blocks=200) as other:
        results: dict[str, list[list[int]]] = {}
        threads = [threading.Thread(target=lambda name, llm: results.update({name: cold_tokens(llm)}), args=item)
                   for item in {"pair": pair, "other": other}.items()]  # fmt: skip
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert results == {"pair": expected, "other": expected}
    assert cold_tokens(pair) == expected


def test_three_ranks_size_their_pools_alike_and_leave_nothing(pair: LLM, tmp_path: Path) -> None:
    """Six heads: one, two and three ranks. The pool is sized from memory, by the rank that can hold the least.

    pair: there was an engine before, with what Python and torch make at the first use and keep.
    """
    model = make_tiny_model(tmp_path, num_attention_heads=6, num_key_value_heads=6, intermediate_size=96)
    with build(model, 1) as llm:
        expected = cold_tokens(llm)
    MessageChannel.create(2).close()  # Python keeps the first memory that it shares beside that of `pair`
    gc.collect()
    before, threads = holdings(), set(threading.enumerate())
    llm = build(model, 3, num_kvcache_blocks=-1, kv_cache_memory=1 << 22)
    pids = [process.pid for process in llm.ps]
    assert cold_tokens(llm) == expected
    # 2 * 3 layers * 16 tokens * 2 heads * 32 * 4 bytes = 24 KiB a block on each rank
    assert llm.config.num_kvcache_blocks == (1 << 22) // (24 << 10)
    assert llm.model_runner.kv_cache.shape[2] == llm.config.num_kvcache_blocks
    with pytest.raises(RankError):
        with llm.ranks.running("no_such_method", ()):
            pass
        cold_tokens(llm)
    started = time.perf_counter()
    llm.exit()
    assert time.perf_counter() - started < GRACE, "the others end of themselves, also after a failed step"
    assert "nanovllm-ranks" not in {thread.name for thread in set(threading.enumerate()) - threads}
    llm.exit()
    assert not any(map(is_running, pids))
    with pytest.raises(EngineDeadError):
        cold_tokens(llm)
    del llm
    gc.collect()
    assert holdings() == before


def test_replaced_parts_reach_every_rank(tiny_model_dir: Path, expected: list[list[int]]) -> None:
    parts = {"SiluAndMul.forward": part("ReluAndMul.forward"), "MessageChannel": part("SlowChannel")}
    with build(tiny_model_dir, 1, parts) as llm:
        different = cold_tokens(llm)
    assert different != expected
    with build(tiny_model_dir, 2, parts) as llm:
        assert cold_tokens(llm) == different
        assert type(llm.ranks.channel).__name__ == "SlowChannel"


@pytest.mark.slow
def test_the_default_model_on_three_ranks(default_model_dir: Path) -> None:
    """Nine heads and three kv heads: one rank or three."""
    prompts = ["The capital of France is", "Once upon a time", [1, 2, 3] * 60]
    with build(default_model_dir, 1, num_kvcache_blocks=128) as llm:
        expected = cold_tokens(llm, prompts, 16)
    with build(default_model_dir, 3, num_kvcache_blocks=128, kv_cache_memory=1 << 28) as llm:
        # Sums in another order: where two logits are within float noise, another token may win. Here none are.
        assert cold_tokens(llm, prompts, 16) == expected
    with pytest.raises(ConfigError, match="sizes that do: 1, 3"):
        build(default_model_dir, 2)


def test_what_cannot_work_is_refused_before_a_process_is_started(
    tiny_model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = holdings()["children"]
    monkeypatch.setattr(tensor_parallel, "RankGroup", lambda *args: pytest.fail("a process was started"))
    with pytest.raises(ConfigError, match="sizes that do: 1, 2"):
        build(tiny_model_dir, 4)
    with pytest.raises(ConfigError, match="'Sampler' is a live object"):
        LLM(str(tiny_model_dir), tensor_parallel_size=2, device="cpu", parts=Parts({"Sampler": Sampler}))
    if not torch.cuda.is_available():
        with pytest.raises(ConfigError, match="no CUDA device"):
            build(tiny_model_dir, device="cuda")
    assert holdings()["children"] == before
