"""The one-shot all-reduce in Triton's interpreter: ranks are processes, and their mailboxes shared memory.

The interpreter does everything in order, so it cannot show a missing fence; the compiled kernel is read for that.
"""

import os
import socket
import subprocess
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
import torch.multiprocessing as multiprocessing

from nanovllm.attention.triton_kernels import interpreted
from nanovllm.worker import one_shot
from nanovllm.worker.one_shot import (
    CHUNK_BYTES,
    MAX_BYTES,
    MAX_CHUNKS,
    OneShotAllReduce,
    mailbox_bytes,
    sum_in_place,
)
from nanovllm.worker.tensor_parallel import LOOPBACK, Collectives, PeerLostError

pytestmark = pytest.mark.skipif(not interpreted(), reason="triton was imported before TRITON_INTERPRET=1 was set")

SIZE = 3
# Numbers of a chunk and of two chunks and a bit, in turn: programs then count different sums, as in a real step. The
# same tensor more often than there are letters.
STEPS = [
    *[(torch.float32, CHUNK_BYTES // 4)] * 3, (torch.float32, 2 * CHUNK_BYTES // 4 + 7), (torch.float32, 1),
    *[(torch.float32, 2 * CHUNK_BYTES // 4 + 7)] * 4, (torch.bfloat16, CHUNK_BYTES // 2 + 1), (torch.bfloat16, 576),
]  # fmt: skip


def numbers(rank: int, step: int) -> torch.Tensor:
    dtype, size = STEPS[step]
    return torch.randn(size, generator=torch.Generator().manual_seed(100 * step + rank)).to(dtype)


def run_rank(rank: int, boxes: list[torch.Tensor], sums: torch.Tensor) -> None:
    mailboxes = torch.tensor([box.data_ptr() for box in boxes])  # mapped elsewhere in each process
    epochs, stop = torch.zeros(MAX_CHUNKS, dtype=torch.int64), torch.zeros(1, dtype=torch.int64)
    for step, (_, size) in enumerate(STEPS):
        x = numbers(rank, step)
        sum_in_place(x, mailboxes, epochs, stop, rank)
        sums[rank, step, :size] = x


def test_every_rank_gets_the_sum_of_all() -> None:
    ctx = multiprocessing.get_context("spawn")
    boxes = [torch.zeros(mailbox_bytes(SIZE), dtype=torch.uint8).share_memory_() for _ in range(SIZE)]
    sums = torch.zeros(SIZE, len(STEPS), max(size for _, size in STEPS)).share_memory_()
    ranks = [ctx.Process(target=run_rank, args=(rank, boxes, sums), daemon=True) for rank in range(SIZE)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join(60)
    codes = [process.exitcode for process in ranks]
    for process in ranks:  # one that waits for a flag would wait for ever
        process.kill()
        process.join()
    assert codes == [0] * SIZE
    assert torch.equal(sums[0], sums[1]) and torch.equal(sums[0], sums[2])
    for step, (dtype, size) in enumerate(STEPS):
        expected = sum(numbers(rank, step).float() for rank in range(SIZE))
        rounding = 2.0**-7 if dtype == torch.bfloat16 else 0.0  # the interpreter cuts what a GPU rounds
        torch.testing.assert_close(sums[0, step, :size], expected, rtol=rounding, atol=0.0, msg=f"step {step}")


def test_a_rank_that_is_told_to_stop_waits_for_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(one_shot, "LOOKS", 8)
    boxes = [torch.zeros(mailbox_bytes(2), dtype=torch.uint8) for _ in range(2)]
    mailboxes, epochs = torch.tensor([box.data_ptr() for box in boxes]), torch.zeros(MAX_CHUNKS, dtype=torch.int64)
    for _ in range(3):
        sum_in_place(torch.ones(CHUNK_BYTES // 2), mailboxes, epochs, torch.ones(1, dtype=torch.int64), 0)
    assert epochs[:3].tolist() == [3, 3, 0]


COMPILE = """
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from nanovllm.worker.one_shot import all_reduce_kernel

names = all_reduce_kernel.arg_names
types = dict(zip(names, ["*bf16", "*i64", "*i64", "*i64", "i32"])) | {name: "constexpr" for name in names[5:]}
constants = dict(RANK=0, SIZE=2, CHUNK=2048, MAX_BYTES=1 << 20, LOOKS=1 << 15)
aligned = {(place,): [["tt.divisibility", 16]] for place in range(5)}
source = ASTSource(all_reduce_kernel, types, constexprs=constants, attrs=aligned)
print(triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 4}).asm["ptx"])
"""


def test_the_compiled_kernel_keeps_its_order() -> None:
    """Letters in 16 bytes at once; behind a barrier the flag, with release; looks, then one with acquire, and a barrier
    before any thread reads. (An acquire whose result was not used had been optimised away.)"""
    environment = {**os.environ, "TRITON_INTERPRET": "0"}
    result = subprocess.run(
        [sys.executable, "-c", COMPILE], capture_output=True, text=True, env=environment, timeout=120
    )
    assert result.returncode == 0, result.stderr
    marks = {
        "st.global.v4": "letter", "bar.sync": "barrier", ".release": "flag", "ld.volatile.global": "look",
        ".acquire": "acquire", "ld.global.cg.v4": "read", "$L__BB0_2:": "loop", "bra \t$L__BB0_2": "again",
    }  # fmt: skip
    order = [name for line in result.stdout.splitlines() for mark, name in marks.items() if mark in line]
    assert order == [
        "letter", "letter", "barrier", "flag", "look", "loop", "look", "look", "again", "acquire", "barrier",
        "read", "read",
        "letter", "letter",  # the sums, into x
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("x", "taken"),
    [
        (torch.empty(MAX_BYTES // 2, dtype=torch.bfloat16), True),
        (torch.empty(MAX_BYTES // 2 + 1, dtype=torch.bfloat16), False),
        (torch.empty(MAX_BYTES // 4), True),
        (torch.empty(1, dtype=torch.float16), True),
        (torch.empty(8, dtype=torch.float64), False),  # summed in float32 it would lose half of its digits
        (torch.empty(8, dtype=torch.int64), False),
        (torch.empty(8, 8).t(), False),
    ],
)
def test_what_it_takes(x: torch.Tensor, taken: bool) -> None:
    assert OneShotAllReduce(0, 2, torch.device("cpu")).takes(x) is taken


# ---- who has one, and what becomes of it: on a machine that only seems to have GPUs --------------------------------


class Store:
    """What `connect` needs of a store, for two ranks; the other one has said already what it says."""

    def __init__(self, **said: bytes) -> None:
        self.said = {f"{word} 1": value for word, value in {"unmapped": b"yes", **said}.items()}
        self.log: list[str] = []

    def set(self, key: str, value: bytes) -> None:
        self.said[key] = value
        self.log.append(key.removesuffix(" 0"))

    def get(self, key: str) -> bytes:
        return self.said[key]


THEIRS = bytes([3]) + b"handle"  # of GPU 3


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Any:
    """CUDA's runtime, which logs what is asked of it, and the pairs of GPUs of which it is asked."""
    log: list[str] = []
    pairs: list[tuple[int, int]] = []
    answers: dict[str, Any] = {"cudaMalloc": 1 << 20, "cudaIpcGetMemHandle": SimpleNamespace(reserved=b"mine")}
    answers |= {"cudaDeviceGetP2PAttribute": 1, "cudaIpcOpenMemHandle": 1 << 30}

    def function(name: str) -> Any:
        def call(*args: Any) -> tuple[Any, ...]:
            log.append(name)
            if name == "cudaDeviceGetP2PAttribute":
                pairs.append(args[1:])
            return 0, answers.get(name)

        return call

    runtime = ModuleType("cuda.bindings.runtime")
    names = ["cudaSetDevice", "cudaMalloc", "cudaMemset", "cudaIpcGetMemHandle", "cudaDeviceGetP2PAttribute"]
    names += ["cudaIpcOpenMemHandle", "cudaIpcCloseMemHandle", "cudaFree"]
    for name in names:
        setattr(runtime, name, function(name))
    runtime.cudaDeviceP2PAttr = SimpleNamespace(cudaDevP2PAttrNativeAtomicSupported="native")  # type: ignore[attr-defined]
    runtime.cudaIpcMemHandle_t = SimpleNamespace  # type: ignore[attr-defined]
    runtime.cudaIpcMemLazyEnablePeerAccess = 1  # type: ignore[attr-defined]
    bindings = ModuleType("cuda.bindings")
    bindings.runtime = runtime  # type: ignore[attr-defined]
    for name, module in {"cuda": ModuleType("cuda"), "cuda.bindings": bindings}.items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(one_shot, "interpreted", lambda: False)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda self: self)
    return SimpleNamespace(log=log, pairs=pairs, answers=answers)


DEVICE = torch.device("meta", 2)  # rank 0 of an engine with device="cuda:2"


def test_mailboxes_are_opened_and_given_back(cuda: Any) -> None:
    made = OneShotAllReduce.connect(Store(mailbox=THEIRS, opened=b"open"), 0, 2, DEVICE)
    assert made is not None
    assert made.opened == [1 << 30]
    assert cuda.pairs == [(2, 3)]  # the GPUs, and not the ranks
    cuda.log.clear()
    made.close()
    made.close()
    assert cuda.log == ["cudaSetDevice", "cudaIpcCloseMemHandle", "cudaFree"]


@pytest.mark.parametrize(
    ("store", "answers", "told"),
    [
        ({"mailbox": b"", "opened": b"no"}, {}, b"no"),  # the other rank has none
        ({"mailbox": THEIRS, "opened": b"no"}, {}, b"open"),  # ... or cannot open this one
        ({"mailbox": THEIRS, "opened": b"open"}, {"cudaDeviceGetP2PAttribute": 0}, b"no"),  # no NVLink
        ({"mailbox": THEIRS, "opened": b"open"}, {"cudaIpcOpenMemHandle": OSError}, b"no"),
        ({"mailbox": THEIRS, "opened": b"no"}, {"cudaIpcGetMemHandle": None}, b"no"),  # what `make` does not expect
    ],
)
def test_all_ranks_or_none(cuda: Any, store: dict[str, bytes], answers: dict[str, Any], told: bytes) -> None:
    cuda.answers |= answers
    shared = Store(**store)
    assert OneShotAllReduce.connect(shared, 0, 2, DEVICE) is None
    assert shared.said["opened 0"] == told
    assert shared.log == ["mailbox", "opened", "unmapped"]
    assert cuda.log.count("cudaMalloc") == cuda.log.count("cudaFree") == 1
    assert cuda.log.count("cudaIpcCloseMemHandle") == (told == b"open")


def test_a_peer_that_is_lost_meanwhile_leaves_nothing_behind(cuda: Any) -> None:
    with pytest.raises(KeyError):  # as a store's timeout
        OneShotAllReduce.connect(Store(), 0, 2, DEVICE)
    assert cuda.log[-1] == "cudaFree"


def test_without_the_bindings_there_is_none(cuda: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cuda.bindings", None)
    store = Store(mailbox=THEIRS, opened=b"no")
    assert OneShotAllReduce.connect(store, 0, 2, DEVICE) is None
    assert store.said["mailbox 0"] == b""
    assert cuda.log == []


def test_the_interpreters_kernels_have_none(cuda: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """They would take a GPU's addresses for the host's."""
    monkeypatch.setattr(one_shot, "interpreted", lambda: True)
    assert OneShotAllReduce.connect(Store(mailbox=THEIRS, opened=b"no"), 0, 2, DEVICE) is None


class Fake:
    """A one-shot all-reduce and a process group, logging."""

    def __init__(self, log: list[str]) -> None:
        self.log = log

    def takes(self, x: torch.Tensor) -> bool:
        return x.numel() < 10

    def __call__(self, x: torch.Tensor) -> None:
        self.log.append("one shot")

    def __getattr__(self, name: str) -> Any:
        return lambda *args: self.log.append(name)


@pytest.fixture
def connected() -> Any:
    with socket.create_server((LOOPBACK, 0)) as listener:
        collectives = Collectives(0, 2, listener.getsockname()[1], os.dup(listener.fileno()))
    collectives.log = []  # type: ignore[attr-defined]
    collectives._group = collectives._one_shot = collectives._mailbox = Fake(collectives.log)  # type: ignore[attr-defined]
    return collectives


def test_small_sums_take_the_short_way(connected: Any) -> None:
    connected.allreduce([torch.ones(9)])
    connected.allreduce([torch.ones(10)])
    assert connected.log == ["one shot", "allreduce"]


def test_a_group_that_is_left_stops_its_kernels_and_keeps_their_memory(connected: Any) -> None:
    """A step under way, of another thread, may be about to start one more."""
    connected.device = torch.device("cuda")
    connected.leave()
    assert connected.log == ["release", "abort"]
    with pytest.raises(PeerLostError):
        connected.allreduce([torch.ones(9)])
    connected.close()
    assert connected.log == ["release", "abort", "close"]
