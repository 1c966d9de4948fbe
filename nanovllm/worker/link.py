"""How a rank reaches the other ranks of its engine; and `SoloLink`, the link of an engine that has only one."""

from typing import Any, Protocol

import torch

from nanovllm.layers.parallel import TPGroup


class RankLink(Protocol):
    """What a `ModelRunner` needs of the ranks around it. Rank 0's link belongs to the engine, which stops it."""

    ps: list[Any]  # processes of the ranks above 0; empty on these
    events: list[Any]  # one event a process: "there is a message for you"

    def tensor_parallel_group(self, device: torch.device) -> TPGroup:
        """The collectives among all ranks on `device`."""

    def send(self, method: str, args: tuple[Any, ...]) -> None:
        """Rank 0: let every other rank run `method` with `args` (plain values and arrays). Others: nothing."""

    def smallest(self, value: int) -> int:
        """The smallest `value` of all ranks, on every rank."""

    def is_alive(self) -> bool:
        """Whether all ranks can still take a step."""

    def close(self) -> None:
        """Give up what this end of the link holds. Safe to call again."""

    def stop(self) -> None:
        """Rank 0: end the other ranks, whatever state they are in. Safe to call again."""


class SoloLink:
    """The link of a single rank: nobody to send to."""

    def __init__(self) -> None:
        self.ps: list[Any] = []
        self.events: list[Any] = []

    def tensor_parallel_group(self, device: torch.device) -> TPGroup:
        return TPGroup()

    def send(self, method: str, args: tuple[Any, ...]) -> None:
        pass

    def smallest(self, value: int) -> int:
        return value

    def is_alive(self) -> bool:
        return True

    def close(self) -> None:
        pass

    def stop(self) -> None:
        pass
