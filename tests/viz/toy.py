"""An engine without a model: the real scheduler and block manager around a cheap runner, with the LLM's interface.

It runs thousands of steps a second, needs no torch, and gives the views the very records that the engine gives.
"""

import signal
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from time import perf_counter, sleep
from typing import Any

from nanovllm.engine.events import EngineSnapshot, Journal, StepRecord, StepRow, StepTimings
from nanovllm.engine.scheduler import Scheduler
from nanovllm.engine.sequence import Sequence as SequenceState
from nanovllm.sampling_params import SamplingParams

WORDS = "the a cat dog sat ran on under mat rug and then it they saw blue red big small house".split()


@dataclass
class ToyConfig:
    max_num_batched_tokens: int = 64
    max_num_seqs: int = 8
    max_model_len: int = 4096
    eos: int = -1
    kvcache_block_size: int = 4
    num_kvcache_blocks: int = 64
    enable_prefix_caching: bool = True
    scheduling_policy: str = "prefill_first"
    prefill_chunk: int | None = None
    stop_token_ids: tuple[int, ...] = ()


class ToyTokenizer:
    def decode(self, token_ids: Sequence[int]) -> str:
        return "".join(" " + WORDS[token_id % len(WORDS)] for token_id in token_ids)


class Handle:
    def __init__(self, engine: "ToyEngine", key: Any) -> None:
        self.engine, self.key = engine, key

    def remove(self) -> None:
        self.engine.hooks.pop(self.key, None)
        if not self.engine.hooks:
            self.engine.scheduler.watch(None)
            self.engine.journal.drain()

    def __enter__(self) -> "Handle":
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.remove()


class ToyEngine:
    """`step_seconds`: how long a step pretends to run; timings in the records are then as if it had."""

    def __init__(self, step_seconds: float = 0.0, **options: Any) -> None:
        self.config = ToyConfig(**options)
        self.scheduler = Scheduler(self.config)
        self.tokenizer = ToyTokenizer()
        self.journal = Journal()
        self.hooks: dict[Any, Callable[[StepRecord], Any]] = {}
        self.step_seconds, self.born, self.step_count = step_seconds, perf_counter(), 0
        self.fail_at: int | None = None

    def add_step_hook(self, fn: Callable[[StepRecord], Any], key: Any = None) -> Handle:
        key = fn if key is None else key
        self.hooks[key] = fn
        self.scheduler.watch(self.journal)
        return Handle(self, key)

    def observe(self, fn: Callable[[StepRecord], Any]) -> Handle:
        on_attach = getattr(fn, "on_attach", None)
        if on_attach is not None:
            on_attach(self.snapshot())
        return self.add_step_hook(fn)

    def snapshot(self) -> EngineSnapshot:
        scheduler = self.scheduler
        return EngineSnapshot(
            self.step_count, self.config.kvcache_block_size, scheduler.max_num_seqs, scheduler.token_budget,
            scheduler.policy, scheduler.block_manager.state(), tuple(scheduler.block_manager.free_block_ids),
            tuple(seq.state() for seq in scheduler.waiting), tuple(seq.state() for seq in scheduler.running),
        )  # fmt: skip

    def add_request(self, prompt: Sequence[int], params: SamplingParams | None = None) -> int:
        seq = SequenceState(prompt, params or SamplingParams(), block_size=self.config.kvcache_block_size)
        return self.scheduler.add(seq)

    def abort(self, seq_id: int) -> bool:
        return self.scheduler.abort(seq_id)

    def is_finished(self) -> bool:
        return self.scheduler.is_finished()

    def step(self) -> tuple[list[tuple[int, list[int]]], int]:
        if self.is_finished():
            return [], 0
        scheduler, started = self.scheduler, perf_counter()
        seqs, is_prefill = scheduler.schedule()
        scheduled = perf_counter()
        rows = [
            StepRow(
                seq.seq_id, tuple(seq.token_ids[seq.num_computed_tokens :][: seq.num_scheduled_tokens]),
                seq.num_computed_tokens, seq.num_tokens, seq.block_table, seq.is_prefilling, None,
            ) for seq in seqs
        ]  # fmt: skip
        if self.step_count == self.fail_at:
            self.fail_at = None
            scheduler.recover({seq.seq_id for seq in seqs})
            raise RuntimeError("the runner failed")
        if self.step_seconds:
            sleep(self.step_seconds)
        token_ids: list[int | None] = [
            (sum(seq.token_ids) * 31 + seq.num_tokens) % 997
            if seq.num_computed_tokens + seq.num_scheduled_tokens == seq.num_tokens
            else None
            for seq in seqs
        ]
        ran = perf_counter()
        scheduler.postprocess(seqs, token_ids, is_prefill)
        self.step_count += 1
        if self.hooks:
            prefill, decode = scheduler.num_prefill_tokens, scheduler.num_decode_tokens
            record = StepRecord(
                step=self.step_count, time=perf_counter() - self.born,
                phase="mixed" if prefill and decode else "prefill" if prefill else "decode",
                rows=tuple(row._replace(sampled_token_id=t) for row, t in zip(rows, token_ids, strict=True)),
                num_waiting=len(scheduler.waiting), num_running=len(scheduler.running),
                num_blocks=scheduler.block_manager.num_blocks, num_free_blocks=scheduler.block_manager.num_free_blocks,
                block_size=self.config.kvcache_block_size, token_budget=scheduler.token_budget,
                num_prefill_tokens=prefill, num_decode_tokens=decode,
                timings=StepTimings(scheduled - started, ran - scheduled, perf_counter() - ran), **self.journal.drain(),
            )  # fmt: skip
            for hook in list(self.hooks.values()):
                hook(record)
        finished = [(seq.seq_id, seq.completion_token_ids) for seq in seqs if seq.is_finished]
        return finished, (prefill if (prefill := scheduler.num_prefill_tokens) else -len(seqs))

    def generate(
        self, prompts: Sequence[Sequence[int]], params: SamplingParams | None = None, use_tqdm: bool = False
    ) -> list[list[int]]:
        """Like the engine's: an interrupt takes effect at a step's end, and leaves nothing of the call behind."""
        pending: list[int] = []
        is_main = threading.current_thread() is threading.main_thread()
        old = signal.signal(signal.SIGINT, lambda *args: pending.append(1)) if is_main else None
        seq_ids = [self.add_request(prompt, params) for prompt in prompts]
        results: dict[int, list[int]] = {}
        try:
            while not self.is_finished():
                results.update(self.step()[0])
                if pending:
                    raise KeyboardInterrupt
        except BaseException:
            for seq_id in seq_ids:
                self.abort(seq_id)
            raise
        finally:
            if is_main:
                signal.signal(signal.SIGINT, old)
        return [results[seq_id] for seq_id in seq_ids]


def prompts_like_chats(count: int, seed: int = 0, longest: int = 60) -> list[list[int]]:
    """Prompts of which many begin alike, as with a system prompt."""
    import random

    rng = random.Random(seed)
    starts = [[rng.randrange(997) for _ in range(24)] for _ in range(2)]
    return [
        (rng.choice(starts) if rng.random() < 0.7 else [])
        + [rng.randrange(997) for _ in range(rng.randint(3, longest))]
        for _ in range(count)
    ]
