"""Attention in plain PyTorch: the oracle that every other backend is tested against, and what a CPU runs.

It knows no kernels. Decode rows are one batched product over gathered keys; prefill rows go through
`scaled_dot_product_attention` one by one, since they share no length. Softmax and sums are float32 inside it.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from nanovllm.attention.base import AttentionBackend, AttentionMetadata


@dataclass(frozen=True, eq=False, slots=True)
class PrefillRow:
    """One row's queries, and the slots of its keys in the flat cache."""

    start: int  # its queries are start to end of the flat batch
    end: int
    slots: Tensor  # [context_len]
    mask: Tensor | None  # [end - start, context_len], True: may be seen; None: causal from the first key on


@dataclass(frozen=True, eq=False, slots=True)
class Plan:
    """What all layers of a step have in common."""

    metadata: AttentionMetadata
    decode_slots: Tensor  # [num_decodes, S]; a row shorter than S repeats its last slot
    decode_mask: Tensor  # [num_decodes, 1, 1, S], True: a key of this row
    prefill_rows: list[PrefillRow]


class TorchAttention(AttentionBackend):
    """See the module. Any device and dtype, any block size, heads and head dim; cannot be captured in a CUDA graph."""

    name = "torch"

    def __init__(self, num_heads: int, num_kv_heads: int, head_dim: int, scale: float, block_size: int) -> None:
        super().__init__(num_heads, num_kv_heads, head_dim, scale, block_size)
        self._plan: Plan | None = None
        self._kept: tuple[Tensor, Tensor | None] | None = None  # a slot mapping, and which of its tokens are written

    def store(self, k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slot_mapping: Tensor) -> None:
        if self._kept is None or self._kept[0] is not slot_mapping:
            writes = slot_mapping >= 0
            self._kept = slot_mapping, None if bool(writes.all()) else writes.nonzero().squeeze(1)
        written = self._kept[1]
        if written is not None:
            k, v, slot_mapping = k[written], v[written], slot_mapping[written]
        k_cache.view(-1, *k.shape[1:]).index_copy_(0, slot_mapping, k)
        v_cache.view(-1, *v.shape[1:]).index_copy_(0, slot_mapping, v)

    def attend(self, q: Tensor, k_cache: Tensor, v_cache: Tensor, metadata: AttentionMetadata) -> Tensor:
        if self._plan is None or self._plan.metadata is not metadata:
            self._plan = self.plan(metadata)
        plan = self._plan
        k_flat, v_flat = k_cache.flatten(0, 1), v_cache.flatten(0, 1)  # [slots, K, H]
        out = torch.empty_like(q)
        if metadata.num_decodes:
            out[: metadata.num_decodes] = self.decode(q[: metadata.num_decodes], k_flat, v_flat, plan)
        for row in plan.prefill_rows:
            out[row.start : row.end] = self.prefill(q[row.start : row.end], k_flat, v_flat, row)
        return out

    def decode(self, q: Tensor, k_flat: Tensor, v_flat: Tensor, plan: Plan) -> Tensor:
        """One query a row: [B, N, H]. The G heads of a kv head are taken as G queries, so that keys are read once."""
        B, S = plan.decode_slots.shape
        shape = (B, S, self.num_kv_heads, self.head_dim)
        k = k_flat.index_select(0, plan.decode_slots.view(-1)).view(shape).transpose(1, 2)  # [B, K, S, H]
        v = v_flat.index_select(0, plan.decode_slots.view(-1)).view(shape).transpose(1, 2)
        grouped = q.view(B, self.num_kv_heads, -1, self.head_dim)  # [B, K, G, H]
        out = F.scaled_dot_product_attention(grouped, k, v, plan.decode_mask, scale=self.scale)
        return out.reshape(B, self.num_heads, self.head_dim)

    def prefill(self, q: Tensor, k_flat: Tensor, v_flat: Tensor, row: PrefillRow) -> Tensor:
        """One row's queries, behind whatever part of its context was there before: [query_len, N, H]."""
        k, v = k_flat.index_select(0, row.slots), v_flat.index_select(0, row.slots)  # [context_len, K, H]
        out = F.scaled_dot_product_attention(
            q.transpose(0, 1)[None],
            k.transpose(0, 1)[None],
            v.transpose(0, 1)[None],
            row.mask,
            is_causal=row.mask is None,
            scale=self.scale,
            enable_gqa=self.num_heads != self.num_kv_heads,
        )
        return out[0].transpose(0, 1)

    def plan(self, metadata: AttentionMetadata) -> Plan:
        """Slots and masks from block tables and lengths."""
        starts, contexts = metadata.cu_seqlens_q.tolist(), metadata.context_lens.tolist()
        device, count = metadata.context_lens.device, metadata.num_decodes
        longest = max(contexts[:count], default=1) or 1
        keys = torch.arange(longest, device=device)
        lens = metadata.context_lens[:count, None].long().clamp(min=1)
        slots = self.slots(metadata.block_tables[:count], torch.minimum(keys, lens - 1))
        rows = []
        for b in range(count, len(contexts)):
            start, end, context = starts[b], starts[b + 1], contexts[b]
            positions = torch.arange(context, device=device)
            mask = None
            if context != end - start:
                # 3 queries, context 5: the queries stand at positions 2, 3, 4 and see the keys up to there.
                mask = positions <= positions[context - (end - start) :, None]
            if end > start:
                row_slots = self.slots(metadata.block_tables[b : b + 1], positions[None])[0]
                rows.append(PrefillRow(start, end, row_slots, mask))
        return Plan(metadata, slots, (keys < lens)[:, None, None], rows)

    def slots(self, block_tables: Tensor, positions: Tensor) -> Tensor:
        """Slots [B, S] of positions [B, S]. Block size 16, table (7, 2, 9): position 35 -> 9 * 16 + 35 % 16 = 147."""
        blocks = block_tables.long().gather(1, positions // self.block_size)
        return blocks * self.block_size + positions % self.block_size
