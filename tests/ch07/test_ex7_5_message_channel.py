"""Grader of exercise 7.5: a channel from one writer to several readers. Readers are threads."""

import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from nanovllm.workbook.grading import Answer
from nanovllm.worker.message_channel import NUMBER, TAKEN, MessageChannel, encode

PATIENCE = 1.0  # seconds without a piece laid down or taken until readers and writer count as stuck


class Line:
    """A channel on the answer's code, and its readers.

    The engine's `wait_taken` wakes readers once more, in case that a write was interrupted. Here it only waits, as the
    exercise has it, so that a write that forgets somebody shows.
    """

    def __init__(self, answer: Answer, readers: int = 1, capacity: int = 256) -> None:
        answer.story.clear()
        answer.note(f"a channel with {readers} readers and {capacity} bytes of memory")
        self.answer = answer
        cls = answer.parts.resolve(MessageChannel)
        self.writer = cls.create(readers, threading, capacity)
        self.writer.wait_taken = self.wait_taken
        self.readers = [cls.attach(self.writer.handle(reader)) for reader in range(readers)]
        self.errors: list[BaseException] = []
        self.looks = [0] * readers  # how often each reader has asked `has_piece`
        self.is_over = False  # then every thread ends at its next look
        for number, reader in enumerate(self.readers):
            reader.has_piece = partial(self.has_piece, number, reader.has_piece)

    def has_piece(self, reader: int, real: Callable[[], bool]) -> bool:
        if self.is_over:
            raise SystemExit
        self.looks[reader] += 1
        return real()

    def wait_taken(self) -> None:
        """Wait, and wake nobody."""
        words = self.writer.words
        while any(words[TAKEN + reader] < words[NUMBER] for reader in range(len(self.readers))):
            if self.is_over:
                raise SystemExit
            time.sleep(50e-6)

    def send(self, method: str, args: tuple[Any, ...] = ()) -> Any:
        """Write one message, in a thread, so that a write that never ends can be told. Returns what `write` does."""
        results: list[Any] = []
        thread = self.start(lambda: results.append(self.writer.write(method, args)))
        self.finish([thread], f"write({method!r}) returned")
        return results[0]

    def start(self, work: Any, *args: Any) -> threading.Thread:
        def run() -> None:
            try:
                work(*args)
            except BaseException as error:
                if not self.is_over:
                    self.errors.append(error)

        thread = threading.Thread(target=run, daemon=True)
        thread.start()
        return thread

    def stop(self) -> None:
        """Let threads that wait or turn in circles end."""
        self.is_over = True
        for event in self.writer.events:
            event.set()

    def require(self, holds: bool, got: str, expected: str, rule: str | None = None) -> None:
        """As `Answer.require`, but what a thread raised comes first; no thread stays behind."""
        if not holds or self.errors:
            self.stop()
        if self.errors:
            raise self.errors[0]
        self.answer.require(holds, got, expected, rule)

    def idle(self, seconds: float, received: list[list[Any]]) -> None:
        """Nothing is written for a while: nobody may have read anything, nor looked again and again."""
        time.sleep(seconds)
        self.require(not any(received), f"{received}", "nothing", "Nothing was written, so nothing can be read.")
        said = f"looked {max(self.looks)} times in {seconds} s"
        self.require(max(self.looks) <= 5, said, "looked, cleared the event if it was set, and slept")

    def finish(self, threads: list[threading.Thread], what: str) -> None:
        """Wait until all of them are done, as long as pieces come and go."""
        try:
            self.watch(threads)
        except BaseException:  # the test's time is over
            self.stop()
            raise
        stuck = sum(thread.is_alive() for thread in threads)
        self.require(not stuck, f"{stuck} of {len(threads)} threads still wait", what)

    def watch(self, threads: list[threading.Thread]) -> None:
        """Return when all are done, one has failed, or nothing has moved for a while."""
        began = moved = time.perf_counter()
        words = self.writer.words.tolist()
        while (alive := [thread for thread in threads if thread.is_alive()]) and not self.errors:
            alive[0].join(0.02)
            now, last, words = time.perf_counter(), words, self.writer.words.tolist()
            moved = now if words != last else moved
            if now - moved > PATIENCE or now - began > 10 * PATIENCE:
                return

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
    array = np.arange(6, dtype=np.int32).reshape(2, 3)
    with answer.about("A reader with nothing to read sleeps, and is woken after something was written."):
        received, threads = line.collect(1)
        line.idle(0.02, received)
        returned = line.send("run", (array, 7, "x", None))
        line.finish(threads, "the message was read")
    answer.equal(returned, None, "write returns nothing.")
    method, args = received[0][0]
    answer.equal((method, args[1:]), ("run", (7, "x", None)))
    answer.equal((args[0].tolist(), str(args[0].dtype)), (array.tolist(), "int32"))
    answer.equal(array.tolist(), [[0, 1, 2], [3, 4, 5]], "The written array stays as it is.")
    answer.equal(bool(args[0].flags.writeable), True, "decode is given a bytearray, so arrays can be written to.")


def test_example__two_readers_two_messages(answer: Answer) -> None:
    """Every reader gets every message once, in order."""
    line = Line(answer, readers=2)
    received, threads = line.collect(2)
    line.send("warmup")
    line.send("run", (1, 2))
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
        pieces = int(line.writer.words[NUMBER])
        answer.equal(pieces, 1 + extra, "A payload goes in as few pieces as fit.")


def test_boundary__events_without_news(answer: Answer) -> None:
    """A set event says 'look again', no more: a reader that finds nothing goes back to sleep."""
    line = Line(answer)
    line.readers[0].events[0].set()
    received, threads = line.collect(1)
    answer.note("the event was set before anything was written")
    line.idle(0.05, received)
    line.send("run", (5,))
    line.finish(threads, "the message was read")
    answer.equal(plain(received[0][0]), ("run", [5]))


def test_boundary__a_message_that_lies_there_already(answer: Answer) -> None:
    """A reader looks before it sleeps: a message is there for one that comes late, to a cleared event."""
    line = Line(answer)
    event = line.readers[0].events[0]
    writing = line.start(line.writer.write, "run", (5,))
    line.require(event.wait(PATIENCE), "an event that is not set", "a message laid down, and the event set")
    event.clear()
    answer.note("written, and the event cleared, before the reader came")
    received, threads = line.collect(1)
    line.finish([writing, *threads], "the message was written and read")
    answer.equal(plain(received[0][0]), ("run", [5]))


def test_boundary__after_half_a_message(answer: Answer) -> None:
    """A piece with offset 0 begins a message, also behind the first half of one whose writer was interrupted."""
    for message in (("exit", (3,)), ("run", (np.arange(50) + 7,))):
        line = Line(answer, capacity=64)
        line.writer.put(encode("run", (np.arange(50),)), 0)
        answer.note("the first piece of a long message, and then no more of it")
        writing = line.start(line.writer.write, *message)
        time.sleep(0.02)
        over = "No piece may be laid over one that somebody has not taken."
        line.require(line.writer.words[NUMBER] == 1, "a piece over the first one", "a write that waits", over)
        received, threads = line.collect(1)
        line.writer.events[0].set()
        line.finish([writing, *threads], "the second message was written and read")
        answer.equal(plain(received[0][0]), plain(message))


def test_boundary__a_sleeping_reader_wakes_up(answer: Answer) -> None:
    """A reader sleeps until it is told: it does not turn in circles."""
    line = Line(answer)
    received, threads = line.collect(1)
    answer.note("a reader alone for 0.1 s")
    line.idle(0.1, received)
    line.send("run", (1,))
    line.finish(threads, "the message was read")
    answer.equal(len(received[0]), 1)


def test_boundary__a_message_between_looking_and_sleeping(answer: Answer) -> None:
    """A message that comes just after the reader looked has set the event: who clears it first sleeps through it."""
    line = Line(answer)
    reader, seen = line.readers[0], [0]
    real = reader.has_piece

    def late() -> bool:
        found, seen[0] = real(), seen[0] + 1
        if seen[0] == 1:
            line.writer.put(encode("run", (4,)), 0)
            line.writer.events[0].set()
        return found

    reader.has_piece = late
    received, threads = line.collect(1)
    answer.note("the message is laid down, and the event set, right after the reader's first look")
    line.finish(threads, "the message was read")
    answer.equal(plain(received[0][0]), ("run", [4]))


def test_boundary__nothing_for_a_long_time(answer: Answer) -> None:
    """However long nothing comes, a reader waits for its message: time that passes is no message."""
    line = Line(answer)
    event = line.readers[0].events[0]
    real = event.wait
    event.wait = lambda timeout=None: real(timeout and 0.02)
    received, threads = line.collect(1)
    answer.note("nothing is written for a while; waiting with a limit ends early")
    line.idle(0.05, received)
    line.send("run", (6,))
    line.finish(threads, "the message was read")
    answer.equal(plain(received[0][0]), ("run", [6]))
