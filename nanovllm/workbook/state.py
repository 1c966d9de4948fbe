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


def write_text(path: Path, text: str) -> None:
    """Write a file in one piece: whoever reads it sees the old text or the new one."""
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
    number, copy = 1, folder / f"{path.stem}-{stamp}{path.suffix}"
    while copy.exists():
        number += 1
        copy = folder / f"{path.stem}-{stamp}-{number}{path.suffix}"
    copy.write_bytes(path.read_bytes())
    return copy


def load(workbook: Workbook) -> dict[str, dict[str, Any]]:
    """Exercise id -> what is remembered of it. A damaged file counts as an empty one."""
    try:
        data = json.loads((workbook.state / "progress.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return {key: value for key, value in data.items() if isinstance(value, dict)} if isinstance(data, dict) else {}


def remember(workbook: Workbook, exercise_id: str, **values: Any) -> bool:
    """Add to what is remembered of one exercise. Where nothing can be written, nothing is remembered: False then."""
    data = load(workbook)
    data.setdefault(exercise_id, {}).update(values)
    try:
        write_text(workbook.state / "progress.json", json.dumps(data, indent=1, sort_keys=True) + "\n")
    except OSError:
        return False
    return True
