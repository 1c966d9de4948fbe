"""What a notebook page is built from: shown source, predictions, exercise cards and tables.

Everything here returns something that shows itself (or, for `predict`, shows it at once), with a text twin, and works
when nobody is there to answer. It knows the catalogue and the package's source files; it never runs the engine.
"""

import ast
import io
import json
import re
import textwrap
from collections.abc import Iterable, Iterator, Mapping
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from functools import partial
from hashlib import sha256
from html import escape
from numbers import Real
from pathlib import Path
from typing import Any

import nanovllm
from nanovllm.errors import NanoVLLMError
from nanovllm.viz.scene import PALETTE
from nanovllm.viz.still import need
from nanovllm.workbook.catalogue import Exercise, Workbook
from nanovllm.workbook.sources import definition, lines_of, stub_text

PACKAGE = Path(nanovllm.__file__).parent
BLUE, AMBER = "#2b66a8", "#c98a12"
NUMBERS = (int, float)
CLOSE = 0.1  # a guessed number within a tenth of the truth is a good guess


class Shown:
    """A piece of a page: one rich form and the same in plain text. `origin` travels as metadata of the output."""

    def __init__(self, mime: str, rich: str | bytes, text: str, origin: dict[str, str] | None = None) -> None:
        self.mime, self.rich, self.text, self.origin = mime, rich, text, origin

    def __repr__(self) -> str:
        return self.text

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> Any:
        bundle = {"text/plain": self.text, self.mime: self.rich}
        return (bundle, {"nanovllm": self.origin}) if self.origin else bundle


def card(title: str, body: str, accent: str = BLUE) -> str:
    """A box in the colours of the page around it (light or dark). `body` is HTML."""
    style = f"border-left:4px solid {accent};background:{accent}1a;padding:0.6em 1em;margin:0.3em 0"
    return f'<div style="{style}"><strong>{escape(title)}</strong><br>{body}</div>'


def _show(piece: Shown) -> None:
    """Display at once: in a notebook through IPython, elsewhere as text."""
    try:
        from IPython.core.getipython import get_ipython
        from IPython.display import display
    except ImportError:
        print(piece)
        return
    if get_ipython() is None:
        print(piece)
    else:
        display(piece)


# -- predict, then run


@dataclass(frozen=True, slots=True)
class Prediction:
    """A question and what the reader thinks; `compare` puts it beside what happened."""

    question: str
    my_answer: Any
    options: Mapping[str, str]

    def compare(self, actual: Any) -> Shown:
        """The reader's answer beside the actual one. For a choice, `actual` is the letter of the right option."""
        mine = "no guess this time" if self.my_answer is None else self._words(self.my_answer)
        verdict = self.verdict(actual)
        rows = [("you said", mine), ("it is", self._words(actual))]
        body = "<br>".join(f"{escape(name)}: <strong>{escape(value)}</strong>" for name, value in rows)
        rich = card(f"{self.question}", f"{body}<br>{escape(verdict)}" if verdict else body, AMBER)
        text = [self.question, *(f"  {name}: {value}" for name, value in rows), f"  {verdict}" if verdict else ""]
        return Shown("text/html", rich, "\n".join(filter(None, text)))

    def verdict(self, actual: Any) -> str:
        """One short remark; "" where nobody guessed."""
        mine = self.my_answer
        if mine is None:
            return ""
        if self.options:
            return self.no_option() or self._right(self.option(mine) == self.option(actual) is not None)
        guess, truth = number_in(mine), number_in(actual)
        if truth is None:
            return self._right(plain(mine) == plain(actual))
        if guess is None:
            return "The answer is a number: write one next time."
        if guess == truth:
            return "Spot on."
        return "Close." if abs(guess - truth) <= CLOSE * abs(truth) else self._right(False)

    def option(self, answer: Any) -> str | None:
        """The letter of the option that an answer means, by its letter or by its text; None if it means none."""
        wanted, number = plain(answer), number_in(answer)
        for letter in self.options:
            if wanted.rstrip(")") == letter:
                return letter
        for letter, text in self.options.items():
            same_number = number is not None and number == number_in(text)
            if wanted in (plain(text), plain(f"{letter}) {text}")) or same_number:
                return letter
        return None

    def no_option(self) -> str:
        """What to say about a guess that is none of the options; "" where it is one, and where nothing is to choose."""
        if not self.options or self.my_answer is None or self.option(self.my_answer) is not None:
            return ""
        *others, last = self.options
        return f"{str(self.my_answer)[:40]!r} is none of the options: {', '.join(others)} or {last}."

    def _right(self, right: bool) -> str:
        return "Right." if right else "Not this time: find out why below."

    def _words(self, answer: Any) -> str:
        if (letter := self.option(answer)) is not None:
            return f"{letter}) {self.options[letter]}"
        if isinstance(answer, int) and not isinstance(answer, bool):
            return f"{answer:,}"
        return f"{answer:.3g}" if isinstance(answer, float) else str(answer)


def plain(answer: Any) -> str:
    """An answer's text without what does not count: case and blanks."""
    return "".join(str(answer).lower().split())


def number_in(answer: Any) -> float | None:
    """The number that an answer is, or that it spells ("16", "4,096"); None if it is none."""
    if isinstance(answer, Real):
        return None if isinstance(answer, bool) else float(answer)
    text = re.sub(r"(?<=\d)[,_](?=\d{3}(?!\d))", "", plain(answer))
    is_number = isinstance(answer, str) and re.fullmatch(r"[+-]?(\d+\.?\d*|\.\d+)(e[+-]?\d+)?", text)
    return float(text) if is_number else None


def predict(question: str, my_answer: Any = None, **options: str) -> Prediction:
    """Ask before running. `my_answer` is the reader's guess (None: none yet); `a="…", b="…"` make it a choice.

    Shows the question at once, and returns the prediction: call its `compare(actual)` behind the cell that finds out.
    """
    prediction = Prediction(question, my_answer, options)
    lines = [f"{letter}) {text}" for letter, text in options.items()]
    how = "Put your answer in the place of None and run this cell again. Or go on and be surprised."
    if my_answer is not None:
        how = prediction.no_option() or "Noted. Now run on."
    body = "".join(f"{escape(line)}<br>" for line in (question, *lines)) + f"<em>{escape(how)}</em>"
    _show(Shown("text/html", card("Predict, then run", body), "\n".join((question, *lines, how))))
    return prediction


# -- source, shown live


def find_definition(symbol: str) -> tuple[Path, ast.AST, str]:
    """The file, the node and the source of "Class", "function" or "Class.method", looked up in the installed package.

    A name that stands in several files needs a path in front: "layers/sampler.py:Sampler". Raises NanoVLLMError.
    """
    where, _, name = symbol.rpartition(":")
    outer, _, inner = name.partition(".")
    files = [PACKAGE / where] if where else sorted(PACKAGE.rglob("*.py"))
    found = []
    for path in files:
        text = path.read_text(encoding="utf-8")
        if outer in text:
            node: ast.AST | None = _named(ast.parse(text).body, outer)
            if inner and isinstance(node, ast.ClassDef):
                node = _named(node.body, inner)
            elif inner:
                node = None
            if node is not None:
                found.append((path, node, _lines_of(text, node)))
    if not found:
        raise NanoVLLMError(f"nothing is called {symbol!r} in the package")
    if len(found) > 1:
        places = ", ".join(f"'{path.relative_to(PACKAGE).as_posix()}:{name}'" for path, _, _ in found)
        raise NanoVLLMError(f"{name!r} stands in several files; say which one: {places}")
    return found[0]


def _named(body: Iterable[ast.stmt], name: str) -> ast.stmt | None:
    for node in body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)) and node.name == name:
            return node
        targets: list[ast.expr] = []
        if isinstance(node, (ast.Assign, ast.AnnAssign)):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        if any(isinstance(target, ast.Name) and target.id == name for target in targets):
            return node
    return None


def _lines_of(text: str, node: ast.AST) -> str:
    decorators = getattr(node, "decorator_list", [])
    first = min(n.lineno for n in (node, *decorators))
    return textwrap.dedent("\n".join(lines_of(text)[first - 1 : node.end_lineno]))  # type: ignore[attr-defined]


def _without_docstring(source: str) -> str:
    node = ast.parse(source).body[0]
    assert isinstance(node, (ast.FunctionDef, ast.ClassDef)), "only functions and classes have a docstring"
    first = node.body[0]
    if ast.get_docstring(node) is None or len(node.body) == 1:
        return source
    lines = lines_of(source)
    del lines[first.lineno - 1 : first.end_lineno]
    while not lines[first.lineno - 1].strip():
        del lines[first.lineno - 1]
    return "\n".join(lines)


def source_text(symbol: str, doc: bool = True, start: str = "", stop: str = "") -> tuple[str, str]:
    """Path below the repository and source of a symbol: see `show_source`. Raises NanoVLLMError."""
    path, node, source = find_definition(symbol)
    if not doc and isinstance(node, (ast.FunctionDef, ast.ClassDef)):
        source = _without_docstring(source)
    if start or stop:
        source = _between(source, symbol, start, stop)
    return f"{PACKAGE.name}/{path.relative_to(PACKAGE).as_posix()}", source


def _between(source: str, symbol: str, start: str, stop: str) -> str:
    """The lines from the first that holds `start` to the one before the next that holds `stop`; "..." for the rest."""
    lines = source.splitlines()
    for mark in filter(None, (start, stop)):
        if not any(mark in line for line in lines):
            raise NanoVLLMError(f"no line of {symbol} holds {mark!r}")
    first = next(i for i, line in enumerate(lines) if start in line)
    last = next((i for i, line in enumerate(lines) if i > first and stop and stop in line), len(lines))
    kept = lines[first:last]
    before = [lines[0], "    ..."] if first > 1 else lines[:first]
    return "\n".join([*before, *kept, *(["    ..."] if last < len(lines) else [])])


def fingerprint(text: str) -> str:
    """A short hash by which shown source is compared with the source of today."""
    return sha256(text.encode()).hexdigest()[:16]


def show_source(*symbols: str, doc: bool = True, start: str = "", stop: str = "") -> Shown:
    """The installed source of "Class.method", "Class" or "function", as it is now.

    doc=False leaves docstrings out. start, stop: only the lines from one that holds `start` to the one before the next
    that holds `stop`. The output remembers what it was made from, so that a saved page can be told to be stale.
    """
    rich, text, origin = [], [], {}
    for symbol in symbols:
        path, source = source_text(symbol, doc, start, stop)
        name = symbol.rpartition(":")[2]
        rich.append(f"**`{name}`** in [{path}](../{path})\n\n```python\n{source}\n```\n")
        text.append(f"# {name} in {path}\n{source}\n")
        origin[json.dumps([symbol, doc, start, stop])] = fingerprint(source)
    return Shown("text/markdown", "\n".join(rich), "\n".join(text), origin)


# -- exercises


def exercise_card(exercise_id: str, workbook: Workbook | None = None) -> Shown:
    """An exercise as the catalogue and its stub describe it: the task, where to write, how to check."""
    workbook = workbook or Workbook.find()
    exercise = workbook.exercise(exercise_id)
    stars = "●" * exercise.difficulty + "○" * (5 - exercise.difficulty)
    facts = " · ".join([f"{exercise.minutes} minutes", f"difficulty {stars}", f"{exercise.total_points} points"])
    seams = list(dict.fromkeys(exercise.seams.values()))
    place = f"Takes the place of {', '.join(f'`{seam}`' for seam in seams)} in the engine."
    file = f"exercises/{exercise.file}"
    head = f"Exercise {exercise.id}: {exercise.title}"
    tasks = list(tasks_of(workbook, exercise))
    rich = [f"**{head}**", f"{facts} · write it in [{file}](../{file})", place]
    for signature, words in tasks:
        rich += [f"```python\n{signature}\n```", words_as_markdown(words)]
    text = [head, f"{facts} · write it in {file}", place.replace("`", ""), ""]
    text += [f"{signature}\n{textwrap.indent(words, '    ')}\n" for signature, words in tasks]
    return Shown("text/markdown", "\n\n".join(rich), "\n".join(text))


def tasks_of(workbook: Workbook, exercise: Exercise) -> Iterator[tuple[str, str]]:
    """Signature and docstring of each function of an exercise. A class, or what has no docstring, comes as its stub.

    Made from the authored file, so that a page shows the task and never somebody's answer.
    """
    stub = stub_text((workbook.solutions / exercise.file).read_text(encoding="utf-8"))
    for name in exercise.objects:
        source = (definition(stub, name) or "").rstrip()
        node = ast.parse(source).body[0] if source else None
        words = ast.get_docstring(node) if isinstance(node, ast.FunctionDef) else None
        if words is None:
            yield source, ""
        else:
            assert isinstance(node, ast.FunctionDef)
            words = re.sub(rf"^Exercise {re.escape(exercise.id)}[.,] (\w)", lambda m: m[1].upper(), words)
            yield "\n".join(lines_of(source)[: node.body[0].lineno - 1]), words


def words_as_markdown(words: str) -> str:
    """A docstring as Markdown: examples (>>>) and indented lines as code, terms over indented lines as a list."""
    blocks = []
    for block in re.split(r"\n\s*\n", words):
        lines = block.splitlines()
        indented = [line.startswith("    ") for line in lines]
        if lines and lines[0].startswith(">>>"):
            block = f"```python\n{block}\n```"
        elif all(indented):
            block = f"```text\n{textwrap.dedent(block)}\n```"
        elif any(indented) and not lines[0].startswith(("* ", "- ")):
            terms = zip(lines, [*indented[1:], False], indented, strict=True)
            block = "\n".join(
                f"* `{line}`: " if below and not own else f"  {line.strip()}" for line, below, own in terms
            )
        blocks.append(block)
    return "\n\n".join(blocks)


# -- pictures and tables


def new_figure(width: float = 9.0, height: float = 3.2, panels: int = 1) -> tuple[Any, Any]:
    """A matplotlib figure in the colours of the views, without pyplot, and its axes (an array for several panels)."""
    need("matplotlib")
    from matplotlib.figure import Figure

    ink, muted, line = (PALETTE[name][0] for name in ("ink", "muted", "line"))
    figure = Figure(figsize=(width, height), dpi=110, facecolor="white", layout="constrained")
    axes = figure.subplots(1, panels, squeeze=False)[0]
    for each in axes:
        each.spines[["top", "right"]].set_visible(False)
        each.spines[["left", "bottom"]].set_color(muted)
        each.tick_params(colors=ink, labelsize=9)
        each.grid(axis="y", color=line, linewidth=0.6)
        each.set_axisbelow(True)
    return figure, axes[0] if panels == 1 else axes


def picture(figure: Any, words: str) -> Shown:
    """A matplotlib figure as a picture, with `words` that say what it shows."""
    out = io.BytesIO()
    figure.savefig(out, format="png")
    return Shown("image/png", out.getvalue(), words)


def table(headers: SequenceOf[str], rows: Iterable[SequenceOf[Any]], caption: str = "") -> Shown:
    """A table with numbers to the right and words to the left."""
    rows = [list(row) for row in rows]
    cells = [[_cell(value) for value in row] for row in rows]
    right = [bool(rows) and all(isinstance(row[i], NUMBERS) for row in rows) for i in range(len(headers))]
    widths = [max(len(line[i]) for line in (headers, *cells)) for i in range(len(headers))]
    pad = partial(_padded, widths=widths, right=right)
    text = "\n".join([*([caption] if caption else []), pad(headers), *(pad(line) for line in cells)])
    align = ["right" if is_right else "left" for is_right in right]
    html = "".join(_html_row(tag, line, align) for tag, line in (("th", headers), *(("td", line) for line in cells)))
    top = f'<caption style="text-align:left;font-weight:700">{escape(caption)}</caption>' if caption else ""
    return Shown("text/html", f"<table>{top}{html}</table>", text)


def _cell(value: Any) -> str:
    if isinstance(value, bool) or not isinstance(value, NUMBERS):
        return str(value)
    return f"{value:,}" if isinstance(value, int) else f"{value:,.3g}" if abs(value) < 1000 else f"{value:,.0f}"


def _padded(line: SequenceOf[str], widths: list[int], right: list[bool]) -> str:
    parts = (cell.rjust(w) if r else cell.ljust(w) for cell, w, r in zip(line, widths, right, strict=True))
    return "  ".join(parts).rstrip()


def _html_row(tag: str, line: SequenceOf[str], align: list[str]) -> str:
    cells = [f'<{tag} style="text-align:{side}">{escape(cell)}</{tag}>' for cell, side in zip(line, align, strict=True)]
    return f"<tr>{''.join(cells)}</tr>"
