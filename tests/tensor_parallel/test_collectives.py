"""The collectives of one engine, its ranks played by threads: sums and gathers, leaving, and joining anew."""

import gc
import os
import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from nanovllm.layers.parallel import TPGroup
from nanovllm.worker import tensor_parallel
from nanovllm.worker.tensor_parallel import LOOPBACK, Collectives, PeerLostError, environment


class Ranks:
    """`size` ranks in one generation; `run` lets every rank do something at the same time."""

    def __init__(self, size: int) -> None:
        listener = socket.create_server((LOOPBACK, 0))
        self.port = listener.getsockname()[1]
        self.all = [Collectives(0, size, self.port, listener.detach())]
        self.all += [Collectives(rank, size, self.port) for rank in range(1, size)]
        self.pool = ThreadPoolExecutor(size)
        self.run(lambda each: each.join(0))

    def run(self, act: Callable[[Collectives], Any]) -> list[Any]:
        """What `act` returned or raised on each rank."""
        futures = [self.pool.submit(act, each) for each in self.all]
        return [future.exception(30) or future.result() for future in futures]

    def close(self) -> None:
        self.pool.shutdown()
        for each in self.all:
            each.close()


@pytest.fixture(params=[2, 3])
def ranks(request: pytest.FixtureRequest) -> Any:
    ranks = Ranks(request.param)
    yield ranks
    ranks.close()


def total(each: Collectives) -> torch.Tensor:
    return TPGroup(each.rank, each.size, each).all_reduce(torch.full((3,), 1.0 + each.rank))


def test_sums_gathers_and_minimum(ranks: Ranks) -> None:
    size = len(ranks.all)
    expected = size * (size + 1) / 2
    assert all(torch.equal(got, torch.full((3,), expected)) for got in ranks.run(total))
    assert ranks.run(lambda each: each.smallest(1000 - each.rank)) == [1001 - size] * size
    assert ranks.run(lambda each: each.smallest(5 + each.rank)) == [5] * size

    def gather(each: Collectives) -> torch.Tensor | None:
        return TPGroup(each.rank, size, each).gather(torch.full((2, 2), each.rank, dtype=torch.bfloat16))

    on_zero, *on_others = ranks.run(gather)
    assert on_others == [None] * (size - 1)
    assert torch.equal(on_zero, torch.arange(size).repeat_interleave(2).expand(2, -1).bfloat16())


@pytest.mark.parametrize("leaver", [0, -1])
def test_one_that_leaves_takes_the_others_out_of_their_step(ranks: Ranks, leaver: int) -> None:
    def step(each: Collectives) -> torch.Tensor | None:
        if each is ranks.all[leaver]:
            each.leave()
            return None
        try:
            return total(each)
        except PeerLostError:
            each.leave()  # as `WorkerLink.serve` does
            raise

    outcomes = ranks.run(step)
    assert outcomes.pop(leaver) is None
    assert all(isinstance(outcome, PeerLostError) for outcome in outcomes)
    assert all(isinstance(outcome, PeerLostError) for outcome in ranks.run(total))  # still outside
    ranks.run(lambda each: each.join(0))  # the same generation again: they stay outside
    assert all(isinstance(outcome, PeerLostError) for outcome in ranks.run(total))
    ranks.run(lambda each: each.join(1))
    size = len(ranks.all)
    assert all(torch.equal(got, torch.full((3,), size * (size + 1) / 2)) for got in ranks.run(total))


def test_a_rank_has_left_although_its_error_is_kept() -> None:
    """As a notebook keeps the last one. Rank 1 waits in a ring for rank 2, which has failed for want of rank 0."""
    ranks = Ranks(3)

    def step(each: Collectives) -> PeerLostError:
        with pytest.raises(PeerLostError) as caught:
            total(each)
        each.leave()
        return caught.value

    ranks.all[0].leave()
    kept = ranks.pool.submit(step, ranks.all[2]).result(30)
    waiting = ranks.pool.submit(step, ranks.all[1])
    try:
        assert isinstance(waiting.result(30), PeerLostError)
    finally:
        del kept
        ranks.close()


def test_nobody_leaves_while_others_are_still_connecting(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two that are connected with the leaver, but not with each other yet, would wait for each other."""
    ranks, real, order = Ranks(3), dist.ProcessGroupGloo, []

    class SlowOnRank0(real):  # type: ignore[misc, valid-type]
        def __init__(self, store: Any, rank: int, *args: Any) -> None:
            super().__init__(store, rank, *args)
            if rank == 0:
                time.sleep(0.3)
                order.append("connected")

    def join_and_leave(each: Collectives) -> None:
        each.join(1)
        order.append("joined")
        each.leave()

    with monkeypatch.context() as patch:
        patch.setattr(dist, "ProcessGroupGloo", SlowOnRank0)
        assert ranks.run(join_and_leave) == [None] * 3
    assert order == ["connected", "joined", "joined", "joined"]
    ranks.close()


def test_a_generation_that_rank_0_calls_off(ranks: Ranks) -> None:
    """It was interrupted between telling the others and joining them."""
    zero, *others = ranks.all
    on_their_way = [ranks.pool.submit(each.join, 1) for each in others]
    assert zero.decide(1, "called off") == "called off"
    assert all(isinstance(future.exception(30), PeerLostError) for future in on_their_way)
    assert isinstance(ranks.run(lambda each: each.join(1) if each is zero else None)[0], PeerLostError)
    ranks.run(lambda each: each.join(2))
    assert zero.decide(2, "called off") == "go", "too late, they have met"
    size = len(ranks.all)
    assert all(torch.equal(got, torch.full((3,), size * (size + 1) / 2)) for got in ranks.run(total))


def test_leaving_while_one_joins(ranks: Ranks) -> None:
    """The thread that joins goes on until the others have met it; then the group is given up."""
    zero, *others = ranks.all
    joining = ranks.pool.submit(zero.join, 1)
    while zero.generation < 1:
        time.sleep(0.001)
    zero.leave()

    def join_and_add(each: Collectives) -> torch.Tensor:
        each.join(1)
        try:
            return total(each)
        finally:
            each.leave()

    futures = [ranks.pool.submit(join_and_add, each) for each in others]
    assert all(isinstance(future.exception(30), PeerLostError) for future in futures)
    assert joining.result(30) is None
    assert all(isinstance(outcome, PeerLostError) for outcome in ranks.run(total))
    ranks.run(lambda each: each.join(2))
    assert ranks.run(lambda each: each.smallest(each.rank)) == [0] * len(ranks.all)


def test_a_closed_rank_0_waits_for_nobody() -> None:
    ranks = Ranks(2)
    joining = ranks.pool.submit(ranks.all[0].join, 1)
    ranks.all[0].close()
    with pytest.raises(RuntimeError):
        joining.result(10)
    ranks.close()


def test_one_that_never_comes_is_not_waited_for_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    listener = socket.create_server((LOOPBACK, 0))
    alone = Collectives(0, 2, listener.getsockname()[1], listener.detach())
    monkeypatch.setattr(tensor_parallel, "PATIENCE", timedelta(seconds=0.1))
    with pytest.raises(RuntimeError, match="rank 0 waited for the others to be here, in vain"):
        alone.join(0)
    alone.close()


def test_the_environment_is_lent_and_what_somebody_set_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SET_BY_SOMEBODY", "kept")
    monkeypatch.delenv("SET_BY_NOBODY", raising=False)
    for error in (None, ZeroDivisionError()):
        with suppress(ZeroDivisionError), environment(SET_BY_SOMEBODY="new", SET_BY_NOBODY="new"):
            assert (os.environ["SET_BY_SOMEBODY"], os.environ["SET_BY_NOBODY"]) == ("kept", "new")
            if error is not None:
                raise error
        assert os.environ["SET_BY_SOMEBODY"] == "kept" and "SET_BY_NOBODY" not in os.environ


def test_a_failure_is_told_with_its_reason_where_there_is_one(ranks: Ranks) -> None:
    def reason() -> None:
        raise ValueError("rank 1 is on fire")

    ranks.all[0].on_failure = reason
    ranks.all[-1].leave()
    outcomes = ranks.run(lambda each: total(each) if each.rank != 1 or each.size == 2 else each.leave())
    assert isinstance(outcomes[0], ValueError) and "on fire" in str(outcomes[0])


@pytest.mark.parametrize("slow", ["abort", "the end of the group"])
def test_a_group_that_takes_long_to_end_keeps_nobody(slow: str) -> None:
    """NCCL's group waits at its end for threads of its own; one did for a minute, after a peer had been killed."""
    patience, ended = threading.Event(), threading.Event()

    class Group:
        def abort(self) -> None:
            if slow == "abort":
                patience.wait(60)

        def __del__(self) -> None:
            if slow != "abort":
                patience.wait(60)
            ended.set()

    listener = socket.create_server((LOOPBACK, 0))
    alone = Collectives(0, 2, listener.getsockname()[1], listener.detach())
    alone.device, alone._group = torch.device("cuda"), Group()
    started = time.perf_counter()
    alone.leave()
    assert time.perf_counter() - started < 10 and not ended.is_set()
    patience.set()
    assert ended.wait(10)
    alone.close()


def test_it_listens_on_loopback_only_and_gives_the_port_back() -> None:
    ranks = Ranks(2)
    with pytest.raises(OSError), socket.create_connection((other_address(), ranks.port), timeout=2):
        pass
    with socket.create_connection((LOOPBACK, ranks.port), timeout=2):
        pass
    ranks.close()
    gc.collect()
    with pytest.raises(OSError), socket.create_connection((LOOPBACK, ranks.port), timeout=2):
        pass


def other_address() -> str:
    """An address of this machine that is not the one listened at."""
    return "127.0.0.2"


def test_two_engines_groups_do_not_meet() -> None:
    one, two = Ranks(2), Ranks(2)
    barrier = threading.Barrier(2)

    def first(each: Collectives) -> Any:
        return each.smallest(10 + each.rank)

    with ThreadPoolExecutor(2) as pool:
        futures = [pool.submit(lambda group: (barrier.wait(), [group.run(first) for _ in range(20)]), group)
                   for group in (one, two)]  # fmt: skip
        assert all(results == [[10, 10]] * 20 for _, results in (future.result(30) for future in futures))
    one.close()
    two.close()
