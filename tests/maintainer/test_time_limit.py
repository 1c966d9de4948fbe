"""The time limit of an exercise's test: what computes too long is stopped, what the machine holds up is not."""

import signal
import threading
import time
from collections.abc import Callable

import pytest

from nanovllm.workbook.grading import TimeUp
from nanovllm.workbook.runner import PATIENCE, time_limit

SECONDS = 0.2


def compute(seconds: float) -> None:
    """Keep a processor busy for so long, however many others want it."""
    end = time.thread_time() + seconds
    while time.thread_time() < end:
        pass


def stubborn() -> None:
    while True:
        try:
            compute(1e9)
        except Exception:
            continue


@pytest.mark.parametrize("loop", [lambda: compute(1e9), stubborn])
def test_a_loop_without_end_is_stopped(loop: Callable[[], object]) -> None:
    computed = time.thread_time()
    with pytest.raises(TimeUp, match="still running after 0.2 s$"), time_limit(SECONDS):
        loop()
    assert SECONDS <= time.thread_time() - computed < 5 * SECONDS


@pytest.mark.parametrize("wait", [lambda: time.sleep(1e6), lambda: threading.Event().wait()])
def test_a_wait_without_end_is_stopped(wait: Callable[[], object]) -> None:
    started = time.perf_counter()
    with pytest.raises(TimeUp, match="still running after 0.8 s, most of which it waited"), time_limit(SECONDS):
        wait()
    assert PATIENCE * SECONDS <= time.perf_counter() - started < 10


def test_what_is_held_up_by_others_is_not_stopped() -> None:
    """As on a machine with much other work: seven times the limit on the clock, less than the limit of computing."""
    with time_limit(SECONDS):
        for _ in range(7):
            compute(SECONDS / 10)
            time.sleep(SECONDS)


def test_other_threads_do_not_count() -> None:
    """A library's threads may compute beside the answer; the limit is about what the answer does."""
    stop = threading.Event()

    def busy() -> None:
        while not stop.is_set():
            sum(range(1000))

    thread = threading.Thread(target=busy)
    thread.start()
    try:
        with time_limit(SECONDS):
            time.sleep(2 * SECONDS)
    finally:
        stop.set()
        thread.join()


def test_it_rings_again_for_code_that_swallows_it() -> None:
    caught = 0
    with pytest.raises(TimeUp), time_limit(SECONDS):
        while True:
            try:
                compute(1e9)
            except TimeUp:
                caught += 1
                if caught == 2:
                    raise
    assert caught == 2


def test_nothing_rings_afterwards() -> None:
    before = signal.getsignal(signal.SIGALRM)
    with time_limit(SECONDS):
        assert signal.getsignal(signal.SIGALRM) is not before
    assert signal.getsignal(signal.SIGALRM) is before
    assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)
