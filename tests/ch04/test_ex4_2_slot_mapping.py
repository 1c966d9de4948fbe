"""Grader of exercise 4.2: from positions to slots through the block table."""

from typing import Any

from nanovllm.engine.sequence import Sequence
from nanovllm.workbook.grading import Answer, type_of


def make(answer: Answer, table: tuple[int, ...], block_size: int) -> Any:
    """A sequence that fills its table, on the answer's code: a prompt of one token, the others generated and, save the
    last one, computed."""
    answer.story.clear()
    seq = answer.parts.resolve(Sequence)([100], block_size=block_size)
    for token in range(101, 100 + len(table) * block_size):
        seq.append_token(token)
    seq.block_table, seq.num_computed_tokens = table, seq.num_tokens - 1
    answer.note(f"seq: block_table {table}, blocks of {block_size}")
    return answer.watch(seq, "seq")


def slowly(table: tuple[int, ...], block_size: int, start: int, stop: int) -> list[int]:
    """Write all slots of the table down, and read off those that are asked for."""
    row = [slot for block in table for slot in range(block * block_size, block * block_size + block_size)]
    return row[start:stop]


def test_contract__a_list_of_ints_and_nothing_changed(answer: Answer) -> None:
    """It returns a list of ints and changes nothing in the sequence."""
    seq = make(answer, (4, 1), 3)
    got = seq.slot_mapping(0, 4)
    answer.require(isinstance(got, list), type_of(got), "a list")
    rule = "Positions 0 to 2 are the three places of block 4, and position 3 is the first place of block 1: slot 3."
    answer.equal(got, [12, 13, 14, 3], rule)
    answer.equal(seq.block_table, (4, 1))
    answer.equal(seq.num_tokens, 6)
    answer.equal(seq.slot_mapping(0, 4), [12, 13, 14, 3], "Asked again, it answers the same.")


def test_example__two_blocks(answer: Answer) -> None:
    """Block b owns the slots b * block_size to (b + 1) * block_size - 1."""
    seq = make(answer, (7, 2), 4)
    answer.equal(seq.slot_mapping(3, 6), [31, 8, 9])


def test_oracle__any_range(answer: Answer) -> None:
    """A position's slot is its place inside the physical block that the table names."""
    for _ in range(300):
        block_size, num_blocks = answer.rng.randint(1, 9), answer.rng.randint(1, 6)
        table = tuple(answer.rng.sample(range(40), num_blocks))
        start = answer.rng.randint(0, num_blocks * block_size)
        stop = answer.rng.randint(start, num_blocks * block_size)
        seq = make(answer, table, block_size)
        answer.equal(seq.slot_mapping(start, stop), slowly(table, block_size, start, stop))


def test_oracle__two_sequences_of_different_block_sizes(answer: Answer) -> None:
    """Every sequence has its own block size and its own table."""
    one, two = make(answer, (5, 0), 2), make(answer, (3, 6), 5)
    answer.equal(one.slot_mapping(1, 3), [11, 0])
    answer.equal(two.slot_mapping(4, 7), [19, 30, 31])
    answer.equal(one.slot_mapping(0, 4), [10, 11, 0, 1])


def test_oracle__a_table_that_changes(answer: Answer) -> None:
    """What counts is the block table as it is now: it grows, and after a preemption it is another one."""
    seq = make(answer, (5, 1), 2)
    answer.equal(seq.slot_mapping(0, 4), [10, 11, 2, 3])
    for table in ((5, 1, 7), (0, 4, 2), (4, 0, 2), (9,)):
        seq.block_table = table
        answer.note(f"then seq.block_table = {table}")
        answer.equal(seq.slot_mapping(0, 2), slowly(table, 2, 0, 2))
        answer.equal(seq.slot_mapping(0, 2 * len(table)), slowly(table, 2, 0, 2 * len(table)))


def test_boundary__the_list_is_the_callers(answer: Answer) -> None:
    """Whoever gets the list may change it: the next call gives a new one."""
    seq = make(answer, (5, 1), 2)
    seq.slot_mapping(0, 3).append(-1)
    answer.note("(the caller appends -1 to that list)")
    answer.equal(seq.slot_mapping(0, 3), [10, 11, 2])


def test_boundary__chunk_starts_inside_a_block(answer: Answer) -> None:
    """The positions of a chunk go on where the last chunk ended; they do not start again at 0."""
    seq = make(answer, (9, 4, 6), 4)
    answer.equal(seq.slot_mapping(6, 11), [18, 19, 24, 25, 26])


def test_boundary__exactly_one_block(answer: Answer) -> None:
    """A range that ends with a block does not reach into the next."""
    seq = make(answer, (2, 8), 4)
    answer.equal(seq.slot_mapping(0, 4), [8, 9, 10, 11])
    answer.equal(seq.slot_mapping(4, 8), [32, 33, 34, 35])


def test_boundary__empty_range(answer: Answer) -> None:
    """No positions, no slots; not even where the table ends."""
    seq = make(answer, (2, 8), 4)
    answer.equal(seq.slot_mapping(5, 5), [])
    answer.equal(seq.slot_mapping(8, 8), [])


def test_boundary__block_zero_and_blocks_of_one(answer: Answer) -> None:
    """Block 0 is a block like any other, and a block may hold a single token."""
    seq = make(answer, (3, 0, 5), 1)
    answer.equal(seq.slot_mapping(0, 3), [3, 0, 5])
    seq = make(answer, (1, 0), 3)
    answer.equal(seq.slot_mapping(2, 5), [5, 0, 1])
