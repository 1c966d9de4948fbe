"""For teachers: one learner's tree as JSON and JUnit, or a class as a CSV.

Class mode takes one folder a student with `chNN_*.py` files in it. Graders and seeds come from the tree that this
command runs from. Every exercise of every student is graded in a process of its own, with limits on time and memory;
the processes are forked from one that has loaded the libraries, so starting them costs little.

This is no sandbox: the code of the students runs with the rights of whoever grades it. Grade in a container or under
an account of its own.
"""

import csv
import json
import math
import multiprocessing
import os
import re
import resource
import signal
import sys
import tempfile
import time
import unicodedata
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from multiprocessing import forkserver, resource_tracker
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Any, TextIO

import pytest

from nanovllm.workbook import state
from nanovllm.workbook.catalogue import Exercise, Workbook, WorkbookError
from nanovllm.workbook.checking import pytest_command, pytest_environment, run_graders
from nanovllm.workbook.grading import clip
from nanovllm.workbook.outcomes import FAILED, ExerciseResult, TestResult, table_text
from nanovllm.workbook.processes import kill_session

COLUMNS = ("student", "exercise", "state", "points", "total_points", "seconds", "first_failing_rule")
MOST_STUDENTS = 100  # in the table of totals
MOST_FILES = 2000  # that a search for a misnamed answer looks at
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
    if answers is not None and not Path(answers).is_dir():
        raise WorkbookError(f"{answers} is not a folder; it should be one with chNN_*.py files in it")
    workbook = Workbook.find(answers=answers)
    wanted = workbook.select(*exercises)
    results = run_graders(workbook, wanted, target, chain, seed, Path(junit) if junit else None)
    files = dict.fromkeys(exercise.file for exercise in wanted) if target == "exercises" else ()
    return {
        "target": target,
        "seed": seed,
        "points": sum(result.points for result in results),
        "total_points": sum(result.total_points for result in results),
        "exercises": [result.to_json() for result in results],
        "missing": [told for file in files if (told := missing_file(workbook.answers, file))],
        "table": table_text(workbook, results, target),
    }


def missing_file(folder: Path, file: str) -> str:
    """What to say of a folder of answers that lacks this file, with the files that may be meant; "" if it has it."""
    if (folder / file).is_file():
        return ""
    near = near_misses(folder, file)
    return f"There is no {file} in the folder" + (f"; perhaps it is: {', '.join(near)}." if near else ".")


def near_misses(folder: Path, file: str) -> list[str]:
    """Files with a name like `file`'s in the folder or below it: "ch04_kv_cache (1).py", "exercises/ch04_kv_cache.py".

    At most three. Hidden folders are left out, links are not followed, and a huge tree is not searched to its end.
    """
    wanted, found, looked = letters(Path(file).stem), [], 0
    for place, folders, names in os.walk(folder):
        folders[:] = sorted(name for name in folders if not name.startswith((".", "__")))
        near = [name for name in names if wanted in letters(name) and Path(name).suffix in (".py", ".txt", ".ipynb")]
        found += [str((Path(place) / name).relative_to(folder)) for name in sorted(near)]
        looked += len(names)
        if looked > MOST_FILES or len(found) >= 3:
            break
    return found[:3]


def letters(name: str) -> str:
    """A file's name without what portals and copies change: case, blanks, dashes and underscores."""
    return "".join(letter for letter in name.lower() if letter.isalnum())


def totals(rows: list[dict[str, str]]) -> str:
    """Points of each student, by chapter and in all, as a table. rows: those of the CSV."""
    chapters = sorted({row["exercise"].partition(".")[0] for row in rows}, key=int)
    points: dict[str, dict[str, list[int]]] = {}
    for row in rows:
        for column in (row["exercise"].partition(".")[0], "total"):
            cell = points.setdefault(row["student"], {}).setdefault(column, [0, 0])
            cell[0] += int(row["points"])
            cell[1] += int(row["total_points"])
    columns = [*chapters, "total"]
    lines = [["student", *(f"ch {chapter}" for chapter in chapters), "total"]]
    for student, cells in list(points.items())[:MOST_STUDENTS]:
        # A folder's name may be no UTF-8, which no terminal can show.
        name = clip(student.encode(errors="backslashreplace").decode(), 30)
        lines.append([name, *("/".join(map(str, cells[column])) if column in cells else "" for column in columns)])
    widths = [max(columns_of(line[column]) for line in lines) for column in range(len(lines[0]))]
    shown = [line[0] + " " * (widths[0] - columns_of(line[0])) + "".join(
        f"  {cell:>{width}}" for cell, width in zip(line[1:], widths[1:], strict=True)) for line in lines]  # fmt: skip
    more = len(points) - MOST_STUDENTS
    return "\n".join([*shown, *([f"… and {more} more students"] if more > 0 else [])])


def columns_of(text: str) -> int:
    """How many columns of a terminal a text takes: Chinese characters take two each."""
    return sum(2 if unicodedata.east_asian_width(letter) in "WF" else 1 for letter in text)


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

    resume: rows that the CSV holds already are not graded again. An interrupt ends what is being graded at once; rows
    that are finished by then are in the file.
    """
    workbook = Workbook.find()
    wanted = workbook.select(*exercises)
    done = read_rows(output) if resume else []
    finished = {(row["student"], row["exercise"]) for row in done}
    work = [(student, exercise) for student in student_folders(folder) for exercise in wanted
            if (student.name, exercise.id) not in finished]  # fmt: skip
    if not resume and (former := keep_former(output)):
        print(f"What was in {output} is in {former} now.", file=sys.stderr)
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOAD)
    os.environ.update(pytest_environment(workbook))  # the fork server and all that it starts inherit it
    resource_tracker.ensure_running()  # it takes SIGINT off the mask
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})  # which the server ignores, but not yet
    try:
        forkserver.ensure_running()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    with open_output(output) as file, ThreadPoolExecutor(options.jobs) as pool:
        writer = csv.DictWriter(file, COLUMNS)
        writer.writeheader()
        writer.writerows(done)
        file.flush()
        running: set[int] = set()
        rows = [pool.submit(grade_one, context, workbook, *item, options, running) for item in work]
        written = 0
        try:
            for row in rows:
                writer.writerow(row.result())
                file.flush()
                written += 1
        except BaseException:
            writer.writerows(finished_rows(rows[written:]))
            while not all(row.done() for row in rows):  # one may be about to start
                end_all(running)
                time.sleep(0.05)
            raise
    return len(work)


def misnamed(folder: Path, exercises: tuple[str, ...]) -> list[str]:
    """What to say of each student whose answers seem to be there under another name or in a folder below."""
    files = dict.fromkeys(exercise.file for exercise in Workbook.find().select(*exercises))
    told = ((path, missing_file(path, file)) for path in student_folders(folder) for file in files)
    return [f"{path.name}: {text}" for path, text in told if "perhaps" in text]


def without_answers(folder: Path, exercises: tuple[str, ...]) -> list[str]:
    """The students whose folders hold no file of these exercises: nothing written, or one folder too deep."""
    files = {exercise.file for exercise in Workbook.find().select(*exercises)}
    return [path.name for path in student_folders(folder) if not any((path / file).is_file() for file in files)]


def keep_former(output: Path) -> Path | None:
    """Put a CSV of an earlier run aside, as `grades.csv~` or `grades-2.csv~`; returns its new path, if there is one."""
    if not output.is_file():
        return None
    try:
        return output.replace(state.free_name(output.with_name(output.name + "~")))
    except OSError:
        return None  # a folder where nothing can be made or renamed; then `open_output` has its say


def open_output(output: Path) -> TextIO:
    """The CSV, opened for writing before anything is graded. Raises WorkbookError where that cannot be."""
    try:
        # A folder's name may be no UTF-8: its bytes are written as they are.
        return output.open("w", newline="", encoding="utf-8", errors="surrogateescape")
    except OSError as error:
        raise WorkbookError(f"cannot write {output}: {error.strerror}; name another file with --csv") from None


def finished_rows(rows: list[Future[dict[str, Any]]]) -> list[dict[str, Any]]:
    """Nothing more is begun; returns what is complete."""
    for row in rows:
        row.cancel()
    return [row.result() for row in rows if row.done() and not row.cancelled() and row.exception() is None]


def end_all(running: set[int]) -> None:
    """End the grading processes that run, so that nobody waits for their limits."""
    for pid in running.copy():
        try:
            os.killpg(pid, signal.SIGKILL)
        except (ProcessLookupError, PermissionError):
            continue


def read_rows(output: Path) -> list[dict[str, str]]:
    """The complete rows of an earlier run; a last line that was cut off is dropped.

    Raises WorkbookError for a file that is no table of ours (a spreadsheet may have saved it with other separators),
    since it would be overwritten.
    """
    if not output.exists():
        return []
    with output.open(newline="", encoding="utf-8", errors="surrogateescape") as file:
        table = csv.DictReader(file)
        if table.fieldnames and tuple(name.removeprefix("\ufeff") for name in table.fieldnames) != COLUMNS:
            raise WorkbookError(f"{output} does not have the columns {','.join(COLUMNS)}, so it cannot be resumed")
        table.fieldnames = COLUMNS
        rows = []
        for row in table:
            if set(row) != set(COLUMNS) or None in row.values():
                continue
            points = row["points"].isdecimal() and row["total_points"].isdecimal()
            if not (points and re.fullmatch(r"\d+\.\d+", row["exercise"])):
                wrong = f"exercise {row['exercise']!r}, points {row['points']!r} of {row['total_points']!r}"
                raise WorkbookError(f"{output}, line {table.line_num}: {wrong} is no result; mend or remove the line")
            rows.append(row)
        return rows


def grade_one(
    context: ForkServerContext, workbook: Workbook, student: Path, exercise: Exercise, options: ClassOptions,
    running: set[int],
) -> dict[str, Any]:  # fmt: skip
    """One exercise of one student in a process of its own, which is killed when its time is over.

    running: holds the process's id as long as it runs.
    """
    with tempfile.TemporaryDirectory(prefix="nanovllm-grade-", ignore_cleanup_errors=True) as folder:
        json_file = Path(folder) / "results.json"
        own = Workbook(workbook.root, student.resolve(), workbook.data)
        command = pytest_command(own, [exercise], json_file, "exercises", options.chain, options.seed)
        started = time.perf_counter()
        process = context.Process(target=run_limited, args=(command[3:], folder, options.seconds, options.memory_mb))
        process.start()
        assert process.pid is not None, "it has been started"
        running.add(process.pid)
        process.join(options.seconds)
        ended = process.exitcode is not None
        if not ended:
            kill_session(process.pid, folder)
            process.join()
        result = read_result(json_file, exercise) if ended else None
        if result is None:
            result = ExerciseResult.empty(exercise)
            said = f"stopped after {options.seconds:g} s" if not ended else f"the process ended with {process.exitcode}"
            result.tests.append(TestResult("contract__runs_to_its_end", FAILED, rule=f"The grading must end: {said}."))
        kill_session(process.pid, folder)  # whatever the answer started and left behind
        running.discard(process.pid)
    return {
        "student": student.name,
        "exercise": exercise.id,
        "state": result.state,
        "points": result.points,
        "total_points": result.total_points,
        "seconds": f"{time.perf_counter() - started:.2f}",
        "first_failing_rule": result.first_failure.rule
        if result.first_failure
        else missing_file(student, exercise.file),
    }


def read_result(json_file: Path, exercise: Exercise) -> ExerciseResult | None:
    """What the process wrote about the exercise; None where it wrote nothing of use."""
    try:
        entries = json.loads(json_file.read_text(encoding="utf-8"))
        found = [ExerciseResult.from_json(entry) for entry in entries]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return next((result for result in found if result.exercise_id == exercise.id), None)


def run_limited(arguments: list[str], folder: str, seconds: float, memory_mb: int) -> None:
    """The grading process: a session of its own, limits, no terminal, then pytest."""
    os.setsid()
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})  # see `grade_class`
    os.chdir(folder)
    null = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1, 2):
        os.dup2(null, stream)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    limit = address_space() + memory_mb * 1024 * 1024
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    # Should nobody be left who ends it (the command was killed), a loop without end ends all the same.
    resource.setrlimit(resource.RLIMIT_CPU, (2 * math.ceil(seconds) + 10,) * 2)
    os._exit(int(pytest.main(arguments)))


def address_space() -> int:
    """Bytes of address space that this process has mapped by now: libraries, mostly."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    except OSError:
        return 8 << 30
