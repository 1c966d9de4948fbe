"""EngineState: the pool and the sequences as they stand after a step, folded from what the engine tells.

One snapshot, then one `StepRecord` after the other: `fold` keeps up with the engine at a cost that grows with what a
step did and never with the pool. Knows nothing of how the state is drawn, and reads only `engine.events`.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nanovllm.engine.events import BlockEvent, BlockEventKind, EngineSnapshot, SequenceState, StepRecord, StepRow

MAX_SLOTS = 1 << 16  # the text of each slot is kept for pools up to this size: 256 KiB of token ids
NO_TOKEN = -1


@dataclass(slots=True)
class SequenceInfo:
    """One sequence, as far as the events tell."""

    seq_id: int
    status: str  # "waiting", "running", "preempted" or "ended"
    num_prompt_tokens: int
    num_tokens: int  # prompt and generated
    num_computed_tokens: int = 0
    num_cached_tokens: int = 0
    block_table: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class PoolCounts:
    """How many blocks are what. `held + cached_free + empty` is the pool."""

    held: int
    shared: int  # of the held: with two or more holders
    cached_free: int  # nobody holds them, but their content can still be found
    empty: int


class EngineState:
    """The KV pool and the unfinished sequences after step `step`.

    Arrays over the blocks: `ref_count`, `is_cached`, `owner` (the sequence that has held it longest, -1: nobody),
    `num_hits` (prefix hits on its present content), `hit_step` and `evict_step` (the last step in which that happened).
    `tokens` [num_blocks, block_size] holds the token in each slot, or is None for pools too large for that.
    `ended` are the sequences that the newest step ended, as they were with the blocks that they have just let go of.
    `is_complete` is False while watching began in mid-run without a snapshot: blocks then show up when first touched.
    """

    def __init__(self, num_blocks: int, block_size: int, step: int = 0) -> None:
        self.step, self.num_blocks, self.block_size = step, num_blocks, block_size
        self.is_complete = True
        self.ref_count: NDArray[np.int32] = np.zeros(num_blocks, np.int32)
        self.is_cached: NDArray[np.bool_] = np.zeros(num_blocks, np.bool_)
        self.owner: NDArray[np.int64] = np.full(num_blocks, -1, np.int64)
        self.num_hits: NDArray[np.int32] = np.zeros(num_blocks, np.int32)
        self.hit_step: NDArray[np.int32] = np.full(num_blocks, -1, np.int32)
        self.evict_step: NDArray[np.int32] = np.full(num_blocks, -1, np.int32)
        keeps_tokens = num_blocks * block_size <= MAX_SLOTS
        self.tokens: NDArray[np.int32] | None = (
            np.full((num_blocks, block_size), NO_TOKEN, np.int32) if keeps_tokens else None
        )
        self.holders: dict[int, list[int]] = {}  # of the held blocks, longest first
        self.sequences: dict[int, SequenceInfo] = {}
        self.ended: list[SequenceInfo] = []

    @classmethod
    def of(cls, snapshot: EngineSnapshot) -> "EngineState":
        state = cls(len(snapshot.blocks), snapshot.block_size, snapshot.step)
        state.correct(snapshot)
        return state

    def copy(self) -> "EngineState":
        other = EngineState.__new__(EngineState)
        for name, value in vars(self).items():
            setattr(other, name, value.copy() if isinstance(value, np.ndarray) else value)
        other.holders = {block_id: list(seq_ids) for block_id, seq_ids in self.holders.items()}
        other.sequences = {seq_id: replace(info) for seq_id, info in self.sequences.items()}
        return other

    def counts(self) -> PoolCounts:
        held = self.ref_count > 0
        num_held, num_free_cached = int(held.sum()), int((self.is_cached & ~held).sum())
        shared = int((self.ref_count > 1).sum())
        return PoolCounts(num_held, shared, num_free_cached, self.num_blocks - num_held - num_free_cached)

    def by_status(self, *statuses: str) -> list[SequenceInfo]:
        return [info for info in self.sequences.values() if info.status in statuses]

    # -- what the engine tells

    def correct(self, snapshot: EngineSnapshot) -> None:
        """Take over everything that a snapshot knows; marks of earlier hits and evictions stay."""
        self.step, self.is_complete = snapshot.step, True
        self.ref_count[:] = [block.ref_count for block in snapshot.blocks]
        self.is_cached[:] = [block.is_cached for block in snapshot.blocks]
        before, self.holders = self.holders, {}
        states = (*snapshot.running, *snapshot.waiting)
        self.sequences = {state.seq_id: info_of(state) for state in states}
        for state in snapshot.running:
            for block_id in state.block_table:
                self.holders.setdefault(block_id, []).append(state.seq_id)
        for block_id, seq_ids in self.holders.items():  # a snapshot does not say who came first; earlier events do
            rank = {seq_id: place for place, seq_id in enumerate(before.get(block_id, ()))}
            seq_ids.sort(key=lambda seq_id: rank.get(seq_id, len(rank)))
        self.owner[:] = -1
        for block_id, seq_ids in self.holders.items():
            self.owner[block_id] = seq_ids[0]
        if self.tokens is not None:
            for block in snapshot.blocks:
                if block.token_ids:
                    self.tokens[block.block_id, : len(block.token_ids)] = block.token_ids
            for state in snapshot.running:
                self._write(state.block_table, 0, state.token_ids[: state.num_computed_tokens])

    def fold(self, record: StepRecord) -> None:
        """Advance by one step. To fold again what a snapshot contains does no harm, since events hold final values."""
        if record.step != self.step + 1:
            self.is_complete = False
        self.step = record.step
        sequences = self.sequences
        for seq_id, num_prompt_tokens in record.queued:
            if seq_id not in sequences:
                sequences[seq_id] = SequenceInfo(seq_id, "waiting", num_prompt_tokens, num_prompt_tokens)
        self._fold_events(record.block_events, record.step)
        for admission in record.admitted:
            info = sequences.get(admission.seq_id)
            if info is None:
                length = admission.num_prompt_tokens
                info = sequences[admission.seq_id] = SequenceInfo(admission.seq_id, "running", length, length)
            info.status, info.num_cached_tokens = "running", admission.num_cached_tokens
            info.num_computed_tokens = admission.num_cached_tokens
        for seq_id in record.preempted:
            info = sequences.get(seq_id)
            if info is not None:
                info.status, info.num_computed_tokens, info.block_table = "preempted", 0, ()
                info.num_cached_tokens = 0
        for row in record.rows:
            self._fold_row(row)
        over = [sequences.pop(finish.seq_id, None) for finish in record.finished]
        self.ended = [replace(info, status="ended") for info in over if info is not None]

    def _fold_events(self, events: Iterable[BlockEvent], step: int) -> None:
        for kind, block_id, seq_id, ref_count in events:
            if kind is BlockEventKind.CACHE:
                self.is_cached[block_id] = True
            elif kind is BlockEventKind.EVICT:
                self.is_cached[block_id] = False
                self.evict_step[block_id] = step
            else:
                self.ref_count[block_id] = ref_count
                holders = self.holders.setdefault(block_id, [])
                if kind is BlockEventKind.RELEASE:
                    if seq_id in holders:
                        holders.remove(seq_id)
                    if ref_count == 0:
                        del self.holders[block_id]
                elif seq_id is not None and seq_id not in holders:
                    holders.append(seq_id)
                self.owner[block_id] = holders[0] if holders and ref_count else -1
                if kind is BlockEventKind.REUSE:
                    self.num_hits[block_id] += 1
                    self.hit_step[block_id] = step
                elif kind is BlockEventKind.ALLOCATE:
                    self.num_hits[block_id] = 0
                    if self.tokens is not None:
                        self.tokens[block_id] = NO_TOKEN

    def _fold_row(self, row: StepRow) -> None:
        info = self.sequences.get(row.seq_id)
        if info is None:  # watched from mid-run: this is the first that is heard of it
            info = self.sequences[row.seq_id] = SequenceInfo(row.seq_id, "running", row.num_tokens, row.num_tokens)
        info.status, info.block_table = "running", row.block_table
        info.num_computed_tokens = row.num_computed_tokens + len(row.token_ids)
        info.num_tokens = row.num_tokens + (row.sampled_token_id is not None)
        self._write(row.block_table, row.num_computed_tokens, row.token_ids)

    def _write(self, block_table: tuple[int, ...], start: int, token_ids: tuple[int, ...]) -> None:
        """Put tokens into their slots. Block size 4, start 6, 3 tokens: offsets 2 and 3 of block 1, 0 of block 2."""
        if self.tokens is None:
            return
        size, done = self.block_size, 0
        while done < len(token_ids):
            index, offset = divmod(start + done, size)
            piece = token_ids[done : done + size - offset]
            if index < len(block_table):
                self.tokens[block_table[index], offset : offset + len(piece)] = piece
            done += len(piece)

    # -- to and from a file

    def to_json(self) -> dict[str, Any]:
        held_or_marked = np.flatnonzero(self.ref_count | self.is_cached | (self.num_hits > 0))
        ids = held_or_marked.tolist()
        columns = (self.ref_count, self.is_cached, self.num_hits, self.hit_step, self.evict_step)
        tokens = None if self.tokens is None else [[int(t) for t in self.tokens[i] if t >= 0] for i in ids]
        return {
            "step": self.step,
            "num_blocks": self.num_blocks,
            "block_size": self.block_size,
            "is_complete": self.is_complete,
            "blocks": [ids, *(column[held_or_marked].astype(int).tolist() for column in columns)],
            "tokens": tokens,
            "holders": sorted(self.holders.items()),
            "sequences": [[getattr(info, name) for name in SequenceInfo.__slots__] for info in self.sequences.values()],
        }

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> "EngineState":
        state = cls(data["num_blocks"], data["block_size"], data["step"])
        state.is_complete = data["is_complete"]
        ids, *values = data["blocks"]
        columns = (state.ref_count, state.is_cached, state.num_hits, state.hit_step, state.evict_step)
        for column, column_values in zip(columns, values, strict=True):
            column[ids] = column_values
        if state.tokens is not None and data["tokens"] is not None:
            for block_id, token_ids in zip(ids, data["tokens"], strict=True):
                state.tokens[block_id, : len(token_ids)] = token_ids
        state.holders = {block_id: list(seq_ids) for block_id, seq_ids in data["holders"]}
        for block_id, seq_ids in state.holders.items():
            state.owner[block_id] = seq_ids[0]
        for *rest, table in data["sequences"]:
            info = SequenceInfo(*rest, tuple(table))  # type: ignore[call-arg]
            state.sequences[info.seq_id] = info
        return state


def info_of(state: SequenceState) -> SequenceInfo:
    return SequenceInfo(
        state.seq_id,
        state.status,
        state.num_prompt_tokens,
        len(state.token_ids),
        state.num_computed_tokens,
        state.num_cached_tokens,
        tuple(state.block_table),
    )
