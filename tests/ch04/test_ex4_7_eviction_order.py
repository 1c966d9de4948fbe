"""Grader of exercise 4.7: in which order blocks are given away, and that their content goes with them."""

from collections.abc import Mapping
from typing import Any

from nanovllm.engine.block_manager import BlockManager
from nanovllm.workbook.grading import Answer, type_of
from nanovllm.workbook.oracles.kv_cache import make_sequence, random_workload, whole


def setup(answer: Answer, num_blocks: int = 6, block_size: int = 4) -> Any:
    return answer.build(BlockManager, num_blocks, block_size, label="pool")


def admit(answer: Answer, pool: Any, label: str, tokens: list[int], seq_id: int = 0) -> Any:
    seq = make_sequence(answer, label, tokens, pool.block_size, seq_id)
    pool.allocate(seq)
    pool.cache_full_blocks(seq, len(tokens))
    return seq


def test_contract__what_is_left_behind(answer: Answer) -> None:
    """A freed sequence holds nothing and keeps its tokens; a taken block has one holder and is not in the queue."""
    pool = setup(answer)
    a = admit(answer, pool, "A", [1, 2, 3, 4, 5])
    a.append_token(6)
    a.num_computed_tokens = 5
    answer.note("A.num_computed_tokens = 5")
    answer.equal(pool.free(a), None, "free returns nothing.")
    answer.equal((a.block_table, a.num_hashed_blocks, a.num_computed_tokens), ((), 0, 0))
    answer.require(type(a.block_table) is tuple, type_of(a.block_table), "an empty tuple as block_table")
    answer.equal(a.token_ids, [1, 2, 3, 4, 5, 6], "The tokens stay as they are.")
    front = next(iter(pool.free_block_ids))
    answer.equal(pool.take_free_block(3), front, "The block at the front of the free queue is taken.")
    answer.equal((pool.blocks[front].ref_count, front in pool.free_block_ids), (1, False))


def test_example__tail_first(answer: Answer) -> None:
    """A sequence of three full blocks is freed; they are given away from its end to its beginning."""
    pool = setup(answer, num_blocks=3)
    a = admit(answer, pool, "A", list(range(1, 13)))
    answer.equal(a.block_table, (0, 1, 2))
    pool.free(a)
    answer.equal([pool.take_free_block(i) for i in range(3)], [2, 1, 0])


def test_oracle__random_pools(answer: Answer) -> None:
    """The same queue and the same findable blocks as a pool that keeps plain lists."""
    for _ in range(80):
        random_workload(answer, heard=("allocate", "release"))


def test_oracle__least_recently_freed_first(answer: Answer) -> None:
    """Among findable blocks, the one that was freed first is given away first."""
    pool = setup(answer, num_blocks=5)
    seqs = [admit(answer, pool, "ABCDE"[i], [10 * i, 2, 3, 4], i) for i in range(5)]
    order = [3, 0, 4, 1, 2]
    for index in order:
        pool.free(seqs[index])
    answer.equal([pool.take_free_block(9) for _ in range(5)], [seqs[index].raw.seq_id for index in order])


def test_boundary__tail_is_lost_first(answer: Answer) -> None:
    """The beginning of a prompt survives its end, because later prompts are likelier to share the beginning."""
    pool = setup(answer, num_blocks=4)
    a = admit(answer, pool, "A", list(range(1, 13)))
    pool.free(a)
    b = admit(answer, pool, "B", [90, 91, 92, 93, 94], 1)
    answer.equal(len(b.block_table), 2)
    found = pool.match_prefix(make_sequence(answer, "C", list(range(1, 14)), 4, 2))
    answer.equal(found, [0, 1], "B took one free block and A's last one, so A's first two are still found.")


def test_boundary__evicted_content_is_not_found(answer: Answer) -> None:
    """A block that is given away takes its old content out of the cache: from the hash table and from the block."""
    pool = setup(answer, num_blocks=1)
    a = admit(answer, pool, "A", [1, 2, 3, 4])
    pool.free(a)
    answer.equal(len(pool.hash_to_block_id), 1, "Freed, it is still findable.")
    pool.take_free_block(1)
    answer.equal((pool.blocks[0].hash, pool.blocks[0].token_ids), (None, ()))
    answer.equal(len(pool.hash_to_block_id), 0)
    answer.equal(pool.match_prefix(make_sequence(answer, "B", [1, 2, 3, 4, 5], 4, 2)), [])


def test_boundary__a_hash_of_zero(answer: Answer) -> None:
    """Not findable is a hash of None; 0 is a hash like any other."""
    answer.note("(with a hash_block that always returns 0)")
    zero: Mapping[str, Any] = {"BlockManager.hash_block": lambda parent_hash, token_ids: 0}
    pool = answer.build(BlockManager, 1, 4, label="pool", replaced=zero)
    a = admit(answer, pool, "A", [1, 2, 3, 4])
    pool.free(a)
    answer.equal(list(pool.hash_to_block_id.items()), [(0, 0)], "Freed, it is still findable.")
    pool.take_free_block(1)
    answer.equal((pool.blocks[0].hash, pool.blocks[0].token_ids, len(pool.hash_to_block_id)), (None, (), 0))


def test_boundary__eviction_touches_one_block(answer: Answer) -> None:
    """Evicting one block leaves all others findable."""
    pool = setup(answer)
    a = admit(answer, pool, "A", [1, 2, 3, 4, 5, 6, 7, 8, 9])
    b = admit(answer, pool, "B", [7, 7, 7, 7, 9], 1)
    pool.evict(pool.blocks[a.block_table[1]])
    answer.equal(pool.match_prefix(make_sequence(answer, "C", [1, 2, 3, 4, 5, 6, 7, 8, 9], 4)), [a.block_table[0]])
    answer.equal(pool.match_prefix(make_sequence(answer, "D", [7, 7, 7, 7, 1], 4)), [b.block_table[0]])
    answer.equal([block.ref_count for block in pool.blocks], [1, 1, 1, 1, 1, 0], "Eviction changes no holder.")


def test_boundary__freeing_evicts_nothing(answer: Answer) -> None:
    """Content is given up when its block is taken, not when it is freed: that is what makes the cache free of cost."""
    pool = setup(answer)
    a = admit(answer, pool, "A", [1, 2, 3, 4, 5, 6, 7, 8, 9])
    pool.free(a)
    answer.equal(pool.match_prefix(make_sequence(answer, "B", [1, 2, 3, 4, 5, 6, 7, 8, 9], 4)), [0, 1])
    pool.take_free_block(5)
    answer.equal(pool.match_prefix(make_sequence(answer, "C", [1, 2, 3, 4, 5, 6, 7, 8, 9], 4)), [0, 1])


def test_boundary__shared_block_survives_one_free(answer: Answer) -> None:
    """Freeing one of two sequences that share a block lets go of it once."""
    pool = setup(answer)
    a = admit(answer, pool, "A", [1, 2, 3, 4, 5])
    b = admit(answer, pool, "B", [1, 2, 3, 4, 6], 1)
    pool.free(a)
    answer.equal((pool.blocks[0].ref_count, b.block_table[0]), (1, 0))
    pool.free(a)
    answer.equal(pool.blocks[0].ref_count, 1, "A sequence that holds nothing has nothing to let go of.")


def test_boundary__nothing_to_free(answer: Answer) -> None:
    """A sequence without blocks can be freed; a block that is not findable can be evicted. Nothing happens."""
    pool = setup(answer)
    pool.free(make_sequence(answer, "A", [1, 2, 3], 4))
    pool.evict(pool.blocks[0])
    answer.equal((list(pool.free_block_ids), len(pool.hash_to_block_id)), (list(range(6)), 0))


def test_invariant__pool_is_whole(answer: Answer) -> None:
    """Counts, queue and hash table agree after every step."""
    pool = setup(answer, num_blocks=5, block_size=2)
    seqs: dict[str, Any] = {}
    for number in range(8):
        label = f"S{number}"
        seqs[label] = admit(answer, pool, label, [1, 2, number % 3, 4, 5], number)
        whole(answer, pool, seqs)
        pool.free(seqs.pop(label))
        whole(answer, pool, seqs)
    answer.equal(sorted(pool.free_block_ids), list(range(5)))
