"""A worker without a model: every KV slot holds a tag of the token prefix that it was computed from.

A real key depends on all tokens before it. The tag does too, so reading a slot that was never written, was written for
another sequence, or has been overwritten shows at once, and the "next token" is a function of the prefix alone.
"""

from dataclasses import dataclass, field

from nanovllm.engine.block_manager import BlockManager
from nanovllm.engine.events import FinishReason
from nanovllm.engine.scheduler import Scheduler
from nanovllm.engine.sequence import Sequence, SequenceStatus
from nanovllm.sampling_params import SamplingParams

VOCAB_SIZE = 7  # small, so that prompts often begin alike and end tokens come up
EOS = 0


@dataclass
class FakeConfig:
    """The scheduler's options, with a pool so small that everything happens."""

    max_num_batched_tokens: int = 16
    max_num_seqs: int = 4
    max_model_len: int = 200
    eos: int = EOS
    kvcache_block_size: int = 4
    num_kvcache_blocks: int = 8
    enable_prefix_caching: bool = True
    scheduling_policy: str = "prefill_first"
    prefill_chunk: int | None = None
    stop_token_ids: tuple[int, ...] = ()


def tags_of(token_ids: list[int]) -> list[int]:
    """One tag a position: the hash of all tokens up to it."""
    tags, tag = [], 17
    for token_id in token_ids:
        tag = hash((tag, token_id))
        tags.append(tag)
    return tags


def next_token(tag: int) -> int:
    return tag % VOCAB_SIZE


def naive_completion(prompt: list[int], params: SamplingParams, config: FakeConfig) -> list[int]:
    """What a loop without cache, blocks or batches generates."""
    tokens = list(prompt)
    limit = min(config.max_model_len, config.num_kvcache_blocks * config.kvcache_block_size + 1)
    while True:
        tokens.append(next_token(tags_of(tokens)[-1]))
        generated = len(tokens) - len(prompt)
        if (tokens[-1] == EOS and not params.ignore_eos) or generated >= params.max_tokens or len(tokens) >= limit:
            return tokens[len(prompt) :]


@dataclass
class FakeRunner:
    """Writes and reads tags through block tables, all rows' writes first, as every attention backend does."""

    slots: dict[int, int] = field(default_factory=dict)

    def run(self, seqs: list[Sequence]) -> list[int | None]:
        tags = {seq.seq_id: tags_of(seq.token_ids) for seq in seqs}
        written: set[int] = set()
        for seq in seqs:
            start, end = seq.num_computed_tokens, seq.num_computed_tokens + seq.num_scheduled_tokens
            slots = seq.slot_mapping(start, end)
            assert len(slots) == end - start
            for slot, tag in zip(slots, tags[seq.seq_id][start:end], strict=True):
                assert slot not in written, "two rows of a step wrote the same slot"
                written.add(slot)
                self.slots[slot] = tag
        token_ids: list[int | None] = []
        for seq in seqs:
            end = seq.num_computed_tokens + seq.num_scheduled_tokens
            read = [self.slots.get(slot) for slot in seq.slot_mapping(0, end)]
            assert read == tags[seq.seq_id][:end], f"sequence {seq.seq_id} read an unwritten or foreign slot"
            token_ids.append(next_token(read[-1]) if end == seq.num_tokens else None)
        return token_ids


class FakeEngine:
    """Scheduler and block manager around a `FakeRunner`, every invariant checked after every step."""

    def __init__(self, config: FakeConfig, scheduler: Scheduler | None = None) -> None:
        self.config = config
        self.scheduler = Scheduler(config) if scheduler is None else scheduler
        self.runner = FakeRunner()
        self.finished: dict[int, Sequence] = {}
        self.max_resident = 0
        self.num_steps = 0

    def add(self, prompt: list[int], params: SamplingParams) -> Sequence:
        seq = Sequence(prompt, params, block_size=self.config.kvcache_block_size)
        self.scheduler.add(seq)
        return seq

    def step(self) -> list[Sequence]:
        before = [(seq, seq.num_tokens) for seq in self.scheduler.running]
        seqs, is_prefill = self.scheduler.schedule()
        scheduled = sum(seq.num_scheduled_tokens for seq in seqs)
        assert 0 < scheduled <= self.config.max_num_batched_tokens
        assert len({seq.seq_id for seq in seqs}) == len(seqs)
        assert all(seq.num_scheduled_tokens > 0 and seq.status is SequenceStatus.RUNNING for seq in seqs)
        assert is_prefill == any(seq.is_prefilling for seq in seqs)
        if self.config.scheduling_policy == "mixed":
            # A running sequence that was not preempted is in every step.
            decoding = [seq for seq, _ in before if seq.status is SequenceStatus.RUNNING and not seq.is_prefilling]
            assert {seq.seq_id for seq in decoding} <= {seq.seq_id for seq in seqs}
        self.max_resident = max(self.max_resident, len(self.scheduler.running))
        token_ids = self.runner.run(seqs)
        self.scheduler.postprocess(seqs, token_ids, is_prefill)
        self.finished.update({seq.seq_id: seq for seq in seqs if seq.is_finished})
        self.num_steps += 1
        check_invariants(self.scheduler)
        assert self.max_resident <= self.config.max_num_seqs
        return seqs

    def run(self, max_steps: int = 20_000) -> None:
        while not self.scheduler.is_finished():
            assert self.num_steps < max_steps, "no progress"
            self.step()


def check_invariants(scheduler: Scheduler) -> None:
    """Used + free = pool, reference counts = table occurrences, findable content is what the hash says."""
    manager: BlockManager = scheduler.block_manager
    held: dict[int, int] = {}
    for seq in scheduler.running:
        assert len(set(seq.block_table)) == len(seq.block_table), "a table names a block twice"
        assert len(seq.block_table) * seq.block_size >= seq.num_computed_tokens
        for block_id in seq.block_table:
            held[block_id] = held.get(block_id, 0) + 1
    for seq in scheduler.waiting:
        assert not seq.block_table and seq.num_computed_tokens == 0
    assert [block.ref_count for block in manager.blocks] == [held.get(i, 0) for i in range(manager.num_blocks)]
    free = list(manager.free_block_ids)
    assert len(held) + len(free) == manager.num_blocks
    assert set(held).isdisjoint(free)
    for block_hash, block_id in manager.hash_to_block_id.items():
        assert manager.blocks[block_id].hash == block_hash
        assert len(manager.blocks[block_id].token_ids) == manager.block_size
    assert sum(block.hash is not None for block in manager.blocks) == len(manager.hash_to_block_id)
    ids = [seq.seq_id for seq in (*scheduler.waiting, *scheduler.running)]
    assert len(ids) == len(set(ids))


__all__ = ["EOS", "VOCAB_SIZE", "FakeConfig", "FakeEngine", "FakeRunner", "FinishReason", "check_invariants"]
