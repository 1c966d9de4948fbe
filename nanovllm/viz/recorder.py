"""Recorder: a bounded record of a run, to be drawn, saved, and replayed without an engine.

It keeps the newest `keep` StepRecords whole, the engine's state before the first of them (so that the state after each
of them can be folded again: stepping back), the state now, and the whole run in merged columns (`History`).
"""

import gzip
import json
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Protocol

from nanovllm._html import ReprHTML
from nanovllm.engine.events import (
    Admission,
    BlockEvent,
    BlockEventKind,
    EngineSnapshot,
    Finish,
    FinishReason,
    StepRecord,
    StepRow,
    StepTimings,
)
from nanovllm.viz.history import SUMS, History
from nanovllm.viz.state import EngineState, SequenceInfo

FORMAT, VERSION = "nanovllm-run", 1
RECORD_FIELDS = tuple(field.name for field in fields(StepRecord))
Decode = Callable[[int], str]


class HookHandle(Protocol):
    def remove(self) -> None: ...


class Engine(Protocol):
    """What the views ask of an engine."""

    def add_step_hook(self, fn: Callable[[StepRecord], Any], key: Any = None) -> HookHandle: ...

    def snapshot(self) -> EngineSnapshot: ...


@dataclass(frozen=True, slots=True)
class Moment:
    """What a view draws: the run as it stood after one step."""

    state: EngineState | None  # None: nothing has been seen yet
    record: StepRecord | None
    history: History
    since: int  # events of later steps than this are new: they are made to stand out
    is_latest: bool
    decode: Decode | None

    def ended(self) -> list[SequenceInfo]:
        """The sequences that ended in this step, with the blocks that they have just let go of."""
        if self.record is None or self.state is None:
            return []
        ran = {row.seq_id for row in self.record.rows}
        return [info for info in self.state.ended if info.seq_id in ran]

    @property
    def totals(self) -> dict[str, float]:
        """The sums of the run up to this step (to the end of its column, where a column is several steps)."""
        if self.is_latest:
            return self.history.totals
        series = self.history.series()
        return {name: float(series[name][: self.num_columns].sum()) for name in SUMS}

    @property
    def num_columns(self) -> int:
        return self.history.num_columns(None if self.is_latest or self.state is None else self.state.step)


class Recorder(ReprHTML):
    """A step hook that remembers: `llm.observe(recorder)`, or `recorder.attach(llm)`, before the run or in its middle.

    keep: how many of the newest steps are kept whole. Everything else is bounded by itself: 256 columns, 512
        sequences, and the block pool. With 16 sequences a kept step takes about 5 KiB.
    decode: the text of a token id, for the views that show tokens.
    """

    def __init__(self, keep: int = 256, decode: Decode | None = None) -> None:
        if keep < 1:
            raise ValueError(f"keep must be at least 1 step, got {keep}")
        self.decode = decode
        self.records: deque[StepRecord] = deque(maxlen=keep)
        self.history = History()
        self.base: EngineState | None = None  # before records[0]
        self.head: EngineState | None = None  # after the newest step
        self._cursor: EngineState | None = None  # what `at` folded last, since the next question is often one step on

    def __repr__(self) -> str:
        steps = int(self.history.totals["steps"])
        if self.head is None or not steps:
            return "Recorder(no steps yet)"
        return f"Recorder({steps:,} steps up to step {self.head.step:,}, the newest {len(self.records)} whole)"

    def _repr_rows(self) -> list[tuple[str, Any]]:
        totals = self.history.totals
        counted = ("finished", "preemptions", "prefill_tokens", "decode_tokens", "cached_tokens")
        return [
            ("last_step", self.last_step),
            ("steps", self.steps),
            ("requests", self.history.num_sequences),
            *((name, int(totals[name])) for name in counted),
        ]

    # -- listening

    def on_attach(self, snapshot: EngineSnapshot) -> None:
        """What `llm.observe(recorder)` calls first, so that it is right in mid-run too."""
        self.sync(snapshot)

    def attach(self, llm: Engine, key: Any = "nanovllm.viz.recorder") -> HookHandle:
        """Record every step from now on; the same key replaces an earlier recorder. `.remove()` the handle to stop."""
        self.sync(llm.snapshot())
        return llm.add_step_hook(self, key=key)

    def sync(self, snapshot: EngineSnapshot) -> None:
        """Take over the state of an engine: where watching begins, or after steps or aborts that nobody reported."""
        if self.head is not None and self.head.step == snapshot.step and self.head.is_complete:
            self.head.correct(snapshot)  # requests may have come or been aborted since; the steps are all here
        else:
            self._begin(EngineState.of(snapshot))
        assert self.head is not None
        self.history.keep_only(set(self.head.sequences))
        self.history.seed(self.head)

    def __call__(self, record: StepRecord) -> None:
        if self.head is None or self.head.num_blocks != record.num_blocks:
            state = EngineState(record.num_blocks, record.block_size, record.step - 1)
            state.is_complete = record.step == 1
            self._begin(state)
        elif record.step != self.head.step + 1:  # steps were missed: those before cannot be stepped through
            self._begin(self.head)
        assert self.head is not None and self.base is not None
        if len(self.records) == self.records.maxlen:
            self.base.fold(self.records[0])
        self.records.append(record)
        self.head.fold(record)
        self.history.fold(record)

    def _begin(self, state: EngineState) -> None:
        self.records.clear()
        self.head, self.base, self._cursor = state, state.copy(), None

    # -- reading

    @property
    def last_step(self) -> int:
        """The newest step that is known, 0 before the first."""
        return self.head.step if self.head is not None else 0

    @property
    def steps(self) -> range:
        """The steps that are kept whole."""
        return range(self.records[0].step, self.records[-1].step + 1) if self.records else range(0)

    def record(self, step: int) -> StepRecord:
        """Raises IndexError for a step that is not kept."""
        if step not in self.steps:
            kept = f"steps {self.steps[0]} to {self.steps[-1]} are" if self.steps else "none is"
            raise IndexError(f"step {step} is not kept whole; {kept} (Recorder(keep=…) keeps more)")
        return self.records[step - self.steps[0]]

    def at(self, step: int) -> EngineState:
        """The state after `step`, folded anew from the steps that are kept."""
        self.record(step)
        assert self.base is not None
        if self._cursor is None or not self.base.step <= self._cursor.step <= step:
            self._cursor = self.base.copy()
        while self._cursor.step < step:
            self._cursor.fold(self.record(max(self._cursor.step + 1, self.steps[0])))
        return self._cursor.copy()

    def moment(self, step: int | None = None, since: int | None = None) -> Moment:
        """What there is to draw after `step` (by default now); events after step `since` count as new."""
        newest = self.records[-1] if self.records else None
        if step is None or (newest is not None and step == newest.step):
            since = self.last_step - 1 if since is None else since
            return Moment(self.head, newest, self.history, since, True, self.decode)
        record = self.record(step)
        return Moment(self.at(step), record, self.history, step - 1 if since is None else since, False, self.decode)

    # -- to and from a file

    def save(self, path: str | Path) -> Path:
        """Write JSON lines: a first line with everything but the steps, then one line for each step that is kept.

        A name that ends in .gz is compressed. With `decode` the texts of the tokens go along, so that a replay needs
        no tokenizer.
        """
        path = Path(path)
        rows = [row for record in self.records for row in record.rows]
        token_ids = {token_id for row in rows for token_id in row.token_ids}
        token_ids |= {row.sampled_token_id for row in rows if row.sampled_token_id is not None}
        if self.base is not None and self.base.tokens is not None:
            token_ids |= set(self.base.tokens[self.base.tokens >= 0].tolist())
        texts = {token_id: self.decode(token_id) for token_id in sorted(token_ids)} if self.decode else {}
        head = {
            "format": FORMAT, "version": VERSION, "keep": self.records.maxlen, "history": self.history.to_json(),
            "base": self.base and self.base.to_json(), "texts": texts,
        }  # fmt: skip
        opener = gzip.open if path.suffix == ".gz" else open
        with opener(path, "wt", encoding="utf-8") as file:
            for line in (head, *records_to_json(self.records)):
                file.write(json.dumps(line, separators=(",", ":"), ensure_ascii=False) + "\n")
        return path

    @classmethod
    def load(cls, path: str | Path) -> "Recorder":
        """Read what `save` wrote. Raises ValueError, with the line, for anything else."""
        path = Path(path)
        opener = gzip.open if path.suffix == ".gz" else open
        number = 0
        try:
            with opener(path, "rt", encoding="utf-8") as file:
                head = json.loads(file.readline() or "null")
                if not isinstance(head, dict) or head.get("format") != FORMAT or head.get("version") != VERSION:
                    raise ValueError(f"its first line does not begin a run of version {VERSION}")
                texts = {int(token_id): text for token_id, text in head["texts"].items()}
                recorder = cls(head["keep"], (lambda token_id: texts.get(token_id, "�")) if texts else None)
                recorder.history = History.from_json(head["history"])
                if head["base"] is not None:
                    recorder.base = EngineState.from_json(head["base"])
                    recorder.head = recorder.base.copy()
                tables: dict[int, tuple[int, ...]] = {}
                for number, line in enumerate(file, 2):  # noqa: B007 (named in the error)
                    record = record_from_json(json.loads(line), tables)
                    recorder.records.append(record)
                    assert recorder.head is not None
                    recorder.head.fold(record)
        except (ValueError, KeyError, IndexError, TypeError, AttributeError, EOFError) as error:
            where = f"line {number or 1}"
            raise ValueError(f"{path} is not a recorded run ({where}: {type(error).__name__}: {error})") from error
        return recorder


def records_to_json(records: Iterable[StepRecord]) -> Iterable[list[Any]]:
    """Each record as a list in the order of its fields. A row's block table is left out where it has not changed."""
    tables: dict[int, tuple[int, ...]] = {}
    for record in records:
        rows = []
        for row in record.rows:
            table = None if tables.get(row.seq_id) == row.block_table else row.block_table
            tables[row.seq_id] = row.block_table
            rows.append(row._replace(block_table=table))  # type: ignore[arg-type]
        values = {name: getattr(record, name) for name in RECORD_FIELDS}
        timings = [round(seconds, 9) for seconds in record.timings]  # so that words about them are the same
        values.update(rows=rows, timings=timings, time=round(record.time, 6))
        yield list(values.values())


def record_from_json(values: list[Any], tables: dict[int, tuple[int, ...]]) -> StepRecord:
    """`tables` holds the newest block table of each sequence so far, and is brought up to date."""
    got = dict(zip(RECORD_FIELDS, values, strict=True))
    rows = []
    for seq_id, token_ids, num_computed, num_tokens, table, is_prefill, sampled in got["rows"]:
        if table is not None:
            tables[seq_id] = tuple(table)
        rows.append(StepRow(seq_id, tuple(token_ids), num_computed, num_tokens, tables[seq_id], is_prefill, sampled))
    got["rows"] = tuple(rows)
    got["queued"] = tuple((seq_id, length) for seq_id, length in got["queued"])
    got["admitted"] = tuple(Admission(*values) for values in got["admitted"])
    got["preempted"] = tuple(got["preempted"])
    got["finished"] = tuple(Finish(seq, FinishReason(reason), length) for seq, reason, length in got["finished"])
    got["block_events"] = tuple(BlockEvent(BlockEventKind(kind), *rest) for kind, *rest in got["block_events"])
    got["timings"] = StepTimings(*got["timings"])
    return StepRecord(**got)
