"""Grader of exercise 4.3: hashes with parents, full blocks only, and a longest run that leaves a token."""

import inspect
import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from typing import Any

from nanovllm.engine.block_manager import BlockManager
from nanovllm.workbook.grading import Answer, type_of
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
    answer.require(isinstance(found, list), type_of(found), "a list")
    answer.equal(([block.ref_count for block in pool.blocks], list(pool.free_block_ids)), before)
    answer.equal(pool.match_prefix(seq), found, "Asked again, it answers the same.")
    state = seq.block_table, seq.num_hashed_blocks, seq.num_computed_tokens, seq.num_cached_tokens
    answer.equal(state, ((), 0, 0, 0), "Looking gives the sequence nothing.")


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
        random_workload(answer, heard=("cache",))


def test_oracle__many_contents(answer: Answer) -> None:
    """Thousands of contents have hashes of their own: where two agree, the wrong keys may be read."""
    answer.note("hash_block(parent, tokens) of 3,000 different contents")
    seen: dict[int, tuple[int, tuple[int, ...]]] = {}
    for number in range(3000):
        parent = answer.rng.choice([0, 1, answer.rng.randrange(2**60)])
        tokens = (number % 50, answer.rng.randrange(4), number // 50, answer.rng.randrange(50_000))
        other = seen.setdefault(answer.hash_block(parent, tokens), (parent, tokens))
        same = f"the same hash for {other} and {(parent, tokens)}"
        answer.require(other == (parent, tokens), same, "a hash of its own for each")


def test_oracle__every_token_counts(answer: Answer) -> None:
    """Blocks of 256 tokens that differ in one of them, wherever that stands, are different content."""
    tokens = list(range(1000, 1256))
    answer.note("hash_block(0, [1000, 1001, ... 1255]), and with one of the tokens exchanged")
    whole_hash = answer.hash_block(0, tokens)
    for place in range(256):
        other = [*tokens[:place], 7, *tokens[place + 1 :]]
        differs = answer.hash_block(0, other) != whole_hash
        answer.require(differs, f"the same hash with another token {place}", "another hash")


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
    # The same where the block with those tokens is the pool's last one, which Python also finds as number -1.
    pool = setup(answer, num_blocks=2, block_size=2)
    admit(answer, pool, "E", [5, 6, 1, 2], announce=4)
    answer.equal(pool.match_prefix(make_sequence(answer, "F", [1, 2, 9], 2)), [])


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


def test_boundary__collision_further_on(answer: Answer) -> None:
    """Every block of the run is confirmed by all of its tokens, the first one, the last one and those between."""
    for value in (7, 0):
        replaced: Mapping[str, Any] = {"BlockManager.hash_block": collide(value)}
        answer.story.clear()
        answer.note(f"(with a hash_block that returns {value} for blocks that begin with 5, and a sum for others)")
        pool = answer.build(BlockManager, 12, 2, label="pool", replaced=replaced)
        a = admit(answer, pool, "A", [1, 2, 5, 6, 3, 4, 9], announce=7)
        for tokens, hits in (
            ([1, 2, 5, 8, 3, 4, 9], 1),
            ([1, 2, 5, 6, 3, 4, 9], 3),
            ([5, 7, 5, 6, 9], 0),
            ([1, 2, 5, 7, 9], 1),
        ):
            b = make_sequence(answer, "B", tokens, 2)
            answer.equal(pool.match_prefix(b), list(a.block_table[:hits]))


def collide(value: int) -> Callable[[int, Any], int]:
    """A hash with collisions between contents that begin with 5."""
    return lambda parent_hash, token_ids: value if token_ids[0] == 5 else 100 + sum(token_ids)


def test_boundary__generated_tokens_count(answer: Answer) -> None:
    """The beginning of a sequence is that of all its tokens: one that was preempted finds what it generated, too."""
    pool = setup(answer)
    a = admit(answer, pool, "A", list(range(1, 14)), announce=13)
    b = make_sequence(answer, "B", [1, 2, 3], 4)
    answer.note("then B generates 4 to 12, and then 13")
    for token in range(4, 13):
        b.raw.append_token(token)
    answer.equal(pool.match_prefix(b), list(a.block_table[:2]))
    b.raw.append_token(13)
    answer.equal(pool.match_prefix(b), list(a.block_table[:3]))


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
    a = admit(answer, pool, "A", [1, 2, 3, 4, 5], announce=5)
    answer.equal(a.num_hashed_blocks, 0, "Switched off, cache_full_blocks does nothing.")
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


def test_boundary__another_process(answer: Answer) -> None:
    """A hash depends on nothing but its arguments: in another process it is the same (Python's hash of text is not)."""
    cases: list[tuple[int, list[int]]] = [(12345, [9, 8, 7]), (0, [5, 6]), (0, [])]
    here = [answer.hash_block(*case) for case in reversed(cases)][::-1]
    where = answer.parts.replacements.get("BlockManager.hash_block")
    if not isinstance(where, str):  # the shipped engine's
        where = f"{inspect.getsourcefile(BlockManager)}::BlockManager.hash_block"
    script = (
        "import json, sys; from nanovllm.engine.parts import load_object; hash_block = load_object(sys.argv[1]); "
        "print(); print(json.dumps([hash_block(*case) for case in json.loads(sys.argv[2])]))"
    )
    seed = "1" if os.environ.get("PYTHONHASHSEED") != "1" else "2"
    environment = {**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    command = [sys.executable, "-c", script, where, json.dumps(cases)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    answer.note("hash_block(12345, [9, 8, 7]), here and in a new process")
    said = done.stderr.strip().splitlines()[-1:] or ["nothing"]
    answer.require(done.returncode == 0, f"in a new process: {said[0]}", "no error")
    there = json.loads(done.stdout.splitlines()[-1])
    answer.require(there == here, f"{here[0]} here, {there[0]} there", "the same")
