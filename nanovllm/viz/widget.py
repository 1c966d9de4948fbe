"""CanvasWidget: the one widget of the live views. Imported only when a live picture is wanted; needs anywidget."""

from collections.abc import Callable
from importlib.resources import files
from typing import Any

import anywidget
import traitlets

from nanovllm.viz.scene import PALETTE


class CanvasWidget(anywidget.AnyWidget):
    """Shows the newest frame (`Scene.pack`). Clicks come back as messages, never as traits: see `on_click`."""

    _esm = files("nanovllm.viz").joinpath("canvas.js").read_text(encoding="utf-8")
    _css = files("nanovllm.viz").joinpath("canvas.css").read_text(encoding="utf-8")
    frame = traitlets.Bytes(b"").tag(sync=True)
    palette = traitlets.List([list(pair) for pair in PALETTE.values()]).tag(sync=True)
    has_controls = traitlets.Bool(False).tag(sync=True)

    def on_click(self, fn: Callable[[dict[str, Any]], None]) -> None:
        """Call `fn` with each message of the controls. It may run in another thread: set flags, do no work."""
        self.on_msg(lambda widget, content, buffers: fn(content))

    def close(self) -> None:
        """Close the widget and the layout that ipywidgets made for it, which would stay open otherwise."""
        layout = self.layout
        super().close()
        if layout is not None:
            layout.close()
