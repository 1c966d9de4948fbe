"""Grader of exercise 5.2: long prompts in chunks, from planning to booking."""

from typing import Any

from nanovllm.engine.events import FinishReason
from nanovllm.engine.sequence import SequenceStatus
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
    run_step,
    seated,
    whole,
)  # fmt: skip


def start(answer: Answer, **options: Any) -> Any:
    answer.story.clear()
    return make_scheduler(answer, Options(**{"max_num_batched_tokens": 100, **options}))


def continued(answer: Answer, scheduler: Any, budget: int) -> list[tuple[str, int]]:
    """continue_prefills(budget), and the rows that it planned."""
    return planned_rows(answer, scheduler, scheduler.continue_prefills(budget))


def book(answer: Answer, scheduler: Any, *rows: tuple[Named, int, int | None]) -> None:
    """postprocess for rows of (sequence, tokens that it computed, new token)."""
    for seq, num_tokens, _ in rows:
        seq.num_scheduled_tokens = num_tokens
    computed = ", ".join(f"{seq.name}: {num_tokens}" for seq, num_tokens, _ in rows)
    answer.note(f"rows {computed}")
    got = scheduler.postprocess([row[0] for row in rows], [row[2] for row in rows], True)
    answer.equal(got, None, "postprocess returns nothing.")


def test_contract__what_each_of_them_returns(answer: Answer) -> None:
    """plan_chunk returns an int, continue_prefills a list, postprocess nothing; seats and queue stay as they are."""
    scheduler = start(answer)
    a = seated(answer, scheduler, "A", 10, 0)
    answer.equal(
        scheduler.plan_chunk(a, 4), 4, "A chunk is what is not computed yet (10 tokens), cut to the budget (4)."
    )
    answer.equal((a.num_scheduled_tokens, a.num_computed_tokens), (4, 0), "Planned is not computed yet.")
    rows = continued(answer, scheduler, 6)
    answer.equal(rows, [("A", 6)], "A's prompt is under way, with more to compute than the budget of 6.")
    answer.equal((named(scheduler.running), len(scheduler.waiting)), (["A"], 0))
    book(answer, scheduler, (a, 6, None))
    answer.equal(a.num_scheduled_tokens, 6, "num_scheduled_tokens stays as it is.")


def test_contract__a_list_of_its_own(answer: Answer) -> None:
    """Each call makes a list of its own: one that was handed out before stays as it is."""
    scheduler = start(answer)
    a = seated(answer, scheduler, "A", 10, 0)
    first = scheduler.continue_prefills(6)
    answer.equal(named(first), ["A"], "A's prompt is under way.")
    book(answer, scheduler, (a, 10, 7))
    scheduler.continue_prefills(6)
    answer.equal(named(first), ["A"])


def test_example__ten_tokens_four_of_them_computed(answer: Answer) -> None:
    """A chunk is what is not computed yet, cut to the budget."""
    scheduler = start(answer)
    a = seated(answer, scheduler, "A", 10, 4)
    answer.equal(scheduler.plan_chunk(a, 8), 6)
    answer.equal(scheduler.plan_chunk(a, 5), 5)


def test_example__two_under_way_and_one_decoding(answer: Answer) -> None:
    """Chunks go to those whose prompt is under way, in the order of their seats, until the budget is used up."""
    scheduler = start(answer)
    seated(answer, scheduler, "A", 10, 4)
    seated(answer, scheduler, "B", 5, 5)
    seated(answer, scheduler, "C", 5, 1)
    answer.equal(continued(answer, scheduler, 8), [("A", 6), ("C", 2)])
    answer.equal(named(scheduler.running), ["A", "B", "C"])


def test_example__only_the_one_that_caught_up_gets_a_token(answer: Answer) -> None:
    """A chunk that is not the last of its prompt makes progress and no token."""
    scheduler = start(answer)
    a, b = seated(answer, scheduler, "A", 10, 4), seated(answer, scheduler, "B", 20, 0)
    book(answer, scheduler, (a, 6, 7), (b, 2, None))
    rule = "A's 10 tokens are computed now, so it gets the next one, which is not."
    answer.equal((a.num_tokens, a.num_computed_tokens, a.last_token), (11, 10, 7), rule)
    answer.equal((b.num_tokens, b.num_computed_tokens), (20, 2))
    answer.equal((a.is_prefilling, b.is_prefilling), (False, True))


def test_boundary__exactly_the_rest(answer: Answer) -> None:
    """A budget as large as what is missing completes the prompt, and one token less does not."""
    scheduler = start(answer)
    a = seated(answer, scheduler, "A", 9, 2)
    answer.equal([scheduler.plan_chunk(a, budget) for budget in (6, 7, 8, 1)], [6, 7, 7, 1])


def test_boundary__after_a_prefix_hit(answer: Answer) -> None:
    """Cached tokens count as computed: the chunk begins behind them."""
    scheduler = start(answer)
    enqueue(answer, scheduler, A=list(range(1, 10)))
    run_step(answer, scheduler)
    (b,) = enqueue(answer, scheduler, B=[*range(1, 9), 50, 51, 52])
    scheduler.raw.waiting.remove(b)
    scheduler.raw.admit(b)
    answer.equal(scheduler.plan_chunk(b, 20), 3, "8 of its 11 tokens come from the cache.")


def test_boundary__the_budget_and_no_other_limit(answer: Answer) -> None:
    """The budget that is given is what a chunk may be; `prefill_chunk` is the business of the one who gives it."""
    scheduler = start(answer, prefill_chunk=3)
    a = seated(answer, scheduler, "A", 10, 4)
    answer.equal(scheduler.plan_chunk(a, 8), 6)


def test_boundary__seats_and_not_arrivals(answer: Answer) -> None:
    """The order is that of the seats, also where somebody got one before others who had arrived earlier."""
    scheduler = start(answer)
    a, b = enqueue(answer, scheduler, A=9, B=7)
    for seq in (b, a):
        scheduler.raw.waiting.remove(seq)
        scheduler.raw.admit(seq)
    answer.note("B gets a seat, and then A")
    answer.equal(continued(answer, scheduler, 10), [("B", 7), ("A", 3)])
    answer.equal(named(scheduler.running), ["B", "A"], "Nobody's seat changes.")


def test_boundary__planned_blocks_can_be_found(answer: Answer) -> None:
    """A chunk is planned through `plan`, which makes the blocks findable that it fills."""
    scheduler = start(answer)
    a = seated(answer, scheduler, "A", 10, 0)
    scheduler.plan_chunk(a, 9)
    answer.equal(a.num_hashed_blocks, 2, "9 tokens fill two blocks of 4.")


def test_boundary__no_budget(answer: Answer) -> None:
    """Without budget nobody is in the list, and whoever gets nothing is not either."""
    scheduler = start(answer)
    answer.equal(continued(answer, scheduler, 5), [], "Nobody has a seat.")
    for name, size in (("A", 6), ("B", 4), ("C", 9)):
        seated(answer, scheduler, name, size, 1)
    answer.equal(continued(answer, scheduler, 0), [])
    answer.equal(continued(answer, scheduler, 5), [("A", 5)], "5 tokens are all that A needs.")
    answer.equal(continued(answer, scheduler, 9), [("A", 5), ("B", 3), ("C", 1)])


def test_boundary__all_tokens_of_a_preempted_one(answer: Answer) -> None:
    """Who comes back after a preemption has generated tokens to compute as well, and is prefilling until then."""
    scheduler = start(answer)
    (a,) = enqueue(answer, scheduler, A=5)
    run_step(answer, scheduler)
    run_step(answer, scheduler)
    scheduler.raw.preempt(a)
    answer.note("preempt A, and give it a seat again: 5 prompt tokens, 2 generated ones")
    scheduler.raw.waiting.remove(a)
    scheduler.raw.admit(a)
    a.num_computed_tokens = 4
    answer.equal(continued(answer, scheduler, 2), [("A", 2)])
    book(answer, scheduler, (a, 2, None))
    answer.equal((a.num_tokens, a.num_computed_tokens), (7, 6))
    answer.equal(continued(answer, scheduler, 9), [("A", 1)])
    book(answer, scheduler, (a, 1, 7))
    answer.equal((a.num_tokens, a.num_computed_tokens, a.is_prefilling), (8, 7, False))


def test_boundary__a_decode(answer: Answer) -> None:
    """A row that decodes computes one token and gets one: it is always one behind."""
    scheduler = start(answer)
    a = seated(answer, scheduler, "A", 5, 5)
    scheduler.raw.block_manager.append(a)
    book(answer, scheduler, (a, 1, 9))
    answer.equal((a.token_ids[-2:], a.num_computed_tokens), ([7, 9], 6))


def test_boundary__the_end(answer: Answer) -> None:
    """Who is at its end leaves `running` and gives its blocks back; the others keep their order."""
    scheduler = start(answer, eos=0, num_kvcache_blocks=9)
    seqs = [seated(answer, scheduler, name, 4, 4) for name in "ABCD"]
    for seq in seqs:
        scheduler.raw.block_manager.append(seq)
    b, c = seqs[1], seqs[2]
    c.sampling_params.max_tokens = 2
    book(answer, scheduler, *((seq, 1, 0 if seq is b else 6) for seq in seqs))
    answer.equal(named(scheduler.running), ["A", "D"])
    answer.equal((b.status, b.finish_reason), (SequenceStatus.FINISHED, FinishReason.STOP))
    answer.equal((c.status, c.finish_reason), (SequenceStatus.FINISHED, FinishReason.LENGTH))
    answer.equal((b.completion_token_ids, c.completion_token_ids), ([7, 0], [7, 6]), "The last token is part of it.")
    answer.equal(len(scheduler.block_manager.free_block_ids), 5)
    whole(answer, scheduler)


def test_boundary__the_end_in_a_prefill(answer: Answer) -> None:
    """With max_tokens=1 a request ends in the step that computes the last of its prompt."""
    scheduler = start(answer)
    a, b = seated(answer, scheduler, "A", 10, 4), seated(answer, scheduler, "B", 9, 0)
    a.sampling_params.max_tokens = b.sampling_params.max_tokens = 1
    book(answer, scheduler, (a, 6, 7), (b, 8, None))
    answer.equal((a.is_finished, b.is_finished, named(scheduler.running)), (True, False, ["B"]))
    whole(answer, scheduler)


def test_boundary__an_end_token_in_the_prompt(answer: Answer) -> None:
    """Only a new token can be the end: a chunk brings none, whatever the last token of its prompt is."""
    scheduler = start(answer, eos=0)
    (a,) = enqueue(answer, scheduler, A=[5, 6, 7, 8, 0])
    scheduler.raw.waiting.remove(a)
    scheduler.raw.admit(a)
    book(answer, scheduler, (a, 3, None))
    answer.equal((a.is_finished, a.num_computed_tokens, named(scheduler.running)), (False, 3, ["A"]))
    book(answer, scheduler, (a, 2, 9))
    answer.equal((a.is_finished, a.last_token, named(scheduler.running)), (False, 9, ["A"]))


def test_boundary__rows_in_another_order(answer: Answer) -> None:
    """The rows of a step need not stand in the order of the seats, and not everybody is in them."""
    scheduler = start(answer)
    seqs = [seated(answer, scheduler, name, 6, 0) for name in "ABC"]
    book(answer, scheduler, (seqs[2], 6, 3), (seqs[0], 2, None))
    answer.equal([seq.num_computed_tokens for seq in seqs], [2, 0, 6])
    answer.equal([seq.num_tokens for seq in seqs], [6, 6, 7])


def test_oracle__random_requests(answer: Answer) -> None:
    """The same rows, tokens, progress and queues as a scheduler that keeps plain lists."""
    for _ in range(60):
        random_trial(answer)


def test_oracle__any_budget(answer: Answer) -> None:
    """However small the steps, each prompt is computed from its first to its last token, once."""
    for budget in (1, 2, 3, 5, 7, 12, 40):
        trial = Trial(answer, Options(max_num_batched_tokens=budget, scheduling_policy="mixed"))
        for name, size in (("A", 17), ("B", 4), ("C", 23), ("D", 1)):
            trial.add(name, [ord(name) * 50 + i for i in range(size)], max_tokens=3)
        trial.run()


def test_invariant__a_prompt_is_computed_once(answer: Answer) -> None:
    """Chunk by chunk, the progress of a prompt grows by what was planned, until it is done."""
    scheduler = start(answer, max_num_batched_tokens=7)
    (a,) = enqueue(answer, scheduler, A=30)
    seen = []
    for _ in range(5):
        seen.append(run_step(answer, scheduler)[0][1])
        answer.equal(a.num_computed_tokens, sum(seen))
        answer.equal(a.num_completion_tokens, int(sum(seen) == 30))
    answer.equal(seen, [7, 7, 7, 7, 2])
