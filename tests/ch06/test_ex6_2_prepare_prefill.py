"""Grader of exercise 6.2: the arrays of a step with any number of queries a row."""

from typing import Any

from nanovllm.engine.sequence import Sequence
from nanovllm.workbook.grading import Answer, type_of
from nanovllm.workbook.oracles.batches import compare_arrays, describe, make_sequence
from nanovllm.worker.input_batch import InputBatchBuilder


def rows(answer: Answer, wanted: list[tuple[int, int, int]], block_size: int = 4, **options: Any) -> list[Sequence]:
    """Sequences of (computed, scheduled, all) tokens."""
    used: list[int] = []
    return [
        make_sequence(answer, total, computed, scheduled, block_size, used, **options)
        for computed, scheduled, total in wanted
    ]


def state(seqs: list[Sequence]) -> list[Any]:
    return [(list(s.token_ids), s.block_table, s.num_computed_tokens, s.num_scheduled_tokens) for s in seqs]


def compare(answer: Answer, seqs: list[Sequence], builder: Any = None, by_field: bool = False) -> Any:
    answer.story.clear()
    answer.note(describe(seqs))
    builder = builder or answer.parts.resolve(InputBatchBuilder)()
    before = state(seqs)
    got = answer.watch(builder, "builder").prepare_prefill(seqs)
    answer.equal(state(seqs), before, "It may not change a sequence.")
    compare_arrays(answer, got, seqs, by_field)
    return got


def test_contract__fields_types_and_sequences(answer: Answer) -> None:
    """It returns BatchArrays with the types that the module names, and leaves the sequences as they are."""
    seqs = rows(answer, [(0, 5, 5), (2, 3, 9)])
    got = compare(answer, seqs, by_field=True)
    answer.require(type(got).__name__ == "BatchArrays", type_of(got), "BatchArrays")
    compare(answer, seqs, by_field=True)


def test_contract__arrays_of_its_own(answer: Answer) -> None:
    """Each call makes new arrays: those of an earlier step stay as they are."""
    builder = answer.parts.resolve(InputBatchBuilder)()
    before, after = rows(answer, [(0, 5, 5), (2, 3, 9)]), rows(answer, [(3, 5, 8), (4, 3, 9)])
    got = compare(answer, before, builder, by_field=True)
    compare(answer, after, builder, by_field=True)
    answer.note("(the arrays of the first call, after the second)")
    compare_arrays(answer, got, before)


def test_example__two_rows(answer: Answer) -> None:
    """Tokens 4, 5, 6 of 7 and token 9 of 10: contexts 7 and 10, boundaries 0, 3, 4."""
    got = compare(answer, rows(answer, [(4, 3, 7), (9, 1, 10)]), by_field=True)
    answer.equal(got.positions.tolist(), [4, 5, 6, 9])
    answer.equal((got.cu_seqlens_q.tolist(), got.context_lens.tolist()), ([0, 3, 4], [7, 10]))


def test_oracle__random_steps(answer: Answer) -> None:
    """Everything is what counting token by token gives."""
    for _ in range(60):
        wanted = []
        for _ in range(answer.rng.randint(1, 6)):
            computed, scheduled = answer.rng.randint(0, 12), answer.rng.randint(1, 7)
            wanted.append((computed, scheduled, computed + scheduled + answer.rng.choice([0, 0, 1, 5])))
        compare(answer, rows(answer, wanted, answer.rng.choice([1, 2, 4, 16])), by_field=True)


def test_boundary__a_second_chunk(answer: Answer) -> None:
    """A second chunk takes the tokens, positions and slots behind the first."""
    compare(answer, rows(answer, [(4, 4, 12)]))
    compare(answer, rows(answer, [(3, 2, 12)]))


def test_boundary__behind_a_prefix(answer: Answer) -> None:
    """Cached tokens count in the context and not among the queries."""
    got = compare(answer, rows(answer, [(8, 2, 10), (0, 3, 3)]))
    answer.equal((got.max_query_len, got.max_context_len), (3, 10))


def test_boundary__leading_decodes(answer: Answer) -> None:
    """num_decodes counts rows with one query from the front, up to the first with more."""
    answer.equal(compare(answer, rows(answer, [(5, 1, 6), (2, 1, 3), (0, 4, 4), (7, 1, 8)])).num_decodes, 2)
    answer.equal(compare(answer, rows(answer, [(0, 4, 4), (7, 1, 8)])).num_decodes, 0)
    answer.equal(compare(answer, rows(answer, [(5, 1, 6), (7, 1, 8)])).num_decodes, 2)


def test_boundary__chunks_bring_no_temperature(answer: Answer) -> None:
    """Only rows that catch up are sampled, so only they bring a temperature and decide about noise."""
    used: list[int] = []
    chunk = make_sequence(answer, 9, 0, 4, 4, used, temperature=2.0)
    cold = make_sequence(answer, 3, 0, 3, 4, used, temperature=1e-6)
    got = compare(answer, [chunk, cold])
    answer.equal((len(got.temperatures), bool(got.needs_noise)), (1, False))


def test_boundary__temperatures_in_order(answer: Answer) -> None:
    """Each row that gives a logit brings its own temperature, in the order of the rows."""
    used: list[int] = []
    wanted = ((6, 5, 1, 0.75), (9, 0, 4, 2.0), (3, 0, 3, 0.5), (4, 0, 4, 1.25))
    seqs = [make_sequence(answer, total, start, count, 4, used, temperature=t) for total, start, count, t in wanted]
    answer.equal(compare(answer, seqs).temperatures.tolist(), [0.75, 0.5, 1.25])


def test_boundary__where_noise_begins(answer: Answer) -> None:
    """COLD itself needs no noise, and anything above it does; one warm row is enough."""
    used: list[int] = []
    seqs = [make_sequence(answer, 4, 0, 4, 4, used, temperature=t) for t in (1e-6, 1e-5, 2e-5)]
    for some in (seqs[:2], seqs, seqs[1:]):
        compare(answer, some)


def test_boundary__tokens_that_were_generated(answer: Answer) -> None:
    """After a preemption generated tokens are computed again, and a row has caught up only behind the last of them."""
    used: list[int] = []
    for computed, scheduled in ((0, 4), (0, 6), (4, 3), (0, 9), (8, 1)):
        seq = make_sequence(answer, 9, computed, scheduled, 4, used, temperature=0.7)
        seq.num_prompt_tokens = 4
        used.clear()
        compare(answer, [seq])


def test_boundary__nobody_is_sampled(answer: Answer) -> None:
    """A step of chunks alone has no logits, no temperatures and no noise."""
    compare(answer, rows(answer, [(0, 4, 9), (2, 2, 7)]))


def test_boundary__tables_of_different_lengths(answer: Answer) -> None:
    """Shorter block tables are filled up with 0 behind their last block."""
    compare(answer, rows(answer, [(0, 2, 2), (12, 3, 30), (0, 8, 8)]))


def test_boundary__slots_above_32_bits(answer: Answer) -> None:
    """Slots are int64, because a pool may have more of them than 32 bits count: no product on the way is smaller."""
    seqs = rows(answer, [(255, 2, 300)], block_size=256)
    seqs[0].block_table = (8_400_000, 8_500_000)
    answer.equal(compare(answer, seqs).slot_mapping.tolist(), [8_400_000 * 256 + 255, 8_500_000 * 256])


def test_boundary__exact_blocks(answer: Answer) -> None:
    """Chunks that begin or end at the edge of a block."""
    compare(answer, rows(answer, [(4, 4, 8), (0, 4, 4), (8, 1, 9)]))
