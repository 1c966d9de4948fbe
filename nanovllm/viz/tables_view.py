"""BlockTablesView: where each sequence's tokens lie, block by block or token by token."""

import numpy as np

from nanovllm.viz.recorder import Moment, Recorder
from nanovllm.viz.scene import Scene, clip, hue
from nanovllm.viz.state import EngineState, SequenceInfo
from nanovllm.viz.views import GAP, TITLE, Box, Swatch, View, draw_legend
from nanovllm.viz.words import plural, sequence_words, token_text

GUTTER, LEGEND = 84.0, 22.0
ROW = 19.0  # a sequence's line of blocks
SLOT_W, SLOT_H, SLOT_LINE = 46.0, 19.0, 38.0  # one token's slot at least; a line of slots, the block's number above


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
        return TITLE + LEGEND + GAP + self.lines * (SLOT_LINE if self.tokens else ROW)

    def summary(self, moment: Moment) -> str:
        if moment.state is None:
            return ""
        running, others = moment.state.by_status("running"), moment.state.by_status("waiting", "preempted")
        text = f"{plural(len(running), 'sequence')} running, {len(others):,} waiting"
        return text + f" · blocks of {plural(moment.state.block_size, 'token')}"

    def words(self, moment: Moment) -> str:
        state = moment.state
        assert state is not None
        infos = sorted(state.sequences.values(), key=lambda info: (info.status != "running", info.seq_id))
        lines = [self.summary(moment) + "."]
        for info in infos[:16]:
            lines.append("  " + sequence_words(info, state.block_size))
            if self.tokens and state.tokens is not None:
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
            self._paint_tables(scene, body, state)
        elif state.tokens is None or state.block_size > 16:
            note = "Tokens are shown for blocks of up to 16 tokens and pools of up to 65,536 slots."
            scene.text(box.x, box.y + 16, note, 11, color="muted")
        else:
            self._paint_slots(scene, body, state, moment)
        self._paint_legend(scene, Box(box.x, box.y + box.h - LEGEND, box.w, LEGEND))

    # -- block by block

    def _paint_tables(self, scene: Scene, box: Box, state: EngineState) -> None:
        infos = sorted(state.by_status("running"), key=lambda info: info.seq_id)
        infos += sorted(state.by_status("preempted", "waiting"), key=lambda info: (info.status, info.seq_id))
        room = int(box.h // ROW)
        shown = infos if len(infos) <= room else infos[: room - 1]
        cell = 40.0 if state.num_blocks > 9999 else 31.0
        for line, info in enumerate(shown):
            y = box.y + line * ROW
            draw_name(scene, box.x, y + ROW / 2, info.seq_id)
            if info.status == "running":
                tokens = f"{info.num_computed_tokens:,} tok"
                scene.text(box.x + GUTTER - 8, y + ROW / 2, tokens, 9.5, color="muted", align="r")
                self._paint_row(scene, Box(box.x + GUTTER, y + 1.5, box.w - GUTTER, ROW - 4), state, info, cell)
            else:
                waits = plural(info.num_tokens, "token")
                what = f"waits with {waits}" if info.status == "waiting" else f"preempted: {waits} to compute again"
                color = "muted" if info.status == "waiting" else "alarm"
                scene.text(box.x + GUTTER, y + ROW / 2, what, 10, color=color)
        if len(shown) < len(infos):
            y = box.y + len(shown) * ROW + ROW / 2
            scene.text(box.x, y, f"and {len(infos) - len(shown):,} more sequences", 10, color="muted")

    @staticmethod
    def _paint_row(scene: Scene, box: Box, state: EngineState, info: SequenceInfo, cell: float) -> None:
        table, size = info.block_table, state.block_size
        room = int(box.w // cell)
        places = list(range(len(table)))
        if len(table) > room:  # the middle is left out: the first blocks show sharing, the last ones growth
            head = (room - 1) // 2
            places = [*range(head), -1, *range(len(table) - (room - 1 - head), len(table))]
        columns = np.array([column for column, place in enumerate(places) if place >= 0])
        logical = np.array([place for place in places if place >= 0], dtype=np.int64)
        if not len(logical):
            return
        physical = np.array(table)[logical]
        x, w = box.x + columns * cell, cell - 2
        fill = np.clip((info.num_computed_tokens - logical * size) / size, 0, 1) * w
        scene.rects(x + 0.5, box.y + 0.5, w - 1, box.h - 1, "empty", stroke="line", tags=info.seq_id)
        scene.rects(x[fill > 0], box.y, fill[fill > 0], box.h, hue(info.seq_id), tags=info.seq_id)
        from_cache = (logical + 1) * size <= info.num_cached_tokens
        scene.rects(x[from_cache] + 1, box.y + 1, w - 2, box.h - 2, stroke="ink", line_width=2)
        is_dark = fill >= 0.5 * w  # the number stands on the colour, or on the empty rest
        for mask, color in ((is_dark, "on_hue"), (~is_dark, "ink")):
            texts = [str(block_id) for block_id in physical[mask].tolist()]
            scene.text(x[mask] + w / 2, box.y + box.h / 2, texts, 9.5, color=color, align="c")
        if len(table) > room:
            gap = box.x + places.index(-1) * cell + w / 2
            scene.text(gap, box.y + box.h / 2, f"+{len(table) - room + 1}", 9.5, color="muted", align="c")

    # -- token by token

    def _paint_slots(self, scene: Scene, box: Box, state: EngineState, moment: Moment) -> None:
        infos = sorted(state.by_status("running"), key=lambda info: info.seq_id)
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
            draw_name(scene, box.x, y + 12 + SLOT_H / 2, info.seq_id)
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
        cached = Swatch("from the prefix cache", fill="hue0", stroke="ink")
        if self.tokens:
            entries = [
                Swatch("prompt token", fill="hue0"),
                Swatch("generated (bar below)", fill="decode", shape=(12, 3)),
                Swatch("written in this step (bar above)", fill="ink", shape=(12, 3)),
                cached,
                Swatch("empty slot", fill="empty", stroke="line"),
            ]
        else:
            entries = [
                Swatch("physical block", fill="hue0"),
                cached,
                Swatch("not filled yet", fill="empty", stroke="line"),
            ]
        draw_legend(scene, box.x, box.y + 15, entries)


def draw_name(scene: Scene, x: float, y: float, seq_id: int) -> None:
    """A sequence's colour and number, as in every panel."""
    scene.rects(x, y - 5, 8, 10, hue(seq_id), tags=seq_id)
    scene.text(x + 13, y, f"s{seq_id}", 10.5, is_bold=True)
