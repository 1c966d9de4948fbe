"""Grader of exercise 6.3: the arrays of a step with one query a row."""

from typing import Any

from nanovllm.engine.sequence import Sequence
from nanovllm.workbook.grading import Answer, type_of
from nanovllm.workbook.oracles.batches import compare_arrays, describe, make_sequence
from nanovllm.worker.input_batch import InputBatchBuilder


def rows(answer: Answer, wanted: list[tuple[int, int]], block_size: int = 4, **options: Any) -> list[Sequence]:
    """Sequences of (computed, all) tokens, each with one token scheduled."""
    used: list[int] = []
    return [make_sequence(answer, total, computed, 1, block_size, used, **options) for computed, total in wanted]


def state(seqs: list[Sequence]) -> list[Any]:
    return [(list(s.token_ids), s.block_table, s.num_computed_tokens, s.num_scheduled_tokens) for s in seqs]


def compare(answer: Answer, seqs: list[Sequence], builder: Any = None, by_field: bool = False) -> Any:
    answer.story.clear()
    answer.note(describe(seqs))
    builder = builder or answer.parts.resolve(InputBatchBuilder)()
    before = state(seqs)
    got = answer.watch(builder, "builder").prepare_decode(seqs)
    answer.equal(state(seqs), before, "It may not change a sequence.")
    compare_arrays(answer, got, seqs, by_field)
    return got


def test_contract__fields_types_and_sequences(answer: Answer) -> None:
    """It returns BatchArrays with the types that the module names, and leaves the sequences as they are."""
    seqs = rows(answer, [(9, 10), (3, 4)])
    got = compare(answer, seqs, by_field=True)
    answer.require(type(got).__name__ == "BatchArrays", type_of(got), "BatchArrays")


def test_contract__arrays_of_its_own(answer: Answer) -> None:
    """Each call makes new arrays: those of an earlier step stay as they are."""
    builder = answer.parts.resolve(InputBatchBuilder)()
    before, after = rows(answer, [(9, 10), (3, 4)]), rows(answer, [(8, 9), (2, 3)])
    got = compare(answer, before, builder, by_field=True)
    compare(answer, after, builder, by_field=True)
    answer.note("(the arrays of the first call, after the second)")
    compare_arrays(answer, got, before)


def test_example__three_rows(answer: Answer) -> None:
    """Rows at positions 9, 3 and 8 have contexts 10, 4 and 9; with table (7, 2, 5) position 9 has slot 21."""
    seqs = rows(answer, [(9, 10), (3, 4), (8, 9)])
    seqs[0].block_table, seqs[1].block_table, seqs[2].block_table = (7, 2, 5), (11,), (0, 1, 3)
    got = compare(answer, seqs, by_field=True)
    answer.equal(got.slot_mapping.tolist(), [21, 47, 12])
    answer.equal(got.context_lens.tolist(), [10, 4, 9])


def test_oracle__random_steps(answer: Answer) -> None:
    """Everything is what counting token by token gives."""
    for _ in range(80):
        wanted = []
        for _ in range(answer.rng.randint(1, 8)):
            computed = answer.rng.randint(0, 20)
            wanted.append((computed, computed + 1 + answer.rng.choice([0, 0, 0, 2])))
        compare(answer, rows(answer, wanted, answer.rng.choice([1, 3, 4, 16])), by_field=True)


def test_oracle__one_builder_many_steps(answer: Answer) -> None:
    """A builder that has prepared other steps before, larger and smaller ones, answers the same."""
    builder = answer.parts.resolve(InputBatchBuilder)()
    for _ in range(12):
        wanted = [(computed, computed + 1) for computed in answer.rng.choices(range(18), k=answer.rng.randint(1, 6))]
        compare(answer, rows(answer, wanted), builder)


def test_boundary__block_edges(answer: Answer) -> None:
    """Position 3 is the last of a block of 4, position 4 the first of the next."""
    for computed in (3, 4, 7, 8):
        compare(answer, rows(answer, [(computed, computed + 1)]))


def test_boundary__spare_blocks(answer: Answer) -> None:
    """The block is the one of the position, also where the table has further blocks behind it."""
    compare(answer, rows(answer, [(5, 6), (2, 3)], spare_blocks=2))


def test_boundary__not_caught_up(answer: Answer) -> None:
    """A row that computes one token of a prompt with more to come gives no logit and brings no temperature."""
    got = compare(answer, rows(answer, [(5, 6), (2, 9), (7, 8)]))
    answer.equal(got.logits_indices.tolist(), [0, 2])
    compare(answer, rows(answer, [(2, 9)], temperature=1.5))


def test_boundary__slots_above_32_bits(answer: Answer) -> None:
    """Slots are int64, because a pool may have more of them than 32 bits count: no product on the way is smaller."""
    seqs = rows(answer, [(299, 300)], block_size=256)
    seqs[0].block_table = (8_400_000, 8_500_000)
    answer.equal(compare(answer, seqs).slot_mapping.tolist(), [8_500_000 * 256 + 43])


def test_boundary__the_first_token(answer: Answer) -> None:
    """A prompt of one token is computed like a decode, at position 0."""
    compare(answer, rows(answer, [(0, 1), (0, 1)]))


def test_boundary__the_token_behind_what_is_computed(answer: Answer) -> None:
    """The token is the one at the position, not always the last known one."""
    compare(answer, rows(answer, [(2, 6)]))


def test_boundary__mixed_temperatures(answer: Answer) -> None:
    """One warm row among cold ones needs noise."""
    used: list[int] = []
    seqs = [make_sequence(answer, 6, 5, 1, 4, used, temperature=t) for t in (1e-6, 1e-5, 0.3)]
    for some in (seqs, seqs[:2], seqs[2:]):
        compare(answer, some)


def test_boundary__where_noise_begins(answer: Answer) -> None:
    """COLD itself needs no noise, and anything above it does."""
    for temperature in (1e-6, 1e-5, 2e-5):
        compare(answer, rows(answer, [(5, 6), (0, 1)], temperature=temperature))


def test_boundary__temperatures_in_order(answer: Answer) -> None:
    """Each row that gives a logit brings its own temperature, in the order of the rows."""
    used: list[int] = []
    seqs = [make_sequence(answer, total, 5, 1, 4, used, temperature=t) for total, t in ((6, 0.75), (9, 2.0), (6, 0.5))]
    answer.equal(compare(answer, seqs).temperatures.tolist(), [0.75, 0.5])


def test_boundary__tokens_that_were_generated(answer: Answer) -> None:
    """A row has caught up behind the last of all its tokens, generated ones as well."""
    used: list[int] = []
    seqs = [make_sequence(answer, 9, computed, 1, 4, used, temperature=0.7) for computed in (8, 5, 3)]
    for seq in seqs:
        seq.num_prompt_tokens = 4
    answer.equal(compare(answer, seqs).logits_indices.tolist(), [0])
