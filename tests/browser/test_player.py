"""The player's controls, by mouse and by keyboard, in a real JupyterLab."""

import time
from collections.abc import Callable
from typing import Any

import pytest

from tests.browser.rig import Lab, Notebook, write_notebook
from tests.browser.test_live import STEP, TOY, check_saved

pytestmark = pytest.mark.browser
PLAYER = "player = Player(llm, prompts, params, panels=('pool', 'tables', 'scheduler', 'steps'), paused=True)"


def at(notebook: Notebook) -> int:
    return int(notebook.page.evaluate(f"() => {STEP}"))


def until(notebook: Notebook, condition: str) -> None:
    notebook.page.wait_for_function(f"() => {condition}", timeout=20_000)


def opened(lab: Lab, name: str, *cells: str) -> Notebook:
    write_notebook(lab.folder / name, [TOY, *cells])
    notebook = lab.open(name)
    notebook.run()
    until(notebook, f"{STEP} >= 0")
    return notebook


def click(notebook: Notebook) -> Callable[[str], Any]:
    return lambda label: notebook.page.click(f".nv-bar [aria-label^='{label}']")


def test_every_control_by_mouse(lab: Lab) -> None:
    with opened(lab, "mouse.ipynb", PLAYER) as notebook:
        press = click(notebook)
        assert at(notebook) == 0
        for step in (1, 2, 3):
            press("One step on")
            until(notebook, f"{STEP} === {step}")
        press("One step back")
        until(notebook, f"{STEP} === 2")
        press("Play")
        until(notebook, f"{STEP} > 12")
        press("Pause")
        until(notebook, "document.querySelector('.nv-main').dataset.state === 'paused'")
        stopped = at(notebook)
        notebook.page.wait_for_timeout(600)
        assert at(notebook) == stopped
        notebook.page.fill(".nv-slider", "5")
        until(notebook, f"{STEP} === 5")
        notebook.page.select_option("[aria-label='Speed']", "4")
        started = time.monotonic()
        press("Play")
        notebook.page.wait_for_timeout(1600)
        press("Pause")
        until(notebook, "document.querySelector('.nv-main').dataset.state === 'paused'")
        assert 6 <= at(notebook) <= 8 + 4 * (time.monotonic() - started)  # four steps a second, from step 5
        notebook.page.select_option("[aria-label='Speed']", "0")
        notebook.page.select_option("[aria-label^='Run until the next event of this']", "preempt")
        left = at(notebook)
        press("Run until the next event of the kind")
        until(notebook, f"document.querySelector('.nv-main').dataset.state === 'paused' && {STEP} > {left}")
        notebook.shot("player_preempted")
        label = notebook.page.get_attribute(".nv-canvas", "aria-label")
        assert label is not None and label.startswith(f"After step {at(notebook)} ")
        press("Play")
        until(notebook, "document.querySelector('.nv-status').textContent.startsWith('the end')")
        notebook.shot("player_end")
        press("Play again")
        until(notebook, f"{STEP} < 20")  # from the first step, and slowly enough to be seen
        press("Pause")
        notebook.page.fill(".nv-slider", "9999")
        until(notebook, "document.querySelector('.nv-main').getAttribute('aria-label') === 'Play again'")
        notebook.page.click("text=Keep as picture")
        until(notebook, "document.querySelector('.jp-OutputArea img')")
        assert notebook.shown() == {"images": 1, "canvases": 0, "broken": 0}
        check_saved(notebook)
        assert notebook.complaints == []


def test_every_control_by_keyboard(lab: Lab) -> None:
    with opened(lab, "keys.ipynb", PLAYER) as notebook:
        page = notebook.page
        page.focus(".nv-bar [aria-label='Play']")
        page.keyboard.press("Tab")  # to the next button: one step on
        page.keyboard.press("Enter")
        until(notebook, f"{STEP} === 1")
        page.keyboard.press("Space")
        until(notebook, f"{STEP} === 2")
        page.keyboard.press("Shift+Tab")
        page.keyboard.press("Enter")
        until(notebook, f"{STEP} > 6")
        page.keyboard.press("Enter")
        until(notebook, "document.querySelector('.nv-main').dataset.state === 'paused'")
        page.fill(".nv-slider", "6")  # wherever a slow machine has stopped: both sequences are there in step 6
        until(notebook, f"{STEP} === 6")
        page.focus(".nv-canvas")
        page.keyboard.press("ArrowDown")
        page.keyboard.press("ArrowDown")
        assert page.inner_text(".nv-tip").startswith("sequence 1: ")
        notebook.shot("player_keyboard")
        page.keyboard.press("Escape")
        assert page.is_hidden(".nv-tip")
        modes = page.evaluate("() => window.testPanel.content.mode")
        assert modes == "command" and notebook.complaints == []  # Lab's own shortcuts stayed out of it


def test_pointing_at_a_sequence_names_it(lab: Lab) -> None:
    with opened(lab, "point.ipynb", PLAYER + ".step(8)") as notebook:
        until(notebook, f"{STEP} === 8")
        canvas = notebook.page.locator(".nv-canvas")
        box = canvas.bounding_box()
        assert box is not None
        scale = box["width"] / 960
        notebook.page.mouse.move(box["x"] + 60 * scale, box["y"] + 40 * scale)  # block 0 of the pool
        until(notebook, "!document.querySelector('.nv-tip').hidden")
        assert notebook.page.inner_text(".nv-tip").startswith("sequence 0: running")


def test_interrupting_pauses_and_play_goes_on(lab: Lab) -> None:
    endless = PLAYER.replace("params", "SamplingParams(max_tokens=300)").replace("True", "False")
    with opened(lab, "pause.ipynb", endless) as notebook:
        until(notebook, f"{STEP} > 3")
        for _ in range(20):  # between two slices the kernel is idle and ignores the signal
            notebook.interrupt()
            notebook.page.wait_for_timeout(60)
            if notebook.page.get_attribute(".nv-main", "data-state") == "paused":
                break
        stopped = at(notebook)
        notebook.page.wait_for_timeout(500)
        assert at(notebook) == stopped
        click(notebook)("Play")
        until(notebook, f"{STEP} > {stopped}")
        assert notebook.complaints == []


def test_the_controls_stay_until_a_cell_wants_the_engine(lab: Lab) -> None:
    short = PLAYER.replace("params", "SamplingParams(max_tokens=12)").replace("paused=True", "speed=0")
    write_notebook(lab.folder / "stays.ipynb", [TOY, short, "1 + 1", "player.finish()", "player.show()"])
    with lab.open("stays.ipynb") as notebook:
        notebook.run(0)
        notebook.run(1)
        until(notebook, "document.querySelector('.nv-status').textContent.startsWith('the end')")
        notebook.run(2)
        assert notebook.page.locator(".nv-main").is_enabled()
        click(notebook)("One step back")
        until(notebook, "!document.querySelector('.nv-status').textContent.startsWith('the end')")
        notebook.run(3)
        until(notebook, "document.querySelector('.jp-OutputArea img')")
        notebook.shot("player_finished")
        text = notebook.outputs()[1][0]["data"]["text/plain"]
        assert "In a running notebook player.show() brings the controls back." in "".join(text)
        assert notebook.shown() == {"images": 1, "canvases": 0, "broken": 0}
        notebook.run(4)
        until(notebook, "document.querySelector('.nv-main')?.getAttribute('aria-label') === 'Play again'")
        assert notebook.shown() == {"images": 1, "canvases": 1, "broken": 0} and notebook.complaints == []


def test_running_its_cell_again_leaves_one_player(lab: Lab) -> None:
    with opened(lab, "again.ipynb", PLAYER, "import ipywidgets; print(len(llm.hooks))") as notebook:
        for _ in range(3):
            notebook.run(1)
            until(notebook, "document.querySelectorAll('.nv-canvas').length === 1")
            click(notebook)("One step on")
            notebook.page.wait_for_timeout(300)
        notebook.run(2)
        assert notebook.outputs()[2][0]["text"] == "1\n" and notebook.complaints == []


def test_a_recorded_run_replays_without_an_engine(lab: Lab) -> None:
    record = "recorder = Recorder()\nwith llm.observe(recorder):\n    llm.generate(prompts, params)\n"
    record += "recorder.save('run.jsonl.gz')"
    replay = "player = Player(Recorder.load('run.jsonl.gz'), panels=('scheduler', 'steps'), paused=True)"
    with opened(lab, "replay.ipynb", record, replay) as notebook:
        until(notebook, f"{STEP} === 1")
        click(notebook)("One step on")
        until(notebook, f"{STEP} === 2")
        click(notebook)("Play")
        until(notebook, "document.querySelector('.nv-status').textContent.startsWith('the end')")
        click(notebook)("One step back")
        until(notebook, "!document.querySelector('.nv-status').textContent.startsWith('the end')")
        notebook.shot("replay")
        assert notebook.complaints == []
