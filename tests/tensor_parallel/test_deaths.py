"""A rank that dies, whenever it may: the caller gets an error that says so in time, and nothing is left behind."""

import gc
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from tempfile import TemporaryFile
from types import SimpleNamespace
from typing import Any

import pytest

from nanovllm import LLM, EngineDeadError
from nanovllm.engine import llm_engine
from nanovllm.worker import tensor_parallel
from nanovllm.worker.tensor_parallel import GRACE, RankGroup, RankProcess
from tests.tensor_parallel import faulty
from tests.tensor_parallel.helpers import PROMPTS, build, cold_tokens, holdings, is_running
from tests.tensor_parallel.helpers import faulty as part
from tests.tiny_models import make_tiny_model

PATIENCE = 10.0  # seconds, the promise

pytestmark = pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="looks into /proc")


@pytest.fixture(scope="module")
def once_per_process(tiny_model_dir: Path) -> None:
    """What Python and torch make at the first use and keep: the resource tracker, a pool of shared memory."""
    with build(tiny_model_dir) as llm:
        cold_tokens(llm)


@pytest.fixture(autouse=True)
def nothing_is_left_behind(once_per_process: None) -> Iterator[None]:
    gc.collect()
    before = holdings()
    yield
    gc.collect()
    assert holdings() == before


def dies(act: Callable[[], Any], *words: str) -> None:
    """`act` raises EngineDeadError in time, with these words in it."""
    started = time.perf_counter()
    with pytest.raises(EngineDeadError) as caught:
        act()
    assert time.perf_counter() - started < PATIENCE
    for word in ("rank 1", *words):
        assert word in str(caught.value)


def closed(llm: LLM) -> None:
    """The engine has given its memory back, and says that it is closed, at once and for good."""
    assert llm.model_runner.model is None and llm.model_runner.kv_cache is None
    dies_at_once = time.perf_counter()
    with pytest.raises(EngineDeadError):
        cold_tokens(llm)
    llm.exit()
    assert time.perf_counter() - dies_at_once < 5  # at once, on a busy machine
    assert not any(is_running(process.pid) for process in llm.ps)
    ranks = llm.ranks  # whoever keeps the engine keeps nothing open with it: no pipe, file, port or shared memory
    assert all(each.reports.closed and each.stderr.closed for each in ranks._ranks)
    assert ranks.collectives._store is None and ranks.channel.memory is None
    assert all(event._reader.closed and event._writer.closed for event in ranks.channel.events)


def test_killed_before_the_first_step(tiny_model_dir: Path) -> None:
    llm = build(tiny_model_dir)
    os.kill(llm.ps[0].pid, signal.SIGKILL)
    dies(lambda: cold_tokens(llm), f"process {llm.ps[0].pid}", "was killed by SIGKILL while ready")
    closed(llm)


@pytest.mark.slow
def test_killed_while_idle(tiny_model_dir: Path) -> None:
    llm = build(tiny_model_dir)
    cold_tokens(llm)
    os.kill(llm.ps[0].pid, signal.SIGKILL)
    llm.ps[0].join()
    dies(lambda: cold_tokens(llm), "was killed by SIGKILL")
    closed(llm)


@pytest.mark.parametrize("layer", [pytest.param(0, marks=pytest.mark.slow), 2])
def test_killed_in_a_step_that_rank_0_is_in_too(tiny_model_dir: Path, layer: int) -> None:
    llm = build(tiny_model_dir)

    def kill(*args: object) -> None:
        os.kill(llm.ps[0].pid, signal.SIGKILL)

    llm.model_runner.model.model.layers[layer].register_forward_pre_hook(kill)
    dies(lambda: cold_tokens(llm), "was killed by SIGKILL")
    closed(llm)


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        pytest.param(faulty.KILL, ["was killed by SIGKILL"], marks=pytest.mark.slow),
        pytest.param(faulty.SEGFAULT, ["was killed by SIGSEGV", "faulty.py", "in obey"], marks=pytest.mark.slow),
        (faulty.LAST_WORDS, ["ended with exit code 3", "goodbye, cruel world"]),
    ],
)
def test_dies_of_itself_in_a_step(tiny_model_dir: Path, fault: int, words: list[str]) -> None:
    llm = build(tiny_model_dir, parts={"VocabParallelEmbedding": part("Embedding")})
    dies(lambda: cold_tokens(llm, [*PROMPTS, [*faulty.SIGNAL, fault]]), *words)
    closed(llm)


@pytest.mark.parametrize("delay", [0.0, *(pytest.param(each, marks=pytest.mark.slow) for each in (0.3, 1.0, 2.0))])
def test_killed_while_it_starts(tiny_model_dir: Path, delay: float, monkeypatch: pytest.MonkeyPatch) -> None:
    start = RankGroup._start
    killed_at: list[float] = []

    def kill(each: RankProcess) -> None:
        killed_at.append(time.perf_counter())
        each.process.kill()

    def start_and_kill(self: RankGroup, *args: Any) -> RankProcess:
        each = start(self, *args)
        threading.Timer(delay, kill, [each]).start() if delay else kill(each)
        return each

    monkeypatch.setattr(RankGroup, "_start", start_and_kill)
    with pytest.raises(EngineDeadError, match="rank 1 .* was killed by SIGKILL while (starting|connecting)"):
        build(tiny_model_dir)
    assert time.perf_counter() - killed_at[0] < PATIENCE


@pytest.mark.parametrize(
    ("name", "words"),
    [
        pytest.param("DiesAtConstruction", ["was killed by SIGKILL while connecting"], marks=pytest.mark.slow),
        ("FailsAtConstruction", ["exit code 1 while connecting", "ZeroDivisionError: planted at construction"]),
    ],
)
def test_dies_while_it_builds_its_runner(tiny_model_dir: Path, name: str, words: list[str]) -> None:
    with pytest.raises(EngineDeadError) as caught:
        build(tiny_model_dir, parts={"RMSNorm": part(name)})
    for word in ("rank 1", *words):
        assert word in str(caught.value)


def test_an_engine_that_cannot_be_built_ends_its_ranks(tiny_model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    failed_at = []

    def broken(*_args: Any) -> None:
        failed_at.append(time.perf_counter())
        raise ZeroDivisionError("planted: no tokenizer")

    before = holdings()["children"]
    monkeypatch.setattr(llm_engine, "load_tokenizer", broken)
    with pytest.raises(ZeroDivisionError, match="no tokenizer") as caught:
        build(tiny_model_dir)
    assert time.perf_counter() - failed_at[0] < GRACE, "nobody told the rank to end, so nobody waits for it"
    assert holdings()["children"] == before, f"at once, and not when {caught.value} is forgotten"


def test_one_process_cannot_be_started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first is ended again."""
    model = make_tiny_model(tmp_path, num_attention_heads=6, num_key_value_heads=6, intermediate_size=96)
    start = RankGroup._start

    def fail_at_rank_2(self: RankGroup, config: Any, rank: int, *args: Any) -> RankProcess:
        if rank == 2:
            raise BlockingIOError("planted: no more processes")
        return start(self, config, rank, *args)

    monkeypatch.setattr(RankGroup, "_start", fail_at_rank_2)
    with pytest.raises(BlockingIOError, match="no more processes"):
        build(model, 3)


@pytest.mark.slow
def test_one_of_three_dies_and_the_caller_waits_for_the_other(tmp_path: Path) -> None:
    """Rank 0 waits in an all-reduce for rank 2, which waits for rank 1: only ending rank 2 brings rank 0 out of it."""
    model = make_tiny_model(tmp_path, num_attention_heads=6, num_key_value_heads=6, intermediate_size=96)
    llm = build(model, 3, parts={"VocabParallelEmbedding": part("Embedding")})
    dies(lambda: cold_tokens(llm, [[*faulty.SIGNAL, faulty.KILL]]), "was killed by SIGKILL")
    closed(llm)


def test_a_rank_that_does_not_end_is_ended(tiny_model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tensor_parallel, "GRACE", 0.5)
    llm = build(tiny_model_dir)
    os.kill(llm.ps[0].pid, signal.SIGSTOP)
    monkeypatch.setattr(llm.ranks, "_on_end", lambda each: time.sleep(0.5))
    llm.exit()
    assert not is_running(llm.ps[0].pid)
    assert not llm.ranks._watcher.is_alive(), "its pipes are closed only when nobody listens to them any more"


def test_ranks_that_cannot_be_connected_any_more(tiny_model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(generation: int) -> None:
        raise RuntimeError("planted: no route to host")

    llm = build(tiny_model_dir)
    monkeypatch.setattr(llm.ranks.collectives, "join", broken)
    llm.ranks._regroup()  # as after a failed step
    with pytest.raises(EngineDeadError, match="cannot be connected: planted: no route to host"):
        cold_tokens(llm)
    llm.ranks._die(EngineDeadError("a consequence"))
    with pytest.raises(EngineDeadError, match="cannot be connected"):
        llm.ranks.check()
    closed(llm)


def test_a_death_ends_all_ranks_at_once(tiny_model_dir: Path) -> None:
    """Not only when the caller comes by: a rank may wait for the dead one, and rank 0 for that rank."""
    llm = build(tiny_model_dir)
    llm.ranks._die(EngineDeadError("planted: rank 2 died"))
    llm.ps[0].join(PATIENCE)
    assert not is_running(llm.ps[0].pid)
    with pytest.raises(EngineDeadError, match="rank 2 died"):
        cold_tokens(llm)
    closed(llm)


def test_last_words_are_the_last_ones_and_need_not_be_text() -> None:
    with TemporaryFile() as stderr:
        stderr.write(b"first words" + b"\xff" * tensor_parallel.LAST_WORDS + b"goodbye")
        process = SimpleNamespace(exitcode=-9, pid=5)
        text = RankProcess(1, process, None, stderr, "ready").obituary()  # type: ignore[arg-type]
    assert text.startswith("rank 1 (process 5) was killed by SIGKILL while ready. Its last words:\n")
    assert text.endswith("goodbye") and "first words" not in text


def test_the_exit_code_may_come_through_another_thread() -> None:
    """Of two threads that join a process one gets its code; the other finds None until that one has set it."""

    class Process:
        pid, codes = 5, [None, None, -9]

        @property
        def exitcode(self) -> int | None:
            return self.codes.pop(0)

    with TemporaryFile() as stderr:
        text = RankProcess(1, Process(), None, stderr, "ready").obituary()  # type: ignore[arg-type]
    assert "was killed by SIGKILL" in text


def test_an_end_that_is_interrupted_can_be_asked_for_again(
    tiny_model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = build(tiny_model_dir)
    process, join = llm.ps[0], llm.ps[0].join

    def interrupted(timeout: float | None = None) -> None:
        monkeypatch.setattr(process, "join", join)
        raise KeyboardInterrupt

    monkeypatch.setattr(process, "join", interrupted)
    with pytest.raises(KeyboardInterrupt):
        llm.ranks.stop()
    llm.ranks.stop()
    assert not is_running(process.pid)
    llm.exit()


def test_two_interrupts_while_it_is_built_leave_no_rank(tiny_model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stop, ranks = RankGroup.stop, []

    def press_again(group: RankGroup) -> None:
        os.kill(os.getpid(), signal.SIGINT)
        stop(group)
        ranks.extend(group.ps)

    def press(group: RankGroup) -> None:
        os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(RankGroup, "wait_ready", press)
    monkeypatch.setattr(RankGroup, "stop", press_again)
    with pytest.raises(KeyboardInterrupt):
        build(tiny_model_dir)
    assert ranks and not any(is_running(process.pid) for process in ranks)


def test_an_engine_that_is_forgotten_ends_its_ranks(tiny_model_dir: Path) -> None:
    llm = build(tiny_model_dir)
    pid = llm.ps[0].pid
    llm.myself = llm  # a cycle
    thread = threading.Thread(target=gc.collect)
    del llm
    thread.start()
    thread.join()
    assert not is_running(pid)


@pytest.mark.slow
def test_ten_engines_one_after_another(tiny_model_dir: Path) -> None:
    for _ in range(10):
        with build(tiny_model_dir) as llm:
            cold_tokens(llm, [[1, 2, 3]], 2)
