"""Stubs, leaks, and the learner's walk through the workbook: what the authored files and their copies must keep."""

import ast
from functools import partial
from pathlib import Path

import pytest

from nanovllm.workbook.catalogue import LAYERS, Chapter, Exercise, Workbook, WorkbookError
from nanovllm.workbook.generate import stubs
from nanovllm.workbook.grading import load_answer
from nanovllm.workbook.outcomes import PASSED, TODO
from nanovllm.workbook.runner import grader_tests, load_grader, run_grader
from nanovllm.workbook.sources import definition, paste, put_definition, regions, stub_text
from tests.maintainer.try_answers import flat, solution_lines

WORKBOOK = Workbook.find()
CHAPTERS = list(WORKBOOK.chapters)
EXERCISES = list(WORKBOOK.exercises)


def number(chapter: Chapter) -> str:
    return chapter.number


def by_id(exercise: Exercise) -> str:
    return exercise.id


def solution_of(exercise_or_chapter: Exercise | Chapter) -> str:
    return (WORKBOOK.solutions / exercise_or_chapter.file).read_text(encoding="utf-8")


def test_stub_keeps_everything_but_the_answer() -> None:
    authored = (
        '"""Doc."""\n\nimport math\n\n\ndef f(x: int) -> int:\n    """Twice."""\n    # --- your code (9.1) ---\n'
        "    y = 2 * x\n    return y\n    # --- end ---\n\n\nLAST = 1\n"
    )
    stub = stub_text(authored)
    assert stub == authored.replace("    y = 2 * x\n    return y\n", '    raise ExerciseTodo("9.1")\n').replace(
        "import math\n", "import math\n\nfrom nanovllm.workbook import ExerciseTodo\n"
    )
    ast.parse(stub)


@pytest.mark.parametrize("text", ["# --- end ---\n", "# --- your code (1.1) ---\n", "# --- your code (1.1) ---\n" * 2])
def test_unpaired_markers_are_refused(text: str) -> None:
    with pytest.raises(WorkbookError):
        regions(text)


@pytest.mark.parametrize("text", ["# \u2028 a \u2029 b \x85", "# \x0c\x0b", "# \x1c\x1d\x1e"])
@pytest.mark.parametrize("newline", ["\n", "\r\n", "\r"])
def test_lines_are_those_of_the_parser(text: str, newline: str) -> None:
    source = f"{text}\ndef f():\n    return 1  {text}\n\n\ndef g():\n    return 2\n".replace("\n", newline)
    assert definition(source, "g") == "def g():\n    return 2\n"
    assert definition(source, "f") == f"def f():\n    return 1  {text}\n"
    assert put_definition(source, "f", "def f():\n    return 3\n") == (
        f"{text}\ndef f():\n    return 3\n\n\ndef g():\n    return 2\n"
    )


def test_definitions_are_found_in_a_file_that_does_not_parse() -> None:
    text = "x = (\n\n@deco\ndef f(a):\n    return 1\n\n\ndef g(:\n    pass\n"
    assert definition(text, "f") == "@deco\ndef f(a):\n    return 1\n"
    assert put_definition(text, "g", "def g():\n    pass\n").endswith("return 1\n\n\ndef g():\n    pass\n")
    assert definition(text, "h") is None


@pytest.mark.parametrize("chapter", CHAPTERS, ids=number)
def test_generation_is_stable_and_keeps_the_surface(chapter: Chapter) -> None:
    solution, stub = solution_of(chapter), stub_text(solution_of(chapter))
    assert stub == stub_text(solution)
    for exercise in chapter.exercises:
        for name in exercise.objects:
            ours, theirs = definition(solution, name), definition(stub, name)
            assert ours and theirs, f"{exercise.id}: {name} is missing"
            assert signature(ours) == signature(theirs)
            assert f'raise ExerciseTodo("{exercise.id}")' in theirs
            assert 'raise ExerciseTodo("' not in ours


def signature(source: str) -> list[str]:
    """Every def line, class line and docstring of a definition; what an answer defines inside a function is its own."""
    parts: list[str] = []
    nodes: list[ast.stmt] = list(ast.parse(source).body)
    while nodes:
        node = nodes.pop(0)
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            head = ast.unparse(node.args) if isinstance(node, ast.FunctionDef) else ast.unparse(node.bases or [])
            parts.append(f"{node.name}({head}) {ast.get_docstring(node)}")
        if isinstance(node, ast.ClassDef):
            nodes += node.body
    return parts


@pytest.mark.parametrize("exercise", EXERCISES, ids=by_id)
def test_metadata_is_complete(exercise: Exercise) -> None:
    assert len(exercise.hints) == 4 and all(len(hint) > 40 for hint in exercise.hints)
    assert len(set(exercise.hints)) == 4
    assert exercise.minutes > 0 and 1 <= exercise.difficulty <= 5
    assert set(exercise.points) <= set(LAYERS)
    assert exercise.gpu or {"contract", "example", "oracle", "boundary"} <= set(exercise.points)
    assert (exercise.total_points == 0) == exercise.gpu, "GPU-only work is a bonus"
    tests = grader_tests(load_grader(WORKBOOK.root / exercise.test_file))
    assert {name.partition("__")[0] for name in tests} == set(exercise.points)
    assert set(exercise.replies) <= set(tests), "a reply for a test that does not exist"
    for name, function in tests.items():
        assert (function.__doc__ or "").strip().endswith("."), f"{name}: the docstring is the rule"
    for needed in exercise.needs:
        WORKBOOK.exercise(needed)
    for name in exercise.objects:
        text = definition(solution_of(exercise), name)
        assert text is not None and f"Exercise {exercise.id}" in text, f"{name} does not name its exercise"


def demanded_dtypes(grader: str) -> set[str]:
    """Names of the number formats that a grader compares a result's `dtype` with."""
    comparisons = [
        node
        for node in ast.walk(ast.parse(grader))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "equal"
    ]
    return {
        wanted.attr
        for call in comparisons
        if any(isinstance(part, ast.Attribute) and part.attr == "dtype" for part in ast.walk(call.args[0]))
        for wanted in ast.walk(call.args[1])
        if isinstance(wanted, ast.Attribute) and isinstance(wanted.value, ast.Name) and wanted.value.id == "torch"
    }


@pytest.mark.parametrize("exercise", EXERCISES, ids=by_id)
def test_a_number_format_that_is_graded_is_asked_for(exercise: Exercise) -> None:
    grader, solution = WORKBOOK.root / exercise.test_file, solution_of(exercise)
    asked = "\n".join(line for name in exercise.objects for line in signature(definition(solution, name) or ""))
    for name in demanded_dtypes(grader.read_text(encoding="utf-8")):
        assert name in asked or "dtype" in asked, f"{exercise.id} never says that its result is {name}"


@pytest.mark.parametrize("exercise", EXERCISES, ids=by_id)
def test_nothing_leaks_a_line_of_the_answer(exercise: Exercise) -> None:
    grader = (WORKBOOK.root / exercise.test_file).read_text(encoding="utf-8")
    told = [node.value for node in ast.walk(ast.parse(grader)) if isinstance(node, ast.Constant)]
    places = {
        "stub": stub_text(solution_of(exercise)),
        "hints": "\n".join(exercise.hints[:3]),
        "replies": "\n".join(exercise.replies.values()),
        "failure texts": "\n".join(text for text in told if isinstance(text, str)),
    }
    for place, text in places.items():
        leaked = [line for line in solution_lines(WORKBOOK, exercise) if line in flat(text)]
        assert not leaked, f"{place} of {exercise.id}: {leaked}"
        assert "solutions/" not in text, f"{place} of {exercise.id} points at the solutions"


@pytest.mark.parametrize("chapter", CHAPTERS, ids=number)
def test_each_answer_pasted_alone_turns_its_own_exercise_green(chapter: Chapter, tmp_path: Path) -> None:
    solution, stub = solution_of(chapter), stub_text(solution_of(chapter))
    for pasted in chapter.exercises:
        file = tmp_path / pasted.id / chapter.file
        file.parent.mkdir()
        file.write_text(paste(stub, pasted, solution), encoding="utf-8")
        workbook = Workbook(WORKBOOK.root, file.parent)
        for exercise in chapter.exercises:
            tests = grader_tests(load_grader(WORKBOOK.root / exercise.test_file))
            result = run_grader(workbook, exercise, partial(load_answer, workbook, exercise), tests, exercise != pasted)
            expected = PASSED if exercise == pasted else TODO
            assert result.state == expected, f"{pasted.id} pasted: {exercise.id} is {result.state}"


@pytest.mark.parametrize("chapter", CHAPTERS, ids=number)
def test_all_pasted_everything_is_green_on_top_of_each_other(chapter: Chapter, tmp_path: Path) -> None:
    for path, text in stubs(WORKBOOK).items():
        solution = (WORKBOOK.solutions / path.name).read_text(encoding="utf-8")
        for exercise in WORKBOOK.exercises:
            if exercise.file == path.name:
                text = paste(text, exercise, solution)
        (tmp_path / path.name).write_text(text, encoding="utf-8")
    workbook = Workbook(WORKBOOK.root, tmp_path)
    for exercise in chapter.exercises:
        tests = grader_tests(load_grader(WORKBOOK.root / exercise.test_file))
        result = run_grader(workbook, exercise, partial(load_answer, workbook, exercise, chain=True), tests)
        assert result.state == PASSED, result.first_failure.text if result.first_failure else exercise.id
