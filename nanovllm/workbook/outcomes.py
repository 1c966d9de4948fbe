"""Four outcomes, points by layer, and how they are shown: as text for terminals and as HTML for notebooks.

passed   every test of the exercise holds
todo     a test met `ExerciseTodo`: worth nothing yet
failed   an answer is there and breaks a rule
not run  this machine lacks what the exercise needs
"""

import textwrap
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from html import escape
from typing import Any

from nanovllm.workbook.catalogue import LAYERS, Exercise, Workbook

PASSED, TODO, FAILED, NOT_RUN = "passed", "todo", "failed", "not run here"
MARKS = {PASSED: "✓", TODO: "·", FAILED: "✗", NOT_RUN: "–"}
LABELS = {PASSED: "passed", TODO: "TODO", FAILED: "failed", NOT_RUN: "not run here"}
LOADS = "The file must load."
WIDTH = 100  # columns of a paragraph


@dataclass(slots=True)
class TestResult:
    """One test. name: ``boundary__exact_multiple``. text: what a failure says, at most 15 lines."""

    __test__ = False

    name: str
    state: str
    seconds: float = 0.0
    text: str = ""
    rule: str = ""

    @property
    def layer(self) -> str:
        return self.name.partition("__")[0]


@dataclass(slots=True)
class ExerciseResult:
    """One exercise: the results of its tests, in their order."""

    exercise_id: str
    title: str
    points_by_layer: dict[str, int]
    tests: list[TestResult] = field(default_factory=list)

    @property
    def state(self) -> str:
        states = {test.state for test in self.tests}
        return next((state for state in (FAILED, TODO, NOT_RUN) if state in states), PASSED if states else NOT_RUN)

    @property
    def points(self) -> int:
        """A layer's points are earned by passing all its tests; an unfinished answer earns none."""
        if self.state in (TODO, NOT_RUN):
            return 0
        return sum(
            points
            for layer, points in self.points_by_layer.items()
            if (tests := [test for test in self.tests if test.layer == layer]) and all(t.state == PASSED for t in tests)
        )

    @property
    def total_points(self) -> int:
        return sum(self.points_by_layer.values())

    @property
    def seconds(self) -> float:
        return sum(test.seconds for test in self.tests)

    @property
    def first_failure(self) -> TestResult | None:
        return next((test for test in self.tests if test.state == FAILED), None)

    def to_json(self) -> dict[str, Any]:
        failure = self.first_failure
        summary = {"state": self.state, "points": self.points, "total_points": self.total_points}
        return {**asdict(self), **summary, "seconds": round(self.seconds, 3), "first_failure": failure and failure.name}

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> "ExerciseResult":
        tests = [TestResult(**test) for test in data["tests"]]
        return cls(data["exercise_id"], data["title"], data["points_by_layer"], tests)

    @classmethod
    def empty(cls, exercise: Exercise) -> "ExerciseResult":
        ordered = {layer: exercise.points[layer] for layer in LAYERS if layer in exercise.points}
        return cls(exercise.id, exercise.title, ordered)


def load_error(result: ExerciseResult) -> str:
    """Why the file of an exercise does not load; "" where it does. It is the same for all exercises of the file."""
    rule = result.first_failure.rule if result.first_failure else ""
    return rule if rule.startswith(LOADS.removesuffix(".") + ":") else ""


def _remarks(results: list[ExerciseResult]) -> list[str]:
    """What stands behind the points of each of a chapter's exercises. That their file does not load is told once."""
    told: set[str] = set()
    remarks = []
    for result in results:
        error = load_error(result)
        remarks.append("The file does not load: see above." if error in told else error or _remark(result))
        told.update([error] if error else [])
    return remarks


def _remark(result: ExerciseResult) -> str:
    """What stands behind an exercise's points: the rule that broke, or why nothing ran."""
    if failure := result.first_failure:
        return f"{failure.name.replace('__', ': ').replace('_', ' ')}. {failure.rule}"
    if result.state == NOT_RUN:
        return next((test.text for test in result.tests if test.text), "")
    return ""


def table_text(workbook: Workbook, results: Iterable[ExerciseResult], target: str = "exercises") -> str:
    """One table per chapter, and the first failure's rule behind each exercise."""
    by_id = {result.exercise_id: result for result in results}
    lines: list[str] = []
    for chapter in workbook.chapters:
        rows = [by_id[exercise.id] for exercise in chapter.exercises if exercise.id in by_id]
        if not rows:
            continue
        lines.append(f"chapter {chapter.number}: {chapter.title}   (target: {target})")
        for row, remark in zip(rows, _remarks(rows), strict=True):
            passed = sum(test.state == PASSED for test in row.tests)
            tests = f"{passed}/{len(row.tests)}"
            head = f"  {row.exercise_id:<4} {row.title[:40]:<40}  {MARKS[row.state]} {LABELS[row.state]:<12}"
            lines.append(f"{head}{tests:>6} tests  {row.points:>2}/{row.total_points} points")
            if remark:
                lines.append(wrapped(remark, " " * 7, " " * 7))
        lines.append(f"  points: {sum(row.points for row in rows)} of {sum(row.total_points for row in rows)}")
    return "\n".join(lines)


def table_html(workbook: Workbook, results: Iterable[ExerciseResult], target: str = "exercises") -> str:
    """The same for a notebook. States differ by mark and word, not by colour alone."""
    by_id = {result.exercise_id: result for result in results}
    parts: list[str] = []
    for chapter in workbook.chapters:
        rows = [by_id[exercise.id] for exercise in chapter.exercises if exercise.id in by_id]
        if not rows:
            continue
        body = "".join(map(_row_html, rows, _remarks(rows)))
        points, total = sum(row.points for row in rows), sum(row.total_points for row in rows)
        parts.append(
            f'<table style="text-align:left"><caption style="text-align:left;font-weight:700;white-space:nowrap">'
            f"Chapter {chapter.number}: {escape(chapter.title)} · {points} of {total} points · target: {escape(target)}"
            f"</caption>{body}</table>"
        )
    return "".join(parts)


def _row_html(row: ExerciseResult, remark: str) -> str:
    passed = sum(test.state == PASSED for test in row.tests)
    cells = (
        row.exercise_id,
        row.title,
        f"{MARKS[row.state]} {LABELS[row.state]}",
        f"{passed}/{len(row.tests)} tests",
        f"{row.points}/{row.total_points} points",
        remark,
    )
    return "<tr>" + "".join(f'<td style="text-align:left">{escape(cell)}</td>' for cell in cells) + "</tr>"


class Shown:
    """Something to look at: HTML in a notebook, the text twin elsewhere."""

    def __init__(self, text: str, html: str | None = None) -> None:
        self.text = text
        self.html = html if html is not None else pre(text)

    def __repr__(self) -> str:
        return self.text

    def __str__(self) -> str:
        return self.text

    def _repr_html_(self) -> str:
        return self.html


def pre(text: str) -> str:
    """Text as HTML that keeps its lines. Too long ones go on in the next, at a space (JupyterLab's own style would
    break them in the middle of a word)."""
    style = "white-space:pre-wrap;word-break:normal;overflow-wrap:break-word;line-height:1.4;margin:0.3em 0"
    return f'<pre style="{style}">{escape(text)}</pre>'


def wrapped(text: str, first: str = "", others: str = "", width: int = WIDTH) -> str:
    """A paragraph in lines of at most `width` columns, broken at spaces. first, others: what the lines begin with."""
    return textwrap.fill(
        text, width, initial_indent=first, subsequent_indent=others, break_long_words=False, break_on_hyphens=False
    )
