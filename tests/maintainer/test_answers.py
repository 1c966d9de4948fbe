"""Graders against answers: named wrong ones are rejected, right ones pass, whoever wrote them and however."""

from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from nanovllm.workbook.catalogue import Exercise, Workbook
from nanovllm.workbook.grading import load_answer, preload
from nanovllm.workbook.outcomes import FAILED, PASSED, TODO
from nanovllm.workbook.runner import grader_tests, load_grader, run_grader
from nanovllm.workbook.sources import stub_text
from tests.maintainer.try_answers import Trial, flat, read_trials, solution_lines

WORKBOOK = Workbook.find()
EXERCISES = list(WORKBOOK.exercises)
LOOP_SECONDS = 0.5  # what an answer gets that is known to loop without end


def by_id(exercise: Exercise) -> str:
    return exercise.id


@pytest.mark.parametrize("exercise", EXERCISES, ids=by_id)
def test_wrong_answers_are_rejected_and_right_ones_pass(exercise: Exercise, tmp_path: Path) -> None:
    trials = [trial for trial in read_trials(WORKBOOK, exercise.chapter) if trial.exercise.id == exercise.id]
    wrong = {trial.name for trial in trials if not trial.is_right}
    assert len(wrong) >= 5, f"{exercise.id} has only {len(wrong)} named wrong answers"
    assert any(trial.is_right for trial in trials), f"{exercise.id} has no second right answer"
    tests = grader_tests(load_grader(WORKBOOK.root / exercise.test_file))
    misjudged: list[str] = []
    for number, trial in enumerate(trials):
        file = tmp_path / f"answer_{number}.py"
        file.write_text(trial.text, encoding="utf-8")
        load = partial(load_answer, WORKBOOK, exercise, file=str(file))
        limited = replace(exercise, timeout=LOOP_SECONDS) if trial.loops else exercise
        result = run_grader(WORKBOOK, limited, load, tests, stop_at_first=True)
        if result.state != (PASSED if trial.is_right else FAILED):
            misjudged.append(f"{trial}: {result.state}\n{result.first_failure.text if result.first_failure else ''}")
        elif result.first_failure:
            misjudged += told_badly(trial, result.first_failure.text)
    assert not misjudged, "\n\n".join(misjudged)


def told_badly(trial: Trial, text: str) -> list[str]:
    """What is wrong with a failure's text: at most 15 lines, with every part, and no line of the solution (save lines
    of the answer on trial, which made the error)."""
    lines = text.splitlines()
    faults = [f"{trial}: {len(lines)} lines"] if len(lines) > 15 else []
    for part in ("call", "got", "expected", "rule", "next"):
        if not any(line.startswith(part) and len(line) > 10 for line in lines):
            faults.append(f"{trial}: says nothing behind {part!r}\n{text}")
    if "still running after" in text and not trial.loops:
        faults.append(f"{trial}: was stopped; an answer that loops is marked with loops = true")
    if trial.says not in flat(text):
        faults.append(f"{trial}: does not tell {trial.says!r}\n{text}")
    leaked = [line for line in solution_lines(WORKBOOK, trial.exercise) if line in flat(text)]
    faults += [f"{trial}: tells {line!r}\n{text}" for line in leaked if line not in flat(trial.text)]
    return faults


@pytest.mark.parametrize("target", ["solutions", "engine"])
@pytest.mark.parametrize("exercise", EXERCISES, ids=by_id)
def test_authored_answer_and_shipped_engine_pass(exercise: Exercise, target: str) -> None:
    if target == "engine" and not exercise.in_engine:
        pytest.skip("the engine has no such part: the exercise adds one")
    preload(WORKBOOK, exercise, target)
    tests = grader_tests(load_grader(WORKBOOK.root / exercise.test_file))
    result = run_grader(WORKBOOK, exercise, lambda: load_answer(WORKBOOK, exercise, target), tests)
    assert result.state == PASSED, result.first_failure.text if result.first_failure else result.tests
    assert result.points == exercise.total_points
    assert {test.layer for test in result.tests} == set(exercise.points), "every layer with points has tests"


@pytest.mark.parametrize("exercise", EXERCISES, ids=by_id)
def test_stub_is_todo_and_earns_nothing(exercise: Exercise, tmp_path: Path) -> None:
    file = tmp_path / exercise.file
    solution = (WORKBOOK.solutions / exercise.file).read_text(encoding="utf-8")
    file.write_text(stub_text(solution), encoding="utf-8")
    tests = grader_tests(load_grader(WORKBOOK.root / exercise.test_file))
    result = run_grader(WORKBOOK, exercise, lambda: load_answer(WORKBOOK, exercise, file=str(file)), tests)
    assert result.state == TODO
    assert result.points == 0
    assert all(test.state == TODO for test in result.tests), "a stub passes no test"
