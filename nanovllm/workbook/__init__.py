"""The workbook: `check`, `hint`, `reveal`, `reset`, `progress`, `quiz`, `answer`, `use`, `grade`. Imports no torch.

In a notebook each of them shows HTML, elsewhere its text twin; `nanovllm check 4.2` and the like do the same in a
terminal. Exercises raise `ExerciseTodo` until somebody solves them.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from nanovllm.workbook.catalogue import ExerciseTodo, Workbook, WorkbookError

if TYPE_CHECKING:
    from nanovllm.workbook.checking import check
    from nanovllm.workbook.classroom import grade
    from nanovllm.workbook.helping import hint, progress, reset, reveal, solve
    from nanovllm.workbook.plug import use
    from nanovllm.workbook.quizzes import answer, quiz

# Loaded when first asked for: an exercise imports this package for ExerciseTodo alone, and should start quickly.
_WHERE = {
    "check": "checking", "grade": "classroom", "hint": "helping", "progress": "helping", "reset": "helping",
    "reveal": "helping", "solve": "helping", "use": "plug", "answer": "quizzes", "quiz": "quizzes",
}  # fmt: skip

__all__ = [
    "ExerciseTodo", "Workbook", "WorkbookError", "answer", "check", "grade", "hint", "progress", "quiz", "reset",
    "reveal", "solve", "use",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    if name in _WHERE:
        return getattr(import_module(f"nanovllm.workbook.{_WHERE[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
