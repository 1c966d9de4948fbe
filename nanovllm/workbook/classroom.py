"""For teachers: one learner's tree as JSON and JUnit, or a class as a CSV.

Class mode takes one folder a student with `chNN_*.py` files in it. Graders and seeds come from the tree that this
command runs from. Every exercise of every student is graded in a process of its own, with limits on time and memory;
the processes are forked from one that has loaded the libraries, so starting them costs little.

This is no sandbox: the code of the students runs with the rights of whoever grades it. Grade in a container or under
an account of its own.
"""

import csv
import json
import multiprocessing
import os
import resource
import signal
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Any

import pytest

from nanovllm.workbook.catalogue import Exercise, Workbook, WorkbookError
from nanovllm.workbook.checking import pytest_command, pytest_environment, run_graders
from nanovllm.workbook.outcomes import FAILED, ExerciseResult, TestResult, table_text

COLUMNS = ("student", "exercise", "state", "points", "total_points", "seconds", "first_failing_rule")
PRELOAD = ["nanovllm.workbook.pytest_plugin", "nanovllm.engine.scheduler", "torch", "numpy"]


@dataclass(frozen=True)
class ClassOptions:
    """seconds and memory_mb limit one exercise of one student."""

    chain: bool = False
    seed: int = 0
    jobs: int = 1
    seconds: float = 60.0
    memory_mb: int = 4096


def grade(
    *exercises: str | float, answers: Path | str | None = None, target: str = "exercises", seed: int = 0,
    chain: bool = False, junit: Path | str | None = None,
) -> dict[str, Any]:  # fmt: skip
    """Grade one tree (or one folder of answers) and return a plain dict: points, and every exercise with its tests."""
    workbook = Workbook.find(answers=answers)
    wanted = workbook.select(*exercises)
    results = run_graders(workbook, wanted, target, chain, seed, Path(junit) if junit else None)
    return {
        "target": target,
        "seed": seed,
        "points": sum(result.points for result in results),
        "total_points": sum(result.total_points for result in results),
        "exercises": [result.to_json() for result in results],
        "table": table_text(workbook, results, target),
    }


def student_folders(folder: Path) -> list[Path]:
    """One folder a student, by name; hidden ones are left out."""
    if not folder.is_dir():
        raise WorkbookError(f"{folder} is not a folder; class mode wants one folder per student in it")
    found = sorted(path for path in folder.iterdir() if path.is_dir() and not path.name.startswith((".", "__")))
    if not found:
        raise WorkbookError(f"{folder} holds no folders; class mode wants one per student, with chNN_*.py files in it")
    return found


def grade_class(folder: Path, output: Path, exercises: tuple[str, ...], options: ClassOptions, resume: bool) -> int:
    """Grade a class into a CSV, row by row as results come in; returns the number of rows written in this run.

    resume: rows that the CSV holds already are not graded again.
    """
    workbook = Workbook.find()
    wanted = workbook.select(*exercises)
    done = read_rows(output) if resume else []
    finished = {(row["student"], row["exercise"]) for row in done}
    work = [(student, exercise) for student in student_folders(folder) for exercise in wanted
            if (student.name, exercise.id) not in finished]  # fmt: skip
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOAD)
    os.environ.update(pytest_environment(workbook))  # the fork server and all that it starts inherit it
    with output.open("w", newline="", encoding="utf-8") as file, ThreadPoolExecutor(options.jobs) as pool:
        writer = csv.DictWriter(file, COLUMNS)
        writer.writeheader()
        writer.writerows(done)
        file.flush()
        for row in pool.map(lambda item: grade_one(context, workbook, item[0], item[1], options), work):
            writer.writerow(row)
            file.flush()
    return len(work)


def read_rows(output: Path) -> list[dict[str, str]]:
    """The complete rows of an earlier run; a last line that was cut off is dropped."""
    if not output.exists():
        return []
    with output.open(newline="", encoding="utf-8") as file:
        return [row for row in csv.DictReader(file) if set(row) == set(COLUMNS) and None not in row.values()]


def grade_one(
    context: ForkServerContext, workbook: Workbook, student: Path, exercise: Exercise, options: ClassOptions
) -> dict[str, Any]:
    """One exercise of one student in a process of its own, which is killed when its time is over."""
    with tempfile.TemporaryDirectory(prefix="nanovllm-grade-") as folder:
        json_file = Path(folder) / "results.json"
        own = Workbook(workbook.root, student.resolve(), workbook.data)
        command = pytest_command(own, [exercise], json_file, "exercises", options.chain, options.seed)
        started = time.perf_counter()
        process = context.Process(target=run_limited, args=(command[3:], folder, options.memory_mb))
        process.start()
        process.join(options.seconds)
        ended = process.exitcode is not None
        if not ended:
            kill_group(process.pid)
            process.join()
        result = read_result(json_file, exercise) if ended else None
        if result is None:
            result = ExerciseResult.empty(exercise)
            said = f"stopped after {options.seconds:g} s" if not ended else f"the process ended with {process.exitcode}"
            result.tests.append(TestResult("contract__runs_to_its_end", FAILED, rule=f"The grading must end: {said}."))
        kill_group(process.pid)  # whatever the answer started and left behind
    return {
        "student": student.name,
        "exercise": exercise.id,
        "state": result.state,
        "points": result.points,
        "total_points": result.total_points,
        "seconds": f"{time.perf_counter() - started:.2f}",
        "first_failing_rule": result.first_failure.rule if result.first_failure else "",
    }


def read_result(json_file: Path, exercise: Exercise) -> ExerciseResult | None:
    """What the process wrote about the exercise; None where it wrote nothing of use."""
    try:
        entries = json.loads(json_file.read_text(encoding="utf-8"))
        found = [ExerciseResult.from_json(entry) for entry in entries]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return next((result for result in found if result.exercise_id == exercise.id), None)


def kill_group(pid: int | None) -> None:
    """End a grading process and everything that it started. It leads a session of its own, so nothing else is hit."""
    try:
        if pid is not None and os.getpgid(pid) == pid:
            os.killpg(pid, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):
        return


def run_limited(arguments: list[str], folder: str, memory_mb: int) -> None:
    """The grading process: a session of its own, limits, no terminal, then pytest."""
    os.setsid()
    os.chdir(folder)
    null = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1, 2):
        os.dup2(null, stream)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    limit = address_space() + memory_mb * 1024 * 1024
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    os._exit(int(pytest.main(arguments)))


def address_space() -> int:
    """Bytes of address space that this process has mapped by now: libraries, mostly."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    except OSError:
        return 8 << 30
