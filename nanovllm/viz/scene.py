"""Scene: a picture as a list of rectangles, texts and lines, and the colours that both renderers use.

Views draw into a scene once. The browser's canvas (`canvas.js`) and matplotlib (`still.py`) then paint the very same
list, which is what keeps the live picture and the still one alike. Coordinates are in pixels at the picture's own
width (`WIDTH`), y downwards; a renderer may scale them.
"""

import json
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

WIDTH = 960.0
NUM_HUES = 8  # sequences beyond this share hues; their numbers tell them apart

# name: (on a light page, on a dark page). Sequences take Paul Tol's "light" scheme, made for cells with dark text and
# told apart by colour-blind readers, but with its two greens further apart; prefill, decode and preemption differ in
# lightness too, so they survive in grey.
PALETTE: dict[str, tuple[str, str]] = {
    "ink": ("#1f2430", "#e8ebf0"),
    "muted": ("#59616e", "#a9b2bf"),
    "line": ("#d3d8df", "#3d4651"),
    "paper": ("#ffffff", "#15191f"),
    "empty": ("#f1f3f6", "#232a33"),
    "hatch": ("#8c95a3", "#7e8998"),
    "prefill": ("#2b66a8", "#5d9ce0"),
    "decode": ("#e3a72f", "#e9bb55"),
    "alarm": ("#b3364b", "#f0788a"),
    "idle": ("#9aa3b0", "#76818f"),
    "held": ("#7ba6d6", "#5d8fc9"),
    "on_prefill": ("#ffffff", "#10141a"),
    "on_hue": ("#1f2430", "#10141a"),
    "hue0": ("#77aadd", "#77aadd"),
    "hue1": ("#ee8866", "#ee8866"),
    "hue2": ("#eedd88", "#eedd88"),
    "hue3": ("#44bb99", "#44bb99"),
    "hue4": ("#ffaabb", "#ffaabb"),
    "hue5": ("#999900", "#999900"),
    "hue6": ("#99ddff", "#99ddff"),
    "hue7": ("#ccdd44", "#ccdd44"),
}
COLOR = {name: index for index, name in enumerate(PALETTE)}
NO_COLOR = 255
_HUE0 = COLOR["hue0"]
# Widths of characters in ems where they are far from the average.
_EMS = dict.fromkeys(" .,:;|!'()iIjlt·1f-", 0.4) | dict.fromkeys("0123456789", 0.636) | dict.fromkeys("mMwW%×…", 0.95)
_EMS |= {"1": 0.636}


def hue_of(seq_ids: ArrayLike) -> NDArray[np.uint8]:
    """The colour of each sequence (by its number), as an index into the palette."""
    return np.asarray(_HUE0 + np.asarray(seq_ids, np.int64) % NUM_HUES, np.uint8)


def hue(seq_id: int) -> int:
    return _HUE0 + seq_id % NUM_HUES


@dataclass(slots=True, eq=False)
class Rects:
    xywh: NDArray[np.float32]  # [n, 4]
    fill: NDArray[np.uint8]  # [n] palette indices, NO_COLOR for none
    stroke: int
    line_width: float
    hatch: int  # colour of diagonal lines over the fill, or NO_COLOR
    is_flash: bool  # new since the last picture: the canvas lets it pulse for a moment
    tags: NDArray[np.int32] | None  # [n] the sequence that each rectangle belongs to, -1 for none


@dataclass(slots=True, eq=False)
class Texts:
    xy: NDArray[np.float32]  # [n, 2]; y is the middle of the text's height
    strings: list[str]
    size: float
    color: NDArray[np.uint8]  # [n]
    align: str  # "l", "c" or "r"
    is_bold: bool


@dataclass(slots=True, eq=False)
class Line:
    xy: NDArray[np.float32]  # [n, 2]; NaN lifts the pen
    color: int
    line_width: float
    is_dashed: bool


@dataclass
class Scene:
    """A picture in the making. Colours are given by their name in PALETTE or by index."""

    width: float
    height: float
    label: str = ""  # what the picture shows, in a sentence, for those who cannot see it
    tips: dict[int, str] = field(default_factory=dict)  # by tag: shown when the pointer rests on a tagged rectangle
    items: list[Rects | Texts | Line] = field(default_factory=list)

    def rects(
        self, x: ArrayLike, y: ArrayLike, w: ArrayLike, h: ArrayLike, fill: str | ArrayLike | None = None, *,
        stroke: str | None = None, line_width: float = 1.0, hatch: str | None = None, is_flash: bool = False,
        tags: ArrayLike | None = None,
    ) -> None:  # fmt: skip
        """Rectangles; each argument is one number for all or one for each."""
        xywh = _table(x, y, w, h)
        count = len(xywh)
        if not count:
            return
        fills = np.empty(count, np.uint8)
        fills[:] = NO_COLOR if fill is None else COLOR[fill] if isinstance(fill, str) else fill
        marks = None
        if tags is not None:
            marks = np.empty(count, np.int32)
            marks[:] = tags
        edge, lines = (NO_COLOR if name is None else COLOR[name] for name in (stroke, hatch))
        self.items.append(Rects(xywh, fills, edge, line_width, lines, is_flash, marks))

    def text(
        self, x: ArrayLike, y: ArrayLike, strings: str | list[str], size: float = 11.0, *,
        color: str | ArrayLike = "ink", align: str = "l", is_bold: bool = False,
    ) -> None:  # fmt: skip
        """Texts, each with its left, centre or right at x and its middle at y."""
        strings = [strings] if isinstance(strings, str) else strings
        if not strings:
            return
        xy = np.empty((len(strings), 2), np.float32)
        xy[:, 0], xy[:, 1] = x, y
        colors = np.empty(len(strings), np.uint8)
        colors[:] = COLOR[color] if isinstance(color, str) else color
        self.items.append(Texts(xy, strings, size, colors, align, is_bold))

    def line(self, x: ArrayLike, y: ArrayLike, color: str, *, line_width: float = 1.0, is_dashed: bool = False) -> None:
        xy = _table(x, y)
        if len(xy) > 1:
            self.items.append(Line(xy, COLOR[color], line_width, is_dashed))

    def crosses(self, x: NDArray[Any], y: NDArray[Any], w: float, h: float, color: str, line_width: float) -> None:
        """A × over each of the boxes that begin at (x, y)."""
        if len(x):
            nan = np.full(len(x), np.nan)
            xs, ys = _table(x, x + w, nan, x, x + w, nan), _table(y, y + h, nan, y + h, y, nan)
            self.line(xs.ravel(), ys.ravel(), color, line_width=line_width)

    def dashes(self, x0: NDArray[Any], x1: NDArray[Any], y: NDArray[Any], color: str, line_width: float) -> None:
        """Dashed lines from (x0, y) to (x1, y), one for each entry."""
        if len(y):
            nan = np.full(len(y), np.nan)
            xs, ys = _table(x0, x1, nan), _table(y, y, nan)
            self.line(xs.ravel(), ys.ravel(), color, line_width=line_width, is_dashed=True)

    def pack(self, **extra: Any) -> bytes:
        """The scene as one binary message: u32 length of a JSON header, the header, then the arrays it announces.

        Header: {"w", "h", "label", "tips", "items": [["r", n, stroke, line width, hatch, flash, has tags],
        ["t", strings, size, align, bold], ["l", n, color, line width, dashed]], …extra}. Arrays, in the order of the
        items: all float32 (xywh or xy), then all int32 (tags), then all uint8 (fills, text colours).
        """
        floats: list[NDArray[np.float32]] = []
        ints: list[NDArray[np.int32]] = []
        bytes_: list[NDArray[np.uint8]] = []
        heads: list[list[Any]] = []
        for item in self.items:
            if isinstance(item, Rects):
                has_tags = item.tags is not None
                heads.append(
                    ["r", len(item.xywh), item.stroke, item.line_width, item.hatch, int(item.is_flash), int(has_tags)]
                )
                floats.append(item.xywh.ravel())
                bytes_.append(item.fill)
                if item.tags is not None:
                    ints.append(item.tags)
            elif isinstance(item, Texts):
                heads.append(["t", item.strings, item.size, item.align, int(item.is_bold)])
                floats.append(item.xy.ravel())
                bytes_.append(item.color)
            else:
                heads.append(["l", len(item.xy), item.color, item.line_width, int(item.is_dashed)])
                floats.append(item.xy.ravel())
        tips = [[tag, tip] for tag, tip in self.tips.items()]
        header = {"w": self.width, "h": self.height, "label": self.label, "tips": tips, "items": heads, **extra}
        text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
        text += b" " * (-len(text) % 4)
        arrays = [np.concatenate(parts).tobytes() for parts in (floats, ints, bytes_) if parts]
        return len(text).to_bytes(4, "little") + text + b"".join(arrays)


def _table(*columns: ArrayLike) -> NDArray[np.float32]:
    """[n, len(columns)] from columns that are arrays of one length, or numbers (n is 1 if all are)."""
    count = 1
    for column in columns:
        if isinstance(column, (np.ndarray, list)) and np.ndim(column):
            count = len(column)
            break
    table = np.empty((count, len(columns)), np.float32)
    for index, column in enumerate(columns):
        table[:, index] = column
    return table


def text_width(text: str, size: float, is_bold: bool = False) -> float:
    """Pixels that a text takes, a little generously, in Verdana or DejaVu Sans (which are equally wide)."""
    ems = sum(2.0 if ord(character) > 0x2E80 else _EMS.get(character, 0.61) for character in text)
    return ems * size * (1.12 if is_bold else 1.0)


def clip(text: str, width: float, size: float) -> str:
    """`text`, cut so that it fits in `width` pixels at a font size (wide characters count twice)."""
    if text_width(text, size) <= width:
        return text
    while text and text_width(text, size) > width - size:
        text = text[: -1 - len(text) // 16]
    return text + "…"
