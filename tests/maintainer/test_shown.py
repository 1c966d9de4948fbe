"""What the workbook says keeps to the page: paragraphs in lines of at most 100 columns, broken between words."""

from html import escape

import pytest

from nanovllm.workbook.catalogue import Workbook
from nanovllm.workbook.outcomes import FAILED, WIDTH, ExerciseResult, TestResult, table_html, table_text, wrapped
from nanovllm.workbook.quizzes import question_text, quiz

WORKBOOK = Workbook.find()
CHAPTERS = [chapter for chapter in WORKBOOK.chapters if chapter.quiz]


@pytest.mark.parametrize("chapter", CHAPTERS, ids=lambda chapter: str(chapter.number))
def test_a_quiz_keeps_to_the_page_and_loses_no_word(chapter: object) -> None:
    shown = quiz(chapter.number)  # type: ignore[attr-defined]
    assert max(map(len, shown.text.splitlines())) <= WIDTH
    words = shown.text.split()
    for question in shown.questions:
        for text in (question["text"], *question.get("options", ())):
            expected = text.split()
            starts = [i for i, word in enumerate(words) if word == expected[0]]
            assert any(words[i : i + len(expected)] == expected for i in starts), text
            assert escape(text.strip()) in shown._repr_html_(), "a browser breaks the lines itself"
    assert "word-break:normal" in shown._repr_html_(), "JupyterLab breaks preformatted text anywhere"


def test_lines_of_a_question_stay_lines() -> None:
    question = {"kind": "choice", "text": "Look:\n  a  b\n  1  2\n" + "word " * 30, "options": ["x " * 60, "y"]}
    first, table_head, table_row, long, more, *options, how = question_text(7, question).splitlines()
    assert (first, table_head, table_row) == ("7. Look:", "     a  b", "     1  2")
    assert long.startswith("   word") and more.startswith("   word")
    assert options == ["   a) " + "x " * 46 + "x", "      " + "x " * 12 + "x", "   b) y"]
    assert how == "   [answer with a letter]"


def test_a_wrapped_word_is_never_broken() -> None:
    long = "https://" + "x" * 120
    text = f"see {long} for two-headed ones"
    assert wrapped(text, "- ", "  ").split() == ["-", *text.split()]
    assert all(len(line) <= WIDTH for line in wrapped("two-headed " * 50).splitlines())


def test_the_table_of_results_keeps_to_the_page() -> None:
    exercise = WORKBOOK.exercise("4.1")
    rule = "The rule that this answer breaks takes more than one line to tell, " * 4
    result = ExerciseResult.empty(exercise)
    result.tests.append(TestResult("oracle__random_cases", FAILED, rule=rule.strip()))
    lines = table_text(WORKBOOK, [result]).splitlines()
    assert max(map(len, lines)) <= WIDTH
    assert " ".join(" ".join(lines).split()).count(rule.strip()) == 1, "nothing is cut off"
    assert '<caption style="text-align:left;font-weight:700;white-space:nowrap">' in table_html(WORKBOOK, [result])
