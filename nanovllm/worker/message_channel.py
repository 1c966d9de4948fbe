"""MessageChannel: how rank 0 tells the other ranks what to run. One writer, several readers, shared memory and events.

A message is a method name and its rows of numbers. It lies once in memory that all processes share; an event per
reader says that there is something to read, and a second one says that it has been taken:

    rank 0                            memory                      rank 1
    write("run", (ids, slots))  ──►  number, size, bytes          read() waits for `event`
        event.set()             ──────────────────────────────►   copies the bytes out, clears `event`
    the next write() waits for  ◄──────────────────────────────   taken.set(), returns ("run", (ids, slots))

So a slow reader never loses a message. The memory has no name (nothing to collide with or to leave behind) and grows
with the largest message. The channel knows nothing of models, ranks or the meaning of a message.
"""

import marshal
import mmap
import os
import select
import struct
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing import reduction
from typing import Any, Protocol, Self

import numpy as np

HEADER = struct.Struct("<QQ")  # number of the message, bytes of its payload
ALIGNMENT = 16  # array data start at multiples of it


class Event(Protocol):
    """What the channel needs of an event: `threading.Event` and `PipeEvent` have it."""

    def set(self) -> None: ...
    def wait(self, timeout: float | None = None) -> bool: ...
    def clear(self) -> None: ...


class PipeEvent:
    """An event between processes: set while there is a byte in a pipe.

    A `multiprocessing.Event` holds a lock for a moment in `set` and `wait`; a process killed in that moment takes the
    lock with it, and the next `set` hangs. A pipe has no such moment.
    """

    def __init__(self) -> None:
        self._ends = os.pipe()

    def set(self) -> None:
        """Wake whoever waits."""
        os.write(self._ends[1], b"!")

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until the event is set (at most `timeout` seconds); returns whether it is."""
        poll = select.poll()
        poll.register(self._ends[0], select.POLLIN)
        return bool(poll.poll(None if timeout is None else timeout * 1000))

    def clear(self) -> None:
        """Take the bytes out; no-op if there are none."""
        if self.wait(0):
            os.read(self._ends[0], 4096)

    def fileno(self) -> int:
        """The end to listen at, for `multiprocessing.connection.wait`."""
        return self._ends[0]

    def close(self) -> None:
        """Give the pipe back; safe to call again."""
        for end in self._ends:
            os.close(end)
        self._ends = ()  # type: ignore[assignment]

    def __getstate__(self) -> tuple[Any, ...]:  # works while a process is being spawned, and only then
        return tuple(reduction.DupFd(end) for end in self._ends)

    def __setstate__(self, ends: tuple[Any, ...]) -> None:
        self._ends = tuple(end.detach() for end in ends)  # type: ignore[assignment]


class SharedMemory:
    """Bytes that several processes see: a mapped file without a name, gone with the last process that holds it."""

    def __init__(self, size: int = mmap.PAGESIZE) -> None:
        if hasattr(os, "memfd_create"):
            self._file = os.memfd_create("nanovllm")
        else:
            with tempfile.TemporaryFile() as file:
                self._file = os.dup(file.fileno())
        os.ftruncate(self._file, size)
        self.memory = mmap.mmap(self._file, size)

    def reserve(self, size: int) -> None:
        """Map at least `size` bytes, growing the file where it is smaller."""
        if size <= len(self.memory):
            return
        size = 1 << (size - 1).bit_length()
        if os.fstat(self._file).st_size < size:
            os.ftruncate(self._file, size)
        self.memory.close()
        self.memory = mmap.mmap(self._file, size)

    def close(self) -> None:
        """Unmap and close; safe to call again."""
        self.memory.close()
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def __getstate__(self) -> Any:  # works while a process is being spawned, and only then
        return reduction.DupFd(self._file)

    def __setstate__(self, file: Any) -> None:
        self._file = file.detach()
        self.memory = mmap.mmap(self._file, os.fstat(self._file).st_size)


@dataclass(frozen=True)
class ChannelHandle:
    """What a reader needs to `attach`: an argument of `Process` or `Thread`."""

    shared: SharedMemory
    event: Event
    taken: Event


class MessageChannel:
    """Messages from one writer to every reader, each read exactly once and in order.

    The writer makes it by `create` and gives each reader its `handle(i)`; a reader makes its end by `attach`.
    """

    def __init__(self, shared: SharedMemory, events: list[Event], taken: list[Event], check: Callable[[], None]) -> None:
        self.shared = shared
        self.events = events  # one per reader (a reader has only its own): there is a message
        self.taken = taken  # likewise: the message has been copied out
        self.check = check
        self.number = 0  # of the last message written or read

    @classmethod
    def create(cls, num_readers: int, ctx: Any = None, check: Callable[[], None] = lambda: None) -> Self:
        """The writer's end.

        ctx: something with an `Event()`, such as the module `threading`; None: `PipeEvent`, which works everywhere.
        check: called now and then while the writer waits for a reader; raises if that is in vain.
        """
        new_event: Callable[[], Event] = PipeEvent if ctx is None else ctx.Event
        channel = cls(
            SharedMemory(), [new_event() for _ in range(num_readers)], [new_event() for _ in range(num_readers)], check
        )
        for taken in channel.taken:
            taken.set()  # nothing is waiting to be read
        return channel

    def handle(self, reader: int) -> ChannelHandle:
        """What reader number `reader` (from 0) attaches to."""
        return ChannelHandle(self.shared, self.events[reader], self.taken[reader])

    @classmethod
    def attach(cls, handle: ChannelHandle) -> Self:
        """A reader's end."""
        own = SharedMemory.__new__(SharedMemory)
        own.__dict__.update(handle.shared.__dict__)  # a mapping of its own: the writer's may be another thread's
        own.memory = mmap.mmap(own._file, 0)
        return cls(own, [handle.event], [handle.taken], lambda: None)

    def write(self, method: str, args: tuple[Any, ...] = ()) -> None:
        """Send one message. Waits until every reader has taken the last one.

        args: numpy arrays, None, bool, int, float, str, bytes, and tuples, lists or dicts of them; `TypeError` otherwise.
        """
        payload = encode(method, args)
        self.wait_taken()
        self.put(payload)
        for event in self.events:
            event.set()

    def read(self) -> tuple[str, tuple[Any, ...]]:
        """Wait for the next message and return its method and arguments (arrays are copies of one's own)."""
        self.events[0].wait()
        self.events[0].clear()
        payload = self.get()
        self.taken[0].set()  # only now may the writer overwrite it
        return decode(payload)

    def wait_taken(self) -> None:
        """Wait until no reader has the last message still before it."""
        for taken in self.taken:
            while not taken.wait(0.2):
                self.check()
        for taken in self.taken:
            taken.clear()

    def put(self, payload: bytes) -> None:
        """Lay one message down in the shared memory, which grows if need be."""
        end = HEADER.size + len(payload)
        self.shared.reserve(end)
        self.number += 1
        HEADER.pack_into(self.shared.memory, 0, self.number, len(payload))
        self.shared.memory[HEADER.size : end] = payload

    def get(self) -> bytearray:
        """A copy of the message in the shared memory."""
        self.number += 1
        number, size = HEADER.unpack_from(self.shared.memory)
        assert number == self.number, f"message {number} came where {self.number} was due"
        self.shared.reserve(HEADER.size + size)
        return bytearray(memoryview(self.shared.memory)[HEADER.size : HEADER.size + size])

    def close(self) -> None:
        """Give memory and events back (at the writer's end, once the readers are done); safe to call again."""
        self.shared.close()
        for event in (*self.events, *self.taken):
            if isinstance(event, PipeEvent) and event.fileno:
                event.close()
        self.events, self.taken = [], []
