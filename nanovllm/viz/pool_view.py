"""BlockPoolView: every KV block of the pool, and who holds it."""

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from nanovllm.viz.recorder import Moment
from nanovllm.viz.scene import Scene, hue_of
from nanovllm.viz.state import EngineState
from nanovllm.viz.views import GAP, PAD, TITLE, Box, Swatch, View, draw_legend
from nanovllm.viz.words import list_of, plural, pool_words, ranges

GUTTER, LEGEND = 34.0, 22.0  # room for the block ids on the left and for the legend below
MIN_CELL, MAX_CELL = 9.0, (64.0, 42.0)
COLS = (10, 20, 30, 40, 50, 60, 80, 100, 120)
FULL_HEIGHT, HALF_HEIGHT = 190.0, 226.0  # of the grid


class Grid(NamedTuple):
    """How a pool is laid out: cell i stands for blocks i * per_cell and on."""

    per_cell: int
    cols: int
    rows: int
    cell_w: float
    cell_h: float


def fit_grid(num_blocks: int, width: float, height: float) -> Grid:
    """The largest cells that fit, in rows of tens so that a block is easy to find; tiny ones become one for several."""
    per_cell = 1
    while True:
        count = -(-num_blocks // per_cell)
        best: tuple[float, Grid] | None = None
        for cols in [count] if count <= 8 else COLS:
            rows = -(-count // cols)
            cell_w, cell_h = min(width / cols, MAX_CELL[0]), min(height / rows, MAX_CELL[1])
            cell_h = min(cell_h, 1.3 * cell_w)
            score = min(cell_w, 1.4 * cell_h)
            if min(cell_w, cell_h) >= MIN_CELL and (best is None or score > best[0]):
                best = (score, Grid(per_cell, cols, rows, cell_w, cell_h))
        if best is not None:
            return best[1]
        per_cell *= 2


class BlockPoolView(View):
    """A cell a block, coloured by the sequence that has held it longest, with its reference count.

    A thick outline: its content was found by its hash and used again (a prefix hit). Hatched: nobody holds it, but its
    content can still be found. Crossed: its content was given up (evicted) since the picture before.
    """

    name = "pool"
    title = "KV block pool"
    is_half = True

    def height(self, width: float, moment: Moment) -> float:
        area = FULL_HEIGHT if width > 600 else HALF_HEIGHT
        if moment.state is not None:
            grid = fit_grid(moment.state.num_blocks, width - 2 * PAD - GUTTER, area)
            area = min(area, grid.rows * grid.cell_h)
        return TITLE + max(area, 48) + LEGEND + GAP

    def summary(self, moment: Moment) -> str:
        if moment.state is None:
            return ""
        counts = moment.state.counts()
        text = f"{counts.held:,} held ({counts.shared:,} shared) · {counts.cached_free:,} cached, free · "
        return text + f"{counts.empty:,} empty" + ("" if moment.state.is_complete else " · from mid-run")

    def words(self, moment: Moment) -> str:
        state = moment.state
        assert state is not None
        lines = [pool_words(state) + "."]
        owners = [f"s{seq_id} {plural(count, 'block')}" for seq_id, count in self._owned(state).items()]
        if owners:
            lines.append("Held by " + list_of(owners, 16) + ".")
        shared = np.flatnonzero(state.ref_count > 1)
        if len(shared):
            most = int(state.ref_count.max())
            lines.append(f"Shared blocks: {ranges(shared.tolist())} (at most {most} holders).")
        hit = np.flatnonzero(state.num_hits * (state.is_cached | (state.ref_count > 0)))
        if len(hit):
            lines.append(f"Blocks with a prefix hit: {ranges(hit.tolist())}.")
        evicted = np.flatnonzero(state.evict_step > moment.since)
        if len(evicted):
            lines.append(f"Evicted just now: {ranges(evicted.tolist())}.")
        return " ".join(lines)

    @staticmethod
    def _owned(state: EngineState) -> dict[int, int]:
        owned: dict[int, int] = {}
        for seq_ids in state.holders.values():
            for seq_id in seq_ids:
                owned[seq_id] = owned.get(seq_id, 0) + 1
        return dict(sorted(owned.items()))

    def paint(self, scene: Scene, box: Box, moment: Moment) -> None:
        state = moment.state
        assert state is not None
        area = Box(box.x + GUTTER, box.y, box.w - GUTTER, box.h - LEGEND)
        grid = fit_grid(state.num_blocks, area.w, area.h)
        index = np.arange(-(-state.num_blocks // grid.per_cell))
        x = area.x + index % grid.cols * grid.cell_w
        y = area.y + index // grid.cols * grid.cell_h
        gap = 1.0 if grid.cell_w < 16 else 2.0
        size = (grid.cell_w - gap, grid.cell_h - gap)
        step = max(1, -(-14 // int(grid.cell_h)))  # the ids on the left need 14 pixels each
        rows = np.arange(0, grid.rows, step)
        ids = [f"{row * grid.cols * grid.per_cell:,}" for row in rows.tolist()]
        scene.text(area.x - 6, area.y + rows * grid.cell_h + size[1] / 2, ids, 9, color="muted", align="r")
        if grid.per_cell == 1:
            self._paint_blocks(scene, state, moment.since, x, y, size)
        else:
            self._paint_shares(scene, state, moment.since, grid.per_cell, x, y, size)
        self._paint_legend(scene, Box(box.x, box.y + box.h - LEGEND, box.w, LEGEND), grid.per_cell)

    @staticmethod
    def _paint_blocks(
        scene: Scene, state: EngineState, since: int, x: NDArray[Any], y: NDArray[Any],
        size: tuple[float, float],
    ) -> None:  # fmt: skip
        w, h = size
        held, cached = state.ref_count > 0, state.is_cached & (state.ref_count == 0)
        unheld = ~held & ~cached
        scene.rects(x[unheld] + 0.5, y[unheld] + 0.5, w - 1, h - 1, "empty", stroke="line")
        scene.rects(x[cached] + 0.5, y[cached] + 0.5, w - 1, h - 1, "empty", stroke="line", hatch="hatch")
        scene.rects(x[held], y[held], w, h, hue_of(state.owner[held]), tags=state.owner[held])
        thick = 2.0 if w >= 12 else 1.5
        hit, new = (state.num_hits > 0) & (held | cached), state.hit_step > since
        for mask, is_flash in ((hit & ~new, False), (hit & new, True)):
            left, top = x[mask] + thick / 2, y[mask] + thick / 2
            scene.rects(left, top, w - thick, h - thick, stroke="ink", line_width=thick, is_flash=is_flash)
        gone = state.evict_step > since
        left, top = x[gone] + thick / 2, y[gone] + thick / 2
        scene.rects(left, top, w - thick, h - thick, stroke="alarm", line_width=thick, is_flash=True)
        scene.crosses(x[gone] + 2, y[gone] + 2, w - 4, h - 4, "alarm", 1.0)
        ids, counts = np.flatnonzero(held), state.ref_count[held].tolist()
        middle = x[ids] + w / 2
        owners = [f"s{seq_id}" for seq_id in state.owner[ids].tolist()] if w >= 22 else []
        times = [f"×{n}" for n in counts]
        if w >= 22 and h >= 25:
            scene.text(middle, y[ids] + h / 2 - 6, owners, min(11, w / 2.9), color="on_hue", align="c", is_bold=True)
            scene.text(middle, y[ids] + h / 2 + 7, times, 9, color="on_hue", align="c")
        elif w >= 36:
            scene.text(x[ids] + 4, y[ids] + h / 2, owners, 9.5, color="on_hue", is_bold=True)
            scene.text(x[ids] + w - 3, y[ids] + h / 2, times, 9, color="on_hue", align="r")
        elif w >= 12:
            scene.text(middle, y[ids] + h / 2, [str(n) for n in counts], min(9.5, h - 3), color="on_hue", align="c")

    @staticmethod
    def _paint_shares(
        scene: Scene, state: EngineState, since: int, per_cell: int, x: NDArray[Any], y: NDArray[Any],
        size: tuple[float, float],
    ) -> None:  # fmt: skip
        """Cells of several blocks: filled from below by the share that is held, then hatched by what can be found."""
        w, h = size
        starts = np.arange(0, state.num_blocks, per_cell)
        blocks = np.minimum(per_cell, state.num_blocks - starts)
        held_blocks = state.ref_count > 0
        held = np.add.reduceat(held_blocks, starts, dtype=np.int64) / blocks * h
        cached = np.add.reduceat(state.is_cached & ~held_blocks, starts, dtype=np.int64) / blocks * h
        scene.rects(x, y, w, h, "empty")
        some = cached > 0
        scene.rects(x[some], (y + h - held - cached)[some], w, cached[some], "empty", hatch="hatch")
        some = held > 0
        scene.rects(x[some], (y + h - held)[some], w, held[some], "held")
        marks = (("ink", state.hit_step > since, h), ("alarm", state.evict_step > since, 0.0))
        for color, blocks_marked, offset in marks:  # hits underline the cell, evictions overline it
            some = np.logical_or.reduceat(blocks_marked, starts)
            scene.rects(x[some], y[some] + offset - 1, w, 2, color, is_flash=True)

    @staticmethod
    def _paint_legend(scene: Scene, box: Box, per_cell: int) -> None:
        y = box.y + 15
        if per_cell == 1:
            entries = [
                Swatch("held (count)", fill="hues"),
                Swatch("prefix hit", fill="hues", stroke="ink"),
                Swatch("cached, free", fill="empty", stroke="line", hatch="hatch"),
                Swatch("empty", fill="empty", stroke="line"),
                Swatch("evicted", stroke="alarm", is_crossed=True),
            ]
        else:
            entries = [
                Swatch(f"held, {per_cell:,} blocks a cell", fill="held"),
                Swatch("cached, free", fill="empty", hatch="hatch"),
                Swatch("hit", fill="ink", shape=(12, 2)),
                Swatch("evicted", fill="alarm", shape=(12, 2)),
            ]
        draw_legend(scene, box.x, y, entries)
