"""Large tensors in pages of 2 MiB instead of 4 KiB, on Linux. Knows nothing of models.

A decode step reads every weight once. With small pages a core spends much of that time looking up where each 4 KiB
lie, above all in a virtual machine, where a look-up is two walks. PERF: the products of one step of SmolLM2-135M, two
threads of a virtual server, 17.9 ms instead of 30.5.
"""

import ctypes
import sys
from collections.abc import Iterable
from functools import cache
from typing import Any

import torch
from torch import Tensor

HUGE_PAGE = 2 << 20
LEAST_BYTES = 256 << 10  # of a tensor that is worth it: the weights of a tiny model are not
ADVISE, COLLAPSE = 14, 25  # MADV_HUGEPAGE: pages touched from now on; MADV_COLLAPSE: those that are there (Linux 6.1)


def collapse_into_huge_pages(tensors: Iterable[Tensor]) -> int:
    """Move tensors that are in use into huge pages; their addresses and values stay. Returns the bytes moved.

    What lies around them in memory moves with them, so that many middle-sized tensors fill whole pages together: in
    2 MiB pages 0, 1, 2, a tensor from 1 MiB to 5 MiB takes part in all three. Where the system does not want it,
    nothing happens.
    """
    pages: set[int] = set()
    for start, size in map(extent, tensors):
        if size >= LEAST_BYTES:
            pages.update(range(start // HUGE_PAGE, -(-(start + size) // HUGE_PAGE)))
    return HUGE_PAGE * sum(advise(page * HUGE_PAGE, HUGE_PAGE, COLLAPSE) for page in pages)


def prefer_huge_pages(tensor: Tensor) -> Tensor:
    """Let memory that nobody has touched yet come in huge pages when it is: a KV pool takes no more than it uses."""
    start, size = extent(tensor)
    first, end = -(-start // HUGE_PAGE) * HUGE_PAGE, (start + size) // HUGE_PAGE * HUGE_PAGE
    if end > first:
        advise(first, end - first, ADVISE)
    return tensor


def extent(tensor: Tensor) -> tuple[int, int]:
    """Address and bytes, also of a tensor in oneDNN's own layout."""
    if tensor.is_mkldnn:
        operators: Any = torch.ops.mkldnn
        return operators.data_ptr(tensor), operators._nbytes(tensor)
    return tensor.data_ptr(), tensor.nbytes


def advise(start: int, size: int, advice: int) -> bool:
    """madvise(2); False where there is none, or where it says no."""
    madvise = find_madvise()
    return madvise is not None and madvise(start, size, advice) == 0


@cache
def find_madvise() -> Any:
    """The C library's function, or None where these two advices mean nothing."""
    if not sys.platform.startswith("linux"):
        return None
    madvise = ctypes.CDLL(None).madvise
    madvise.argtypes, madvise.restype = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int], ctypes.c_int
    return madvise
