"""Grader of exercise 5.1: who gets a seat, under a budget of tokens, a number of seats and a pool of blocks."""

from typing import Any

from nanovllm.engine.sequence import SequenceStatus
from nanovllm.workbook.grading import Answer
from nanovllm.workbook.oracles.scheduler import (
    Options,
    enqueue,
    make_scheduler,
    named,
    planned_rows,
    random_trial,
    run_step,
    whole,
)  # fmt: skip


def start(answer: Answer, replaced: Any = None, **options: Any) -> Any:
    answer.story.clear()
    return make_scheduler(answer, Options(**{"max_num_batched_tokens": 100, **options}), replaced)


def admit(answer: Answer, scheduler: Any, budget: int) -> list[tuple[str, int]]:
    """admit_waiting(budget), and the rows that it planned."""
    rows = planned_rows(answer, scheduler, scheduler.admit_waiting(budget))
    whole(answer, scheduler)
    return rows


def queues(scheduler: Any) -> tuple[list[str], list[str]]:
    """Names of the running, names of the waiting."""
    return named(scheduler.raw.running), named(list(scheduler.raw.waiting))


def test_contract__a_list_of_those_who_got_in(answer: Answer) -> None:
    """It returns a list; who got in has left the queue, is running, holds blocks, and has tokens to compute."""
    scheduler = start(answer)
    (a,) = enqueue(answer, scheduler, A=6)
    rule = "All 6 tokens of A are planned: the budget of 10 has room for them."
    answer.equal(admit(answer, scheduler, 10), [("A", 6)], rule)
    answer.equal(queues(scheduler), (["A"], []), "Who got in stands in `running`, and no longer in `waiting`.")
    answer.equal((a.status, len(a.block_table), a.num_computed_tokens), (SequenceStatus.RUNNING, 2, 0))
    answer.equal(admit(answer, scheduler, 10), [], "With nobody waiting nobody gets in.")


def test_contract__a_list_of_its_own(answer: Answer) -> None:
    """Each call makes a list of its own: one that was handed out before stays as it is."""
    scheduler = start(answer)
    enqueue(answer, scheduler, A=3, B=2)
    first = scheduler.admit_waiting(3)
    answer.equal(named(first), ["A"], "A's 3 tokens use up the budget of 3.")
    scheduler.admit_waiting(3)
    answer.equal(named(first), ["A"])


def test_example__six_four_and_one_waits(answer: Answer) -> None:
    """The last one in is cut to what is left of the budget; the next one waits."""
    scheduler = start(answer)
    enqueue(answer, scheduler, A=6, B=7, C=5)
    answer.equal(admit(answer, scheduler, 10), [("A", 6), ("B", 4)])
    answer.equal(queues(scheduler), (["A", "B"], ["C"]))


def test_boundary__cached_tokens_cost_nothing(answer: Answer) -> None:
    """Tokens that were found in the cache are not computed, so they do not count against the budget."""
    scheduler = start(answer, max_num_batched_tokens=20)
    enqueue(answer, scheduler, A=list(range(1, 10)))
    run_step(answer, scheduler)
    enqueue(answer, scheduler, B=[*range(1, 9), 50, 51, 52], C=7, D=9)
    answer.equal(admit(answer, scheduler, 12), [("B", 3), ("C", 7), ("D", 2)], "8 of B's 11 tokens are cached.")


def test_boundary__shared_in_the_same_step(answer: Answer) -> None:
    """What an earlier newcomer of the same step computes can be found by the next one."""
    scheduler = start(answer)
    enqueue(answer, scheduler, A=list(range(1, 10)), B=[*range(1, 9), 60, 61], C=5)
    answer.equal(admit(answer, scheduler, 14), [("A", 9), ("B", 2), ("C", 3)])


def test_boundary__half_prefilled_ones_have_a_seat(answer: Answer) -> None:
    """Everybody in `running` has a seat: those that decode, and those whose prompt is under way."""
    scheduler = start(answer, max_num_seqs=3, max_num_batched_tokens=10)
    enqueue(answer, scheduler, A=4, B=20)
    run_step(answer, scheduler)
    enqueue(answer, scheduler, C=2, D=2)
    rule = "A decodes, B is at 6 of 20 tokens, so one of 3 seats is free."
    answer.equal(admit(answer, scheduler, 9), [("C", 2)], rule)
    answer.equal(queues(scheduler), (["A", "B", "C"], ["D"]))
    answer.equal(admit(answer, scheduler, 7), [])


def test_boundary__seats_of_this_very_call(answer: Answer) -> None:
    """A seat given away a moment ago is taken."""
    scheduler = start(answer, max_num_seqs=2)
    enqueue(answer, scheduler, A=1, B=1, C=1)
    answer.equal(admit(answer, scheduler, 50), [("A", 1), ("B", 1)])
    scheduler = start(answer, max_num_seqs=1)
    enqueue(answer, scheduler, A=3, B=3)
    answer.equal(admit(answer, scheduler, 50), [("A", 3)])


def test_boundary__nothing_left_of_the_budget(answer: Answer) -> None:
    """Nobody gets a seat without a token to compute."""
    scheduler = start(answer)
    enqueue(answer, scheduler, A=6, B=4, C=5)
    answer.equal(admit(answer, scheduler, 0), [])
    answer.equal(queues(scheduler), ([], ["A", "B", "C"]))
    answer.equal(admit(answer, scheduler, 10), [("A", 6), ("B", 4)], "6 + 4 tokens use the budget of 10 up.")
    answer.equal(queues(scheduler), (["A", "B"], ["C"]))


def test_boundary__larger_than_the_budget(answer: Answer) -> None:
    """A prompt that is larger than the whole budget gets in with its first tokens, or it would never get in."""
    scheduler = start(answer)
    (a,) = enqueue(answer, scheduler, A=30)
    answer.equal(admit(answer, scheduler, 8), [("A", 8)])
    answer.equal(len(a.block_table), 8, "The blocks of all its tokens are taken at once.")


def test_boundary__no_room_for_the_next(answer: Answer) -> None:
    """Who finds no room keeps its place, and nobody pushes past it."""
    scheduler = start(answer, num_kvcache_blocks=5)
    enqueue(answer, scheduler, A=6, B=16, C=2)
    answer.equal(admit(answer, scheduler, 50), [("A", 6)], "A has 2 of 5 blocks; B needs 4.")
    answer.equal(queues(scheduler), (["A"], ["B", "C"]))
    answer.equal(scheduler.waiting[0].status, SequenceStatus.WAITING)
    answer.equal(len(scheduler.block_manager.free_block_ids), 3, "Asking takes nothing.")


def test_boundary__no_room_for_the_one_in_the_middle(answer: Answer) -> None:
    """Who finds no room keeps its place, also where it does not stand in front."""
    replaced = {"Scheduler.next_waiting": lambda self: max(self.waiting, key=lambda seq: seq.num_tokens)}
    scheduler = start(answer, replaced, num_kvcache_blocks=3)
    answer.note("(with a next_waiting that names the longest)")
    enqueue(answer, scheduler, A=2, B=16, C=3)
    answer.equal(admit(answer, scheduler, 50), [], "B needs 4 of 3 blocks.")
    answer.equal(queues(scheduler), ([], ["A", "B", "C"]))


def test_boundary__the_budget_and_no_other_limit(answer: Answer) -> None:
    """The budget that is given is what newcomers may use; `prefill_chunk` is the business of the one who gives it."""
    scheduler = start(answer, prefill_chunk=4)
    enqueue(answer, scheduler, A=6, B=7, C=5)
    answer.equal(admit(answer, scheduler, 10), [("A", 6), ("B", 4)])


def test_boundary__who_lost_a_seat(answer: Answer) -> None:
    """Who lost a seat gets one like anybody else; what the cache gave it the first time stays written down."""
    scheduler = start(answer)
    (a,) = enqueue(answer, scheduler, A=9)
    run_step(answer, scheduler)
    scheduler.raw.preempt(a)
    answer.note("A has 10 tokens and loses its seat; its 2 full blocks can still be found")
    answer.equal(admit(answer, scheduler, 50), [("A", 2)])
    answer.equal((a.status, a.num_cached_tokens), (SequenceStatus.RUNNING, 0))


def test_boundary__exactly_enough_room(answer: Answer) -> None:
    """As many blocks as needed are enough."""
    scheduler = start(answer, num_kvcache_blocks=5)
    enqueue(answer, scheduler, A=8, B=12, C=1)
    answer.equal(admit(answer, scheduler, 50), [("A", 8), ("B", 12)])


def test_boundary__whose_turn_it_is(answer: Answer) -> None:
    """next_waiting decides, again and again, and whoever it names leaves the queue from where it stands."""
    replaced = {"Scheduler.next_waiting": lambda self: min(self.waiting, key=lambda seq: seq.num_tokens)}
    scheduler = start(answer, replaced)
    answer.note("(with a next_waiting that names the shortest)")
    enqueue(answer, scheduler, A=9, B=3, C=6, D=4)
    answer.equal(admit(answer, scheduler, 12), [("B", 3), ("D", 4), ("C", 5)])
    answer.equal(queues(scheduler), (["B", "D", "C"], ["A"]))


def test_oracle__random_requests(answer: Answer) -> None:
    """The same rows, queues and blocks as a scheduler that keeps plain lists."""
    for _ in range(50):
        random_trial(answer)


def test_oracle__any_budget(answer: Answer) -> None:
    """The budget is used up to its last token, in the order of arrival, and not beyond."""
    rng = answer.rng
    for _ in range(60):
        scheduler = start(answer, max_num_seqs=rng.randint(1, 6))
        sizes = {name: rng.randint(1, 12) for name in "ABCDEF"[: rng.randint(1, 6)]}
        enqueue(answer, scheduler, **sizes)
        left, seats, expected = rng.randint(0, 40), scheduler.max_num_seqs, []
        budget = left
        for name, size in sizes.items():
            if left > 0 and len(expected) < seats:
                expected.append((name, min(left, size)))
                left -= min(left, size)
        answer.equal(admit(answer, scheduler, budget), expected)


def test_invariant__two_calls_in_a_row(answer: Answer) -> None:
    """Nobody gets in twice and nobody is lost, however the requests are spread over calls."""
    for size in (1, 2, 3, 5):
        scheduler = start(answer, max_num_seqs=7)
        enqueue(answer, scheduler, A=2, B=3, C=1, D=2, E=4)
        seen = []
        for _ in range(12):
            seen += [name for name, _ in admit(answer, scheduler, size)]
        answer.equal(seen, ["A", "B", "C", "D", "E"])
        answer.equal(queues(scheduler), (["A", "B", "C", "D", "E"], []))
