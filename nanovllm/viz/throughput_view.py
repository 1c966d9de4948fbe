"""ThroughputView: the run in four charts."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from nanovllm.viz.recorder import Moment
from nanovllm.viz.scene import Scene, text_width
from nanovllm.viz.views import GAP, TITLE, Box, View
from nanovllm.viz.words import duration, hit_rate, number, rate, run_words

CHART_H = 96.0
Values = NDArray[np.float64]


class ThroughputView(View):
    """Prefill and decode tok/s, KV use and prefix hit rate, and the queues, over the time that the engine worked.

    Rates are tokens of a phase by the seconds of the steps that had any of it; the pauses between steps do not count.
    """

    name = "throughput"
    title = "Throughput"

    def height(self, width: float, moment: Moment) -> float:
        return TITLE + CHART_H + GAP

    def summary(self, moment: Moment) -> str:
        totals = moment.totals
        text = f"{int(totals['steps']):,} steps, {duration(totals['seconds'])} of work · "
        return text + f"{int(totals['prefill_tokens']):,} prefill and {int(totals['decode_tokens']):,} decode tokens"

    def words(self, moment: Moment) -> str:
        return run_words(moment.totals, moment.history.num_sequences) + "."

    def paint(self, scene: Scene, box: Box, moment: Moment) -> None:
        count = moment.num_columns
        if not count:
            return
        s = {name: values[:count] for name, values in moment.history.series().items()}
        edges = np.concatenate([[0.0], np.cumsum(s["seconds"])])
        w = (box.w - 3 * 20) / 4
        charts = [Box(box.x + i * (w + 20), box.y, w, box.h) for i in range(4)]
        for chart, phase in zip(charts[:2], ("prefill", "decode"), strict=True):
            with np.errstate(divide="ignore", invalid="ignore"):
                rates = np.nan_to_num(s[f"{phase}_tokens"] / s[f"{phase}_seconds"], posinf=0.0)
            self._paint_bars(scene, chart, edges, rates, phase, rate(moment.totals, phase))
        state = moment.state
        assert state is not None
        used = s["used_blocks"] / state.num_blocks
        prompt, cached = np.cumsum(s["prompt_tokens"]), np.cumsum(s["cached_tokens"])
        hits = np.divide(cached, prompt, out=np.zeros(count), where=prompt > 0)
        share = hit_rate(moment.totals)
        numbers = [f"{used[-1]:.0%}", f"{share:.0%}"]
        self._paint_lines(scene, charts[2], edges, [used, hits], 1.0, numbers, ["of KV used", "prefix hits"])
        running, waiting = s["running"], s["waiting"]
        top = max(running.max(), waiting.max(), 1.0)
        numbers = [f"{int(running[-1]):,}", f"{int(waiting[-1]):,}"]
        self._paint_lines(scene, charts[3], edges, [running, waiting], top, numbers, ["running", "waiting"])

    def _plot(self, scene: Scene, box: Box, seconds: float, top: str) -> Box:
        """The frame of a chart, with the highest value and the time written to it; returns the area of the data."""
        plot = Box(box.x, box.y + 30, box.w, box.h - 46)
        scene.line([plot.x, plot.x + plot.w], [plot.y + plot.h] * 2, "line")
        scene.line([plot.x, plot.x + plot.w], [plot.y] * 2, "line", is_dashed=True)
        scene.text(plot.x + plot.w, plot.y - 6, top, 9, color="muted", align="r")
        scene.text(plot.x, plot.y + plot.h + 9, "0", 9, color="muted")
        scene.text(plot.x + plot.w, plot.y + plot.h + 9, duration(seconds), 9, color="muted", align="r")
        return plot

    def _paint_bars(self, scene: Scene, box: Box, edges: Values, rates: Values, phase: str, mean: str) -> None:
        top = max(rates.max(), 1.0)
        scene.rects(box.x, box.y + 4, 10, 10, phase)
        scene.text(box.x + 15, box.y + 9, mean, 15, is_bold=True)
        scene.text(box.x + 15 + text_width(mean, 15, True) + 5, box.y + 10, f"{phase} tok/s, mean", 10, color="muted")
        plot = self._plot(scene, box, float(edges[-1]), number(top))
        x = plot.x + edges / max(edges[-1], 1e-9) * plot.w
        some, h = rates > 0, rates / top * plot.h
        scene.rects(x[:-1][some], plot.y + plot.h - h[some], np.maximum(np.diff(x)[some], 0.6), h[some], phase)

    def _paint_lines(
        self, scene: Scene, box: Box, edges: Values, series: Sequence[Values], top: float, numbers: list[str],
        names: list[str],
    ) -> None:  # fmt: skip
        """Two lines, the second dashed; each is a staircase over its columns."""
        x = box.x
        for index, (value, name) in enumerate(zip(numbers, names, strict=True)):
            color = "alarm" if index else "ink"
            scene.line([x, x + 12], [box.y + 9] * 2, color, line_width=2, is_dashed=index > 0)
            scene.text(x + 16, box.y + 9, value, 13, is_bold=True)
            end = x + 16 + text_width(value, 13, True) + 4
            scene.text(end, box.y + 10, name, 10, color="muted")
            x = end + text_width(name, 10) + 8
        plot = self._plot(scene, box, float(edges[-1]), "100 %" if top == 1.0 and "%" in numbers[0] else number(top))
        scaled = plot.x + edges / max(edges[-1], 1e-9) * plot.w
        for index, values in enumerate(series):
            y = plot.y + plot.h * (1 - values / top)
            color, is_dashed = ("alarm", True) if index else ("ink", False)
            scene.line(np.repeat(scaled, 2)[1:-1], np.repeat(y, 2), color, line_width=1.6, is_dashed=is_dashed)
