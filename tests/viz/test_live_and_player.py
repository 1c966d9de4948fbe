"""live and Player where there is no notebook: a script, a test, a terminal."""

import asyncio
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from nanovllm.errors import EngineBusyError, EngineDeadError
from nanovllm.sampling_params import SamplingParams
from nanovllm.viz import BlockTablesView, Player, Recorder, live
from nanovllm.viz.live import Interrupts, Throttle
from nanovllm.viz.recorder import Recorder as AnyRecorder
from tests.viz.test_truth import assert_same
from tests.viz.toy import ToyEngine, prompts_like_chats


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.mark.parametrize("cost", [0.001, 0.02, 0.3])
def test_a_throttle_keeps_to_its_rate_and_to_its_share(cost: float) -> None:
    clock = Clock()
    throttle = Throttle(fps=4, share=0.02, clock=clock)
    throttle.drew(cost)  # the first picture, before the run
    throttle.start()
    frames = []
    while clock.now < 60:
        clock.now += 0.003  # a step
        if throttle.is_due():
            frames.append(clock.now)
            clock.now += cost
            throttle.drew(cost)
    assert throttle.spent <= 0.02 * clock.now and throttle.spent == pytest.approx(len(frames) * cost)
    assert min(b - a for a, b in zip(frames, frames[1:], strict=False)) >= 0.25
    expected = min(60 * 4, 60 * 0.02 / cost)
    assert 0.8 * expected - 1 <= len(frames) <= expected


def test_a_throttle_refuses_what_makes_no_sense() -> None:
    for fps, share in ((0, 0.02), (4, 0), (4, 1.5)):
        with pytest.raises(ValueError, match="fps must be positive and share above 0"):
            Throttle(fps, share)


def test_interrupts_are_held_and_then_delivered_and_the_handler_comes_back() -> None:
    before = signal.getsignal(signal.SIGINT)
    interrupts = Interrupts()
    with interrupts:
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)
    assert interrupts.count == 2 and signal.getsignal(signal.SIGINT) is before
    with pytest.raises(KeyboardInterrupt):
        interrupts.deliver()


def test_live_without_a_notebook_records_and_can_show_later() -> None:
    llm = ToyEngine()
    with live(llm) as view:
        llm.generate(prompts_like_chats(6), SamplingParams(max_tokens=10))
    assert llm.hooks == {} and view.recorder.last_step == llm.step_count
    assert "steps" in repr(view) and "KV block pool" in view.text() and view.figure() is not None
    assert view.recorder.head is not None
    assert_same(view.recorder.head, llm.snapshot())


def test_live_after_an_error_shows_the_engine_as_it_is_then() -> None:
    llm = ToyEngine()
    llm.add_request([9] * 9, SamplingParams(max_tokens=99))
    with pytest.raises(KeyboardInterrupt), live(llm) as view:
        llm.add_step_hook(lambda record: signal.raise_signal(signal.SIGINT) if record.step == 5 else None, key="stop")
        llm.generate(prompts_like_chats(3), SamplingParams(max_tokens=30))
    assert list(llm.hooks) == ["stop"] and view.recorder.head is not None
    assert_same(view.recorder.head, llm.snapshot())  # the call's requests were aborted, which no record tells
    assert set(view.recorder.head.sequences) == {0}


def test_live_keeps_a_recorder_that_it_is_given_and_panels_can_be_views() -> None:
    llm, recorder = ToyEngine(), Recorder()
    for _ in range(2):
        with live(llm, ["pool", BlockTablesView(tokens=True)], recorder=recorder) as view:
            llm.generate([[1, 2, 3, 4, 5]], SamplingParams(max_tokens=3))
    assert view.recorder is recorder and recorder.history.totals["steps"] == llm.step_count
    assert recorder.decode is not None and recorder.decode(3) == " dog"
    with pytest.raises(ValueError, match="there is no panel 'pond'"):
        live(llm, "pond")


def test_live_in_another_thread_leaves_the_signals_alone() -> None:
    llm, errors = ToyEngine(), []

    def work() -> None:
        try:
            with live(llm):
                llm.generate([[1, 2, 3]], SamplingParams(max_tokens=2))
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert errors == [] and llm.hooks == {}


@pytest.fixture
def sigint() -> Iterator[None]:
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    assert signal.getsignal(signal.SIGINT) in (signal.default_int_handler, signal.SIG_IGN), "it was put back"
    signal.signal(signal.SIGINT, before)


def interrupting(method: Any, first: bool) -> Any:
    """The method, with an interrupt before or behind it."""

    def both(*args: Any, **options: Any) -> Any:
        if first:
            signal.raise_signal(signal.SIGINT)
        result = method(*args, **options)
        if not first:
            signal.raise_signal(signal.SIGINT)
        return result

    return both


def test_an_interrupt_while_live_opens_leaves_no_hook(sigint: None, monkeypatch: pytest.MonkeyPatch) -> None:
    llm = ToyEngine()
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(llm, "add_step_hook", interrupting(llm.add_step_hook, first=False))
        live(llm).__enter__()
    assert llm.hooks == {}


def test_an_interrupt_while_live_closes_is_delivered_and_leaves_no_hook(sigint: None) -> None:
    llm = ToyEngine()
    with pytest.raises(KeyboardInterrupt), live(llm) as view:
        view._handle.remove = interrupting(view._handle.remove, first=True)
    assert llm.hooks == {}


def test_ignored_interrupts_stay_ignored(sigint: None) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    llm = ToyEngine()
    with live(llm) as view:
        view._handle.remove = interrupting(view._handle.remove, first=True)
    assert llm.hooks == {}


def test_live_that_cannot_be_opened_leaves_no_hook() -> None:
    llm = ToyEngine()
    view = live(llm)
    view.throttle.start = lambda: 1 // 0  # type: ignore[method-assign]
    with pytest.raises(ZeroDivisionError):
        view.__enter__()
    assert llm.hooks == {}


def test_live_ends_well_on_an_engine_that_was_closed_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    def busy() -> None:
        raise EngineBusyError("in the middle of a call in another thread")

    llm = ToyEngine()
    with live(llm):
        llm.generate([[1, 2, 3]], SamplingParams(max_tokens=2))
        monkeypatch.setattr(llm, "snapshot", busy)
    assert llm.hooks == {}


def test_the_output_is_closed_whatever_fails() -> None:
    done: list[str] = []

    class Failing:
        widget = None

        def freeze(self) -> None:
            done.append("freeze")
            raise ZeroDivisionError("no picture")

        def close(self) -> None:
            done.append("close")

    llm = ToyEngine()
    with pytest.raises(ZeroDivisionError), live(llm) as view:
        view._output = Failing()  # type: ignore[assignment]
        view._handle.remove = lambda: 1 // 0
    assert done == ["freeze", "close"]


# -- Player


def test_stepping_on_and_back_and_until_events() -> None:
    llm = ToyEngine(num_kvcache_blocks=48)
    player = Player(llm, prompts_like_chats(8), SamplingParams(max_tokens=30), paused=True)
    assert player.cursor == 0 and not player.playing
    assert player.step(5).cursor == llm.step_count == 5
    assert player.back(3).cursor == 2 and llm.step_count == 5
    assert player.step().cursor == 3 and llm.step_count == 5  # through the record, not with the engine
    assert player.seek(100).cursor == 5 and player.seek(-1).cursor == 1
    for event in ("preempt", "evict", "hit", "finish", "any"):
        player.seek(1)
        player.until(event)
        record = player.recorder.record(player.cursor)
        kinds = {str(e.kind) for e in record.block_events}
        assert {
            "preempt": bool(record.preempted), "evict": "evict" in kinds, "hit": "reuse" in kinds,
            "finish": bool(record.finished), "any": True,
        }[event], event  # fmt: skip
    with pytest.raises(ValueError, match="event must be one of 'preempt'"):
        player.until("lunch")
    player.finish()
    assert player.is_over and player.done.is_set() and llm.is_finished() and llm.hooks == {}
    assert [len(ids) for ids in player.token_ids] == [30] * 8 and player.texts[0].count(" ") == 30
    assert "the end" in repr(player)


def test_at_its_end_a_player_plays_from_the_first_step_again() -> None:
    player = Player(ToyEngine(), [1, 2, 3], SamplingParams(max_tokens=4), paused=True).finish()
    last = player.cursor
    assert player.is_over and last == 4
    player.play()
    assert player.playing and player.cursor == 1
    player._take(None)
    assert player.is_over and player.cursor == last and not player.playing
    only = Player(ToyEngine(), [1, 2, 3], SamplingParams(max_tokens=1)).finish().play()
    assert not only.playing and only.cursor == 1  # nothing to go through


def test_a_recorded_run_has_a_pace_that_can_be_followed() -> None:
    llm, recorder = ToyEngine(), Recorder()
    with llm.observe(recorder):
        llm.generate([[1, 2, 3]], SamplingParams(max_tokens=4))
    assert Player(llm).speed == 0 and Player(llm, speed=2).speed == 2
    assert Player(recorder).speed == 16 and Player(recorder, speed=0).speed == 0


@pytest.mark.parametrize(("speed", "are_all_drawn"), [(1, True), (4, True), (16, False), (0, False)])
def test_at_a_slow_speed_each_step_is_drawn(speed: float, are_all_drawn: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    player = Player(ToyEngine(), [1, 2, 3], SamplingParams(max_tokens=9), speed=speed)
    monkeypatch.setattr(player.throttle, "is_due", lambda: False)
    monkeypatch.setattr("nanovllm.viz.player.SLICE_SECONDS", 0.0001)
    drawn: list[int] = []
    monkeypatch.setattr(player, "_send", lambda since: drawn.append(player.cursor))
    while player.playing:
        player._play_slice()
    assert drawn == ([*range(1, 10), 9] if are_all_drawn else [9])


def test_a_player_generates_what_generate_does() -> None:
    prompts, params = prompts_like_chats(5), [SamplingParams(max_tokens=n) for n in (3, 9, 1, 20, 7)]
    player = Player(ToyEngine(), prompts, params, paused=True).finish()
    expected = [ToyEngine().generate([p], one)[0] for p, one in zip(prompts, params, strict=True)]
    assert player.token_ids == expected


def test_one_prompt_may_come_alone_and_the_engine_may_have_its_own() -> None:
    assert len(Player(ToyEngine(), [1, 2, 3], SamplingParams(max_tokens=2)).finish().token_ids) == 1
    llm = ToyEngine()
    llm.add_request([1, 2, 3], SamplingParams(max_tokens=4))
    assert Player(llm).finish().token_ids == [] and llm.is_finished()


def test_max_steps_ends_a_player_early_and_close_gives_its_requests_up() -> None:
    llm = ToyEngine()
    other = llm.add_request([7] * 5, SamplingParams(max_tokens=50))
    player = Player(llm, prompts_like_chats(3), SamplingParams(max_tokens=50), max_steps=6).finish()
    assert llm.step_count == 6 and player.is_over
    player = Player(llm, prompts_like_chats(3), SamplingParams(max_tokens=50), paused=True).step(2)
    player.close()
    assert llm.hooks == {} and other in {seq.seq_id for seq in llm.scheduler.running}
    assert not set(player.seq_ids) & {seq.seq_id for seq in (*llm.scheduler.running, *llm.scheduler.waiting)}


def test_a_bad_prompt_queues_nothing() -> None:
    llm = ToyEngine()
    llm.add_request = refusing(llm.add_request)  # type: ignore[method-assign]
    with pytest.raises(ValueError, match="empty"):
        Player(llm, [[1, 2], [3], []], paused=True)
    assert llm.is_finished() and llm.hooks == {}
    with pytest.raises(ValueError, match="zip"):
        Player(llm, [[1, 2], [3]], [SamplingParams()], paused=True)
    assert llm.is_finished()


def refusing(add_request):  # type: ignore[no-untyped-def]
    def checked(prompt, params=None):  # type: ignore[no-untyped-def]
        if not prompt:
            raise ValueError("the prompt is empty")
        return add_request(prompt, params)

    return checked


def test_an_engine_that_fails_under_a_player_raises_in_the_cell_that_steps() -> None:
    llm = ToyEngine()
    player = Player(llm, prompts_like_chats(3), SamplingParams(max_tokens=20), paused=True)
    llm.fail_at = 2
    with pytest.raises(RuntimeError, match="the runner failed"):
        player.step(5)
    assert player.cursor == 2


def test_a_loaded_run_plays_from_its_first_step(tmp_path: Path) -> None:
    llm, recorder = ToyEngine(), AnyRecorder(keep=10)
    recorder.attach(llm)
    llm.generate(prompts_like_chats(4), SamplingParams(max_tokens=20))
    player = Player(AnyRecorder.load(recorder.save(tmp_path / "run.jsonl")), paused=True)
    first, last = player.recorder.steps[0], player.recorder.steps[-1]
    assert player.cursor == first and last - first == 9
    assert player.step(100).cursor == last and player.is_over and player.back().cursor == last - 1
    with pytest.raises(ValueError, match="takes no prompts"):
        Player(recorder, [[1]])


@pytest.mark.parametrize("wrong", [5, None, "run.jsonl", object(), Recorder], ids=lambda wrong: type(wrong).__name__)
def test_what_is_no_engine_is_refused_by_name(wrong: object) -> None:
    with pytest.raises(TypeError, match=r"live\(\) shows an engine.*, got "):
        live(wrong)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"plays an engine or a recorder .*Recorder.load\(path\).*, got "):
        Player(wrong)  # type: ignore[arg-type]


def test_what_goes_wrong_while_a_player_plays_is_shown_and_pauses_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """There is no cell that could raise it; an interrupt of the kernel arrives like this, too."""

    def broken(*_args: object) -> None:
        raise KeyboardInterrupt("■")

    player = Player(ToyEngine(), [[1, 2, 3]], SamplingParams(max_tokens=5))
    assert player.playing
    with monkeypatch.context() as patch:
        patch.setattr(player, "_take", broken)
        try:
            player._play_slice()
        except KeyboardInterrupt:
            pytest.fail("it would end the loop of the kernel")
    assert not player.playing and "stopped: KeyboardInterrupt: ■" in repr(player)


@pytest.mark.parametrize("message", [{"do": "seek", "step": "x"}, {"do": "seek"}, {"do": "until", "event": "lunch"}])
def test_a_click_that_cannot_be_obeyed_is_shown(message: dict[str, Any]) -> None:
    player = Player(ToyEngine(), [[1, 2, 3]], SamplingParams(max_tokens=5), paused=True)
    player._obey(message)
    assert player.error is not None and "stopped: " in repr(player)


@pytest.mark.parametrize("do", ["play", "pause", "step", "back", "until", "speed"])
def test_the_click_after_a_failed_one_is_obeyed_and_shows_no_error(do: str) -> None:
    player = Player(ToyEngine(), [[1, 2, 3]], SamplingParams(max_tokens=5), paused=True)
    player.step(2)
    player._obey({"do": "seek"})
    assert player.error is not None and player.is_over
    player._obey({"do": do, "event": "finish", "value": 2})
    assert player.error is None and "stopped" not in repr(player)
    player.finish()
    assert len(player.token_ids[0]) == 5


def test_steps_that_are_asked_for_do_not_end_at_an_event_that_was_waited_for_before() -> None:
    params = [SamplingParams(max_tokens=2), SamplingParams(max_tokens=6)]
    player = Player(ToyEngine(), [[1, 2, 3], [4, 5]], params, paused=True)
    player._until = "finish"  # as ■ leaves it when it stops the wait
    assert player.step(4).cursor == 4


@pytest.mark.parametrize("again", ["play", "pause", "step", "back", "until", "finish"])
def test_a_cell_goes_on_after_a_step_that_failed(again: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails() -> None:
        raise OSError("planted")

    llm = ToyEngine()
    player = Player(llm, [[1, 2, 3]], SamplingParams(max_tokens=5))
    player.step().playing = True
    with monkeypatch.context() as patch:
        patch.setattr(llm, "step", fails)
        player._play_slice()
    assert "stopped: OSError: planted" in repr(player) and not player.playing
    getattr(player, again)()
    assert player.error is None and "stopped" not in repr(player)
    assert len(player.finish().token_ids[0]) == 5


def test_a_player_outlives_its_loop_and_its_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    def dead(seq_id: int) -> bool:
        raise EngineDeadError("this engine was closed")

    llm = ToyEngine()
    player = Player(llm, [[1, 2, 3]], SamplingParams(max_tokens=5), paused=True)
    player._loop = asyncio.new_event_loop()
    player._loop.close()
    player._on_click({"do": "step"})
    monkeypatch.setattr(llm, "abort", dead)
    player.close()
    assert llm.hooks == {}
