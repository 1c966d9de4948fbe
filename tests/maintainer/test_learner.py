"""What a learner does, on a copy of the workbook: check, hint, reveal, reset, use, quiz, pytest, class mode."""

import csv
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from nanovllm import LLM, SamplingParams
from nanovllm import cli as nanovllm_cli
from nanovllm.engine.parts import Parts, activate, active_parts
from nanovllm.errors import RankError
from nanovllm.workbook import (
    Workbook,
    WorkbookError,
    answer,
    check,
    grade,
    hint,
    progress,
    quiz,
    reset,
    reveal,
    solve,
    state,
    use,
)  # fmt: skip
from nanovllm.workbook.checking import pytest_environment
from nanovllm.workbook.classroom import totals
from nanovllm.workbook.cli import main
from nanovllm.workbook.generate import stubs
from nanovllm.workbook.outcomes import FAILED, PASSED, TODO, ExerciseResult, table_text

ROOT = Workbook.find().root
WRONG_BLOCKS = "    return num_tokens // block_size + 1\n"


@pytest.fixture
def workbook(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Workbook]:
    """A copy of the workbook with nothing solved; the workbook's functions work on it."""
    for folder in ("solutions", "tests"):
        shutil.copytree(ROOT / folder, tmp_path / folder, ignore=shutil.ignore_patterns("__pycache__", "maintainer"))
    copy = Workbook(tmp_path.resolve(), tmp_path.resolve() / "exercises")
    copy.answers.mkdir()
    for path, text in stubs(copy).items():
        path.write_text(text, encoding="utf-8")
    monkeypatch.setenv("NANOVLLM_WORKBOOK", str(tmp_path))
    before = activate(Parts())
    yield copy
    activate(before)


def write(workbook: Workbook, exercise_id: str, code: str) -> Path:
    """Put `code` where the first raise of an exercise stands."""
    path = workbook.answers / workbook.exercise(exercise_id).file
    stub = f'    raise ExerciseTodo("{exercise_id}")\n'
    text = path.read_text(encoding="utf-8")
    assert stub in text
    path.write_text(text.replace(stub, code, 1), encoding="utf-8")
    return path


def run_pytest(workbook: Workbook, *arguments: str) -> subprocess.CompletedProcess[str]:
    """pytest as a learner runs it, in the copy."""
    config = workbook.root / "pytest.ini"
    config.write_text(
        "[pytest]\naddopts = --import-mode=importlib -p nanovllm.workbook.pytest_plugin --noconftest\n"
        "testpaths = tests/ch*\n"
    )
    environment = {**os.environ, **pytest_environment(workbook), "NANOVLLM_WORKBOOK": str(workbook.root)}
    return subprocess.run(
        [sys.executable, "-m", "pytest", *arguments], cwd=workbook.root, capture_output=True, text=True, env=environment
    )


def test_four_outcomes_on_the_command_line(workbook: Workbook) -> None:
    solve("4.1")
    write(workbook, "4.2", "    return []\n")
    out = workbook.root / "out.json"
    done = run_pytest(workbook, "--ch", "4", f"--grade-json={out}", "--junitxml=junit.xml")
    assert done.returncode == 1
    assert "target exercises" in done.stdout
    found = {entry["exercise_id"]: entry for entry in json.loads(out.read_text())}
    assert (found["4.1"]["state"], found["4.1"]["points"]) == (PASSED, found["4.1"]["total_points"])
    assert (found["4.2"]["state"], found["4.2"]["points"]) == (FAILED, 0)
    assert (found["4.3"]["state"], found["4.3"]["points"]) == (TODO, 0)
    assert "Traceback" not in done.stdout
    shown = done.stdout.split("FAILURES")[1].split("= exercises")[0]
    assert len(shown.strip().splitlines()) <= 17, "one failure of at most 15 lines, with its headings"
    assert "TODO" in done.stdout and "failed" in done.stdout
    assert 'tests="' in (workbook.root / "junit.xml").read_text()


def test_selection_and_targets(workbook: Workbook) -> None:
    assert run_pytest(workbook, "--ex", "4.1", "--target", "solutions").returncode == 0
    done = run_pytest(workbook, "--ex", "4.1", "--target", "engine", "-v")
    assert done.returncode == 0 and "4.2" not in done.stdout
    assert run_pytest(workbook, "tests/ch04/test_ex4_1_blocks_needed.py").returncode == 1, "nothing is solved yet"
    assert run_pytest(workbook, "--ex", "9.9").returncode not in (0, 1)


def test_check_judges_the_file_as_it_is_now(workbook: Workbook) -> None:
    assert check("4.1").results[0].state == TODO
    path = write(workbook, "4.1", WRONG_BLOCKS)
    result = check("4.1")
    assert result.results[0].state == FAILED and not result.passed
    assert "blocks_needed(" in result.text and "\nexpected  " in result.text and "\nrule " in result.text
    assert "<table" in result._repr_html_() and repr(result) == result.text
    path.write_text(path.read_text().replace(WRONG_BLOCKS, "    return -(-num_tokens // block_size)\n"))
    assert check(4.1).passed


@pytest.mark.parametrize(
    ("text", "state", "said"),
    [
        ("def blocks_needed(:\n", FAILED, "SyntaxError"),
        ("import no_such_module_at_all\n", FAILED, "no_such_module_at_all"),
        ("x = 1\n", FAILED, "no 'blocks_needed' in the file"),
        (None, TODO, ""),
    ],
)
def test_damaged_files(workbook: Workbook, text: str | None, state: str, said: str) -> None:
    path = workbook.answers / workbook.exercise("4.1").file
    path.unlink() if text is None else path.write_text(text)
    result = check("4.1")
    assert result.results[0].state == state
    assert said in result.text
    if said.startswith(("SyntaxError", "no_such")):  # the rule is what a class's CSV tells
        rule = result.results[0].first_failure.rule
        assert rule.startswith("The file must load: ") and said in rule and rule.count("line 1") <= 1
    assert "wherever" not in reset("4.1").text
    assert 'raise ExerciseTodo("4.1")' in path.read_text()


def test_a_loop_without_end_is_stopped(workbook: Workbook) -> None:
    loop = "    while True:\n        try:\n            int('x')\n        except Exception:\n            pass\n"
    write(workbook, "4.1", loop)
    result = check("4.1").results[0]
    first, second, third, *others = [test.text for test in result.tests]
    assert result.state == FAILED and "still running after 5 s" in first
    assert "still running after 1 s" in second and "still running after 1 s" in third, "once is enough of that"
    assert len(others) == 3 and all("not run: 3 tests of this exercise were still running" in text for text in others)
    rule = result.first_failure.rule  # what the table, a hint and a class's CSV tell
    assert rule.startswith("still running after 5 s: ") and rule.endswith("A number of blocks is an int.")


@pytest.mark.parametrize(
    ("line", "said"), [("while True: pass", "still running after 5 s"), ("raise SystemExit(3)", "SystemExit: 3")]
)
def test_a_file_that_never_loads_is_told_for_each_test(workbook: Workbook, line: str, said: str) -> None:
    """pytest gave up behind the first test of such a file, and the others were missing."""
    (workbook.answers / workbook.exercise("4.1").file).write_text(f"{line}\n")
    result = check("4.1").results[0]
    assert result.state == FAILED and len(result.tests) == 6 and all(test.state == FAILED for test in result.tests)
    assert result.first_failure.rule.startswith("The file must load: ") and said in result.first_failure.rule


def test_the_rule_of_an_error_begins_with_the_error(workbook: Workbook) -> None:
    write(workbook, "4.1", "    return no_such_name\n")
    result = check("4.1")
    assert result.results[0].first_failure.rule.startswith("NameError: name 'no_such_name' is not defined. A number")
    assert "rule      A number of blocks is an int." in result.text and "no_such_name" in hint("4.1").text


def unwrapped(text: str) -> str:
    """The words of a text, however its lines are broken."""
    return " ".join(text.split())


def test_hints_answer_the_failure_and_climb(workbook: Workbook) -> None:
    write(workbook, "4.1", WRONG_BLOCKS)
    check("4.1")
    exercise = workbook.exercise("4.1")
    first = unwrapped(hint("4.1").text)
    assert "Your last check failed at" in first and exercise.hints[0] in first
    assert exercise.hints[1] in unwrapped(hint("4.1").text)
    assert exercise.hints[2] in unwrapped(hint("4.1").text)
    assert "+    return full + (rest > 0)" in hint("4.1").text
    with pytest.raises(WorkbookError):
        hint("4.1", level=5)


def test_the_hints_that_a_page_shows_are_nobodys(workbook: Workbook) -> None:
    exercise = workbook.exercise("4.2")
    page = hint("4.2", level=1).text
    assert exercise.hints[0] in unwrapped(page) and 'More: hint("4.2", 2), or' in page
    assert "hints" not in progress().text
    assert exercise.hints[0] in unwrapped(hint("4.2").text), "the first one that is asked for"
    assert "hints 1/4" in progress().text
    hint("4.2", level=1)
    assert exercise.hints[1] in unwrapped(hint("4.2").text)
    hint("4.3", level=2)
    assert exercise.hints[0] not in unwrapped(hint("4.3").text) and progress().text.count("hints 3/4") == 1


def test_reveal_asks_once_and_reset_keeps_a_copy(workbook: Workbook) -> None:
    path = write(workbook, "4.1", WRONG_BLOCKS)
    mine = path.read_text()
    assert "+    return full" not in reveal("4.1").text
    assert "-    return num_tokens // block_size + 1" in reveal("4.1").text
    reset("4.1")
    assert path.read_text() == stubs(workbook)[path]
    assert [copy.read_text() for copy in (workbook.state / "copies").iterdir()] == [mine]
    assert "is the stub already" in reset("4.1").text


def test_reset_of_a_file_without_the_import(workbook: Workbook) -> None:
    """Somebody's linter took it out when all was solved, or the file is a copy of the solutions."""
    path = workbook.source(workbook.exercise("4.1"), "exercises")
    shutil.copy(workbook.source(workbook.exercise("4.1"), "solutions"), path)
    reset("4.1")
    assert [result.state for result in check("4.1", "4.2").results] == [TODO, PASSED]


def test_a_link_to_the_answers_stays_one(workbook: Workbook) -> None:
    path = workbook.source(workbook.exercise("4.1"), "exercises")
    target = workbook.root / "elsewhere.py"
    path.rename(target)
    path.symlink_to(target)
    solve("4.1")
    assert path.is_symlink() and 'raise ExerciseTodo("4.1")' not in target.read_text()


def test_a_memory_that_was_damaged_by_hand(workbook: Workbook) -> None:
    state.write_text(workbook.state / "progress.json", '{"4.2": {"hint": "x", "state": 3, "points": [], "rule": 1}}')
    assert "hint 1 of 4" in hint("4.2").text and "4.2" in progress().text


def test_where_nothing_can_be_remembered_there_is_a_way_on(
    workbook: Workbook, capsys: pytest.CaptureFixture[str]
) -> None:
    workbook.state.write_text("a file where the folder should be")  # a read-only tree does not stop every user
    shown = [reveal("4.1").text, reveal("4.1").text]
    assert all("--sure" in text and "divmod" not in text for text in shown)
    assert "the answer" in reveal("4.1", sure=True).text
    assert "nanovllm hint 4.1 --level 2" in hint("4.1").text and "--level 4" in hint("4.1", 3).text
    assert nanovllm_cli.main(["solve", "4.1"]) == 1
    said = capsys.readouterr().err
    assert said.startswith(f"nanovllm solve: {workbook.state}") and len(said.splitlines()) == 1


def test_progress_shows_the_path(workbook: Workbook) -> None:
    solve("4.1")
    check("4.1")
    shown = progress()
    assert "4/4 points" in shown.text and "TODO" in shown.text and "<table>" in shown.html
    path = workbook.answers / workbook.exercise("4.1").file
    reset("4.1")
    assert "4/4 points" not in progress().text
    path.unlink()
    assert "TODO" in progress().text


def test_no_title_is_cut_in_the_table(workbook: Workbook) -> None:
    results = [ExerciseResult.empty(exercise) for exercise in workbook.exercises]
    shown = table_text(workbook, results)
    assert [exercise.title for exercise in workbook.exercises if exercise.title not in shown] == []


def test_unknown_names_are_told(workbook: Workbook) -> None:
    with pytest.raises(WorkbookError, match="did you mean"):
        check("4.11")
    with pytest.raises(WorkbookError, match="chapters with exercises"):
        check("77")


def test_use_plugs_in_and_out(workbook: Workbook) -> None:
    assert "TODO" in use("4.1").text and not active_parts()
    solve("4.1", "4.4")
    with use("4.1", "4.4"):
        inside = dict(active_parts().replacements)
        with use("4.4", target="solutions"):
            assert "/solutions/" in active_parts().replacements["BlockManager.allocate"]
            assert "/exercises/" in active_parts().replacements["BlockManager.blocks_needed"]
        assert active_parts().replacements == inside
        assert set(inside) == {"BlockManager.blocks_needed", "BlockManager.allocate", "BlockManager.can_allocate"}
    assert not active_parts()
    use("4.1")
    use("4.1")
    assert len(active_parts().replacements) == 1
    use()
    assert not active_parts()


def test_what_use_says_of_a_block_is_true_in_it_and_behind_it(workbook: Workbook) -> None:
    solve("4.1")
    assert use("4.1").text.startswith("In use in every engine that is built from now on:\n")
    use()
    with use("4.1") as in_use:
        inside = in_use.text, in_use.html
    assert (in_use.text, in_use.html) == inside and not active_parts()
    assert all("In use in engines built inside this `with` block:" in text for text in inside)
    assert "from now on" not in str(inside) and "BlockManager.blocks_needed" in in_use.text


def test_use_warns_of_answers_that_are_not_known_to_be_right(workbook: Workbook) -> None:
    def said() -> str:
        with use("4") as in_use:
            return next(line for line in in_use.text.splitlines() if "4.1 " in line)

    check("4.1")
    assert "TODO" in said() and "check" not in said(), "nothing is plugged in"
    path = write(workbook, "4.1", WRONG_BLOCKS)
    assert said().endswith("(exercises/ch04_kv_cache.py)  (not checked yet)")
    check("4.1")
    assert said().endswith("(its last check failed)")
    assert "check" not in use("4.1", target="solutions").text
    path.write_text(path.read_text().replace(WRONG_BLOCKS, "    return -(-num_tokens // block_size)\n"))
    check("4.1")
    assert said().endswith("(exercises/ch04_kv_cache.py)")


SMALL = {"attention_backend": "torch", "kvcache_block_size": 4, "num_kvcache_blocks": 30, "dtype": "float32", "seed": 3}
PROMPTS = [list(range(5, 30)), [*range(5, 27), 3, 4], [9, 8, 7]]


def generate(llm: LLM, temperature: float = 1.0) -> list[list[int]]:
    params = SamplingParams(temperature, max_tokens=20, ignore_eos=True)
    return [result["token_ids"] for result in llm.generate(PROMPTS, params, use_tqdm=False)]


def test_error_in_learner_code_reads_as_such_and_engine_goes_on(workbook: Workbook, tiny_model_dir: Path) -> None:
    with LLM(str(tiny_model_dir), **SMALL) as llm:
        expected = generate(llm)
    solve("4.4")
    path = workbook.answers / workbook.exercise("4.4").file
    bad = "    if seq.num_tokens == 3:\n        self.no_such_thing\n    table = self.match_prefix(seq)\n"
    path.write_text(path.read_text().replace("    table = self.match_prefix(seq)\n", bad))
    with use("4.4"), LLM(str(tiny_model_dir), **SMALL) as llm:
        with pytest.raises(AttributeError) as caught:
            generate(llm)
        params = SamplingParams(max_tokens=20, ignore_eos=True)
        again = llm.generate(PROMPTS[0], params, use_tqdm=False)
        assert len(again[0]["token_ids"]) == 20
        assert len(llm.scheduler.block_manager.free_block_ids) == 30
    with pytest.raises(AttributeError) as told, use("4.4"):
        raise caught.value
    note = "\n".join(told.value.__notes__)
    assert str(path) in note and "self.no_such_thing" in note
    with LLM(str(tiny_model_dir), **SMALL) as llm:
        assert generate(llm) == expected, "outside the block the shipped engine is back"


def test_engine_from_all_answers_generates_the_same(workbook: Workbook, tiny_model_dir: Path) -> None:
    solve()
    same = [exercise.id for exercise in workbook.exercises if exercise.in_engine]
    # The others are parts that the engine does not have, a policy of one's own, say: the order of the rows may change,
    # and with it who gets which noise.
    everything = [chapter.number for chapter in workbook.chapters]
    for wanted, temperature in ((same, 1.0), (everything, 1e-6)):
        with LLM(str(tiny_model_dir), **SMALL) as llm:
            expected = generate(llm, temperature)
        with use(*wanted) as shown, LLM(str(tiny_model_dir), **SMALL) as llm:
            records = []
            llm.add_step_hook(records.append)
            assert generate(llm, temperature) == expected
        assert "TODO" not in shown.text
        kinds = {event.kind.value for record in records for event in record.block_events}
        assert kinds >= {"allocate", "cache", "release"}


def test_engine_from_all_answers_writes_the_same_text(workbook: Workbook, default_model_dir: Path) -> None:
    solve()
    options = {"dtype": "float32", "seed": 0, "kvcache_block_size": 16, "attention_backend": "torch", "max_num_seqs": 3}
    prompts = ["The capital of France is", "The capital of France is Paris. The capital of Italy is", "1, 2, 3,"]
    texts = []
    for wanted in ((), tuple(chapter.number for chapter in workbook.chapters)):
        with use(*wanted), LLM(str(default_model_dir), **options) as llm:
            params = SamplingParams(temperature=1e-6, max_tokens=12)
            texts.append([result["text"] for result in llm.generate(prompts, params, use_tqdm=False)])
    assert texts[0] == texts[1]


RANKS = {**SMALL, "device": "cpu", "tensor_parallel_size": 2}


def insert(workbook: Workbook, exercise_id: str, line: str) -> Path:
    """Put a line in front of a solved exercise's first region."""
    path = workbook.answers / workbook.exercise(exercise_id).file
    marker = f"    # --- your code ({exercise_id}) ---\n"
    path.write_text(path.read_text().replace(marker, f"{marker}    {line}\n", 1))
    return path


@pytest.mark.slow
def test_all_answers_run_in_every_rank(workbook: Workbook, tiny_model_dir: Path) -> None:
    with LLM(str(tiny_model_dir), **RANKS) as llm:
        expected = generate(llm, 1e-6)
    solve()
    seen = workbook.root / "seen"
    seen.mkdir()
    insert(workbook, "3.1", f'import os; open(f"{seen}/{{os.getpid()}}", "w").close()')
    everything = [chapter.number for chapter in workbook.chapters]
    with use(*everything), LLM(str(tiny_model_dir), **RANKS) as llm:
        pids = {os.getpid(), *(process.pid for process in llm.ps)}
        assert generate(llm, 1e-6) == expected
    assert {int(file.name) for file in seen.iterdir()} == pids and len(pids) == 2


@pytest.mark.slow
def test_error_in_learner_code_in_another_rank(workbook: Workbook, tiny_model_dir: Path) -> None:
    solve("3.1")
    line = 'if x.shape[0] == 3 and __import__("multiprocessing").parent_process(): raise KeyError("planted")'
    path = insert(workbook, "3.1", line)
    params = SamplingParams(1e-6, max_tokens=4, ignore_eos=True)
    with use("3.1"), LLM(str(tiny_model_dir), **RANKS) as llm:
        expected = llm.generate(PROMPTS[0], params, use_tqdm=False)
        with pytest.raises(RankError) as caught:
            llm.generate(PROMPTS[2], params, use_tqdm=False)
        assert llm.generate(PROMPTS[0], params, use_tqdm=False) == expected, "the engine goes on"
    with pytest.raises(RankError) as told, use("3.1"):
        raise caught.value
    note = "\n".join(told.value.__notes__)
    assert "rank 1" in note and str(path) in note and "planted" in note and line in note


@pytest.mark.parametrize("chapter", Workbook.find().chapters, ids=lambda chapter: chapter.number)
def test_quiz_is_complete(chapter) -> None:  # type: ignore[no-untyped-def]
    assert 4 <= len(chapter.quiz) <= 6
    shown = quiz(chapter.number)
    for number, question in enumerate(chapter.quiz, 1):
        assert f"{number}. " in shown.text
        if question["kind"] == "choice":
            right = [letter for letter in "abcdefgh"[: len(question["options"])]
                     if answer(chapter.number, number, letter).text.startswith("✓")]  # fmt: skip
            assert len(right) == 1 and len(question["reasons"]) == len(question["options"])
        else:
            assert len(question["reason"]) > 20 and len(question["key"]) == 16


def test_quiz_in_widgets_and_as_text(workbook: Workbook) -> None:
    shown = quiz("4")
    assert "text/plain" in shown._repr_mimebundle_() and "nanovllm quiz 4" in shown.text
    rows = shown.widget().children
    assert len(rows) == len(shown.questions)
    radio, verdict = rows[2].children[-2:]
    radio.value = "a"
    assert "Not yet" in verdict.value
    radio.value = "b"
    assert "Right" in verdict.value
    assert answer("4", 1, "many").text == "Question 1: answer with a number (not 'many')."
    assert "(one of a, b, c, d, not 'e')" in answer("4", 3, "e").text
    with pytest.raises(WorkbookError):
        answer("4", 99, "a")


def test_several_numbers_are_given_as_they_are_on_the_command_line() -> None:
    told = [answer("3", 1, *given).text for given in ((2, 8, 12), ("2 8 12",), ([2, 8, 12],))]
    assert told[0] == told[1] == told[2] and told[0].startswith("✓ Right.")


def test_an_error_in_a_kernel_is_told_with_the_kernels_line(workbook: Workbook) -> None:
    pytest.importorskip("triton")
    path = workbook.source(workbook.exercise("8.1"), "exercises")
    shutil.copy(workbook.source(workbook.exercise("8.1"), "solutions"), path)
    text = path.read_text(encoding="utf-8")
    start = text.index("@triton.jit")
    place = text.index("tl.load(", start)
    path.write_text(text[:place] + "widht + " + text[place:], encoding="utf-8")
    line = text[:place].count("\n") + 1
    (result,) = check("8.1").results
    said = str(result.to_json())
    assert f"NameError: name 'widht' is not defined in store_kernel, line {line}:" in said.replace("\\", "")
    assert "InterpreterError" not in said


def test_the_help_of_quiz_names_its_arguments(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["quiz", "--help"])
    assert "chapter [number] [answer ...]" in " ".join(capsys.readouterr().out.split())


def test_grade_as_json(workbook: Workbook, capsys: pytest.CaptureFixture[str]) -> None:
    solve("4.1")
    found = grade("4.1", "4.2")
    assert found["points"] == 4 and [entry["state"] for entry in found["exercises"]] == [PASSED, TODO]
    assert main(["grade", "4.1", "--json", "--junit", str(workbook.root / "j.xml")]) == 0
    assert json.loads(capsys.readouterr().out)["points"] == 4
    assert (workbook.root / "j.xml").exists()


def test_class_mode(workbook: Workbook, capsys: pytest.CaptureFixture[str]) -> None:
    students = workbook.root / "class"
    for name in ("ann", "bob", "eve", "nil"):
        (students / name).mkdir(parents=True)
    file = workbook.exercise("4.1").file
    shutil.copy(workbook.solutions / file, students / "ann" / file)
    shutil.copy(workbook.answers / file, students / "bob" / file)
    (students / "eve" / file).write_text(
        "import os\ndef blocks_needed(a, b):\n    os._exit(0)\n\ndef slot_mapping(self, start, stop):\n"
        "    while True:\n        pass\n"
    )
    out = workbook.root / "grades.csv"
    arguments = ["grade", "4.1", "4.2", "--class", str(students), "--csv", str(out), "--jobs", "2", "--seconds", "6"]
    assert main([*arguments, "--seed", "5"]) == 0
    rows = list(csv.DictReader(out.open()))
    assert [(row["student"], row["exercise"], row["state"]) for row in rows] == [
        ("ann", "4.1", PASSED), ("ann", "4.2", PASSED), ("bob", "4.1", TODO), ("bob", "4.2", TODO),
        ("eve", "4.1", FAILED), ("eve", "4.2", FAILED), ("nil", "4.1", TODO), ("nil", "4.2", TODO),
    ]  # fmt: skip
    assert rows[0]["points"] == rows[0]["total_points"] and rows[4]["points"] == "0"
    assert rows[5]["first_failing_rule"].startswith(("still running after 5 s: ", "The grading must end: "))
    assert f"8 rows graded into {out} (seed 5)\n\nstudent   ch 4  total\nann " in capsys.readouterr().out
    out.write_text("\n".join(out.read_text().splitlines()[:4]) + "\nbob,4.2,to")
    assert main([*arguments, "--resume"]) == 0
    assert [row["student"] for row in csv.DictReader(out.open())] == [row["student"] for row in rows]


def test_the_grades_of_an_earlier_run_are_kept(workbook: Workbook, capsys: pytest.CaptureFixture[str]) -> None:
    students, out = write_students(workbook, ann=""), workbook.root / "grades.csv"
    arguments = ["grade", "4.1", "--class", str(students), "--csv", str(out)]
    assert main(arguments) == main([*arguments, "--resume"]) == 0
    assert not Path(f"{out}~").exists()
    out.write_text("graded by hand")
    assert main(arguments) == 0
    assert Path(f"{out}~").read_text() == "graded by hand"
    assert f"What was in {out} is in {out}~ now." in capsys.readouterr().err
    assert [row["student"] for row in csv.DictReader(out.open())] == ["ann"]
    graded = out.read_text()
    for wrong in (["grade", "4.1", "--class", f"{students}s"], ["grade", "44.1", "--class", str(students)]):
        with pytest.raises(WorkbookError):
            main([*wrong, "--csv", str(out)])
    assert out.read_text() == graded, "a slip of the pen moves nothing"
    assert main(arguments) == 0
    second = out.with_name("grades-2.csv~")
    assert (Path(f"{out}~").read_text(), second.read_text()) == ("graded by hand", graded)


def write_students(workbook: Workbook, **answers: str) -> Path:
    """A class with one file a student, for chapter 4; returns its folder."""
    students = workbook.root / "class"
    for name, text in answers.items():
        (students / name).mkdir(parents=True)
        (students / name / workbook.exercise("4.1").file).write_text(text, encoding="utf-8")
    return students


def living(*words: str) -> list[str]:
    """The ids of processes with this command line."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            found += [path.parent.name] if path.read_text().split("\0")[:-1] == list(words) else []
        except OSError:
            continue
    return found


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="processes are looked for in /proc")
def test_what_an_answer_starts_ends_with_its_grading(workbook: Workbook) -> None:
    """Processes in the background, also those of a session of their own, and forks that go on by themselves."""
    right = (workbook.solutions / workbook.exercise("4.1").file).read_text(encoding="utf-8")
    seconds = f"{os.getpid()}.5"
    starts = (
        "import os, subprocess, time\n"
        f"subprocess.Popen(['sleep', '{seconds}'])\nsubprocess.Popen(['sleep', '{seconds}'], start_new_session=True)\n"
        f"if os.fork() == 0:\n    os.execvp('sleep', ['sleep', '{seconds}'])\n"
    )
    head, marker, rest = right.partition("def blocks_needed")
    students = write_students(workbook, ann=head + starts + "\n\n" + marker + rest)
    out = workbook.root / "grades.csv"
    assert main(["grade", "4.1", "--class", str(students), "--csv", str(out)]) == 0
    assert [row["state"] for row in csv.DictReader(out.open())] == [PASSED]
    assert not living("sleep", seconds)


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="processes are looked for in /proc")
def test_check_waits_for_nothing_that_an_answer_has_started(workbook: Workbook) -> None:
    seconds = f"{os.getpid()}.25"
    path = workbook.answers / workbook.exercise("4.1").file
    start = f"import subprocess\nsubprocess.Popen(['sleep', '{seconds}'])\n"
    path.write_text(start + "\ndef blocks_needed(num_tokens, block_size):\n    return -(-num_tokens // block_size)\n")
    assert check("4.1").passed
    assert not living("sleep", seconds)


def test_an_answer_that_ends_pytest_has_failed(workbook: Workbook) -> None:
    path = workbook.answers / workbook.exercise("4.1").file
    path.write_text("import pytest\npytest.exit('done', returncode=0)\n")
    result = check("4.1", "4.2")
    assert [found.state for found in result.results] == [FAILED, FAILED]
    assert "must end" in result.text and not result.passed
    path.write_text("import os\nprint('x' * 5_000_000)\nos._exit(0)\n")
    with pytest.raises(WorkbookError, match="checking ended early .exit status 0.") as caught:
        check("4.1")
    assert len(str(caught.value)) < 5000


def test_answers_of_another_folder_by_pytest(workbook: Workbook, tmp_path_factory: pytest.TempPathFactory) -> None:
    other = tmp_path_factory.mktemp("José Müller")
    shutil.copy(workbook.solutions / workbook.exercise("4.1").file, other)
    assert run_pytest(workbook, "--ex", "4.1", f"--answers={other}").returncode == 0
    done = run_pytest(workbook, "--answers=no-such-folder")
    assert done.returncode == 4 and "not a folder" in done.stderr


def test_an_interrupt_of_class_mode_ends_at_once_and_keeps_what_is_finished(workbook: Workbook) -> None:
    loop = (
        "def blocks_needed(a, b):\n    while True:\n        try:\n            int('x')\n"
        "        except BaseException:\n            pass\n"
    )
    right = (workbook.solutions / workbook.exercise("4.1").file).read_text(encoding="utf-8")
    students = write_students(workbook, ann=right, bob=loop, eve=right, zoe=loop)
    out = workbook.root / "grades.csv"
    arguments = ["grade", "4.1", "--class", str(students), "--csv", str(out), "--jobs", "2"]
    command = [sys.executable, "-m", "nanovllm", *arguments]
    environment = {**os.environ, **pytest_environment(workbook), "NANOVLLM_WORKBOOK": str(workbook.root)}
    process = subprocess.Popen(
        [*command, "--seconds", "200"], env=environment, stderr=subprocess.PIPE, text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # a shell's background job ignores it
    )  # fmt: skip
    try:
        deadline = time.monotonic() + 100
        while not (out.exists() and "ann" in out.read_text()) and time.monotonic() < deadline:
            time.sleep(0.2)
        time.sleep(4)
        process.send_signal(signal.SIGINT)
        said = process.communicate(timeout=60)[1]
    finally:
        process.kill()
    assert process.returncode == 130 and "interrupted" in said and "--resume" in said and "Traceback" not in said
    rows = [(row["student"], row["state"]) for row in csv.DictReader(out.open())]
    assert rows[0] == ("ann", PASSED) and ("bob", FAILED) not in rows and ("zoe", FAILED) not in rows
    assert main([*arguments, "--seconds", "6", "--resume"]) == 0
    found = sorted((row["student"], row["state"]) for row in csv.DictReader(out.open()))
    assert found == [("ann", PASSED), ("bob", FAILED), ("eve", PASSED), ("zoe", FAILED)]


def test_names_of_students_may_hold_anything(workbook: Workbook) -> None:
    right = (workbook.solutions / workbook.exercise("4.1").file).read_text(encoding="utf-8")
    students = write_students(workbook, **{"José Müller, 漢字": right})
    latin = os.fsencode(students) + b"/Jos\xe9"
    os.mkdir(latin)
    out = workbook.root / "grades.csv"
    arguments = ["grade", "4.1", "--class", str(students), "--csv", str(out)]
    assert main(arguments) == 0 and main([*arguments, "--resume"]) == 0
    rows = list(csv.DictReader(out.open(encoding="utf-8", errors="surrogateescape", newline="")))
    assert [(row["student"], row["state"]) for row in rows] == [
        ("José Müller, 漢字", PASSED), (os.fsdecode(b"Jos\xe9"), TODO)
    ]  # fmt: skip


def test_folders_without_answers_are_named(workbook: Workbook, capsys: pytest.CaptureFixture[str]) -> None:
    file = workbook.exercise("4.1").file
    students = write_students(workbook, ann=(workbook.solutions / file).read_text(encoding="utf-8"))
    deep = students / "bob" / "exercises"  # a whole clone was handed in
    deep.mkdir(parents=True)
    shutil.copy(workbook.solutions / file, deep / file)
    out = workbook.root / "grades.csv"
    assert main(["grade", "4.1", "--class", str(students), "--csv", str(out)]) == 0
    rules = {row["student"]: row["first_failing_rule"] for row in csv.DictReader(out.open())}
    told = f"There is no {file} in the folder; perhaps it is: exercises/{file}."
    assert rules == {"ann": "", "bob": told}
    assert capsys.readouterr().err.endswith(f"in 1 of the folders: bob\nbob: {told}\n")


def test_a_missing_file_is_told_with_those_that_may_be_meant(
    workbook: Workbook, capsys: pytest.CaptureFixture[str]
) -> None:
    answers = workbook.root / "handed in"
    answers.mkdir()
    for names, near in (
        ((), "."),
        (("notes.py", ".git/ch04_kv_cache.py"), "."),
        (("ch04_kv_cache (1).py",), "; perhaps it is: ch04_kv_cache (1).py."),
        (("ann/Ch04-kv cache.py.txt",), "; perhaps it is: ch04_kv_cache (1).py, ann/Ch04-kv cache.py.txt."),
    ):
        for name in names:
            (answers / name).parent.mkdir(exist_ok=True)
            (answers / name).write_text("")
        assert main(["grade", "4.1", "4.2", "--answers", str(answers)]) == 0
        told = capsys.readouterr()
        assert told.err == f"There is no ch04_kv_cache.py in the folder{near} Its exercises count as TODO.\n"
        assert "4.2" in told.out
    shutil.copy(workbook.solutions / "ch04_kv_cache.py", answers)
    assert main(["grade", "4.1", "--answers", str(answers), "--json"]) == 0
    told = capsys.readouterr()
    assert told.err == "" and json.loads(told.out)["missing"] == []


def test_totals_of_a_class() -> None:
    def row(student: str, exercise: str, points: int) -> dict[str, str]:
        return {"student": student, "exercise": exercise, "points": str(points), "total_points": "6"}

    rows = [row("漢字", "4.1", 6), row("漢字", "4.2", 3), row("漢字", "10.1", 2), row("Jos\udce9" + 40 * "x", "4.1", 0)]
    assert totals(rows).splitlines() == [
        "student                         ch 4  ch 10  total",
        "漢字                            9/12    2/6  11/18",
        "Jos\\udce9xxxxxxxxxxxxxxxxxxxx…   0/6           0/6",
    ]
    many = totals([row(f"s{number}", "4.1", 1) for number in range(130)]).splitlines()
    assert len(many) == 102 and many[-1] == "… and 30 more students"


def test_a_syntax_error_is_told_once_for_its_file(workbook: Workbook) -> None:
    path = workbook.answers / workbook.exercise("4.1").file
    path.write_text("def blocks_needed(:\n")
    shown = check("4.1", "4.2", "4.3", "5.1")
    assert [result.state for result in shown.results] == [FAILED, FAILED, FAILED, TODO]
    for text in (shown.text, shown.html):
        table, _, failure = text.partition("exercise 4.1")
        assert table.count("SyntaxError") == 1 and table.count("The file does not load: see above.") == 2
        assert failure.count("\nexpected ") == 1
    assert all("SyntaxError" in result.first_failure.rule for result in shown.results[:3]), "a CSV has it in each row"


def test_a_teachers_mistakes_are_told_before_anything_is_graded(workbook: Workbook) -> None:
    students = write_students(workbook, ann="")
    out = workbook.root / "grades.csv"
    out.write_text("student;exercise;state\nann;4.1;passed\n")
    with pytest.raises(WorkbookError, match="cannot be resumed"):
        main(["grade", "4.1", "--class", str(students), "--csv", str(out), "--resume"])
    assert out.read_text().startswith("student;"), "it is not overwritten"
    head = "student,exercise,state,points,total_points,seconds,first_failing_rule\nann,4.2,passed,2,2,1,\n"
    for line in ("ann,4.1,passed,3.5,4,1,", "ann,foo,passed,1,4,1,", "ann,4.1,passed,,4,1,"):
        out.write_text(head + line + "\n")
        with pytest.raises(WorkbookError, match="grades.csv, line 3: exercise '.*is no result; mend or remove"):
            main(["grade", "4.1", "--class", str(students), "--csv", str(out), "--resume"])
        assert out.read_text() == head + line + "\n"
    for wrong in (workbook.root / "none" / "grades.csv", workbook.root):
        with pytest.raises(WorkbookError, match="cannot write"):
            main(["grade", "4.1", "--class", str(students), "--csv", str(wrong)])
    with pytest.raises(WorkbookError, match="is not a folder"):
        main(["grade", "4.1", "--answers", str(workbook.root / "none")])


@pytest.mark.parametrize(
    "options",
    [["--resume"], ["--csv", "x.csv"], ["--class", "c", "--json"], ["--class", "c", "--junit", "j"],
     ["--class", "c", "--answers", "a"], ["--class", "c", "--jobs", "0"], ["--class", "c", "--seconds", "0"],
     ["--class", "c", "--memory-mb", "-1"]],
)  # fmt: skip
def test_options_of_grade_that_do_not_go_together(options: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(["grade", *options])
    assert stopped.value.code == 2 and "error:" in capsys.readouterr().err
