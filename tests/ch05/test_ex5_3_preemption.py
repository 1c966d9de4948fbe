"""Grader of exercise 5.3: decoding rows grow, and where blocks run out the tail gives its seat up."""

from typing import Any

from nanovllm.engine.sequence import SequenceStatus
from nanovllm.workbook.grading import Answer
from nanovllm.workbook.oracles.scheduler import (
    Options,
    Trial,
    enqueue,
    make_scheduler,
    named,
    planned_rows,
    random_trial,
    rows_of,
    run_step,
    whole,
)  # fmt: skip


def start(answer: Answer, replaced: Any = None, **options: Any) -> Any:
    answer.story.clear()
    return make_scheduler(answer, Options(**{"max_num_batched_tokens": 100, **options}), replaced)


def decode(answer: Answer, scheduler: Any) -> list[tuple[str, int]]:
    rows = planned_rows(answer, scheduler, scheduler.schedule_decodes())
    whole(answer, scheduler)
    return rows


def queues(scheduler: Any) -> tuple[list[str], list[str]]:
    return named(scheduler.raw.running), named(list(scheduler.raw.waiting))


def test_contract__rows_with_a_slot(answer: Answer) -> None:
    """It returns a list of the rows; each computes one token and has a slot for it."""
    scheduler = start(answer)
    answer.equal(decode(answer, scheduler), [], "Nobody is running.")
    a, b = enqueue(answer, scheduler, A=4, B=6)
    run_step(answer, scheduler)
    rule = "Everybody who decodes computes one token."
    answer.equal(decode(answer, scheduler), [("A", 1), ("B", 1)], rule)
    answer.equal((len(a.block_table), len(b.block_table)), (2, 2), "A's fifth token opened a block.")
    answer.equal((a.num_computed_tokens, b.num_computed_tokens), (4, 6), "Planned is not computed yet.")
    answer.equal(scheduler.num_preemptions, 0, "Blocks are free, so nobody loses a seat.")


def test_contract__a_list_of_its_own(answer: Answer) -> None:
    """Each call makes a list of its own: one that was handed out before stays as it is."""
    scheduler = start(answer)
    enqueue(answer, scheduler, A=3, B=3)
    run_step(answer, scheduler)
    first = scheduler.schedule_decodes()
    answer.equal(named(first), ["A", "B"], "Everybody who decodes has a row.")
    scheduler.preempt(scheduler.running[-1])
    scheduler.schedule_decodes()
    answer.equal(named(first), ["A", "B"])


def test_contract__what_a_victim_keeps(answer: Answer) -> None:
    """preempt takes seat and blocks; the tokens stay, the generated ones too. It returns nothing."""
    scheduler = start(answer)
    a, b = enqueue(answer, scheduler, A=4, B=6)
    run_step(answer, scheduler)
    answer.equal(scheduler.preempt(b), None, "preempt returns nothing.")
    rule = "A victim is PREEMPTED, holds no block, and has nothing computed."
    answer.equal((b.status, b.block_table, b.num_computed_tokens), (SequenceStatus.PREEMPTED, (), 0), rule)
    rule = "Prompt and generated tokens stay what they are, and the sequence counts its preemption."
    answer.equal((b.num_prompt_tokens, b.num_completion_tokens, b.num_preemptions), (6, 1, 1), rule)
    rule = "A victim goes from `running` to `waiting`, and the scheduler counts its preemption."
    answer.equal((queues(scheduler), scheduler.num_preemptions), ((["A"], ["B"]), 1), rule)
    answer.equal((a.status, len(a.block_table)), (SequenceStatus.RUNNING, 1), "Nobody else is touched.")
    whole(answer, scheduler)


def test_example__the_last_one_gives_way(answer: Answer) -> None:
    """The pool is full and A needs a block: C, seated last, is preempted, and A and B go on."""
    scheduler = start(answer, num_kvcache_blocks=4)
    enqueue(answer, scheduler, A=4, B=5, C=3)
    run_step(answer, scheduler)
    answer.equal(decode(answer, scheduler), [("A", 1), ("B", 1)])
    answer.equal(queues(scheduler), (["A", "B"], ["C"]))


def test_boundary__no_block_is_needed(answer: Answer) -> None:
    """Where every last token has a slot, an empty free queue is no reason to preempt anybody."""
    scheduler = start(answer, num_kvcache_blocks=3)
    enqueue(answer, scheduler, A=3, B=6)
    run_step(answer, scheduler)
    answer.equal(len(scheduler.block_manager.free_block_ids), 0)
    answer.equal(decode(answer, scheduler), [("A", 1), ("B", 1)])
    answer.equal(scheduler.num_preemptions, 0)


def test_boundary__the_last_one_needs_the_block(answer: Answer) -> None:
    """If the one that needs a block sits last, it is itself the victim; those before it go on."""
    scheduler = start(answer, num_kvcache_blocks=3)
    enqueue(answer, scheduler, A=3, B=8)
    run_step(answer, scheduler)
    answer.equal(decode(answer, scheduler), [("A", 1)])
    answer.equal(queues(scheduler), (["A"], ["B"]))
    answer.equal(len(scheduler.block_manager.free_block_ids), 2)


def test_boundary__alone(answer: Answer) -> None:
    """Who is alone and finds no block loses its own seat; then nobody decodes in this step."""
    scheduler = start(answer, num_kvcache_blocks=2)
    (a,) = enqueue(answer, scheduler, A=4)
    run_step(answer, scheduler)
    scheduler.raw.block_manager.take_free_block(99)
    answer.note("(the other block of the pool is taken by somebody else)")
    answer.equal(rows_of(answer, scheduler.schedule_decodes()), [])
    answer.equal((queues(scheduler), a.status), (([], ["A"]), SequenceStatus.PREEMPTED))


def test_boundary__two_need_a_block(answer: Answer) -> None:
    """Whoever still lacks a block takes the next from the tail; those who have lost their seat are not in the rows."""
    scheduler = start(answer, num_kvcache_blocks=4)
    enqueue(answer, scheduler, A=4, B=4, C=4, D=4)
    run_step(answer, scheduler)
    answer.equal(decode(answer, scheduler), [("A", 1), ("B", 1)], "D's block goes to A, and C's to B.")
    answer.equal(queues(scheduler), (["A", "B"], ["C", "D"]), "C was seated before D, so it waits in front of it.")


def test_boundary__a_victim_that_was_prefilling(answer: Answer) -> None:
    """The tail gives way whatever it is doing: here its prompt was under way."""
    scheduler = start(answer, num_kvcache_blocks=5, max_num_batched_tokens=8, scheduling_policy="mixed")
    enqueue(answer, scheduler, A=4)
    run_step(answer, scheduler)
    enqueue(answer, scheduler, B=11)
    run_step(answer, scheduler)
    answer.equal((named(scheduler.running), scheduler.running[1].is_prefilling), (["A", "B"], True))
    for _ in range(3):
        scheduler.running[0].append_token(9)
    scheduler.running[0].num_computed_tokens += 3
    answer.note("A has 9 tokens now and needs a third block; B is at 7 of 11")
    answer.equal(decode(answer, scheduler), [("A", 1)])
    answer.equal(queues(scheduler), (["A"], ["B"]))


def test_boundary__prefilling_rows_are_passed_over(answer: Answer) -> None:
    """Whose prompt is under way does not decode; those seated behind it do."""
    scheduler = start(answer)
    a, b, c = enqueue(answer, scheduler, A=3, B=9, C=5)
    run_step(answer, scheduler)
    b.num_computed_tokens, b.num_prefill_tokens = 4, 10
    answer.note("B has computed 4 of its 10 tokens only")
    answer.equal(decode(answer, scheduler), [("A", 1), ("C", 1)])
    answer.equal(len(b.block_table), 3, "It gets no further block.")


def test_boundary__in_front_of_all_who_wait(answer: Answer) -> None:
    """A victim waits in front of those who have never had a seat, and in front of an earlier victim."""
    scheduler = start(answer, num_kvcache_blocks=4, max_num_seqs=3)
    enqueue(answer, scheduler, A=4, B=4, C=4)
    run_step(answer, scheduler)
    enqueue(answer, scheduler, X=2, Y=2)
    answer.equal(decode(answer, scheduler), [("A", 1), ("B", 1)], "A takes the free block, B needs C's.")
    answer.equal(queues(scheduler), (["A", "B"], ["C", "X", "Y"]))
    scheduler.preempt(scheduler.running[-1])
    answer.equal(queues(scheduler), (["A"], ["B", "C", "X", "Y"]))


def test_boundary__the_seat_counts_and_not_the_arrival(answer: Answer) -> None:
    """The victim is who was *seated* last, and waits in front, even if others arrived before it or after it."""
    replaced = {"Scheduler.next_waiting": lambda self: self.waiting[-1]}
    scheduler = start(answer, replaced, num_kvcache_blocks=4, max_num_seqs=2)
    answer.note("(with a next_waiting that names the last)")
    enqueue(answer, scheduler, A=4, B=8, C=4)
    run_step(answer, scheduler)
    answer.equal(queues(scheduler), (["C", "B"], ["A"]))
    answer.equal(decode(answer, scheduler), [("C", 1)], "C takes the last free block, B needs one and sits last.")
    answer.equal(queues(scheduler), (["C"], ["B", "A"]))


def test_boundary__two_victims_in_the_order_of_their_seats(answer: Answer) -> None:
    """Of two victims the one that was seated first stands in front, even if it arrived later."""
    replaced = {"Scheduler.next_waiting": lambda self: self.waiting[-1]}
    scheduler = start(answer, replaced)
    answer.note("(with a next_waiting that names the last)")
    enqueue(answer, scheduler, A=4, B=4, C=4)
    run_step(answer, scheduler)
    scheduler.preempt(scheduler.running[-1])
    scheduler.preempt(scheduler.running[-1])
    answer.equal(queues(scheduler), (["C"], ["B", "A"]))


def test_boundary__what_the_cache_gave_it(answer: Answer) -> None:
    """That tokens came from the cache at its first admission stays written down: it is a number of the request."""
    scheduler = start(answer)
    enqueue(answer, scheduler, A=list(range(1, 10)))
    run_step(answer, scheduler)
    (b,) = enqueue(answer, scheduler, B=[*range(1, 9), 50, 51])
    run_step(answer, scheduler)
    scheduler.preempt(b)
    answer.equal((b.num_cached_tokens, b.num_computed_tokens), (8, 0))


def test_boundary__back_again(answer: Answer) -> None:
    """A victim is computed again, generated tokens and all, except for what it still finds in the cache."""
    trial = Trial(answer, Options(num_kvcache_blocks=4, max_num_batched_tokens=30))
    trial.add("A", [1, 2, 3, 4, 5, 6, 7], max_tokens=6)
    trial.add("B", [12, 13, 14, 15, 16, 17, 18, 19], max_tokens=6)
    trial.run()
    answer.require(trial.scheduler.num_preemptions > 0, "no preemption", "at least one")


def test_oracle__random_requests(answer: Answer) -> None:
    """The same rows, victims, queues and blocks as a scheduler that keeps plain lists."""
    for _ in range(60):
        random_trial(answer)


def test_oracle__very_tight_pools(answer: Answer) -> None:
    """Every request ends, whoever loses a seat how often."""
    for blocks in (4, 5, 6, 7):
        for policy in ("prefill_first", "mixed"):
            trial = Trial(answer, Options(num_kvcache_blocks=blocks, kvcache_block_size=3, scheduling_policy=policy))
            for name, size in (("A", 5), ("B", 7), ("C", 2), ("D", 9)):
                trial.add(name, [ord(name) * 50 + i for i in range(size)], max_tokens=4)
            trial.run()
            answer.require(blocks > 4 or trial.scheduler.num_preemptions > 0, "no preemption", "some preemptions")


def test_invariant__a_planned_row_is_safe(answer: Answer) -> None:
    """Whoever is in the rows is running, has a slot for its last token, and is in them once."""
    rng = answer.rng
    for _ in range(60):
        scheduler = start(answer, num_kvcache_blocks=rng.randint(4, 9), kvcache_block_size=rng.choice([1, 2, 3]))
        sizes = {name: rng.randint(1, 4) for name in "ABCDEF"[: rng.randint(1, 6)]}
        enqueue(answer, scheduler, **sizes)
        for _ in range(8):
            scheduler.raw.admit_waiting(100)
            for seq in scheduler.running:
                if seq.is_prefilling:
                    seq.num_computed_tokens = seq.num_tokens
                    seq.append_token(7)
            rows = scheduler.schedule_decodes()
            whole(answer, scheduler)
            running, blocks = scheduler.raw.running, scheduler.block_manager.block_size
            wrong = [seq for seq in rows if seq not in running or len(seq.block_table) * blocks < seq.num_tokens]
            answer.require(not wrong, wrong, "only running sequences with a slot in the rows")
            answer.equal(named(rows), named(running), "Everybody who kept a seat decodes.")
            for seq in rows:
                seq.num_computed_tokens += 1
                seq.append_token(7)
