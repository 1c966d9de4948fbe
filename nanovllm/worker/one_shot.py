"""One-shot all-reduce: small sums over the ranks in one kernel, which writes straight into the other GPUs' memory.

A decode step of 36 layers sums 73 times over the ranks, a few hundred kilobytes each time. So little data is on its way
for one microsecond; the rest of NCCL's eight or so goes to agreeing on who sends what and when. Here every rank owns a
*mailbox* that the others have mapped into their address space. To sum, a rank writes its numbers into everybody's
mailbox, raises a flag beside them, waits for everybody's flags in its own, and adds up what it finds there.

Larger sums go through NCCL, which sends each number once and not to every rank. And so do all sums where a GPU cannot
write into another's memory and set a flag there atomically, for which it takes NVLink. The idea is that of the custom
all-reduces of TensorRT-LLM and vLLM; there the receiver fetches the numbers, and sending them saves a trip.
"""

from contextlib import suppress
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from nanovllm.attention.triton_kernels import interpreted

MAX_BYTES = 1 << 20  # the largest tensor that is summed in this way
CHUNK_BYTES = 4096  # what one program sums
MAX_CHUNKS = MAX_BYTES // CHUNK_BYTES
# How often a program looks for a flag (some milliseconds) before it asks whether it should stop. The answer lies in the
# host's memory, where the 512 warps of 64 rows of 4,096 bfloat16 numbers read it one after the other in 0.4 ms. A peer
# that waits so long meanwhile would ask as well, and keep this rank waiting in its turn: after one such wait every sum
# would take 0.4 ms.
LOOKS = 1 << 15
DTYPES = (torch.float32, torch.bfloat16, torch.float16)  # those that a sum in float32 is exact enough for


@triton.jit
def all_reduce_kernel(
    x_ptr, mailboxes_ptr, epochs_ptr, stop_ptr, numel, RANK: tl.constexpr, SIZE: tl.constexpr, CHUNK: tl.constexpr,
    MAX_BYTES: tl.constexpr, LOOKS: tl.constexpr,
):  # fmt: skip
    """One program per CHUNK numbers of x, which it sums with the programs of the same number on the other ranks.

    A mailbox is 2 x SIZE letters of MAX_BYTES, and then a flag for each (program, sender). A program counts its sums,
    and the letters of even and odd *epochs* take turns. So nothing is overwritten that is still to be read: rank 1
    writes its letter of epoch 7 over that of epoch 5 when it is through epoch 6, in which it waited for rank 0's flag;
    and rank 0 raised that flag in a kernel that began when the one of epoch 5 had ended. A flag may be one epoch ahead.
    """
    program = tl.program_id(0)
    at = program * CHUNK + tl.arange(0, CHUNK)
    mask = at < numel
    dtype = x_ptr.dtype.element_ty
    epoch = tl.load(epochs_ptr + program)
    x = tl.load(x_ptr + at, mask=mask, other=0.0)
    letters, flags = epoch % 2 * SIZE * MAX_BYTES, 2 * SIZE * MAX_BYTES + program * SIZE * 8  # in bytes
    for rank in tl.static_range(SIZE):
        if rank != RANK:
            letter = (tl.load(mailboxes_ptr + rank) + letters + RANK * MAX_BYTES).to(tl.pointer_type(dtype))
            tl.store(tl.multiple_of(letter, 16) + at, x, mask=mask)  # 16 bytes at once if numel allows it
    tl.debug_barrier()  # the flag is one thread's, and says that all threads have written
    for rank in tl.static_range(SIZE):
        if rank != RANK:
            flag = (tl.load(mailboxes_ptr + rank) + flags + RANK * 8).to(tl.pointer_type(tl.int64))
            tl.atomic_xchg(flag, epoch + 1, sem="release", scope="sys")
    mailbox = tl.load(mailboxes_ptr + RANK)
    total = tl.zeros([CHUNK], tl.float32)
    for rank in tl.static_range(SIZE):  # in the same order on all ranks, for the same sum
        if rank == RANK:
            total += x.to(tl.float32)
        else:
            flag = (mailbox + flags + rank * 8).to(tl.pointer_type(tl.int64))
            looks, stop = 0, tl.full([], 0, tl.int64)
            # (A `stop` stays: all threads must leave the loop for it.)
            while (tl.load(flag, volatile=True) <= epoch) & (stop == 0):
                looks += 1
                stop = tl.load(stop_ptr, mask=looks % LOOKS == 0, other=0, volatile=True)
            # What is read from here on must not be read before, neither by the GPU nor by the compiler: so the last
            # look *acquires*, and what it finds decides what is read.
            raised = tl.atomic_add(flag, 0, sem="acquire", scope="sys") > epoch
            letter = (mailbox + letters + rank * MAX_BYTES).to(tl.pointer_type(dtype))
            letter = tl.multiple_of(letter, 16) + at
            total += tl.load(letter, mask=mask & raised, other=0.0, cache_modifier=".cg").to(tl.float32)
    tl.store(x_ptr + at, total.to(dtype), mask=mask)
    tl.store(epochs_ptr + program, epoch + 1)


def mailbox_bytes(size: int) -> int:
    """The bytes of one mailbox: the letters, then the flags."""
    return 2 * size * MAX_BYTES + MAX_CHUNKS * size * 8


def sum_in_place(x: Tensor, mailboxes: Tensor, epochs: Tensor, stop: Tensor, rank: int) -> None:
    """x, contiguous and of MAX_BYTES or less, becomes the sum of all ranks' x, which all of them must ask for.

    mailboxes [size] int64: addresses in this process. epochs [MAX_CHUNKS] int64: zeros at first, as all flags are.
    stop [1] int64: what is not zero has the kernel return a wrong sum instead of waiting.
    """
    chunk = CHUNK_BYTES // x.itemsize
    all_reduce_kernel[(triton.cdiv(x.numel(), chunk),)](
        x, mailboxes, epochs, stop, x.numel(),
        RANK=rank, SIZE=len(mailboxes), CHUNK=chunk, MAX_BYTES=MAX_BYTES, LOOKS=LOOKS, num_warps=4,
    )  # fmt: skip


class OneShotAllReduce:
    """The mailbox of this rank and what it knows of the others'. `connect` makes one, on all ranks or on none."""

    def __init__(self, rank: int, size: int, device: torch.device) -> None:
        self.rank, self.size, self.device = rank, size, device
        self.runtime: Any = None  # NVIDIA's Python bindings of CUDA's runtime
        self.own = 0  # address of the own mailbox
        self.opened: list[int] = []  # other ranks' mailboxes

    @classmethod
    def connect(cls, store: Any, rank: int, size: int, device: torch.device) -> "OneShotAllReduce | None":
        """Make a mailbox and open the others', which `store` announces; None on every rank if one of them cannot."""
        one_shot, announced, is_open = cls(rank, size, device), b"", False
        try:
            with suppress(Exception):  # whatever it is that fails here: there is NCCL
                announced = one_shot.make()
            others = exchange(store, "mailbox", rank, size, announced)
            with suppress(Exception):
                is_open = all(others) and one_shot.open(others)
            if all(each == b"open" for each in exchange(store, "opened", rank, size, b"open" if is_open else b"no")):
                return one_shot
            one_shot.unmap()
            exchange(store, "unmapped", rank, size, b"yes")  # CUDA wants to have that done before it is given back
            one_shot.close()
        except BaseException:
            one_shot.close()
            raise
        return None

    def make(self) -> bytes:
        """Make a mailbox; returns what the other ranks need to open it, and where it is: GPU, then CUDA's handle."""
        from cuda.bindings import runtime  # newer CUDA builds of torch bring it along

        if interpreted():
            raise RuntimeError("the interpreter's kernels run on the CPU and cannot reach a GPU's memory")
        self.runtime = runtime
        self._use_device()
        self.own = int(self.cuda("cudaMalloc", mailbox_bytes(self.size)))
        self.cuda("cudaMemset", self.own, 0, mailbox_bytes(self.size))
        self.epochs = torch.zeros(MAX_CHUNKS, dtype=torch.int64, device=self.device)
        self.stop = torch.zeros(1, dtype=torch.int64).pin_memory()
        torch.cuda.synchronize(self.device)  # others may write as soon as they have the handle
        return bytes([self.device.index]) + bytes(self.cuda("cudaIpcGetMemHandle", self.own).reserved)

    def open(self, others: list[bytes]) -> bool:
        """Map the other ranks' mailboxes; False where a GPU cannot set flags in another's memory."""
        runtime, addresses = self.runtime, [self.own] * self.size
        for rank, (index, *handle) in enumerate(others):
            if rank == self.rank:
                continue
            native = runtime.cudaDeviceP2PAttr.cudaDevP2PAttrNativeAtomicSupported
            if not self.cuda("cudaDeviceGetP2PAttribute", native, self.device.index, index):
                return False
            ipc_handle = runtime.cudaIpcMemHandle_t()
            ipc_handle.reserved = bytes(handle)
            address = self.cuda("cudaIpcOpenMemHandle", ipc_handle, runtime.cudaIpcMemLazyEnablePeerAccess)
            addresses[rank] = int(address)
            self.opened.append(addresses[rank])
        self.mailboxes = torch.tensor(addresses, dtype=torch.int64, device=self.device)
        return True

    def takes(self, x: Tensor) -> bool:
        """Whether a sum is small enough. All ranks find the same, for their tensors have the same shape."""
        return x.nbytes <= MAX_BYTES and x.dtype in DTYPES and x.is_contiguous()

    def __call__(self, x: Tensor) -> None:
        """Sum x over the ranks, in place."""
        sum_in_place(x, self.mailboxes, self.epochs, self.stop, self.rank)

    def release(self) -> None:
        """Let all kernels of this rank that wait for others come back, now and later; what they return is wrong.

        It calls nothing of CUDA: a thread that waits in there for one of those kernels may hold its locks.
        """
        self.stop.fill_(1)

    def unmap(self) -> None:
        """Let go of the other ranks' mailboxes, when no kernel uses them any more."""
        while self.opened:
            with suppress(RuntimeError):
                self.cuda("cudaIpcCloseMemHandle", self.opened.pop())

    def close(self) -> None:
        """Give everything back, when no rank uses it any more; as often as one likes."""
        if self.own:
            with suppress(RuntimeError):  # after a fault CUDA refuses everything
                self._use_device()
                self.unmap()
                self.cuda("cudaFree", self.own)  # waits for the device
        self.own = 0

    def cuda(self, name: str, *args: Any) -> Any:
        """What a function of CUDA's runtime returns. Raises `RuntimeError` where it reports an error."""
        error, *values = getattr(self.runtime, name)(*args)
        if int(error):
            raise RuntimeError(f"{name}: {error.name}")
        return values[0] if values else None

    def _use_device(self) -> None:
        self.cuda("cudaSetDevice", self.device.index)


def exchange(store: Any, word: str, rank: int, size: int, value: bytes) -> list[bytes]:
    """Every rank's value, through a store."""
    store.set(f"{word} {rank}", value)
    return [store.get(f"{word} {each}") for each in range(size)]
