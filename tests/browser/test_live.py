"""The live views in a real JupyterLab: during the run, after it, and in the file that is left."""

import base64
import io
from pathlib import Path

import numpy as np
import pytest

from tests.browser.rig import Lab, Notebook, write_notebook

pytestmark = pytest.mark.browser

TOY = """
from nanovllm.sampling_params import SamplingParams
from nanovllm.viz import *
from tests.viz.toy import ToyEngine, prompts_like_chats
llm = ToyEngine(step_seconds=0.04, num_kvcache_blocks=96)
prompts, params = prompts_like_chats(12), SamplingParams(max_tokens=60)
panels = ("pool", "tables", "scheduler", "throughput", "steps", "tokens")
"""
LIVE = "with live(llm, panels) as view:\n    llm.generate(prompts, params)"
MODEL = """
import os, time
from nanovllm import LLM, SamplingParams
from nanovllm.viz import *
llm = LLM({!r}, attention_backend="torch", kvcache_block_size=16, num_kvcache_blocks=14,
          max_num_batched_tokens=64, max_num_seqs=6, dtype="float32", seed=0)

def until_seen(record):  # a fast engine would be through before a slow browser has drawn anything
    give_up = time.monotonic() + 4
    while 5 <= record.step < 15 and not os.path.exists({!r}) and time.monotonic() < give_up:
        time.sleep(0.05)

llm.add_step_hook(until_seen)
system = "You are a helpful assistant who answers briefly and kindly. "
prompts = [system + q for q in ("What is the capital of France?", "Name three colours.", "What is 2 + 2?",
                                "Why is the sky blue?", "Tell me a joke.")]
params = SamplingParams(temperature=0.6, max_tokens=16, ignore_eos=True)
panels = ("pool", "tables", "scheduler", "throughput", "steps", "tokens")
"""
STEP = "Number(document.querySelector('.nv-root')?.dataset.step ?? -1)"
FAR = f"() => {STEP} >= 12"


def canvas_pixels(notebook: Notebook) -> np.ndarray:
    from matplotlib.image import imread

    url = notebook.page.evaluate("() => document.querySelector('.nv-canvas').toDataURL()")
    return np.array(imread(io.BytesIO(base64.b64decode(url.split(",")[1]))))


def check_saved(notebook: Notebook) -> None:
    """Nothing of a widget is left in the file; every picture has its words."""
    saved = notebook.save()
    assert "widgets" not in saved.metadata
    kinds = [set(o["data"]) for c in saved.cells for o in c.outputs if "data" in o]
    assert {"image/png", "text/plain"} in kinds
    assert all(not any("widget" in kind for kind in bundle) for bundle in kinds)


def test_live_during_and_after_and_in_the_saved_file(lab: Lab) -> None:
    write_notebook(lab.folder / "live.ipynb", [TOY, LIVE, "view.recorder"])
    with lab.open("live.ipynb") as notebook:
        notebook.run(wait=None)
        notebook.page.wait_for_function(FAR, timeout=30_000)
        assert notebook.shown() == {"images": 0, "canvases": 1, "broken": 0}
        colors = {tuple(pixel) for pixel in (canvas_pixels(notebook)[::7, ::7].reshape(-1, 4) * 255).astype(int)}
        assert {(0x2B, 0x66, 0xA8, 255), (0xE3, 0xA7, 0x2F, 255)} <= colors  # prefill and decode are drawn
        label = notebook.page.get_attribute(".nv-canvas", "aria-label")
        assert label is not None and label.startswith("After step ") and "KV pool: 96 blocks" in label
        first = notebook.page.evaluate(f"() => {STEP}")
        notebook.page.wait_for_function(f"() => {STEP} > {first} || !document.querySelector('.nv-root')")
        notebook.shot("live_during")
        notebook.wait()
        notebook.page.wait_for_function("() => document.querySelector('.jp-OutputArea img')")
        assert notebook.shown() == {"images": 1, "canvases": 0, "broken": 0}
        notebook.shot("live_after")
        check_saved(notebook)
        assert notebook.complaints == []


def test_the_saved_notebook_reads_well_without_its_kernel(lab: Lab) -> None:
    write_notebook(lab.folder / "reopen.ipynb", [TOY, LIVE])
    with lab.open("reopen.ipynb") as notebook:
        notebook.run()
        notebook.save()
    other = lab.folder / "cloned.ipynb"  # as after a git clone: the same, but nobody has vouched for it
    other.write_text(
        (lab.folder / "reopen.ipynb").read_text().replace("num_kvcache_blocks=96", "num_kvcache_blocks=97")
    )
    for name, is_trusted in (("reopen.ipynb", True), ("cloned.ipynb", False)):
        with lab.open(name) as notebook:
            notebook.page.wait_for_timeout(2000)  # Lab looks for dead widgets after 1.6 s
            trust = notebook.page.evaluate("() => [...window.testPanel.content.model.cells].every(c => c.trusted)")
            assert trust is is_trusted
            assert notebook.shown() == {"images": 1, "canvases": 0, "broken": 0}, name
            notebook.shot(f"live_reopened_{'trusted' if is_trusted else 'untrusted'}")
            assert notebook.complaints == []


def test_the_file_converts_to_html_with_its_picture(lab: Lab, tmp_path: Path) -> None:
    from nbconvert import HTMLExporter

    write_notebook(lab.folder / "convert.ipynb", [TOY, LIVE])
    with lab.open("convert.ipynb") as notebook:
        notebook.run()
        saved = notebook.save()
    html, _ = HTMLExporter().from_notebook_node(saved)
    assert html.count('src="data:image/png;base64,') == 1 and "Error displaying" not in html


def test_interrupt_and_run_again(lab: Lab) -> None:
    long = TOY.replace("max_tokens=60", "max_tokens=2000")  # a busy browser may take seconds to draw the first picture
    write_notebook(lab.folder / "stop.ipynb", [long, LIVE, "params = SamplingParams(max_tokens=20)"])
    with lab.open("stop.ipynb") as notebook:
        notebook.run(0)
        for _ in range(2):
            notebook.run(1, wait=None)
            notebook.page.wait_for_function(FAR, timeout=30_000)
            notebook.interrupt()
            notebook.interrupt()  # impatience must not tear anything
            notebook.wait()
            assert notebook.shown() == {"images": 1, "canvases": 0, "broken": 0}
            kinds = [output["output_type"] for output in notebook.outputs()[1]]
            assert kinds == ["display_data", "error"]
        notebook.shot("live_interrupted")
        notebook.run(2)
        notebook.run(1)
        assert [output["output_type"] for output in notebook.outputs()[1]] == ["display_data"]
        assert notebook.complaints == []


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_the_canvas_and_the_still_are_one_picture(lab: Lab, theme: str) -> None:
    """Pixel by pixel, at the same size: the same layout, the same colours, letters apart."""
    show = f"from IPython.display import Image; Image(player.dashboard.png(theme={theme!r}))"
    code = "player = Player(llm, prompts, params, panels=panels, paused=True).step(40)"
    write_notebook(lab.folder / f"same_{theme}.ipynb", [TOY, code, show])
    lab_theme = {"light": "JupyterLab Light", "dark": "JupyterLab Dark"}[theme]
    with lab.open(f"same_{theme}.ipynb", theme=lab_theme, width=1500) as notebook:
        notebook.run()
        notebook.page.wait_for_function(f"() => {STEP} == 40")
        notebook.page.wait_for_timeout(500)
        live = canvas_pixels(notebook)
        from matplotlib.image import imread

        still = np.array(imread(io.BytesIO(base64.b64decode(notebook.outputs()[2][0]["data"]["image/png"]))))
        notebook.shot(f"same_{theme}")
        assert live.shape[1] == still.shape[1] == 1200 and abs(live.shape[0] - still.shape[0]) <= 1
        for image in (live, still):
            image[..., :3] *= image[..., 3:]  # what is clear has no colour
        height = min(len(live), len(still)) // 8 * 8
        blocks = [image[:height].reshape(height // 8, 8, 150, 8, 4).mean(axis=(1, 3)) for image in (live, still)]
        difference = np.abs(blocks[0] - blocks[1]).max(axis=2)
        assert difference.mean() < 0.02 and (difference > 0.25).mean() < 0.004
        paper = {"light": 1.0, "dark": 0x15 / 255}[theme]
        assert still[30, 1190, 0] == pytest.approx(paper, abs=0.01)
        assert live[30, 1190, 0] == pytest.approx(paper, abs=0.01)
        assert notebook.complaints == []


def test_from_one_block_to_very_many(lab: Lab) -> None:
    cells = [TOY]
    for options in ("num_kvcache_blocks=32, max_num_seqs=1", "num_kvcache_blocks=100_000, max_num_seqs=512, "
                    "max_num_batched_tokens=4096, kvcache_block_size=16"):  # fmt: skip
        cells.append(f"llm = ToyEngine({options})\nmany = prompts_like_chats(llm.config.max_num_seqs + 2)\n"
                     "player = Player(llm, many, params, panels=panels, paused=True).step(12)")  # fmt: skip
    write_notebook(lab.folder / "sizes.ipynb", cells)
    with lab.open("sizes.ipynb") as notebook:
        notebook.run()
        notebook.page.wait_for_function("() => document.querySelectorAll('.nv-canvas').length === 2")
        notebook.page.wait_for_timeout(500)
        notebook.shot("sizes")
        assert notebook.shown() == {"images": 0, "canvases": 2, "broken": 0} and notebook.complaints == []


@pytest.mark.parametrize("theme", ["Light", "Dark"])
def test_all_views_over_the_default_model(lab: Lab, default_model_dir: Path, theme: str) -> None:
    setup, seen = MODEL.format(str(default_model_dir), f"seen_{theme}"), lab.folder / f"seen_{theme}"
    cells = [setup, LIVE, "llm.config", "view.recorder.record(9)", "llm.snapshot()"]
    write_notebook(lab.folder / "model.ipynb", cells)
    with lab.open("model.ipynb", theme=f"JupyterLab {theme}") as notebook:
        notebook.run(wait=None)
        notebook.page.wait_for_function(f"() => {STEP} >= 5", timeout=120_000)
        notebook.page.evaluate("() => document.querySelector('.nv-root').scrollIntoView()")
        notebook.shot(f"model_during_{theme.lower()}")
        seen.touch()
        notebook.wait(120)
        assert notebook.shown() == {"images": 1, "canvases": 0, "broken": 0}
        assert all(output["output_type"] != "error" for outputs in notebook.outputs() for output in outputs)
        for cell, name in ((1, "after"), (3, "tables")):
            notebook.page.evaluate("i => document.querySelectorAll('.jp-Cell')[i].scrollIntoView()", cell)
            notebook.shot(f"model_{name}_{theme.lower()}")
        assert notebook.complaints == []
