"""Ranks without processes: threads that meet in the collectives, so that a layer can be graded in milliseconds."""

import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from nanovllm.layers.parallel import TPGroup
from nanovllm.workbook.grading import Answer

PATIENCE = 1.5  # seconds that a rank waits for the others in a collective


class Meeting:
    """Where the ranks of a group meet; also counts the collectives."""

    def __init__(self, size: int) -> None:
        self.barrier = threading.Barrier(size, timeout=PATIENCE)
        self.places: list[Any] = [None] * size
        self.calls = [0] * size


class Member:
    """One rank's end of a meeting, with the two methods of a torch.distributed process group that layers use."""

    def __init__(self, meeting: Meeting, rank: int) -> None:
        self.meeting, self.rank = meeting, rank

    def exchange(self, x: Tensor) -> list[Tensor]:
        self.meeting.calls[self.rank] += 1
        self.meeting.places[self.rank] = x.clone()
        self.meeting.barrier.wait()
        everything = list(self.meeting.places)
        self.meeting.barrier.wait()
        return everything

    def allreduce(self, tensors: list[Tensor]) -> "Member":
        shapes = self.exchange(tensors[0])
        tensors[0].copy_(torch.stack(shapes).sum(0))
        return self

    def gather(self, outputs: list[list[Tensor]], inputs: list[Tensor], options: Any) -> "Member":
        everything = self.exchange(inputs[0])
        for target, value in zip(outputs[0] if outputs else [], everything, strict=False):
            target.copy_(value)
        return self

    def wait(self) -> None:
        """Nothing is asynchronous here."""


def on_ranks(answer: Answer, size: int, work: Callable[[TPGroup], Any]) -> tuple[list[Any], list[int]]:
    """Run `work` on every rank at once: the results, and how often each rank called a collective.

    Rejects an answer whose ranks do not all call the same collectives.
    """
    meeting = Meeting(size)
    results: list[Any] = [None] * size
    errors: list[BaseException | None] = [None] * size

    def run(rank: int) -> None:
        try:
            results[rank] = work(TPGroup(rank, size, Member(meeting, rank)))
        except BaseException as error:
            errors[rank] = error
            meeting.barrier.abort()

    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(4 * PATIENCE)
    real = [error for error in errors if error is not None and not isinstance(error, threading.BrokenBarrierError)]
    if real:
        raise real[0]
    broken = any(isinstance(error, threading.BrokenBarrierError) for error in errors)
    if broken or len(set(meeting.calls)) != 1:
        answer.reject(
            f"collectives called by each rank: {meeting.calls}", "the same number on every rank",
            "A collective works only if all ranks call it; one that does not leaves the others waiting for ever.",
        )  # fmt: skip
    return results, meeting.calls


def random(answer: Answer, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(answer.rng.randrange(2**31)))
