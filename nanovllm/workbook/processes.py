"""The end of grading processes, and of everything that the answers in them have started. Knows only process ids."""

import os
import signal
import time
from pathlib import Path


def kill_session(pid: int, folder: str) -> None:
    """End a grading process and everything that it started, again until nothing is left (a fork may come between).

    It led a session of its own and worked in `folder`: whoever is in one of them belongs to it, also once the process
    itself has ended. Where there is no /proc, its process group is all that can be found.
    """
    for _ in range(100):
        if not (left := members(pid, folder)):
            return
        for process in left:
            try:
                os.kill(process, signal.SIGKILL)
            except (ProcessLookupError, PermissionError):
                continue
        time.sleep(0.01)


def members(pid: int, folder: str) -> list[int]:
    """The living processes of the session `pid`, and those whose working directory is `folder` or below it."""
    try:
        everybody = [int(name) for name in os.listdir("/proc") if name.isdecimal()]
    except OSError:
        return group_leader(pid)
    found = []
    for process in everybody:
        try:
            state, _, _, session = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[:4]
            inside = Path(os.readlink(f"/proc/{process}/cwd")).is_relative_to(os.path.realpath(folder))
            if state not in "ZX" and (inside or int(session) == pid):
                found.append(process)
        except (OSError, ValueError):  # it has just ended, or is another user's
            continue
    return found


def group_leader(pid: int) -> list[int]:
    """[-pid], which `os.kill` takes for the whole group, while the leader lives."""
    try:
        return [-pid] if os.getpgid(pid) == pid else []
    except (ProcessLookupError, PermissionError):
        return []
