"""Grader of exercise 7.5: a channel from one writer to several readers. Readers are threads."""

import threading
import time
from typing import Any

import numpy as np

from nanovllm.workbook.grading import Answer
from nanovllm.worker.message_channel import MessageChannel, encode

PATIENCE = 2.0  # seconds until a reader or writer that should be done counts as stuck


class Line:
    """A channel on the answer's code, and its readers."""

    def __init__(self, answer: Answer, readers: int = 1, capacity: int = 256) -> None:
        answer.story.clear()
        answer.note(f"a channel with {readers} readers and {capacity} bytes of memory")
        self.answer = answer
        cls = answer.parts.resolve(MessageChannel)
        self.writer = cls.create(readers, threading, capacity)
        self.readers = [cls.attach(self.writer.handle(reader)) for reader in range(readers)]
        self.errors: list[BaseException] = []

    def start(self, work: Any, *args: Any) -> threading.Thread:
        def run() -> None:
            try:
                work(*args)
            except BaseException as error:
                self.errors.append(error)

        thread = threading.Thread(target=run, daemon=True)
        thread.start()
        return thread

    def finish(self, threads: list[threading.Thread], what: str) -> None:
        for thread in threads:
            thread.join(PATIENCE)
        if self.errors:
            raise self.errors[0]
        stuck = sum(thread.is_alive() for thread in threads)
        self.answer.require(not stuck, f"{stuck} of {len(threads)} threads still wait", what)

    def collect(self, count: int, pause: float = 0.0) -> tuple[list[list[Any]], list[threading.Thread]]:
        """Let every reader read `count` messages in a thread of its own."""
        received: list[list[Any]] = [[] for _ in self.readers]

        def work(reader: int) -> None:
            for _ in range(count):
                time.sleep(pause * (reader + 1))
                received[reader].append(self.readers[reader].read())

        return received, [self.start(work, reader) for reader in range(len(self.readers))]


def plain(message: tuple[str, tuple[Any, ...]]) -> tuple[str, list[Any]]:
    """A message with its arrays as lists, which can be compared."""
    method, args = message
    return method, [arg.tolist() if isinstance(arg, np.ndarray) else arg for arg in args]


def test_contract__method_and_arguments(answer: Answer) -> None:
    """read returns (method, args) as they were written: arrays with type and shape, plain values as they are."""
    line = Line(answer, capacity=4096)
    received, threads = line.collect(1)
    array = np.arange(6, dtype=np.int32).reshape(2, 3)
    answer.equal(line.writer.write("run", (array, 7, "x", None)), None, "write returns nothing.")
    line.finish(threads, "the message was read")
    method, args = received[0][0]
    answer.equal((method, args[1:]), ("run", (7, "x", None)))
    answer.equal((args[0].tolist(), str(args[0].dtype)), (array.tolist(), "int32"))
    answer.equal(array.tolist(), [[0, 1, 2], [3, 4, 5]], "The written array stays as it is.")


def test_example__two_readers_two_messages(answer: Answer) -> None:
    """Every reader gets every message once, in order."""
    line = Line(answer, readers=2)
    received, threads = line.collect(2)
    line.writer.write("warmup")
    line.writer.write("run", (1, 2))
    line.finish(threads, "both readers have both messages")
    answer.equal([[plain(m) for m in got] for got in received], [[("warmup", []), ("run", [1, 2])]] * 2)


def test_oracle__many_messages(answer: Answer) -> None:
    """Messages of all sizes arrive at every reader whole, once, and in order."""
    line = Line(answer, readers=3, capacity=128)
    sent = []
    for number in range(60):
        numbers = np.array([answer.rng.randrange(100) for _ in range(answer.rng.choice([0, 1, 5, 40]))], np.int64)
        sent.append(("run", (number, numbers)))
    received, threads = line.collect(len(sent))

    def write() -> None:
        for method, args in sent:
            line.writer.write(method, args)

    answer.note(f"{len(sent)} messages of up to 320 bytes")
    line.finish([line.start(write), *threads], "all messages were written and read")
    expected = [plain(message) for message in sent]
    for got in received:
        answer.equal([plain(message) for message in got], expected)


def test_boundary__a_slow_reader_loses_nothing(answer: Answer) -> None:
    """The writer waits for the slowest reader before it lays down the next piece."""
    line = Line(answer, readers=2)
    received, threads = line.collect(6, pause=0.02)

    def write() -> None:
        for number in range(6):
            line.writer.write("run", (number,))

    answer.note("6 messages; the readers sleep 20 and 40 ms before each")
    line.finish([line.start(write), *threads], "all messages were written and read")
    answer.equal([[plain(m)[1] for m in got] for got in received], [[[n] for n in range(6)]] * 2)


def test_boundary__a_payload_larger_than_the_memory(answer: Answer) -> None:
    """A long payload goes piece by piece, each laid down only when the last was taken."""
    line = Line(answer, readers=2, capacity=64)
    numbers = np.arange(500, dtype=np.int64)
    received, threads = line.collect(2)
    answer.note("a message of 4,000 bytes, then a short one")

    def write() -> None:
        line.writer.write("run", (numbers,))
        line.writer.write("exit")

    line.finish([line.start(write), *threads], "both messages were written and read")
    for got in received:
        answer.equal(plain(got[0]), ("run", [numbers.tolist()]))
        answer.equal(plain(got[1]), ("exit", []))


def test_boundary__exactly_as_large_as_the_memory(answer: Answer) -> None:
    """A payload that fills the memory to the last byte is one piece; one byte more makes two."""
    for extra in (0, 1):
        text = "x" * 40
        capacity = len(encode("run", (text,))) - extra
        line = Line(answer, capacity=capacity)
        received, threads = line.collect(1)
        line.finish([line.start(line.writer.write, "run", (text,)), *threads], "the message was written and read")
        answer.equal(plain(received[0][0]), ("run", [text]))
        pieces = int(line.writer.words[0])
        answer.equal(pieces, 1 + extra, "A payload goes in as few pieces as fit.")


def test_boundary__events_without_news(answer: Answer) -> None:
    """A set event says 'look again', no more: a reader that finds nothing goes back to sleep."""
    line = Line(answer)
    line.readers[0].events[0].set()
    received, threads = line.collect(1)
    answer.note("the event was set before anything was written")
    time.sleep(0.05)
    answer.equal(received, [[]], "Nothing was written, so nothing can be read.")
    line.writer.write("run", (5,))
    line.finish(threads, "the message was read")
    answer.equal(plain(received[0][0]), ("run", [5]))


def test_boundary__a_message_that_lies_there_already(answer: Answer) -> None:
    """A reader looks before it sleeps: a message is there for one that comes late, to a cleared event."""
    line = Line(answer)
    line.writer.write("run", (5,))
    line.readers[0].events[0].clear()
    answer.note("written, and the event cleared, before the reader came")
    received, threads = line.collect(1)
    line.finish(threads, "the message was read")
    answer.equal(plain(received[0][0]), ("run", [5]))


def test_boundary__after_half_a_message(answer: Answer) -> None:
    """A piece with offset 0 begins a message, also behind the first half of one whose writer was interrupted."""
    line = Line(answer, capacity=64)
    half = encode("run", (np.arange(50),))
    line.writer.put(half, 0)
    answer.note("the first piece of a long message, and then no more of it")
    received, threads = line.collect(1)

    def write() -> None:
        line.writer.write("exit", (3,))

    line.writer.events[0].set()
    line.finish([line.start(write), *threads], "the second message was written and read")
    answer.equal(plain(received[0][0]), ("exit", [3]))


def test_boundary__a_sleeping_reader_wakes_up(answer: Answer) -> None:
    """A reader sleeps until it is told: it does not turn in circles."""
    line = Line(answer)
    looks = [0]
    real = line.readers[0].has_piece

    def counted() -> bool:
        looks[0] += 1
        return real()

    line.readers[0].has_piece = counted
    received, threads = line.collect(1)
    time.sleep(0.1)
    answer.note("a reader alone for 0.1 s")
    answer.require(looks[0] <= 5, f"looked {looks[0]} times", "looked once and slept")
    line.writer.write("run", (1,))
    line.finish(threads, "the message was read")
    answer.equal(len(received[0]), 1)
