"""What every attention backend takes and returns. Letters: T tokens, B rows, N heads, K kv heads, H head dim.

The KV cache of one layer is two tensors `k_cache`, `v_cache` [num_blocks, block_size, K, H]. A token's *slot* is
`block_id * block_size + offset`: with block size 16, position 35 of a sequence whose block_table is (7, 2, 9) lies in
block 9 at offset 3, slot 9 * 16 + 3 = 147. Every backend first stores the new keys and values of *all* tokens of the
step and only then attends, so a row may read what another row of the same step has just written. (The compiled step of
a CPU goes 64 rows at a time, and may: rows that share blocks in a step read what those before them write.)
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, eq=False, slots=True)
class AttentionMetadata:
    """Where the keys of a step are and who may see them. Nothing is implied: every start and length is stated.

    Rows are the sequences of the step, in order; the first `num_decodes` of them have exactly one query token each. A
    row's queries are its tokens of this step, and the flat batch is all queries [T], row after row: row b has those
    from cu_seqlens_q[b] up to (not including) cu_seqlens_q[b + 1], query_len[b] of them. Its keys are the first
    context_lens[b] tokens of its block table, *including* this step's own, so its query i (counting from 0) sees the
    first context_lens[b] - query_len[b] + i + 1 of them. Two rows with 3 and 1 queries and contexts 5 and 8:
    cu_seqlens_q = [0, 3, 4]; query 0 of row 0 sees 3 keys, query 2 sees 5, the query of row 1 sees 8.
    """

    slot_mapping: Tensor  # [T] int64; -1: write nothing (padding)
    block_tables: Tensor  # [B, max_blocks] int32; entries behind a row's last block are not to be read
    context_lens: Tensor  # [B] int32; 0: a padded row, which reads nothing
    cu_seqlens_q: Tensor  # [B + 1] int32
    max_query_len: int
    max_context_len: int  # tokens; 0 in what a CUDA graph records, which serves contexts of every length
    num_decodes: int  # leading rows with one query each, the first num_decodes tokens; B in a decode step


class AttentionBackend(ABC):
    """Causal attention over paged keys and values. One instance serves all layers of a model."""

    name: str
    capturable = False  # whether a decode step can be recorded in a CUDA graph: no look at the device's values

    def __init__(self, num_heads: int, num_kv_heads: int, head_dim: int, scale: float, block_size: int) -> None:
        assert num_heads % num_kv_heads == 0, "every kv head serves the same number of heads"
        self.num_heads, self.num_kv_heads, self.head_dim = num_heads, num_kv_heads, head_dim
        self.scale, self.block_size = scale, block_size

    @abstractmethod
    def store(self, k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slot_mapping: Tensor) -> None:
        """Write k, v [T, K, H] into their slots; slot -1 writes nothing."""

    @abstractmethod
    def attend(self, q: Tensor, k_cache: Tensor, v_cache: Tensor, metadata: AttentionMetadata) -> Tensor:
        """Attention of q [T, N, H] over the cached keys and values: [T, N, H]. Padded rows: any finite value."""

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, metadata: AttentionMetadata
    ) -> Tensor:
        """Store, then attend: [T, N, H]."""
        self.store(k, v, k_cache, v_cache, metadata.slot_mapping)
        return self.attend(q, k_cache, v_cache, metadata)
