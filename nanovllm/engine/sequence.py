"""Sequence: one request on its way through the engine: its tokens, its progress and its KV blocks.

A sequence is bookkeeping only. It knows nothing about queues, pools or tensors: the `Scheduler` alone changes its
status, the `BlockManager` alone changes its block table (but for `Scheduler.recover`, which clears it).

Progress is one number. `num_computed_tokens` tokens have their keys and values in the cache; each step computes
`num_scheduled_tokens` more, and a sequence that has caught up with `num_tokens` gets one new token. Chunked prefill,
prefix hits, preemption and decode are all the same thing seen from here.
"""

from collections.abc import Sequence as SequenceOf
from enum import StrEnum
from typing import Any

from nanovllm._html import ReprHTML
from nanovllm.engine.events import FinishReason, SequenceState
from nanovllm.sampling_params import SamplingParams


class SequenceStatus(StrEnum):
    WAITING = "waiting"  # queued, never had a seat (a place in the scheduler's `running`)
    RUNNING = "running"  # has a seat and holds blocks; its prompt may still be on the way
    PREEMPTED = "preempted"  # lost seat and blocks, waits to be computed again
    FINISHED = "finished"


FINISHED = SequenceStatus.FINISHED  # looked up once: in Python 3.11 that takes 70 ns, which count with 256 rows


class Sequence(ReprHTML):
    """A prompt and what was generated from it.

    token_ids: the prompt, at least one id. sampling_params: `SamplingParams()` if left out. seq_id: -1 until a
    scheduler gives it the next free number. block_size: tokens a block; the class attribute if left out, which the
    newest engine sets (as in the course, so that ad-hoc cells need not name it), while every sequence keeps its own.
    """

    block_size: int = 256

    def __init__(
        self,
        token_ids: SequenceOf[int],
        sampling_params: SamplingParams | None = None,
        *,
        seq_id: int = -1,
        block_size: int | None = None,
    ) -> None:
        self.seq_id = seq_id
        self.block_size = type(self).block_size if block_size is None else block_size
        self.sampling_params = SamplingParams() if sampling_params is None else sampling_params
        self.token_ids: list[int] = list(token_ids)
        self.num_prompt_tokens = len(self.token_ids)
        self.status = SequenceStatus.WAITING
        self.finish_reason: FinishReason | None = None
        self.block_table: tuple[int, ...] = ()  # logical block i lies in physical block block_table[i]
        self.block_hashes: list[int] = []  # see BlockManager.block_hash; tokens never change, so these stay valid
        self.num_hashed_blocks = 0  # leading blocks of block_table that the prefix cache has been told about
        self.num_computed_tokens = 0  # tokens whose keys and values are in the cache
        self.num_scheduled_tokens = 0  # tokens of the current (or, between steps, the last) step
        self.num_prefill_tokens = self.num_prompt_tokens  # known when it got its seat: prefill lasts so long
        self.num_cached_tokens = 0  # of the first admission: taken from the prefix cache, not computed
        self.num_preemptions = 0

    def __len__(self) -> int:
        return len(self.token_ids)

    def __repr__(self) -> str:
        return (
            f"Sequence(seq_id={self.seq_id}, {self.status}, {self.num_prompt_tokens} prompt + "
            f"{self.num_completion_tokens} generated, {self.num_computed_tokens} computed, "
            f"block_table={list(self.block_table)})"
        )

    @property
    def num_tokens(self) -> int:
        """All tokens known: prompt and generated."""
        return len(self.token_ids)

    @property
    def num_completion_tokens(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def prompt_token_ids(self) -> list[int]:
        return self.token_ids[: self.num_prompt_tokens]

    @property
    def completion_token_ids(self) -> list[int]:
        return self.token_ids[self.num_prompt_tokens :]

    @property
    def last_token(self) -> int:
        return self.token_ids[-1]

    @property
    def is_finished(self) -> bool:
        return self.status is FINISHED

    @property
    def is_prefilling(self) -> bool:
        """Whether it is still catching up with what was known when it got its seat.

        Not the same as "has generated nothing": a preempted sequence prefills its generated tokens as well.
        """
        return self.num_computed_tokens < self.num_prefill_tokens

    @property
    def temperature(self) -> float:
        return self.sampling_params.temperature

    @property
    def max_tokens(self) -> int:
        return self.sampling_params.max_tokens

    @property
    def ignore_eos(self) -> bool:
        return self.sampling_params.ignore_eos

    def append_token(self, token_id: int) -> None:
        """Add a generated token. Its key and value are computed by the next step."""
        self.token_ids.append(token_id)

    def block(self, index: int) -> tuple[int, ...]:
        """The tokens of logical block `index`; fewer than block_size in a last, partial block."""
        return tuple(self.token_ids[index * self.block_size : (index + 1) * self.block_size])

    def slot_mapping(self, start: int, stop: int) -> list[int]:
        """Slots of the positions start to stop - 1: where their keys and values go.

        With block size 4 and block_table (7, 2), positions 3, 4, 5 lie in block 7 at offset 3 and in block 2 at
        offsets 0 and 1: slots 7 * 4 + 3 = 31, 2 * 4 = 8 and 9. One range a block, so no loop over tokens.
        """
        slots: list[int] = []
        size = self.block_size
        while start < stop:
            index, offset = divmod(start, size)
            count = min(size - offset, stop - start)
            first = self.block_table[index] * size + offset
            slots.extend(range(first, first + count))
            start += count
        return slots

    def state(self) -> SequenceState:
        """An immutable copy for `LLMEngine.snapshot`."""
        return SequenceState(
            self.seq_id, str(self.status), tuple(self.token_ids), self.num_prompt_tokens, self.num_computed_tokens,
            self.num_cached_tokens, self.block_table,
        )  # fmt: skip

    def _repr_rows(self) -> list[tuple[str, Any]]:
        names = (
            "seq_id", "status", "finish_reason", "num_prompt_tokens", "num_completion_tokens", "num_computed_tokens",
            "num_cached_tokens", "num_preemptions", "block_table", "sampling_params", "token_ids",
        )  # fmt: skip
        return [(name, getattr(self, name)) for name in names]
