"""The message channel: what is written is read, once, in order, by every reader, however slow."""

import multiprocessing
import os
import threading
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest

from nanovllm.worker.message_channel import ChannelHandle, MessageChannel, PipeEvent, decode, encode
from tests.tensor_parallel.helpers import named_shared_memory

Messages = list[tuple[str, tuple[Any, ...]]]


def same(a: Any, b: Any) -> bool:
    """Equal values of equal types, arrays compared by dtype, shape and content."""
    if isinstance(a, np.ndarray):
        return isinstance(b, np.ndarray) and a.dtype == b.dtype and a.shape == b.shape and bool((a == b).all())
    if isinstance(a, tuple):
        return type(a) is type(b) and len(a) == len(b) and all(map(same, a, b))
    return type(a) is type(b) and a == b


def read_until_exit(handle: ChannelHandle, got: Messages, pause: Callable[[], None] = lambda: None) -> None:
    channel = MessageChannel.attach(handle)
    while not got or got[-1][0] != "exit":
        pause()
        got.append(channel.read())


class Readers:
    """A channel and threads that read it until "exit"."""

    def __init__(self, num_readers: int, pauses: dict[int, Callable[[], None]] | None = None, **options: Any) -> None:
        self.channel = MessageChannel.create(num_readers, **options)
        self.got: list[Messages] = [[] for _ in range(num_readers)]
        self.threads = [
            threading.Thread(
                target=read_until_exit,
                args=(self.channel.handle(i), self.got[i], (pauses or {}).get(i, lambda: None)),
                daemon=True,
            )
            for i in range(num_readers)
        ]
        for thread in self.threads:
            thread.start()

    def finish(self) -> list[Messages]:
        self.channel.write("exit")
        for thread in self.threads:
            thread.join(20)
            assert not thread.is_alive()
        self.channel.close()
        return self.got


STEP = (
    np.arange(5), np.zeros((3, 4), np.int32), np.array([0.5, 1e-6], np.float32), np.zeros((0, 7), np.int64),
    np.array([True, False]), np.array(3, np.uint8),
)  # fmt: skip


@pytest.mark.parametrize(
    "args",
    [
        (),
        STEP,
        (1, -(1 << 70), 2.5, float("inf"), "Grüße \N{SNOWMAN}", b"\x00\xff", None, True),
        (STEP, (1, (2, STEP[0], ())), (STEP[1],)),
        (np.arange(12).reshape(3, 4).T, np.arange(10)[::3]),
    ],
)
def test_encode_and_decode_are_inverse(args: tuple[Any, ...]) -> None:
    method, back = decode(bytearray(encode("run", args)))
    assert method == "run"
    assert same(args, back)


def test_decoded_arrays_are_aligned_and_writable() -> None:
    _, arrays = decode(bytearray(encode("run", (np.ones(3, np.int8), np.ones(5), np.ones(1, np.float32)))))
    for array in arrays:
        assert array.flags.aligned and array.flags.writeable
        array[:] = 2


def test_numpy_scalars_and_named_tuples_become_plain_values() -> None:
    class Rows(NamedTuple):
        ids: np.ndarray
        count: np.int64

    _, (rows,) = decode(bytearray(encode("run", (Rows(np.arange(2), np.int64(7)),))))
    assert type(rows) is tuple and type(rows[1]) is int and same(rows, (np.arange(2), 7))


@pytest.mark.parametrize("value", [object(), [1], {1: 2}, 1j, np.array([object()]), np.array(["text"]), threading])
@pytest.mark.parametrize("wrap", [lambda value: value, lambda value: (1, (value,))])
def test_live_objects_are_refused_by_name(value: Any, wrap: Callable[[Any], Any]) -> None:
    with pytest.raises(TypeError, match=f"not {type(value).__name__}"):
        encode("run", (wrap(value),))


@pytest.mark.parametrize("ctx", [None, threading, multiprocessing.get_context("spawn")])
@pytest.mark.parametrize("num_readers", [1, 3])
def test_every_reader_gets_every_message_in_order(num_readers: int, ctx: Any) -> None:
    readers = Readers(num_readers, ctx=ctx)
    for i in range(50):
        readers.channel.write("run", (i, np.full(i, i)))
    for got in readers.finish():
        assert [method for method, _ in got] == ["run"] * 50 + ["exit"]
        assert all(same(args, (i, np.full(i, i))) for i, (_, args) in enumerate(got[:-1]))


def test_a_slow_reader_loses_nothing_and_holds_the_writer_up() -> None:
    readers = Readers(2, {1: lambda: time.sleep(0.02)})
    started = time.perf_counter()
    for i in range(10):
        readers.channel.write("run", (i,))
    elapsed = time.perf_counter() - started
    fast, slow = readers.finish()
    assert fast == slow and [args for _, args in slow[:-1]] == [(i,) for i in range(10)]
    assert elapsed > 8 * 0.02  # one message may be on its way, no more


@pytest.mark.parametrize("spin", [0.0, 10.0])
def test_a_reader_that_need_not_sleep_leaves_the_event_clear(spin: float) -> None:
    """It watches, or is late. A pipe holds 65,536 bytes; with one left by every message, `set` would block some day."""
    channel = MessageChannel.create(1)
    reader = MessageChannel.attach(channel.handle(0))
    reader.spin = spin
    for i in range(70_000):
        channel.write("run", (i,))
        assert reader.read() == ("run", (i,))
    assert not channel.events[0].wait(0)
    reader.spin = 0.01
    threading.Timer(0.1, channel.write, ["late"]).start()
    assert reader.read() == ("late", ())
    channel.close()


@pytest.mark.parametrize("size", [0, 1, 63, 64, 65, 128, 1000])
def test_messages_larger_than_the_memory_go_piece_by_piece(size: int) -> None:
    readers = Readers(2, capacity=64)
    data = np.arange(size, dtype=np.uint8)
    readers.channel.write("run", (data,))
    readers.channel.write("again", (1,))
    for got in readers.finish():
        assert same(got[0], ("run", (data,))) and got[1] == ("again", (1,))


def test_fifty_megabytes() -> None:
    readers = Readers(1)
    data = np.arange(50 << 20, dtype=np.uint8)
    readers.channel.write("run", (data, 1))
    (got,) = readers.finish()
    assert same(got[0], ("run", (data, 1)))


@pytest.mark.parametrize("capacity", [16, 1 << 20])
@pytest.mark.parametrize("place", ["before put", "after put", "after first event"])
def test_a_write_that_was_interrupted_can_be_followed_by_another(place: str, capacity: int) -> None:
    """KeyboardInterrupt may strike anywhere in `write`. That message may be read or not; the next one is."""
    readers = Readers(2, capacity=capacity)
    channel, put = readers.channel, readers.channel.put
    for round_ in range(5):
        channel.write("run", (round_, "before"))

        def interrupted_put(payload: bytes, offset: int) -> None:
            if place != "before put":
                put(payload, offset)
            raise KeyboardInterrupt

        def interrupted_set() -> None:
            raise KeyboardInterrupt

        with pytest.MonkeyPatch.context() as patch, pytest.raises(KeyboardInterrupt):
            if place == "after first event":
                patch.setattr(channel.events[1], "set", interrupted_set)
            else:
                patch.setattr(channel, "put", interrupted_put)
            channel.write("lost", (round_,))
        channel.write("run", (round_, "after"))
    for got in readers.finish():
        runs = [args for method, args in got if method == "run"]
        assert runs == [(round_, when) for round_ in range(5) for when in ("before", "after")]
        assert [args for method, args in got if method == "lost"] == sorted(
            {args for method, args in got if method == "lost"}
        )


def test_the_writer_asks_whether_waiting_makes_sense() -> None:
    channel = MessageChannel.create(1)
    channel.write("run")

    def give_up() -> None:
        raise RuntimeError("the reader is dead")

    channel.check = give_up
    with pytest.raises(RuntimeError, match="the reader is dead"):
        channel.write("run")
    channel.close()
    channel.close()


def test_a_step_of_256_rows_is_fast() -> None:
    rows = np.arange(256)
    step = (rows, rows, rows, np.zeros((256, 17), np.int32), rows.astype(np.int32), rows, rows.astype(np.float32), 1, 2)

    def once() -> float:
        started = time.perf_counter()
        decode(bytearray(encode("run", step)))
        return time.perf_counter() - started

    assert min(once() for _ in range(200)) < 100e-6  # measured: 18 microseconds


def test_pipe_event() -> None:
    event = PipeEvent()
    assert not event.wait(0)
    event.clear()
    event.set()
    event.set()
    assert event.wait() and event.wait(0)
    event.clear()
    assert not event.wait(0.001)
    event.close()
    event.close()


def shared_memory_names() -> set[str]:
    return named_shared_memory() if os.path.isdir("/dev/shm") else set()


def echo(handle: ChannelHandle, results: Any) -> None:
    """Runs in a spawned process: sends back the sum of every message."""
    channel = MessageChannel.attach(handle)
    while True:
        method, args = channel.read()
        results.send((method, int(sum(array.sum() for array in args))))
        if method == "exit":
            return


def test_between_processes_nothing_is_left_behind() -> None:
    before = shared_memory_names()
    ctx = multiprocessing.get_context("spawn")
    channel = MessageChannel.create(2)
    pipes = [ctx.Pipe(duplex=False) for _ in range(2)]
    processes = [ctx.Process(target=echo, args=(channel.handle(i), pipes[i][1])) for i in range(2)]
    for process in processes:
        process.start()
    big = np.ones(3 << 20, np.uint8)
    channel.write("run", (np.arange(4), big))
    channel.write("exit")
    for receiver, _ in pipes:
        assert receiver.recv() == ("run", 6 + (3 << 20))
        assert receiver.recv() == ("exit", 0)
    for process in processes:
        process.join(20)
        assert process.exitcode == 0
    channel.close()
    assert shared_memory_names() <= before


def test_a_reader_killed_in_its_sleep_does_not_hang_the_writer() -> None:
    """With `multiprocessing.Event` in place of `PipeEvent`, the `set` of the last write would wait for ever."""
    ctx = multiprocessing.get_context("spawn")
    channel = MessageChannel.create(1)
    receiver, sender = ctx.Pipe(duplex=False)
    process = ctx.Process(target=echo, args=(channel.handle(0), sender))
    process.start()
    channel.write("run", (np.arange(3),))
    assert receiver.recv() == ("run", 3)
    time.sleep(0.1)  # now it sleeps in `read`
    process.kill()
    process.join()
    writing = threading.Thread(target=channel.write, args=("run",), daemon=True)
    writing.start()
    writing.join(5)
    assert not writing.is_alive()
    channel.close()
