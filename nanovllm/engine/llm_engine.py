"""LLMEngine: the one place where bookkeeping (scheduler, blocks), the worker (model, device) and the tokenizer meet.

Read `_step` first: schedule, run, postprocess, and a clock around them. `step`, `generate` and `stream` call it; the
rest turns prompts into sequences, tells those who watch, and keeps the engine whole when something fails. The engine
knows no tensor and no widget.
"""

import sys
import threading
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping
from collections.abc import Sequence as SequenceOf
from contextlib import contextmanager
from copy import copy
from dataclasses import fields
from pathlib import Path
from time import perf_counter
from typing import Any, Self, cast

from tqdm import tqdm

from nanovllm._html import ReprHTML, shown
from nanovllm.chat_template import ChatTemplate, TemplateFailure
from nanovllm.config import Config, nearest_option
from nanovllm.engine.events import EngineSnapshot, FinishReason, Journal, StepRecord, StepRow, StepTimings
from nanovllm.engine.interrupts import DeferredInterrupt
from nanovllm.engine.parts import Parts, active_parts
from nanovllm.engine.scheduler import Scheduler
from nanovllm.engine.sequence import Sequence
from nanovllm.errors import ConfigError, EngineBusyError, EngineDeadError, RequestError
from nanovllm.model_folder import end_tokens
from nanovllm.prompts import is_conversation, prompt_list, token_id_list, whole_number
from nanovllm.sampling_params import SamplingParams
from nanovllm.text_pieces import TextPieces
from nanovllm.tokenizer import load_tokenizer
from nanovllm.worker.link import RankLink
from nanovllm.worker.model_runner import ModelRunner
from nanovllm.worker.tensor_parallel import start_ranks

Prompt = str | SequenceOf[int]
StepHook = Callable[[StepRecord], Any]


class Generation(dict[str, Any], ReprHTML):
    """What `generate` returns for one prompt: a dict with exactly "text" and "token_ids".

    As attributes, so that the dict stays the course's: `finish_reason` ("stop", "length" or "abort"),
    `num_prompt_tokens` and `num_cached_tokens` (prompt tokens taken from the prefix cache).
    """

    def __init__(self, text: str, token_ids: list[int], seq: Sequence) -> None:
        super().__init__(text=text, token_ids=token_ids)
        self.finish_reason = str(seq.finish_reason)
        self.num_prompt_tokens = seq.num_prompt_tokens
        self.num_cached_tokens = seq.num_cached_tokens

    def _repr_rows(self) -> list[tuple[str, Any]]:
        names = ("finish_reason", "num_prompt_tokens", "num_cached_tokens")
        return [*self.items(), *((name, getattr(self, name)) for name in names)]


class HookHandle:
    """Takes its step hook off again: by `remove()`, or at the end of a `with` block."""

    def __init__(self, engine: "LLMEngine", key: Any, fn: StepHook) -> None:
        self._engine, self._key, self._fn = weakref.ref(engine), key, fn

    def remove(self) -> None:
        """Detach the hook; does nothing if it is gone already, or replaced by another one under the same key."""
        if (engine := self._engine()) is not None:
            engine.remove_step_hook(self._key, self._fn)

    def __repr__(self) -> str:
        is_on = (engine := self._engine()) is not None and engine._hooks.get(self._key) is self._fn
        state = "is told of every step, until .remove()" if is_on else "is not attached any more"
        return f"HookHandle({hook_name(self._fn)} {state})"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.remove()


class Progress(tqdm):  # type: ignore[misc]
    """A progress bar that leaves no thread behind: without tqdm's monitor, which only helps bars that stand still."""

    monitor_interval = 0


class LLMEngine:
    """An inference engine for one model.

    model: folder of a model. Options are those of `Config`; an unknown one warns and names the nearest known one.
    parts: replacements for the engine's own classes and methods (`engine.parts`).

    An engine holds memory and perhaps processes: `exit()` it, use it as a context manager, or let it go out of scope.
    It belongs to one thread at a time and must not be entered from a step hook (`EngineBusyError`).
    """

    def __new__(cls, model: str, parts: Parts | None = None, **options: Any) -> Self:
        # Methods of the engine are seams as well ("LLMEngine.drive" is one), so its own class is resolved too.
        if parts is not None and not isinstance(parts, Parts):
            raise ConfigError(f"parts must be a Parts, got {shown(parts)}; options of the engine go by name")
        return super().__new__((active_parts() if parts is None else parts).resolve(cls))

    def __init__(self, model: str, parts: Parts | None = None, **options: Any) -> None:
        self.parts = active_parts() if parts is None else parts
        self._door = threading.Lock()  # held during a call, see `_entered`
        self._inside: int | None = None  # the thread that holds it
        self._born = perf_counter()
        self._journal = Journal()
        self._hooks: dict[Any, StepHook] = {}
        self._in_step: list[Sequence] | None = None  # the sequences of the step under way; [] while they are chosen
        self._unclaimed: dict[int, Sequence] = {}  # finished in somebody else's call, kept for `get_output`
        # Streams: a weak reference to each reader's `TextPieces` by seq_id, and those of readers that are gone, whose
        # requests the next call aborts. The reference's callback is `_abandoned.append` itself: an interrupt could end
        # a function of ours half-way, but not that.
        self._readers: dict[int, weakref.KeyedRef[int, TextPieces]] = {}
        self._abandoned: list[weakref.KeyedRef[int, TextPieces]] = []
        self._chat_template: ChatTemplate | None = None
        self.step_count = 0
        resolve = self.parts.resolve
        # 1) the configuration, and the block size that ad-hoc sequences get
        self.config: Config = resolve(Config)(model, **known_options(options))
        Sequence.block_size = self.config.kvcache_block_size
        # 2) ranks above 0 in processes of their own, rank 0 here
        self.ranks = start_ranks(self.config, self.parts)
        self.ps, self.events = self.ranks.ps, self.ranks.events
        try:
            self.model_runner: ModelRunner = resolve(ModelRunner)(self.config, 0, self.ranks, self.parts)
            self.ranks.wait_ready()
            # 3) the tokenizer, in this process only, and with it the end tokens
            folder, vocab_size = Path(self.config.model), self.model_runner.vocab_size
            self.tokenizer = load_tokenizer(folder, vocab_size)
            self.config.eos = -1 if self.tokenizer.eos_token_id is None else self.tokenizer.eos_token_id
            self.config.stop_token_ids = self.config.stop_token_ids or end_tokens(folder, vocab_size)
            # 4) the scheduler, and a way out: at `exit`, at garbage collection and at the interpreter's end
            self.scheduler: Scheduler = resolve(Scheduler)(self.config, resolve)
            self._finalizer = weakref.finalize(self, end_ranks, self.ranks)
            for told in self.parts.misspelt():
                warnings.warn(told, stacklevel=2)
        except BaseException:
            with DeferredInterrupt():  # a second Ctrl-C would leave ranks behind
                self.ranks.stop()
            raise

    # ---- one step ------------------------------------------------------------------------------------------------

    def step(self) -> tuple[list[tuple[int, list[int]]], int]:
        """Schedule, run, book. Returns the finished `(seq_id, completion_token_ids)` pairs and a sign-coded count.

        The count is the number of computed tokens of a step that computed prompt tokens (cached ones are not in it),
        minus the number of rows of a decode step, and 0 when there was nothing to do.
        """
        with self._entered("step()") as interrupt:
            try:
                seqs, num_tokens = self._step(interrupt)
            except BaseException:
                self._give_up(None)
                raise
            finished = [seq for seq in seqs if seq.is_finished]
            if interrupt.pending:  # the step is whole, but nobody will receive what it returns
                self._keep(finished)
        return [(seq.seq_id, seq.completion_token_ids) for seq in finished], num_tokens

    def _step(self, interrupt: DeferredInterrupt) -> tuple[list[Sequence], int]:
        """The step itself: the sequences that ran, finished ones included, and the count that `step` returns."""
        self._abort_abandoned()
        if self.scheduler.is_finished():
            return [], 0
        self._in_step = []
        started = perf_counter()
        seqs, is_prefill = self.scheduler.schedule()
        self._in_step = seqs
        scheduled = perf_counter()
        rows = self._rows(seqs) if self._hooks else []
        launched = perf_counter()
        with interrupt.breaking():
            token_ids = self.model_runner.call("run", seqs, is_prefill)
        ran = perf_counter()
        self.scheduler.postprocess(seqs, token_ids, is_prefill)
        self._in_step = None
        self.step_count += 1
        num_tokens = sum(seq.num_scheduled_tokens for seq in seqs) if is_prefill else -len(seqs)
        if self._hooks:
            timings = StepTimings(scheduled - started, ran - launched, perf_counter() - ran)
            with interrupt.breaking():
                self._publish(self._record(rows, token_ids, timings))
        return seqs, num_tokens

    def _keep(self, seqs: list[Sequence]) -> None:
        """Keep what finished in somebody else's call for `get_output`."""
        self._unclaimed.update((seq.seq_id, seq) for seq in seqs if seq.seq_id not in self._readers)

    def _abort_abandoned(self) -> None:
        while self._abandoned:
            seq_id = self._abandoned.pop().key
            self._readers.pop(seq_id, None)
            self.scheduler.abort(seq_id)

    def _abort_abandoned_if_idle(self) -> None:
        """End the requests of forgotten streams; in the middle of a call, of any thread, the next step does it."""
        if not self._abandoned:
            return
        with DeferredInterrupt():
            if self._door.acquire(blocking=False):
                try:
                    self._abort_abandoned()
                finally:
                    self._door.release()

    def is_finished(self) -> bool:
        """Whether no request is waiting or running."""
        self._abort_abandoned_if_idle()
        return self.scheduler.is_finished()

    # ---- requests ------------------------------------------------------------------------------------------------

    def add_request(self, prompt: Prompt, sampling_params: SamplingParams | None = None) -> int:
        """Queue one prompt (text or token ids); returns its seq_id. Raises `RequestError` if it can never be served."""
        with self._entered("add_request()") as interrupt:
            seq = self._sequence(prompt, sampling_params)
            interrupt.check()  # before it is queued: whoever interrupts never learns its number
            return self.scheduler.add(seq)

    def abort(self, seq_id: int) -> bool:
        """Give up a request wherever it is and free its blocks; False if no unfinished request has that number."""
        with self._entered("abort()"):
            return self.scheduler.abort(whole_number(seq_id))

    def get_output(self, seq_id: int) -> Generation | None:
        """The result of a request queued by hand that finished in a `generate`, a `stream` or an interrupted `step`;
        handed out once."""
        seq = self._unclaimed.pop(whole_number(seq_id), None)
        return None if seq is None else self._generation(seq, seq.completion_token_ids)

    def generate(
        self,
        prompts: Prompt | SequenceOf[Prompt],
        sampling_params: SamplingParams | SequenceOf[SamplingParams] | None = None,
        use_tqdm: bool = True,
    ) -> list[Generation]:
        """Generate for every prompt, and return the results in the order of the prompts.

        prompts: text or token ids, one or many. sampling_params: one for all, or one each; `SamplingParams()` if left
        out. use_tqdm: show a progress bar with both rates in tok/s. Raises `RequestError` before anything is queued.
        If it fails or is interrupted, its requests are gone and the engine is ready for the next call.
        """
        with self._entered("generate()") as interrupt:
            with interrupt.breaking():  # nothing is queued yet
                if not isinstance(use_tqdm, int):
                    raise RequestError(f"use_tqdm must be True or False, got {shown(use_tqdm)}")
                every = prompt_list(prompts)
                params = self.broadcast(sampling_params, len(every))
                seqs = [self._sequence(prompt, each) for prompt, each in zip(every, params, strict=True)]
            shows = use_tqdm and sys.stderr is not None
            with Progress(total=len(seqs), desc="Generating", disable=not shows, dynamic_ncols=True) as bar:
                outputs = self._run_until_idle(seqs, bar, interrupt)
            return [self._generation(seq, token_ids) for seq, token_ids in zip(seqs, outputs, strict=True)]

    def _run_until_idle(self, seqs: list[Sequence], bar: Progress, interrupt: DeferredInterrupt) -> list[list[int]]:
        """Queue the sequences and step until nothing is left, requests that were queued by hand included."""
        own: dict[int, Sequence] = {}
        rates = {"Prefill": "0 tok/s", "Decode": "0 tok/s"}

        def step() -> tuple[list[tuple[int, list[int]]], int]:
            ran, num_tokens = self._step(interrupt)
            finished = [seq for seq in ran if seq.is_finished]
            self._keep([seq for seq in finished if seq.seq_id not in own])
            bar.update(sum(seq.seq_id in own for seq in finished))
            interrupt.check()
            return [(seq.seq_id, seq.completion_token_ids) for seq in finished], num_tokens

        def report(phase: str, num_tokens: int, seconds: float) -> None:
            # A mixed step counts as a prefill; the tokens of its decoding rows are told apart.
            num_decoding = self.scheduler.num_decode_tokens if phase == "Prefill" else 0
            rates[phase] = f"{(num_tokens - num_decoding) / seconds:,.0f} tok/s"
            if num_decoding:
                rates["Decode"] = f"{num_decoding / seconds:,.0f} tok/s"
            bar.set_postfix(rates, refresh=False)

        try:
            for seq in seqs:
                own[self.scheduler.add(seq)] = seq
            outputs = self.drive(list(own), step, self.scheduler.is_finished, report, perf_counter)
            assert all(seq.is_finished for seq in seqs), "the main loop ended before its requests did"
            return outputs
        except BaseException:
            self._give_up(set(own))
            raise

    @staticmethod
    def drive(
        seq_ids: list[int],
        step: Callable[[], tuple[list[tuple[int, list[int]]], int]],
        is_finished: Callable[[], bool],
        report: Callable[[str, int, float], None],
        clock: Callable[[], float],
    ) -> list[list[int]]:
        """The main loop. Returns the completions of the requests `seq_ids`, in that order.

        step, is_finished: as the engine's. report(phase, num_tokens, seconds) is called after every step that did
        something, with "Prefill" or "Decode" as its sign-coded count tells. clock: seconds.
        """
        outputs: dict[int, list[int]] = {}
        while not is_finished():
            started = clock()
            finished, num_tokens = step()
            outputs.update(finished)
            if num_tokens != 0:
                report("Prefill" if num_tokens > 0 else "Decode", abs(num_tokens), clock() - started)
        return [outputs[seq_id] for seq_id in seq_ids]

    def chat(
        self,
        messages: SequenceOf[Any],
        sampling_params: SamplingParams | SequenceOf[SamplingParams] | None = None,
        use_tqdm: bool = False,
    ) -> Any:
        """Answer a conversation, `[{"role": "user", "content": "…"}, …]`, through the model's chat template.

        Returns one result for one conversation, a list for a list of conversations.
        """
        if is_conversation(messages):
            return self.generate([self.chat_prompt(messages)], sampling_params, use_tqdm)[0]
        if not isinstance(messages, (list, tuple)):
            raise RequestError(f"chat() takes a conversation or a list of conversations, got {shown(messages)}")
        return self.generate([self.chat_prompt(each) for each in messages], sampling_params, use_tqdm)

    def chat_prompt(self, messages: SequenceOf[Mapping[str, str]]) -> list[int]:
        """The token ids of a conversation in the model's chat template, ready for the assistant's turn."""
        template = getattr(self.tokenizer, "chat_template", None)
        if not isinstance(template, str):
            raise RequestError(
                f"the tokenizer in {self.config.model} has no chat template; use generate() with plain text"
            )
        if not is_conversation(messages):
            example = '[{"role": "user", "content": "…"}]'
            raise RequestError(f"a conversation is a list like {example}; got {shown(messages)}")
        with self._entered("chat_prompt()") as interrupt, interrupt.breaking():
            if self._chat_template is None or self._chat_template.text != template:
                self._chat_template = ChatTemplate(template, self.tokenizer.special_tokens_map)
            try:
                text = self._chat_template.render([dict(message) for message in messages])
            except TemplateFailure as error:
                raise RequestError(f"the model's chat template cannot render {shown(messages)}: {error}") from error
            return self.encode(text, add_special_tokens=False)

    def stream(self, prompt: Prompt | SequenceOf[Any], sampling_params: SamplingParams | None = None) -> Iterator[str]:
        """Generate for one prompt (or conversation) and yield its text piece by piece; the pieces join to the text.

        Characters whose bytes are spread over several tokens are held back until they are whole. Closing the iterator
        early aborts the request.
        """
        if is_conversation(prompt):
            prompt = self.chat_prompt(cast("SequenceOf[Mapping[str, str]]", prompt))
        with self._entered("stream()"):
            seq = self._sequence(prompt, sampling_params)
        return self._stream(seq)

    def _stream(self, seq: Sequence) -> Iterator[str]:
        pieces = self.parts.resolve(TextPieces)(self.tokenizer)
        try:
            while not seq.is_finished:
                with self._entered("stream()") as interrupt:
                    if seq.seq_id < 0:  # queued by the first `next`, so an iterator that nobody reads costs nothing
                        seq_id = self.scheduler.add(seq)
                        self._readers[seq_id] = weakref.KeyedRef(pieces, self._abandoned.append, seq_id)
                    try:
                        self._keep([other for other in self._step(interrupt)[0] if other.is_finished])
                        assert seq.is_finished or not self.scheduler.is_finished(), "the request is in no queue"
                    except BaseException:
                        self._give_up({seq.seq_id})
                        raise
                piece = pieces.push(seq.completion_token_ids, seq.is_finished)
                if piece:
                    yield piece
            piece = pieces.push(seq.completion_token_ids, True)
            if piece:
                yield piece
        finally:
            self._abandon(seq.seq_id)  # where this very line is interrupted, the next call sees to it

    def _abandon(self, seq_id: int) -> None:
        """Give up the request of an iterator that was closed or forgotten: by the garbage collector, at any moment and
        in any thread."""
        reader = self._readers.get(seq_id)
        if reader is not None:
            self._abandoned.append(reader)
        self._abort_abandoned_if_idle()

    # ---- watching ------------------------------------------------------------------------------------------------

    def add_step_hook(self, fn: StepHook, key: Any = None) -> HookHandle:
        """Call `fn(record)` as the last act of every step. The same key replaces, so a re-run cell does not add.

        A hook that raises is reported once, by name, and removed.
        """
        if not callable(fn):
            raise ConfigError(f"a step hook must be callable, got {shown(fn)}")
        key = hook_key(fn if key is None else key)
        self._hooks[key] = fn
        self.scheduler.watch(self._journal)
        return HookHandle(self, key, fn)

    def remove_step_hook(self, key: Any, fn: StepHook | None = None) -> None:
        """Detach the hook of that key (only if it is `fn`, if given). Without hooks nothing is recorded."""
        key = hook_key(key)
        if fn is None or self._hooks.get(key) is fn:
            self._hooks.pop(key, None)
        if not self._hooks:
            self.scheduler.watch(None)
            self._journal.drain()

    def observe(self, fn: StepHook) -> HookHandle:
        """Attach `fn` as a step hook, for good or for a `with` block.

        If it has a method `on_attach`, that is called first with a snapshot, to which it can add each step's events.
        """
        on_attach = getattr(fn, "on_attach", None)
        if on_attach is not None:
            on_attach(self.snapshot())
        return self.add_step_hook(fn)

    def snapshot(self) -> EngineSnapshot:
        """The whole state between two steps; its cost grows with the pool. A step hook may ask for it."""
        if self._inside not in (None, threading.get_ident()):
            raise EngineBusyError("snapshot(): the engine is in the middle of a call in another thread")
        self._abort_abandoned_if_idle()
        scheduler = self.scheduler
        return EngineSnapshot(
            step=self.step_count,
            block_size=self.config.kvcache_block_size,
            max_num_seqs=scheduler.max_num_seqs,
            token_budget=scheduler.token_budget,
            scheduling_policy=scheduler.policy,
            blocks=scheduler.block_manager.state(),
            free_block_ids=tuple(scheduler.block_manager.free_block_ids),
            waiting=tuple(seq.state() for seq in scheduler.waiting),
            running=tuple(seq.state() for seq in scheduler.running),
        )

    def _rows(self, seqs: list[Sequence]) -> list[StepRow]:
        """The rows of the record, taken before the step runs; `_record` adds the sampled tokens.

        A block table is a tuple, which the sequence replaces and never changes, so the record may keep it.
        """
        return [
            StepRow(
                seq.seq_id,
                tuple(seq.token_ids[seq.num_computed_tokens : seq.num_computed_tokens + seq.num_scheduled_tokens]),
                seq.num_computed_tokens,
                seq.num_tokens,
                seq.block_table,
                seq.is_prefilling,
                None,
            )  # fmt: skip
            for seq in seqs
        ]

    def _record(self, rows: list[StepRow], token_ids: list[int | None], timings: StepTimings) -> StepRecord:
        scheduler = self.scheduler
        prefill, decode = scheduler.num_prefill_tokens, scheduler.num_decode_tokens
        return StepRecord(
            step=self.step_count,
            time=perf_counter() - self._born,
            phase="mixed" if prefill and decode else "prefill" if prefill else "decode",
            rows=tuple(row._replace(sampled_token_id=token) for row, token in zip(rows, token_ids, strict=True)),
            num_waiting=len(scheduler.waiting),
            num_running=len(scheduler.running),
            num_blocks=scheduler.block_manager.num_blocks,
            num_free_blocks=scheduler.block_manager.num_free_blocks,
            block_size=self.config.kvcache_block_size,
            token_budget=scheduler.token_budget,
            num_prefill_tokens=prefill,
            num_decode_tokens=decode,
            timings=timings,
            **self._journal.drain(),
        )

    def _publish(self, record: StepRecord) -> None:
        for key, hook in list(self._hooks.items()):
            if self._hooks.get(key) is not hook:
                continue  # another hook has just removed or replaced it
            try:
                hook(record)
            except Exception as error:
                self.remove_step_hook(key, hook)
                tell(f"step hook {hook_name(hook)} raised {shown(error)} in step {record.step} and was removed")

    # ---- text and tokens -----------------------------------------------------------------------------------------

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text. Raises `RequestError` for text that is not valid Unicode (lone surrogates)."""
        if not isinstance(text, str):
            raise RequestError(f"only text can be tokenized, got {shown(text)}")
        try:
            text.encode()
            return list(self.tokenizer.encode(text, add_special_tokens=add_special_tokens))
        except (UnicodeEncodeError, TypeError) as error:
            raise RequestError(f"the prompt {shown(text)} cannot be tokenized: {error}") from error

    def decode(self, token_ids: SequenceOf[int]) -> str:
        """Text of token ids, without special tokens. Raises `RequestError` for anything but the model's token ids."""
        ids = self._checked_ids(token_ids)
        return str(self.tokenizer.decode(ids, skip_special_tokens=True))

    def _checked_ids(self, token_ids: Any) -> list[int]:
        ids, vocab_size = token_id_list(token_ids), self.model_runner.vocab_size
        wrong = next((token_id for token_id in ids if not 0 <= token_id < vocab_size), None)
        if wrong is not None:
            raise RequestError(f"token id {shown(wrong)} is not in the model's vocabulary (0 to {vocab_size - 1})")
        return ids

    def _generation(self, seq: Sequence, token_ids: list[int]) -> Generation:
        return Generation(self.decode(token_ids), token_ids, seq)

    @staticmethod
    def broadcast(sampling_params: Any, num_prompts: int) -> list[SamplingParams]:
        """One `SamplingParams` for each prompt: the same for all, or those of a list of the same length."""
        if sampling_params is None:
            sampling_params = SamplingParams()
        if isinstance(sampling_params, SamplingParams):
            return [sampling_params] * num_prompts
        if not isinstance(sampling_params, (list, tuple)):
            got = shown(sampling_params)
            raise RequestError(f"sampling_params must be a SamplingParams or a list of them, got {got}")
        if len(sampling_params) != num_prompts:
            raise RequestError(
                f"{num_prompts} prompts but {len(sampling_params)} sampling params; give one for all or one for each"
            )
        return list(sampling_params)

    def _sequence(self, prompt: Prompt, sampling_params: SamplingParams | None) -> Sequence:
        """A checked sequence, not yet queued. Raises `RequestError` with value, limit and remedy."""
        params = SamplingParams() if sampling_params is None else sampling_params
        if not isinstance(params, SamplingParams):
            raise RequestError(f"sampling_params must be a SamplingParams, got {shown(params)}")
        # The caller's object may have been changed since it was checked, and may be changed while the request runs.
        params = copy(params)
        SamplingParams.__post_init__(params)
        token_ids = self._checked_ids(self.encode(prompt) if isinstance(prompt, str) else prompt)
        if not token_ids:
            raise RequestError("the prompt is empty; a model needs at least one token to continue")
        if len(token_ids) > self.config.max_model_len:
            raise RequestError(
                f"the prompt has {len(token_ids)} tokens, the limit is max_model_len={self.config.max_model_len}; "
                "shorten it, or build the engine with a larger max_model_len if the model allows one"
            )
        capacity = self.scheduler.block_manager.capacity
        if len(token_ids) > capacity:
            raise RequestError(
                f"the prompt has {len(token_ids)} tokens, the KV pool holds {capacity} "
                f"({self.scheduler.block_manager.num_blocks} blocks of {self.config.kvcache_block_size}); "
                "shorten it, or build the engine with more num_kvcache_blocks"
            )
        return self.parts.resolve(Sequence)(token_ids, params, block_size=self.config.kvcache_block_size)

    # ---- staying whole -------------------------------------------------------------------------------------------

    @contextmanager
    def _entered(self, name: str) -> Iterator[DeferredInterrupt]:
        """One caller at a time: hooks and other threads are told so instead of tearing a step apart.

        Interrupts wait at the door as well, until the caller is out again, so it is never left locked.
        """
        with DeferredInterrupt() as interrupt:
            if not self._finalizer.alive:
                raise EngineDeadError(f"{name}: this engine was closed; build a new LLM")
            # Another thread may hold the door for a moment, to take away an iterator that nobody wants any more.
            patience = 0 if self._inside is not None else 0.2
            if not self._door.acquire(timeout=patience):
                raise EngineBusyError(
                    f"{name}: the engine is in the middle of a call; "
                    "call it neither from a step hook nor from a second thread"
                )
            self._inside = threading.get_ident()
            try:
                yield interrupt
            finally:
                self._inside = None
                self._door.release()

    def _give_up(self, own: set[int] | None) -> None:
        """After a failure: drop the requests `own` (None: those of the failed step); the engine is whole afterwards."""
        failed_step, self._in_step = self._in_step, None
        if failed_step is not None:
            if own is None:
                suspects = failed_step or (*self.scheduler.waiting, *self.scheduler.running)
                own = {seq.seq_id for seq in suspects}
            self.scheduler.recover(own)
        elif own:
            try:
                for seq_id in own:
                    self.scheduler.abort(seq_id)
            except Exception:  # of a replaced method, which may have failed for the very same reason before
                self.scheduler.recover(own)
        if not self.ranks.is_alive():
            self._close()

    def exit(self) -> None:
        """Give memory and processes back. Safe to call again; also called at garbage collection and at exit."""
        if self._finalizer.alive:
            with self._entered("exit()"):
                self._close()

    def _close(self) -> None:
        try:
            self.model_runner.call("exit")
        finally:
            self._finalizer()
            self._hooks.clear()
            if self._chat_template is not None:
                self._chat_template.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.exit()


def known_options(options: dict[str, Any]) -> dict[str, Any]:
    """The options that `Config` knows; a warning that names the nearest known one for each of the others."""
    known = {f.name for f in fields(Config)}
    for name in options.keys() - known:
        nearest = nearest_option(name)
        hint = f"; did you mean {nearest!r}?" if nearest else ""
        warnings.warn(f"LLM has no option {name!r}, it is ignored{hint}", stacklevel=4)
    return {name: value for name, value in options.items() if name in known}


def hook_key(key: Any) -> Any:
    """`key`, or its identity where it cannot be hashed."""
    try:
        hash(key)
    except TypeError:
        return id(key)
    return key


def hook_name(fn: StepHook) -> str:
    """How messages name a step hook: as it was defined, or by its repr."""
    return getattr(fn, "__qualname__", None) or shown(fn)


def tell(message: str) -> None:
    """Warn; where warnings are errors, print instead, because a failed hook must not end a run."""
    try:
        warnings.warn(message, stacklevel=3)
    except Warning:
        print(message, file=sys.stderr)


def end_ranks(ranks: RankLink) -> None:
    """End the other ranks and let go of them: what is left to do when the engine itself is gone."""
    with ranks.running("exit", ()):
        ranks.close()


__all__ = ["FinishReason", "Generation", "HookHandle", "LLMEngine", "Prompt"]
