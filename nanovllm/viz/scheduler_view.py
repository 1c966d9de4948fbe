"""SchedulerView: what each sequence did in each step, and how much of the token budget each step used."""

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from nanovllm.viz.history import (
    ABORT,
    DECODE,
    FINISH,
    HIT,
    PREEMPT,
    PREEMPTED,
    PREFILL,
    RESIDENT,
    WAITING,
    History,
    Timeline,
)
from nanovllm.viz.recorder import Moment, Recorder
from nanovllm.viz.scene import Scene
from nanovllm.viz.tables_view import draw_names
from nanovllm.viz.views import GAP, TITLE, Box, Swatch, View, draw_legend
from nanovllm.viz.words import plural, run_words

GUTTER, MARGIN = 64.0, 74.0  # left of the plot for names, right of it for the budget
MAX_ROWS = 48
BUDGET, DECODES, AXIS, LEGEND = 58.0, 34.0, 16.0, 22.0
Mask = NDArray[np.bool_]


class Columns(NamedTuple):
    """Where the columns of the plot are: column i covers [x + i * w, x + (i + 1) * w)."""

    x: float
    w: float
    number: int


class SchedulerView(View):
    """A line for each sequence, a column for each step (or for several, once the run is long).

    The shape says what it did: a full bar is a prefill chunk, a half bar a decode, a red hatched bar a preemption; a
    dotted line waits, a thin line is resident without being scheduled, a bar across the line is its end. Below, the
    tokens of each step against the budget, prefill and decode apart.

    last: show only this many of the newest steps, one column each (those that the recorder keeps whole).
    """

    name = "scheduler"
    title = "Scheduler"

    def __init__(self, recorder: Recorder | None = None, *, last: int | None = None) -> None:
        super().__init__(recorder)
        if last is not None and last < 1:
            raise ValueError(f"last must be at least 1 step, got {last}")
        self.last = last

    def _history(self, moment: Moment) -> tuple[History, int]:
        """What is drawn, and how many of its columns."""
        if self.last is None or moment.state is None or not self.recorder.steps:
            return moment.history, moment.num_columns
        steps = self.recorder.steps
        end = min(moment.state.step, steps[-1])
        start = max(end - self.last + 1, steps[0])
        history = History(capacity=self.last + self.last % 2)
        if start > steps[0]:
            history.seed(self.recorder.at(start - 1))
        elif self.recorder.base is not None:
            history.seed(self.recorder.base)
        for step in range(start, end + 1):
            history.fold(self.recorder.record(step))
        return history, len(history.columns)

    def height(self, width: float, moment: Moment) -> float:
        return TITLE + self._rows_height(moment) + BUDGET + DECODES + AXIS + 3 * GAP + LEGEND

    @staticmethod
    def _rows_height(moment: Moment) -> float:
        """Room for 4, 8, 12 or 16 lines: it grows at most three times in a run. More lines are thinner ones."""
        return 64.0 * min(4, max(1, -(-len(moment.history.rows) // 4)))

    def summary(self, moment: Moment) -> str:
        state, record = moment.state, moment.record
        if state is None:
            return ""
        width = moment.history.steps_per_column if self.last is None else 1
        text = f"step {state.step:,}" + (f", {record.phase}" if record else "")
        text += f" · {len(state.by_status('running')):,} running, "
        text += f"{len(state.by_status('waiting', 'preempted')):,} waiting · "
        text += plural(int(moment.totals["preemptions"]), "preemption")
        return text + (f" · a column is {width:,} steps" if width > 1 else "")

    def words(self, moment: Moment) -> str:
        history, count = self._history(moment)
        lines = [run_words(moment.totals, moment.history.num_sequences) + "."]
        timeline = history.timeline(self._chosen(history, moment, count))
        names = {PREFILL: "P", DECODE: "D", PREEMPT: "x"}
        marks = {WAITING: ".", RESIDENT: "-", PREEMPTED: ":", 0: " "}
        for seq_id, events, standing in zip(timeline.seq_ids, timeline.events, timeline.standing, strict=True):
            letters = []
            for event, stand in zip(events[:count].tolist(), standing[:count].tolist(), strict=True):
                happened = [letter for flag, letter in names.items() if event & flag]
                letters.append("B" if len(happened) > 1 else happened[0] if happened else marks[stand])
            lines.append(f"  s{seq_id:<5} {''.join(letters).rstrip()}")
        key = "P prefill, D decode, B several in one column, x preempted, . waits, : waits again, - resident"
        return "\n".join([*lines, f"  ({key})"])

    # -- drawing

    def paint(self, scene: Scene, box: Box, moment: Moment) -> None:
        history, count = self._history(moment)
        plot_w = box.w - GUTTER - MARGIN
        group = 1
        while plot_w * group / history.capacity < 3:
            group *= 2
        num_columns = -(-count // group)
        slots = 32  # the plot fills from the left; when it is full its columns get half as wide
        while slots < num_columns:
            slots *= 2
        columns = Columns(box.x + GUTTER, plot_w / slots, num_columns)
        rows = Box(columns.x, box.y, plot_w, self._rows_height(moment))
        self._paint_rows(scene, rows, columns, self._grouped(history, moment, count, group), moment)
        series = history.series()
        starts = np.arange(0, count, group)
        below = Box(rows.x, rows.y + rows.h + GAP, plot_w, BUDGET)
        if count:
            names = ("steps", "prefill_tokens", "decode_tokens")
            sums = {name: np.add.reduceat(series[name][:count], starts) for name in names}
            self._paint_budget(scene, below, columns, sums, moment)
            self._paint_axis(scene, below.y + BUDGET + GAP + DECODES, columns, series["first_step"][starts])
        self._paint_legend(scene, box.x, box.y + box.h - 5)
        if not moment.is_latest and count:
            x = columns.x + num_columns * columns.w
            scene.line([x, x], [rows.y, below.y + BUDGET + GAP + DECODES], "ink", is_dashed=True)

    @staticmethod
    def _chosen(history: History, moment: Moment, count: int) -> list[int]:
        """At most MAX_ROWS sequences, in the order of arrival: those at work, then those that ended or came last."""
        known = [seq_id for seq_id, cells in history.rows.items() if any(cells[:count])]
        if len(known) <= MAX_ROWS:
            return known
        working = {info.seq_id for info in (moment.state.by_status("running", "preempted") if moment.state else [])}
        ranked = sorted(known, key=lambda seq_id: (seq_id not in working, seq_id not in history.ended, -seq_id))
        chosen = set(ranked[:MAX_ROWS])
        return [seq_id for seq_id in known if seq_id in chosen]

    def _grouped(self, history: History, moment: Moment, count: int, group: int) -> Timeline:
        """The timeline, with `group` columns drawn as one."""
        timeline = history.timeline(self._chosen(history, moment, count))
        events, standing = timeline.events[:, :count], timeline.standing[:, :count]
        if group == 1 or not count:
            return Timeline(timeline.seq_ids, events, standing)
        starts = np.arange(0, count, group)
        ends = np.minimum(starts + group, count) - 1
        return Timeline(timeline.seq_ids, np.bitwise_or.reduceat(events, starts, axis=1), standing[:, ends])

    def _paint_rows(self, scene: Scene, box: Box, columns: Columns, timeline: Timeline, moment: Moment) -> None:
        num_rows = len(timeline.seq_ids)
        if not num_rows:
            return
        pitch = min(16.0, box.h / num_rows)
        every = max(1, int(np.ceil(10.0 / pitch)))  # a name is 10 pixels high: from 26 rows on every other one has room
        named = np.arange(0, num_rows, every)
        draw_names(scene, box.x - GUTTER, box.y + (named + 0.5) * pitch, timeline.seq_ids[::every])
        note = []
        if moment.history.num_sequences > num_rows and self.last is None:
            note += [f"{num_rows} of", f"{moment.history.num_sequences:,}", "sequences"]
        if every > 1:
            note += ["every other", "row is named"]
        scene.text(box.x + box.w + 8, box.y + 8 + 13.0 * np.arange(len(note)), note, 9.5, color="muted")
        if pitch >= 8:
            scene.rects(box.x, box.y + np.arange(1, num_rows + 1) * pitch - 0.25, box.w, 0.5, "line")
        bar = max(pitch - 3, pitch * 0.75)
        self._paint_cells(scene, box, columns, timeline, (pitch, bar))
        if columns.w >= 20 and pitch >= 13:
            self._paint_chunk_sizes(scene, box, columns, timeline, pitch, moment)

    @staticmethod
    def _paint_cells(scene: Scene, box: Box, columns: Columns, timeline: Timeline, sizes: tuple[float, float]) -> None:
        pitch, bar = sizes
        events, standing = timeline.events, timeline.standing
        seq_ids = np.array(timeline.seq_ids)
        worked = (events & (PREFILL | DECODE | PREEMPT)) > 0
        gap = 1.0 if columns.w >= 5 else 0.0

        def bars(
            mask: Mask, top: float, height: float, fill: str, *, is_joined: bool, hatch: str | None = None
        ) -> None:
            """Bars from `top` (0 to 1 of the bar's height) in the masked cells."""
            row, start, length = runs(mask) if is_joined else single(mask)
            x, w = columns.x + start * columns.w, length * columns.w - (0 if is_joined else gap)
            y = box.y + row * pitch + (pitch - bar) / 2 + top * bar
            scene.rects(x, y, w, height * bar, fill, tags=seq_ids[row], stroke=hatch, hatch=hatch)

        thin = 2.0 / bar
        bars(~worked & (standing == RESIDENT), 0.5 - thin / 2, thin, "decode", is_joined=True)
        waits = ~worked & (standing == WAITING)
        for mask, color in ((waits, "idle"), (~worked & (standing == PREEMPTED), "alarm")):
            row, start, length = runs(mask)
            middle: NDArray[Any] = box.y + (row + 0.5) * pitch
            ends = columns.x + start * columns.w, columns.x + (start + length) * columns.w
            scene.dashes(*ends, middle, color, 1.5)
        prefill, decode = (events & PREFILL) > 0, (events & DECODE) > 0
        both, joined = prefill & decode, columns.w < 5
        bars(prefill & ~decode, 0, 1, "prefill", is_joined=joined)
        bars(decode & ~prefill, 0.25, 0.5, "decode", is_joined=columns.w < 12)
        bars(both, 0, 0.5, "prefill", is_joined=joined)
        bars(both, 0.5, 0.5, "decode", is_joined=joined)
        bars((events & PREEMPT) > 0, 0, 1, "paper", is_joined=False, hatch="alarm")
        row, column = np.nonzero(events & HIT)
        bottom = box.y + row * pitch + (pitch + bar) / 2
        thick = min(2.0, 0.35 * bar)
        scene.rects(columns.x + column * columns.w, bottom - thick, columns.w - gap, thick, "ink")
        row, column = np.nonzero(events & FINISH)
        scene.rects(columns.x + (column + 1) * columns.w - 1, box.y + row * pitch + 0.5, 2, pitch - 1, "ink")
        row, column = np.nonzero(events & ABORT)
        size = min(8.0, pitch - 2)
        left: NDArray[Any] = columns.x + (column + 1) * columns.w - size / 2
        scene.crosses(left, box.y + (row + 0.5) * pitch - size / 2, size, size, "ink", 1.5)

    def _paint_chunk_sizes(
        self, scene: Scene, box: Box, columns: Columns, timeline: Timeline, pitch: float, moment: Moment
    ) -> None:
        """The tokens of each prefill chunk, where a column is one step and wide enough."""
        if moment.history.steps_per_column > 1 and self.last is None:
            return
        steps, last = self.recorder.steps, (moment.state.step if moment.state else 0)
        line_of = {seq_id: line for line, seq_id in enumerate(timeline.seq_ids)}
        for column in range(columns.number):
            step = last - (columns.number - 1 - column)
            if step not in steps:
                continue
            x = columns.x + (column + 0.5) * columns.w - 0.5
            for row in self.recorder.record(step).rows:
                text = str(len(row.token_ids))
                if row.is_prefill and row.seq_id in line_of and len(text) * 5.2 <= columns.w - 1:
                    y = box.y + (line_of[row.seq_id] + 0.5) * pitch
                    scene.text(x, y - 0.5, text, 8.5, color="on_prefill", align="c")

    @staticmethod
    def _paint_budget(
        scene: Scene, box: Box, columns: Columns, sums: dict[str, NDArray[np.float64]], moment: Moment
    ) -> None:
        prefill, decode = (sums[name] / sums["steps"] for name in ("prefill_tokens", "decode_tokens"))
        total = prefill + decode
        budget = moment.record.token_budget if moment.record else int(total.max())
        is_near = total.max() >= 0.15 * budget  # else the line would leave nothing of the bars
        top = max(budget * 1.12 if is_near else 0, total.max() * 1.25, 1)
        gap = 1.0 if columns.w >= 5 else 0.0
        x = columns.x + np.arange(columns.number) * columns.w

        def strip(y: float, height: float, peak: float, label: str, parts: list[tuple[NDArray[Any], str]]) -> None:
            base = np.zeros(columns.number)
            for values, color in parts:
                some = values > 0
                h = values * height / peak
                scene.rects(x[some], (y + height - base - h)[some], columns.w - gap, h[some], color)
                base += h
            scene.line([box.x, box.x + box.w], [y + height, y + height], "line")
            scene.text(box.x - GUTTER, y + 5, label, 9.5, color="muted")
            scene.text(box.x - 6, y + height - 4, "0", 9, color="muted", align="r")

        strip(box.y, box.h, top, "tokens", [(prefill, "prefill"), (decode, "decode")])
        highest = int(max(decode.max(), 1))
        strip(box.y + box.h + GAP, DECODES, highest * 1.15, "decode", [(decode, "decode")])
        y = box.y + box.h + GAP + DECODES * (1 - 1 / 1.15)
        scene.text(box.x + box.w + 8, y + 4, f"{highest:,} at most", 9.5, color="muted")
        if is_near:
            y = box.y + box.h * (1 - budget / top)
            scene.line([box.x, box.x + box.w], [y, y], "ink", is_dashed=True)
            scene.text(box.x + box.w + 8, y, f"budget {budget:,}", 9.5)
        else:
            note = [f"{int(total.max()):,} at most", f"of {budget:,}"]
            scene.text(box.x + box.w + 8, box.y + np.array([16.0, 29.0]), note, 9.5, color="muted")

    @staticmethod
    def _paint_axis(scene: Scene, y: float, columns: Columns, first_steps: NDArray[np.float64]) -> None:
        every = 1
        while every * columns.w < 56:
            every *= 2
        ticks = np.arange(0, columns.number, every)
        x = columns.x + (ticks + 0.5) * columns.w
        scene.text(x, y + 9, [f"{int(step):,}" for step in first_steps[ticks]], 9, color="muted", align="c")
        scene.text(columns.x - GUTTER, y + 9, "step", 9.5, color="muted")

    @staticmethod
    def _paint_legend(scene: Scene, x: float, y: float) -> None:
        entries = [
            Swatch("prefill", fill="prefill"), Swatch("decode", fill="decode", shape=(12, 6)),
            Swatch("preempted", fill="paper", stroke="alarm", hatch="alarm"),
            Swatch("resident, not scheduled", fill="decode", shape=(12, 2)),
        ]  # fmt: skip
        x = draw_legend(scene, x, y, entries)
        scene.line([x - 2, x + 13], [y, y], "idle", line_width=1.5, is_dashed=True)
        scene.text(x + 17, y, "waits", 10, color="muted")
        entries = [
            Swatch("prefix hit", fill="ink", shape=(12, 2)), Swatch("ended", fill="ink", shape=(2, 12)),
        ]  # fmt: skip
        x = draw_legend(scene, x + 62, y, entries)
        scene.crosses(np.array([x + 2.0]), np.array([y - 4]), 8, 8, "ink", 1.5)
        scene.text(x + 17, y, "aborted", 10, color="muted")


def single(mask: Mask) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    """Each True by itself, in the form of `runs`."""
    row, start = np.nonzero(mask)
    return row, start, np.ones_like(start)


def runs(mask: Mask) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    """The stretches of True in each row: (row, start, length) of each. [[0, 1, 1, 0, 1]] -> (0, 1, 2) and (0, 4, 1)."""
    padded = np.zeros((mask.shape[0], mask.shape[1] + 2), np.int8)
    padded[:, 1:-1] = mask
    change = np.diff(padded, axis=1)
    row, start = np.nonzero(change == 1)
    return row, start, np.nonzero(change == -1)[1] - start
