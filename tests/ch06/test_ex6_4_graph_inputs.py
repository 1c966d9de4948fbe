"""Grader of exercise 6.4: which sizes are recorded, and how a smaller step is padded."""

from typing import Any

import numpy as np
import torch

from nanovllm.workbook.grading import Answer, type_of
from nanovllm.worker.cuda_graphs import StepInputs
from nanovllm.worker.input_batch import BatchArrays

FIELDS = ("input_ids", "positions", "slot_mapping", "context_lens")


def step(answer: Answer, rows: int, width: int, sampled: int | None = None) -> BatchArrays:
    """A decode step of `rows` rows with random numbers."""
    sampled = rows if sampled is None else sampled

    def numbers(dtype: Any, *shape: int) -> Any:
        return np.array([answer.rng.randrange(1, 1000) for _ in range(int(np.prod(shape)))], dtype).reshape(shape)

    return BatchArrays(
        input_ids=numbers(np.int64, rows), positions=numbers(np.int64, rows), slot_mapping=numbers(np.int64, rows),
        block_tables=numbers(np.int32, rows, width), context_lens=numbers(np.int32, rows),
        cu_seqlens_q=np.arange(rows + 1, dtype=np.int32), logits_indices=np.arange(sampled),
        temperatures=numbers(np.float32, sampled), max_query_len=1, max_context_len=9, num_decodes=rows,
        needs_noise=True,
    )  # fmt: skip


def make(answer: Answer, rows: int = 8, max_blocks: int = 4) -> Any:
    answer.story.clear()
    answer.note(f"inputs with {rows} rows, tables of {max_blocks} blocks")
    return answer.parts.resolve(StepInputs)(rows, max_blocks, torch.device("cpu"))


def write(answer: Answer, inputs: Any, arrays: BatchArrays, size: int) -> None:
    rows, width = arrays.block_tables.shape
    answer.note(
        f"write a step of {rows} rows (tables {width} wide, {len(arrays.temperatures)} sampled), padded to {size}"
    )
    before = [np.array(value) for value in arrays]
    with answer.about("A step may be smaller than the buffers: fewer rows, narrower tables, fewer temperatures."):
        result = inputs.write(arrays, size)
    answer.equal(result, None, "It returns nothing.")
    answer.equal([np.array(v).tolist() for v in arrays], [v.tolist() for v in before], "It may not change its inputs.")


def check(answer: Answer, inputs: Any, arrays: BatchArrays, size: int) -> None:
    """On the device: the step's rows in front, then rows that write nowhere and read nothing."""
    rows, width = arrays.block_tables.shape
    for name in FIELDS:
        answer.equal(inputs.device[name][:rows].tolist(), getattr(arrays, name).tolist(), f"{name}: {answer.rule}")
    got = inputs.device["block_tables"][:rows, :width].tolist()
    answer.equal(got, arrays.block_tables.tolist(), f"block_tables: {answer.rule}")
    got = inputs.device["temperatures"][: len(arrays.temperatures)].tolist()
    answer.equal(got, arrays.temperatures.tolist(), f"temperatures: {answer.rule}")
    answer.equal(
        inputs.device["slot_mapping"][rows:size].tolist(), [-1] * (size - rows), "A padded row writes nowhere."
    )
    answer.equal(inputs.device["context_lens"][rows:size].tolist(), [0] * (size - rows), "A padded row reads nothing.")


def test_contract__sizes_and_arguments(answer: Answer) -> None:
    """The sizes are a list of ints; writing changes neither the arrays nor rows from `size` on."""
    got = answer.call("graph_sizes", 9)
    answer.require(isinstance(got, list), type_of(got), "a list")
    inputs = make(answer)
    for buffer in inputs.host.values():
        buffer[:] = 77
    write(answer, inputs, step(answer, 2, 3), 4)
    for name, buffer in inputs.host.items():
        rule = "Rows from `size` on are not touched."
        answer.require(bool((buffer[4:] == 77).all()), f"{name}: {buffer[4:].tolist()}", f"{name}: 77 everywhere", rule)


def test_contract__a_list_of_its_own(answer: Answer) -> None:
    """Each call makes a list of its own: one that was handed out before stays as it is."""
    first = answer.call("graph_sizes", 3)
    answer.equal(first, [1, 2, 3], "The sizes below the largest, which is 3, and the largest itself.")
    answer.call("graph_sizes", 20)
    answer.equal(first, [1, 2, 3])


def test_example__twenty_and_three(answer: Answer) -> None:
    """Up to 20: 1, 2, 4, 8, 16, 20. Up to 3: 1, 2, 3."""
    answer.equal(answer.call("graph_sizes", 20), [1, 2, 4, 8, 16, 20])
    answer.equal(answer.call("graph_sizes", 3), [1, 2, 3])


def test_oracle__sizes_by_the_rule(answer: Answer) -> None:
    """1, 2, 4, the multiples of 8 below the largest, and the largest, which is at most 512."""
    for limit in (*range(1, 60), 255, 256, 257, 511, 512, 513, 600):
        answer.story.clear()
        largest = limit if limit < 512 else 512
        wanted = [n for n in range(1, largest) if n in (1, 2, 4) or n % 8 == 0] + [largest]
        answer.equal(answer.call("graph_sizes", limit), wanted)


def test_oracle__steps_of_all_sizes(answer: Answer) -> None:
    """Whatever was written before, a step's rows are in front and the padding is harmless."""
    inputs = make(answer, 16, 5)
    for _ in range(60):
        rows = answer.rng.randint(1, 16)
        size = answer.rng.randint(rows, 16)
        arrays = step(answer, rows, answer.rng.randint(1, 5), answer.rng.randint(0, rows))
        del answer.story[1:]
        write(answer, inputs, arrays, size)
        check(answer, inputs, arrays, size)


def test_boundary__stale_rows(answer: Answer) -> None:
    """After a larger step its rows still lie in the buffers, and must not write or read again."""
    inputs = make(answer)
    write(answer, inputs, step(answer, 8, 4), 8)
    small = step(answer, 3, 2)
    write(answer, inputs, small, 8)
    check(answer, inputs, small, 8)


def test_boundary__no_padding(answer: Answer) -> None:
    """A step as large as its graph has no padding, and its last row is its own."""
    inputs, arrays = make(answer), step(answer, 8, 4)
    write(answer, inputs, arrays, 8)
    check(answer, inputs, arrays, 8)


def test_boundary__fewer_temperatures_than_rows(answer: Answer) -> None:
    """Rows that give no logit bring no temperature."""
    inputs, arrays = make(answer), step(answer, 5, 4, sampled=2)
    write(answer, inputs, arrays, 8)
    check(answer, inputs, arrays, 8)


def test_boundary__one_row(answer: Answer) -> None:
    """The smallest graph has one row."""
    inputs, arrays = make(answer), step(answer, 1, 1)
    write(answer, inputs, arrays, 1)
    check(answer, inputs, arrays, 1)


def test_boundary__odd_limits(answer: Answer) -> None:
    """The largest batch has a graph of its own, also where it is no multiple of 8, and no size comes twice."""
    for limit in (1, 2, 4, 5, 7, 8, 9, 15, 16, 17):
        answer.story.clear()
        got = answer.call("graph_sizes", limit)
        answer.equal((got[-1], len(set(got)), got), (limit, len(got), sorted(got)))


def test_boundary__addresses_stay(answer: Answer) -> None:
    """A graph knows addresses: the buffers are written into, never exchanged."""
    inputs = make(answer)
    before = {name: (inputs.host[name].ctypes.data, inputs.device[name].data_ptr()) for name in inputs.host}
    write(answer, inputs, step(answer, 3, 2), 4)
    after = {name: (inputs.host[name].ctypes.data, inputs.device[name].data_ptr()) for name in inputs.host}
    answer.require(before == after, "a buffer at another address", "the same buffers")
