"""Player: the engine step by step, under the reader's hand.

The cell returns at once. The player then takes steps in short slices on the kernel's own event loop, so that clicks and
other cells are served in between; this works with every ipykernel. It goes back through the steps that its recorder
keeps, and it plays a recorded run in the same way, without an engine.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from time import perf_counter
from typing import Any, Protocol, Self

from nanovllm.engine.events import BlockEventKind, StepRecord
from nanovllm.errors import NanoVLLMError
from nanovllm.viz.live import (
    DEFAULT_PANELS,
    Interrupts,
    Output,
    Panels,
    Throttle,
    decoder_of,
    is_live,
    make_dashboard,
    require_engine,
    shell_with_kernel,
)
from nanovllm.viz.recorder import Decode, Engine, Recorder
from nanovllm.viz.words import plural

SLICE_SECONDS = 0.04
REPLAY_SPEED = 16.0  # steps a second: a record has no pace of its own, and at full speed it is over before it is seen


class SteppableEngine(Engine, Protocol):
    """What a player asks of an engine."""

    def add_request(self, prompt: Any, sampling_params: Any = None) -> int: ...

    def step(self) -> Any: ...

    def is_finished(self) -> bool: ...

    def abort(self, seq_id: int) -> bool: ...


def has_block_event(kind: BlockEventKind, record: StepRecord) -> bool:
    return any(event.kind is kind for event in record.block_events)


EVENTS: dict[str, Callable[[StepRecord], bool]] = {
    "preempt": lambda record: bool(record.preempted),
    "evict": partial(has_block_event, BlockEventKind.EVICT),
    "hit": partial(has_block_event, BlockEventKind.REUSE),
    "finish": lambda record: bool(record.finished),
}
EVENTS["any"] = lambda record: any(EVENTS[name](record) for name in ("preempt", "evict", "hit", "finish"))


class Player:
    """Play, pause, step, step back, until the next event; at a speed of your choice.

    source: an engine, or a `Recorder` (one loaded from a file replays without engine, model and torch).
    prompts, params: requests to queue, as for `generate`; without them whatever the engine holds is played.
    panels, fps, share, decode: as for `live`.
    speed: steps a second, 0 for as fast as it goes (by default so with an engine, and 16 through a recorded run).
    paused: wait for the reader to press play.
    max_steps: stop after so many steps of the engine.
    keep: steps that can be gone back.

    The controls stay, also at the end: from there on the player needs no engine any more, and goes through what it has
    recorded, as often as one likes. `finish()`, `close()` and "Keep as picture" put a still picture in their place,
    which is what a saved notebook can show; `show()` brings them back. While another cell runs a player stands still,
    and one that was clicked on stays paused then if it still needs the engine.
    """

    def __init__(
        self, source: SteppableEngine | Recorder, prompts: Any = None, params: Any = None, *,
        panels: Panels = DEFAULT_PANELS, speed: float | None = None, paused: bool = False, max_steps: int | None = None,
        keep: int = 1024, fps: float = 4.0, share: float = 0.02, decode: Decode | None = None,
    ) -> None:  # fmt: skip
        if not isinstance(source, Recorder):
            require_engine(source, "a player plays an engine or a recorder (of a file: Player(Recorder.load(path)))")
        self.llm = None if isinstance(source, Recorder) else source
        if self.llm is None and prompts is not None:
            raise ValueError("a recorded run takes no prompts")
        self.recorder = source if isinstance(source, Recorder) else Recorder(keep=keep)
        self.dashboard = make_dashboard(panels, self.recorder, decode or decoder_of(source))
        self.throttle = Throttle(fps, share)
        self.speed = (REPLAY_SPEED if self.llm is None else 0.0) if speed is None else float(speed)
        self.playing, self.max_steps = not paused, max_steps
        self.error: BaseException | None = None
        self.seq_ids: list[int] = []
        self.token_ids: list[list[int]] = []  # generated so far, in the order of the prompts
        self._pending: set[int] = set()
        self._wishes: deque[dict[str, Any]] = deque()
        self._until: str | None = None
        self._drawn_step = 0
        self._steps_taken = 0
        self._touched = self._is_closed = self._cell_runs = False
        self._handle: Any = None
        self._shell = shell_with_kernel()
        self._cell = cell_of(self._shell)
        self.cursor = self._begin(prompts, params)
        self._loop, self.done = running_loop(), asyncio.Event()
        self._wake = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._output: Output | None = None
        self._present()

    def _begin(self, prompts: Any, params: Any) -> int:
        """Queue the requests and listen; a recorded run begins at its first step. Returns the step to show."""
        if self.llm is None:
            return self.recorder.steps[0] if self.recorder.steps else 0
        prompts = as_list(prompts)
        each = list(params) if isinstance(params, (list, tuple)) else [params] * len(prompts)
        try:
            for prompt, one in zip(prompts, each, strict=True):
                self.seq_ids.append(self.llm.add_request(prompt, one))
        except BaseException:
            for seq_id in self.seq_ids:
                self.llm.abort(seq_id)
            raise
        self._pending, self.token_ids = set(self.seq_ids), [[] for _ in self.seq_ids]
        self.recorder.sync(self.llm.snapshot())
        self._handle = self.llm.add_step_hook(self._on_step, key=("nanovllm.viz.player", id(self)))
        return self.recorder.last_step

    def _present(self) -> None:
        """Show the player below its cell and let it go. Without live views: play to the end, and show a still."""
        if self._shell is None:
            return
        if not is_live():
            self.finish()
            return
        self._output = Output(self.dashboard, self._on_click)
        self._draw()
        self._register()
        self.throttle.start()
        self._start()

    # -- what the reader, or a cell, can ask for

    def _halt(self) -> None:
        """What each of these begins with: stand still, and forget what the one before was after and what went wrong."""
        self.playing, self._until, self.error = False, None, None

    def play(self) -> Self:
        """Play on, from the step that is shown; at the end once more, from the first step that is kept."""
        self._halt()
        if self.is_over and self.recorder.steps:
            self.cursor = self.recorder.steps[0]
        self.playing = not self.is_over
        self._poke()
        return self

    def pause(self) -> Self:
        self._halt()
        self._draw()
        return self

    def step(self, count: int = 1) -> Self:
        """Take so many steps now: through the record while there is one, then with the engine."""
        self._halt()
        self._take(count)
        self._draw()
        return self

    def back(self, count: int = 1) -> Self:
        """Go back through the steps that are kept."""
        return self.seek(self.cursor - count)

    def seek(self, step: int) -> Self:
        """Show the nearest step that is kept."""
        self._halt()
        steps = self.recorder.steps
        if steps:
            self.cursor = min(max(step, steps[0]), steps[-1])
        self._draw()
        return self

    def until(self, event: str = "any") -> Self:
        """Play until the next "preempt", "evict", "hit", "finish" or "any" of them, and pause there."""
        if event not in EVENTS:
            raise ValueError(f"event must be one of {', '.join(map(repr, EVENTS))}; got {event!r}")
        self._halt()
        self.playing, self._until = not self.is_over, event
        if self._task is None:  # nobody to play in the background: play here
            self._take(None)
            self._draw()
        self._poke()
        return self

    def finish(self) -> Self:
        """Take all steps that are left, in this cell; interrupting it stops at a step's end. Then leave a still.

        For a cell that needs the engine to itself, or the results.
        """
        self._halt()
        interrupts = Interrupts()
        with interrupts:
            while not interrupts.count and self._advance():
                self._draw_if_due()
        if not interrupts.count and not self._is_closed:  # a closed player has left its picture already
            self._end()
        else:
            self._draw()
        interrupts.deliver()
        return self

    def close(self) -> None:
        """Stop for good: give up requests that are not finished, take the hook off, leave a still."""
        self._shut(with_picture=True)

    def show(self) -> None:
        """Bring the controls back, below the cell that calls this."""
        if self._output is not None:
            self._output.close()
        if self._shell is not None and is_live():
            self._is_closed, self._touched, self._cell = False, True, cell_of(self._shell)
            self._output = Output(self.dashboard, self._on_click)
            self._register()
            self._draw()
            self._start()

    @property
    def is_over(self) -> bool:
        """Whether the last step is shown and no more will come."""
        return self.cursor >= self.recorder.last_step and not self._engine_has_work()

    @property
    def texts(self) -> list[str]:
        """What was generated so far, as text, in the order of the prompts."""
        decode = self.recorder.decode or str
        return ["".join(map(decode, token_ids)) for token_ids in self.token_ids]

    # -- steps

    def _engine_has_work(self) -> bool:
        if self.llm is None or self._handle is None or self.error is not None:
            return False
        if self.max_steps is not None and self._steps_taken >= self.max_steps:
            return False
        return bool(self._pending or not self.seq_ids) and not self.llm.is_finished()

    def _on_step(self, record: StepRecord) -> None:
        follows = self.cursor >= self.recorder.last_step
        self.recorder(record)
        for row in record.rows:
            if row.seq_id in self._pending and row.sampled_token_id is not None:
                self.token_ids[self.seq_ids.index(row.seq_id)].append(row.sampled_token_id)
        self._pending.difference_update(finish.seq_id for finish in record.finished)
        if follows:
            self.cursor = record.step

    def _advance(self) -> bool:
        """One step on: through the record, then with the engine. False at the end."""
        if self.cursor < self.recorder.last_step:
            self.cursor += 1
            if self.cursor not in self.recorder.steps:  # forgotten meanwhile
                self.cursor = self.recorder.steps[0] if self.recorder.steps else self.recorder.last_step
            return True
        if not self._engine_has_work():
            return False
        assert self.llm is not None
        self.llm.step()
        self._steps_taken += 1
        return True

    def _take(self, count: int | None, seconds: float | None = None) -> bool:
        """Up to `count` steps or `seconds`, or until the event that is waited for. False at the end."""
        start, taken = perf_counter(), 0
        with Interrupts() as interrupts:  # ■ pauses, at a step's end
            while (count is None or taken < count) and (seconds is None or perf_counter() - start < seconds):
                if not self._advance():
                    self.playing = False
                    return False
                taken += 1
                if self._until is not None and self.cursor in self.recorder.steps:
                    if EVENTS[self._until](self.recorder.record(self.cursor)):
                        self.playing, self._until = False, None
                        break
                if interrupts.count:
                    self.playing = False
                    break
        return True

    # -- the loop

    def _start(self) -> None:
        if self._loop is not None and self._task is None:
            self._task = self._loop.create_task(self._go())

    async def _go(self) -> None:
        while not self._is_closed:
            while self._wishes and not self._is_closed:
                self._obey(self._wishes.popleft())
            if self.playing and not self._cell_runs:
                begin = perf_counter()
                self._play_slice()
                wait = 1 / self.speed - (perf_counter() - begin) if self.speed else 0.002
                await asyncio.sleep(max(wait, 0.002))
                continue
            if self.is_over and not self._cell_runs:
                self.done.set()
                if self.error is None:
                    self._let_the_engine_go()
            self._wake.clear()
            if not self._wishes:
                await self._wake.wait()
        self._task = None

    def _play_slice(self) -> None:
        was = self.cursor
        try:
            self._take(1 if self.speed else None, None if self.speed else SLICE_SECONDS)
        except BaseException as error:  # shown in the status line; the engine has given up the step's requests
            self.playing, self.error = False, error
        if not self.playing:
            self._draw()  # else the picture would lag behind what a cell sees
        elif self.cursor != was:
            if 0 < self.speed * self.throttle.interval <= 1:  # slow enough for the eye: no step is left out
                self._draw()
            else:
                self._draw_if_due()

    def _on_click(self, message: dict[str, Any]) -> None:
        """May run in another thread: only note the wish, and wake the loop."""
        self._wishes.append(message)
        self._poke()

    def _poke(self) -> None:
        if self._loop is not None:
            with suppress(RuntimeError):  # the loop is closed: the kernel is going down
                self._loop.call_soon_threadsafe(self._wake.set)

    def _obey(self, message: dict[str, Any]) -> None:
        self._touched, self.error = True, None
        wish = message.get("do")
        actions = {"play": self.play, "pause": self.pause, "step": self.step, "back": self.back}
        try:
            if wish in actions:
                actions[wish]()
            elif wish == "until":
                self.until(str(message.get("event")))
            elif wish == "seek":
                self.seek(int(message["step"]))
            elif wish == "speed":
                self.speed = max(float(message["value"]), 0.0)
                self._draw()
            elif wish == "close":
                self.close()
        except Exception as error:  # a click has no cell in which a traceback could be read
            self.playing, self.error = False, error
            self._draw()

    # -- pictures

    def _draw(self) -> None:
        """Draw now; what stands out is what the shown step did."""
        self._send(self.cursor - 1)

    def _draw_if_due(self) -> None:
        if self.throttle.is_due():
            begin = perf_counter()
            self._send(min(self._drawn_step, self.cursor - 1))
            self.throttle.drew(perf_counter() - begin)

    def _send(self, since: int) -> None:
        if self._output is not None:
            self._output.draw(self._shown_step(), since, player=self._state())
            self._drawn_step = self.cursor

    def _shown_step(self) -> int | None:
        return self.cursor if self.cursor in self.recorder.steps else None

    def _state(self) -> dict[str, Any]:
        steps = self.recorder.steps
        first, last = (steps[0], steps[-1]) if steps else (self.cursor, self.cursor)
        return {
            "playing": self.playing, "over": self.error is None and not self._engine_has_work(), "step": self.cursor,
            "first": first, "last": last, "speed": int(self.speed), "status": self._status(),
        }  # fmt: skip

    def _status(self) -> str:
        if self.error is not None:
            return f"stopped: {type(self.error).__name__}: {self.error}"
        if self.is_over:
            return f"the end, after {plural(len(self.recorder.steps), 'step')}"
        last = self.recorder.last_step
        return f"step {self.cursor}" + (f" of {last}" if self.cursor < last else "")

    # -- cells and the end

    def _register(self) -> None:
        self._unregister()
        for name, callback in (("pre_run_cell", self._before_cell), ("post_run_cell", self._after_cell)):
            self._shell.events.register(name, callback)

    def _before_cell(self, info: Any) -> None:
        """Another cell runs: stand still. If it is this player's own cell, make room for its successor."""
        self._cell_runs = True
        cell_id, code = self._cell
        if (info.cell_id == cell_id) if (cell_id and getattr(info, "cell_id", None)) else info.raw_cell == code:
            self._shut(with_picture=False)
        elif self._touched and self._handle is not None:
            self.playing = False

    def _after_cell(self, result: Any) -> None:
        self._cell_runs = False
        if not self._is_closed and self._output is not None:
            self._draw()
            self._poke()

    def _let_the_engine_go(self) -> None:
        """Listen no longer: what the engine does from now on is no part of this run. Its record can be played."""
        handle, self._handle = self._handle, None
        if handle is not None:
            handle.remove()
            self.speed = self.speed or REPLAY_SPEED
            self._draw()

    def _end(self) -> None:
        """All is done: the still takes the place of the widget. The record stays, and `show()` works."""
        self.playing = False
        self.done.set()
        self._let_the_engine_go()
        self._unregister()
        output, self._output = self._output, None
        if output is not None:
            output.freeze(self._shown_step(), self._how_to_show())
        elif self._shell is not None and not is_live():
            Output(self.dashboard).freeze()
        self._is_closed = True

    def _shut(self, *, with_picture: bool) -> None:
        if self._is_closed:
            return
        if self.llm is not None:
            for seq_id in self._pending:
                with suppress(NanoVLLMError):
                    self.llm.abort(seq_id)
        self._pending.clear()
        if not with_picture and self._output is not None:
            self._output.close()
            self._output = None
        self._end()
        self._poke()

    def _how_to_show(self) -> str:
        """The line below the still, with the name that the notebook has for this player, if it has one."""
        names = [name for name, value in self._shell.user_ns.items() if value is self and not name.startswith("_")]
        call = f"{names[0]}.show()" if names else "the player's show()"
        return f"In a running notebook {call} brings the controls back."

    def _unregister(self) -> None:
        if self._shell is not None:
            for name, callback in (("pre_run_cell", self._before_cell), ("post_run_cell", self._after_cell)):
                with suppress(ValueError):
                    self._shell.events.unregister(name, callback)

    def __repr__(self) -> str:
        return f"Player({self._status()}, {'playing' if self.playing else 'paused'})"


def as_list(prompts: Any) -> list[Any]:
    """One prompt (a text, or token ids) or several."""
    if prompts is None:
        return []
    is_one = isinstance(prompts, str) or (isinstance(prompts, Sequence) and prompts and isinstance(prompts[0], int))
    return [prompts] if is_one else list(prompts)


def running_loop() -> asyncio.AbstractEventLoop | None:
    """The loop of the cell that is running. Taken at construction: a click may be handled on another one."""
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None


def cell_of(shell: Any) -> tuple[str | None, str]:
    """The id (where the front end sends one) and the code of the cell that is running."""
    if shell is None:
        return None, ""
    parent = shell.kernel.get_parent()
    return parent.get("metadata", {}).get("cellId"), parent.get("content", {}).get("code", "")
