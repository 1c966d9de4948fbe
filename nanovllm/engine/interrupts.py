"""Interrupts (Ctrl-C, Jupyter's ■) that wait for the end of a step, so that no step is torn in the middle."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType, TracebackType
from typing import Any


class DeferredInterrupt:
    """Inside the block SIGINT is only noted; `check`, or else the end of the block, hands it to the previous handler.

    In a `breaking` part, which is where the time goes and where a failure can be mended, a second SIGINT is handed on
    at once, so that a step that never ends can be left. That happens once: what mends is not torn again.

    It does nothing outside the main thread and where SIGINT has no handler in Python. Blocks may be nested, also those
    of different engines: the outermost decides, and `with` gives every inner block the outermost one's object.
    """

    def __init__(self) -> None:
        self._breakable = False  # inside `breaking`
        self._count = 0  # of SIGINTs not handed on yet
        self._root = self  # the outermost block's object
        self._previous: Any = None  # handler; None where this block does nothing

    def __enter__(self) -> "DeferredInterrupt":
        if threading.current_thread() is threading.main_thread():
            handler = signal.getsignal(signal.SIGINT)
            owner = getattr(handler, "__self__", None)
            if isinstance(owner, DeferredInterrupt):
                self._root = owner
                return owner
            if callable(handler):
                self._previous = handler
                signal.signal(signal.SIGINT, self._handle)
        return self

    @property
    def pending(self) -> bool:
        """Whether there is a SIGINT that was not handed on yet."""
        return self._count > 0

    @contextmanager
    def breaking(self) -> Iterator[None]:
        """A part of the block that a second SIGINT may leave at once."""
        before, self._breakable = self._breakable, True
        try:
            yield
        finally:
            self._breakable = before

    def _handle(self, signum: int, frame: FrameType | None) -> None:
        self._count += 1
        if self._breakable and self._count > 1:
            self._breakable = False
            self.check()

    def check(self) -> None:
        """Raise KeyboardInterrupt (or do what the previous handler does) if a SIGINT came since the block began."""
        if self._count:
            self._count = 0
            self._previous(signal.SIGINT, None)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._root is not self or self._previous is None:
            return
        if signal.getsignal(signal.SIGINT) == self._handle:  # else somebody inside the block has set one of his own
            signal.signal(signal.SIGINT, self._previous)
        if error is None or isinstance(error, Exception):  # else another interrupt or an exit is on its way
            self.check()
