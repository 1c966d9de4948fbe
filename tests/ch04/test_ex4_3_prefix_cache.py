"""Grader of exercise 4.3: hashes with parents, full blocks only, and a longest run that leaves a token."""

from collections.abc import Callable, Mapping
from typing import Any

from nanovllm.engine.block_manager import BlockManager
from nanovllm.workbook.grading import Answer
from nanovllm.workbook.oracles.kv_cache import make_sequence, random_workload, whole


def setup(answer: Answer, num_blocks: int = 8, block_size: int = 4, **options: Any) -> Any:
    return answer.build(BlockManager, num_blocks, block_size, label="pool", **options)


def admit(answer: Answer, pool: Any, label: str, tokens: list[int], announce: int | None = None) -> Any:
    """A sequence with blocks, of which the first `announce` tokens were told to the cache."""
    seq = make_sequence(answer, label, tokens, pool.block_size)
    pool.allocate(seq)
    if announce is not None:
        pool.cache_full_blocks(seq, announce)
    return seq


def test_contract__hash_is_an_int_of_content(answer: Answer) -> None:
    """Equal content gives an equal int, whether the tokens come as a list or a tuple."""
    first = answer.call("hash_block", 0, [5, 6, 7])
    answer.require(isinstance(first, int) and not isinstance(first, bool), first, "an int")
    answer.require(answer.call("hash_block", 0, (5, 6, 7)) == first, "another hash for a tuple", "the same hash")
    answer.require(answer.call("hash_block", 0, [5, 6, 7]) == first, "another hash the second time", "the same hash")


def test_contract__looking_changes_nothing(answer: Answer) -> None:
    """match_prefix only looks: it takes no block and counts no holder."""
    pool = setup(answer)
    admit(answer, pool, "A", [1, 2, 3, 4, 5, 6], announce=6)
    before = [block.ref_count for block in pool.blocks], list(pool.free_block_ids)
    seq = make_sequence(answer, "B", [1, 2, 3, 4, 9], 4)
    found = pool.match_prefix(seq)
    answer.require(isinstance(found, list), f"a {type(found).__name__}", "a list")
    answer.equal(([block.ref_count for block in pool.blocks], list(pool.free_block_ids)), before)
    answer.equal(pool.match_prefix(seq), found, "Asked again, it answers the same.")
    answer.equal(seq.block_table, ())


def test_example__one_block_in_common(answer: Answer) -> None:
    """Sequences that begin alike share the full blocks of what they have in common."""
    pool = setup(answer)
    a = admit(answer, pool, "A", [1, 2, 3, 4, 5, 6, 7, 8, 9, 10], announce=10)
    b = make_sequence(answer, "B", [1, 2, 3, 4, 5, 6, 7, 9, 9, 10], 4)
    answer.equal(pool.match_prefix(b), [a.block_table[0]])
    c = make_sequence(answer, "C", [1, 2, 3, 4, 5, 6, 7, 8, 0], 4)
    answer.equal(pool.match_prefix(c), list(a.block_table[:2]))
    answer.equal(a.num_hashed_blocks, 2, "num_hashed_blocks covers all full blocks that the cache was told of.")


def test_oracle__random_pools(answer: Answer) -> None:
    """What is found is what a search through all whole prefixes finds."""
    for _ in range(60):
        random_workload(answer)


def test_oracle__no_two_contents_alike(answer: Answer) -> None:
    """Different tokens, a different order of tokens, or a different parent: a different hash."""
    seen: dict[int, tuple[int, tuple[int, ...]]] = {}
    for parent in (0, 1, 2, 7, 10**9):
        few = [(), (0,), (1,), (2,), (12,), (0, 0), (1, 2), (2, 1), (1, 1), (2, 2), (3, 0), (1, 2, 3), (3, 2, 1)]
        for tokens in few:
            answer.story.clear()
            value = answer.call("hash_block", parent, tokens)
            other = seen.setdefault(value, (parent, tokens))
            answer.require(other == (parent, tokens), f"the same hash for {other}", "a hash of its own")


def test_boundary__same_tokens_behind_other_tokens(answer: Answer) -> None:
    """A block's hash contains its parent's: the same tokens behind other tokens are other content."""
    pool = setup(answer, block_size=2)
    admit(answer, pool, "A", [5, 6, 1, 2, 9], announce=5)
    admit(answer, pool, "B", [7, 8, 3, 4, 9], announce=5)
    answer.equal(pool.match_prefix(make_sequence(answer, "C", [7, 8, 1, 2, 9], 2)), [3])
    answer.equal(pool.match_prefix(make_sequence(answer, "D", [1, 2, 5, 6, 9], 2)), [])


def test_boundary__blocks_in_another_order(answer: Answer) -> None:
    """The chain has an order: the same blocks the other way round are other content."""
    hash_block: Callable[[int, list[int]], int] = answer.hash_block
    answer.note("hash_block(hash_block(0, [1, 2]), [3, 4]) against hash_block(hash_block(0, [3, 4]), [1, 2])")
    one, two = hash_block(hash_block(0, [1, 2]), [3, 4]), hash_block(hash_block(0, [3, 4]), [1, 2])
    answer.require(one != two, "the same hash", "two hashes")
    answer.note("hash_block(hash_block(0, [1, 2]), [1, 2]) against hash_block(0, [1, 2])")
    one, two = hash_block(hash_block(0, [1, 2]), [1, 2]), hash_block(0, [1, 2])
    answer.require(one != two, "the same hash", "two hashes")


def test_boundary__partial_block_is_not_findable(answer: Answer) -> None:
    """Only a full block may be found: into the last one, its sequence will still write."""
    pool = setup(answer)
    a = admit(answer, pool, "A", [1, 2, 3, 4, 5, 6], announce=6)
    answer.equal([block.block_id for block in pool.blocks if block.hash is not None], [a.block_table[0]])
    answer.equal(len(pool.hash_to_block_id), 1)
    answer.equal(a.num_hashed_blocks, 1)
    pool.cache_full_blocks(a, 3)
    answer.equal(a.num_hashed_blocks, 1, "num_hashed_blocks never goes back.")


def test_boundary__only_what_was_computed(answer: Answer) -> None:
    """Of a prompt that is computed in chunks, only the blocks that the chunks have filled are findable."""
    pool = setup(answer)
    a = admit(answer, pool, "A", list(range(1, 14)), announce=7)
    b = make_sequence(answer, "B", list(range(1, 14)), 4)
    answer.equal(pool.match_prefix(b), [a.block_table[0]])
    pool.cache_full_blocks(a, 8)
    answer.equal(pool.match_prefix(b), list(a.block_table[:2]), "8 tokens fill two blocks of 4.")
    pool.cache_full_blocks(a, 13)
    answer.equal(pool.match_prefix(b), list(a.block_table[:3]))


def test_boundary__one_token_is_left_to_compute(answer: Answer) -> None:
    """However much is cached, at least one token is computed, or there is no row to read the next token from."""
    pool = setup(answer)
    a = admit(answer, pool, "A", [1, 2, 3, 4, 5, 6, 7, 8], announce=8)
    answer.equal(pool.match_prefix(make_sequence(answer, "B", [1, 2, 3, 4, 5, 6, 7, 8], 4)), [a.block_table[0]])
    answer.equal(pool.match_prefix(make_sequence(answer, "C", [1, 2, 3, 4, 5, 6, 7, 8, 9], 4)), list(a.block_table))
    answer.equal(pool.match_prefix(make_sequence(answer, "D", [1, 2, 3, 4], 4)), [])
    answer.equal(pool.match_prefix(make_sequence(answer, "E", [1], 4)), [])


def test_boundary__run_ends_at_the_first_gap(answer: Answer) -> None:
    """Behind a block that is not found nothing counts: its keys would stand without what is in front of them."""
    pool = setup(answer)
    a = admit(answer, pool, "A", list(range(1, 14)), announce=13)
    pool.evict(pool.blocks[a.block_table[1]])
    answer.equal(pool.match_prefix(make_sequence(answer, "B", list(range(1, 14)), 4)), [a.block_table[0]])


def test_boundary__collision(answer: Answer) -> None:
    """A hit is confirmed by comparing tokens: two contents may have the same hash."""
    replaced: Mapping[str, Any] = {"BlockManager.hash_block": lambda parent_hash, token_ids: 7}
    answer.note("(with a hash_block that always returns 7)")
    pool = answer.build(BlockManager, 8, 4, label="pool", replaced=replaced)
    a = admit(answer, pool, "A", [1, 2, 3, 4, 5], announce=5)
    answer.equal(pool.match_prefix(make_sequence(answer, "B", [9, 9, 9, 9, 5], 4)), [])
    answer.equal(pool.match_prefix(make_sequence(answer, "C", [1, 2, 3, 4, 6], 4)), [a.block_table[0]])


def test_boundary__same_content_twice(answer: Answer) -> None:
    """Where the content can be found already, the block that is found stays the one to find."""
    pool = setup(answer)
    a = make_sequence(answer, "A", [1, 2, 3, 4, 5], 4)
    b = make_sequence(answer, "B", [1, 2, 3, 4, 6], 4)
    pool.allocate(a)
    pool.allocate(b)
    pool.cache_full_blocks(a, 5)
    pool.cache_full_blocks(b, 5)
    answer.equal(pool.match_prefix(make_sequence(answer, "C", [1, 2, 3, 4, 7], 4)), [a.block_table[0]])
    answer.equal([block.block_id for block in pool.blocks if block.hash is not None], [a.block_table[0]])
    answer.equal(b.num_hashed_blocks, 1, "The block was handled, though another one is found in its place.")


def test_boundary__switched_off(answer: Answer) -> None:
    """Without prefix caching nothing is announced and nothing is found."""
    pool = setup(answer, enable_prefix_caching=False)
    admit(answer, pool, "A", [1, 2, 3, 4, 5], announce=5)
    answer.equal(len(pool.hash_to_block_id), 0)
    answer.equal([block.hash for block in pool.blocks], [None] * 8)
    answer.equal(pool.match_prefix(make_sequence(answer, "B", [1, 2, 3, 4, 5], 4)), [])


def test_boundary__switched_off_later(answer: Answer) -> None:
    """With prefix caching switched off, even what is in the cache is not used."""
    pool = setup(answer)
    admit(answer, pool, "A", [1, 2, 3, 4, 5], announce=5)
    pool.enable_prefix_caching = False
    answer.note("pool.enable_prefix_caching = False")
    answer.equal(pool.match_prefix(make_sequence(answer, "B", [1, 2, 3, 4, 5], 4)), [])


def test_invariant__blocks_and_table_agree(answer: Answer) -> None:
    """Block and hash table always agree: each findable block is found by its own hash and holds its own tokens."""
    pool = setup(answer, num_blocks=12, block_size=3)
    seqs = {}
    for number in range(3):
        tokens = [1, 2, 3, 4, 5, 6, number, number, 7, 8]
        seqs[f"S{number}"] = seq = admit(answer, pool, f"S{number}", tokens)
        for end in (2, 3, 7, 10):
            pool.cache_full_blocks(seq, end)
            whole(answer, pool, seqs)
            for index in range(end // 3):
                block = pool.blocks[seq.block_table[index]]
                if block.hash is not None:
                    own = tuple(tokens[3 * index : 3 * index + 3])
                    answer.equal(block.token_ids, own, "A block holds its own tokens.")
