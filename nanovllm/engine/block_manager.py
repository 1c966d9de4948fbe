"""BlockManager: which KV block belongs to whom, which content can be found again, and which block goes next.

It hands out block *numbers*; the tensors behind them are the worker's business. Three ideas:

* **Paging.** A sequence takes fixed-size blocks as it grows, anywhere in the pool; its block table maps logical
  block i to a physical block. At most the last block of a sequence is partly empty.
* **Reference counts.** Sequences that begin alike hold the same blocks. A block is free when nobody holds it.
* **Prefix cache.** A full block is findable by a hash of its tokens *and of all tokens before it*. A freed block stays
  findable until it is taken for something else, so the cache costs no memory: it is what the free blocks still hold.

Source of the scheme: PagedAttention (Kwon et al., SOSP 2023) and vLLM's automatic prefix caching.
"""

from collections import OrderedDict
from collections.abc import Sequence as SequenceOf
from typing import Any

from nanovllm._html import ReprHTML
from nanovllm.engine.events import BlockEvent, BlockEventKind, BlockState
from nanovllm.engine.sequence import Sequence

NO_PARENT = 0  # what the first block of a sequence is chained to


class Block:
    """One physical block: `ref_count` holders, and the content it can be found by (`hash` None: not findable)."""

    __slots__ = ("block_id", "hash", "ref_count", "token_ids")

    def __init__(self, block_id: int) -> None:
        self.block_id = block_id
        self.ref_count = 0
        self.hash: int | None = None
        self.token_ids: tuple[int, ...] = ()

    def __repr__(self) -> str:
        return (
            f"Block({self.block_id}, ref_count={self.ref_count}, {'cached' if self.hash is not None else 'not cached'})"
        )


class BlockManager(ReprHTML):
    """The pool of `num_blocks` blocks of `block_size` tokens.

    INVARIANT: the free queue holds exactly the blocks with ref_count 0; the ref_counts sum to the lengths of all block
    tables; a block that is shared is full (or filled in the very step that shares it, by its first holder), so nobody
    writes into a block that another sequence has read.
    """

    def __init__(self, num_blocks: int, block_size: int, enable_prefix_caching: bool = True) -> None:
        assert num_blocks > 0 and block_size > 0, "a pool needs at least one block of at least one token"
        self.block_size = block_size
        self.enable_prefix_caching = enable_prefix_caching
        self.blocks = [Block(block_id) for block_id in range(num_blocks)]
        # Taken from the front. An ordered dict, because a prefix hit takes a free block out of the middle in O(1).
        self.free_block_ids: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_blocks))
        self.hash_to_block_id: dict[int, int] = {}
        self.num_query_tokens = 0  # tokens looked up in the prefix cache so far, at each admission ...
        self.num_hit_tokens = 0  # ... and how many of them were found
        self.journal: list[BlockEvent] | None = None  # filled only while somebody watches

    @property
    def num_blocks(self) -> int:
        return len(self.blocks)

    @property
    def num_free_blocks(self) -> int:
        return len(self.free_block_ids)

    @property
    def capacity(self) -> int:
        """Tokens that the whole pool holds."""
        return len(self.blocks) * self.block_size

    @staticmethod
    def blocks_needed(num_tokens: int, block_size: int) -> int:
        """Blocks that hold `num_tokens`: 8 tokens in blocks of 4 need 2, the ninth needs a third."""
        return -(-num_tokens // block_size)

    @staticmethod
    def hash_block(parent_hash: int, token_ids: SequenceOf[int]) -> int:
        """Hash of a full block that stands behind the block with `parent_hash` (`NO_PARENT`: at the beginning).

        The parent is in it because the key and value of a token depend on all tokens before it: (1, 2) behind (5, 6)
        and (1, 2) behind (7, 8) are different content.
        """
        return hash((parent_hash, tuple(token_ids)))

    def block_hash(self, seq: Sequence, index: int) -> int:
        """The chained hash of the sequence's full block `index`, computed once and kept on the sequence."""
        hashes = seq.block_hashes
        while len(hashes) <= index:
            parent = hashes[-1] if hashes else NO_PARENT
            hashes.append(self.hash_block(parent, seq.block(len(hashes))))
        return hashes[index]

    def match_prefix(self, seq: Sequence) -> list[int]:
        """Ids of the findable blocks that hold the beginning of the sequence: as many in a row as there are.

        At least one token is left to compute, because a step needs a query to give a next token: of 8 tokens in
        blocks of 4 only the first block may be taken from the cache. A hit is confirmed by comparing the tokens.
        """
        found: list[int] = []
        if self.enable_prefix_caching:
            for index in range((seq.num_tokens - 1) // self.block_size):
                block_id = self.hash_to_block_id.get(self.block_hash(seq, index))
                if block_id is None or self.blocks[block_id].token_ids != seq.block(index):
                    break
                found.append(block_id)
        return found

    def can_allocate(self, seq: Sequence) -> bool:
        """Whether all tokens of a waiting sequence find room now.

        A hit that somebody holds costs nothing; one that nobody holds is itself among the free blocks. Of a sequence
        of 6 blocks the first 2 are hits: it needs 4 free blocks, or 6 if nobody holds those two.
        """
        hits = self.match_prefix(seq)
        needed = self.blocks_needed(seq.num_tokens, self.block_size) - len(hits)
        free_hits = sum(block_id in self.free_block_ids for block_id in hits)  # these leave the free queue as well
        return needed + free_hits <= len(self.free_block_ids)

    def allocate(self, seq: Sequence) -> int:
        """Give a waiting sequence its blocks: cached ones first, then free ones. Returns the number of cached tokens.

        Needs `can_allocate`. The cached tokens are computed already: the sequence starts behind them.
        """
        assert not seq.block_table, f"sequence {seq.seq_id} already has blocks"
        hits = self.match_prefix(seq)
        # Hits are touched before anything is taken, or a free hit could be evicted to make room for this very sequence.
        for block_id in hits:
            self.touch(block_id, seq.seq_id)
        num_new = self.blocks_needed(seq.num_tokens, self.block_size) - len(hits)
        seq.block_table = (*hits, *(self.take_free_block(seq.seq_id) for _ in range(num_new)))
        seq.num_hashed_blocks = len(hits)
        seq.num_computed_tokens = len(hits) * self.block_size
        self.num_query_tokens += seq.num_tokens
        self.num_hit_tokens += seq.num_computed_tokens
        return seq.num_computed_tokens

    def can_append(self, seq: Sequence) -> bool:
        """Whether the slot of the sequence's last token exists, or a free block can provide it.

        The scheduler asks where a token opens or fills a block; about every token, if this or `append` is replaced.
        """
        return len(seq.block_table) * self.block_size >= len(seq.token_ids) or bool(self.free_block_ids)

    def append(self, seq: Sequence) -> None:
        """Provide the slot of the last token: a new block exactly when the token opens one (blocks of 4: the 5th)."""
        if len(seq.block_table) * self.block_size < len(seq.token_ids):
            seq.block_table += (self.take_free_block(seq.seq_id),)

    def cache_full_blocks(self, seq: Sequence, num_tokens: int) -> None:
        """Make the full blocks among the first `num_tokens` tokens findable.

        Called when those tokens are *scheduled*: every layer stores the keys of all rows before any row attends, so a
        request admitted later in the same step may already share them. Should the step fail, the engine resets the
        pool. Where the same content is findable already, this block stays unfindable and is simply freed later.
        """
        if not self.enable_prefix_caching:
            return
        for index in range(seq.num_hashed_blocks, num_tokens // self.block_size):
            block = self.blocks[seq.block_table[index]]
            block_hash = self.block_hash(seq, index)
            if block_hash not in self.hash_to_block_id and block.hash is None:
                block.hash, block.token_ids = block_hash, seq.block(index)
                self.hash_to_block_id[block_hash] = block.block_id
                self._log(BlockEventKind.CACHE, block, seq.seq_id)
        seq.num_hashed_blocks = max(seq.num_hashed_blocks, num_tokens // self.block_size)

    def free(self, seq: Sequence) -> None:
        """Let go of all blocks of a sequence, last first: its tail is then taken before its beginning.

        A later request is more likely to begin like this one than to equal all of it.
        """
        for block_id in reversed(seq.block_table):
            self.release(block_id, seq.seq_id)
        seq.block_table = ()
        seq.num_hashed_blocks = 0
        seq.num_computed_tokens = 0

    def take_free_block(self, seq_id: int) -> int:
        """The block at the front of the free queue, emptied of what it was findable by. Needs a free block."""
        block_id, _ = self.free_block_ids.popitem(last=False)
        block = self.blocks[block_id]
        assert block.ref_count == 0, f"block {block_id} is in the free queue and held {block.ref_count} times"
        self.evict(block)
        block.ref_count = 1
        self._log(BlockEventKind.ALLOCATE, block, seq_id)
        return block_id

    def evict(self, block: Block) -> None:
        """Make the block's content unfindable, if it was findable."""
        if block.hash is not None:
            del self.hash_to_block_id[block.hash]
            block.hash, block.token_ids = None, ()
            self._log(BlockEventKind.EVICT, block, None)

    def touch(self, block_id: int, seq_id: int) -> None:
        """One more holder of a findable block; a free one leaves the free queue, wherever it stands in it."""
        block = self.blocks[block_id]
        if block.ref_count == 0:
            del self.free_block_ids[block_id]
        block.ref_count += 1
        self._log(BlockEventKind.REUSE, block, seq_id)

    def release(self, block_id: int, seq_id: int | None) -> None:
        """One holder less; the last one frees the block.

        A findable block goes to the end of the free queue, so the least recently used is taken first.
        A block that nobody can find goes to the front: giving it away loses nothing.
        """
        block = self.blocks[block_id]
        assert block.ref_count > 0, f"block {block_id} was freed more often than it was taken"
        block.ref_count -= 1
        if block.ref_count == 0:
            self.free_block_ids[block_id] = None
            if block.hash is None:
                self.free_block_ids.move_to_end(block_id, last=False)
        self._log(BlockEventKind.RELEASE, block, seq_id)

    def reset(self) -> None:
        """Everything free and nothing findable: what is left after a step that failed half-way."""
        for block in self.blocks:
            if block.ref_count:
                block.ref_count = 0
                self._log(BlockEventKind.RELEASE, block, None)
            if block.hash is not None:
                block.hash, block.token_ids = None, ()
                self._log(BlockEventKind.EVICT, block, None)
        self.hash_to_block_id.clear()
        self.free_block_ids = OrderedDict.fromkeys(range(len(self.blocks)))

    def state(self) -> tuple[BlockState, ...]:
        """Immutable copies of all blocks for `LLMEngine.snapshot`."""
        return tuple(BlockState(b.block_id, b.ref_count, b.hash is not None, b.token_ids) for b in self.blocks)

    def _log(self, kind: BlockEventKind, block: Block, seq_id: int | None) -> None:
        if self.journal is not None:
            self.journal.append(BlockEvent(kind, block.block_id, seq_id, block.ref_count))

    def _repr_rows(self) -> list[tuple[str, Any]]:
        return [
            ("num_blocks", self.num_blocks),
            ("block_size", self.block_size),
            ("num_free_blocks", self.num_free_blocks),
            ("findable blocks", len(self.hash_to_block_id)),
            ("shared blocks", sum(block.ref_count > 1 for block in self.blocks)),
            ("prefix hits", f"{self.num_hit_tokens:,} of {self.num_query_tokens:,} tokens"),
        ]
