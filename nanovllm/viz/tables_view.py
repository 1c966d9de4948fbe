"""BlockTablesView: where each sequence's tokens lie, block by block or token by token."""

from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from nanovllm.viz.recorder import Moment, Recorder
from nanovllm.viz.scene import COLOR, Scene, clip, hue, hue_of
from nanovllm.viz.state import EngineState, SequenceInfo
from nanovllm.viz.views import GAP, TITLE, Box, Swatch, View, draw_legend
from nanovllm.viz.words import plural, sequence_words, token_text

GUTTER, LEGEND = 106.0, 22.0
ROW = 19.0  # a sequence's line of blocks
SLOT_W, SLOT_H, SLOT_LINE = 46.0, 19.0, 38.0  # one token's slot at least; a line of slots, the block's number above


class TableCell(NamedTuple):
    """One block of one sequence's table, as it is drawn."""

    x: float
    y: float
    block_id: int
    fill: float  # 0 to 1
    is_hit: bool  # from the prefix cache
    seq_id: int


class BlockTablesView(View):
    """For each running sequence its logical → physical blocks, the last one filled as far as it is.

    tokens: show each slot with its token's text instead (blocks of up to 16 tokens, pools of up to 65,536 slots).
    lines: how many lines of blocks (or of slots) there is room for.
    """

    name = "tables"
    title = "Block tables"

    def __init__(self, recorder: Recorder | None = None, *, tokens: bool = False, lines: int | None = None) -> None:
        super().__init__(recorder)
        self.tokens = tokens
        self.lines = lines if lines is not None else 8 if tokens else 12
        if tokens:
            self.name, self.title = "tokens", "Tokens in their slots"

    @property
    def is_half(self) -> bool:  # type: ignore[override]
        return not self.tokens

    def height(self, width: float, moment: Moment) -> float:
        if self.tokens:  # two lines for each sequence of the fullest step
            lines = min(self.lines, max(4, 2 * moment.history.most_rows))
        else:
            lines = min(self.lines, max(4, -(-moment.history.num_sequences // 4) * 4))  # it grows a few times in a run
        if self.tokens and moment.state is not None and not can_show_tokens(moment.state):
            lines = 1
        return TITLE + LEGEND + GAP + lines * (SLOT_LINE if self.tokens else ROW)

    def summary(self, moment: Moment) -> str:
        if moment.state is None:
            return ""
        running, others = moment.state.by_status("running"), moment.state.by_status("waiting", "preempted")
        text = f"{plural(len(running), 'sequence')} running, {len(others):,} waiting"
        return text + f" · blocks of {plural(moment.state.block_size, 'token')}"

    def words(self, moment: Moment) -> str:
        state = moment.state
        assert state is not None
        others = sorted(state.by_status("waiting", "preempted"), key=lambda info: info.seq_id)
        infos = holders(state, moment) + others
        lines = [self.summary(moment) + "."]
        for info in infos[:16]:
            lines.append("  " + sequence_words(info, state.block_size))
            if self.tokens and can_show_tokens(state):
                lines += ["    " + line for line in self._slot_words(state, info, moment)]
        if len(infos) > 16:
            lines.append(f"  and {len(infos) - 16:,} more")
        return "\n".join(lines)

    def _slot_words(self, state: EngineState, info: SequenceInfo, moment: Moment) -> list[str]:
        lines = []
        for block_id in info.block_table:
            texts = [token_text(t, moment.decode) if t >= 0 else "_" for t in self._slots(state, block_id)]
            lines.append(f"block {block_id}: {' | '.join(texts)}")
        return lines

    @staticmethod
    def _slots(state: EngineState, block_id: int) -> list[int]:
        assert state.tokens is not None
        tokens: list[int] = state.tokens[block_id].tolist()
        return tokens

    def paint(self, scene: Scene, box: Box, moment: Moment) -> None:
        state = moment.state
        assert state is not None
        body = Box(box.x, box.y, box.w, box.h - LEGEND)
        if not self.tokens:
            self._paint_tables(scene, body, state, moment)
        elif not can_show_tokens(state):
            note = "Tokens are shown for blocks of up to 16 tokens and pools of up to 65,536 slots."
            scene.text(box.x, box.y + 16, note, 11, color="muted")
        else:
            self._paint_slots(scene, body, state, moment)
        self._paint_legend(scene, Box(box.x, box.y + box.h - LEGEND, box.w, LEGEND))

    # -- block by block

    def _paint_tables(self, scene: Scene, box: Box, state: EngineState, moment: Moment) -> None:
        infos = holders(state, moment)
        infos += sorted(state.by_status("preempted", "waiting"), key=lambda info: (info.status, info.seq_id))
        room = int(box.h // ROW)
        shown = infos if len(infos) <= room else infos[: room - 1]
        cell = 40.0 if state.num_blocks > 9999 else 31.0
        middles = box.y + (np.arange(len(shown)) + 0.5) * ROW
        draw_names(scene, box.x, middles, [info.seq_id for info in shown])
        cells: list[TableCell] = []
        for info, y in zip(shown, middles.tolist(), strict=True):
            if info.status in ("running", "ended"):
                tokens = f"{info.num_computed_tokens:,} tok"
                scene.text(box.x + GUTTER - 8, y, tokens, 9.5, color="muted", align="r")
                row = Box(box.x + GUTTER, y - ROW / 2 + 1.5, box.w - GUTTER, ROW - 4)
                cells += self._row_cells(scene, row, state.block_size, info, cell)
            else:
                waits = plural(info.num_tokens, "token")
                what = f"waits with {waits}" if info.status == "waiting" else f"preempted: {waits} to compute again"
                scene.text(box.x + GUTTER, y, what, 10, color="muted" if info.status == "waiting" else "alarm")
        self._paint_cells(scene, cells, cell - 2, ROW - 4)
        if not infos:
            scene.text(box.x, box.y + ROW / 2, "No sequence is running or waiting.", 10.5, color="muted")
        if len(shown) < len(infos):
            y = box.y + len(shown) * ROW + ROW / 2
            scene.text(box.x, y, f"and {len(infos) - len(shown):,} more sequences", 10, color="muted")

    @staticmethod
    def _row_cells(scene: Scene, box: Box, size: int, info: SequenceInfo, pitch: float) -> list[TableCell]:
        """The cells of one sequence, and what is written beside them."""
        table, is_over = info.block_table, info.status == "ended"
        room = int((box.w - 44 * is_over) // pitch)
        places = range(len(table))
        if len(table) > room:  # the middle is left out: the first blocks show sharing, the last ones growth
            head = (room - 1) // 2
            places = [*range(head), *range(len(table) - (room - 1 - head), len(table))]  # type: ignore[assignment]
            middle = box.x + (head + 0.5) * pitch - 1
            scene.text(middle, box.y + box.h / 2, f"+{len(table) - room + 1}", 9.5, color="muted", align="c")
        cells = []
        for index, place in enumerate(places):
            column = index + (len(table) > room and index >= (room - 1) // 2)
            fill = min(max((info.num_computed_tokens - place * size) / size, 0.0), 1.0) * (not is_over)
            is_hit = (place + 1) * size <= info.num_cached_tokens
            cells.append(TableCell(box.x + column * pitch, box.y, table[place], fill, is_hit, info.seq_id))
        if is_over and cells:
            scene.text(cells[-1].x + pitch + 4, box.y + box.h / 2, "ended", 10, color="muted")
        return cells

    @staticmethod
    def _paint_cells(scene: Scene, cells: list[TableCell], w: float, h: float) -> None:
        if not cells:
            return
        x, y, _, share, is_hit, tags = (np.array(column) for column in zip(*cells, strict=True))
        fill, hues = share * w, hue_of(tags)
        scene.rects(x + 0.5, y + 0.5, w - 1, h - 1, "empty", stroke="line", tags=tags)
        some = fill > 0
        scene.rects(x[some], y[some], fill[some], h, hues[some], tags=tags[some])
        scene.rects(x[is_hit] + 1, y[is_hit] + 1, w - 2, h - 2, stroke="ink", line_width=2)
        # The number stands on the wider part, the coloured or the empty one: on a dark page no ink suits both.
        is_on_hue = fill >= 0.5 * w
        middle = x + np.where(is_on_hue, fill, fill + w) / 2
        colors = np.where(is_on_hue, COLOR["on_hue"], COLOR["ink"])
        scene.text(middle, y + h / 2, [str(cell.block_id) for cell in cells], 9.5, color=colors, align="c")

    # -- token by token

    def _paint_slots(self, scene: Scene, box: Box, state: EngineState, moment: Moment) -> None:
        infos = holders(state, moment)
        if not infos:
            scene.text(box.x, box.y + 16, "No sequence is running.", 11, color="muted")
            return
        per_line = max(1, int((box.w - GUTTER) // (state.block_size * SLOT_W + 6)))  # blocks in a line
        pitch = (box.w - GUTTER) / per_line  # of a block
        room = int(box.h // SLOT_LINE)
        infos, share = infos[:room], max(1, room // len(infos))
        line = 0
        for info in infos:
            y = box.y + line * SLOT_LINE
            draw_names(scene, box.x, [y + 12 + SLOT_H / 2], [info.seq_id])
            wanted = -(-len(info.block_table) // per_line)
            first = max(0, wanted - share) * per_line  # the newest blocks are shown
            if first:
                scene.text(box.x, y + 12 + SLOT_H + 5, f"from block {first}", 9, color="muted")
            for place, block_id in enumerate(info.block_table[first:]):
                x = box.x + GUTTER + place % per_line * pitch
                where = Box(x, y + place // per_line * SLOT_LINE, pitch - 6, SLOT_LINE)
                self._paint_block(scene, where, state, info, (first + place, block_id), moment)
            line += max(1, min(wanted, share))

    def _paint_block(
        self, scene: Scene, box: Box, state: EngineState, info: SequenceInfo, which: tuple[int, int], moment: Moment
    ) -> None:
        (place, block_id), size = which, state.block_size
        w = min(64.0, box.w / size)
        count = int(state.ref_count[block_id])
        shared = f" ×{count}" if count > 1 else ""
        scene.text(box.x, box.y + 5, f"block {block_id}{shared}", 9, color="muted")
        offsets = np.arange(size)
        x, y = box.x + offsets * w, box.y + 12
        filled = np.clip(info.num_computed_tokens - place * size, 0, size)
        tokens = self._slots(state, block_id)[:filled]
        scene.rects(x + 0.5, y + 0.5, w - 1, SLOT_H - 1, "empty", stroke="line", tags=info.seq_id)
        scene.rects(x[:filled] + 1, y + 1, w - 2, SLOT_H - 2, hue(info.seq_id), tags=info.seq_id)
        generated = offsets[:filled] + place * size >= info.num_prompt_tokens
        scene.rects(x[:filled][generated] + 1, y + SLOT_H - 4, w - 2, 3, "decode")
        if (place + 1) * size <= info.num_cached_tokens:
            scene.rects(box.x + 1, y + 1, size * w - 2, SLOT_H - 2, stroke="ink", line_width=2)
        texts = [clip(token_text(t, moment.decode) if t >= 0 else "?", w - 4, 9.5) for t in tokens]
        scene.text(x[:filled] + w / 2, y + SLOT_H / 2 - 1, texts, 9.5, color="on_hue", align="c")
        rows = [row for row in moment.record.rows if row.seq_id == info.seq_id] if moment.record else []
        for row in rows:
            start, end = row.num_computed_tokens - place * size, row.num_computed_tokens + len(row.token_ids)
            new = offsets[max(start, 0) : max(end - place * size, 0)]
            scene.rects(x[new] + 1, y - 2, w - 2, 3, "ink", is_flash=True)

    def _paint_legend(self, scene: Scene, box: Box) -> None:
        cached = Swatch("from the prefix cache", fill="hues", stroke="ink")
        if self.tokens:
            entries = [
                Swatch("prompt token", fill="hues"),
                Swatch("generated (bar below)", fill="decode", shape=(12, 3)),
                Swatch("written in this step (bar above)", fill="ink", shape=(12, 3)),
                cached,
                Swatch("empty slot", fill="empty", stroke="line"),
            ]
        else:
            entries = [
                Swatch("physical block", fill="hues"),
                cached,
                Swatch("not filled yet", fill="empty", stroke="line"),
            ]
        draw_legend(scene, box.x, box.y + 15, entries)


def can_show_tokens(state: EngineState) -> bool:
    return state.tokens is not None and state.block_size <= 16


def holders(state: EngineState, moment: Moment) -> list[SequenceInfo]:
    """The sequences that hold blocks, then those that have let go of theirs in this very step."""
    running = sorted(state.by_status("running"), key=lambda info: info.seq_id)
    return running + moment.ended()


def draw_names(scene: Scene, x: float, y: ArrayLike, seq_ids: list[int]) -> None:
    """The sequences' colours and numbers, as in every panel, their middles at y."""
    scene.rects(x, np.asarray(y) - 5, 8, 10, hue_of(seq_ids), tags=seq_ids)
    scene.text(x + 13, y, [f"s{seq_id}" for seq_id in seq_ids], 10.5, is_bold=True)
