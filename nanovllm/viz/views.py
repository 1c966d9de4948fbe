"""View: the base of all pictures, and Dashboard, which puts several into one.

A view draws one `Moment` into a box of a `Scene` and describes the same moment in words. It does not know whether the
scene ends up on a canvas or in a PNG, nor whether the recorder listens to an engine or was loaded from a file.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from nanovllm.viz import still
from nanovllm.viz.recorder import Decode, Moment, Recorder
from nanovllm.viz.scene import WIDTH, Scene, clip, hue_of, text_width
from nanovllm.viz.words import NOTHING_YET, moment_words

if TYPE_CHECKING:
    from matplotlib.figure import Figure

PAD, TITLE, GAP, NOTE = 12.0, 28.0, 8.0, 26.0


class Box(NamedTuple):
    x: float
    y: float
    w: float
    h: float


class View:
    """One panel. Typed at the end of a cell it shows itself as a still; `figure`, `png` and `text` give the parts."""

    name = ""
    title = ""
    is_half = False  # two such views stand side by side in a dashboard

    def __init__(self, recorder: Recorder | None = None) -> None:
        self._recorder = recorder

    @property
    def recorder(self) -> Recorder:
        if self._recorder is None:
            raise ValueError(f"{type(self).__name__} has nothing to show: give it a Recorder, or pass it to live(…)")
        return self._recorder

    def bind(self, recorder: Recorder) -> View:
        """Show this recorder from now on."""
        self._recorder = recorder
        return self

    # -- what a view must say

    def height(self, width: float, moment: Moment) -> float:
        """Pixels that the panel wants at this width. It changes rarely during a run, so that the page keeps still."""
        raise TypeError(f"{type(self).__name__} does not say how high it is")

    def paint(self, scene: Scene, box: Box, moment: Moment) -> None:
        """Draw into the box below the title. `moment.state` is there."""
        raise TypeError(f"{type(self).__name__} draws nothing")

    def summary(self, moment: Moment) -> str:
        """The line of numbers to the right of the title."""
        return ""

    def words(self, moment: Moment) -> str:
        """The panel as text."""
        return self.summary(moment)

    # -- what every view can do

    def draw(self, scene: Scene, box: Box, moment: Moment) -> None:
        scene.rects(box.x + 0.5, box.y + 0.5, box.w - 1, box.h - 1, "paper", stroke="line")
        scene.text(box.x + PAD, box.y + 15, self.title, 12.5, is_bold=True)
        inner = Box(box.x + PAD, box.y + TITLE, box.w - 2 * PAD, box.h - TITLE - GAP)
        if moment.state is None:
            scene.text(box.x + box.w / 2, box.y + box.h / 2, NOTHING_YET, 11, color="muted", align="c")
            return
        room = box.w - 2 * PAD - text_width(self.title, 12.5, True) - 16
        summary = clip(self.summary(moment), room, 10.5)
        scene.text(box.x + box.w - PAD, box.y + 15, summary, 10.5, color="muted", align="r")
        self.paint(scene, inner, moment)

    def scene(self, step: int | None = None, since: int | None = None, note: str = "") -> Scene:
        """The picture after `step` (by default now); what happened after step `since` stands out. note: a last line."""
        moment = self.recorder.moment(step, since)
        height = self.height(WIDTH, moment)
        scene = Scene(WIDTH, height, label=moment_words(moment), tips=sequence_tips(moment))
        self.draw(scene, Box(0, 0, WIDTH, height), moment)
        if note:
            scene.height += GAP + NOTE
            scene.rects(0.5, height + GAP + 0.5, WIDTH - 1, NOTE - 1, "paper", stroke="line")
            scene.text(PAD, height + GAP + NOTE / 2, note, 11)
        return scene

    def figure(self, step: int | None = None, theme: str = "light") -> Figure:
        """A matplotlib figure. `step` must be one that the recorder keeps whole."""
        return still.draw_figure(self.scene(step), theme)

    def png(self, step: int | None = None, theme: str = "light", note: str = "") -> bytes:
        return still.png(self.scene(step, note=note), theme)

    def text(self, step: int | None = None) -> str:
        """What the picture shows, in words and numbers."""
        moment = self.recorder.moment(step)
        if moment.state is None:
            return f"{self.title}: {NOTHING_YET}"
        return f"{self.title} after step {moment.state.step:,}: {self.words(moment)}"

    def __repr__(self) -> str:
        return f"<{type(self).__name__} without a recorder>" if self._recorder is None else self.text()

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> dict[str, Any]:
        if self._recorder is None:
            return {"text/plain": repr(self)}
        return {"text/plain": self.text(), "image/png": self.png()}


def sequence_tips(moment: Moment) -> dict[int, str]:
    """For the pointer: what each unfinished sequence has got so far (the newest 64)."""
    if moment.state is None:
        return {}
    tips = {}
    for info in list(moment.state.sequences.values())[-64:]:
        generated = info.num_tokens - info.num_prompt_tokens
        tips[info.seq_id] = (
            f"sequence {info.seq_id}: {info.status}, {info.num_prompt_tokens} prompt + {generated} generated tokens, "
            f"{len(info.block_table)} blocks"
        )
    return tips


class Swatch(NamedTuple):
    """One entry of a legend: a small sample and what it means."""

    label: str
    fill: str | None = None  # "hues": what has the colour of its sequence, whichever that is
    stroke: str | None = None
    hatch: str | None = None
    shape: tuple[float, float] = (12.0, 10.0)  # width and height of the sample
    is_crossed: bool = False


def draw_legend(scene: Scene, x: float, y: float, entries: Iterable[Swatch]) -> float:
    """Entries from left to right, their middles at y. Returns the x where the next one would begin."""
    for entry in entries:
        w, h = entry.shape
        left, top = x + (12 - w) / 2, y - h / 2
        width = 1.0 if entry.stroke == "line" else 2.0
        if entry.fill == "hues":
            scene.rects(left + np.arange(4) * w / 4, top, w / 4, h, hue_of([0, 1, 2, 3]))
        fill = None if entry.fill == "hues" else entry.fill
        if fill or entry.stroke:
            scene.rects(left, top, w, h, fill, stroke=entry.stroke, hatch=entry.hatch, line_width=width)
        if entry.is_crossed:
            scene.line([left, left + w, float("nan"), left, left + w], [top, top + h, 0, top + h, top], "alarm")
        scene.text(x + 17, y, entry.label, 10, color="muted")
        x += 17 + text_width(entry.label, 10) + 12
    return x


class Dashboard(View):
    """Several views in one picture, over the same recorder."""

    name = "dashboard"
    title = "Engine"

    def __init__(self, views: Iterable[View], recorder: Recorder | None = None) -> None:
        self.views = list(views)
        if not self.views:
            raise ValueError("a dashboard needs at least one view")
        super().__init__(recorder)
        if recorder is not None:
            self.bind(recorder)

    def bind(self, recorder: Recorder) -> View:
        for view in self.views:
            view.bind(recorder)
        return super().bind(recorder)

    def with_decode(self, decode: Decode | None) -> Dashboard:
        """Let the views show the texts of tokens, unless the recorder already knows them."""
        self.recorder.decode = self.recorder.decode or decode
        return self

    def _lines(self) -> list[list[View]]:
        """The views by line: two half ones that follow each other share a line."""
        lines: list[list[View]] = []
        for view in self.views:
            if lines and view.is_half and len(lines[-1]) == 1 and lines[-1][0].is_half:
                lines[-1].append(view)
            else:
                lines.append([view])
        return lines

    def height(self, width: float, moment: Moment) -> float:
        return sum(height for _, height in self._layout(width, moment)) + GAP * (len(self._lines()) - 1)

    def _layout(self, width: float, moment: Moment) -> list[tuple[list[View], float]]:
        layout = []
        for line in self._lines():
            w = (width - GAP * (len(line) - 1)) / len(line)
            layout.append((line, max(view.height(w, moment) for view in line)))
        return layout

    def draw(self, scene: Scene, box: Box, moment: Moment) -> None:
        y = box.y
        for line, height in self._layout(box.w, moment):
            w = (box.w - GAP * (len(line) - 1)) / len(line)
            for index, view in enumerate(line):
                view.draw(scene, Box(box.x + index * (w + GAP), y, w, height), moment)
            y += height + GAP

    def text(self, step: int | None = None) -> str:
        return "\n".join(view.text(step) for view in self.views)
