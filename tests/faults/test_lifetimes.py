"""What is left of an engine that nobody closed: nothing. And of streams that nobody read to the end: nothing either."""

import gc
import subprocess
import sys
import threading
import warnings
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from nanovllm import LLM, EngineBusyError, EngineDeadError, Parts
from nanovllm.layers.sampler import Sampler
from tests.faults.engines import PROMPTS, assert_whole, build, child_processes, cold, resident_bytes, token_ids

MESSAGES = [{"role": "user", "content": "the quick brown fox"}]


def traces(llm: LLM) -> list[weakref.ref[Any]]:
    """Weak references to what takes memory."""
    parameter = next(llm.model_runner.model.parameters())
    return [weakref.ref(each) for each in (llm, llm.model_runner, llm.model_runner.kv_cache, parameter, llm.scheduler)]


def plain(path: Path) -> list[weakref.ref[Any]]:
    llm = build(path)
    llm.generate(PROMPTS, cold(2), use_tqdm=False)
    return traces(llm)


def itself(path: Path) -> list[weakref.ref[Any]]:
    llm = build(path)
    llm.me = llm  # type: ignore[attr-defined]
    return traces(llm)


def hook(path: Path) -> list[weakref.ref[Any]]:
    llm = build(path)
    llm.add_step_hook(lambda record: llm.snapshot())
    llm.generate(PROMPTS, cold(2), use_tqdm=False)
    return traces(llm)


def part(path: Path) -> list[weakref.ref[Any]]:
    """A learner's sampler that knows the engine it is part of."""
    engines: list[LLM] = []

    class Nosy(Sampler):
        def forward(self, *args: Any, **options: Any) -> torch.Tensor:
            assert engines[0].step_count >= 0
            return super().forward(*args, **options)

    engines.append(build(path, Parts({"Sampler": Nosy})))
    engines[0].generate(PROMPTS, cold(2), use_tqdm=False)
    return traces(engines[0])


def stream(path: Path) -> list[weakref.ref[Any]]:
    llm = build(path)
    llm.pieces = llm.stream(PROMPTS[0], cold(9))  # type: ignore[attr-defined]
    next(llm.pieces)  # type: ignore[attr-defined]
    return traces(llm)


def error(path: Path) -> list[weakref.ref[Any]]:
    llm = build(path)
    llm.add_step_hook(lambda record: [][0], key="broken")
    with warnings.catch_warnings(record=True):
        warnings.simplefilter("always")
        llm.generate(PROMPTS, cold(2), use_tqdm=False)
    return traces(llm)


WAYS = [plain, itself, hook, part, stream, error]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("elsewhere", [False, True], ids=["here", "in another thread"])
def test_an_engine_that_goes_out_of_scope(
    tiny_model_dir: Path, way: Callable[[Path], list[weakref.ref[Any]]], elsewhere: bool
) -> None:
    gc.disable()  # so that the collector runs where the test says
    try:
        left = way(tiny_model_dir)
        if elsewhere:
            thread = threading.Thread(target=gc.collect)
            thread.start()
            thread.join()
        elif way is not plain:
            gc.collect()
        assert [ref() for ref in left] == [None] * len(left)
    finally:
        gc.enable()


def test_a_handle_keeps_no_engine_alive(tiny_model_dir: Path) -> None:
    """A notebook keeps the value of every cell, and `llm.add_step_hook(…)` may be one."""
    llm = build(tiny_model_dir)
    handle = llm.add_step_hook(lambda record: None)
    left = traces(llm)
    del llm
    gc.collect()
    assert [ref() for ref in left] == [None] * len(left)
    handle.remove()  # does nothing any more


def test_building_and_dropping_takes_no_memory(tiny_model_dir: Path) -> None:
    for way in WAYS:
        way(tiny_model_dir)
    before = resident_bytes()
    for _ in range(10):
        for way in WAYS:
            way(tiny_model_dir)
    grown = resident_bytes() - before
    assert grown < 30 << 20, f"{grown >> 20} MiB for 60 engines"


def test_construct_exit_exit_construct(tiny_model_dir: Path) -> None:
    answers = []
    for _ in range(2):
        llm = build(tiny_model_dir)
        answers.append(token_ids(llm.generate(PROMPTS, cold(3), use_tqdm=False)))
        llm.exit()
        llm.exit()
    assert answers[0] == answers[1]


@pytest.mark.parametrize(
    "call",
    [
        lambda llm: llm.generate(["the"]),
        lambda llm: llm.step(),
        lambda llm: llm.add_request("the"),
        lambda llm: llm.abort(0),
        lambda llm: llm.chat(MESSAGES),
        lambda llm: next(llm.stream("the")),
        lambda llm: llm.chat_prompt(MESSAGES),
    ],
)
def test_a_closed_engine_says_so(tiny_model_dir: Path, call: Callable[[LLM], Any]) -> None:
    llm = build(tiny_model_dir)
    llm.exit()
    with pytest.raises(EngineDeadError, match="closed"):
        call(llm)
    assert llm.snapshot().running == () and llm.is_finished()


def test_closing_with_requests_under_way(tiny_model_dir: Path) -> None:
    llm = build(tiny_model_dir)
    llm.add_request(PROMPTS[0], cold(5))
    pieces = llm.stream(PROMPTS[1], cold(5))
    next(pieces)
    llm.exit()
    with pytest.raises(EngineDeadError):
        next(pieces)
    pieces.close()


def test_a_closed_engine_lets_go_of_its_hooks(tiny_model_dir: Path) -> None:
    class Watcher:
        def __call__(self, record: Any) -> None: ...

    llm, watcher = build(tiny_model_dir), Watcher()
    left = weakref.ref(watcher)
    llm.add_step_hook(watcher)
    del watcher
    assert left() is not None
    llm.exit()
    assert left() is None


def test_closing_ends_the_engine_even_if_the_runner_cannot(
    tiny_model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(method: str) -> None:
        raise ZeroDivisionError(method)

    before = child_processes()
    llm = build(tiny_model_dir)
    llm.chat(MESSAGES, cold(1))
    monkeypatch.setattr(llm.model_runner, "call", broken)
    with pytest.raises(ZeroDivisionError, match="exit"):
        llm.exit()
    llm.exit()
    with pytest.raises(EngineDeadError, match="closed"):
        llm.step()
    assert child_processes() == before


def test_the_template_helper_goes_with_the_engine(tiny_model_dir: Path) -> None:
    before = child_processes()
    for way in ("exit", "del"):
        llm = build(tiny_model_dir)
        llm.chat(MESSAGES, cold(1))
        assert len(child_processes() - before) == 1
        if way == "exit":
            llm.exit()
        else:
            del llm
        assert child_processes() == before, way


def test_the_interpreter_ends_with_an_engine_alive(tiny_model_dir: Path) -> None:
    code = (
        "from tests.faults.engines import *\n"
        f"llm = build({str(tiny_model_dir)!r})\n"
        "llm.add_step_hook(lambda record: llm.snapshot())\n"
        f"print(len(llm.chat({MESSAGES!r}, cold(3))['token_ids']))\n"
        "pieces = llm.stream(PROMPTS[0], cold(50)); next(pieces); llm.add_request(PROMPTS[1])\n"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=280)
    assert (result.returncode, result.stdout.strip()) == (0, "3"), result.stderr
    assert "Error" not in result.stderr and "ignored" not in result.stderr, result.stderr


# ---- streams that nobody reads to the end ------------------------------------------------------------------------


def test_a_forgotten_stream_gives_its_blocks_back(tiny_model_dir: Path) -> None:
    with build(tiny_model_dir) as llm:
        for piece in llm.stream("the quick brown fox", cold(50)):
            if piece:
                break
        assert_whole(llm)
        held = llm.stream(PROMPTS[0], cold(50))
        next(held)
        assert not llm.is_finished()
        del held
        assert_whole(llm)


def test_a_stream_collected_in_the_middle_of_a_step(tiny_model_dir: Path) -> None:
    with build(tiny_model_dir) as llm:
        alone = token_ids(llm.generate(PROMPTS[:1], cold(6), use_tqdm=False))
        held = [llm.stream(PROMPTS[1], cold(50))]
        next(held[0])
        with llm.observe(lambda record: held.clear()):
            assert token_ids(llm.generate(PROMPTS[:1], cold(6), use_tqdm=False)) == alone
        assert llm.step_count < 30, "the forgotten request is not run to its end"
        assert_whole(llm)
        assert not llm._unclaimed and not llm._readers


@pytest.mark.parametrize("look", [lambda llm: llm.is_finished(), lambda llm: not llm.snapshot().running])
def test_who_looks_sees_no_request_of_a_stream_that_is_gone(tiny_model_dir: Path, look: Callable[[LLM], bool]) -> None:
    """Its reader is gone, and its own clean-up was interrupted before it could give the request up."""
    with build(tiny_model_dir) as llm:
        held = llm.stream(PROMPTS[1], cold(50))
        next(held)
        assert not look(llm)
        llm._abandoned.extend(llm._readers.values())  # as Python does when a reader goes
        assert look(llm)
        assert_whole(llm)


def test_a_stream_collected_in_another_thread(tiny_model_dir: Path) -> None:
    with build(tiny_model_dir) as llm:
        held = [llm.stream(PROMPTS[1], cold(50))]
        next(held[0])
        thread = threading.Thread(target=held.clear)
        thread.start()
        thread.join()
        assert_whole(llm)


def test_many_threads_drop_streams_while_the_engine_works(tiny_model_dir: Path) -> None:
    """Whoever holds the door for that moment must not make a caller believe that the engine is busy."""
    with build(tiny_model_dir, max_num_seqs=64, num_kvcache_blocks=400) as llm:
        expected = token_ids(llm.generate(PROMPTS, cold(2), use_tqdm=False))
        for _ in range(12):
            held = [llm.stream(PROMPTS[1], cold(200)) for _ in range(8)]
            for each in held:
                next(each)
            threads = [threading.Thread(target=each.close) for each in held]
            for thread in threads:
                thread.start()
            for _ in range(3):
                assert token_ids(llm.generate(PROMPTS, cold(2), use_tqdm=False)) == expected
            for thread in threads:
                thread.join()
            assert_whole(llm)


def test_a_caller_waits_for_the_sweep_of_another_thread(tiny_model_dir: Path) -> None:
    """That thread holds the door for a moment, and is in no call."""
    with build(tiny_model_dir) as llm:
        real = llm._door

        class Door:
            def acquire(self, timeout: float) -> bool:
                if timeout > 0:
                    real.release()  # it is done within that time
                return real.acquire(timeout=timeout)

            def release(self) -> None:
                real.release()

        real.acquire()
        llm._door = Door()  # type: ignore[assignment]
        try:
            assert llm.step() == ([], 0)
        finally:
            llm._door = real


def test_a_progress_bar_leaves_no_thread(tiny_model_dir: Path) -> None:
    with build(tiny_model_dir) as llm:
        before = set(threading.enumerate())
        llm.generate(PROMPTS, cold(2), use_tqdm=True)
        assert set(threading.enumerate()) == before


def test_a_stream_goes_on_after_other_calls(tiny_model_dir: Path) -> None:
    with build(tiny_model_dir) as llm:
        whole = llm.generate(["the lazy dog"], cold(12), use_tqdm=False)[0]["text"]
        pieces = llm.stream("the lazy dog", cold(12))
        text = next(pieces)
        llm.generate(PROMPTS, cold(3), use_tqdm=False)
        assert text + "".join(pieces) == whole
        assert not llm._unclaimed, "its text was handed out; nothing is kept of it"
        assert_whole(llm)


# ---- threads -----------------------------------------------------------------------------------------------------


def test_one_engine_from_a_second_thread_raises_at_the_door(tiny_model_dir: Path) -> None:
    with build(tiny_model_dir) as llm:
        expected = token_ids(llm.generate(PROMPTS, cold(4), use_tqdm=False))
        errors: list[BaseException] = []
        calls: list[Callable[[], Any]] = [
            lambda: llm.generate(["the"]), llm.step, lambda: llm.add_request("the"), lambda: llm.abort(0),
            lambda: llm.chat(MESSAGES), lambda: next(llm.stream("the")), llm.exit, llm.snapshot,
        ]  # fmt: skip

        def intrude() -> None:
            for call in calls:
                try:
                    call()
                except EngineBusyError as error:
                    errors.append(error)

        def hook(record: Any) -> None:
            thread = threading.Thread(target=intrude)
            thread.start()
            thread.join()

        with llm.observe(hook):
            outputs = token_ids(llm.generate(PROMPTS, cold(4), use_tqdm=False))
        assert outputs == expected
        assert len(errors) == len(calls) * 4, "every call in every step was turned away"
        assert_whole(llm)


def test_an_engine_may_be_handed_from_thread_to_thread(tiny_model_dir: Path) -> None:
    with build(tiny_model_dir) as llm:
        expected = token_ids(llm.generate(PROMPTS, cold(4), use_tqdm=False))
        results: list[Any] = []
        for _ in range(4):
            thread = threading.Thread(
                target=lambda: results.append(token_ids(llm.generate(PROMPTS, cold(4), use_tqdm=False)))
            )
            thread.start()
            thread.join()
        assert results == [expected] * 4


def requests_for(llm: LLM) -> list[list[int]]:
    return [[3 + (i * k) % 290 for i in range(1, 30 + 7 * k)] for k in range(1, 5)]


def engines(small: Path, large: Path) -> tuple[LLM, LLM]:
    """Different models, block sizes 16 and 256; the second one is being watched."""
    one = build(small, kvcache_block_size=16, num_kvcache_blocks=8)
    two = build(large, kvcache_block_size=256, num_kvcache_blocks=3, scheduling_policy="mixed")
    two.add_step_hook(lambda record: two.snapshot())
    return one, two


def test_two_engines_step_by_step(tiny_model_dir: Path, tiny_llama_dir: Path) -> None:
    one, two = engines(tiny_model_dir, tiny_llama_dir)
    with one, two:
        alone = [token_ids(each.generate(requests_for(each), cold(12), use_tqdm=False)) for each in (one, two)]
    results: list[dict[int, list[int]]] = [{}, {}]
    one, two = engines(tiny_model_dir, tiny_llama_dir)
    with one, two:
        for each in (one, two):
            for prompt in requests_for(each):
                each.add_request(prompt, cold(12))
        while not (one.is_finished() and two.is_finished()):
            for each, result in zip((one, two), results, strict=True):
                result.update(each.step()[0])
        assert one.scheduler.num_preemptions > 0, "the small pool was tight"
    assert [[result[number] for number in sorted(result)] for result in results] == alone


def test_two_engines_in_two_threads(tiny_model_dir: Path, tiny_llama_dir: Path) -> None:
    one, two = engines(tiny_model_dir, tiny_llama_dir)
    with one, two:
        alone = [token_ids(each.generate(requests_for(each), cold(12), use_tqdm=False)) for each in (one, two)]
        results: dict[int, list[Any]] = {0: [], 1: []}

        def work(number: int, llm: LLM) -> None:
            for _ in range(5):
                results[number].append(token_ids(llm.generate(requests_for(llm), cold(12), use_tqdm=False)))

        threads = [threading.Thread(target=work, args=each) for each in enumerate((one, two))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert results == {0: [alone[0]] * 5, 1: [alone[1]] * 5}
        for each in (one, two):
            assert_whole(each)


def test_two_engines_built_in_two_threads(tiny_model_dir: Path, tiny_llama_dir: Path) -> None:
    results: dict[str, Any] = {}

    def work(name: str, path: Path, block_size: int) -> None:
        for _ in range(4):
            with build(path, kvcache_block_size=block_size) as llm:
                results.setdefault(name, []).append(token_ids(llm.generate(PROMPTS, cold(5), use_tqdm=False)))

    jobs = [("one", tiny_model_dir, 4), ("two", tiny_llama_dir, 32)]
    threads = [threading.Thread(target=work, args=job) for job in jobs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for name, path, _ in jobs:
        with build(path) as llm:
            assert results[name] == [token_ids(llm.generate(PROMPTS, cold(5), use_tqdm=False))] * 4
