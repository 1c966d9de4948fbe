"""Run a grader's tests one by one, with a time limit, and turn what happens into results. No pytest in here.

The pytest plugin uses `judge` for each test that pytest runs; `run_grader` runs a whole grader in this process (that
is how many wrong answers are tried in little time).
"""

import importlib.util
import io
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any

from nanovllm.workbook.catalogue import Exercise, ExerciseTodo, Workbook
from nanovllm.workbook.grading import (
    Answer,
    NotRunHere,
    NotTried,
    Rejected,
    TimeUp,
    clip,
    describe_error,
    in_the_kernel,
    preload,
)
from nanovllm.workbook.outcomes import FAILED, LOADS, NOT_RUN, PASSED, TODO, ExerciseResult, TestResult

PATIENCE = 4  # times the limit, on the clock, for code that waits
WAITING = 0.05  # of the time on a processor: a computation gets more than that, however busy the machine is


@contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Raise TimeUp in the running code after so many seconds of computing, and again until it gives way.

    Computing is what this thread does on a processor: time in which the machine works for others does not count. Code
    that waits instead (a `WAITING` part of its time at most is computing) is stopped after `PATIENCE` times as many
    seconds on the clock. Uses the alarm signal, so it works in a process's main thread on POSIX; elsewhere there is no
    limit of this kind.
    """
    if not hasattr(signal, "setitimer") or threading.current_thread() is not threading.main_thread():
        yield
        return
    computed, started = time.thread_time(), time.perf_counter()

    def ring(_signal: int, _frame: FrameType | None) -> None:
        on_processor, on_clock = time.thread_time() - computed, time.perf_counter() - started
        if on_processor >= seconds:
            raise TimeUp(f"still running after {seconds:g} s")
        if on_clock >= PATIENCE * seconds and on_processor < WAITING * on_clock:
            raise TimeUp(f"still running after {PATIENCE * seconds:g} s, most of which it waited")

    before = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, seconds, min(0.5, seconds / 2))
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def rule_of(function: Callable[..., Any]) -> str:
    """The first sentence (paragraph) of a test's docstring."""
    return " ".join((function.__doc__ or "").strip().split("\n\n")[0].split())


def judge(error: BaseException | None, answer: Answer | None, exercise: Exercise, workbook: Workbook, name: str,
          rule: str, seconds: float) -> TestResult:  # fmt: skip
    """What the end of one test means. `error`: what it raised, None if it returned."""
    if error is None:
        return TestResult(name, PASSED, seconds, rule=rule)
    if isinstance(error, ExerciseTodo):
        return TestResult(name, TODO, seconds, str(error), rule)
    if isinstance(error, NotRunHere):
        return TestResult(name, NOT_RUN, seconds, str(error), rule)
    happened = ""
    if not isinstance(error, Rejected):
        story = answer.story if answer else [f"loading {exercise.file}"]
        broken = (answer.rule or rule) if answer else LOADS
        if isinstance(error, TimeUp):
            happened, got, expected = f"{error}: ", str(error), "an answer"
            broken = rule if isinstance(error, NotTried) else broken
        else:
            error = in_the_kernel(error)
            said = clip(f"{type(error).__name__}: {error}" if str(error) else type(error).__name__, 80)
            happened, got, expected = f"{said}. ", describe_error(error, workbook), "no error"
        error = Rejected(story, got, expected, broken)
    head = f"exercise {exercise.id} {exercise.title}: {name.replace('__', ': ').replace('_', ' ')}"
    lines = [clip(head, 110), *error.lines(), f'next      hint("{exercise.id}") or: nanovllm hint {exercise.id}']
    # Where only the rule is told (the table, a class's CSV), it says what happened: an error, an end that never came.
    told = happened + error.rule if answer else f"{error.rule.removesuffix('.')}: {error.got}"
    return TestResult(name, FAILED, seconds, "\n".join(lines), told)


def load_grader(path: Path) -> ModuleType:
    """A grader's module, loaded from its file."""
    name = f"_nanovllm_grader_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None, f"{path} is not a Python file"
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def grader_tests(module: ModuleType) -> dict[str, Callable[[Answer], None]]:
    """Test name without ``test_`` -> function, in the order of the file."""
    return {name.removeprefix("test_"): value for name, value in vars(module).items() if name.startswith("test_")}


def run_grader(
    workbook: Workbook, exercise: Exercise, load: Callable[[], Answer], tests: dict[str, Callable[[Answer], None]],
    stop_at_first: bool = False,
) -> ExerciseResult:  # fmt: skip
    """All tests of one exercise in this process. `load` makes a fresh `Answer` for each test."""
    preload(workbook, exercise)
    result = ExerciseResult.empty(exercise)
    for name, function in tests.items():
        answer, error, start = None, None, time.perf_counter()
        try:
            with time_limit(exercise.timeout), redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
                answer = load()
                answer.rule = rule_of(function)
                function(answer)
        except KeyboardInterrupt:
            raise
        except BaseException as raised:
            error = raised
        seconds = time.perf_counter() - start
        result.tests.append(judge(error, answer, exercise, workbook, name, rule_of(function), seconds))
        if stop_at_first and error is not None:
            break
    return result
