"""Grader of exercise 4.4: does a prompt fit, and which blocks does it get."""

from typing import Any

from nanovllm.engine.block_manager import BlockManager
from nanovllm.workbook.grading import Answer, type_of
from nanovllm.workbook.oracles.kv_cache import make_sequence, random_workload, whole


def setup(answer: Answer, num_blocks: int = 8, block_size: int = 4) -> Any:
    return answer.build(BlockManager, num_blocks, block_size, label="pool")


def admit(answer: Answer, pool: Any, label: str, tokens: list[int], seq_id: int = 0) -> Any:
    seq = make_sequence(answer, label, tokens, pool.block_size, seq_id)
    pool.allocate(seq)
    pool.cache_full_blocks(seq, len(tokens))
    return seq


def test_contract__types_and_what_is_set(answer: Answer) -> None:
    """can_allocate returns a bool and only looks; allocate returns an int and makes the block table a tuple."""
    pool = setup(answer)
    seq = make_sequence(answer, "A", [1, 2, 3, 4, 5], 4)
    got = pool.can_allocate(seq)
    answer.require(isinstance(got, bool), f"{got!r}, {type_of(got)}", "a bool")
    answer.equal(got, True, "5 tokens need two blocks of 4, and 8 blocks are free.")
    answer.equal(pool.can_allocate(seq), True, "Asked again, it answers the same.")
    answer.equal(len(pool.free_block_ids), 8, "can_allocate takes nothing.")
    answer.equal(seq.block_table, (), "can_allocate gives nothing.")
    answer.equal(pool.allocate(seq), 0, "It returns the number of tokens that were found in the cache, an int.")
    answer.require(isinstance(seq.block_table, tuple), type_of(seq.block_table), "a tuple as block_table")
    answer.equal(seq.block_table, (0, 1), "Two blocks for 5 tokens, from the front of the free queue.")
    rule = "Nothing was found in the cache: no block counts as hashed, no token as computed."
    answer.equal((seq.num_hashed_blocks, seq.num_computed_tokens), (0, 0), rule)
    answer.equal(seq.token_ids, [1, 2, 3, 4, 5], "The tokens stay as they are.")


def test_example__second_prompt_shares_the_first_block(answer: Answer) -> None:
    """A found block is held by both sequences and costs nothing; its tokens count as computed."""
    pool = setup(answer)
    admit(answer, pool, "A", [1, 2, 3, 4, 5, 6, 7, 8, 9, 10])
    b = make_sequence(answer, "B", [1, 2, 3, 4, 11, 12, 13, 14, 15], 4, 1)
    answer.equal(pool.can_allocate(b), True)
    answer.equal(pool.allocate(b), 4)
    answer.equal(b.block_table, (0, 3, 4))
    answer.equal((b.num_hashed_blocks, b.num_computed_tokens), (1, 4))
    answer.equal([pool.blocks[i].ref_count for i in range(5)], [2, 1, 1, 1, 1], "Both hold block 0.")
    answer.equal(list(pool.free_block_ids), [5, 6, 7])


def test_oracle__random_pools(answer: Answer) -> None:
    """The same answers, tables and queue as a pool that keeps plain lists."""
    for _ in range(80):
        random_workload(answer, heard=("reuse", "allocate"))


def test_boundary__exact_fit(answer: Answer) -> None:
    """As many free blocks as needed are enough, and an exact multiple of the block size needs no more."""
    pool = setup(answer, num_blocks=2)
    answer.equal(pool.can_allocate(make_sequence(answer, "A", list(range(8)), 4)), True)
    answer.equal(pool.can_allocate(make_sequence(answer, "B", list(range(9)), 4)), False)
    seq = make_sequence(answer, "C", list(range(8)), 4)
    pool.allocate(seq)
    answer.equal(len(seq.block_table), 2)
    answer.equal(pool.can_allocate(make_sequence(answer, "D", [99], 4)), False, "The pool is empty.")


def test_boundary__held_hit_costs_nothing(answer: Answer) -> None:
    """A hit that somebody holds is not taken from the free queue."""
    pool = setup(answer, num_blocks=4)
    admit(answer, pool, "A", [1, 2, 3, 4, 5, 6, 7, 8, 9])
    b = make_sequence(answer, "B", [1, 2, 3, 4, 5, 6, 7, 8, 10], 4, 1)
    answer.equal(pool.can_allocate(b), True, "Two hits are held by A, one block is missing, one is free.")
    answer.equal(pool.allocate(b), 8)
    answer.equal(b.block_table, (0, 1, 3))
    answer.equal(pool.can_allocate(make_sequence(answer, "C", [1, 2, 3, 4, 99], 4)), False)


def test_boundary__free_hit_counts_as_a_free_block(answer: Answer) -> None:
    """A hit that nobody holds is one of the free blocks: using it leaves one less."""
    pool = setup(answer, num_blocks=4)
    a = admit(answer, pool, "A", [1, 2, 3, 4, 5])
    pool.free(a)
    answer.equal(pool.can_allocate(make_sequence(answer, "B", [1, 2, 3, 4, *range(10, 22)], 4)), True)
    answer.equal(pool.can_allocate(make_sequence(answer, "C", [1, 2, 3, 4, *range(10, 23)], 4)), False)


def test_boundary__asking_leaves_the_queue_alone(answer: Answer) -> None:
    """can_allocate only looks, whether it says yes or no: free hits keep their places in the queue."""
    pool = setup(answer, num_blocks=6)
    first = admit(answer, pool, "A", [1, 2, 3, 4, 5, 6, 7, 8])
    second = admit(answer, pool, "B", [9, 9, 9, 9], 1)
    pool.free(first)
    pool.free(second)
    before = list(pool.free_block_ids), [block.ref_count for block in pool.blocks], pool.num_query_tokens
    for tokens, fits in (([1, 2, 3, 4, 5, 6, 7, 8, 0], True), ([1, 2, 3, 4, 5, 6, 7, 8, *range(30, 50)], False)):
        seq = make_sequence(answer, "C", tokens, 4, 2)
        answer.equal(pool.can_allocate(seq), fits)
        after = list(pool.free_block_ids), [block.ref_count for block in pool.blocks], pool.num_query_tokens
        answer.equal(after, before, "can_allocate changes nothing in the pool.")
        state = seq.block_table, seq.num_hashed_blocks, seq.num_computed_tokens
        answer.equal(state, ((), 0, 0), "can_allocate changes nothing in the sequence.")


def test_boundary__generated_tokens_count(answer: Answer) -> None:
    """A sequence that was preempted needs room for all of its tokens again, the generated ones too."""
    for num_blocks, fits in ((3, True), (2, False)):
        answer.story.clear()
        pool = setup(answer, num_blocks=num_blocks)
        seq = make_sequence(answer, "A", [1, 2, 3], 4)
        answer.note("then A generates 4 to 9, so it has 9 tokens")
        for token in range(4, 10):
            seq.raw.append_token(token)
        answer.equal(pool.can_allocate(seq), fits)
        if fits:
            answer.equal(pool.allocate(seq), 0)
            answer.equal(seq.block_table, (0, 1, 2))


def test_boundary__what_was_there_before(answer: Answer) -> None:
    """Progress is set, not added to: it starts at what the hits hold."""
    pool = setup(answer)
    admit(answer, pool, "A", [1, 2, 3, 4, 5])
    seq = make_sequence(answer, "B", [1, 2, 3, 4, 6], 4, 1)
    seq.num_computed_tokens = seq.num_hashed_blocks = 1
    answer.note("B.num_computed_tokens = B.num_hashed_blocks = 1, left from before")
    answer.equal(pool.allocate(seq), 4)
    answer.equal((seq.num_hashed_blocks, seq.num_computed_tokens), (1, 4))


def test_boundary__hits_are_not_given_away(answer: Answer) -> None:
    """Found blocks are secured before free ones are taken, or a hit is handed out as a new block."""
    pool = setup(answer, num_blocks=3)
    a = admit(answer, pool, "A", [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12])
    pool.free(a)
    answer.note(f"(free queue: {list(pool.free_block_ids)})")
    b = make_sequence(answer, "B", [1, 2, 3, 4, 5, 6, 7, 8, 21, 22, 23], 4, 1)
    answer.equal(pool.allocate(b), 8)
    answer.equal(b.block_table, (0, 1, 2))
    whole(answer, pool, {"B": b})
    pool.free(b)
    # The queue is 2, 1, 0 again or the like: now the one free hit stands in front of everything else.
    pool = setup(answer, num_blocks=2)
    a = admit(answer, pool, "A", [1, 2, 3, 4])
    c = make_sequence(answer, "C", [50, 51], 4, 2)
    pool.allocate(c)
    pool.free(a)
    pool.free(c)
    pool.take_free_block(9)
    d = make_sequence(answer, "D", [1, 2, 3], 4, 3)
    answer.equal(pool.can_allocate(d), True)


def test_boundary__hit_at_the_front_of_the_queue(answer: Answer) -> None:
    """A free hit at the very front of the queue is kept, and the new block comes from behind it."""
    pool = setup(answer, num_blocks=2)
    a = admit(answer, pool, "A", [1, 2, 3, 4])
    b = admit(answer, pool, "B", [5, 6, 7, 8], seq_id=1)
    pool.free(a)
    pool.free(b)
    answer.note(f"(free queue: {list(pool.free_block_ids)})")
    c = make_sequence(answer, "C", [1, 2, 3, 4, 9], 4, 2)
    answer.equal(pool.can_allocate(c), True)
    answer.equal(pool.allocate(c), 4)
    answer.equal(c.block_table, (0, 1))
    whole(answer, pool, {"C": c})


def test_boundary__full_hit_leaves_one_block_to_compute(answer: Answer) -> None:
    """A prompt that is cached from end to end computes its last block again, in a block of its own."""
    pool = setup(answer)
    a = admit(answer, pool, "A", [1, 2, 3, 4, 5, 6, 7, 8])
    b = make_sequence(answer, "B", [1, 2, 3, 4, 5, 6, 7, 8], 4, 1)
    answer.equal(pool.allocate(b), 4)
    answer.equal(b.block_table, (0, 2))
    answer.equal(b.num_computed_tokens, 4)
    answer.equal(a.block_table, (0, 1))


def test_invariant__three_share_and_all_let_go(answer: Answer) -> None:
    """ref_count = tables that hold the block, after every step; at the end everything is free."""
    pool = setup(answer, num_blocks=9, block_size=3)
    seqs: dict[str, Any] = {}
    for number in range(3):
        label = f"S{number}"
        seqs[label] = admit(answer, pool, label, [1, 2, 3, 4, 5, 6, 10 + number], number)
        whole(answer, pool, seqs)
    answer.equal([pool.blocks[i].ref_count for i in (0, 1)], [3, 3])
    for label in ("S1", "S0", "S2"):
        pool.free(seqs.pop(label))
        whole(answer, pool, seqs)
    answer.equal(len(pool.free_block_ids), 9, "Nothing may be lost.")


def test_invariant__answers_depend_on_the_pool_alone(answer: Answer) -> None:
    """Two pools side by side do not know of each other."""
    one, two = setup(answer, num_blocks=2), answer.build(BlockManager, 4, 4, label="other")
    a = admit(answer, one, "A", [1, 2, 3, 4, 5])
    b = make_sequence(answer, "B", [1, 2, 3, 4, 5], 4, 1)
    answer.equal(two.allocate(b), 0, "What one pool holds cannot be found in another.")
    answer.equal((a.block_table, b.block_table), ((0, 1), (0, 1)))
    answer.equal(one.can_allocate(make_sequence(answer, "C", [7], 4)), False)
    answer.equal(two.can_allocate(make_sequence(answer, "D", [7], 4)), True)
