"""Scheduler: which sequences run in this step, and what becomes of them afterwards.

It moves sequences between two queues, `waiting` and `running`, under three limits: `max_num_batched_tokens` (the token
budget of a step, which binds prefill), `max_num_seqs` (resident sequences, which binds decode) and the KV pool. It
knows nothing about models, tensors or text.

Two policies share all of the code below. With "prefill_first" (the course's) a step is a prefill or a decode, and
prompts go first. With "mixed" the running sequences decode in every step and prompt chunks fill the rest of the budget
(Sarathi-Serve, Agrawal et al., OSDI 2024), so nobody's next token waits behind somebody's long prompt.

When blocks run out, the sequence that got its seat last gives all of its blocks back and is computed again later
(preemption by recomputation); its full blocks stay findable until they are taken, so often little is lost.
"""

from collections import deque
from collections.abc import Callable
from typing import Any, Protocol

from nanovllm.engine.block_manager import BlockManager
from nanovllm.engine.events import Admission, Finish, FinishReason, Journal
from nanovllm.engine.parts import are_shipped
from nanovllm.engine.sequence import Sequence, SequenceStatus


class SchedulerConfig(Protocol):
    """The options that scheduling needs; `Config` has them, and so may anything else."""

    max_num_batched_tokens: int
    max_num_seqs: int
    max_model_len: int
    eos: int
    kvcache_block_size: int
    num_kvcache_blocks: int
    enable_prefix_caching: bool
    scheduling_policy: str
    prefill_chunk: int | None
    stop_token_ids: tuple[int, ...]


class Scheduler:
    """Two queues and a pool. `schedule` plans a step, `postprocess` takes its results in.

    A place in `running` is called a seat. resolve: gives the class to build for the pool, see `Parts.resolve`.

    INVARIANT: every unfinished sequence is in exactly one queue; only sequences in `running` hold blocks; rows are
    planned from the head of `running` and victims taken from its tail, so a planned row is never preempted.
    """

    def __init__(self, config: SchedulerConfig, resolve: Callable[[type[Any]], type[Any]] = lambda cls: cls) -> None:
        self.token_budget = config.max_num_batched_tokens
        self.prefill_chunk = min(config.prefill_chunk or self.token_budget, self.token_budget)
        # A decode step computes one token for each resident sequence, so the budget bounds their number as well.
        self.max_num_seqs = min(config.max_num_seqs, self.token_budget)
        self.max_model_len = config.max_model_len
        self.policy = config.scheduling_policy
        self.stop_token_ids = frozenset((config.eos, *config.stop_token_ids)) - {-1}
        self.block_manager: BlockManager = resolve(BlockManager)(
            config.num_kvcache_blocks, config.kvcache_block_size, config.enable_prefix_caching
        )
        self.max_length = min(self.max_model_len, self.block_manager.capacity + 1)  # of a sequence: see `stop_reason`
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        self.next_seq_id = 0
        self.num_preemptions = 0
        self.num_prefill_tokens = 0  # of the last step: computed by the rows that prefill ...
        self.num_decode_tokens = 0  # ... and by those that decode
        self.journal: Journal | None = None  # filled only while somebody watches

    def watch(self, journal: Journal | None) -> None:
        """Write what happens into `journal` from now on; None: stop writing."""
        self.journal = journal
        self.block_manager.journal = journal.block_events if journal is not None else None

    def is_finished(self) -> bool:
        return not self.waiting and not self.running

    def add(self, seq: Sequence) -> int:
        """Queue a sequence and return its number; a sequence without one (-1) gets the next free one."""
        if seq.seq_id < 0:
            seq.seq_id = self.next_seq_id
        self.next_seq_id = max(self.next_seq_id, seq.seq_id + 1)
        if seq.block_size != self.block_manager.block_size:  # an ad-hoc one takes the newest engine's, see `Sequence`
            seq.block_size = self.block_manager.block_size
        self.waiting.append(seq)
        if self.journal is not None:
            self.journal.queued.append((seq.seq_id, seq.num_prompt_tokens))
        return seq.seq_id

    # ---- planning a step -----------------------------------------------------------------------------------------

    def schedule(self) -> tuple[list[Sequence], bool]:
        """The sequences of the next step, each with `num_scheduled_tokens` set, and whether any computes a prompt.

        Decoding rows come before prefilling ones. Never empty while work remains, never over the token budget.
        """
        seqs = self.schedule_mixed() if self.policy == "mixed" else self.schedule_prefill_first()
        assert seqs or self.is_finished(), "work remains, but no sequence could be scheduled"
        prefilling = [seq.num_scheduled_tokens for seq in seqs if seq.num_computed_tokens < seq.num_prefill_tokens]
        self.num_prefill_tokens = sum(prefilling)
        self.num_decode_tokens = len(seqs) - len(prefilling)
        return seqs, bool(prefilling)

    def schedule_prefill_first(self) -> list[Sequence]:
        """Prompts as long as there is one that can be computed; otherwise a token for everybody."""
        return self.schedule_prefills(self.token_budget) or self.schedule_decodes()

    def schedule_mixed(self) -> list[Sequence]:
        """A token for everybody, and prompts with what that leaves of the budget."""
        preempted_before = self.num_preemptions
        seqs = self.schedule_decodes()
        # A sequence that was just preempted needs the next free blocks itself: nobody new is admitted in such a step.
        admit = self.num_preemptions == preempted_before
        return seqs + self.schedule_prefills(self.token_budget - len(seqs), admit)

    def schedule_prefills(self, budget: int, admit: bool = True) -> list[Sequence]:
        """Prompt chunks of at most `budget` (and `prefill_chunk`) tokens in all: first those under way, then newcomers.

        The last one is cut to what is left of the budget. With 100 tokens of budget, prompts of 60 and 90 tokens
        compute 60 and 40 in this step, and the second its other 50 in the next.
        """
        budget = min(budget, self.prefill_chunk)
        seqs = self.continue_prefills(budget)
        if admit:
            seqs += self.admit_waiting(budget - sum(seq.num_scheduled_tokens for seq in seqs))
        return seqs

    def continue_prefills(self, budget: int) -> list[Sequence]:
        """The next chunk of every prompt under way, in the order of their seats, while the budget lasts."""
        seqs: list[Sequence] = []
        for seq in self.running:
            if seq.num_computed_tokens < seq.num_prefill_tokens and budget > 0:
                budget -= self.plan_chunk(seq, budget)
                seqs.append(seq)
        return seqs

    def admit_waiting(self, budget: int) -> list[Sequence]:
        """Seats and first chunks for waiting sequences, while tokens, seats and blocks last."""
        seqs: list[Sequence] = []
        while budget > 0 and self.waiting and len(self.running) < self.max_num_seqs:
            seq = self.next_waiting()
            if not self.block_manager.can_allocate(seq):
                break  # nobody overtakes the one that waits for room
            self.admit(seq)  # before it leaves its queue: should that fail, it is still in one
            self.waiting.remove(seq)
            budget -= self.plan_chunk(seq, budget)
            seqs.append(seq)
        return seqs

    def next_waiting(self) -> Sequence:
        """Whose turn it is: first come, first served, and whoever lost a seat stands in front.

        A policy of one's own may name any other sequence in `waiting`.
        """
        return self.waiting[0]

    def admit(self, seq: Sequence) -> None:
        """Give a waiting sequence a seat and blocks for all of its tokens, so that a prefill never gets stuck."""
        num_cached_tokens = self.block_manager.allocate(seq)
        is_resumed = seq.status is SequenceStatus.PREEMPTED
        if not is_resumed:
            seq.num_cached_tokens = num_cached_tokens
        seq.num_prefill_tokens = seq.num_tokens
        seq.status = SequenceStatus.RUNNING
        self.running.append(seq)
        if self.journal is not None:
            self.journal.admitted.append(Admission(seq.seq_id, seq.num_prompt_tokens, num_cached_tokens, is_resumed))

    def schedule_decodes(self) -> list[Sequence]:
        """One token for every running sequence whose prompt is done, from the head; short of blocks, the tail goes.

        With A, B, C running and no free block when A needs one: C is preempted, A takes a block of C's, B goes on.
        """
        seqs: list[Sequence] = []
        can_append, append = self.block_manager.can_append, self.block_manager.append
        # Most tokens open no block and fill none: with blocks of 4 those at positions 1 and 2, 5 and 6, and so on. With
        # 256 rows three calls for each of them would be a fifth of the host's time in a step.
        block_size, shipped = self.block_manager.block_size, are_shipped(can_append, append, self.plan)
        index = 0
        while index < len(self.running):  # which `preempt` shortens, or replaces by a shorter one
            seq = self.running[index]
            index += 1
            position = seq.num_computed_tokens
            if position < seq.num_prefill_tokens:  # `is_prefilling`; a call less for every row
                continue  # a prompt under way holds all of its blocks already
            if shipped and 0 < position % block_size < block_size - 1:
                seq.num_scheduled_tokens = 1
                seqs.append(seq)
                continue
            while not can_append(seq):
                victim = self.running[-1]
                self.preempt(victim)
                if victim is seq:
                    break  # it was the last: nobody else has a block to give
            else:  # not left by `break`: there is room
                append(seq)
                self.plan(seq, 1)
                seqs.append(seq)
        return seqs

    def plan_chunk(self, seq: Sequence, budget: int) -> int:
        """Let `seq` compute as much of what it has to catch up with as the budget allows; returns how many tokens."""
        num_tokens = min(seq.num_tokens - seq.num_computed_tokens, budget)
        self.plan(seq, num_tokens)
        return num_tokens

    def plan(self, seq: Sequence, num_tokens: int) -> None:
        """Let `seq` compute `num_tokens` tokens in this step; the blocks that they fill become findable at once."""
        seq.num_scheduled_tokens = num_tokens
        end = seq.num_computed_tokens + num_tokens
        if end // seq.block_size > seq.num_hashed_blocks:
            self.block_manager.cache_full_blocks(seq, end)

    def preempt(self, seq: Sequence) -> None:
        """Take the last-seated sequence's blocks; it will be the first to get a seat again, and be computed anew."""
        assert self.running[-1] is seq, "victims are taken from the tail"
        self.running.pop()
        self.block_manager.free(seq)
        seq.status = SequenceStatus.PREEMPTED
        seq.num_preemptions += 1
        self.num_preemptions += 1
        self.waiting.appendleft(seq)
        if self.journal is not None:
            self.journal.preempted.append(seq.seq_id)

    # ---- taking results in ---------------------------------------------------------------------------------------

    def postprocess(self, seqs: list[Sequence], token_ids: list[int | None], is_prefill: bool) -> None:
        """Book the step: progress for every row, a new token for every row that caught up, an end where one is due.

        token_ids: one for each row, None for a chunk that is not the last of its prompt. is_prefill: as `schedule`
        returned it; every row tells for itself, so it is not looked at. `num_scheduled_tokens` stays readable until the
        next step.
        """
        any_finished = False
        shipped = are_shipped(self.stop_reason, Sequence.append_token, Sequence.max_tokens)
        stop_token_ids, max_length = self.stop_token_ids, self.max_length
        for seq, token_id in zip(seqs, token_ids, strict=True):
            seq.num_computed_tokens += seq.num_scheduled_tokens
            if seq.num_computed_tokens < len(seq.token_ids):
                continue  # more chunks to come
            assert token_id is not None, f"sequence {seq.seq_id} caught up, but no token was sampled for it"
            seq.append_token(token_id)
            length = len(seq.token_ids)
            if (
                shipped and type(seq) is Sequence and token_id not in stop_token_ids and length < max_length
                and length - seq.num_prompt_tokens < seq.sampling_params.max_tokens
            ):  # fmt: skip
                continue  # as most rows: so much of `stop_reason` is written out here, for two calls less for each row
            reason = self.stop_reason(seq)
            if reason is not None:
                self.finish(seq, reason)
                any_finished = True
        if any_finished:
            self.running = [seq for seq in self.running if not seq.is_finished]

    def stop_reason(self, seq: Sequence) -> FinishReason | None:
        """Why a sequence ends after the token that it just got; None: it goes on.

        An end token counts before a limit that is reached with it. The pool limits the length too: a sequence that is
        one token longer than all blocks together could never compute that token, not even alone.
        """
        if seq.token_ids[-1] in self.stop_token_ids and not seq.ignore_eos:
            return FinishReason.STOP
        length = len(seq.token_ids)
        if length - seq.num_prompt_tokens >= seq.max_tokens or length >= self.max_length:
            return FinishReason.LENGTH
        return None

    def finish(self, seq: Sequence, reason: FinishReason) -> None:
        """Mark a sequence as ended and free its blocks; the caller takes it out of its queue."""
        self.block_manager.free(seq)
        self._end(seq, reason)

    def _end(self, seq: Sequence, reason: FinishReason) -> None:
        seq.status = SequenceStatus.FINISHED
        seq.finish_reason = reason
        if self.journal is not None:
            self.journal.finished.append(Finish(seq.seq_id, reason, seq.num_completion_tokens))

    def abort(self, seq_id: int) -> bool:
        """Give up an unfinished sequence, wherever it is; False if there is none with that number."""
        for seq in (*self.waiting, *self.running):
            if seq.seq_id == seq_id:
                self.finish(seq, FinishReason.ABORT)
                if seq in self.running:
                    self.running.remove(seq)
                else:
                    self.waiting.remove(seq)
                return True
        return False

    def recover(self, dropped: set[int]) -> None:
        """Make everything whole after a step that failed anywhere: `dropped` sequences end, the others start over.

        Nothing that the failed step left behind is trusted, so the pool is emptied, the prefix cache with it.
        """
        # Who had a seat comes before who never had one, also under a policy of a learner's that seats by other rules.
        seqs = sorted(
            {*self.waiting, *self.running}, key=lambda seq: (seq.status is SequenceStatus.WAITING, seq.seq_id)
        )
        self.waiting.clear()
        self.running.clear()
        self.block_manager.reset()
        for seq in seqs:
            seq.block_table, seq.num_hashed_blocks, seq.num_computed_tokens = (), 0, 0
            if seq.status is SequenceStatus.FINISHED:
                continue  # the step failed while its results were booked, this one's before
            if seq.seq_id in dropped or seq.is_finished:
                self._end(seq, seq.finish_reason or FinishReason.ABORT)
                continue
            if seq.status is SequenceStatus.RUNNING:
                seq.status = SequenceStatus.PREEMPTED
                if self.journal is not None:
                    self.journal.preempted.append(seq.seq_id)
            self.waiting.append(seq)
