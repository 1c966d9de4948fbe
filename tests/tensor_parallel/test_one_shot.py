"""The one-shot all-reduce in Triton's interpreter: ranks are processes, and their mailboxes shared memory."""

from typing import Any

import pytest
import torch
import torch.multiprocessing as multiprocessing

from nanovllm.attention.triton_kernels import interpreted
from nanovllm.worker import one_shot
from nanovllm.worker.one_shot import CHUNK_BYTES, MAX_CHUNKS, mailbox_bytes, sum_in_place

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


def run_rank(rank: int, boxes: list[torch.Tensor], results: Any) -> None:
    mailboxes = torch.tensor([box.data_ptr() for box in boxes])  # mapped elsewhere in each process
    epochs, stop = torch.zeros(MAX_CHUNKS, dtype=torch.int64), torch.zeros(1, dtype=torch.int64)
    sums = []
    for step in range(len(STEPS)):
        x = numbers(rank, step)
        sum_in_place(x, mailboxes, epochs, stop, rank)
        sums.append(x)
    results.put((rank, [x.tolist() for x in sums]))


def test_every_rank_gets_the_sum_of_all() -> None:
    ctx = multiprocessing.get_context("spawn")
    boxes = [torch.zeros(mailbox_bytes(SIZE), dtype=torch.uint8).share_memory_() for _ in range(SIZE)]
    results = ctx.Queue()
    ranks = [ctx.Process(target=run_rank, args=(rank, boxes, results)) for rank in range(SIZE)]
    for process in ranks:
        process.start()
    got = dict(results.get(timeout=120) for _ in ranks)
    for process in ranks:
        process.join()
    assert got[0] == got[1] == got[2]
    for step, (dtype, _) in enumerate(STEPS):
        expected = sum(numbers(rank, step).float() for rank in range(SIZE))
        rounding = 2.0**-7 if dtype == torch.bfloat16 else 0.0  # the interpreter cuts what a GPU rounds
        torch.testing.assert_close(torch.tensor(got[0][step]), expected, rtol=rounding, atol=0.0, msg=f"step {step}")


def test_a_rank_that_is_told_to_stop_waits_for_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(one_shot, "LOOKS", 8)
    boxes = [torch.zeros(mailbox_bytes(2), dtype=torch.uint8) for _ in range(2)]
    mailboxes, epochs = torch.tensor([box.data_ptr() for box in boxes]), torch.zeros(MAX_CHUNKS, dtype=torch.int64)
    for _ in range(3):
        sum_in_place(torch.ones(CHUNK_BYTES // 2), mailboxes, epochs, torch.ones(1, dtype=torch.int64), 0)
    assert epochs[:3].tolist() == [3, 3, 0]


class Store:
    """What `connect` needs of a store, for two ranks; the other one has said already what it says."""

    def __init__(self, **said: bytes) -> None:
        self.said = {f"{word} 1": value for word, value in said.items()}

    def set(self, key: str, value: bytes) -> None:
        self.said[key] = value

    def get(self, key: str) -> bytes:
        return self.said[key]


@pytest.mark.parametrize("other", ["mailbox", "opened"])
def test_all_ranks_or_none(other: str) -> None:
    closed = []

    class Fake(one_shot.OneShotAllReduce):
        handle = b"mine"

        def __init__(self, *args: Any) -> None:
            pass

        def reaches_all(self) -> bool:
            return True

        def open(self, handles: list[bytes]) -> bool:
            assert handles == [b"mine", b"theirs"]
            return True

        def close(self) -> None:
            closed.append(self)

    device = torch.device("cpu")
    assert Fake.connect(Store(mailbox=b"theirs", opened=b"open"), 0, 2, device) is not None
    store = Store(**{"mailbox": b"theirs", "opened": b"no", other: b"" if other == "mailbox" else b"no"})
    assert Fake.connect(store, 0, 2, device) is None
    assert len(closed) == 1
    assert store.said["opened 0"] == (b"no" if other == "mailbox" else b"open")


def test_without_the_bindings_there_is_none() -> None:
    """As on this machine, if it has no GPU: the other rank is told so, and does not wait."""
    store = Store(mailbox=b"theirs", opened=b"no")
    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    assert one_shot.OneShotAllReduce.connect(store, 0, 2, torch.device("cuda", 0)) is None
    assert store.said["mailbox 0"] == b"" and store.said["opened 0"] == b"no"
