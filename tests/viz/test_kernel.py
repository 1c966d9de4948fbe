"""live and Player in a real kernel: what is left in the cell, in the engine and in memory."""

import random
from collections.abc import Iterator

import pytest

from tests.viz.kernel import PNG, SETUP, TEXT, VIEW, Kernel, errors, pictures, views

pytest.importorskip("jupyter_client")
pytest.importorskip("anywidget")
LIVE = "with live(llm) as view:\n    out = llm.generate(prompts, params)"
CLEAN = {"hooks": 0, "widgets": 0, "idle": True, "used": 0, "free": 64}


@pytest.fixture(scope="module")
def kernel() -> Iterator[Kernel]:
    with Kernel() as kernel:
        assert not errors(kernel.run(SETUP))
        yield kernel


def is_clean(kernel: Kernel) -> bool:
    kernel.run("llm.generate([[1, 2, 3]], params)")  # the engine still works
    return {**kernel.health(), "steps": 0} == {**CLEAN, "steps": 0}


def test_a_live_cell_leaves_one_picture_with_its_words_and_nothing_else(kernel: Kernel) -> None:
    outputs = kernel.run(LIVE)
    assert not errors(outputs) and len(outputs) == 1
    assert outputs[0]["data"].keys() == {PNG, TEXT} and outputs[0]["metadata"] == {}
    assert outputs[0]["data"][TEXT].startswith("KV block pool after step ")
    assert is_clean(kernel)
    (shown,) = kernel.run("view.num_frames >= 1, view.recorder.last_step > 20, view.throttle.spent < 2")
    assert shown["data"][TEXT] == "(True, True, True)"
    (again,) = pictures(kernel.run("view"))  # any later cell can show it again
    assert again[TEXT].startswith("KV block pool")


def test_while_the_cell_runs_the_output_is_a_widget_with_a_text(kernel: Kernel) -> None:
    outputs = kernel.run("view = live(llm); view.__enter__(); print(len(view._output.widget.frame) > 1000)")
    (shown,) = views(outputs)
    assert shown.keys() == {VIEW, TEXT} and shown[TEXT] == "A live view of the engine: run this cell to see it."
    assert outputs[-1]["text"] == "True\n"
    kernel.run("view.__exit__(None, None, None)")
    assert len(pictures(outputs)) == 1 and not views(outputs) and is_clean(kernel)


def test_an_error_inside_leaves_the_picture_too(kernel: Kernel) -> None:
    outputs = kernel.run("with live(llm):\n    llm.fail_at = llm.step_count + 3\n    llm.generate(prompts, params)")
    assert errors(outputs) == ["RuntimeError"] and len(pictures(outputs)) == 1 and not views(outputs)
    assert is_clean(kernel)


@pytest.mark.parametrize("count", [5, pytest.param(40, marks=pytest.mark.slow)])
def test_runs_of_one_cell_pile_nothing_up(kernel: Kernel, count: int) -> None:
    kernel.run("params = SamplingParams(max_tokens=4)")
    for _ in range(count):
        outputs = kernel.run(LIVE)
        assert len(outputs) == len(pictures(outputs)) == 1
    kernel.run("params = SamplingParams(max_tokens=30)")
    assert is_clean(kernel)


def interrupt_often(kernel: Kernel, count: int, seed: int) -> None:
    rng = random.Random(seed)
    interrupted = 0
    for _ in range(count):
        outputs = kernel.run(LIVE, interrupt_after=rng.uniform(0.0, 0.35))
        assert errors(outputs) in ([], ["KeyboardInterrupt"]), errors(outputs)
        interrupted += bool(errors(outputs))
        assert not views(outputs) and len(pictures(outputs)) <= 1
        assert is_clean(kernel)
    assert interrupted > count // 3
    outputs = kernel.run(LIVE)
    assert not errors(outputs) and len(outputs) == len(pictures(outputs)) == 1


def test_interrupted_at_random_moments_everything_stays_whole(kernel: Kernel) -> None:
    interrupt_often(kernel, 6, seed=1)


@pytest.mark.slow
def test_120_interrupts_at_random_moments(kernel: Kernel) -> None:
    interrupt_often(kernel, 120, seed=2)


def test_without_live_views_there_are_only_stills(kernel: Kernel) -> None:
    kernel.run("import os; os.environ['NANOVLLM_LIVE'] = '0'")
    try:
        for code in (LIVE, "player = Player(llm, prompts, params)"):
            outputs = kernel.run(code)
            assert len(outputs) == len(pictures(outputs)) == 1, code
        (shown,) = kernel.run("player.done.is_set(), all(len(ids) == 30 for ids in player.token_ids)")
        assert shown["data"][TEXT] == "(True, True)"
    finally:
        kernel.run("del os.environ['NANOVLLM_LIVE']")
    assert is_clean(kernel)


# -- Player


def printed(kernel: Kernel, what: str) -> str:
    text: str = kernel.run(f"print({what})")[0]["text"]
    return text.strip()


def test_a_player_keeps_its_controls_at_its_end_and_lets_the_engine_go(kernel: Kernel) -> None:
    outputs = kernel.run("player = Player(llm, prompts, params)")
    kernel.wait(lambda: kernel.health()["hooks"] == 0)  # which runs other cells, too
    assert len(views(outputs)) == 1 and not pictures(outputs)
    last = printed(kernel, "player.cursor")
    kernel.run("llm.generate(prompts, params)")  # no part of the player's run
    state = "len(player.texts), all(len(ids) == 30 for ids in player.token_ids), player.is_over, player.cursor"
    assert printed(kernel, state) == f"8 True True {last}" and len(views(outputs)) == 1
    kernel.run("player._on_click({'do': 'back'})")
    kernel.listen(0.3)
    assert printed(kernel, "player.cursor") == str(int(last) - 1)
    kernel.run("player.speed = 20; player._on_click({'do': 'seek', 'step': player.recorder.last_step})")
    kernel.run("player._on_click({'do': 'play'})")
    kernel.listen(0.5)
    assert printed(kernel, "player.recorder.steps[0] < player.cursor < player.recorder.last_step") == "True"
    kernel.run("player.finish()")
    assert len(pictures(outputs)) == 1 and not views(outputs) and is_clean(kernel)


def test_the_picture_that_a_player_leaves_says_how_to_get_the_controls_back(kernel: Kernel) -> None:
    outputs = kernel.run("mine = Player(llm, prompts, params, paused=True)")
    kernel.run("mine.finish()")
    (picture,) = pictures(outputs)
    assert picture[TEXT].endswith("\nIn a running notebook mine.show() brings the controls back.")
    again = kernel.run("mine.show()")
    assert len(views(again)) == 1 and printed(kernel, "mine.is_over") == "True"
    kernel.run("mine.close()")
    outputs = kernel.run("Player(llm, prompts, params, paused=True).finish();")
    (picture,) = pictures(outputs)
    assert picture[TEXT].endswith("\nIn a running notebook the player's show() brings the controls back.")
    assert is_clean(kernel)


def test_running_the_cell_of_a_player_that_has_ended_leaves_one(kernel: Kernel) -> None:
    for _ in range(3):
        outputs = kernel.run("player = Player(llm, prompts, params)\nawait player.done.wait()")
        assert len(views(outputs)) == 1 and kernel.health()["widgets"] == 2  # it and its layout
    kernel.run("player.close()")
    assert is_clean(kernel)


def test_a_cell_can_wait_for_a_player(kernel: Kernel) -> None:
    outputs = kernel.run("player = Player(llm, prompts, params)\nawait player.done.wait()\nprint(player)")
    assert outputs[-1]["text"].startswith("Player(the end, after ") and len(views(outputs)) == 1
    kernel.run("player.close()")
    assert len(pictures(outputs)) == 1 and is_clean(kernel)


def test_a_player_run_again_replaces_its_forerunner(kernel: Kernel) -> None:
    code = "player = Player(llm, prompts, params, paused=True).step(3)"
    for _ in range(5):
        outputs = kernel.run(code)
        assert len(views(outputs)) == 1
        assert kernel.health() | {"steps": 0, "used": 0, "free": 0} == {
            "hooks": 1, "widgets": 2, "idle": False, "used": 0, "free": 0, "steps": 0,
        }  # fmt: skip
    kernel.run("player.close()")
    assert len(pictures(outputs)) == 1 and not views(outputs)
    assert is_clean(kernel)


def test_messages_of_the_controls_do_what_they_say(kernel: Kernel) -> None:
    """The messages that the buttons send, put in as the widget would; clicks are tested in a browser."""
    kernel.run("player = Player(llm, prompts, params, paused=True)\nsay = player._on_click\nstart = llm.step_count")
    for message, expected in (
        ("{'do': 'step'}", "1 False"),
        ("{'do': 'step'}", "2 False"),
        ("{'do': 'back'}", "1 False"),
        ("{'do': 'until', 'event': 'hit'}", None),
        ("{'do': 'seek', 'step': start + 1}", "1 False"),
        ("{'do': 'nonsense'}", "1 False"),
        ("{'do': 'seek', 'step': 'x'}", "1 False"),
    ):
        kernel.run(f"say({message})")
        kernel.listen(0.3)
        shown = kernel.run("print(player.cursor - start, player.playing)")[0]["text"].strip()
        assert expected is None or shown == expected, message
    kernel.run("say({'do': 'speed', 'value': 20}); say({'do': 'play'})")
    kernel.listen(0.5)
    shown = kernel.run("print(player.cursor - start, player.playing)")[0]["text"].split()  # this cell paused it
    assert 3 <= int(shown[0]) <= 16 and shown[1] == "False"
    kernel.run("say({'do': 'close'})")
    kernel.wait(lambda: kernel.health()["widgets"] == 0)
    assert is_clean(kernel)


def test_interrupting_a_playing_player_pauses_it(kernel: Kernel) -> None:
    kernel.run("player = Player(llm, prompts, SamplingParams(max_tokens=2000), keep=64)")
    kernel.listen(0.3)
    for _ in range(30):  # between two slices the kernel is idle and the signal is ignored, as ipykernel has it
        kernel.manager.interrupt_kernel()
        kernel.listen(0.05)
    before = kernel.health()["steps"]
    kernel.listen(0.3)
    assert kernel.health()["steps"] == before
    kernel.run("player.close()")
    assert is_clean(kernel)


def test_finish_is_interrupted_at_a_steps_end_and_can_go_on(kernel: Kernel) -> None:
    kernel.run("player = Player(llm, prompts, SamplingParams(max_tokens=100), paused=True)")
    outputs = kernel.run("player.finish()", interrupt_after=0.1)
    assert errors(outputs) == ["KeyboardInterrupt"]
    assert not errors(kernel.run("player.finish(); assert all(len(ids) == 100 for ids in player.token_ids)"))
    assert is_clean(kernel)


def test_a_recorded_run_plays_and_shows_again(kernel: Kernel) -> None:
    kernel.run("with live(llm) as view:\n    llm.generate(prompts, params)")
    outputs = kernel.run("replay = Player(view.recorder, speed=0)")
    kernel.wait(lambda: printed(kernel, "replay.is_over") == "True")
    assert len(views(outputs)) == 1 and not pictures(outputs)
    kernel.run("replay.speed = 10; replay._on_click({'do': 'play'})")
    kernel.listen(0.5)
    assert printed(kernel, "replay.playing") == "True"  # another cell does not pause what needs no engine
    kernel.run("replay.close()")
    assert len(pictures(outputs)) == 1
    again = kernel.run("replay.show()")
    assert len(views(again)) == 1
    kernel.run("replay.seek(view.recorder.steps[4]); replay.close()")
    assert len(pictures(again)) == 1 and is_clean(kernel)
