"""TritonAttention: paged attention by the kernels of `triton_kernels`, for any GPU that Triton supports.

It chooses tile sizes and the number of splits and launches the kernels; the arithmetic is theirs. On a CPU it works
under Triton's interpreter only. It knows no model and no scheduler. Letters: T tokens, B rows, N heads, K kv heads,
H head dim.
"""

import math

import torch
from torch import Tensor

from nanovllm.attention.base import AttentionBackend, AttentionMetadata
from nanovllm.attention.triton_kernels import decode_kernel, interpreted, merge_kernel, prefill_kernel, store_kernel
from nanovllm.errors import ConfigError

# Measured on an H200 with 8 kv heads of 128 in bfloat16. Decoding 256 rows at context 585: tiles of 32 or 64 keys and
# one split read the cache at 4.2 TB/s, the fastest of 24 settings. Prefilling 29 prompts of 562 tokens: 156 us a layer
# with 64 queries a program, 207 with 128; flash-attn's paged kernel takes 197.
PROGRAMS_PER_CORE = 16
TILE_BYTES = 1 << 14


def next_power_of_two(n: int) -> int:
    """The smallest power of two that is at least n: 3 -> 4, 128 -> 128."""
    return 1 << max(n - 1, 0).bit_length()


class TritonAttention(AttentionBackend):
    """Paged attention in Triton. Any number of heads; head dims 32 to 256, others than powers of two masked."""

    name = "triton"
    capturable = True

    def __init__(self, num_heads: int, num_kv_heads: int, head_dim: int, scale: float, block_size: int) -> None:
        super().__init__(num_heads, num_kv_heads, head_dim, scale, block_size)
        self.group = num_heads // num_kv_heads
        self.padded_dim = max(next_power_of_two(head_dim), 16)

    def tile(self, dtype: torch.dtype) -> int:
        """Keys in one tile of at most 16 KiB of shared memory: 64 keys of 128 numbers in bfloat16; at least 16."""
        return min(max(TILE_BYTES // (self.padded_dim * dtype.itemsize), 16), 128)

    def num_splits(self, rows: int, device: torch.device) -> int:
        """How many programs share the context of one row and kv head, a power of two up to 64.

        A GPU is busy with some `PROGRAMS_PER_CORE` programs for each of its multiprocessors: with 8 kv heads on 132 of
        them, 1 row takes 64 splits, 16 rows 16, 256 rows 1. Only the number of rows counts and never their contexts, so
        that a captured graph serves all steps; a split behind the end of a short context ends at once.
        """
        cores = torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 4
        return min(next_power_of_two(max(PROGRAMS_PER_CORE * cores // (rows * self.num_kv_heads), 1)), 64)

    def store(self, k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slot_mapping: Tensor) -> None:
        check_layout(k, v, k_cache, v_cache)
        width = self.num_kv_heads * self.head_dim
        store_kernel[(k.shape[0],)](
            k, v, k_cache, v_cache, slot_mapping, k.stride(0), v.stride(0), WIDTH=width, PADDED=next_power_of_two(width)
        )  # fmt: skip

    def attend(self, q: Tensor, k_cache: Tensor, v_cache: Tensor, metadata: AttentionMetadata) -> Tensor:
        rows, decodes = metadata.context_lens.shape[0], metadata.num_decodes
        if decodes == rows:
            return self.decode(q, k_cache, v_cache, metadata.block_tables, metadata.context_lens)
        out = q.new_empty(q.shape)
        self.prefill(q, k_cache, v_cache, metadata, out)
        if decodes:
            tables, contexts = metadata.block_tables[:decodes], metadata.context_lens[:decodes]
            out[:decodes] = self.decode(q[:decodes], k_cache, v_cache, tables, contexts)
        return out

    def decode(self, q: Tensor, k_cache: Tensor, v_cache: Tensor, block_tables: Tensor, context_lens: Tensor) -> Tensor:
        """One query token per row: q [B, N, H] over the pages of block_tables [B, max_blocks] -> [B, N, H]."""
        check_layout(q, q, k_cache, v_cache)
        rows, (N, H) = q.shape[0], (self.num_heads, self.head_dim)
        tile, splits = self.tile(k_cache.dtype), self.num_splits(rows, q.device)
        out = q.new_empty(rows, N, H)
        # What the splits of a context leave to be merged: their results and log2 of their softmax sums. With one split
        # nothing is left, but the kernel still wants a pointer.
        part = q.new_empty((rows, N, splits, H), dtype=torch.float32) if splits > 1 else out
        lse = q.new_empty((rows, N, splits), dtype=torch.float32) if splits > 1 else out
        decode_kernel[(self.num_kv_heads, splits, rows)](
            q, k_cache, v_cache, block_tables, context_lens, out, part, lse,
            q.stride(0), block_tables.stride(0), self.scale * math.log2(math.e),
            K=self.num_kv_heads, GROUP=self.group, H=H, BLOCK_SIZE=self.block_size, SPLITS=splits, TILE=tile,
            GROUP_PADDED=max(next_power_of_two(self.group), 16), H_PADDED=self.padded_dim, num_warps=4, num_stages=3,
        )  # fmt: skip
        if splits > 1:
            # Few warps: those of a program wait for each other. 64 rows with 32 heads took 7.3 us by four, 2.4 by one.
            warps = max(splits * self.padded_dim // 4096, 1)
            merge_kernel[(N, rows)](part, lse, context_lens, out, N, H, splits, tile, self.padded_dim, num_warps=warps)
        return out

    def prefill(self, q: Tensor, k_cache: Tensor, v_cache: Tensor, metadata: AttentionMetadata, out: Tensor) -> None:
        """Any number of query tokens per row, for the rows behind the decodes: q [T, N, H] -> out [T, N, H]."""
        check_layout(q, out, k_cache, v_cache)
        rows = metadata.context_lens.shape[0] - metadata.num_decodes
        narrow = k_cache.dtype.itemsize == 2 and self.padded_dim <= 128  # then larger tiles fit
        queries = 64 if narrow else 32
        prefill_kernel[(-(-metadata.max_query_len // queries), self.num_heads, rows)](
            q, k_cache, v_cache, metadata.block_tables, metadata.context_lens, metadata.cu_seqlens_q, out,
            metadata.num_decodes, q.stride(0), out.stride(0), metadata.block_tables.stride(0),
            self.scale * math.log2(math.e),
            K=self.num_kv_heads, GROUP=self.group, H=self.head_dim, BLOCK_SIZE=self.block_size, QUERIES=queries,
            TILE=self.tile(k_cache.dtype), H_PADDED=self.padded_dim,
            num_warps=4, num_stages=3 if narrow else 2,
        )  # fmt: skip


def check_layout(a: Tensor, b: Tensor, k_cache: Tensor, v_cache: Tensor) -> None:
    """The kernels compute addresses themselves, so the layout is theirs to demand, and a CPU needs the interpreter."""
    assert k_cache.is_contiguous() and v_cache.is_contiguous(), "the cache of a layer is one piece"
    assert a.stride()[1:] == b.stride()[1:] == (a.shape[2], 1), "the heads of a token lie side by side"
    assert a.dtype == b.dtype == k_cache.dtype, "queries, keys, values and cache have one dtype"
    if not a.is_cuda and not interpreted():
        raise ConfigError(
            "the triton backend runs on a CPU only in Triton's interpreter: set the environment variable "
            'TRITON_INTERPRET=1 before triton is imported, or use attention_backend="torch"'
        )
