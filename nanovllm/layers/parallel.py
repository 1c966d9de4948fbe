"""TPGroup: which share of every layer this process holds, and the two collectives that join the shares.

It knows nothing of processes and how they are started; whoever starts them hands over a process group.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from nanovllm.errors import ConfigError

MAX_TP_SIZE = 8  # as Config allows


@dataclass(frozen=True)
class TPGroup:
    """Rank and size of tensor parallelism. Size 1 touches no torch.distributed.

    group: has `allreduce` and `gather` as a torch.distributed process group of the ranks 0 to size - 1; needed only for
        the collectives.
    """

    rank: int = 0
    size: int = 1
    group: Any = None

    def all_reduce(self, x: Tensor) -> Tensor:
        """The sum of every rank's `x`, on every rank; in place."""
        if self.size > 1:
            self._group().allreduce([x]).wait()
        return x

    def gather(self, x: Tensor) -> Tensor | None:
        """Every rank's `x` (equal shapes), side by side in the last dimension, on rank 0; None on the others."""
        if self.size == 1:
            return x
        x = x.contiguous()
        shards = [torch.empty_like(x) for _ in range(self.size)] if self.rank == 0 else []
        options = dist.distributed_c10d.GatherOptions()
        options.rootRank = 0
        self._group().gather([shards] if self.rank == 0 else [], [x], options).wait()
        return torch.cat(shards, -1) if self.rank == 0 else None

    def share(self, total: int, what: str) -> int:
        """This rank's equal part of `total`. Raises `ConfigError` naming the sizes that would divide it."""
        if total % self.size:
            sizes = ", ".join(map(str, dividing_sizes(total)))
            raise ConfigError(f"tensor_parallel_size={self.size} does not divide {total} {what}; these do: {sizes}")
        return total // self.size

    def _group(self) -> Any:
        assert self.group is not None, "a collective over several ranks needs their process group"
        return self.group


ALONE = TPGroup()  # a single process holds everything


def dividing_sizes(*totals: int) -> list[int]:
    """The tensor-parallel sizes that divide all of `totals`: 9 heads and 3 kv heads give [1, 3]."""
    return [size for size in range(1, MAX_TP_SIZE + 1) if all(total % size == 0 for total in totals)]
