"""The keys of chapter 5's quiz, recomputed from the engine."""

from typing import Any

from nanovllm.engine.scheduler import Scheduler
from nanovllm.engine.sequence import Sequence, SequenceStatus
from nanovllm.workbook.oracles.scheduler import Named, Options
from nanovllm.workbook.quizzes import answer


def accepts(number: int, value: object) -> bool:
    return answer("5", number, value).text.startswith("✓")


def started(prompts: dict[str, int], max_tokens: int = 64, **options: Any) -> Scheduler:
    """A scheduler with these prompts in its queue."""
    scheduler = Scheduler(Options(**{"num_kvcache_blocks": 1000, **options}))
    for name, size in prompts.items():
        scheduler.add(Named(name, [ord(name) * 2000 + i for i in range(size)], max_tokens))
    return scheduler


def step(scheduler: Scheduler) -> dict[str, int]:
    """One step; who caught up gets a token. Returns name -> tokens computed."""
    seqs, is_prefill = scheduler.schedule()
    caught_up = [seq.num_computed_tokens + seq.num_scheduled_tokens == seq.num_tokens for seq in seqs]
    scheduler.postprocess(seqs, [7 if done else None for done in caught_up], is_prefill)
    return {repr(seq): seq.num_scheduled_tokens for seq in seqs}


def test_question_1_tokens_of_the_second_step() -> None:
    scheduler = started({"A": 60, "B": 90, "C": 30}, max_num_batched_tokens=100)
    assert step(scheduler) == {"A": 60, "B": 40}
    assert accepts(1, sum(step(scheduler).values()))
    assert not accepts(1, 50)


def test_question_2_cached_tokens_are_free() -> None:
    scheduler = started({}, max_num_batched_tokens=20)
    scheduler.add(Named("A", list(range(9))))
    step(scheduler)
    scheduler.add(Named("B", [*range(8), *range(50, 56)]))
    (seq,) = scheduler.admit_waiting(20)
    assert seq.num_tokens == 14 and seq.num_computed_tokens == 8
    assert accepts(2, 20 - seq.num_scheduled_tokens)
    assert not accepts(2, 6)


def test_question_3_a_prompt_under_way_has_a_seat() -> None:
    scheduler = started({"A": 4, "B": 20, "C": 1}, max_tokens=2, max_num_batched_tokens=8, max_num_seqs=2)
    count = 1
    while "C" not in step(scheduler):
        count += 1
    assert accepts(3, count), count
    assert not accepts(3, 2)


def test_question_4_waiting_behind_a_long_prompt() -> None:
    for policy, expected in (("prefill_first", 4), ("mixed", 0)):
        scheduler = started({"A": 3}, max_num_batched_tokens=256, scheduling_policy=policy)
        step(scheduler)
        scheduler.add(Named("B", list(range(1000))))
        without = 0
        while any(seq.is_prefilling for seq in (*scheduler.waiting, *scheduler.running)):
            without += "A" not in step(scheduler)
        assert without == expected
    assert accepts(4, 4)


def test_question_5_order_of_a_preemption() -> None:
    calls: list[str] = []

    class Spy(Scheduler):
        """Writes down the letter of the quiz for what happens."""

        def plan(self, seq: Sequence, num_tokens: int) -> None:
            calls.append({"A": "d", "B": "a", "C": "f"}[repr(seq)])
            super().plan(seq, num_tokens)

        def preempt(self, seq: Sequence) -> None:
            calls.append("c")
            super().preempt(seq)
            assert (repr(seq), seq.status, seq.block_table) == ("C", SequenceStatus.PREEMPTED, ())
            calls.append("b")

    scheduler = Spy(Options(num_kvcache_blocks=4))
    for name, size in (("A", 4), ("B", 5), ("C", 3)):
        scheduler.add(Named(name, [ord(name) * 50 + i for i in range(size)], 3))
    step(scheduler)
    calls.clear()
    pool, append = scheduler.block_manager, scheduler.block_manager.append

    def noted(seq: Sequence) -> None:
        before = seq.block_table
        append(seq)
        calls.extend("e" if repr(seq) == "A" and seq.block_table != before else "")

    pool.append = noted  # type: ignore[method-assign]
    while not scheduler.is_finished():
        step(scheduler)
    assert accepts(5, list(dict.fromkeys(calls))), calls
    assert not accepts(5, "c b d e a f".split())


def test_question_6_the_victim_waits_in_front() -> None:
    scheduler = started({"A": 4, "B": 4}, num_kvcache_blocks=2, max_num_batched_tokens=50)
    step(scheduler)
    scheduler.add(Named("X", [1, 2]))
    step(scheduler)
    assert [repr(seq) for seq in scheduler.waiting] == ["B", "X"]
    assert accepts(6, "b")
