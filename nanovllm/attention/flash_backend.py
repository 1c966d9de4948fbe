"""FlashAttention: flash-attn 2 on paged keys and values (NVIDIA Ampere or newer, block size a multiple of 256).

Prompt chunks, with or without a cached prefix, go through `flash_attn_varlen_func` with a block table. flash-attn does
not store keys, so `store` is the Triton backend's, and so is `decode`: on an H200 (256 rows at context 585, 8 kv heads
of 128) that kernel reads the cache at 4.2 TB/s and `flash_attn_with_kvcache` at 3.7. The package's call stands here
beside it, as `decode_by_kvcache`.
"""

import torch
import torch.nn.functional as F
from flash_attn import flash_attn_varlen_func, flash_attn_with_kvcache
from torch import Tensor

from nanovllm.attention.base import AttentionMetadata
from nanovllm.attention.triton_backend import TritonAttention


class FlashAttention(TritonAttention):
    """flash-attn 2 over pages (Dao, 2023). bfloat16 and float16."""

    name = "flash"

    def decode_by_kvcache(
        self, q: Tensor, k_cache: Tensor, v_cache: Tensor, block_tables: Tensor, context_lens: Tensor
    ) -> Tensor:
        """One query token per row: q [B, N, H] -> [B, N, H]. A context of 0 yields zeros.

        To decode by it: `Parts({"FlashAttention.decode": FlashAttention.decode_by_kvcache})`.
        """
        out: Tensor = flash_attn_with_kvcache(
            q[:, None], k_cache, v_cache, cache_seqlens=context_lens, block_table=block_tables,
            softmax_scale=self.scale, causal=True,
        )  # fmt: skip
        return out[:, 0]

    def prefill(self, q: Tensor, k_cache: Tensor, v_cache: Tensor, metadata: AttentionMetadata, out: Tensor) -> None:
        """The rows behind the decodes: q [T, N, H] -> out [T, N, H]; the last query sees all keys.

        With one decode before rows of 3 and 2 queries, cu_seqlens_q is [0, 1, 4, 6]; the rows' own is [0, 3, 5].
        """
        first = metadata.num_decodes
        contexts = metadata.context_lens[first:]
        out[first:] = flash_attn_varlen_func(
            q[first:], k_cache, v_cache,
            cu_seqlens_q=metadata.cu_seqlens_q[first:] - first,
            cu_seqlens_k=F.pad(contexts.cumsum(0, dtype=torch.int32), (1, 0)),
            max_seqlen_q=metadata.max_query_len, max_seqlen_k=metadata.max_context_len,
            softmax_scale=self.scale, causal=True, block_table=metadata.block_tables[first:],
        )  # fmt: skip
