"""Grader of exercise 4.5: a new block exactly when the last token has no slot."""

from typing import Any

from nanovllm.engine.block_manager import BlockManager
from nanovllm.workbook.grading import Answer, type_of
from nanovllm.workbook.oracles.kv_cache import make_sequence, random_workload, whole


def setup(answer: Answer, num_blocks: int, block_size: int, num_tokens: int) -> tuple[Any, Any]:
    """A pool, and a sequence in it that holds the blocks of its prompt."""
    answer.story.clear()
    pool = answer.build(BlockManager, num_blocks, block_size, label="pool")
    seq = make_sequence(answer, "A", list(range(1, num_tokens + 1)), block_size)
    pool.allocate(seq)
    return pool, seq


def test_contract__types(answer: Answer) -> None:
    """can_append returns a bool and changes nothing; the block table stays a tuple."""
    pool, seq = setup(answer, 4, 4, 4)
    seq.append_token(5)
    got = pool.can_append(seq)
    answer.require(isinstance(got, bool), f"{got!r}, {type_of(got)}", "a bool")
    answer.equal(got, True, "The fifth token needs a block, and 3 are free.")
    answer.equal((seq.block_table, len(pool.free_block_ids)), ((0,), 3), "can_append only looks.")
    answer.equal(pool.append(seq), None, "append returns nothing.")
    answer.require(isinstance(seq.block_table, tuple), type_of(seq.block_table), "a tuple as block_table")
    answer.equal(pool.can_append(seq), True, "Now the fifth token has a slot.")


def test_example__fifth_token(answer: Answer) -> None:
    """With blocks of 4, the fourth token still fits into the first block and the fifth opens a second."""
    pool, seq = setup(answer, 4, 4, 3)
    seq.append_token(4)
    pool.append(seq)
    answer.equal(seq.block_table, (0,))
    seq.append_token(5)
    pool.append(seq)
    answer.equal(seq.block_table, (0, 1))
    answer.equal(pool.blocks[1].ref_count, 1, "The new block has one holder.")


def test_oracle__token_by_token(answer: Answer) -> None:
    """At every length, a sequence holds exactly the blocks that its tokens fill or have opened."""
    for block_size in (1, 2, 3, 4, 7):
        for start in (1, block_size, block_size + 1, 2 * block_size):
            pool, seq = setup(answer, 40, block_size, start)
            for token in range(3 * block_size + 1):
                seq.append_token(token)
                pool.append(seq)
                expected = next(n for n in range(40) if n * block_size >= seq.num_tokens)
                answer.equal(seq.block_table, tuple(range(expected)))


def test_oracle__random_pools(answer: Answer) -> None:
    """The same answers, tables and queue as a pool that keeps plain lists."""
    for _ in range(60):
        random_workload(answer, heard=("allocate",))


def test_boundary__block_edge(answer: Answer) -> None:
    """The token that fills a block takes none; the next one does."""
    for block_size in (1, 2, 4, 16):
        pool, seq = setup(answer, 3, block_size, block_size)
        pool.append(seq)
        answer.equal(seq.block_table, (0,), "Its last token has a slot.")
        seq.append_token(99)
        pool.append(seq)
        answer.equal(seq.block_table, (0, 1), "Its last token has none yet.")


def test_boundary__full_pool(answer: Answer) -> None:
    """Without a free block a token can be added only where its slot exists already."""
    pool, seq = setup(answer, 1, 4, 2)
    for num_tokens, expected in ((3, True), (4, True), (5, False)):
        seq.append_token(num_tokens)
        answer.equal(pool.can_append(seq), expected, f"{num_tokens} tokens, one block of 4, none free.")
        if expected:
            pool.append(seq)
    answer.equal(seq.block_table, (0,))


def test_boundary__slot_exists_already(answer: Answer) -> None:
    """If the last token has a slot, nothing happens, however often it is asked for."""
    pool, seq = setup(answer, 4, 4, 5)
    pool.append(seq)
    answer.equal(seq.block_table, (0, 1))
    pool.append(seq)
    answer.equal((seq.block_table, len(pool.free_block_ids)), ((0, 1), 2))
    full, seq = setup(answer, 2, 4, 5)
    answer.equal(full.can_append(seq), True, "Its slot is there, so the empty queue does not matter.")


def test_boundary__two_sequences(answer: Answer) -> None:
    """Each sequence grows by itself, and no block gets two owners."""
    pool, one = setup(answer, 5, 2, 2)
    two = make_sequence(answer, "B", [7, 8, 9], 2, 1)
    pool.allocate(two)
    for token in (20, 21):
        for seq in (one, two):
            seq.append_token(token)
            pool.append(seq)
            whole(answer, pool, {"A": one, "B": two})
    answer.equal((one.block_table, two.block_table), ((0, 3), (1, 2, 4)))
