"""The map of the engine that opens every chapter, with the parts that the chapter is about lit.

A picture without a background, so that it sits on a light and on a dark page: all words stand on filled boxes.
"""

import io
from typing import TYPE_CHECKING, Any, NamedTuple

from nanovllm.viz.still import need

if TYPE_CHECKING:
    from matplotlib.axes import Axes

WIDTH, HEIGHT = 960, 356
LIT, UNLIT, BAND, LINE = "#2b66a8", "#e4e8ee", "#8c95a3", "#7f8996"
ON_LIT, ON_UNLIT = "#ffffff", "#1f2430"


class Part(NamedTuple):
    """A box: its words, the chapters that explain it, and where it stands (left, top, width, height)."""

    name: str
    what: str
    chapters: tuple[int, ...]
    box: tuple[int, int, int, int]


PARTS = (
    Part("prompt", "text, chat template", (0,), (16, 34, 128, 52)),
    Part("tokenizer", "text ↔ token ids", (0,), (176, 34, 128, 52)),
    Part("LLM.generate", "the main loop", (2,), (336, 34, 148, 52)),
    Part("Config", "the limits", (2,), (516, 34, 124, 52)),
    Part("SamplingParams", "how to choose, when to stop", (2,), (672, 34, 272, 52)),
    Part("Sequence", "one request", (1,), (16, 150, 128, 52)),
    Part("Scheduler", "who runs in this step", (5,), (336, 150, 230, 52)),
    Part("BlockManager", "blocks, tables, prefix cache", (4,), (672, 150, 272, 52)),
    Part("ModelRunner", "tensors of the step, graphs", (6,), (16, 266, 200, 52)),
    Part("model", "layers", (3,), (248, 266, 100, 52)),
    Part("attention", "kernels", (8,), (380, 266, 104, 52)),
    Part("KV cache", "keys and values", (4, 6), (516, 266, 124, 52)),
    Part("Sampler", "logits → token", (3,), (672, 266, 124, 52)),
    Part("ranks", "more GPUs", (7,), (828, 266, 116, 52)),
)
BANDS = (
    ("what you call", 8, 98),
    ("the bookkeeping: plain Python", 126, 94),
    ("the worker: everything that touches a device", 242, 94),
)
# The corners of each arrow from tail to head, whether it has two heads, and what it carries (and where that stands).
ARROWS = (
    (((144, 60), (176, 60)), False, "", (0, 0)),
    (((304, 60), (336, 60)), False, "", (0, 0)),
    (((372, 86), (80, 150)), False, "a request", (226, 112)),
    (((144, 176), (336, 176)), False, "waiting, running", (240, 176)),
    (((566, 176), (672, 176)), True, "blocks", (619, 176)),
    (((372, 202), (116, 266)), False, "2  run", (244, 232)),
    (((216, 292), (248, 292)), False, "", (0, 0)),
    (((348, 292), (380, 292)), True, "", (0, 0)),
    (((484, 292), (516, 292)), True, "", (0, 0)),
    (((298, 318), (298, 328), (734, 328), (734, 318)), False, "logits", (500, 328)),
    (((734, 266), (520, 202)), False, "3  postprocess", (627, 232)),
    (((451, 150), (451, 86)), False, "finished", (451, 112)),
)
STEP_ONE = ("1  schedule", 520, 150)


class EngineMap:
    """The map as a picture with a text twin."""

    def __init__(self, chapter: int) -> None:
        self.chapter = chapter

    def is_lit(self, part: Part) -> bool:
        """Chapter 1 walks the whole path and chapter 9 measures all of it."""
        return self.chapter in part.chapters or self.chapter in (1, 9)

    def __repr__(self) -> str:
        lit = ", ".join(part.name for part in PARTS if self.is_lit(part))
        others = {
            number: [part.name for part in PARTS if number in part.chapters]
            for number in sorted({number for part in PARTS for number in part.chapters} - {self.chapter})
        }
        places = "; ".join(f"{' and '.join(names)} in chapter {number}" for number, names in others.items())
        return (
            f"Map of the engine. This chapter: {lit}. A prompt becomes token ids and a Sequence. In each step the "
            "Scheduler picks sequences, the worker runs the model on them, and the sampled tokens are booked. "
            f"{places}."
        )

    def png(self) -> bytes:
        need("matplotlib")
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure

        figure = Figure(figsize=(WIDTH / 100, HEIGHT / 100), dpi=125)
        figure.patch.set_alpha(0)
        axes = figure.add_axes((0, 0, 1, 1))
        axes.set_axis_off()
        axes.set_xlim(0, WIDTH)
        axes.set_ylim(HEIGHT, 0)
        self._draw(axes)
        out = io.BytesIO()
        FigureCanvasAgg(figure).print_png(out, metadata={"Software": None})
        return out.getvalue()

    def _draw(self, axes: "Axes") -> None:
        from matplotlib.patches import FancyArrowPatch, FancyBboxPatch
        from matplotlib.path import Path as Outline

        for words, top, height in BANDS:
            shape = FancyBboxPatch((4, top), WIDTH - 8, height, boxstyle="round,pad=0,rounding_size=8")
            shape.set(facecolor=f"{BAND}2e", edgecolor="none")
            axes.add_patch(shape)
            _chip(axes, WIDTH - 16, top + 10, words, "right")
        for corners, is_double, _, _ in ARROWS:
            arrow = FancyArrowPatch(
                path=Outline(corners), arrowstyle="<|-|>" if is_double else "-|>", mutation_scale=11
            )
            arrow.set(color=LINE, linewidth=1.4, joinstyle="miter")
            axes.add_patch(arrow)
        for part in PARTS:
            self._draw_part(axes, part)
        for _, _, words, (x, y) in ARROWS:
            if words:
                _chip(axes, x, y, words, "center")
        words, x, y = STEP_ONE
        _chip(axes, x, y, words, "center")

    def _draw_part(self, axes: "Axes", part: Part) -> None:
        from matplotlib.patches import FancyBboxPatch

        x, y, w, h = part.box
        is_lit = self.is_lit(part)
        shape = FancyBboxPatch((x, y), w, h, boxstyle="round,pad=0,rounding_size=6")
        shape.set(facecolor=LIT if is_lit else UNLIT, edgecolor=LIT if is_lit else LINE, linewidth=1)
        axes.add_patch(shape)
        ink = ON_LIT if is_lit else ON_UNLIT
        _text(axes, x + 10, y + 21, part.name, 9.5, ink, weight="bold")
        _text(axes, x + 10, y + 39, part.what, 7.4, ink)
        _text(axes, x + w - 8, y + 19, "·".join(map(str, part.chapters)), 7.8, ink, ha="right", weight="bold")

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> Any:
        return {"text/plain": repr(self), "image/png": self.png()}, {"image/png": {"width": WIDTH, "height": HEIGHT}}


def _text(axes: "Axes", x: float, y: float, words: str, size: float, color: str, **style: Any) -> None:
    axes.text(x, y, words, fontsize=size, color=color, va="baseline", parse_math=False, **style)


def _chip(axes: "Axes", x: float, y: float, words: str, side: str) -> None:
    """Small words on a paper of their own, readable on any page."""
    paper = {"boxstyle": "round,pad=0.25", "facecolor": "#ffffff", "edgecolor": "none", "alpha": 0.85}
    axes.text(x, y, words, fontsize=7.2, color=ON_UNLIT, ha=side, va="center", bbox=paper, parse_math=False)


def engine_map(chapter: int) -> EngineMap:
    """The engine, with the parts that this chapter explains lit. Small numbers in the boxes name the chapters."""
    return EngineMap(chapter)
