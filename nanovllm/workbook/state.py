"""What the workbook remembers about a learner, in `exercises/.state/`: last results, hints seen, copies of answers.

It never leaves the machine and git ignores it. Losing it costs nothing but the memory.
"""

import json
import os
import tempfile
import time
from pathlib import Path
from typing import Any

from nanovllm.workbook.catalogue import Workbook

KINDS = {"state": str, "points": int, "hint": int, "failed_test": str, "rule": str, "right": list}  # what is read again


def write_text(path: Path, text: str) -> None:
    """Write a file in one piece: whoever reads it sees the old text or the new one."""
    path = path.resolve()  # a link stays one
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "w", encoding="utf-8", newline="\n") as file:
            file.write(text)
        mode = path.stat().st_mode if path.exists() else 0o644
        os.chmod(temporary, mode & 0o777)
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def keep_copy(workbook: Workbook, path: Path) -> Path:
    """Copy a learner's file aside before it is changed; returns where the copy is."""
    folder = workbook.state / "copies"
    folder.mkdir(parents=True, exist_ok=True)
    stamp = time.strftime("%Y%m%d-%H%M%S")
    copy = free_name(folder / f"{path.stem}-{stamp}{path.suffix}")
    copy.write_bytes(path.read_bytes())
    return copy


def free_name(path: Path) -> Path:
    """`path`, or the first of `path-2`, `path-3`, … (before its suffix) that does not exist."""
    number, candidate = 1, path
    while candidate.exists():
        number += 1
        candidate = path.with_stem(f"{path.stem}-{number}")
    return candidate


def load(workbook: Workbook) -> dict[str, dict[str, Any]]:
    """Exercise id -> what is remembered of it. What is damaged counts as nothing."""
    try:
        data = json.loads((workbook.state / "progress.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    entries = data.items() if isinstance(data, dict) else ()
    return {
        key: {name: kept for name, kept in value.items() if isinstance(kept, KINDS.get(name, object))}
        for key, value in entries
        if isinstance(value, dict)
    }


def remember(workbook: Workbook, exercise_id: str, **values: Any) -> bool:
    """Add to what is remembered of one exercise. Where nothing can be written, nothing is remembered: False then."""
    data = load(workbook)
    data.setdefault(exercise_id, {}).update(values)
    try:
        write_text(workbook.state / "progress.json", json.dumps(data, indent=1, sort_keys=True) + "\n")
    except OSError:
        return False
    return True
