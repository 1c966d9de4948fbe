"""live: a dashboard that follows a blocking call, and leaves a still picture behind.

    with live(llm):
        llm.generate(prompts, params)

While the cell runs, one canvas widget is sent a whole picture at most `fps` times a second, and only as long as all
drawing so far stays below `share` of the elapsed time. At the end a PNG takes the widget's place in the same output,
so that the saved notebook reads well everywhere. NANOVLLM_LIVE=0 draws only that PNG.
"""

import os
import signal
import threading
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import lru_cache
from time import perf_counter
from types import FrameType, TracebackType
from typing import Any, Self

from nanovllm.engine.events import StepRecord
from nanovllm.errors import NanoVLLMError
from nanovllm.viz.pool_view import BlockPoolView
from nanovllm.viz.recorder import Decode, Engine, Recorder
from nanovllm.viz.scheduler_view import SchedulerView
from nanovllm.viz.steplog_view import StepLogView
from nanovllm.viz.still import need
from nanovllm.viz.tables_view import BlockTablesView
from nanovllm.viz.throughput_view import ThroughputView
from nanovllm.viz.views import Dashboard, View
from nanovllm.viz.words import run_words

PANELS: dict[str, Callable[[], View]] = {
    "pool": BlockPoolView,
    "tables": BlockTablesView,
    "tokens": lambda: BlockTablesView(tokens=True),
    "scheduler": SchedulerView,
    "throughput": ThroughputView,
    "steps": StepLogView,
}
DEFAULT_PANELS = ("pool", "tables", "scheduler", "throughput")
WIDGET_VIEW = "application/vnd.jupyter.widget-view+json"
Panels = str | View | Iterable[str | View]


def make_view(panel: str | View) -> View:
    """A view by its name, one of "pool", "tables", "tokens", "scheduler", "throughput", "steps"; views pass through."""
    if isinstance(panel, View):
        return panel
    if panel not in PANELS:
        raise ValueError(f"there is no panel {panel!r}; there are {', '.join(map(repr, PANELS))}")
    return PANELS[panel]()


def make_dashboard(panels: Panels, recorder: Recorder, decode: Decode | None) -> Dashboard:
    chosen = [panels] if isinstance(panels, (str, View)) else list(panels)
    recorder.decode = recorder.decode or decode
    return Dashboard([make_view(panel) for panel in chosen], recorder)


def require_engine(source: Any, who: str) -> None:
    """Raises TypeError for what is no engine, before anything is queued or drawn."""
    if isinstance(source, type) or not (hasattr(source, "add_step_hook") and hasattr(source, "snapshot")):
        raise TypeError(f"{who}, got {source!r:.80}")


def decoder_of(llm: Any) -> Decode | None:
    """The text of a token id by the engine's own tokenizer, if it has one."""
    tokenizer = getattr(llm, "tokenizer", None)
    return None if tokenizer is None else lru_cache(maxsize=8192)(lambda token_id: str(tokenizer.decode([token_id])))


# -- interrupts


class Interrupts:
    """Inside the block SIGINT (Jupyter's ■) is only counted. Does nothing outside the main thread."""

    def __init__(self) -> None:
        self.count = 0
        self._previous: Any = None

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            self._previous = signal.signal(signal.SIGINT, self._note)
        return self

    def _note(self, signum: int, frame: FrameType | None) -> None:
        self.count += 1

    def __exit__(self, *exc_info: object) -> None:
        if self._previous is not None:
            signal.signal(signal.SIGINT, self._previous)

    def deliver(self) -> None:
        """After the block: what was held back takes effect."""
        if self.count and callable(self._previous):
            self._previous(signal.SIGINT, None)


# -- how often to draw


class Throttle:
    """Draw if 1 / fps has passed, and if all drawing so far and one picture more stay below `share` of the time."""

    def __init__(self, fps: float, share: float, clock: Callable[[], float] = perf_counter) -> None:
        if not (fps > 0 and 0 < share <= 1):
            raise ValueError(f"fps must be positive and share above 0 and at most 1; got fps={fps!r}, share={share!r}")
        self.interval, self.share, self.clock = 1 / fps, share, clock
        self.started = self.next = clock()
        self.spent = self.cost = 0.0

    def start(self) -> None:
        self.started = self.clock()
        self.next, self.spent = self.started + self.interval, 0.0

    def is_due(self) -> bool:
        now = self.clock()
        if now < self.next:
            return False
        if self.spent + self.cost > self.share * (now - self.started):
            self.next = now + 0.02
            return False
        return True

    def drew(self, seconds: float) -> None:
        self.cost = seconds if not self.cost else 0.7 * self.cost + 0.3 * seconds
        self.spent += seconds
        self.next = self.clock() + self.interval


# -- one output of a cell


def shell_with_kernel() -> Any:
    """IPython's shell inside a Jupyter kernel, or None."""
    try:
        from IPython import get_ipython
    except ImportError:
        return None
    shell = get_ipython()
    return shell if getattr(shell, "kernel", None) is not None else None


def is_live() -> bool:
    return os.environ.get("NANOVLLM_LIVE", "1") != "0"


class Output:
    """A place below a cell: a widget while something moves, a PNG in its stead at the end. Nothing without a kernel."""

    def __init__(self, dashboard: Dashboard, on_click: Callable[[dict[str, Any]], None] | None = None) -> None:
        self.dashboard = dashboard
        self.widget: Any = None
        self._handle: Any = None
        if shell_with_kernel() is None or not is_live():
            return
        need("anywidget")
        from IPython.display import display

        from nanovllm.viz.widget import CanvasWidget

        self.widget = CanvasWidget(has_controls=on_click is not None)
        if on_click is not None:
            self.widget.on_click(on_click)
        view = {"version_major": 2, "version_minor": 0, "model_id": self.widget.model_id}
        text = "A live view of the engine: run this cell to see it."
        self._handle = display({WIDGET_VIEW: view, "text/plain": text}, raw=True, display_id=True)

    def draw(self, step: int | None = None, since: int | None = None, **extra: Any) -> None:
        """Send the picture after `step` (by default now) to the widget, if there is one."""
        if self.widget is not None:
            scene = self.dashboard.scene(step, since)
            self.widget.frame = scene.pack(step=self.dashboard.recorder.last_step if step is None else step, **extra)

    def freeze(self, step: int | None = None, note: str = "") -> None:
        """Put a still picture, with its text twin, in the widget's place; without a widget, display it.

        note: a line below it.
        """
        if shell_with_kernel() is None:
            return
        from IPython.display import display

        text = self.dashboard.text(step) + (f"\n{note}" if note else "")
        bundle = {"image/png": self.dashboard.png(step, note=note), "text/plain": text}
        if self._handle is not None:
            self._handle.update(bundle, raw=True)
        else:
            display(bundle, raw=True)
        self.close()

    def close(self) -> None:
        """Close the widget without leaving a picture."""
        widget, self.widget, self._handle = self.widget, None, None
        if widget is not None:
            widget.close()


class live:  # noqa: N801 (read as a statement: `with live(llm):`)
    """Show the engine at work during a `with` block, and a still picture of the run afterwards.

    panels: names ("pool", "tables", "tokens", "scheduler", "throughput", "steps") or views of your own making.
    fps, share: at most so many pictures a second, and at most this share of the elapsed time for drawing them.
    recorder: where to keep the run (a new `Recorder`, in `.recorder` afterwards, by default).
    decode: the text of a token id (by default the engine's tokenizer).
    key: of the step hook. A re-run cell replaces what an earlier one may have left.
    """

    def __init__(
        self, llm: Engine, panels: Panels = DEFAULT_PANELS, *, fps: float = 4.0, share: float = 0.02,
        recorder: Recorder | None = None, decode: Decode | None = None, key: Any = "nanovllm.viz.live",
    ) -> None:  # fmt: skip
        require_engine(llm, "live() shows an engine, as in `with live(llm):`")
        self.llm, self.key = llm, key
        self.recorder = recorder or Recorder()
        self.dashboard = make_dashboard(panels, self.recorder, decode or decoder_of(llm))
        self.throttle = Throttle(fps, share)
        self.recording_seconds = 0.0
        self.num_frames = 0
        self._output: Output | None = None
        self._handle: Any = None
        self._drawn_step = 0

    def __enter__(self) -> Self:
        interrupts = Interrupts()
        try:
            with interrupts:
                self._open()
            interrupts.deliver()
        except BaseException:
            self._close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        interrupts = Interrupts()
        with interrupts:  # a second ■ must not leave a widget or a hook behind
            self._close()
        interrupts.deliver()

    def _open(self) -> None:
        self.recorder.sync(self.llm.snapshot())
        self._drawn_step = self.recorder.last_step
        self._output = Output(self.dashboard)
        self._draw()  # the first picture is the dearest one, and not counted
        self._handle = self.llm.add_step_hook(self._on_step, key=self.key)
        self.throttle.start()

    def _on_step(self, record: StepRecord) -> None:
        begin = perf_counter()
        self.recorder(record)
        self.recording_seconds += perf_counter() - begin
        if self._output is not None and self._output.widget is not None and self.throttle.is_due():
            self._draw()

    def _draw(self) -> None:
        assert self._output is not None
        begin = perf_counter()
        self._output.draw(since=self._drawn_step)
        self._drawn_step = self.recorder.last_step
        self.num_frames += 1
        self.throttle.drew(perf_counter() - begin)

    def _close(self) -> None:
        handle, self._handle = self._handle, None
        output, self._output = self._output, None
        try:
            if handle is not None:
                handle.remove()
                with suppress(NanoVLLMError):  # requests aborted by a failed or interrupted call are not in any record
                    self.recorder.sync(self.llm.snapshot())
        finally:
            if output is not None:
                try:
                    output.freeze()
                finally:
                    output.close()

    # -- afterwards

    def figure(self, step: int | None = None, theme: str = "light") -> Any:
        """The picture as a matplotlib figure: in any later cell, of any step that is still kept whole."""
        return self.dashboard.figure(step, theme)

    def text(self, step: int | None = None) -> str:
        return self.dashboard.text(step)

    def __repr__(self) -> str:
        return f"live({run_words(self.recorder.history.totals, self.recorder.history.num_sequences)})"

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> dict[str, Any]:
        return self.dashboard._repr_mimebundle_(include, exclude)
