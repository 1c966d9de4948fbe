"""The pytest side of the graders: which tests run, on whose answer, and how the end of a test is told.

    pytest                       all exercises, on the learner's files
    pytest --ex 4.2 --ch 5       one exercise, one chapter
    pytest --target solutions    on the authored answers (or `engine`: on the shipped engine)
    pytest --chain               what an exercise needs comes from the learner's files too
    pytest --answers=DIR         on the chNN_*.py files of another folder (with the =: pytest looks for its own settings
                                 at a path that stands alone)

Only files named tests/chNN/test_exN_M_name.py are touched; every other test runs as pytest runs it. A TODO counts as
a failed test for the exit status, so a run ends with 1 while anything is left to do.
"""

import json
import os
import re
import time
from collections import Counter
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from nanovllm.workbook.catalogue import TARGETS, Exercise, Workbook, WorkbookError
from nanovllm.workbook.grading import Answer, NotTried, TimeUp, load_answer, preload
from nanovllm.workbook.outcomes import FAILED, NOT_RUN, TODO, ExerciseResult, TestResult, table_text
from nanovllm.workbook.runner import judge, rule_of, time_limit

CHAPTER_FOLDER = re.compile(r"ch\d\d")
DRIVERS = ("/dev/nvidiactl", "/dev/dxg")  # on Linux, and on Windows with WSL
GRADER_FILE = re.compile(r"test_ex(\d+)_(\d+)_\w+\.py$")
SESSION: pytest.StashKey["GradingSession"] = pytest.StashKey()
LOOPS = 3  # tests of an exercise that may run into their time limits before no more are run
RESULT: pytest.StashKey[TestResult] = pytest.StashKey()
ANSWER: pytest.StashKey[Answer] = pytest.StashKey()


class GradingSession:
    """What one pytest run grades, and what came of it."""

    def __init__(self, config: pytest.Config) -> None:
        option = config.option
        if option.answers and not Path(option.answers).is_dir():
            raise WorkbookError(f"--answers={option.answers}: this is not a folder")
        self.workbook = Workbook.find(root=option.workbook, answers=option.answers)
        self.target: str = option.target
        self.chain: bool = option.chain
        self.seed: int = option.grade_seed
        self.selected = {exercise.id for exercise in self.workbook.select(*(option.ex or ()), *(option.ch or ()))}
        self.results: dict[str, ExerciseResult] = {}
        self.looping: Counter[str] = Counter()  # exercise -> how many of its tests ran into their time limits

    def exercise_of(self, path: Path) -> Exercise | None:
        """The exercise that a test file grades; None for any other file."""
        match = GRADER_FILE.match(path.name)
        if match is None or not path.parent.name.startswith("ch"):
            return None
        return self.workbook.exercise(f"{match[1]}.{match[2]}")

    def seconds(self, exercise: Exercise) -> float:
        """The time limit of the next test: short once a test of the same exercise has run into it.

        Raises NotTried once several have: a loop without end would take half a minute, for nothing new.
        """
        if self.looping[exercise.id] >= LOOPS:
            raise NotTried(f"not run: {LOOPS} tests of this exercise were still running at their limits")
        return min(1.0, exercise.timeout) if self.looping[exercise.id] else exercise.timeout

    def add(self, exercise: Exercise, result: TestResult) -> None:
        self.results.setdefault(exercise.id, ExerciseResult.empty(exercise)).tests.append(result)


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("workbook", "exercises of the workbook")
    group.addoption("--target", choices=TARGETS, default="exercises", help="whose answers are graded")
    group.addoption("--ex", action="append", metavar="4.2", help="this exercise only (may be repeated)")
    group.addoption("--ch", action="append", metavar="4", help="this chapter only (may be repeated)")
    group.addoption("--chain", action="store_true", help="prerequisites come from the learner's files as well")
    group.addoption("--answers", metavar="DIR", help="=DIR: folder with the chNN_*.py files (default: exercises/)")
    group.addoption("--workbook", metavar="DIR", help="root of the workbook (default: where the package stands)")
    group.addoption("--grade-json", metavar="FILE", help="write the results to this file")
    group.addoption("--grade-seed", type=int, default=0, metavar="N", help="seed of the random cases (default: 0)")


def pytest_configure(config: pytest.Config) -> None:
    try:
        config.stash[SESSION] = session = GradingSession(config)
    except WorkbookError as error:
        if config.option.ex or config.option.ch or config.option.grade_json or config.option.answers:
            raise pytest.UsageError(str(error)) from None
        return
    if grades_only(config) or not has_gpu():  # graders' tensors are a CPU's; other tests use a GPU where there is one
        for name, value in session.workbook.environment().items():  # before anything is imported that reads it
            os.environ.setdefault(name, value)


def grades_only(config: pytest.Config) -> bool:
    """Whether all that pytest was asked to run lies in the folders tests/chNN."""
    paths = [config.invocation_params.dir / str(argument).split("::")[0] for argument in config.args]
    return all(any(CHAPTER_FOLDER.fullmatch(part) for part in path.parts) for path in paths)


def has_gpu() -> bool:
    """Whether PyTorch can use a GPU here. It is imported, and asked, only where there is a driver for one."""
    return any(Path(driver).exists() for driver in DRIVERS) and bool(import_module("torch").cuda.is_available())


def pytest_report_header(config: pytest.Config) -> str | None:
    session = config.stash.get(SESSION, None)
    if session is None:
        return None
    return f"workbook: target {session.target}, answers in {session.workbook.answers}"


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """With --ex or --ch, other test files are not even imported."""
    session = config.stash.get(SESSION, None)
    if session is None or not (config.option.ex or config.option.ch) or collection_path.suffix != ".py":
        return None
    if collection_path.name in ("conftest.py", "__init__.py"):
        return None
    match = GRADER_FILE.match(collection_path.name)
    return None if match and f"{match[1]}.{match[2]}" in session.selected else True


@pytest.fixture
def answer(request: pytest.FixtureRequest) -> Answer:
    """The answer on trial, loaded afresh for each test; what loading raises is judged like what the test raises."""
    session = request.config.stash[SESSION]
    exercise = session.exercise_of(request.node.path)
    if exercise is None:
        raise pytest.UsageError("the fixture `answer` is for files tests/chNN/test_exN_M_name.py")
    preload(session.workbook, exercise, session.target)
    try:
        with judged(request.node, session, exercise), time_limit(session.seconds(exercise)):
            loaded = load_answer(session.workbook, exercise, session.target, session.chain, session.seed)
            loaded.rule = rule_of(request.function)
            request.node.stash[ANSWER] = loaded
            return loaded
    except (TimeUp, SystemExit) as error:  # it is judged; pytest itself could not set up the next test after one
        raise RuntimeError(str(error)) from None


@pytest.hookimpl(wrapper=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> Generator[None, object, object]:
    session, loaded = pyfuncitem.config.stash.get(SESSION, None), pyfuncitem.stash.get(ANSWER, None)
    if session is None or loaded is None:
        return (yield)
    with judged(pyfuncitem, session, loaded.exercise), time_limit(session.seconds(loaded.exercise)):
        return (yield)


@contextmanager
def judged(item: pytest.Item, session: GradingSession, exercise: Exercise) -> Iterator[None]:
    """Keep the result of what runs inside on the test; a test that cannot run here is skipped."""
    name, start = item.name.removeprefix("test_"), time.perf_counter()
    caught: BaseException | None = None
    try:
        yield
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        caught = error
        if isinstance(error, TimeUp):
            session.looping[exercise.id] += 1
        raise
    finally:
        seconds, loaded = time.perf_counter() - start, item.stash.get(ANSWER, None)
        rule = rule_of(item.function) if isinstance(item, pytest.Function) else ""
        result = judge(caught, loaded, exercise, session.workbook, name, rule, seconds)
        item.stash[RESULT] = result
        if result.state == NOT_RUN:
            raise pytest.skip.Exception(result.text) from None


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    session, result = item.config.stash.get(SESSION, None), item.stash.get(RESULT, None)
    # A file that cannot be loaded ends in the set-up of the test; it is told like an end in the test itself.
    if session is None or result is None or call.when == "teardown" or (call.when == "setup" and not call.excinfo):
        return report
    report.when = "call"
    exercise = session.exercise_of(item.path)
    assert exercise is not None, "a result belongs to an exercise"
    earlier = session.results.get(exercise.id)
    first = earlier is None or earlier.state not in (FAILED, TODO)
    session.add(exercise, result)
    if result.state in (FAILED, TODO):
        report.longrepr = result.text
        report.sections.clear()
    report.workbook_state = result.state  # type: ignore[attr-defined]
    report.workbook_first = first  # type: ignore[attr-defined]
    return report


def pytest_report_teststatus(report: Any, config: pytest.Config) -> tuple[str, str, str] | None:
    """TODO is told apart from failed; of an exercise's failures only the first is spelled out (all with -v)."""
    state = getattr(report, "workbook_state", None)
    if state == TODO:
        return "todo", "T", "TODO"
    if state == NOT_RUN:
        return "not run here", "n", "NOT RUN HERE"
    if state == FAILED and not report.workbook_first and config.option.verbose < 1:
        return "failed again", "f", "FAILED"
    return None


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    session = config.stash.get(SESSION, None)
    if session is not None and session.results:
        terminalreporter.section("exercises")
        terminalreporter.write_line(table_text(session.workbook, session.results.values(), session.target))


def pytest_sessionfinish(session: pytest.Session) -> None:
    grading = session.config.stash.get(SESSION, None)
    if grading is None or not session.config.option.grade_json:
        return
    results = [result.to_json() for result in grading.results.values()]
    Path(session.config.option.grade_json).write_text(json.dumps(results, indent=1), encoding="utf-8")
