"""How much main memory this process may count on. Asks the system; knows nothing of what the memory is for."""

import os
from contextlib import suppress
from pathlib import Path

from nanovllm.errors import MemoryBudgetError

GIB = 1 << 30


def main_memory() -> int | None:
    """Bytes of the machine's memory, or of the container's share of it; None where the system does not tell."""
    sizes = []
    with suppress(ValueError, OSError, AttributeError):
        sizes.append(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    with suppress(ValueError, OSError):  # "max" where there is no limit
        sizes.append(int(Path("/sys/fs/cgroup/memory.max").read_text()))
    return min(sizes, default=None)


def require_memory(size: int, what: str, remedy: str) -> None:
    """Raise `MemoryBudgetError` if `size` bytes can never fit: systems hand out memory that they do not have, and kill
    whoever uses it."""
    total = main_memory()
    if total is not None and size > total:
        raise MemoryBudgetError(
            f"{what} needs {size / GIB:,.1f} GiB, this machine gives {total / GIB:,.1f} GiB in all; {remedy}"
        )
