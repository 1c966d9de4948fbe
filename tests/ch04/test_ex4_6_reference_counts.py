"""Grader of exercise 4.6: who holds a block, and when it is free."""

from collections.abc import Mapping
from typing import Any

from nanovllm.engine.block_manager import BlockManager
from nanovllm.workbook.grading import Answer
from nanovllm.workbook.oracles.kv_cache import make_sequence, random_workload, whole


def setup(answer: Answer, num_blocks: int = 6, block_size: int = 4) -> Any:
    return answer.build(BlockManager, num_blocks, block_size, label="pool")


def admit(answer: Answer, pool: Any, label: str, tokens: list[int], seq_id: int = 0) -> Any:
    seq = make_sequence(answer, label, tokens, pool.block_size, seq_id)
    pool.allocate(seq)
    pool.cache_full_blocks(seq, len(tokens))
    return seq


def test_contract__one_up_one_down(answer: Answer) -> None:
    """touch counts one holder more, release one less, and neither returns anything."""
    pool = setup(answer)
    admit(answer, pool, "A", [1, 2, 3, 4, 5])
    answer.equal(pool.touch(0, 7), None)
    answer.equal(pool.blocks[0].ref_count, 2)
    answer.equal(pool.release(0, 7), None)
    answer.equal(pool.blocks[0].ref_count, 1)
    answer.equal([block.ref_count for block in pool.blocks], [1, 1, 0, 0, 0, 0], "Only the named block changes.")


def test_example__shared_and_freed(answer: Answer) -> None:
    """A block that two sequences hold stays when the first lets go, and is free when the second does."""
    pool = setup(answer)
    a = admit(answer, pool, "A", [1, 2, 3, 4, 5])
    b = admit(answer, pool, "B", [1, 2, 3, 4, 6], 1)
    answer.equal(pool.blocks[0].ref_count, 2)
    pool.free(a)
    answer.equal((pool.blocks[0].ref_count, 0 in pool.free_block_ids), (1, False))
    pool.free(b)
    answer.equal((pool.blocks[0].ref_count, 0 in pool.free_block_ids), (0, True))


def test_oracle__random_pools(answer: Answer) -> None:
    """The same counts and the same queue as a pool that keeps lists of holders."""
    for _ in range(80):
        random_workload(answer)


def test_boundary__shared_block_stays(answer: Answer) -> None:
    """A block is free when its last holder lets go and not before, in whatever order they do."""
    for order in ((0, 1, 2), (2, 1, 0), (1, 0, 2)):
        answer.story.clear()
        pool = setup(answer)
        seqs = [admit(answer, pool, "ABC"[i], [1, 2, 3, 4, 50 + i], i) for i in range(3)]
        for count, index in zip((2, 1, 0), order, strict=True):
            pool.free(seqs[index])
            answer.equal((pool.blocks[0].ref_count, 0 in pool.free_block_ids), (count, count == 0))


def test_boundary__found_again_in_the_free_queue(answer: Answer) -> None:
    """A free block that is found again leaves the queue from wherever it stands, and only on the first touch."""
    pool = setup(answer)
    a = admit(answer, pool, "A", [1, 2, 3, 4, 5])
    pool.free(a)
    queue = list(pool.free_block_ids)
    pool.touch(0, 1)
    queue.remove(0)
    answer.equal(list(pool.free_block_ids), queue, "The others keep their places.")
    pool.touch(0, 2)
    answer.equal((list(pool.free_block_ids), pool.blocks[0].ref_count), (queue, 2))
    answer.require(pool.blocks[0].hash is not None, "it cannot be found any more", "it stays findable")


def test_boundary__place_in_the_queue(answer: Answer) -> None:
    """Blocks are taken from the front: a findable one goes to the end, one that nobody can find to the front."""
    pool = setup(answer)
    a = admit(answer, pool, "A", [1, 2, 3, 4, 5])
    pool.release(a.block_table[0], 0)
    answer.equal(list(pool.free_block_ids), [2, 3, 4, 5, 0], "Block 0 is full and findable.")
    pool.release(a.block_table[1], 0)
    answer.equal(list(pool.free_block_ids), [1, 2, 3, 4, 5, 0], "Block 1 is partial, so nobody can find it.")


def test_boundary__a_hash_of_zero(answer: Answer) -> None:
    """Findable is what has a hash that is not None; 0 is a hash like any other."""
    answer.note("(with a hash_block that always returns 0)")
    zero: Mapping[str, Any] = {"BlockManager.hash_block": lambda parent_hash, token_ids: 0}
    pool = answer.build(BlockManager, 4, 4, label="pool", replaced=zero)
    a = admit(answer, pool, "A", [1, 2, 3, 4, 5])
    pool.free(a)
    answer.equal(list(pool.free_block_ids), [1, 2, 3, 0], "Block 0 has the hash 0, block 1 has none.")


def test_boundary__content_survives(answer: Answer) -> None:
    """Freeing a block does not forget its content: it is found again until it is given away."""
    pool = setup(answer)
    a = admit(answer, pool, "A", [1, 2, 3, 4, 5])
    pool.free(a)
    answer.equal(pool.match_prefix(make_sequence(answer, "B", [1, 2, 3, 4, 9], 4, 1)), [0])
    answer.equal(pool.blocks[0].token_ids, (1, 2, 3, 4))


def test_boundary__block_zero(answer: Answer) -> None:
    """Block 0 is a block like any other."""
    pool = setup(answer, num_blocks=1)
    a = admit(answer, pool, "A", [1, 2, 3])
    pool.release(0, 0)
    answer.equal((list(pool.free_block_ids), pool.blocks[0].ref_count), ([0], 0))
    a.block_table = ()
    pool.touch(0, 1)
    answer.equal((list(pool.free_block_ids), pool.blocks[0].ref_count), ([], 1))


def test_invariant__in_the_queue_if_and_only_if_not_held(answer: Answer) -> None:
    """A block is in the free queue exactly while nobody holds it, after every step; at the end all are free."""
    pool = setup(answer, num_blocks=12, block_size=2)
    seqs: dict[str, Any] = {}
    for number in range(4):
        label = f"S{number}"
        seqs[label] = admit(answer, pool, label, [1, 2, 3, 4, 5 + number % 2, 6, 7], number)
        whole(answer, pool, seqs)
    for label in ("S2", "S0", "S3", "S1"):
        pool.free(seqs.pop(label))
        whole(answer, pool, seqs)
    answer.equal(sorted(pool.free_block_ids), list(range(12)))
