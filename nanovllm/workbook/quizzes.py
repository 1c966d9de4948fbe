"""Quizzes: four to six questions a chapter, in ipywidgets where there is a notebook and as text everywhere.

The data file `data/quizNN.toml` holds no answer in the open: each key is a salted hash, which keeps a casual look from
telling it, nothing more. ``python -m nanovllm.workbook.quizzes 4 2 b`` prints the key of an answer for authors.

    [[question]]
    kind = "choice"                     # or "number", "order", "numbers"
    text = "…"
    options = ["…", "…", "…"]           # choice: a, b, c …; order: the steps, shuffled by the author
    reasons = ["…", "…", "…"]           # choice: one for every option
    reason = "…"                        # the other kinds: shown with the right answer
    decimals = 1                        # number: digits that count behind the point (default 0)
    key = "…"
"""

import sys
from hashlib import sha256
from html import escape
from typing import Any

from nanovllm.workbook import state
from nanovllm.workbook.catalogue import Workbook, WorkbookError
from nanovllm.workbook.outcomes import WIDTH, Shown, pre, wrapped

KINDS = ("choice", "number", "order", "numbers")
HOW = {
    "choice": "answer with a letter",
    "number": "answer with a number",
    "order": "answer with the letters in order, as in: c a b",
    "numbers": "answer with the numbers in order, as in: 3 0 5",
}


def normal_form(question: dict[str, Any], given: Any) -> str:
    """An answer without what does not count: case, spaces, commas, brackets, digits beyond `decimals`.

    Raises ValueError on something that is no answer to such a question.
    """
    if isinstance(given, (list, tuple)):
        given = " ".join(map(str, given))
    text = str(given).strip().lower()
    if question["kind"] == "number":
        return f"{float(text.replace(',', '').replace('_', '')):.{question.get('decimals', 0)}f}"
    for mark in ",;()[]":
        text = text.replace(mark, " ")
    words = text.split()
    if question["kind"] == "order" and len(words) == 1:
        words = list(words[0])
    if question["kind"] == "choice" and (len(words) != 1 or words[0] not in letters(question)):
        raise ValueError(f"{text!r} is no option")
    return " ".join(str(int(word)) for word in words) if question["kind"] == "numbers" else " ".join(words)


def letters(question: dict[str, Any]) -> list[str]:
    return [chr(ord("a") + number) for number in range(len(question.get("options", ())))]


def key_of(chapter: str, number: int, question: dict[str, Any], given: Any) -> str:
    """The salted hash of an answer."""
    text = f"nanovllm quiz {chapter}.{number}: {normal_form(question, given)}"
    return sha256(text.encode()).hexdigest()[:16]


def question_of(chapter: str | float, number: int) -> tuple[str, dict[str, Any]]:
    found = Workbook.find().chapter(chapter)
    if not 1 <= number <= len(found.quiz):
        raise WorkbookError(f"chapter {found.number}'s quiz has the questions 1 to {len(found.quiz)}, not {number}")
    return found.number, found.quiz[number - 1]


def answer(chapter: str | float, number: int, *words: Any) -> Shown:
    """Answer question `number` of a chapter's quiz: ``answer("4", 2, "b")``, ``answer("3", 1, 3, 0, 5)``. Tells whether
    it is right, and why."""
    given = words[0] if len(words) == 1 else words
    name, question = question_of(chapter, number)
    try:
        right = key_of(name, number, question, given) == question["key"]
    except ValueError:
        choice = f"one of {', '.join(letters(question))}, " if question["kind"] == "choice" else ""
        return Shown(f"Question {number}: {HOW[question['kind']]} ({choice}not {str(given)[:40]!r}).")
    if question["kind"] == "choice":
        reason = question["reasons"][letters(question).index(normal_form(question, given))]
    else:
        nudge = question.get("nudge", "trace it by hand, step by step.")
        reason = question["reason"] if right else f"Try again: {nudge}"
    if right:
        workbook = Workbook.find()
        done = {*state.load(workbook).get(f"quiz {name}", {}).get("right", []), number}
        state.remember(workbook, f"quiz {name}", right=sorted(done))
    return Shown(wrapped(f"{'✓ Right.' if right else '✗ Not yet.'} {reason}"))


def question_text(number: int, question: dict[str, Any], width: int = WIDTH) -> str:
    """One question as text, in lines of `width` columns. A line that begins with spaces stays as its author wrote it (a
    table, a piece of code)."""
    lines = [
        f"   {line}" if line.startswith(" ") else wrapped(line, "   ", "   ", width)
        for line in question["text"].strip().splitlines()
    ]
    pairs = zip(letters(question), question.get("options", ()), strict=True)
    options = [wrapped(text, f"   {letter}) ", " " * 6, width) for letter, text in pairs]
    return "\n".join([f"{number}. {lines[0][3:]}", *lines[1:], *options, f"   [{HOW[question['kind']]}]"])


class Quiz(Shown):
    """A chapter's quiz: widgets in a notebook with ipywidgets, its text elsewhere."""

    def __init__(self, chapter: str, title: str, questions: tuple[dict[str, Any], ...]) -> None:
        self.chapter, self.questions = chapter, questions
        foot = f'Answer with: answer("{chapter}", 1, ...), or: nanovllm quiz {chapter} 1 ...'

        def text(width: int) -> str:
            body = [question_text(number, question, width) for number, question in enumerate(questions, 1)]
            return "\n\n".join([f"Quiz of chapter {chapter}: {title}", *body, foot])

        super().__init__(text(WIDTH), pre(text(sys.maxsize)))  # a browser knows its own width

    def widget(self) -> Any:
        """The quiz as an ipywidgets box. Raises ImportError without ipywidgets."""
        import ipywidgets

        return ipywidgets.VBox([self._row(ipywidgets, number, q) for number, q in enumerate(self.questions, 1)])

    def _row(self, widgets: Any, number: int, question: dict[str, Any]) -> Any:
        head = widgets.HTML(f"<b>{number}.</b> {escape(question['text'].strip())}")
        verdict = widgets.HTML()
        pairs = list(zip(letters(question), question.get("options", ()), strict=True))
        extra = []
        if question["kind"] == "choice":
            options = [(f"{letter}) {text}", letter) for letter, text in pairs]
            entry = widgets.RadioButtons(options=options, value=None, layout=widgets.Layout(width="auto"))
        else:
            entry = widgets.Text(placeholder=f"{HOW[question['kind']]}; then Enter", continuous_update=False)
            if pairs:
                extra = [widgets.HTML("<br>".join(f"{letter}) {escape(text)}" for letter, text in pairs))]

        def judge(change: dict[str, Any]) -> None:
            if change["new"] not in (None, ""):
                verdict.value = escape(answer(self.chapter, number, change["new"]).text)

        entry.observe(judge, names="value")
        return widgets.VBox([head, *extra, entry, verdict], layout=widgets.Layout(margin="0 0 1em 0"))

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> dict[str, Any]:
        """Widgets where they can be drawn; the text twin stays with the page."""
        plain = {"text/plain": self.text, "text/html": self.html}
        try:
            bundle = self.widget()._repr_mimebundle_()
        except ImportError:
            return plain
        data: dict[str, Any] = bundle[0] if isinstance(bundle, tuple) else bundle
        return {**(data or {}), **plain}


def quiz(chapter: str | float) -> Quiz:
    """The quiz of a chapter."""
    found = Workbook.find().chapter(chapter)
    if not found.quiz:
        raise WorkbookError(f"chapter {found.number} has no quiz")
    return Quiz(found.number, found.title, found.quiz)


if __name__ == "__main__":
    author_chapter, author_number, *author_answer = sys.argv[1:]
    author_question = question_of(author_chapter, int(author_number))[1]
    print(key_of(author_chapter, int(author_number), author_question, " ".join(author_answer)))
