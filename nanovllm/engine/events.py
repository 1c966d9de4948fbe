"""What the engine tells those who watch it: one frozen `StepRecord` per step, and whole-pool snapshots on request.

Everything here is plain Python and immutable, so that a record can be kept, printed, sent or written to a file long
after the step; nothing here knows who listens. Records are built only while at least one hook is attached
(`LLMEngine.add_step_hook`); the whole-pool state is pulled with `LLMEngine.snapshot()` and never pushed, because it
grows with the pool. A watcher takes one snapshot and then folds the `BlockEvent`s of each record into it.
"""

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, NamedTuple

from nanovllm._html import ReprHTML


class BlockEventKind(StrEnum):
    """What can happen to a KV block."""

    ALLOCATE = "allocate"  # a free block is taken by a sequence, its content is no longer of use: ref_count 0 -> 1
    REUSE = "reuse"  # a prefix hit: a sequence takes a block whose content is what it needs: ref_count n -> n + 1
    CACHE = "cache"  # the block is full and findable by its hash from now on
    EVICT = "evict"  # a findable block's content is given up: right before its ALLOCATE, or after a failed step
    RELEASE = "release"  # a sequence lets go of the block: ref_count n -> n - 1; at 0 the block is free


class BlockEvent(NamedTuple):
    """One change of one block. Events of a step are in the order in which they happened."""

    kind: BlockEventKind
    block_id: int
    seq_id: int | None  # who took, filled or let go of the block; None for EVICT and when a failed step resets the pool
    ref_count: int  # after the event


class FinishReason(StrEnum):
    """Why a sequence ended."""

    STOP = "stop"  # an end token was generated
    LENGTH = "length"  # max_tokens, max_model_len or the pool's size was reached
    ABORT = "abort"  # the caller gave it up, or its call failed


class StepRow(NamedTuple):
    """What one sequence did in one step.

    `token_ids` are the tokens whose keys and values this step computed: positions `num_computed_tokens` up to (not
    including) `num_computed_tokens + len(token_ids)`. With block size 4, a row that computed tokens 6, 7 and 8 wrote
    offsets 2 and 3 of block_table[1] and offset 0 of block_table[2].
    """

    seq_id: int
    token_ids: tuple[int, ...]
    num_computed_tokens: int  # before the step
    num_tokens: int  # all tokens known before the step: prompt and generated
    block_table: tuple[int, ...]
    is_prefill: bool  # prompt tokens (or, after a preemption, tokens computed again), not a decode
    sampled_token_id: int | None  # None for a chunk that is not the last of its prompt

    @property
    def num_scheduled_tokens(self) -> int:
        return len(self.token_ids)


class Admission(NamedTuple):
    """A sequence that got a seat in this step."""

    seq_id: int
    num_prompt_tokens: int
    num_cached_tokens: int  # taken from the prefix cache at this admission
    is_resumed: bool  # it had been preempted before


class Finish(NamedTuple):
    """A sequence that ended in this step, or was aborted since the step before."""

    seq_id: int
    reason: FinishReason
    num_completion_tokens: int


class StepTimings(NamedTuple):
    """Seconds spent in the three lines of a step. `run` ends when the sampled tokens are on the host; where none are
    sampled (chunks of prompts), a GPU has only got its work by then."""

    schedule: float
    run: float
    postprocess: float


@dataclass(frozen=True, slots=True)
class StepRecord(ReprHTML):
    """Everything that one engine step did; the argument of every step hook."""

    step: int  # counts the engine's steps from 1
    time: float  # seconds since the engine was built, at the end of the step
    phase: str  # "prefill", "decode" or "mixed"
    rows: tuple[StepRow, ...]
    queued: tuple[tuple[int, int], ...]  # (seq_id, prompt tokens) of requests added since the step before
    admitted: tuple[Admission, ...]
    preempted: tuple[int, ...]
    finished: tuple[Finish, ...]
    block_events: tuple[BlockEvent, ...]  # since the step before
    num_waiting: int  # after the step
    num_running: int  # resident sequences, after the step
    num_blocks: int
    num_free_blocks: int  # after the step; findable blocks that no sequence holds count as free
    block_size: int
    token_budget: int  # max_num_batched_tokens
    num_prefill_tokens: int  # computed in this step; cached tokens are not in it
    num_decode_tokens: int
    timings: StepTimings

    @property
    def num_tokens(self) -> int:
        return self.num_prefill_tokens + self.num_decode_tokens


@dataclass(slots=True)
class Journal:
    """What happened since the last record; the scheduler and the block manager write here while somebody watches."""

    queued: list[tuple[int, int]] = field(default_factory=list)
    admitted: list[Admission] = field(default_factory=list)
    preempted: list[int] = field(default_factory=list)
    finished: list[Finish] = field(default_factory=list)
    block_events: list[BlockEvent] = field(default_factory=list)

    def drain(self) -> dict[str, tuple[Any, ...]]:
        """Everything so far, as the fields of a `StepRecord`; the journal is empty afterwards."""
        drained: dict[str, tuple[Any, ...]] = {}
        for name in ("queued", "admitted", "preempted", "finished", "block_events"):
            entries = getattr(self, name)
            drained[name] = tuple(entries)
            entries.clear()
        return drained


class BlockState(NamedTuple):
    """One block of the pool in a snapshot."""

    block_id: int
    ref_count: int
    is_cached: bool  # findable by its hash
    token_ids: tuple[int, ...]  # of a findable block; () for others


class SequenceState(NamedTuple):
    """One unfinished sequence in a snapshot."""

    seq_id: int
    status: str  # "waiting", "running" or "preempted"
    token_ids: tuple[int, ...]
    num_prompt_tokens: int
    num_computed_tokens: int
    num_cached_tokens: int
    block_table: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class EngineSnapshot(ReprHTML):
    """The whole state between two steps. Costs time in proportion to the pool, so it is pulled, never pushed."""

    step: int
    block_size: int
    max_num_seqs: int
    token_budget: int
    scheduling_policy: str
    blocks: tuple[BlockState, ...]
    free_block_ids: tuple[int, ...]  # in the order in which they will be taken
    waiting: tuple[SequenceState, ...]
    running: tuple[SequenceState, ...]
