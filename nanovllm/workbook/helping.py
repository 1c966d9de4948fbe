"""Help with one exercise: hints in four levels, the answer as a diff, a way back to the stub, and the whole path."""

import difflib

from nanovllm.workbook import state
from nanovllm.workbook.catalogue import Exercise, Workbook, WorkbookError
from nanovllm.workbook.generate import stubs
from nanovllm.workbook.outcomes import FAILED, LABELS, MARKS, PASSED, TODO, Shown, pre, wrapped
from nanovllm.workbook.sources import answer_state, definition, paste, put_definition, read_source

LAST_LEVEL = 4


def hint(exercise: str | float, level: int | None = None) -> Shown:
    """The next hint (or the hint of that level, 1 to 4). The first answers the test that failed in your last check.
    Hint 1 by its number does not count as taken: the notebooks show it.

    1 the rule that is broken · 2 where to look · 3 the steps in words · 4 the answer with its reasons.
    """
    workbook = Workbook.find()
    found = workbook.exercise(exercise)
    known = state.load(workbook).get(found.id, {})
    had, counts = known.get("hint", 0), level != 1  # hint 1 by its number is what the pages' own cells show
    level = min(had + 1, LAST_LEVEL) if level is None else int(level)
    if not 1 <= level <= LAST_LEVEL:
        raise WorkbookError(f"hints have the levels 1 to {LAST_LEVEL}, got {level}")
    had = max(had, level) if counts else had
    kept = had >= level and state.remember(workbook, found.id, hint=had)
    lines = [f"exercise {found.id} {found.title}: hint {level} of {LAST_LEVEL}"]
    failed = known.get("failed_test") if known.get("state") == FAILED else None
    if failed:
        lines += [
            f"Your last check failed at: {failed.replace('__', ': ').replace('_', ' ')}",
            wrapped(known.get("rule") or ""),
        ]
        lines += [wrapped(found.replies[failed])] if failed in found.replies else []
    lines += ["", *map(wrapped, found.hints[level - 1].splitlines())]
    if level == LAST_LEVEL:
        lines += ["", answer_diff(workbook, found)]
    else:
        call, option = f'hint("{found.id}") again', ""
        if not kept:
            call, option = f'hint("{found.id}", {level + 1})', f" --level {level + 1}"
        lines += ["", f"More: {call}, or: nanovllm hint {found.id}{option}"]
    return Shown("\n".join(lines))


def answer_diff(workbook: Workbook, exercise: Exercise) -> str:
    """From the learner's definitions to the authored ones, as a diff."""
    solution = read_source(workbook.source(exercise, "solutions"))
    path = workbook.source(exercise, "exercises")
    learner = read_source(path) if path.exists() else ""
    parts: list[str] = []
    for name in exercise.objects:
        mine = (definition(learner, name) or "").splitlines()
        theirs = (definition(solution, name) or "").splitlines()
        diff = list(difflib.unified_diff(mine, theirs, f"your {name}", f"the answer's {name}", lineterm="", n=2))
        parts += diff or [f"{name}: yours is the same"]
    return "\n".join(parts)


def reveal(exercise: str | float, sure: bool = False) -> Shown:
    """The answer as a diff with your file. Before you have passed, it asks once: call it again to see it."""
    workbook = Workbook.find()
    found = workbook.exercise(exercise)
    known = state.load(workbook).get(found.id, {})
    if known.get("state") != PASSED and not sure and not known.get("reveal_asked"):
        kept = state.remember(workbook, found.id, reveal_asked=True)
        again = f'call reveal("{found.id}") once more, or: nanovllm reveal {found.id}'
        if not kept:  # it would ask for ever
            again = f'call reveal("{found.id}", sure=True), or: nanovllm reveal {found.id} --sure'
        return Shown(
            f'Exercise {found.id} is not solved yet. There are four hints: hint("{found.id}").\n'
            f"To see the answer nevertheless, {again}"
        )
    state.remember(workbook, found.id, revealed=True)
    reasons = "\n".join(map(wrapped, f"Why: {found.hints[LAST_LEVEL - 1]}".splitlines()))
    return Shown(f"exercise {found.id} {found.title}: the answer\n\n{answer_diff(workbook, found)}\n\n{reasons}")


def reset(*exercises: str | float) -> Shown:
    """Put the stub of an exercise (or of all of a chapter's) back into your file; a copy of the file is kept."""
    workbook = Workbook.find()
    if not exercises:
        raise WorkbookError('name what to reset: reset("4.2"), or reset("4") for a whole chapter')
    originals = {path.name: text for path, text in stubs(workbook).items()}
    lines: list[str] = []
    for found in workbook.select(*exercises):
        path = workbook.source(found, "exercises")
        if not path.exists():
            state.write_text(path, originals[path.name])
            lines.append(f"{path.name}: was missing; written anew")
            continue
        text = read_source(path)
        pasted = paste(text, found, originals[path.name])
        if pasted == text:
            lines.append(f"{found.id} {found.title}: is the stub already")
            continue
        copy = state.keep_copy(workbook, path)
        state.write_text(path, pasted)
        state.remember(workbook, found.id, state=TODO, points=0, failed_test=None, rule=None)
        lines.append(f"{found.id} {found.title}: stub put back; your version is kept in {copy}")
    return Shown("\n".join(lines))


def solve(*exercises: str | float) -> Shown:
    """Put the authored answers into your file (a copy of it is kept), to go on without solving everything."""
    workbook = Workbook.find()
    lines: list[str] = []
    for found in workbook.select(*exercises):
        path = workbook.source(found, "exercises")
        text = read_source(path) if path.exists() else stubs(workbook)[path]
        solution = read_source(workbook.source(found, "solutions"))
        for name in found.objects:
            text = put_definition(text, name, definition(solution, name) or "")
        copy = f"; your version is kept in {state.keep_copy(workbook, path)}" if path.exists() else ""
        state.write_text(path, text)
        lines.append(f"{found.id} {found.title}: the authored answer is in {path.name}{copy}")
    return Shown("\n".join(lines))


def progress() -> Shown:
    """The whole path: every exercise with its last result, the points, and what comes next. Starts no check."""
    workbook = Workbook.find()
    remembered = state.load(workbook)
    lines: list[str] = []
    rows: list[str] = []
    earned, following = 0, ""
    for chapter in workbook.chapters:
        lines.append(f"chapter {chapter.number}: {chapter.title}")
        rows.append(f'<tr><th colspan="5" style="text-align:left">Chapter {chapter.number}: {chapter.title}</th></tr>')
        for exercise in chapter.exercises:
            known = remembered.get(exercise.id, {})
            written = answer_state(workbook, exercise) == "written"
            outcome = known.get("state", TODO) if written else TODO
            points = int(known.get("points", 0)) if written else 0
            word = LABELS.get(outcome, "TODO") if outcome != TODO or not written else "not checked"
            earned += points
            following = following or ("" if outcome == PASSED else exercise.id)
            seen = f"hints {known['hint']}/{LAST_LEVEL}" if known.get("hint") else ""
            cells = (exercise.id, exercise.title, f"{MARKS.get(outcome, '·')} {word}",
                     f"{points}/{exercise.total_points} points", f"{exercise.minutes} min", seen)  # fmt: skip
            head = f"  {cells[0]:<4} {cells[1][:40]:<40}  {cells[2]:<14}"
            lines.append(f"{head} {cells[3]:>12}  {cells[4]:>6}  {cells[5]}".rstrip())
            rows.append("<tr>" + "".join(f'<td style="text-align:left">{cell}</td>' for cell in cells) + "</tr>")
    total = sum(chapter.total_points for chapter in workbook.chapters)
    foot = f"{earned} of {total} points. " + (f'Next: check("{following}")' if following else "All done.")
    return Shown("\n".join([*lines, foot]), f"<table>{''.join(rows)}</table>{pre(foot)}")
