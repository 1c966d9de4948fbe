"""A learner's clone is updated: answers stay, committed or not; pages and stubs are the new ones."""

import os
import subprocess
from pathlib import Path

import pytest

from nanovllm.workbook.catalogue import Workbook, WorkbookError
from nanovllm.workbook.cli import main
from nanovllm.workbook.generate import stubs
from nanovllm.workbook.sources import definition, is_todo, paste, stub_text
from nanovllm.workbook.updating import merged, update

SOURCE = Workbook.find()
CHAPTER = SOURCE.chapter("4")
FILE = CHAPTER.file
PAGE = "notebooks/04.ipynb"
SOLVED = ("4.1", "4.2", "4.5")
HELPER = "\n\ndef my_helper(x: int) -> int:\n    return x + 1\n"
NEW_EXERCISE = '\n\ndef a_new_one() -> int:\n    """Exercise 4.9. New."""\n    raise ExerciseTodo("4.9")\n'


def git(folder: Path, *arguments: str) -> str:
    """Git without anybody's own configuration."""
    names = {f"GIT_{who}_{what}": "somebody@x.example" for who in ("AUTHOR", "COMMITTER") for what in ("NAME", "EMAIL")}
    alone = {"GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_SYSTEM": os.devnull}
    done = subprocess.run(
        ["git", *arguments], cwd=folder, capture_output=True, text=True, env={**os.environ, **names, **alone}
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.strip()


def commit(folder: Path, message: str) -> None:
    git(folder, "add", "--all")
    git(folder, "commit", "--quiet", "--message", message)


@pytest.fixture
def clone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Workbook:
    """A learner's clone of a small workbook, with three exercises solved and a page that was run."""
    for who in ("AUTHOR", "COMMITTER"):
        monkeypatch.setenv(f"GIT_{who}_NAME", "A Learner")
        monkeypatch.setenv(f"GIT_{who}_EMAIL", "learner@x.example")
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", os.devnull)
    origin = tmp_path / "origin"
    for name in ("solutions", "exercises", "tests/ch04", "notebooks"):
        (origin / name).mkdir(parents=True)
    (origin / "solutions" / FILE).write_text((SOURCE.solutions / FILE).read_text())
    (origin / "exercises" / FILE).write_text(stubs(SOURCE)[SOURCE.answers / FILE])
    (origin / "tests" / "ch04" / "a_grader.py").write_text("x = 1\n")
    (origin / ".gitignore").write_text("exercises/.state/\n")
    (origin / PAGE).write_text('{"cells": ["text", "outputs: none"]}\n')
    git(origin, "init", "--quiet", "--initial-branch=main")
    commit(origin, "first version")
    git(tmp_path, "clone", "--quiet", str(origin), "clone")
    workbook = Workbook(tmp_path / "clone", tmp_path / "clone" / "exercises")
    file = workbook.answers / FILE
    text = file.read_text()
    for exercise_id in SOLVED:
        text = paste(text, SOURCE.exercise(exercise_id), (SOURCE.solutions / FILE).read_text())
    file.write_text(text.replace("from collections.abc", "import math\nfrom collections.abc", 1) + HELPER)
    (workbook.root / PAGE).write_text('{"cells": ["text", "outputs: a long table"]}\n')
    return workbook


def publish(clone: Workbook) -> None:
    """A new version: a docstring of a solved stub, one of an unsolved, a further exercise, the page, a grader."""
    origin = clone.root.parent / "origin"
    solution = (origin / "solutions" / FILE).read_text()
    solution = solution.replace("Exercise 4.2. The slots", "Exercise 4.2. (Told better.) The slots")
    solution = solution.replace("Exercise 4.6, part one. One more", "Exercise 4.6, part one. (Told better.) One more")
    (origin / "solutions" / FILE).write_text(solution)
    (origin / "exercises" / FILE).write_text(stub_text(solution) + NEW_EXERCISE)
    (origin / PAGE).write_text('{"cells": ["better text", "outputs: none"]}\n')
    (origin / "tests" / "ch04" / "a_grader.py").write_text("x = 2\n")
    commit(origin, "second version")


def check_updated(clone: Workbook) -> None:
    """Answers are there, in the new file; everything else is what was published."""
    text, solution = (clone.answers / FILE).read_text(), (SOURCE.solutions / FILE).read_text()
    assert "<<<<" not in text
    for exercise_id in SOLVED:
        assert not is_todo(text, exercise_id), exercise_id
        for name in SOURCE.exercise(exercise_id).objects:
            mine, theirs = definition(text, name), definition(solution, name)
            assert mine is not None and mine.replace("(Told better.) ", "") == theirs
    assert text.count("(Told better.)") == 2
    assert is_todo(text, "4.6") and is_todo(text, "4.9")
    assert "def my_helper" in text and text.index("import math") < text.index("def blocks_needed")
    assert (clone.root / PAGE).read_text() == '{"cells": ["better text", "outputs: none"]}\n'
    assert (clone.root / "tests" / "ch04" / "a_grader.py").read_text() == "x = 2\n"
    kept = [file.read_text() for file in (clone.state / "copies").iterdir()]
    assert any("outputs: a long table" in each for each in kept)
    assert any("def my_helper" in each for each in kept)


def test_answers_that_are_not_committed(clone: Workbook) -> None:
    publish(clone)
    said = update(clone).text
    assert FILE in said and "answers are in their places" in said
    check_updated(clone)
    assert git(clone.root, "rev-parse", "HEAD") == git(clone.root.parent / "origin", "rev-parse", "HEAD")
    assert git(clone.root, "diff", "--name-only", "HEAD") == f"exercises/{FILE}", "answers stay out of git"
    assert "newest version" in update(clone).text


def test_answers_that_are_committed(clone: Workbook) -> None:
    commit(clone.root, "my answers")
    publish(clone)
    update(clone)
    check_updated(clone)
    assert git(clone.root, "status", "--short") == "", "everything is committed, as it was"
    assert "my answers" in git(clone.root, "log", "--format=%s")


def test_again_and_again(clone: Workbook) -> None:
    for number in range(3):
        origin = clone.root.parent / "origin"
        stub = (origin / "exercises" / FILE).read_text()
        (origin / "exercises" / FILE).write_text(stub.replace("Chapter 4", f"Chapter 4 ({number})", 1))
        commit(origin, f"version {number}")
        update(clone)
        text = (clone.answers / FILE).read_text()
        assert f"Chapter 4 ({number})" in text and not is_todo(text, "4.5") and "def my_helper" in text


def test_plain_git_pull_with_answers_committed(clone: Workbook) -> None:
    (clone.root / PAGE).write_text('{"cells": ["text", "outputs: none"]}\n')
    file = clone.answers / FILE
    file.write_text(file.read_text().replace(HELPER, ""))
    commit(clone.root, "my answers")
    publish(clone)
    git(clone.root, "pull", "--quiet", "--no-rebase", "--no-edit")
    text = (clone.answers / FILE).read_text()
    assert not any(is_todo(text, exercise_id) for exercise_id in SOLVED)
    assert "(Told better.)" in text and is_todo(text, "4.9")


def test_where_both_changed_the_same_lines_the_answer_stands(clone: Workbook) -> None:
    origin = clone.root.parent / "origin"
    stub = (origin / "exercises" / FILE).read_text()
    todo = 'raise ExerciseTodo("4.1")'
    (origin / "exercises" / FILE).write_text(stub.replace(todo, f"{todo}  # !"))
    commit(origin, "second version")
    update(clone)
    text = (clone.answers / FILE).read_text()
    assert not is_todo(text, "4.1") and "# !" not in text


def test_a_merge_that_is_no_python_falls_back_on_definitions() -> None:
    old = b'def f():\n    """Doc."""\n    raise ExerciseTodo("1.1")\n\n\nA = 1\n\nB = 2\n\nC = 3\n'
    mine = b'def f():\n    """Doc."""\n    return 2\n\n\nA = """1\n\nB = 2\n\nC = 3"""\n'
    new = old.replace(b"B = 2", b'B = """x"""') + b"\n\ndef g(): ...\n"
    found = merged(mine, old, new).decode()
    compile(found, "merged", "exec")
    assert "return 2" in found and "def g()" in found and 'B = """x"""' in found


def test_a_change_in_the_engine_stops_it_before_anything_changes(clone: Workbook) -> None:
    grader = clone.root / "tests" / "ch04" / "a_grader.py"
    grader.write_text("x = 3\n")
    before = {path: path.read_bytes() for path in (grader, clone.answers / FILE, clone.root / PAGE)}
    publish(clone)
    with pytest.raises(WorkbookError, match=r"a_grader\.py.*Nothing was changed"):
        update(clone)
    assert {path: path.read_bytes() for path in before} == before
    assert git(clone.root, "log", "--format=%s") == "first version"


def test_an_update_that_fails_leaves_everything_as_it_was(clone: Workbook) -> None:
    publish(clone)
    origin = clone.root.parent / "origin"
    (origin / "notes.txt").write_text("new\n")
    commit(origin, "a file that is in the way")
    (clone.root / "notes.txt").write_text("mine, and git does not know it\n")
    before = {path: path.read_bytes() for path in (clone.answers / FILE, clone.root / PAGE)}
    with pytest.raises(WorkbookError, match="notes.txt"):
        update(clone)
    assert {path: path.read_bytes() for path in before} == before
    (clone.root / "notes.txt").unlink()
    update(clone)
    check_updated(clone)


def test_a_missing_file_comes_back(clone: Workbook) -> None:
    (clone.answers / FILE).unlink()
    publish(clone)
    update(clone)
    assert is_todo((clone.answers / FILE).read_text(), "4.1")


def test_where_it_cannot_work_it_says_so(
    clone: Workbook, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    git(clone.root, "checkout", "--quiet", "-b", "alone")
    with pytest.raises(WorkbookError, match="set-upstream-to"):
        update(clone)
    git(clone.root, "checkout", "--quiet", "main")
    monkeypatch.setenv("NANOVLLM_WORKBOOK", str(clone.root))
    assert main(["update"]) == 0
    assert "newest version" in capsys.readouterr().out
    for name in ("solutions", "tests"):
        (tmp_path / "no_clone" / name).mkdir(parents=True)
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path))
    with pytest.raises(WorkbookError, match="not a git clone"):
        update(Workbook(tmp_path / "no_clone", tmp_path / "no_clone" / "exercises"))
