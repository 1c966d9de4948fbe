"""Interrupts (Ctrl-C, Jupyter's ■) that wait for the end of a step, so that no step is torn in the middle."""

import signal
import threading
from types import FrameType, TracebackType
from typing import Any


class DeferredInterrupt:
    """Inside the block the first SIGINT only sets a flag, which `check` turns into KeyboardInterrupt; a second raises.

    It stands aside (and does nothing) outside the main thread and where somebody has a SIGINT handler of his own. A
    flag that nobody checked is raised when the block ends without another exception. Blocks may be nested: the
    outermost owns the handler.
    """

    def __init__(self) -> None:
        self.pending = 0
        self._previous: Any = None

    def __enter__(self) -> "DeferredInterrupt":
        on_main_thread = threading.current_thread() is threading.main_thread()
        if on_main_thread and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            self._previous = signal.signal(signal.SIGINT, self._handle)
        return self

    def _handle(self, signum: int, frame: FrameType | None) -> None:
        self.pending += 1
        if self.pending > 1:
            raise KeyboardInterrupt

    def check(self) -> None:
        """Raise KeyboardInterrupt if one came since the block began."""
        if self.pending:
            self.pending = 0
            raise KeyboardInterrupt

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._previous is not None:
            signal.signal(signal.SIGINT, self._previous)
            self._previous = None
        if error is None:
            self.check()
