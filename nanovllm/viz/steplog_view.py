"""StepLogView: one step in words and numbers."""

from nanovllm.viz.recorder import Moment, Recorder
from nanovllm.viz.scene import Scene, clip, text_width
from nanovllm.viz.views import GAP, TITLE, Box, View
from nanovllm.viz.words import step_lines, step_numbers, step_title


class StepLogView(View):
    """One step in words and numbers: who was scheduled and why, and which blocks moved.

    lines: how many there is room for.
    """

    name = "steps"
    title = "Step log"

    def __init__(self, recorder: Recorder | None = None, *, lines: int = 8) -> None:
        super().__init__(recorder)
        self.lines = lines

    def height(self, width: float, moment: Moment) -> float:
        return TITLE + 20 + 15.5 * self.lines + GAP

    def words(self, moment: Moment) -> str:
        record = moment.record
        if record is None:
            return "the step itself is not kept."
        sentences = [text for _, text in step_lines(record, moment.decode)]
        return "\n".join([f"{step_title(record)}, {step_numbers(record)}", *(f"  {text}" for text in sentences)])

    def paint(self, scene: Scene, box: Box, moment: Moment) -> None:
        record = moment.record
        if record is None:
            scene.text(box.x, box.y + 10, "The step itself is not kept.", 11, color="muted")
            return
        color = {"prefill": "prefill", "decode": "decode"}.get(record.phase)
        scene.rects(box.x, box.y + 2, 12, 12, color or "prefill")
        if color is None:
            scene.rects(box.x, box.y + 8, 12, 6, "decode")
        title = step_title(record)
        scene.text(box.x + 18, box.y + 8, title, 12, is_bold=True)
        x = box.x + 18 + text_width(title, 12, True) + 10
        scene.text(x, box.y + 8.5, clip(step_numbers(record), box.x + box.w - x, 10.5), 10.5, color="muted")
        lines = self._fitting(step_lines(record, moment.decode))
        marks = {"why": "because", "queue": "queue", "row": "compute", "block": "blocks", "end": "end"}
        y = box.y + 28
        before = ""
        for kind, text in lines:
            if kind != before:
                scene.text(box.x + 60, y, marks[kind], 10, color="muted", align="r")
            color_name = "alarm" if text.startswith("preempted") else "ink"
            scene.text(box.x + 70, y, clip(text, box.w - 80, 10.5), 10.5, color=color_name)
            before, y = kind, y + 15.5

    def _fitting(self, lines: list[tuple[str, str]]) -> list[tuple[str, str]]:
        """As many as there is room for: the kinds share it, the largest gives first."""
        kept = list(lines)
        dropped: dict[str, int] = {}
        while len(kept) + len(dropped) > self.lines:
            kinds = [kind for kind, _ in kept]
            largest = max(set(kinds), key=lambda kind: (kinds.count(kind), kind))
            last = len(kinds) - 1 - kinds[::-1].index(largest)
            del kept[last]
            dropped[largest] = dropped.get(largest, 0) + 1
            if len(kept) <= 1:
                break
        for kind, count in dropped.items():
            last = max((index for index, (other, _) in enumerate(kept) if other == kind), default=len(kept) - 1)
            kept.insert(last + 1, (kind, f"and {count} more " + ("line" if count == 1 else "lines")))
        return kept
