"""The workbook's own tools."""

from nanovllm.workbook.catalogue import ExerciseTodo, Workbook, WorkbookError

__all__ = ["ExerciseTodo", "Workbook", "WorkbookError"]
