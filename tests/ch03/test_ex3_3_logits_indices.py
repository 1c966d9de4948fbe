"""Grader of exercise 3.3: which rows of the packed batch give a next token."""

from typing import Any

from nanovllm.engine.sequence import Sequence
from nanovllm.workbook.grading import Answer, type_of
from nanovllm.worker.input_batch import InputBatchBuilder


def make(answer: Answer, rows: list[tuple[int, int, int]], generated: int = 0) -> tuple[Any, list[Any]]:
    """A builder on the answer's code, and sequences of (computed, scheduled, all) tokens."""
    answer.story.clear()
    answer.note(f"(computed, scheduled, all tokens) of each sequence: {rows}")
    seqs = []
    for number, (computed, scheduled, total) in enumerate(rows):
        # Numbers say nothing about places: a sequence that was preempted stands behind younger ones.
        seq = Sequence(list(range(total - generated)), seq_id=50 - 3 * number, block_size=4)
        for token in range(generated):
            seq.append_token(token)
        seq.num_computed_tokens, seq.num_scheduled_tokens = computed, scheduled
        seq.num_cached_tokens = computed // 4 * 4  # as if all whole blocks had been found in the prefix cache
        if computed < seq.num_prompt_tokens:
            seq.num_prefill_tokens = total  # under way, for the first time or again
        seqs.append(seq)
    return answer.watch(answer.parts.resolve(InputBatchBuilder)(), "builder"), seqs


def slowly(rows: list[tuple[int, int, int]]) -> list[int]:
    """Write every row of the batch down as (sequence, position), and look for each sequence's last position."""
    batch = [(b, computed + i) for b, (computed, scheduled, _) in enumerate(rows) for i in range(scheduled)]
    wanted = [(b, total - 1) for b, (_, _, total) in enumerate(rows)]
    return [row for row, entry in enumerate(batch) if entry in wanted]


def ask(answer: Answer, rows: list[tuple[int, int, int]], generated: int = 0) -> Any:
    builder, seqs = make(answer, rows, generated)
    return builder.logits_indices(seqs)


def test_contract__a_list_of_ints_and_nothing_changed(answer: Answer) -> None:
    """It returns a list of ints and changes no sequence."""
    builder, seqs = make(answer, [(0, 3, 3), (2, 2, 4)])
    got = builder.logits_indices(seqs)
    answer.require(isinstance(got, list), type_of(got), "a list")
    rule = "Rows 0 to 2 are the first sequence's, 3 and 4 the second's; both catch up, each in its last row."
    answer.equal(got, [2, 4], rule)
    state = [(seq.num_computed_tokens, seq.num_scheduled_tokens, seq.num_tokens) for seq in seqs]
    answer.equal(state, [(0, 3, 3), (2, 2, 4)], "It may not change a sequence.")
    answer.equal(len(seqs), 2, "It may not change the list.")
    answer.equal(builder.logits_indices(seqs), [2, 4], "Asked again, it answers the same.")


def test_example__three_rows(answer: Answer) -> None:
    """3, 2 and 4 scheduled tokens, the second with more of its prompt to come: rows 2 and 8 give a token."""
    answer.equal(ask(answer, [(0, 3, 3), (0, 2, 9), (5, 4, 9)]), [2, 8])


def test_oracle__any_step(answer: Answer) -> None:
    """A sequence that catches up gives a token at its own last row; nobody else gives one."""
    for _ in range(300):
        rows = []
        for _ in range(answer.rng.randint(1, 6)):
            computed, scheduled = answer.rng.randint(0, 9), answer.rng.randint(1, 5)
            more = answer.rng.choice([0, 0, 1, 4])
            rows.append((computed, scheduled, computed + scheduled + more))
        answer.equal(ask(answer, rows), slowly(rows))
    many = [(3 * i, 1 + i % 4, 3 * i + 1 + i % 4 + i % 3) for i in range(40)]
    answer.equal(ask(answer, many), slowly(many))


def test_oracle__one_builder_for_many_steps(answer: Answer) -> None:
    """Each step is a new question, also about the same sequences: a long prompt, its last chunk, then decodes."""
    builder, seqs = make(answer, [(0, 4, 9), (0, 5, 5)])
    for rows in ([(0, 4, 9), (0, 5, 5)], [(4, 3, 9), (5, 1, 6)], [(7, 2, 9), (6, 1, 7)], [(9, 1, 10), (7, 1, 8)]):
        answer.note(f"(computed, scheduled, all tokens) now: {rows}")
        for seq, (computed, scheduled, total) in zip(seqs, rows, strict=True):
            seq.num_computed_tokens, seq.num_scheduled_tokens = computed, scheduled
            while seq.num_tokens < total:
                seq.append_token(7)
        answer.equal(builder.logits_indices(seqs), slowly(rows))


def test_boundary__a_chunk_gives_nothing(answer: Answer) -> None:
    """A chunk with more of its prompt to come gives no token."""
    answer.equal(ask(answer, [(0, 4, 9)]), [])


def test_boundary__the_last_chunk_gives_one(answer: Answer) -> None:
    """The chunk that ends a prompt gives its token, though it did not begin the prompt."""
    answer.equal(ask(answer, [(8, 1, 9)]), [0])
    answer.equal(ask(answer, [(4, 5, 9)]), [4])


def test_boundary__rows_of_a_chunk_still_count(answer: Answer) -> None:
    """The rows of a chunk stand in the batch, so what follows begins behind them."""
    answer.equal(ask(answer, [(0, 4, 9), (0, 2, 2)]), [5])


def test_boundary__behind_a_prefix_hit(answer: Answer) -> None:
    """Cached tokens are in no row: only what is scheduled is counted."""
    answer.equal(ask(answer, [(8, 2, 10), (16, 1, 17)]), [1, 2])


def test_boundary__decodes(answer: Answer) -> None:
    """In a decode step every row gives a token."""
    answer.equal(ask(answer, [(9, 1, 10), (3, 1, 4), (20, 1, 21)], generated=2), [0, 1, 2])


def test_boundary__a_resumed_sequence(answer: Answer) -> None:
    """A preempted sequence computes generated tokens again; it has caught up when all of them are computed."""
    answer.equal(ask(answer, [(0, 7, 7)], generated=3), [6])
    answer.equal(ask(answer, [(0, 4, 7)], generated=3), [])


def test_boundary__nobody_catches_up(answer: Answer) -> None:
    """A step of chunks alone gives no token at all."""
    answer.equal(ask(answer, [(0, 3, 8), (2, 2, 9)]), [])
