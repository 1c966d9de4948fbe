"""The text of answers: marked regions, stubs, and definitions that are found, compared and put in by name.

An authored file marks each answer::

    def twice(x: int) -> int:
        \"\"\"Two times x.\"\"\"
        # --- your code (4.2) ---
        return 2 * x
        # --- end ---

The learner's file is the same text with each region's lines replaced by one `raise`. Works on text alone, so that a
file with a syntax error in it can still be reset.
"""

import ast
import re
from dataclasses import dataclass
from pathlib import Path

from nanovllm.workbook.catalogue import Exercise, Workbook, WorkbookError

OPEN = re.compile(r"^(?P<indent>\s*)# --- your code \((?P<id>\d+\.\d+)\) ---$")
CLOSE = re.compile(r"^\s*# --- end ---$")
TODO_IMPORT = "from nanovllm.workbook import ExerciseTodo"


@dataclass(frozen=True, slots=True)
class Region:
    """Lines start to stop - 1 (counted from 0) between the markers of one answer."""

    exercise_id: str
    start: int
    stop: int
    indent: str


def lines_of(text: str) -> list[str]:
    """The lines as Python's parser counts them; `str.splitlines` also splits at form feeds, U+2028 and the like."""
    return re.split(r"\r\n|\r|\n", text)[: None if text and text[-1] not in "\r\n" else -1]


def regions(text: str) -> list[Region]:
    """The marked regions of a file, in order. Raises WorkbookError on a marker without its partner."""
    found: list[Region] = []
    opened: tuple[str, int, str] | None = None
    for number, line in enumerate(lines_of(text)):
        if match := OPEN.match(line):
            if opened:
                raise WorkbookError(f"line {number + 1}: the region of {opened[0]} is still open")
            opened = match["id"], number + 1, match["indent"]
        elif CLOSE.match(line):
            if not opened:
                raise WorkbookError(f"line {number + 1}: an end marker without its beginning")
            found.append(Region(opened[0], opened[1], number, opened[2]))
            opened = None
    if opened:
        raise WorkbookError(f"the region of {opened[0]} has no end")
    return found


def stub_text(solution: str) -> str:
    """The learner's file: every region of the authored file replaced by a `raise ExerciseTodo`."""
    lines = lines_of(solution)
    for region in reversed(regions(solution)):
        lines[region.start : region.stop] = [f'{region.indent}raise ExerciseTodo("{region.exercise_id}")']
    lines.insert(*_todo_import(lines))
    return "\n".join(lines) + "\n"


def _todo_import(lines: list[str]) -> tuple[int, str]:
    """Where the import of ExerciseTodo goes: in the order that an import sorter keeps."""
    body = ast.parse("\n".join(lines)).body
    imports = [node for node in body if isinstance(node, (ast.Import, ast.ImportFrom))]
    ours = [node for node in imports if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("nanovllm")]
    for node in ours:
        if (node.module or "") > "nanovllm.workbook":
            return node.lineno - 1, TODO_IMPORT
    if ours:
        return (ours[-1].end_lineno or 0), TODO_IMPORT
    if imports:
        return (imports[-1].end_lineno or 0), "\n" + TODO_IMPORT
    doc_end = (body[0].end_lineno or 0) if body and isinstance(body[0], ast.Expr) else 0
    return doc_end, "\n" + TODO_IMPORT


def definition_span(text: str, name: str) -> tuple[int, int] | None:
    """Lines start to stop - 1 of the top-level function, class or assignment `name`, decorators included; or None."""
    try:
        body = ast.parse(text).body
    except (SyntaxError, ValueError):
        return _span_by_lines(lines_of(text), name)
    for node in reversed(body):  # the last definition is the one that counts at run time
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)) and node.name == name:
            first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
            return first - 1, _with_comments(lines_of(text), node.end_lineno or node.lineno)
        if isinstance(node, (ast.Assign, ast.AnnAssign)):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            if any(isinstance(target, ast.Name) and target.id == name for target in targets):
                return node.lineno - 1, node.end_lineno or node.lineno
    return None


def _with_comments(lines: list[str], stop: int) -> int:
    """`stop` moved behind the indented comments that follow a definition (the parser does not see them)."""
    for number in range(stop, len(lines)):
        line = lines[number]
        if line.strip() and not (line[0] in " \t" and line.lstrip().startswith("#")):
            break
        stop = number + 1 if line.strip() else stop
    return stop


def _span_by_lines(lines: list[str], name: str) -> tuple[int, int] | None:
    """The same for a file that does not parse: from its `def` to the next line that starts at the margin."""
    head = re.compile(rf"^(async\s+def|def|class)\s+{re.escape(name)}\b")
    start = next((number for number, line in enumerate(lines) if head.match(line)), None)
    if start is None:
        return None
    stop = start + 1
    while stop < len(lines) and (not lines[stop].strip() or lines[stop][0] in " \t)#"):
        stop += 1
    while not lines[stop - 1].strip() or lines[stop - 1].startswith("#"):
        stop -= 1
    while start > 0 and lines[start - 1].startswith("@"):
        start -= 1
    return start, stop


def definition(text: str, name: str) -> str | None:
    """The source of the top-level definition `name`, or None."""
    span = definition_span(text, name)
    return None if span is None else "\n".join(lines_of(text)[slice(*span)]) + "\n"


def put_definition(text: str, name: str, source: str) -> str:
    """The text with the definition `name` replaced by `source`; put at the end where there was none."""
    span = definition_span(text, name)
    lines = lines_of(text)
    if span is None:
        lines += ["", "", *lines_of(source)]
    else:
        lines[slice(*span)] = lines_of(source)
    return "\n".join(lines) + "\n"


def paste(text: str, exercise: Exercise, source: str) -> str:
    """The text with all definitions of one exercise taken from `source` (another version of the same file)."""
    for name in exercise.objects:
        block = definition(source, name)
        if block is None:
            raise WorkbookError(f"the source has no {name!r}, which exercise {exercise.id} needs")
        text = put_definition(text, name, block)
    return with_todo_import(text) if is_todo(text, exercise.id) else text


def with_todo_import(text: str) -> str:
    """The text with the import of ExerciseTodo, which a linter may have taken out of a file without stubs."""
    if re.search(r"^from nanovllm\.workbook import [\w\s,()]*\bExerciseTodo\b", text, re.MULTILINE):
        return text
    lines = lines_of(text)
    try:
        lines.insert(*_todo_import(lines))
    except (SyntaxError, ValueError):
        return text  # it has to be mended first anyhow
    return "\n".join(lines) + "\n"


def is_todo(text: str, exercise_id: str) -> bool:
    """Whether a `raise ExerciseTodo("4.2")` still stands in the text."""
    return bool(re.search(rf'^\s*raise ExerciseTodo\(["\']{re.escape(exercise_id)}["\']\)', text, re.MULTILINE))


def answer_state(workbook: Workbook, exercise: Exercise) -> str:
    """Seen from the file alone: "missing" (no file), "todo" (the stub's raise is still there) or "written"."""
    path = workbook.source(exercise, "exercises")
    if not path.exists():
        return "missing"
    return "todo" if is_todo(read_source(path), exercise.id) else "written"


def read_source(path: Path) -> str:
    """A Python file's text. Bytes that are not UTF-8 are replaced, so that a damaged file can still be shown."""
    return path.read_bytes().decode("utf-8-sig", errors="replace")
