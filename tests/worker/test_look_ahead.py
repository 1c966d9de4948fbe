"""What the builder prepared while the device was busy equals what it would have prepared afterwards."""

import random
import warnings
from types import SimpleNamespace

import numpy as np
import pytest

from nanovllm.engine.scheduler import Scheduler
from nanovllm.engine.sequence import Sequence
from nanovllm.sampling_params import SamplingParams
from nanovllm.worker.input_batch import BatchArrays, InputBatchBuilder


def scheduler(rng: random.Random) -> Scheduler:
    config = SimpleNamespace(
        max_num_batched_tokens=rng.choice((7, 40, 1000)), max_num_seqs=rng.choice((1, 3, 9)), max_model_len=200, eos=2,
        kvcache_block_size=rng.choice((1, 2, 4, 16)), num_kvcache_blocks=rng.choice((200, 260)), prefill_chunk=None,
        enable_prefix_caching=True, scheduling_policy=rng.choice(("prefill_first", "mixed")), stop_token_ids=(),
    )  # fmt: skip
    made = Scheduler(config)
    for _ in range(12):
        prompt = [rng.randint(3, 6) for _ in range(rng.randint(1, 40))]
        params = SamplingParams(temperature=rng.choice((1e-6, 1.0)), max_tokens=rng.randint(1, 60))
        made.add(Sequence(prompt, params, block_size=config.kvcache_block_size))
    return made


def assert_equal(got: BatchArrays, wanted: BatchArrays) -> None:
    width = max(got.block_tables.shape[1], wanted.block_tables.shape[1])  # the last columns may be empty
    for name, a, b in zip(BatchArrays._fields, got, wanted, strict=True):
        if name == "block_tables":
            a, b = (np.pad(table, ((0, 0), (0, width - table.shape[1]))) for table in (a, b))
        assert getattr(a, "dtype", None) == getattr(b, "dtype", None), name
        assert np.array_equal(a, b), name


def run(seed: int) -> int:
    """A whole workload, compared in every step; returns how many steps were as expected."""
    rng = random.Random(seed)
    steps, builder, continued = scheduler(rng), InputBatchBuilder(), 0
    while not steps.is_finished():
        seqs, is_prefill = steps.schedule()
        expected = builder.expected
        arrays = builder.build(seqs)
        continued += expected is not None and arrays.positions is expected.arrays.positions
        assert_equal(arrays, InputBatchBuilder().build(seqs))
        builder.look_ahead()
        caught_up = [seq.num_computed_tokens + seq.num_scheduled_tokens == seq.num_tokens for seq in seqs]
        steps.postprocess(seqs, [rng.randint(2, 9) if ready else None for ready in caught_up], is_prefill)
    return continued


def test_random_workloads() -> None:
    assert sum(run(seed) for seed in range(12)) > 100


def decoding(num_tokens: int, block_table: tuple[int, ...]) -> Sequence:
    seq = Sequence(range(num_tokens), block_size=4)
    seq.block_table, seq.num_computed_tokens, seq.num_scheduled_tokens = block_table, num_tokens - 1, 1
    return seq


def one_step_on(*seqs: Sequence) -> tuple[InputBatchBuilder, list[Sequence]]:
    """A builder that expects these rows to decode once more, and the rows as they come to it then."""
    builder = InputBatchBuilder()
    builder.build(list(seqs))
    builder.look_ahead()
    for seq in seqs:
        seq.num_computed_tokens += 1
        seq.append_token(9)
    return builder, list(seqs)


@pytest.mark.parametrize("change", ["rows", "others", "order", "progress", "tokens", "blocks", "nothing"])
def test_whatever_is_not_as_expected_is_prepared_anew(change: str) -> None:
    builder, seqs = one_step_on(decoding(5, (3, 1)), decoding(7, (2, 6)))
    if change == "rows":
        seqs = seqs[:1]
    elif change == "others":  # which are as far as the first ones would be
        seqs = [decoding(6, (4, 5)), decoding(8, (8, 7))]
    elif change == "order":
        seqs = seqs[::-1]
    elif change == "progress":
        seqs[1].num_computed_tokens -= 1
        seqs[1].num_scheduled_tokens = 2
    elif change == "tokens":
        seqs[0].append_token(8)
        seqs[0].num_scheduled_tokens = 2
    elif change == "blocks":  # moved elsewhere, as a pool may that copies what somebody else reads
        seqs[0].block_table = (3, 5)
    assert (builder.continue_decode(seqs) is not None) == (change == "nothing")
    assert_equal(builder.build(seqs), InputBatchBuilder().build(seqs))


@pytest.mark.parametrize("table", [(3, 1, 7), (3, 9, 7)])
def test_a_row_that_enters_a_block_keeps_the_others(table: tuple[int, ...]) -> None:
    builder, seqs = one_step_on(decoding(8, (3, 1)), decoding(7, (2, 6)))
    seqs[0].block_table = table
    assert (builder.continue_decode(seqs) is None) == (table[:2] != (3, 1))
    assert_equal(builder.build(seqs), InputBatchBuilder().build(seqs))


def test_a_temperature_beyond_float32_is_the_largest_float32() -> None:
    seq = decoding(5, (3, 1))
    seq.sampling_params.temperature = 1e300
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        temperatures = InputBatchBuilder().build([seq]).temperatures
    assert temperatures.tolist() == [np.finfo(np.float32).max]


def test_what_was_expected_is_forgotten_when_something_else_was_built() -> None:
    """The rows may have lost their blocks meanwhile, and be as far as before in others."""
    builder, seqs = InputBatchBuilder(), [decoding(5, (3, 1))]
    builder.look_ahead()
    assert builder.expected is None, "nothing has been built yet"
    builder.build(seqs)
    builder.look_ahead()
    builder.build([decoding(7, (2, 6))])
    seqs[0].append_token(9)
    seqs[0].num_computed_tokens, seqs[0].block_table = 5, (4, 5)
    assert_equal(builder.build(seqs), InputBatchBuilder().build(seqs))


def test_a_decode_method_of_ones_own_is_called_in_every_step() -> None:
    class Mine(InputBatchBuilder):
        calls = 0

        def prepare_decode(self, seqs: list[Sequence]) -> BatchArrays:
            self.calls += 1
            return super().prepare_decode(seqs)

    builder, seqs = Mine(), [decoding(5, (3, 1))]
    for step in range(1, 4):
        builder.build(seqs)
        builder.look_ahead()
        assert builder.calls == step
        seqs[0].num_computed_tokens += 1
        seqs[0].append_token(9)
