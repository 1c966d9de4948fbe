"""The pictures themselves: nothing leaves its panel, no two labels cover each other, from 4 blocks to 100,000."""

import io
import json
import re
import struct
from collections.abc import Callable
from itertools import combinations

import numpy as np
import pytest

from nanovllm.sampling_params import SamplingParams
from nanovllm.viz import BlockPoolView, BlockTablesView, Dashboard, SchedulerView, StepLogView, ThroughputView, View
from nanovllm.viz.live import PANELS, make_dashboard, make_view
from nanovllm.viz.pool_view import MIN_CELL, fit_grid
from nanovllm.viz.recorder import Recorder
from nanovllm.viz.scene import NO_COLOR, PALETTE, Rects, Scene, Texts, clip, hue, text_width
from nanovllm.viz.scheduler_view import runs
from nanovllm.viz.still import draw_figure, png
from nanovllm.viz.tables_view import SLOT_LINE
from nanovllm.viz.words import ranges, step_lines, token_text
from tests.viz.toy import ToyEngine, prompts_like_chats


def watched(steps: int, requests: int, **options: int | str) -> tuple[Recorder, ToyEngine]:
    """A recorder after so many steps of an engine that never runs out of requests."""
    llm = ToyEngine(**options)
    recorder = Recorder(decode=lambda token_id: llm.tokenizer.decode([token_id]))
    recorder.attach(llm)
    capacity = llm.scheduler.block_manager.capacity
    prompts = prompts_like_chats(requests, longest=min(60, capacity // 2))
    while llm.step_count < steps:
        if len(llm.scheduler.waiting) < requests // 2 or llm.is_finished():
            for prompt in prompts:
                llm.add_request(
                    prompt[: max(1, capacity // 2)], SamplingParams(max_tokens=max(2, min(40, capacity // 3)))
                )
        llm.step()
    return recorder, llm


SIZES = {
    "tiny": dict(steps=9, requests=1, num_kvcache_blocks=4, max_num_seqs=1),
    "class": dict(steps=45, requests=12, num_kvcache_blocks=96),
    "default": dict(steps=300, requests=32, num_kvcache_blocks=512, kvcache_block_size=16, max_num_seqs=16),
    "mixed": dict(steps=120, requests=12, num_kvcache_blocks=64, scheduling_policy="mixed"),
    "crowd": dict(steps=30, requests=600, num_kvcache_blocks=20_000, max_num_seqs=512, max_num_batched_tokens=8192),
    "huge pool": dict(steps=20, requests=64, num_kvcache_blocks=100_000, max_num_seqs=64, kvcache_block_size=16),
    "long": dict(steps=3000, requests=8, num_kvcache_blocks=48),
}  # fmt: skip


@pytest.fixture(scope="module", params=list(SIZES))
def recorder(request: pytest.FixtureRequest) -> Recorder:
    return watched(**SIZES[request.param])[0]  # type: ignore[arg-type]


def text_boxes(scene: Scene) -> list[tuple[str, float, float, float, float]]:
    boxes = []
    for item in scene.items:
        if isinstance(item, Texts):
            for (x, y), string in zip(item.xy.tolist(), item.strings, strict=True):
                w = text_width(string, item.size, item.is_bold)
                left = x - {"l": 0.0, "c": 0.5, "r": 1.0}[item.align] * w
                boxes.append((string, left, y - 0.36 * item.size, left + w, y + 0.36 * item.size))
    return boxes


@pytest.mark.parametrize("panel", [*PANELS, "dashboard"])
def test_everything_lies_inside_its_panel_and_no_label_covers_another(recorder: Recorder, panel: str) -> None:
    for step in (None, recorder.steps[0], recorder.steps[len(recorder.steps) // 2]):
        half = Dashboard([BlockPoolView(), BlockTablesView(), BlockTablesView(tokens=True, lines=3), StepLogView()])
        scene = (half if panel == "dashboard" else make_view(panel)).bind(recorder).scene(step)
        for item in scene.items:
            if isinstance(item, Rects):
                x, y, w, h = item.xywh.T
                assert np.isfinite(item.xywh).all() and (w >= 0).all() and (h >= 0).all()
                assert x.min() >= 0 and y.min() >= 0, panel
                assert (x + w).max() <= scene.width and (y + h).max() <= scene.height, panel
        boxes = text_boxes(scene)
        corners = np.array([box[1:] for box in boxes])
        assert corners[:, :2].min() >= 0 and corners[:, 2].max() <= scene.width and corners[:, 3].max() <= scene.height
        overlap = np.minimum(corners[:, None, 2:], corners[None, :, 2:]) - np.maximum(
            corners[:, None, :2], corners[None, :, :2]
        )
        one, two = np.nonzero(np.triu((overlap > 1.5).all(axis=2), 1))
        assert not len(one), f"{panel}: {boxes[one[0]]} and {boxes[two[0]]} cover each other"


def test_a_dashboard_of_all_panels_in_words_and_as_a_still(recorder: Recorder) -> None:
    dashboard = make_dashboard(list(PANELS), recorder, None)
    image = dashboard.png()
    width, height = struct.unpack(">II", image[16:24])
    assert image[:4] == b"\x89PNG" and width == 1200
    assert height == pytest.approx(1.25 * dashboard.scene().height, abs=2)
    assert len(image) < 400_000
    text = dashboard.text()
    for title in ("KV block pool", "Block tables", "Tokens", "Scheduler", "Throughput", "Step log"):
        assert title in text


def test_the_number_of_things_to_draw_is_bounded(recorder: Recorder) -> None:
    packed = make_dashboard(("pool", "tables", "scheduler", "throughput"), recorder, None).scene().pack()
    assert len(packed) < 200_000


def test_a_frame_says_exactly_what_the_scene_holds() -> None:
    scene = make_dashboard(list(PANELS), watched(**SIZES["class"])[0], None).scene()  # type: ignore[arg-type]
    frame = scene.pack(step=45)
    size = int.from_bytes(frame[:4], "little")
    head = json.loads(frame[4 : 4 + size])
    assert size % 4 == 0 and head["step"] == 45 and (head["w"], head["h"]) == (scene.width, scene.height)
    rects = [item for item in scene.items if isinstance(item, Rects)]
    floats = sum(4 * len(i.xywh) if isinstance(i, Rects) else i.xy.size for i in scene.items)
    ints = sum(len(i.tags) for i in rects if i.tags is not None)
    fills = sum(len(i.fill) for i in rects) + sum(len(i.strings) for i in scene.items if isinstance(i, Texts))
    assert len(frame) == 4 + size + 4 * floats + 4 * ints + fills
    numbers = np.frombuffer(frame, np.float32, floats, 4 + size)
    assert numbers[: 4 * len(rects[0].xywh)].tolist() == rects[0].xywh.ravel().tolist()


# -- what a reader must be able to see


def cells(view: View, step: int | None = None, since: int | None = None) -> list[Rects]:
    return [item for item in view.scene(step, since).items if isinstance(item, Rects)]


def test_the_pool_shows_owners_counts_hits_free_cached_blocks_and_evictions() -> None:
    recorder, llm = watched(**SIZES["class"])  # type: ignore[arg-type]
    state, view = recorder.head, BlockPoolView(recorder)
    assert state is not None
    shown = cells(view, since=0)
    owned = [item for item in shown if item.tags is not None]
    assert sum(len(item.tags) for item in owned) == state.counts().held  # type: ignore[arg-type]
    for item in owned:
        assert item.tags is not None
        assert item.fill.tolist() == [hue(seq_id) for seq_id in item.tags.tolist()]
    hatched = [item for item in shown if item.hatch != NO_COLOR and len(item.xywh) > 1]
    assert sum(len(item.xywh) for item in hatched) == state.counts().cached_free
    names = list(PALETTE)
    evicted = [item for item in shown if item.is_flash and names[item.stroke] == "alarm"]
    assert sum(len(item.xywh) for item in evicted) == (state.evict_step > 0).sum() > 0
    hits = (state.num_hits > 0) & (state.is_cached | (state.ref_count > 0))
    outlined = [item for item in shown if item.stroke != NO_COLOR and names[item.stroke] == "ink"]
    assert sum(len(item.xywh) for item in outlined) == hits.sum() + 1 > 1  # one in the legend
    counts = [string for item in view.scene().items if isinstance(item, Texts) for string in item.strings]
    assert sorted(s for s in counts if s.startswith("×")) == sorted(
        f"×{n}" for n in state.ref_count[state.ref_count > 0]
    )


def test_only_what_is_new_flashes() -> None:
    recorder, _ = watched(**SIZES["class"])  # type: ignore[arg-type]
    assert any(item.is_flash for item in cells(BlockPoolView(recorder), since=0))
    assert not any(item.is_flash for item in cells(BlockPoolView(recorder), since=10**6))


@pytest.mark.parametrize("count", [1, 2, 4, 8, 9, 64, 96, 512, 1000, 2000, 4096, 20_000, 100_000])
def test_a_grid_holds_every_block_in_cells_that_can_be_seen(count: int) -> None:
    for width, height in ((402, 226), (902, 190)):
        grid = fit_grid(count, width, height)
        assert grid.cols * grid.rows * grid.per_cell >= count
        assert min(grid.cell_w, grid.cell_h) >= MIN_CELL
        assert grid.cols * grid.cell_w <= width + 1e-9 and grid.rows * grid.cell_h <= height + 1e-9
        assert count > 1500 or grid.per_cell == 1 or width < 900


def test_shares_of_an_aggregated_pool_add_up() -> None:
    recorder, llm = watched(**SIZES["huge pool"])  # type: ignore[arg-type]
    state = recorder.head
    assert state is not None
    view = BlockPoolView(recorder)
    names = list(PALETTE)
    filled = [i for i in cells(view) if i.fill[0] != NO_COLOR and names[i.fill[0]] == "held" and len(i.xywh) > 1]
    (bars,) = filled
    background = next(i for i in cells(view) if names[i.fill[0]] == "empty" and len(i.xywh) > 100)
    share = bars.xywh[:, 3].sum() / background.xywh[:, 3].sum()
    assert share == pytest.approx(state.counts().held / state.num_blocks, rel=0.05)


def test_the_last_block_is_filled_as_far_as_it_is() -> None:
    llm, recorder = ToyEngine(kvcache_block_size=8), Recorder()
    recorder.attach(llm)
    llm.add_request(list(range(11)), SamplingParams(max_tokens=9))
    llm.step()  # 11 tokens: one full block, and 3 of 8 slots of the next
    names = list(PALETTE)
    table = [i for i in cells(BlockTablesView(recorder)) if i.tags is not None and names[i.fill[0]].startswith("hue")]
    widths = table[-1].xywh[:, 2].tolist()
    assert widths[1] / widths[0] == pytest.approx(3 / 8)
    assert "in blocks 0–1 (the last one 3/8 full)" in BlockTablesView(recorder).text()
    words = BlockTablesView(recorder, tokens=True).text()
    assert "block 1: 8 | 9 | 10 | _ | _ | _ | _ | _" in words


def test_the_number_of_a_block_stands_where_its_ink_can_be_read() -> None:
    """Dark ink on the coloured part, the page's ink on the empty one; on a dark page that is light."""
    recorder, llm = watched(1, 3, num_kvcache_blocks=96, kvcache_block_size=8)
    shares = set()
    for _ in range(30):
        llm.step()
        scene = BlockTablesView(recorder).scene()
        hues = [item for item in scene.items if isinstance(item, Rects) and item.fill[0] >= hue(0)]
        colored = np.concatenate([item.xywh for item in hues if item.tags is not None])
        (numbers,) = (item for item in scene.items if isinstance(item, Texts) and item.align == "c")
        for string, (x, y), color in zip(numbers.strings, numbers.xy, numbers.color, strict=True):
            half = text_width(string, numbers.size) / 2
            under = [
                box
                for box in colored
                if box[1] < y < box[1] + box[3] and box[0] < x + half and x - half < box[0] + box[2]
            ]
            if list(PALETTE)[color] == "ink":
                assert under == []
            else:
                assert [box[0] <= x - half and x + half <= box[0] + box[2] for box in under] == [True]
                shares.add(round(float(under[0][2])))
    assert len(shares) > 2  # blocks of several fillings were seen


def test_prefill_and_decode_bars_of_a_step_add_up_to_its_tokens() -> None:
    recorder, _ = watched(**SIZES["mixed"])  # type: ignore[arg-type]
    series = recorder.history.series()
    text = SchedulerView(recorder, last=10).text()
    assert text.count("\n") >= 4 and "P prefill, D decode" in text
    for column, record in enumerate(recorder.records):
        assert series["prefill_tokens"][column] == sum(len(r.token_ids) for r in record.rows if r.is_prefill)
        assert series["decode_tokens"][column] == sum(len(r.token_ids) for r in record.rows if not r.is_prefill)


def test_the_last_steps_alone_equal_the_whole_run_there() -> None:
    recorder, _ = watched(**SIZES["class"])  # type: ignore[arg-type]
    lines = {line.split()[0]: line for line in SchedulerView(recorder).text().splitlines()[1:-1]}
    for line in SchedulerView(recorder, last=12).text().splitlines()[1:-1]:
        name, whole = line.split()[0], lines[line.split()[0]]
        assert line[9:] == whole[9:].ljust(45)[-12:].rstrip(), name


def test_the_step_log_says_who_why_and_which_blocks() -> None:
    recorder, llm = watched(**SIZES["class"])  # type: ignore[arg-type]
    seen = "\n".join(text for record in recorder.records for _, text in step_lines(record, recorder.decode))
    for phrase in ("prompt tokens go first", "takes one token", "gets a seat", "comes back", "in the prefix cache",
                   "preempted, because the pool had no free block left: s", "prefill: positions 0–", "decode s",
                   "left for later steps", "hits the prefix cache and shares block", "takes block", "lets go of block",
                   "cached content given up: block", "ends by its length limit"):  # fmt: skip
        assert phrase in seen, phrase
    view = StepLogView(recorder, lines=5)
    lines = [s for i in view.scene().items if isinstance(i, Texts) for s in i.strings if "more" in s]
    assert lines and len(view._fitting(step_lines(recorder.records[-1]))) == 5


def test_a_token_in_the_step_log_is_told_from_the_punctuation_around_it() -> None:
    llm, recorder = ToyEngine(), Recorder()
    recorder.attach(llm)
    for _ in range(2):
        llm.add_request([1, 2, 3], SamplingParams(max_tokens=3))
    while not llm.is_finished():
        llm.step()
    (comma,) = (text for kind, text in step_lines(recorder.records[1], lambda token_id: ",") if kind == "row")
    assert comma == "decode s0 at 3 → ',',  s1 at 3 → ','"
    (quote, _) = (text for kind, text in step_lines(recorder.records[0], lambda token_id: "'") if kind == "row")
    assert quote.endswith(""" → "'\"""")
    (ids,) = (text for kind, text in step_lines(recorder.records[1]) if kind == "row")
    assert re.fullmatch(r"decode s0 at 3 → \d+,  s1 at 3 → \d+", ids)


@pytest.mark.parametrize(("num_rows", "num_named"), [(16, 16), (24, 24), (40, 20)])
def test_the_timeline_names_its_rows_or_says_that_it_names_every_other(num_rows: int, num_named: int) -> None:
    llm, recorder = ToyEngine(), Recorder()
    recorder.attach(llm)
    llm.generate(prompts_like_chats(num_rows), SamplingParams(max_tokens=3))
    strings = [
        string for item in SchedulerView(recorder).scene().items if isinstance(item, Texts) for string in item.strings
    ]
    assert len([string for string in strings if re.fullmatch(r"s\d+", string)]) == num_named
    assert ("every other" in strings) is (num_named < num_rows)


@pytest.mark.parametrize(
    "view", [BlockPoolView, BlockTablesView, lambda recorder: BlockTablesView(recorder, tokens=True)]
)
def test_a_legend_shows_that_each_sequence_has_a_colour_of_its_own(view: Callable[[Recorder], View]) -> None:
    samples = [item for item in cells(view(watched(5, 2)[0])) if item.tags is None and len(set(item.fill.tolist())) > 1]
    assert samples and all(item.fill.tolist() == [hue(i) for i in range(4)] for item in samples)


def test_sequences_that_end_are_shown_once_more() -> None:
    llm, recorder = ToyEngine(), Recorder()
    recorder.attach(llm)
    llm.add_request([1] * 6, SamplingParams(max_tokens=2))
    while not llm.is_finished():
        llm.step()
    assert "s0 ended with 7 tokens in blocks 0–1" in BlockTablesView(recorder).text()
    assert ThroughputView(recorder).text().startswith("Throughput after step 2: 2 steps")


def marks(view: View, step: int | None = None) -> dict[str, int]:
    """How many bars of generated tokens and frames of prefix hits there are, the legend's two aside."""
    names, shown = list(PALETTE), cells(view, step)
    bars = [i for i in shown if i.fill[0] != NO_COLOR and names[i.fill[0]] == "decode"]
    frames = [i for i in shown if i.stroke != NO_COLOR and names[i.stroke] == "ink"]
    return {kind: sum(len(i.xywh) for i in some) - 1 for kind, some in (("generated", bars), ("found", frames))}


def test_a_sequence_that_has_ended_keeps_its_marks() -> None:
    """Blocks of 4: the first one of a prompt of 6 is found again; 3 of 4 generated tokens got a slot."""
    llm, recorder = ToyEngine(), Recorder()
    recorder.attach(llm)
    for _ in range(2):
        llm.add_request([1, 2, 3, 4, 5, 6], SamplingParams(max_tokens=4))
        while not llm.is_finished():
            llm.step()
    view = BlockTablesView(recorder, tokens=True)
    assert marks(view) == {"generated": 3, "found": 1}
    assert marks(view, recorder.last_step - 1) == {"generated": 2, "found": 1}  # the step before: it still runs
    assert marks(BlockTablesView(recorder))["found"] == 1
    assert "s1 ended with 9 tokens, 4 of them from the prefix cache, in blocks 0, 2–3" in view.text()


def test_the_token_view_is_as_high_as_the_fullest_step_wanted() -> None:
    """Ten sequences one after the other need no more room than one; three side by side need more."""
    heights = {}
    for at_once in (1, 3):
        llm, recorder = ToyEngine(), Recorder()
        recorder.attach(llm)
        for _ in range(10):
            for _ in range(at_once):
                llm.add_request([1] * 6, SamplingParams(max_tokens=2))
            while not llm.is_finished():
                llm.step()
        view = BlockTablesView(recorder, tokens=True)
        heights[at_once] = view.height(1000, recorder.moment())
    assert heights[1] < heights[3]
    assert heights[3] - heights[1] == 2 * SLOT_LINE  # 4 lines at least, and 6


# -- looks


def luminance(color: str) -> float:
    channels = [int(color[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.03928 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(one: str, two: str) -> float:
    bright, dark = sorted((luminance(one), luminance(two)), reverse=True)
    return (bright + 0.05) / (dark + 0.05)


@pytest.mark.parametrize("theme", [0, 1])
def test_text_can_be_read_and_phases_differ_without_colour(theme: int) -> None:
    color = {name: pair[theme] for name, pair in PALETTE.items()}
    for text in ("ink", "muted", "alarm"):
        assert contrast(color[text], color["paper"]) >= 4.5, text
    assert contrast(color["on_prefill"], color["prefill"]) >= 4.5
    for index in range(8):
        assert contrast(color["on_hue"], color[f"hue{index}"]) >= 4.5
    assert contrast(color["ink"], color["empty"]) >= 4.5
    for mark in ("prefill", "alarm", "idle", "hatch"):
        assert contrast(color[mark], color["paper"]) >= 2.4, mark
    assert contrast(color["prefill"], color["decode"]) >= 1.5
    assert contrast(color["decode"], color["alarm"]) >= 1.5


# How red- and green-blind eyes see linear RGB (Viénot, Brettel and Mollon 1999).
BLIND = {
    "red-blind": [[0.1124, 0.8876, 0.0], [0.1124, 0.8876, 0.0], [0.004, -0.004, 1.0]],
    "green-blind": [[0.2928, 0.7072, 0.0], [0.2928, 0.7072, 0.0], [-0.0223, 0.0223, 1.0]],
}


@pytest.mark.parametrize("blindness", BLIND)
def test_phases_and_neighbouring_sequences_differ_for_colour_blind_readers(blindness: str) -> None:
    def seen(name: str) -> np.ndarray:
        channels = np.array([int(PALETTE[name][0][i : i + 2], 16) / 255 for i in (1, 3, 5)])
        linear = np.where(channels <= 0.04045, channels / 12.92, ((channels + 0.055) / 1.055) ** 2.4)
        return np.clip(np.array(BLIND[blindness]) @ linear, 0, 1) ** (1 / 2.2)

    pairs = list(combinations(("prefill", "decode", "alarm"), 2)) + [(f"hue{i}", f"hue{(i + 1) % 8}") for i in range(8)]
    for one, two in pairs:
        assert np.linalg.norm(seen(one) - seen(two)) > 0.12, (one, two)
    assert np.linalg.norm(seen("hue5") - seen("hue7")) > 0.4  # the two greens, for whoever sees what


def test_stills_come_in_two_themes_and_show_the_same() -> None:
    recorder, _ = watched(**SIZES["class"])  # type: ignore[arg-type]
    view = Dashboard([BlockPoolView(), SchedulerView()], recorder)
    light, dark = view.figure(), view.figure(theme="dark")
    for figure in (light, dark):
        texts = [t.get_text() for t in figure.axes[0].texts]
        assert texts == [s for i in view.scene().items if isinstance(i, Texts) for s in i.strings]
    with pytest.raises(ValueError, match="theme must be one of 'light', 'dark'"):
        view.figure(theme="blue")
    scene = Scene(100, 50)
    scene.rects(10, 10, 50, 20, "prefill")
    pixels = matplotlib_pixels(png(scene))
    assert pixels[25, 50].tolist() == [0x2B, 0x66, 0xA8, 255] and pixels[50, 5, 3] == 0  # clear outside the panels
    assert draw_figure(scene).get_size_inches().tolist() == [1.0, 0.5]


def matplotlib_pixels(image: bytes) -> np.ndarray:
    from matplotlib.image import imread

    return np.asarray(np.round(imread(io.BytesIO(image)) * 255), int)


def test_small_helpers() -> None:
    assert ranges([4, 5, 6, 9, 11, 12]) == "4–6, 9, 11–12" and ranges([]) == ""
    assert ranges(range(0, 40, 2), limit=2) == "0, 2, …"
    assert [a.tolist() for a in runs(np.array([[0, 1, 1, 0, 1], [1, 1, 1, 1, 1]], bool))] == [
        [0, 0, 1],
        [1, 4, 0],
        [2, 1, 5],
    ]
    assert clip("short", 100, 10) == "short" and clip("much too long for it", 60, 10).endswith("…")
    assert text_width(clip("日本語日本語日本語", 50, 10), 10) <= 50
    assert token_text(5, None) == "5" and token_text(5, lambda t: " a\n") == "·a⏎" and token_text(None, None) == ""
    assert token_text(5, lambda t: "\x1b") == "\\x1b"


def test_mistakes_are_named() -> None:
    with pytest.raises(ValueError, match="there is no panel 'pol'; there are 'pool', 'tables'"):
        make_view("pol")
    with pytest.raises(ValueError, match="BlockPoolView has nothing to show: give it a Recorder"):
        BlockPoolView().scene()
    with pytest.raises(ValueError, match="last must be at least 1"):
        SchedulerView(last=0)
    with pytest.raises(ValueError, match="at least one view"):
        Dashboard([])
