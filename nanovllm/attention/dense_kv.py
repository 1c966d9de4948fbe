"""DenseKV: the keys and values of the decode rows laid side by side, so that a step need not gather them anew.

Blocks lie scattered in the pool, and PyTorch's products want one tensor. Gathering it costs a CPU more than the
attention itself; but from one decode step to the next it grows by a single token a row. So the gathered tensors are
kept, and each step appends to them. On the default model, 16 rows of 190 tokens on average: 2.4 ms a layer to gather,
0.01 ms to append (one thread).

The pool stays the truth. The copy is used only while nothing else can have changed it: the rows are those of the last
step, one token longer; this step's prompts wrote into none of their blocks; and the version counters, which PyTorch
advances with every write in place, have moved by the two writes of `store` and no more. Whoever pokes the pool by hand
therefore sees the effect in the next step.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from nanovllm.attention.base import AttentionMetadata

MAX_BYTES = 160 << 20  # over all layers; what is larger is gathered in every step
GROWTH = 64  # tokens: the copy's length is a multiple of it, and it is laid out anew when a row outgrows it


class DenseRows(NamedTuple):
    """One layer's copy. Letters: B rows, S tokens of room, K kv heads, H head dim."""

    k: Tensor  # [B, K, S, H]
    v: Tensor  # [B, K, S, H]
    mask: Tensor  # [B, 1, 1, S] float32: 0 for a row's own tokens, -inf behind them
    longest: int  # tokens of the longest row


class DenseKV:
    """The copies of all layers that one backend serves."""

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self.version = -1
        self.forget()

    def forget(self) -> None:
        """Drop the copies: the next step gathers."""
        self.layers: dict[int, tuple[Tensor, Tensor]] = {}
        self.tables = torch.zeros(0, 0, dtype=torch.int32)  # [B, max_blocks] of the rows held
        self.contexts = torch.zeros(0, dtype=torch.int64)  # [B] tokens held
        self.size = 0
        self.usable = False  # whether this step's decode rows are held, or will be as each layer comes along
        self.source: Tensor | None = None  # the rows to take over from the last step's copy; None: gather all

    def follow(
        self, metadata: AttentionMetadata, k_cache: Tensor, v_cache: Tensor, new_step: bool
    ) -> DenseRows | None:
        """This layer's copy for the decode rows of the step, or None where they have to be gathered.

        To be called in every layer of every step, after the store, so that no write goes unnoticed.
        """
        if k_cache.device.type != "cpu" or k_cache.is_inference():  # an inference tensor counts no versions
            return None
        version = k_cache._version + v_cache._version
        shared = k_cache.untyped_storage().data_ptr() == v_cache.untyped_storage().data_ptr()
        if version != self.version + (4 if shared else 2):  # two writes, of which a shared counter tells twice
            self.forget()
        self.version = version
        if new_step:
            self.begin(metadata, k_cache)
        return self.layer(k_cache, v_cache) if self.usable else None

    def begin(self, metadata: AttentionMetadata, k_cache: Tensor) -> None:
        """Decide how the copies of the last step become those of this one."""
        count = metadata.num_decodes
        if len(self.tables) and self._touched(metadata.slot_mapping[count:]):
            self.forget()
        self.usable = False
        if count == 0:
            return
        tables, contexts = metadata.block_tables[:count].clone(), metadata.context_lens[:count].long()
        longest = int(contexts.max())
        needed = (longest // GROWTH + 1) * GROWTH
        num_layers = max(1, k_cache.untyped_storage().nbytes() // (2 * k_cache.nbytes))
        row_bytes = 2 * k_cache[0, 0].nbytes * needed * num_layers
        if int(contexts.min()) < 1 or count * row_bytes > MAX_BYTES:
            self.forget()
            return
        same = self._same_rows(tables, contexts)
        self.source = torch.arange(count) if same else self._match(tables, contexts)
        self.keeps = same and longest <= self.size
        if self.source is None:
            self.layers.clear()
        if not self.keeps:
            self.size = needed
        self.usable, self.tables, self.contexts, self.longest = True, tables, contexts, longest
        heads, positions = torch.arange(k_cache.shape[2]), torch.arange(self.size)
        self.mask = torch.where(positions < contexts[:, None], 0.0, float("-inf"))[:, None, None]
        # Row b, kv head j, position p is vector (b * K + j) * S + p of a copy, and slot * K + j of the pool.
        rows = (torch.arange(count)[:, None] * len(heads) + heads) * self.size
        self.append_to = (rows + contexts[:, None] - 1).view(-1)
        self.append_from = self._vectors(contexts[:, None] - 1, heads)
        if self.source is None:
            self.gather_from = self._vectors(torch.minimum(positions, contexts[:, None] - 1), heads)

    def layer(self, k_cache: Tensor, v_cache: Tensor) -> DenseRows | None:
        """Bring one layer's copy up to this step."""
        key, made = k_cache.data_ptr(), []
        held = self.layers.get(key)
        if self.source is not None and held is None:
            return None
        for index, cache in enumerate((k_cache, v_cache)):
            vectors = cache.view(-1, cache.shape[-1])
            if self.source is None or held is None:
                copy = vectors.index_select(0, self.gather_from).view(len(self.contexts), -1, self.size, cache.shape[-1])
            else:
                copy = held[index]
                if not self.keeps:
                    copy = F.pad(copy[:, :, : self.size].index_select(0, self.source), (0, 0, 0, self.size - min(self.size, copy.shape[2])))
                copy.view(-1, cache.shape[-1]).index_copy_(0, self.append_to, vectors.index_select(0, self.append_from))
            made.append(copy)
        self.layers[key] = made[0], made[1]
        return DenseRows(made[0], made[1], self.mask, self.longest)

    def _vectors(self, positions: Tensor, heads: Tensor) -> Tensor:
        """Where the pool has positions [B, S] of the rows: vectors [B * K * S], H numbers each."""
        slots = self.tables.long().gather(1, positions // self.block_size) * self.block_size + positions % self.block_size
        return (slots[:, None] * len(heads) + heads[:, None]).view(-1)

    def _touched(self, slots: Tensor) -> bool:
        """Whether one of the slots lies in a block of a row held."""
        held = torch.arange(self.tables.shape[1]) * self.block_size < self.contexts[:, None]
        return bool(torch.isin(slots // self.block_size, self.tables[held]).any())

    def _same_rows(self, tables: Tensor, contexts: Tensor) -> bool:
        """Whether these are the rows held, each one token longer."""
        if len(tables) != len(self.tables) or not torch.equal(contexts, self.contexts + 1):
            return False
        return bool(self._begin_alike(tables, self.tables, self.contexts).all())

    def _match(self, tables: Tensor, contexts: Tensor) -> Tensor | None:
        """For each row the index of the row held that it continues; None if one row continues none."""
        if not len(self.tables):
            return None
        alike = self._begin_alike(tables[:, None], self.tables, self.contexts)  # [B, rows held]
        alike &= contexts[:, None] == self.contexts + 1
        return alike.int().argmax(1) if bool(alike.any(1).all()) else None

    def _begin_alike(self, tables: Tensor, held: Tensor, contexts: Tensor) -> Tensor:
        """Whether tables [..., W] name the blocks of held [rows, W'] as far as these have tokens [rows]."""
        width = max(tables.shape[-1], held.shape[-1])
        used = torch.arange(width) * self.block_size < contexts[:, None]
        tables, held = (F.pad(table, (0, width - table.shape[-1]), value=-1) for table in (tables, held))
        return ((tables == held) | ~used).all(-1)
