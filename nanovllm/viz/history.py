"""History: a whole run in a fixed number of columns, however long it gets.

Every step adds to the newest column. When all columns are taken, neighbours merge in pairs and a column stands for
twice as many steps; so memory, and the time to draw, stay the same from 256 steps to millions. Two things are kept per
column: sums for the charts (`series`), and what each sequence did (`timeline`).
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nanovllm.engine.events import BlockEventKind, FinishReason, StepRecord
from nanovllm.viz.state import EngineState

# One byte for a sequence in a column. The low two bits say how it stood at the column's end (0: as in the column
# before), the others what happened in it. Merging two columns is: or the others, keep the later standing.
WAITING, RESIDENT, PREEMPTED = 1, 2, 3
STANDING = 3
PREFILL, DECODE, PREEMPT, FINISH, HIT, ABORT = 4, 8, 16, 32, 64, 128

SUMS = (
    "steps", "seconds", "prefill_tokens", "decode_tokens", "prefill_seconds", "decode_seconds",
    "prompt_tokens", "cached_tokens", "preemptions", "evictions", "hits", "finished",
)  # fmt: skip
PEAKS = ("peak_tokens", "peak_used_blocks")
LASTS = ("used_blocks", "waiting", "running")
FIELDS = ("first_step", *SUMS, *PEAKS, *LASTS)
_SUMS = slice(1, 1 + len(SUMS))
_PEAKS = slice(_SUMS.stop, _SUMS.stop + len(PEAKS))
_LASTS = slice(_PEAKS.stop, _PEAKS.stop + len(LASTS))


@dataclass(frozen=True, slots=True)
class Timeline:
    """What the sequences did: one row for each id in `seq_ids`, one column for each of the history's."""

    seq_ids: list[int]
    events: NDArray[np.uint8]  # PREFILL | DECODE | PREEMPT | FINISH | HIT | ABORT
    standing: NDArray[np.uint8]  # WAITING, RESIDENT or PREEMPTED; 0 before it came and after it ended


class History:
    """Sums and sequences in at most `capacity` columns; remembers at most `max_sequences` sequences."""

    def __init__(self, capacity: int = 256, max_sequences: int = 512) -> None:
        if capacity < 2 or capacity % 2:
            raise ValueError(f"capacity must be an even number of columns, at least 2; got {capacity}")
        self.capacity, self.max_sequences = capacity, max_sequences
        self.steps_per_column = 1
        self.columns: list[list[float]] = []
        self.rows: dict[int, bytearray] = {}  # in the order of arrival
        self.ended: dict[int, None] = {}  # the keys of `rows` that are over, in the order in which they ended
        self.num_sequences = 0  # ever seen, also those no longer remembered
        self.most_rows = 0  # of any step
        self.totals = dict.fromkeys(SUMS, 0.0)

    # -- adding a step

    def fold(self, record: StepRecord) -> None:
        if not self.columns or self.columns[-1][1] >= self.steps_per_column:
            if len(self.columns) == self.capacity:
                self._merge()
            self.columns.append([float(record.step)] + [0.0] * (len(FIELDS) - 1))
        self._add_sums(self.columns[-1], record)
        self.num_sequences += len(record.queued)
        self.most_rows = max(self.most_rows, len(record.rows))
        for seq_id, _ in record.queued:
            self._mark(seq_id, WAITING, 0)
        for admission in record.admitted:
            self._mark(admission.seq_id, RESIDENT, HIT if admission.num_cached_tokens else 0)
        for seq_id in record.preempted:
            self._mark(seq_id, PREEMPTED, PREEMPT)
        for row in record.rows:
            self._mark(row.seq_id, RESIDENT, PREFILL if row.is_prefill else DECODE)
        for finish in record.finished:
            self._end(finish.seq_id, ABORT if finish.reason == FinishReason.ABORT else FINISH)

    def seed(self, state: EngineState) -> None:
        """Sequences that were there before the first step that is seen."""
        standings = {"waiting": WAITING, "running": RESIDENT, "preempted": PREEMPTED}
        self.num_sequences += len(state.sequences.keys() - self.rows.keys())
        for info in state.sequences.values():
            self._mark(info.seq_id, standings[info.status], 0)

    def keep_only(self, seq_ids: set[int]) -> None:
        """Sequences that a snapshot no longer has have been aborted."""
        for seq_id in [s for s in self.rows if s not in seq_ids and s not in self.ended]:
            self._end(seq_id, ABORT)

    def _add_sums(self, column: list[float], record: StepRecord) -> None:
        kinds = [event.kind for event in record.block_events]
        seconds = sum(record.timings)
        fresh = [admission for admission in record.admitted if not admission.is_resumed]
        sums = (
            1, seconds, record.num_prefill_tokens, record.num_decode_tokens,
            seconds if record.num_prefill_tokens else 0, seconds if record.num_decode_tokens else 0,
            sum(admission.num_prompt_tokens for admission in fresh),
            sum(admission.num_cached_tokens for admission in fresh),
            len(record.preempted), kinds.count(BlockEventKind.EVICT), kinds.count(BlockEventKind.REUSE),
            len(record.finished),
        )  # fmt: skip
        for index, (name, value) in enumerate(zip(SUMS, sums, strict=True), _SUMS.start):
            column[index] += value
            self.totals[name] += value
        used = record.num_blocks - record.num_free_blocks
        column[_PEAKS.start] = max(column[_PEAKS.start], record.num_tokens)
        column[_PEAKS.start + 1] = max(column[_PEAKS.start + 1], used)
        column[_LASTS] = [used, record.num_waiting, record.num_running]

    def _mark(self, seq_id: int, standing: int, event: int) -> None:
        row = self.rows.get(seq_id)
        if row is None:
            row = self._new_row(seq_id)
            if row is None:
                return
        index = max(len(self.columns) - 1, 0)
        row[index] = (row[index] & ~STANDING) | event | standing

    def _new_row(self, seq_id: int) -> bytearray | None:
        if len(self.rows) >= self.max_sequences:
            if not self.ended:
                return None  # all that are remembered are still at work
            oldest = next(iter(self.ended))
            del self.ended[oldest], self.rows[oldest]
        row = self.rows[seq_id] = bytearray(self.capacity)
        return row

    def _end(self, seq_id: int, event: int) -> None:
        row = self.rows.get(seq_id)
        if row is not None and seq_id not in self.ended:
            row[max(len(self.columns) - 1, 0)] |= event
            self.ended[seq_id] = None

    def _merge(self) -> None:
        """Columns 0 and 1 become 0, 2 and 3 become 1, and so on."""
        old = np.array(self.columns)
        even, odd = old[0::2], old[1::2]
        new = even.copy()
        new[:, _SUMS] += odd[:, _SUMS]
        new[:, _PEAKS] = np.maximum(new[:, _PEAKS], odd[:, _PEAKS])
        new[:, _LASTS] = odd[:, _LASTS]
        self.columns = new.tolist()
        for row in self.rows.values():
            cells = np.frombuffer(row, np.uint8)
            merged = merge_cells(cells.reshape(-1, 2))
            row[:] = merged.tobytes() + bytes(self.capacity - len(merged))
        self.steps_per_column *= 2

    # -- reading

    def series(self) -> dict[str, NDArray[np.float64]]:
        """One array for each name in FIELDS, one entry for each column."""
        table = np.array(self.columns).reshape(-1, len(FIELDS))
        return {name: table[:, index] for index, name in enumerate(FIELDS)}

    def num_columns(self, step: int | None = None) -> int:
        """Columns up to the one that holds `step` (all of them by default)."""
        if step is None:
            return len(self.columns)
        return int(np.searchsorted([column[0] for column in self.columns], step, side="right"))

    def timeline(self, seq_ids: list[int]) -> Timeline:
        cells = np.array([np.frombuffer(self.rows[seq_id], np.uint8) for seq_id in seq_ids], np.uint8)
        cells = cells.reshape(len(seq_ids), self.capacity)[:, : len(self.columns)]
        standing, events = cells & STANDING, cells & ~np.uint8(STANDING)
        # Carry a standing to the right until the next one: the column of the last entry, running to the right.
        index = np.where(cells > 0, np.arange(cells.shape[1]), 0)
        np.maximum.accumulate(index, axis=1, out=index)
        standing = np.take_along_axis(standing, index, axis=1)
        is_over = np.maximum.accumulate(events & (FINISH | ABORT), axis=1) > 0
        standing[is_over] = 0
        return Timeline(list(seq_ids), np.asarray(events, np.uint8), np.asarray(standing, np.uint8))

    # -- to and from a file

    def to_json(self) -> dict[str, Any]:
        names = ("capacity", "max_sequences", "steps_per_column", "num_sequences", "most_rows", "totals", "columns")
        rows = [[seq_id, row[: len(self.columns)].hex()] for seq_id, row in self.rows.items()]
        return {**{name: getattr(self, name) for name in names}, "rows": rows, "ended": list(self.ended)}

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> "History":
        history = cls(data["capacity"], data["max_sequences"])
        for name in ("steps_per_column", "num_sequences", "totals", "columns"):
            setattr(history, name, data[name])
        history.most_rows = data.get("most_rows", history.num_sequences)  # files of older versions do not say
        for seq_id, cells in data["rows"]:
            row = bytes.fromhex(cells)
            history.rows[seq_id] = bytearray(row + bytes(history.capacity - len(row)))
        history.ended = dict.fromkeys(data["ended"])
        return history


def merge_cells(pairs: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """[n, 2] cells of neighbouring columns -> [n]: what happened in either, how it stood at the later one's end."""
    events = (pairs[:, 0] | pairs[:, 1]) & ~np.uint8(STANDING)
    standing = pairs & STANDING
    return np.asarray(events | np.where(standing[:, 1] > 0, standing[:, 1], standing[:, 0]), np.uint8)
