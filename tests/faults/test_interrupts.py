"""Ctrl-C and Jupyter's ■ at any moment: the call ends, the engine is whole, the next call answers right."""

import os
import random
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

import nanovllm
from nanovllm import LLM, EngineBusyError
from nanovllm.engine.interrupts import DeferredInterrupt
from nanovllm.worker.model_runner import ModelRunner
from tests.faults.engines import PROMPTS, assert_whole, build, child_processes, cold, token_ids

# A finalizer cannot raise: an interrupt that ends one is lost, with a message. So none of ours may run Python code.
pytestmark = pytest.mark.filterwarnings("error::pytest.PytestUnraisableExceptionWarning")

MESSAGES = [{"role": "user", "content": "the quick brown fox"}]
TRACED = tuple(str(Path(nanovllm.__file__).parent / name) for name in ("engine", "chat_template.py", "prompts.py"))


def generate(llm: LLM) -> Any:
    return llm.generate(PROMPTS, cold(4), use_tqdm=False)


def with_a_bar(llm: LLM) -> Any:
    return llm.generate(["the quick", "a block"], cold(3), use_tqdm=True)


def stream(llm: LLM) -> Any:
    return list(llm.stream("the lazy dog", cold(5)))


def chat(llm: LLM) -> Any:
    return llm.chat([MESSAGES, MESSAGES], cold(3))


def by_hand(llm: LLM) -> Any:
    """Add, step until idle; what was added before an interrupt is given up by its number."""
    added: list[int] = []
    try:
        for prompt in PROMPTS:
            added.append(llm.add_request(prompt, cold(3)))
        while not llm.is_finished():
            llm.step()
    finally:
        for seq_id in added:
            llm.abort(seq_id)
    return added


CALLS = [generate, with_a_bar, stream, chat, by_hand]


@pytest.fixture(scope="module")
def llm(tiny_model_dir: Path) -> Iterator[LLM]:
    with build(tiny_model_dir, num_kvcache_blocks=9, max_num_batched_tokens=8) as engine:
        yield engine


@pytest.fixture(scope="module")
def answer(tiny_model_dir: Path) -> list[list[int]]:
    with build(tiny_model_dir) as alone:
        return [token_ids(alone.generate([prompt], cold(4), use_tqdm=False))[0] for prompt in PROMPTS]


@pytest.fixture(autouse=True)
def default_handler() -> Iterator[None]:
    """Tests run with Python's own handler, and must leave it in place."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler, "the handler was not put back"
    finally:
        signal.signal(signal.SIGINT, before)


class Pinprick:
    """Sends SIGINT before the n-th bytecode that runs in the engine's own files, for each n in `moments`.

    within: count only those of functions of this name.
    """

    def __init__(self, *moments: int, within: str | None = None) -> None:
        self.moments, self.count, self.within = set(moments), 0, within

    def __call__(self, frame: FrameType, event: str, arg: Any) -> Any:
        if not frame.f_code.co_filename.startswith(TRACED) or self.within not in (None, frame.f_code.co_name):
            return None
        frame.f_trace_opcodes = True
        if event == "opcode":
            self.count += 1
            if self.count in self.moments:
                signal.raise_signal(signal.SIGINT)
        return self


@contextmanager
def pricked(*moments: int, within: str | None = None) -> Iterator[Pinprick]:
    before, pin = sys.gettrace(), Pinprick(*moments, within=within)
    sys.settrace(pin)
    try:
        yield pin
    finally:
        sys.settrace(before)


def length(llm: LLM, call: Callable[[LLM], Any]) -> int:
    """Bytecodes that the call takes in the engine's files."""
    with pricked() as pin:
        call(llm)
    return pin.count


def settle(llm: LLM, call: Callable[[LLM], Any]) -> None:
    """What an interrupted `by_hand` could not know the number of is finished here, as any generate would."""
    if call is by_hand:
        while not llm.is_finished():
            llm.step()


@pytest.mark.parametrize("call", CALLS)
def test_an_interrupt_before_any_bytecode(llm: LLM, answer: list[list[int]], call: Callable[[LLM], Any]) -> None:
    total = length(llm, call)
    rng, threads, interrupted = random.Random(call.__name__), threading.active_count(), 0
    for moment in rng.sample(range(1, total + 1), 40):
        with suppress(KeyboardInterrupt), pricked(moment) as pin:
            call(llm)
            assert pin.count < moment, "the interrupt got lost"
        interrupted += pin.count >= moment
        settle(llm, call)
        assert_whole(llm)
        assert not llm._readers
        assert token_ids(generate(llm)) == answer, f"after an interrupt at {moment} of {total}"
    assert interrupted >= 35, "most of the moments were reached"
    assert threading.active_count() == threads


def test_an_interrupt_before_any_bytecode_of_the_sweep(llm: LLM) -> None:
    """It holds the door for a moment, outside of every call: all moments, not a sample of them."""
    for moment in range(1, 1000):
        held = llm.stream(PROMPTS[0], cold(9))
        next(held)
        with suppress(KeyboardInterrupt), pricked(moment, within="_abort_abandoned_if_idle") as pin:
            held.close()
        assert_whole(llm)
        if pin.count < moment:
            break
    assert 10 < moment < 999


@pytest.mark.parametrize("call", CALLS)
def test_two_interrupts_close_together(llm: LLM, answer: list[list[int]], call: Callable[[LLM], Any]) -> None:
    """The second may fall into what mends the first."""
    total = length(llm, call)
    rng = random.Random(call.__name__)
    for moment in rng.sample(range(1, total), 20):
        with suppress(KeyboardInterrupt), pricked(moment, moment + rng.choice((1, 2, 5, 20, 100, 300)), moment + 301):
            call(llm)
        settle(llm, call)
        assert_whole(llm)
        assert token_ids(generate(llm)) == answer, f"after interrupts from {moment} of {total} on"


@pytest.mark.parametrize("call", CALLS)
def test_interrupts_at_random_times(llm: LLM, answer: list[list[int]], call: Callable[[LLM], Any]) -> None:
    """As they come from outside: at any time, in C code as well."""
    interrupt_at_random_times(llm, answer, call, count=15)


def interrupt_at_random_times(llm: LLM, answer: Any, call: Callable[[LLM], Any], count: int) -> int:
    started = time.perf_counter()
    call(llm)
    seconds = time.perf_counter() - started
    rng, hits = random.Random(call.__name__), 0
    for _ in range(count):
        timer = threading.Timer(rng.uniform(0, seconds), os.kill, (os.getpid(), signal.SIGINT))
        try:
            timer.start()
            call(llm)
            timer.join()
            time.sleep(0.001)  # a signal that came after the call is taken here
        except KeyboardInterrupt:
            hits += 1
        timer.join()
        settle(llm, call)
        assert_whole(llm)
        assert token_ids(generate(llm)) == answer
    assert hits == count, "every interrupt was raised somewhere"
    return hits


@pytest.mark.slow
@pytest.mark.timeout(3000)
@pytest.mark.skipif("NANOVLLM_INTERRUPTS" not in os.environ, reason="set NANOVLLM_INTERRUPTS=1; best on its own")
def test_200_interrupts_on_the_real_model(default_model_dir: Path) -> None:
    threads, children = threading.active_count(), child_processes()
    with build(default_model_dir, num_kvcache_blocks=40, kvcache_block_size=16) as llm:
        expected = token_ids(generate(llm))
        hits = sum(interrupt_at_random_times(llm, expected, call, 50) for call in (generate, stream, chat, by_hand))
    assert hits == 200
    assert threading.active_count() == threads and child_processes() == children


def test_an_interrupt_ends_the_call_after_the_step(llm: LLM) -> None:
    steps: list[int] = []

    def hook(record: Any) -> None:
        steps.append(record.step)
        if len(steps) == 2:
            signal.raise_signal(signal.SIGINT)

    with llm.observe(hook), pytest.raises(KeyboardInterrupt):
        generate(llm)
    assert len(steps) == 2, "the step is finished, and no other begins"
    assert_whole(llm)


@pytest.mark.parametrize("where", ["hook", "model"])
def test_a_second_interrupt_leaves_what_never_ends(llm: LLM, where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def forever(*_args: Any) -> None:
        signal.raise_signal(signal.SIGINT)
        deadline = time.monotonic() + 20
        while time.monotonic() < deadline:
            signal.raise_signal(signal.SIGINT)
        pytest.fail("a second interrupt did not end it")

    if where == "model":
        monkeypatch.setattr(llm.model_runner, "run", forever)
    handle = llm.add_step_hook(forever if where == "hook" else lambda record: None)
    with handle, pytest.raises(KeyboardInterrupt):
        generate(llm)
    assert_whole(llm)


@pytest.mark.parametrize("call", [lambda llm: llm.generate(["the"]), lambda llm: llm.chat(MESSAGES)])
def test_a_second_interrupt_leaves_a_text_that_takes_for_ever(
    llm: LLM, call: Callable[[LLM], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A prompt of many megabytes, say, before anything is queued."""

    def forever(*_args: Any, **_options: Any) -> None:
        for _ in range(3):
            signal.raise_signal(signal.SIGINT)
        pytest.fail("a second interrupt did not end it")

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(llm, "encode", forever)
        call(llm)
    assert_whole(llm)


def test_an_interrupt_while_a_request_is_added_adds_none(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its caller will never know its number."""

    def interrupted(*_args: Any, **_options: Any) -> list[int]:
        signal.raise_signal(signal.SIGINT)
        return [5, 6, 7]

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(llm, "encode", interrupted)
        llm.add_request("the", cold(3))
    assert_whole(llm)


def test_what_mends_is_not_torn_again() -> None:
    """The second interrupt ends a step that hangs; those behind it wait until the step has cleaned up after itself."""
    mended = False
    with pytest.raises(KeyboardInterrupt), DeferredInterrupt() as interrupt, interrupt.breaking():
        try:
            signal.raise_signal(signal.SIGINT)
            signal.raise_signal(signal.SIGINT)
            pytest.fail("a second interrupt did not end it")
        finally:
            for _ in range(3):
                signal.raise_signal(signal.SIGINT)
            mended = True
    assert mended


def test_an_interrupt_of_a_step_by_hand_loses_nothing(llm: LLM) -> None:
    number = llm.add_request(PROMPTS[0], cold(1))
    with llm.observe(lambda record: signal.raise_signal(signal.SIGINT)), pytest.raises(KeyboardInterrupt):
        llm.step()
    output = llm.get_output(number)
    assert output is not None and len(output["token_ids"]) == 1
    number = llm.add_request(PROMPTS[0], cold(3))
    with llm.observe(lambda record: signal.raise_signal(signal.SIGINT)), pytest.raises(KeyboardInterrupt):
        llm.step()
    assert not llm.is_finished(), "the step is booked, and the request goes on"
    generate(llm)
    output = llm.get_output(number)
    assert output is not None and len(output["token_ids"]) == 3
    assert_whole(llm)


def test_an_interrupt_beats_an_error(llm: LLM) -> None:
    """A loop that catches errors can be left."""

    def hook(record: Any) -> None:
        signal.raise_signal(signal.SIGINT)

    class Broken(Exception):
        pass

    def broken(*_args: Any) -> None:
        signal.raise_signal(signal.SIGINT)
        raise Broken

    real, llm.model_runner.call = llm.model_runner.call, broken  # type: ignore[method-assign]
    try:
        with pytest.raises(KeyboardInterrupt) as caught:
            generate(llm)
    finally:
        llm.model_runner.call = real  # type: ignore[method-assign]
    assert isinstance(caught.value.__context__, Broken)
    assert_whole(llm)


def test_an_interrupt_does_not_keep_a_program_from_ending(llm: LLM) -> None:
    def leave(record: Any) -> None:
        signal.raise_signal(signal.SIGINT)
        raise SystemExit(3)

    with llm.observe(leave), pytest.raises(BaseException) as caught:
        generate(llm)
    assert type(caught.value) is SystemExit
    assert_whole(llm)


def test_a_handler_of_ones_own_is_asked_at_the_end_of_a_step(llm: LLM, answer: list[list[int]]) -> None:
    class Stop(Exception):
        pass

    inside: list[bool] = []

    def handler(signum: int, frame: Any) -> None:
        inside.append(llm._in_step is not None)
        if len(inside) == 2:
            raise Stop

    before = signal.signal(signal.SIGINT, handler)
    try:
        with llm.observe(lambda record: signal.raise_signal(signal.SIGINT)), pytest.raises(Stop):
            generate(llm)
    finally:
        signal.signal(signal.SIGINT, before)
    assert inside == [False, False], "it did not raise at first, so the call went on"
    assert_whole(llm)
    assert token_ids(generate(llm)) == answer


def test_ignored_signals_stay_ignored(llm: LLM, answer: list[list[int]]) -> None:
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with llm.observe(lambda record: signal.raise_signal(signal.SIGINT)):
            assert token_ids(generate(llm)) == answer
    finally:
        signal.signal(signal.SIGINT, before)


def test_an_engine_inside_the_hook_of_another(llm: LLM, tiny_llama_dir: Path, answer: list[list[int]]) -> None:
    with build(tiny_llama_dir) as other:
        other.add_step_hook(lambda record: signal.raise_signal(signal.SIGINT))
        with llm.observe(lambda record: other.generate([[5, 6]], cold(3), use_tqdm=False)):
            with pytest.raises(KeyboardInterrupt):
                generate(llm)
        assert other.step_count == 1, "the interrupt ends both"
        for engine in (llm, other):
            assert_whole(engine)
    assert token_ids(generate(llm)) == answer


def test_a_handler_that_was_set_inside_the_block_stays() -> None:
    def mine(signum: int, frame: Any) -> None: ...

    with DeferredInterrupt():
        signal.signal(signal.SIGINT, mine)
    assert signal.getsignal(signal.SIGINT) is mine
    signal.signal(signal.SIGINT, signal.default_int_handler)


def test_outside_the_main_thread_signals_are_left_alone(llm: LLM, answer: list[list[int]]) -> None:
    results: list[Any] = []
    thread = threading.Thread(target=lambda: results.append(token_ids(generate(llm))))
    thread.start()
    thread.join()
    assert results == [answer]


def test_a_failing_call_leaves_the_door_open(llm: LLM) -> None:
    with llm.observe(lambda record: signal.raise_signal(signal.SIGINT)):
        with pytest.raises(KeyboardInterrupt):
            llm.generate([[5]], cold(2), use_tqdm=False)
    try:
        llm.step()
    except EngineBusyError:
        pytest.fail("the door was left locked")


def test_an_interrupt_while_an_engine_is_built(tiny_model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    threads, children = threading.active_count(), child_processes()
    with monkeypatch.context() as patch:
        patch.setattr(ModelRunner, "_allocate_kv_cache", lambda *args: signal.raise_signal(signal.SIGINT))
        with pytest.raises(KeyboardInterrupt):
            build(tiny_model_dir)
    with build(tiny_model_dir) as llm:
        assert len(generate(llm)) == 3
    assert threading.active_count() == threads and child_processes() == children
