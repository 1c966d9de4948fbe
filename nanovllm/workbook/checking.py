"""Grade the learner's files: each time in a fresh process, so that what is judged is what the file says now."""

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from nanovllm.workbook import state
from nanovllm.workbook.catalogue import Exercise, Workbook, WorkbookError
from nanovllm.workbook.outcomes import (
    FAILED,
    PASSED,
    ExerciseResult,
    Shown,
    TestResult,
    load_error,
    pre,
    table_html,
    table_text,
)
from nanovllm.workbook.processes import kill_session

PROCESS_SECONDS = 600


class CheckResult(Shown):
    """What a check found: a table, and the text of each exercise's first failure. `results`: one per exercise."""

    def __init__(self, workbook: Workbook, results: list[ExerciseResult], target: str) -> None:
        self.results = results
        failures: list[str] = []
        told: set[tuple[str, str]] = set()  # chapters of which a file that does not load was told, once is enough
        for result in results:
            error = result.exercise_id.partition(".")[0], load_error(result)
            if result.first_failure and error not in told:
                failures.append(result.first_failure.text)
            told.update([error] if error[1] else [])
        text = "\n\n".join([table_text(workbook, results, target), *failures])
        super().__init__(text, table_html(workbook, results, target) + "".join(map(pre, failures)))

    @property
    def passed(self) -> bool:
        """Whether everything that was checked is solved."""
        return all(result.state == PASSED for result in self.results)


def pytest_command(workbook: Workbook, exercises: list[Exercise], json_file: Path, target: str, chain: bool,
                   seed: int) -> list[str]:  # fmt: skip
    """A pytest run of these exercises' graders, independent of how the project or the machine configures pytest."""
    files = [str(workbook.root / exercise.test_file) for exercise in exercises]
    options = ["-c", os.devnull, f"--rootdir={workbook.root}", "--noconftest", "--import-mode=importlib"]
    options += ["-p", "no:cacheprovider", "-p", "nanovllm.workbook.pytest_plugin", "-q"]
    options += [f"--workbook={workbook.root}", f"--answers={workbook.answers}", f"--target={target}"]
    options += [f"--grade-json={json_file}", f"--grade-seed={seed}", *(["--chain"] if chain else [])]
    return [sys.executable, "-m", "pytest", *options, *files]


def pytest_environment(workbook: Workbook) -> dict[str, str]:
    """No third-party pytest plugin is loaded, and torch keeps to one thread: small work is faster with it."""
    path = os.pathsep.join([str(Path(__file__).parents[2]), str(workbook.root), os.environ.get("PYTHONPATH", "")])
    fixed = {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTHONPATH": path.rstrip(os.pathsep), "PYTHONUTF8": "1"}
    dropped = ("PYTEST_ADDOPTS", "PYTEST_PLUGINS", "NANOVLLM_WORKBOOK")
    kept = {name: value for name, value in os.environ.items() if name not in dropped}
    return {"OMP_NUM_THREADS": "1", **workbook.environment(), **kept, **fixed}


def run_graders(
    workbook: Workbook, exercises: list[Exercise], target: str = "exercises", chain: bool = False, seed: int = 0,
    junit: Path | None = None, seconds: float = PROCESS_SECONDS,
) -> list[ExerciseResult]:  # fmt: skip
    """Run graders in one fresh process. Raises WorkbookError where that process did not come to an end of its own."""
    with tempfile.TemporaryDirectory(prefix="nanovllm-check-", ignore_cleanup_errors=True) as folder:
        json_file = Path(folder) / "results.json"
        command = pytest_command(workbook, exercises, json_file, target, chain, seed)
        command += [f"--junitxml={junit.resolve()}"] if junit else []
        status, said = run_to_its_end(command, folder, pytest_environment(workbook), seconds)
        if not json_file.exists():
            raise WorkbookError(f"checking ended early (exit status {status}):\n{said}")
        found = [ExerciseResult.from_json(data) for data in json.loads(json_file.read_text(encoding="utf-8"))]
    missing = {exercise.id for exercise in exercises} - {result.exercise_id for result in found}
    return found + [ended_early(exercise) for exercise in exercises if exercise.id in missing]


def run_to_its_end(command: list[str], folder: str, environment: dict[str, str], seconds: float) -> tuple[int, str]:
    """Run it in a session of its own; returns its exit status and the last lines that it wrote.

    What answers have started ends with it. Output goes to a file: a pipe would stay open as long as one of those lives.
    """
    output = Path(folder) / "output.txt"
    with output.open("wb") as file:
        process = subprocess.Popen(
            command, cwd=folder, env=environment, stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.STDOUT,
            start_new_session=True,
        )  # fmt: skip
    try:
        status = process.wait(timeout=seconds)
    except subprocess.TimeoutExpired:
        raise WorkbookError(f"checking took longer than {seconds:g} s and was stopped") from None
    finally:
        kill_session(process.pid, folder)
        process.wait()
    with output.open("rb") as file:
        file.seek(max(0, output.stat().st_size - 4000))
        said = file.read().decode("utf-8", errors="replace")
    return status, "\n".join(said.strip().splitlines()[-12:])


def ended_early(exercise: Exercise) -> ExerciseResult:
    """The result of an exercise of which a run that ended says nothing: an answer has ended pytest."""
    result = ExerciseResult.empty(exercise)
    rule = "The grading must end: the run ended before this exercise was graded."
    result.tests.append(TestResult("contract__runs_to_its_end", FAILED, text=rule, rule=rule))
    return result


def check(*exercises: str | float, target: str = "exercises", chain: bool = False) -> CheckResult:
    """Grade exercises ("4.2"), chapters ("4") or, without arguments, everything, and show the table.

    Reads your files as they are on the disk at this moment. chain: what an exercise builds on comes from your files
    too, instead of from the shipped engine. target: "exercises" (yours), "solutions" or "engine".
    """
    workbook = Workbook.find()
    wanted = workbook.select(*exercises)
    results = run_graders(workbook, wanted, target, chain)
    if target == "exercises":
        for result in results:
            _remember(workbook, result)
    return CheckResult(workbook, results, target)


def _remember(workbook: Workbook, result: ExerciseResult) -> None:
    failure = result.first_failure
    state.remember(
        workbook, result.exercise_id, state=result.state, points=result.points, checked=int(time.time()),
        failed_test=failure.name if failure and result.state == FAILED else None,
        rule=failure.rule if failure else None,
    )  # fmt: skip
