"""`use`: the learner's code takes its place in the real engine, and its errors are told as the learner's."""

import linecache
import re
import sys
import traceback
from types import TracebackType
from typing import Any

from nanovllm.engine.parts import Parts, activate, active_parts
from nanovllm.errors import RankError
from nanovllm.workbook import state
from nanovllm.workbook.catalogue import TARGETS, Exercise, Workbook, WorkbookError
from nanovllm.workbook.grading import clip, in_the_kernel, learner_frame
from nanovllm.workbook.outcomes import FAILED, NOT_RUN, PASSED, Shown
from nanovllm.workbook.sources import is_todo, read_source

LASTING = "In use in every engine that is built from now on:"
IN_A_BLOCK = "In use in engines built inside this `with` block:"


class Using(Shown):
    """What is in use now. As a context manager it ends with its block; without one it lasts until `use()`."""

    def __init__(self, text: str, before: Parts, folder: str) -> None:
        super().__init__(text)
        self._before, self._folder = before, folder

    def __enter__(self) -> "Using":
        super().__init__(self.text.replace(LASTING, IN_A_BLOCK))  # what it says stays true behind the block
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        activate(self._before)
        if error is not None and (told := explain(error)):
            error.add_note(told)


def use(*exercises: str | float, target: str = "exercises") -> Using:
    """Engines built from now on run these exercises ("4.2") or chapters ("4") in place of their own parts.

    use("4.2")                         until use() is called
    with use("4.1", "5.2"): ...        for a block
    use("4.2", target="solutions")     the authored answer, to compare
    use()                              the shipped engine again

    Adds to what is in use already. Your file is read when an engine is built, so build a new one after a change. An
    exercise that is still TODO is left out, and that is said.
    """
    workbook = Workbook.find()
    before = active_parts()
    if target not in TARGETS:
        raise WorkbookError(f"target must be one of {', '.join(TARGETS)}; got {target!r}")
    if not exercises:
        activate(Parts())
        return Using("The shipped engine is in use.", before, str(workbook.answers))
    replaced: dict[str, Any] = {}
    lines: list[str] = []
    remembered = state.load(workbook)
    for exercise in workbook.select(*exercises):
        seams, reason = plugged(workbook, exercise, target)
        replaced |= seams
        where = workbook.source(exercise, target).name if target != "engine" else "the engine"
        remark = last_check(remembered.get(exercise.id, {})) if target == "exercises" else ""
        lines.append(f"{exercise.id} {exercise.title}: {reason or ', '.join(exercise.seams.values())}"
                     + ("" if reason else f"  ({target}/{where}){remark}"))  # fmt: skip
    if target == "engine":  # back to the shipped part, where something else was in use
        kept = {seam: part for seam, part in before.replacements.items() if seam not in replaced}
        activate(Parts(kept))
    else:
        activate(before.merged(Parts(replaced)))
    tell_errors_in_notebooks()
    head = LASTING if replaced else "Nothing to plug in yet:"
    return Using("\n".join([head, *(f"  {line}" for line in lines)]), before, str(workbook.answers))


def plugged(workbook: Workbook, exercise: Exercise, target: str) -> tuple[dict[str, str], str]:
    """(seam -> where the engine loads it from, why nothing is plugged in). The texts travel to other processes."""
    if target == "engine":
        return {seam: "" for seam in exercise.seams.values()}, ""
    path = workbook.source(exercise, target)
    if not path.exists():
        return {}, f"TODO ({path.name} is missing), the shipped part stays"
    if is_todo(read_source(path), exercise.id):
        return {}, "TODO, the shipped part stays"
    return {exercise.seams[name]: spec for name, spec in workbook.specs(exercise, target).items()}, ""


def last_check(known: dict[str, Any]) -> str:
    """A warning where an answer that is plugged in is not known to be right: it gives wrong tokens without an error."""
    if known.get("state") == FAILED:
        return "  (its last check failed)"
    return "" if known.get("state") in (PASSED, NOT_RUN) else "  (not checked yet)"


def explain(error: BaseException) -> str | None:
    """Where in the learner's files an error came from, in three lines; None if it has nothing to do with them."""
    workbook = Workbook.find()
    folders = (str(workbook.answers), str(workbook.solutions))
    seen: BaseException | None = in_the_kernel(error)
    while seen is not None:
        frame = learner_frame(seen.__traceback__, folders)
        if frame is None and isinstance(seen, SyntaxError) and (seen.filename or "").startswith(folders):
            frame = seen.filename or "", seen.lineno or 0, "the file"
        if frame is not None:
            file, line, function = frame
            source = linecache.getline(file, line).strip()
            said = clip(f"{type(seen).__name__}: {seen}", 200)
            return f"In your code: {file}, line {line}, in {function}\n    {source}\n{said}"
        if isinstance(seen, RankError) and (told := explain_remote(str(seen), folders)):
            return told
        seen = seen.__cause__ or seen.__context__
    return None


def explain_remote(text: str, folders: tuple[str, ...]) -> str | None:
    """The same for an error in another rank, of which only the traceback's text is here."""
    calls = re.findall(r'^  File "(.+)", line (\d+), in (.+)\n    (.*)$', text, re.MULTILINE)
    own = [call for call in calls if call[0].startswith(folders)]
    if not own:
        return None
    file, line, function, source = own[-1]
    where = text.partition(" failed in ")[0]
    return f"In your code ({where}): {file}, line {line}, in {function}\n    {source}\n{text.strip().splitlines()[-1]}"


def tell_errors_in_notebooks() -> None:
    """In IPython, an error from the learner's files is shown with the learner's line on top and a short traceback."""
    ipython = sys.modules.get("IPython")
    shell: Any = ipython.get_ipython() if ipython is not None else None
    if shell is not None:
        shell.set_custom_exc((Exception,), show_error)


def show_error(shell: Any, kind: type[BaseException], error: BaseException, trace: Any, tb_offset: Any = None) -> None:
    """IPython's handler: the learner's line first where there is one; otherwise what IPython shows anyway."""
    told = explain(error)
    if told is None:
        shell.showtraceback((kind, error, trace), tb_offset=tb_offset)
        return
    frames = traceback.extract_tb(trace)[-6:]
    calls = [f"  {frame.filename}:{frame.lineno} in {frame.name}" for frame in frames]
    lines = [*told.splitlines(), "", "called through (the last line is where it happened):", *calls]
    lines += ["The engine has dropped the requests of this call and can be used again."]
    shell._showtraceback(kind, error, lines)
