"""Chapter 4: the KV cache in blocks. Seven pieces of the block manager, each a part of the real engine.

Functions whose first argument is `self` are methods: they run inside the engine's own `BlockManager` (or `Sequence`),
and whatever they call on `self` is there. What you may use:

    self.blocks[i]            block i: .block_id, .ref_count (its holders), .hash and .token_ids (what it is found by)
    self.free_block_ids       the free queue, an OrderedDict whose keys are block ids; taken from the front
    self.hash_to_block_id     hash -> id of the block with that content (the prefix cache)
    self.block_size
    seq.token_ids             all tokens of a sequence; seq.num_tokens is their number
    seq.block(i)              the tokens of its logical block i, as a tuple
    seq.block_table           tuple: logical block i lies in physical block block_table[i]

Lines with `self._log(...)` tell the live views what happened; they are there already.
"""

from collections.abc import Sequence as SequenceOf

from nanovllm.engine.block_manager import Block, BlockManager
from nanovllm.engine.events import BlockEventKind
from nanovllm.engine.sequence import Sequence
from nanovllm.workbook import ExerciseTodo


def blocks_needed(num_tokens: int, block_size: int) -> int:
    """Exercise 4.1. The number of blocks that hold `num_tokens` tokens, `block_size` to a block.

    >>> blocks_needed(5, 4)
    2
    >>> blocks_needed(8, 4)
    2

    num_tokens is 0 or more. The answer is an int, and exact for numbers of any size.
    """
    # --- your code (4.1) ---
    raise ExerciseTodo("4.1")
    # --- end ---


def slot_mapping(self: Sequence, start: int, stop: int) -> list[int]:
    """Exercise 4.2. The slots of the positions start, start + 1, ... stop - 1: where their keys and values go.

    The pool is one long row of slots, and block b owns the slots b * block_size to (b + 1) * block_size - 1. With
    block size 4 and block table (7, 2), position 3 is the last slot of block 7 and position 4 the first of block 2:

    >>> seq.slot_mapping(3, 6)
    [31, 8, 9]

    `self.block_size` and `self.block_table` are all that is needed. An empty range gives an empty list.
    """
    # --- your code (4.2) ---
    raise ExerciseTodo("4.2")
    # --- end ---


def hash_block(parent_hash: int, token_ids: SequenceOf[int]) -> int:
    """Exercise 4.3, part one. What a full block is found by.

    A key depends on every token before it, so two blocks may be shared only if their own tokens *and everything in
    front of them* agree. `parent_hash` is the hash of the block in front (0 for the first block of a sequence).

    >>> hash_block(0, [5, 6]) == hash_block(0, (5, 6))
    True
    >>> hash_block(hash_block(0, [5, 6]), [1, 2]) == hash_block(hash_block(0, [7, 8]), [1, 2])
    False

    Returns an int that depends on nothing but the two arguments.
    """
    # --- your code (4.3) ---
    raise ExerciseTodo("4.3")
    # --- end ---


def cache_full_blocks(self: BlockManager, seq: Sequence, num_tokens: int) -> None:
    """Exercise 4.3, part two. Make the full blocks among the first `num_tokens` tokens of `seq` findable.

    With block size 4 and num_tokens = 10, logical blocks 0 and 1 are full; block 2 holds only two tokens, more will be
    written into it, so nobody may find it. The first `seq.num_hashed_blocks` blocks were handled before; at the end
    that number covers all full blocks.

    To make a block findable, set its `.hash` (`self.block_hash(seq, index)` chains `hash_block` for you) and
    `.token_ids`, enter it in `self.hash_to_block_id`, and report it to the live views through `self._log`: its kind
    (`BlockEventKind.CACHE`), the block, and the seq_id. Where the same content is findable in another block already,
    that one stays the one to find, and this block stays as it is. Does nothing unless `self.enable_prefix_caching`.
    """
    # --- your code (4.3) ---
    raise ExerciseTodo("4.3")
    # --- end ---


def match_prefix(self: BlockManager, seq: Sequence) -> list[int]:
    """Exercise 4.3, part three. The findable blocks that hold the beginning of `seq`: the longest run from its start.

    * A hash may collide: it is a hit only if the found block's `.token_ids` are the sequence's own.
    * The run ends at the first block that is not found.
    * At least one token must be left to compute, because the next token is read off a computed row: of 8 tokens in
      blocks of 4, at most the first block may come from the cache; of 9, two.

    Returns block ids and changes nothing. Without `self.enable_prefix_caching` it finds nothing.
    """
    # --- your code (4.3) ---
    raise ExerciseTodo("4.3")
    # --- end ---


def can_allocate(self: BlockManager, seq: Sequence) -> bool:
    """Exercise 4.4, part one. Whether a waiting sequence finds room for all of its tokens now.

    Blocks found by ``self.match_prefix(seq)`` need not be taken from the free queue, unless that is where they lie: a
    hit with ref_count 0 is free *until it is used again*, and then it is one free block less.

    A sequence of 10 tokens in blocks of 4 needs 3 blocks. If its first block is found and somebody holds it, 2 free
    blocks are enough; if it is found and nobody holds it, 3 are needed. Changes nothing.
    """
    # --- your code (4.4) ---
    raise ExerciseTodo("4.4")
    # --- end ---


def allocate(self: BlockManager, seq: Sequence) -> int:
    """Exercise 4.4, part two. Give a waiting sequence its blocks: found ones first, then free ones.

    Called only after `can_allocate` said yes. The pool has `touch(block_id, seq_id)` for a found block (one more
    holder) and `take_free_block(seq_id)` for a new one (it returns the id of the block at the front of the free
    queue). A found block may lie in the free queue: take care that it is not given away on the way.

    Sets `seq.block_table` (a tuple), `seq.num_hashed_blocks` (blocks that are findable already: the hits) and
    `seq.num_computed_tokens` (tokens that need not be computed). Returns the number of those tokens.
    """
    assert not seq.block_table, f"sequence {seq.seq_id} already has blocks"
    # --- your code (4.4) ---
    raise ExerciseTodo("4.4")
    # --- end ---
    self.num_query_tokens += seq.num_tokens
    self.num_hit_tokens += seq.num_computed_tokens
    return seq.num_computed_tokens


def can_append(self: BlockManager, seq: Sequence) -> bool:
    """Exercise 4.5, part one. Whether there is, or can be, a slot for the last token of a running sequence.

    The last token was just sampled, and its key and value are about to be written. With blocks of 4 and one block held,
    tokens 1 to 4 have slots; the fifth needs a second block, which takes a free one. Changes nothing.
    """
    # --- your code (4.5) ---
    raise ExerciseTodo("4.5")
    # --- end ---


def append(self: BlockManager, seq: Sequence) -> None:
    """Exercise 4.5, part two. Provide the slot of the last token, after `can_append` said yes.

    If the token has a slot, nothing happens; else the pool's `take_free_block(seq_id)` gives a block, whose id
    goes to the end of `seq.block_table` (a tuple, so make a new one).

    Blocks of 4, block_table (3,): with 4 tokens it stays (3,); with 5 it becomes (3, b).
    """
    # --- your code (4.5) ---
    raise ExerciseTodo("4.5")
    # --- end ---


def touch(self: BlockManager, block_id: int, seq_id: int) -> None:
    """Exercise 4.6, part one. One more holder of a block that was found in the prefix cache.

    If nobody held it so far, it lies somewhere in the free queue, and has to leave it.
    """
    block = self.blocks[block_id]
    # --- your code (4.6) ---
    raise ExerciseTodo("4.6")
    # --- end ---
    self._log(BlockEventKind.REUSE, block, seq_id)


def release(self: BlockManager, block_id: int, seq_id: int | None) -> None:
    """Exercise 4.6, part two. One holder less. The block is free when the last one lets go, and not before.

    Where does it go in the free queue? Blocks are taken from the front. A findable block (`.hash` is not None) may be
    of use again, so it goes to the end; a block that nobody can find is given away first: it goes to the front.
    The content stays findable.
    """
    block = self.blocks[block_id]
    assert block.ref_count > 0, f"block {block_id} was freed more often than it was taken"
    # --- your code (4.6) ---
    raise ExerciseTodo("4.6")
    # --- end ---
    self._log(BlockEventKind.RELEASE, block, seq_id)


def free(self: BlockManager, seq: Sequence) -> None:
    """Exercise 4.7, part one. Let go of all blocks of a sequence, through the pool's `release(block_id, seq_id)`.

    The order counts, because released blocks queue up to be given away: the *end* of the sequence should be lost
    before its beginning, since a later request is more likely to begin like this one than to equal all of it.
    Afterwards the sequence holds nothing: block_table is (), num_hashed_blocks and num_computed_tokens are 0.
    """
    # --- your code (4.7) ---
    raise ExerciseTodo("4.7")
    # --- end ---


def evict(self: BlockManager, block: Block) -> None:
    """Exercise 4.7, part two. Make a block's content unfindable, because the block is about to hold something else.

    Afterwards `.hash` is None, `.token_ids` is (), and `self.hash_to_block_id` knows nothing of it. A block that was
    not findable stays as it is (and nothing is logged for it).
    """
    if block.hash is None:
        return
    # --- your code (4.7) ---
    raise ExerciseTodo("4.7")
    # --- end ---
    self._log(BlockEventKind.EVICT, block, None)


def take_free_block(self: BlockManager, seq_id: int) -> int:
    """Exercise 4.7, part three. Take the block at the front of the free queue for a sequence, and return its id.

    That is the block which was not needed for longest. Whatever it was findable by is given up (`evict` does that), and
    it has one holder now. There is a free block: the caller asked before.
    """
    # --- your code (4.7) ---
    raise ExerciseTodo("4.7")
    # --- end ---
    self._log(BlockEventKind.ALLOCATE, self.blocks[block_id], seq_id)
    return block_id
