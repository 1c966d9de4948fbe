"""Wrong and right answers of one chapter, as the graders try them. Data: `answers/chNN.toml`, format:

    [["4.1".wrong]]                        # or "4.1".right: a different answer that must pass
    name = "rounds down"                   # what is wrong with it
    code = "return num_tokens // block_size"
                                           # replaces the region of the authored answer (its markers stay); where an
                                           # exercise has several regions: a table {function name = code}
    change = [["old", "new"], ...]         # instead of code: text exchanged inside the answer's regions; each `old`
                                           # must occur there exactly once
    top = "SEEN = []"                      # optional: lines put in front of the first definition
    loops = true                           # optional: it never ends, so it is stopped soon
    says = "the block at the front"        # optional: what its first failure must tell

`code` starts at the margin; it is indented as the region is.
"""

import tomllib
from dataclasses import dataclass
from pathlib import Path
from textwrap import dedent, indent
from typing import Any

from nanovllm.workbook.catalogue import Exercise, Workbook
from nanovllm.workbook.sources import definition, definition_span, put_definition, regions

ANSWERS = Path(__file__).parent / "answers"


@dataclass(frozen=True)
class Trial:
    """One answer to try: its chapter's file with this answer in it."""

    exercise: Exercise
    name: str
    is_right: bool
    text: str
    loops: bool = False
    says: str = ""

    def __str__(self) -> str:
        return f"{self.exercise.id} {'right' if self.is_right else 'wrong'}: {self.name}"


def read_trials(workbook: Workbook, chapter: str) -> list[Trial]:
    """Every answer of a chapter's data file. Raises ValueError on an entry that does not fit the authored file."""
    found = workbook.chapter(chapter)
    data = tomllib.loads((ANSWERS / f"ch{int(found.number):02d}.toml").read_text(encoding="utf-8"))
    solution = (workbook.solutions / found.file).read_text(encoding="utf-8")
    trials: list[Trial] = []
    for exercise_id, kinds in data.items():
        exercise = workbook.exercise(exercise_id)
        for kind, entries in kinds.items():
            if kind not in ("wrong", "right"):
                raise ValueError(f"{exercise_id}: {kind!r} is neither wrong nor right")
            for entry in entries:
                text = with_answer(solution, exercise, entry)
                trials.append(Trial(exercise, entry["name"], kind == "right", text,
                                    entry.get("loops", False), entry.get("says", "")))  # fmt: skip
    return trials


def flat(text: str) -> str:
    """The text with every run of white space as one space."""
    return " ".join(text.split())


def solution_lines(workbook: Workbook, exercise: Exercise) -> set[str]:
    """The telling lines of an authored answer: not the short and structural ones that any code has."""
    text = (workbook.solutions / exercise.file).read_text(encoding="utf-8")
    lines = text.splitlines()
    own = [region for region in regions(text) if region.exercise_id == exercise.id]
    found = {flat(line) for region in own for line in lines[region.start : region.stop]}
    return {line for line in found if len(line) >= 14 and not line.startswith("#")}


def with_answer(solution: str, exercise: Exercise, entry: dict[str, Any]) -> str:
    """The authored file with one entry's answer in place of the authored one."""
    text = solution
    left = {(old, new): 1 for old, new in entry.get("change", ())}
    for name in exercise.objects:
        block = definition(text, name)
        assert block is not None, f"{exercise.file} has no {name}"
        own = [region for region in regions(block) if region.exercise_id == exercise.id]
        lines = block.splitlines()
        for region in reversed(own):
            inside = "\n".join(lines[region.start : region.stop]) + "\n"
            if "code" in entry:
                code = entry["code"] if isinstance(entry["code"], str) else entry["code"].get(name)
                if code is None:
                    continue
                inside = indent(dedent(code).strip("\n"), region.indent)
            for old, new in list(left):
                count = inside.count(old)
                if count > 1:
                    raise ValueError(f"{exercise.id} {entry['name']}: {old!r} occurs {count} times")
                if count:
                    inside = inside.replace(old, new)
                    del left[old, new]
            lines[region.start : region.stop] = inside.rstrip("\n").splitlines() or [f"{region.indent}pass"]
        text = put_definition(text, name, "\n".join(lines))
    if left:
        raise ValueError(f"{exercise.id} {entry['name']}: nothing to change for {[old for old, _ in left]}")
    if text == solution:
        raise ValueError(f"{exercise.id} {entry['name']}: changes nothing")
    if "top" in entry:
        span = definition_span(text, next(iter(exercise.objects)))
        assert span is not None, "the definition was just put in"
        lines = text.splitlines()
        lines[span[0] : span[0]] = [*entry["top"].splitlines(), "", ""]
        text = "\n".join(lines) + "\n"
    try:
        compile(
            text, exercise.file, "exec"
        )  # what does not load is rejected by any grader, and tells nothing about one
    except SyntaxError as error:
        raise ValueError(f"{exercise.id} {entry['name']}: {error}") from None
    return text
