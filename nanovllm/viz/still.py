"""A scene as a matplotlib figure and as a PNG: what stays in the notebook after the run.

Only `Figure` and the Agg canvas are used, never pyplot: no global state, no window, and safe in a callback.
"""

import io
import warnings
from typing import TYPE_CHECKING, Any

import numpy as np

from nanovllm.viz.scene import NO_COLOR, PALETTE, Line, Rects, Scene, Texts

if TYPE_CHECKING:
    from matplotlib.figure import Figure

THEMES = ("light", "dark")
POINTS = 72 / 100  # a scene's pixel in points, in a figure of 100 pixels an inch
DPI = 125


def need(package: str) -> None:
    """Say in one sentence what is missing where a picture cannot be made. Raises ImportError."""
    try:
        __import__(package)
    except ImportError as error:
        raise ImportError(f"this view needs the package {package!r}: pip install {package}") from error


def draw_figure(scene: Scene, theme: str = "light") -> "Figure":
    """The picture in the colours of a light or a dark page. Needs matplotlib."""
    if theme not in THEMES:
        raise ValueError(f"theme must be one of {', '.join(map(repr, THEMES))}; got {theme!r}")
    need("matplotlib")
    from matplotlib.figure import Figure

    colors = [pair[THEMES.index(theme)] for pair in PALETTE.values()]
    figure = Figure(
        figsize=(scene.width / 100, scene.height / 100), dpi=DPI, facecolor="none"
    )  # between the panels the page shows
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set_axis_off()
    axes.set_xlim(0, scene.width)
    axes.set_ylim(scene.height, 0)
    for order, item in enumerate(scene.items):
        if isinstance(item, Rects):
            _add_rects(axes, item, colors, order)
        elif isinstance(item, Texts):
            _add_texts(axes, item, colors, order)
        else:
            _add_line(axes, item, colors, order)
    return figure


def _add_rects(axes: Any, item: Rects, colors: list[str], order: int) -> None:
    from matplotlib.collections import PolyCollection

    x, y, w, h = item.xywh.T
    corners: Any = np.stack([np.stack([x, x + w, x + w, x], 1), np.stack([y, y, y + h, y + h], 1)], axis=2)
    faces: Any = "none" if item.fill[0] == NO_COLOR else [colors[index] for index in item.fill]
    edges = "none" if item.stroke == NO_COLOR else colors[item.stroke]
    width = item.line_width * POINTS
    fill = PolyCollection(corners, facecolors=faces, edgecolors=edges, linewidths=width, zorder=order)
    fill.set_joinstyle("miter")
    fill.set_antialiased(item.stroke != NO_COLOR)  # edges that touch leave no hairlines
    axes.add_collection(fill, autolim=False)
    if item.hatch != NO_COLOR:
        lines = PolyCollection(corners, facecolors="none", edgecolors=colors[item.hatch], linewidths=0, zorder=order)
        lines.set_hatch("//////")
        axes.add_collection(lines, autolim=False)


def _add_texts(axes: Any, item: Texts, colors: list[str], order: int) -> None:
    side = {"l": "left", "c": "center", "r": "right"}[item.align]
    weight = "bold" if item.is_bold else "normal"
    for (x, y), string, color in zip(item.xy.tolist(), item.strings, item.color.tolist(), strict=True):
        axes.text(
            x, y + 0.36 * item.size, string, fontsize=item.size * POINTS, color=colors[color], ha=side, va="baseline",
            weight=weight, zorder=order, parse_math=False,
        )  # fmt: skip


def _add_line(axes: Any, item: Line, colors: list[str], order: int) -> None:
    from matplotlib.lines import Line2D

    x, y = item.xy.T
    style: Any = (0, (4, 3)) if item.is_dashed else "-"
    axes.add_line(
        Line2D(x, y, color=colors[item.color], linewidth=item.line_width * POINTS, linestyle=style, zorder=order)
    )


def png(scene: Scene, theme: str = "light") -> bytes:
    """The picture as the bytes of a PNG, 1.25 pixels for each of the scene's."""
    figure = draw_figure(scene, theme)
    import matplotlib
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    out = io.BytesIO()
    with matplotlib.rc_context({"hatch.linewidth": 0.6}), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph")  # a token's text may hold characters that the font lacks
        FigureCanvasAgg(figure).print_png(out)
    return out.getvalue()
