"""Attention in plain PyTorch: the oracle that every other backend is tested against, and what a CPU runs.

It knows no kernels. Decode rows are one batched product over gathered keys; prefill rows go through
`scaled_dot_product_attention` one by one, since they share no length. Softmax and sums are float32 inside it.

Gathering looks wasteful, since from one decode step to the next a row grows by one token only. A copy kept between the
steps was tried: on a CPU it was no faster, because reading the pool's tokens costs what reading the copy's costs, and
what was gathered is still in the cache of the core when it is used.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from nanovllm.attention.base import AttentionBackend, AttentionMetadata

GATHER_BYTES = 16 << 20  # keys of one layer gathered at a time, and as many bytes of values


@dataclass(frozen=True, eq=False, slots=True)
class PrefillRow:
    """One row's queries, and the slots of its keys in the flat cache."""

    start: int  # its queries are start to end - 1 of the flat batch
    end: int
    slots: Tensor  # [context_len]
    mask: Tensor | None  # [end - start, context_len], 0 or -inf; None: causal from the first key on


@dataclass(frozen=True, eq=False, slots=True)
class DecodeRows:
    """Some decode rows whose keys are gathered together, and the slots of those keys."""

    start: int  # rows start to end - 1 of the step, B of them
    end: int
    slots: Tensor  # [B, longest context]; a shorter row repeats its last slot
    mask: Tensor | None  # [B, 1, 1, longest context], 0 or -inf; None: a single row
    padded: Tensor | None  # [B, 1, 1], True: a row without context, whose result is zeros; None: there is none


@dataclass(frozen=True, eq=False, slots=True)
class Plan:
    """What all layers of a step have in common."""

    metadata: AttentionMetadata
    decode_rows: list[DecodeRows]
    prefill_rows: list[PrefillRow]


class TorchAttention(AttentionBackend):
    """See the module. Any device and dtype, any block size, heads and head dim; cannot be captured in a CUDA graph."""

    name = "torch"

    def __init__(self, num_heads: int, num_kv_heads: int, head_dim: int, scale: float, block_size: int) -> None:
        super().__init__(num_heads, num_kv_heads, head_dim, scale, block_size)
        self._plan: Plan | None = None
        # The last step's slot mapping and the tokens that it writes (None: all), found once for all layers.
        self._kept: tuple[Tensor, Tensor | None] | None = None

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
            self._plan = self.plan(metadata, q.dtype, k_cache[0, 0].nbytes)
        plan, k_flat, v_flat = self._plan, k_cache.flatten(0, 1), v_cache.flatten(0, 1)  # [slots, K, H]
        if len(plan.decode_rows) == 1 and not plan.prefill_rows:
            return self.decode(q, k_flat, v_flat, plan.decode_rows[0])
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        for rows in plan.decode_rows:
            out[rows.start : rows.end] = self.decode(q[rows.start : rows.end], k_flat, v_flat, rows)
        for row in plan.prefill_rows:
            out[row.start : row.end] = self.prefill(q[row.start : row.end], k_flat, v_flat, row)
        return out

    def decode(self, q: Tensor, k_flat: Tensor, v_flat: Tensor, rows: DecodeRows) -> Tensor:
        """One query a row: [B, N, H]. The G heads of a kv head are taken as G queries, so that keys are read once."""
        B, longest = rows.slots.shape
        shape, slots = (B, longest, self.num_kv_heads, self.head_dim), rows.slots.view(-1)
        k = k_flat.index_select(0, slots).view(shape).transpose(1, 2)  # [B, K, longest, H]
        v = v_flat.index_select(0, slots).view(shape).transpose(1, 2)
        grouped = q.reshape(B, self.num_kv_heads, -1, self.head_dim)  # [B, K, G, H]
        out = F.scaled_dot_product_attention(grouped, k, v, rows.mask, scale=self.scale)
        out = out.reshape(B, self.num_heads, self.head_dim)
        return out if rows.padded is None else out.masked_fill(rows.padded, 0)

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

    def plan(self, metadata: AttentionMetadata, dtype: torch.dtype, token_bytes: int) -> Plan:
        """Slots and masks from block tables and lengths. dtype: of the masks. token_bytes: a token's keys."""
        return Plan(metadata, self.decode_rows(metadata, dtype, token_bytes), self.prefill_rows(metadata, dtype))

    def decode_rows(self, metadata: AttentionMetadata, dtype: torch.dtype, token_bytes: int) -> list[DecodeRows]:
        """The decode rows, in parts whose gathered keys stay below `GATHER_BYTES`: that bounds the memory.

        Contexts 3 and 5: the rows gather positions 0 1 2 2 2 and 0 1 2 3 4, and the mask hides the last two of row 0.
        """
        lens = metadata.context_lens[: metadata.num_decodes, None].long()
        # A padded row has no block, so not even the first entry of its table may be looked up: it reads slot 0 instead.
        padded, lens = lens == 0, lens.clamp(min=1)
        tables = metadata.block_tables[: metadata.num_decodes].masked_fill(padded, 0)
        any_padded = bool(padded.any())
        most = max(1, GATHER_BYTES // (token_bytes * max(metadata.max_context_len, 1)))
        parts = []
        for start in range(0, metadata.num_decodes, most):
            part = lens[start : start + most]
            keys = torch.arange(int(part.max()), device=lens.device)
            slots = self.slots(tables[start : start + most], torch.minimum(keys, part - 1))
            mask = None if len(part) == 1 else additive(keys >= part, dtype)[:, None, None]
            without = padded[start : start + most, :, None] if any_padded else None
            parts.append(DecodeRows(start, start + len(part), slots, mask, without))
        return parts

    def prefill_rows(self, metadata: AttentionMetadata, dtype: torch.dtype) -> list[PrefillRow]:
        """Slots and masks of the rows behind the decodes."""
        starts, contexts = metadata.cu_seqlens_q.tolist(), metadata.context_lens.tolist()
        rows = []
        for b in range(metadata.num_decodes, len(contexts)):
            start, end, context = starts[b], starts[b + 1], contexts[b]
            if end == start:
                continue
            positions = torch.arange(context, device=metadata.context_lens.device)
            mask = None
            if context != end - start:
                # 3 queries, context 5: the queries stand at positions 2, 3, 4 and see the keys up to there.
                mask = additive(positions > positions[context - (end - start) :, None], dtype)
            slots = self.slots(metadata.block_tables[b : b + 1], positions[None])[0]
            rows.append(PrefillRow(start, end, slots, mask))
        return rows

    def slots(self, block_tables: Tensor, positions: Tensor) -> Tensor:
        """Slots of positions, both [B, any]. Block size 16, table (7, 2, 9): position 35 -> 9 * 16 + 35 % 16 = 147."""
        blocks = block_tables.long().gather(1, positions // self.block_size)
        return blocks * self.block_size + positions % self.block_size


def additive(unseen: Tensor, dtype: torch.dtype) -> Tensor:
    """What is added to the scores: 0, or -inf where True. Made once a step; bools would be converted in every layer."""
    return torch.zeros(unseen.shape, dtype=dtype, device=unseen.device).masked_fill_(unseen, float("-inf"))
