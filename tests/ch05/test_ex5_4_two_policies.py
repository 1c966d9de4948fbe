"""Grader of exercise 5.4: prompts first, or everybody in every step."""

from typing import Any

from nanovllm.workbook.grading import Answer
from nanovllm.workbook.oracles.scheduler import (
    Named,
    Options,
    Trial,
    enqueue,
    make_scheduler,
    named,
    planned_rows,
    random_trial,
    rows_of,
    run_step,
    seated,
    whole,
)  # fmt: skip


def start(answer: Answer, replaced: Any = None, **options: Any) -> Any:
    answer.story.clear()
    return make_scheduler(answer, Options(**{"max_num_batched_tokens": 10, **options}), replaced)


def decoding(answer: Answer, scheduler: Any, **prompts: int) -> None:
    """Sequences that have their first token."""
    enqueue(answer, scheduler, **prompts)
    while any(seq.is_prefilling for seq in (*scheduler.raw.running, *scheduler.raw.waiting)):
        run_step(answer, scheduler)


def plan(answer: Answer, scheduler: Any, method: str, *args: Any, **options: Any) -> list[tuple[str, int]]:
    rows = planned_rows(answer, scheduler, getattr(scheduler, method)(*args, **options))
    whole(answer, scheduler)
    return rows


def test_contract__lists_of_rows(answer: Answer) -> None:
    """Each of the three returns a list of sequences, empty where there is nothing to do."""
    for method, args in (("schedule_prefills", (10,)), ("schedule_prefill_first", ()), ("schedule_mixed", ())):
        scheduler = start(answer)
        answer.equal(plan(answer, scheduler, method, *args), [], "Nobody is there.")
        enqueue(answer, scheduler, A=3)
        answer.equal(plan(answer, scheduler, method, *args), [("A", 3)], "A waits, and there is room for its prompt.")


def test_contract__a_list_of_its_own(answer: Answer) -> None:
    """Each call makes a list of its own: one that was handed out before stays as it is."""
    for method, args in (("schedule_prefills", (10,)), ("schedule_prefill_first", ()), ("schedule_mixed", ())):
        scheduler = start(answer)
        enqueue(answer, scheduler, A=4)
        first = getattr(scheduler, method)(*args)
        answer.equal(named(first), ["A"], "A waits, and there is room for its prompt.")
        enqueue(answer, scheduler, B=3)
        getattr(scheduler, method)(*args)
        answer.equal(named(first), ["A"])


def test_example__first_those_under_way(answer: Answer) -> None:
    """A prompt under way goes on before a newcomer, and both together keep to the chunk of 8."""
    scheduler = start(answer, prefill_chunk=8)
    (a,) = enqueue(answer, scheduler, A=10)
    run_step(answer, scheduler)
    a.num_computed_tokens = 5
    enqueue(answer, scheduler, B=9)
    answer.equal(plan(answer, scheduler, "schedule_prefills", 10), [("A", 5), ("B", 3)])


def test_example__everybody_decodes_and_a_prompt_fills_the_rest(answer: Answer) -> None:
    """In a mixed step each decoding row costs one token of the budget, and the prompt gets the others."""
    scheduler = start(answer, scheduling_policy="mixed")
    decoding(answer, scheduler, A=3, B=4)
    enqueue(answer, scheduler, C=20)
    answer.equal(plan(answer, scheduler, "schedule_mixed"), [("A", 1), ("B", 1), ("C", 8)])


def test_boundary__what_is_left_for_newcomers(answer: Answer) -> None:
    """Newcomers get the budget without what those under way have used, and perhaps nothing."""
    for budget, chunk, used, left in ((10, 30, 4, 6), (10, 7, 4, 3), (9, 9, 9, 0), (12, 20, 0, 12)):
        given: list[int] = []
        going_on = [Named("A", [1] * 9), Named("B", [2] * 9)] if used else []
        for seq, count in zip(going_on, (used - 1, 1), strict=False):
            seq.num_scheduled_tokens = count

        def under_way(self: Any, budget: int, rows: list[Named] = going_on, given: list[int] = given) -> list[Named]:
            given.append(budget)
            return list(rows)

        def newcomers(self: Any, budget: int, given: list[int] = given) -> list[Named]:
            given.append(budget)
            return []

        replaced = {"Scheduler.continue_prefills": under_way, "Scheduler.admit_waiting": newcomers}
        scheduler = start(answer, replaced, max_num_batched_tokens=50, prefill_chunk=chunk)
        answer.note(f"(continue_prefills uses {used} tokens, in {len(going_on)} rows)")
        scheduler.schedule_prefills(budget)
        answer.equal(given[0], min(budget, chunk), "Those under way may use the budget, and prefill_chunk at most.")
        answer.equal(sum(given[1:]), left, "Newcomers may use what is left.")


def test_boundary__no_newcomers(answer: Answer) -> None:
    """With admit=False prompts under way go on, and nobody gets a seat."""
    scheduler = start(answer)
    enqueue(answer, scheduler, A=18)
    run_step(answer, scheduler)
    enqueue(answer, scheduler, B=2)
    answer.equal(plan(answer, scheduler, "schedule_prefills", 10, admit=False), [("A", 8)])
    answer.equal(named(list(scheduler.waiting)), ["B"])
    answer.equal(plan(answer, scheduler, "schedule_prefills", 10, False), [("A", 8)])
    answer.equal(plan(answer, scheduler, "schedule_prefills", 10), [("A", 8), ("B", 2)])


def test_boundary__prompts_first_and_nothing_else(answer: Answer) -> None:
    """A prefill-first step is all prefill or all decode: no row decodes beside a prompt."""
    scheduler = start(answer)
    decoding(answer, scheduler, A=3, B=4)
    answer.equal(plan(answer, scheduler, "schedule_prefill_first"), [("A", 1), ("B", 1)])
    enqueue(answer, scheduler, C=2)
    answer.equal(plan(answer, scheduler, "schedule_prefill_first"), [("C", 2)])


def test_boundary__no_seat_so_the_others_decode(answer: Answer) -> None:
    """That somebody waits is no reason not to decode: what counts is whether a prompt can be computed."""
    scheduler = start(answer, max_num_seqs=2)
    decoding(answer, scheduler, A=3, B=4)
    enqueue(answer, scheduler, C=2)
    answer.equal(plan(answer, scheduler, "schedule_prefill_first"), [("A", 1), ("B", 1)])
    scheduler = start(answer, num_kvcache_blocks=3)
    decoding(answer, scheduler, A=3, B=6)
    enqueue(answer, scheduler, C=9)
    answer.equal(plan(answer, scheduler, "schedule_prefill_first"), [("A", 1), ("B", 1)], "C finds no room.")


def test_boundary__a_budget_for_decodes_alone(answer: Answer) -> None:
    """Where decoding rows use the whole budget, no prompt is computed in this step, and nobody gets a seat for it."""
    scheduler = start(answer, max_num_batched_tokens=3, scheduling_policy="mixed")
    decoding(answer, scheduler, A=1, B=1)
    (c,) = enqueue(answer, scheduler, C=9)
    answer.equal(plan(answer, scheduler, "schedule_mixed"), [("A", 1), ("B", 1), ("C", 1)])
    scheduler = start(answer, max_num_batched_tokens=2, scheduling_policy="mixed")
    decoding(answer, scheduler, A=1, B=1)
    enqueue(answer, scheduler, C=9)
    answer.equal(plan(answer, scheduler, "schedule_mixed"), [("A", 1), ("B", 1)])
    answer.equal(named(scheduler.running), ["A", "B"])


def test_boundary__chunk_in_a_mixed_step(answer: Answer) -> None:
    """prefill_chunk limits the prompt tokens of a mixed step, too; decoding rows are not prompt tokens."""
    scheduler = start(answer, scheduling_policy="mixed", prefill_chunk=4)
    decoding(answer, scheduler, A=3, B=3)
    enqueue(answer, scheduler, C=9)
    answer.equal(plan(answer, scheduler, "schedule_mixed"), [("A", 1), ("B", 1), ("C", 4)])


def test_boundary__newcomers_wait_after_a_preemption(answer: Answer) -> None:
    """Where somebody has just lost a seat, nobody gets one in the same step: not even who has lost it."""
    replaced = {"Scheduler.next_waiting": lambda self: min(self.waiting, key=lambda seq: seq.num_tokens)}
    for with_policy in (None, replaced):
        options = {"num_kvcache_blocks": 3, "max_num_batched_tokens": 20}
        scheduler = start(answer, with_policy, scheduling_policy="mixed", **options)
        answer.note("(with a next_waiting that names the shortest, who would find room)" if with_policy else "")
        decoding(answer, scheduler, A=4, B=8)
        enqueue(answer, scheduler, C=2)
        answer.equal(plan(answer, scheduler, "schedule_mixed"), [("A", 1)])
        answer.equal((named(scheduler.running), named(list(scheduler.waiting))), (["A"], ["B", "C"]))


def test_boundary__an_earlier_preemption_does_not_count(answer: Answer) -> None:
    """Only a preemption of this very step keeps newcomers out; num_preemptions counts all that ever were."""
    scheduler = start(answer, scheduling_policy="mixed", max_num_batched_tokens=20)
    decoding(answer, scheduler, A=3, B=3)
    scheduler.raw.preempt(scheduler.raw.running[-1])
    answer.note("preempt B, between two steps")
    answer.equal(plan(answer, scheduler, "schedule_mixed"), [("A", 1), ("B", 4)])


def test_boundary__prompts_under_way_go_on_after_a_preemption(answer: Answer) -> None:
    """A preemption keeps newcomers out, not those who have their seat."""
    scheduler = start(answer, scheduling_policy="mixed", num_kvcache_blocks=4, max_num_batched_tokens=20)
    seated(answer, scheduler, "A", 4, 4)
    seated(answer, scheduler, "B", 8, 4)
    seated(answer, scheduler, "C", 3, 3)
    enqueue(answer, scheduler, D=1)
    answer.equal(plan(answer, scheduler, "schedule_mixed"), [("A", 1), ("B", 4)], "A needs a block; C loses its seat.")


def test_oracle__random_requests(answer: Answer) -> None:
    """Under both policies, the same rows and queues as a scheduler that keeps plain lists."""
    for policy in ("prefill_first", "mixed"):
        for _ in range(35):
            random_trial(answer, policy)


def test_oracle__a_long_prompt_among_others(answer: Answer) -> None:
    """From the first step to the last, under both policies and any chunk, with arrivals on the way."""
    for policy in ("prefill_first", "mixed"):
        for chunk in (None, 1, 5, 9, 30):
            options = Options(max_num_batched_tokens=11, prefill_chunk=chunk, scheduling_policy=policy)
            trial = Trial(answer, options)
            for name, size in (("A", 3), ("B", 26), ("C", 5), ("D", 14)):
                trial.add(name, [ord(name) * 50 + i for i in range(size)], max_tokens=5)
                trial.step()
            trial.run()


def test_invariant__budget_and_progress(answer: Answer) -> None:
    """No step is over the budget, every step does something, and in a mixed step nobody who decodes is left out."""
    rng = answer.rng
    for _ in range(25):
        budget, policy = rng.randint(2, 12), rng.choice(["prefill_first", "mixed"])
        blocks = rng.randint(5, 12)
        scheduler = start(answer, max_num_batched_tokens=budget, num_kvcache_blocks=blocks, scheduling_policy=policy)
        enqueue(answer, scheduler, **{name: rng.randint(1, 12) for name in "ABCDE"})
        for _ in range(300):
            if scheduler.raw.is_finished():
                break
            before = [seq for seq in scheduler.raw.running if not seq.is_prefilling]
            rows = rows_of(answer, scheduler.raw.schedule()[0])
            answer.require(0 < sum(count for _, count in rows) <= budget, rows, f"1 to {budget} tokens")
            if policy == "mixed":
                kept = named([seq for seq in before if seq in scheduler.raw.running])
                answer.equal([name for name, _ in rows][: len(kept)], kept, "Who decodes comes first in every step.")
            seqs = [seq for seq in scheduler.raw.running if seq.name in dict(rows)]
            tokens = [7 if s.num_computed_tokens + s.num_scheduled_tokens == s.num_tokens else None for s in seqs]
            for seq in seqs:
                seq.sampling_params.max_tokens = 6
            scheduler.raw.postprocess(seqs, tokens, True)
            whole(answer, scheduler)
        answer.require(scheduler.raw.is_finished(), "300 steps and no end", "an end")
