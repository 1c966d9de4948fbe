"""MessageChannel: how rank 0 tells the other ranks what to run. One writer, several readers, shared memory and events.

A message is a method name and its rows of numbers. It lies once in memory that all processes share. One event per
reader says that there is something to read, and one number per reader says which message it has taken:

    rank 0                             shared memory                       rank 1
    write("run", (ids, slots))  ──►  [number 7 | taken 6 | bytes]
        event.set()             ───────────────────────────────────►  read() wakes up, copies the bytes out
    the next write() waits      ◄──  [number 7 | taken 7 | bytes]  ◄──  and returns ("run", (ids, slots))

So a slow reader never loses a message, and after a write that was interrupted half-way another one can follow. A
message that is larger than the memory goes piece by piece, each a number of its own. The memory has no name: nothing
to collide with, and nothing that a crash could leave behind. The channel knows nothing of models and ranks, nor what
a message means.
"""

import ctypes
import marshal
import os
import select
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from multiprocessing import Pipe, get_context
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

NUMBER, OFFSET, SIZE, TAKEN = range(4)  # the memory begins with 8-byte words: three, and then one per reader
WORD = 8
CAPACITY = 1 << 20  # bytes of one piece
ALIGNMENT = 16  # the data of arrays start at multiples of it
SCALARS = (type(None), bool, int, float, str, bytes)


class PipeEvent:
    """An event between processes, with the methods of `threading.Event`: it is set while there is a byte in a pipe.

    A `multiprocessing.Event` counts its sleepers under a lock; when one of them is killed in its sleep, the next `set`
    waits for ever for it to wake up. A pipe does not know who listens.
    """

    def __init__(self) -> None:
        self._reader, self._writer = Pipe(duplex=False)

    def set(self) -> None:
        """Wake whoever waits."""
        os.write(self._writer.fileno(), b"!")

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until the event is set, at most `timeout` seconds; returns whether it is."""
        poll = select.poll()
        poll.register(self._reader.fileno(), select.POLLIN)
        return bool(poll.poll(None if timeout is None else timeout * 1000))

    def clear(self) -> None:
        """Take the bytes out."""
        if self.wait(0):
            os.read(self._reader.fileno(), 4096)

    def close(self) -> None:
        """Give the pipe back."""
        self._reader.close()
        self._writer.close()


@dataclass(frozen=True)
class ChannelHandle:
    """What a reader needs to `attach`; give it to `Process` or `Thread` as an argument."""

    memory: Any
    event: Any
    reader: int
    num_readers: int


class MessageChannel:
    """Messages from one writer to every reader, each read exactly once and in order.

    The writer makes the channel by `create` and gives each reader its `handle(i)`; a reader makes its end by `attach`.
    """

    def __init__(self, memory: Any, events: list[Any], num_readers: int, reader: int = 0) -> None:
        self.events = events  # one per reader; a reader has only its own
        self.num_readers, self.reader = num_readers, reader
        self.memory = memory
        head = WORD * (TAKEN + num_readers)
        self.words = memoryview(memory).cast("B")[:head].cast("Q")
        self.bytes = memoryview(memory).cast("B")[head:]
        self.check: Callable[[], None] = lambda: None  # called while a reader keeps the writer waiting; may raise
        self.spin = 0.0  # seconds for which `read` watches the memory, at the cost of a core, before it sleeps

    @classmethod
    def create(cls, num_readers: int, ctx: Any = None, capacity: int = CAPACITY) -> Self:
        """The writer's end.

        ctx: something with an `Event()`, such as the module `threading`; None: `PipeEvent`, which works everywhere.
        capacity: bytes of the shared memory.
        """
        memory = get_context("spawn").RawArray(ctypes.c_ubyte, WORD * (TAKEN + num_readers) + capacity)
        return cls(memory, [PipeEvent() if ctx is None else ctx.Event() for _ in range(num_readers)], num_readers)

    def handle(self, reader: int) -> ChannelHandle:
        """What reader number `reader` (counted from 0) attaches to."""
        return ChannelHandle(self.memory, self.events[reader], reader, self.num_readers)

    @classmethod
    def attach(cls, handle: ChannelHandle) -> Self:
        """A reader's end."""
        return cls(handle.memory, [handle.event], handle.num_readers, handle.reader)

    def write(self, method: str, args: tuple[Any, ...] = ()) -> None:
        """Send one message, as soon as every reader has taken the last one.

        args: numpy arrays of numbers, None, bool, int, float, str, bytes, and tuples of them; else `TypeError`.
        """
        payload = encode(method, args)
        for offset in range(0, len(payload), len(self.bytes)):
            self.wait_taken()
            self.put(payload, offset)
            for event in self.events:
                event.set()

    def read(self) -> tuple[str, tuple[Any, ...]]:
        """Wait for the next message and return its method and its arguments (arrays are copies)."""
        payload, size = bytearray(), 1  # the first piece tells the size
        while len(payload) < size:
            deadline = time.perf_counter() + self.spin
            while not self.has_piece():
                if time.perf_counter() >= deadline:
                    self.events[0].wait()
                    self.events[0].clear()
            self.events[0].clear()  # if nobody slept, its byte is still there, and bytes must not fill the pipe
            offset, size, piece = self.take()
            payload[offset:] = piece  # a first piece starts anew, also behind the first half of an interrupted message
        return decode(payload)

    def wait_taken(self) -> None:
        """Wait until no reader has the last piece still before it."""
        for reader, event in enumerate(self.events):
            if self.words[TAKEN + reader] < self.words[NUMBER]:
                event.set()  # once more: the last write may have been interrupted before it came to this reader
            while self.words[TAKEN + reader] < self.words[NUMBER]:
                self.check()
                time.sleep(50e-6)

    def put(self, payload: bytes, offset: int) -> None:
        """Lay the piece of `payload` that begins at `offset` into the memory; its number last, when it is whole.

        A reader that sleeps is woken by a system call, behind which everything is in place. One that watches the number
        relies on stores becoming visible in their order, as x86 has it; nothing here enforces that elsewhere.
        """
        piece = payload[offset : offset + len(self.bytes)]
        self.bytes[: len(piece)] = piece
        self.words[OFFSET], self.words[SIZE] = offset, len(payload)
        self.words[NUMBER] += 1

    def has_piece(self) -> bool:
        """Whether there is a piece that this reader has not taken."""
        return self.words[TAKEN + self.reader] < self.words[NUMBER]

    def take(self) -> tuple[int, int, bytes]:
        """Copy a piece out: (offset, size of the whole, bytes). Only then the writer learns that its place is free."""
        offset, size = self.words[OFFSET], self.words[SIZE]
        piece = bytes(self.bytes[: size - offset])
        self.words[TAKEN + self.reader] = self.words[NUMBER]
        return offset, size, piece

    def close(self) -> None:
        """At the writer's end, when the readers are done: give memory and events back. Safe to call again."""
        self.words.release()
        self.bytes.release()
        self.memory, self.check = None, lambda: None
        for event in self.events:
            if isinstance(event, PipeEvent):
                event.close()


def encode(method: str, args: tuple[Any, ...]) -> bytes:
    """One message as bytes: the length of the head, the head, then the data of every array at a multiple of 16.

    The head is the method, the arguments with `...` where an array stands, and the arrays' dtypes and shapes. Only
    plain values and arrays of numbers pass; an object of any other type is a `TypeError` that names it.
    """
    arrays: list[NDArray[Any]] = []
    head = marshal.dumps((method, _strip(args, arrays), [(array.dtype.str, array.shape) for array in arrays]))
    pieces = [len(head).to_bytes(WORD, "little"), head]
    size = WORD + len(head)
    for array in arrays:
        padding = -size % ALIGNMENT
        pieces += (bytes(padding), array.tobytes())
        size += padding + array.nbytes
    return b"".join(pieces)


def decode(payload: bytearray) -> tuple[str, tuple[Any, ...]]:
    """The method and arguments that `encode` was given; arrays are writable views of `payload`."""
    offset = WORD + int.from_bytes(payload[:WORD], "little")
    method, args, layout = marshal.loads(payload[WORD:offset])
    arrays = []
    for dtype, shape in layout:
        offset += -offset % ALIGNMENT
        array: NDArray[Any] = np.ndarray(shape, dtype, payload, offset)
        offset += array.nbytes
        arrays.append(array)
    return method, _fill(args, iter(arrays))


def _strip(value: Any, arrays: list[NDArray[Any]]) -> Any:
    """`value` with `...` in the place of each array, which go to `arrays` in order."""
    if type(value) in SCALARS:
        return value
    if isinstance(value, tuple):  # a named tuple becomes a plain one
        return tuple([_strip(item, arrays) for item in value])
    if isinstance(value, np.generic):
        return _strip(value.item(), arrays)
    if isinstance(value, np.ndarray) and value.dtype.kind in "biuf":
        arrays.append(value)
        return ...
    raise TypeError(f"a message carries plain values and arrays of numbers, not {type(value).__name__}: {value!r:.200}")


def _fill(value: Any, arrays: Iterator[NDArray[Any]]) -> Any:
    """The inverse of `_strip`."""
    if value is ...:
        return next(arrays)
    return tuple([_fill(item, arrays) for item in value]) if isinstance(value, tuple) else value
