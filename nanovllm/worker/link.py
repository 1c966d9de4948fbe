"""RankLink: how a `ModelRunner` reaches the other ranks of its engine. This one has no other rank to reach."""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from nanovllm.layers.parallel import TPGroup


class RankLink:
    """The link of rank 0 where there is no other rank, and what the links of several ranks have in common.

    ps: the processes of the ranks above 0. events: one a process, "there is a message for you".
    """

    def __init__(self) -> None:
        self.ps: list[Any] = []
        self.events: list[Any] = []

    def tensor_parallel_group(self, device: torch.device) -> TPGroup:
        """The collectives among all ranks on `device`."""
        return TPGroup()

    def running(self, method: str, args: tuple[Any, ...]) -> AbstractContextManager[None]:
        """Rank 0: every other rank runs `method` with `args` (plain values and arrays) while the block runs it here."""
        return nullcontext()

    def settle(self) -> None:
        """The running method has no collective left to start: a failure from here on concerns this rank alone."""

    def smallest(self, value: int) -> int:
        """The smallest `value` of all ranks, on every rank."""
        return value

    def wait_ready(self) -> None:
        """Rank 0: wait until every other rank can take a step."""

    def is_alive(self) -> bool:
        """Whether all ranks can still take a step."""
        return True

    def close(self) -> None:
        """Give up what this end of the link holds. Safe to call again."""

    def stop(self) -> None:
        """Rank 0: end the other ranks, whatever state they are in. Safe to call again."""
