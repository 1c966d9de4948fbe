"""What a method must not do, least of all one that a learner put in its place, is said where it happens."""

from pathlib import Path
from typing import Any

import pytest
import torch

from nanovllm import Parts
from nanovllm.engine.block_manager import BlockManager
from nanovllm.engine.events import FinishReason, Journal
from nanovllm.engine.scheduler import Scheduler
from nanovllm.engine.sequence import Sequence
from nanovllm.layers.sampler import Sampler
from nanovllm.sampling_params import SamplingParams
from nanovllm.text_pieces import TextPieces
from tests.engine.fake import FakeConfig, check_invariants
from tests.faults.engines import PROMPTS, assert_whole, build, cold


def scheduled(count: int = 2) -> tuple[Scheduler, list[Sequence]]:
    """A scheduler in the middle of a prefill of `count` sequences."""
    scheduler = Scheduler(FakeConfig())
    for number in range(count):
        scheduler.add(Sequence([number + 1] * 5, SamplingParams(max_tokens=9), block_size=4))
    return scheduler, scheduler.schedule()[0]


def test_numbers_are_never_given_twice() -> None:
    scheduler = Scheduler(FakeConfig())
    numbers = [scheduler.add(Sequence([1], block_size=4, seq_id=seq_id)) for seq_id in (-1, 7, -1, 3, -1)]
    assert numbers == [0, 7, 8, 3, 9]


def test_a_tokenizer_without_an_end_token_adds_none() -> None:
    assert Scheduler(FakeConfig(eos=-1, stop_token_ids=(5,))).stop_token_ids == {5}


def test_a_plan_without_rows_would_never_end() -> None:
    scheduler, _ = scheduled()
    scheduler.schedule_prefill_first = lambda: []  # type: ignore[method-assign]
    with pytest.raises(AssertionError, match="work remains, but no sequence could be scheduled"):
        scheduler.schedule()
    scheduler.waiting.clear()
    scheduler.running.clear()
    assert scheduler.schedule() == ([], False), "unless there is no work"


def test_an_engine_with_such_a_plan_says_so_and_is_whole(tiny_model_dir: Path) -> None:
    def nobody(self: Any) -> list[Sequence]:
        return []

    with build(tiny_model_dir, Parts({"Scheduler.schedule_prefill_first": nobody})) as llm:
        with pytest.raises(AssertionError, match="no sequence could be scheduled"):
            llm.generate(PROMPTS, cold(2), use_tqdm=False)
        assert_whole(llm)


def test_prompt_chunks_stay_within_the_budget_whatever_is_asked_for() -> None:
    """A policy of one's own may ask for more; larger steps than the warm-up had could end in want of memory."""
    for prefill_chunk, most in ((None, 16), (99, 16), (5, 5)):
        scheduler = Scheduler(FakeConfig(prefill_chunk=prefill_chunk))
        for _ in range(4):
            scheduler.add(Sequence([1] * 8, block_size=4))
        assert sum(seq.num_scheduled_tokens for seq in scheduler.schedule_prefills(1000)) == most


def test_nobody_gets_a_seat_in_the_step_in_which_somebody_loses_his() -> None:
    """Whoever lost it stands in front and does not fit; a policy of one's own may prefer a newcomer that does."""
    scheduler = Scheduler(FakeConfig(scheduling_policy="mixed", num_kvcache_blocks=4))
    one, two, newcomer = (Sequence([number] * length, block_size=4) for number, length in ((1, 8), (2, 8), (3, 2)))
    scheduler.next_waiting = lambda: min(scheduler.waiting, key=len)  # type: ignore[method-assign]
    for seq in (one, two):
        scheduler.add(seq)
    scheduler.postprocess(scheduler.schedule()[0], [3, 3], True)
    scheduler.add(newcomer)
    assert scheduler.schedule() == ([one], False)
    assert list(scheduler.waiting) == [two, newcomer] and scheduler.block_manager.num_free_blocks == 1
    scheduler.postprocess([one], [3], False)
    assert newcomer in scheduler.schedule()[0]


def test_only_the_last_seated_one_is_preempted() -> None:
    scheduler, seqs = scheduled()
    with pytest.raises(AssertionError, match="victims are taken from the tail"):
        scheduler.preempt(seqs[0])
    scheduler.preempt(seqs[1])
    assert list(scheduler.waiting) == [seqs[1]] and scheduler.running == [seqs[0]]


def test_a_row_that_caught_up_has_a_token() -> None:
    scheduler, seqs = scheduled()
    with pytest.raises(AssertionError, match="sequence 1 caught up, but no token was sampled"):
        scheduler.postprocess(seqs, [3, None], True)


def test_after_a_failed_step_those_that_are_left_start_over_in_their_order() -> None:
    """One has ended in the part of the step that came to pass, one is given up, the others wait with empty hands."""
    scheduler, seqs = scheduled(3)
    late = Sequence([9], block_size=4)
    scheduler.add(late)
    seqs[0].sampling_params.max_tokens = 1
    with pytest.raises(AssertionError, match="no token was sampled"):
        scheduler.postprocess(seqs, [3, 3, None], True)
    scheduler.watch(Journal())
    scheduler.recover({seqs[1].seq_id})
    assert scheduler.journal is not None
    assert [event.seq_id for event in scheduler.journal.finished] == [seqs[1].seq_id]  # the other's was told in time
    assert [seq.finish_reason for seq in seqs] == [FinishReason.LENGTH, FinishReason.ABORT, None]
    assert list(scheduler.waiting) == [seqs[2], late] and scheduler.running == []
    check_invariants(scheduler)
    scheduler.running.append(late)  # by a method that forgot to take it out of the other queue
    scheduler.recover(set())
    assert list(scheduler.waiting) == [seqs[2], late] and scheduler.running == []


def test_a_request_whose_blocks_cannot_be_given_is_still_queued(monkeypatch: pytest.MonkeyPatch) -> None:
    scheduler = Scheduler(FakeConfig())
    seq = Sequence([1, 2, 3], block_size=4)
    scheduler.add(seq)
    with monkeypatch.context() as patch, pytest.raises(ZeroDivisionError):
        patch.setattr(scheduler.block_manager, "allocate", lambda seq: 1 / 0)
        scheduler.schedule()
    scheduler.recover(set())
    assert list(scheduler.waiting) == [seq]
    assert scheduler.schedule() == ([seq], True) and not scheduler.waiting


def test_an_ad_hoc_sequence_takes_the_block_size_of_its_pool() -> None:
    """It was made with the newest engine's, which is not this one."""
    scheduler = Scheduler(FakeConfig(kvcache_block_size=4))
    seq = Sequence([1, 2, 3, 4, 5], block_size=256)
    scheduler.add(seq)
    scheduler.schedule()
    assert seq.block_size == 4 and len(seq.block_table) == 2


def test_a_reader_of_a_request_that_somebody_lost_does_not_wait_for_ever(tiny_model_dir: Path) -> None:
    with build(tiny_model_dir) as llm:
        stream = llm.stream(PROMPTS[0], cold(20))
        next(stream)
        llm.scheduler.running.clear()
        with pytest.raises(AssertionError, match="in no queue"):
            next(stream)


def test_after_a_failed_step_who_had_a_seat_comes_first_under_any_policy() -> None:
    scheduler = Scheduler(FakeConfig(max_num_seqs=1))
    long, short = Sequence([1] * 9, block_size=4), Sequence([2], block_size=4)
    scheduler.next_waiting = lambda: min(scheduler.waiting, key=len)  # type: ignore[method-assign]
    for seq in (long, short):
        scheduler.add(seq)
    assert scheduler.schedule()[0] == [short]
    scheduler.recover(set())
    assert list(scheduler.waiting) == [short, long]


@pytest.mark.parametrize("token_ids", [[3], [3, 4, 5], []])
def test_every_row_has_one_token(token_ids: list[int | None]) -> None:
    scheduler, seqs = scheduled()
    with pytest.raises(ValueError, match="zip"):
        scheduler.postprocess(seqs, token_ids, True)


@pytest.mark.parametrize(("num_blocks", "block_size"), [(0, 4), (4, 0), (-1, 4), (4, -4)])
def test_a_pool_holds_something(num_blocks: int, block_size: int) -> None:
    with pytest.raises(AssertionError, match="at least one block of at least one token"):
        BlockManager(num_blocks, block_size)


def test_blocks_are_given_once_and_taken_once() -> None:
    manager, seq = BlockManager(4, 4), Sequence([1] * 5, block_size=4, seq_id=7)
    manager.allocate(seq)
    with pytest.raises(AssertionError, match="sequence 7 already has blocks"):
        manager.allocate(seq)
    held = seq.block_table[0]
    manager.free_block_ids[held] = None
    manager.free_block_ids.move_to_end(held, last=False)
    with pytest.raises(AssertionError, match=f"block {held} is in the free queue and held 1 times"):
        manager.take_free_block(8)
    manager.free(seq)
    with pytest.raises(AssertionError, match=f"block {held} was freed more often than it was taken"):
        manager.release(held, 7)


def test_a_hit_is_confirmed_by_its_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """Different content may have one hash; with a weak hash of somebody's own it soon has."""
    monkeypatch.setattr(BlockManager, "hash_block", staticmethod(lambda parent_hash, token_ids: 5))
    manager = BlockManager(9, 4)
    one, other, same = (Sequence([number] * 4 + [9], block_size=4) for number in (1, 2, 1))
    manager.allocate(one)
    manager.cache_full_blocks(one, 4)
    assert manager.match_prefix(other) == [] and manager.match_prefix(same) == [one.block_table[0]]


def test_without_prefix_caching_nothing_is_kept_nor_looked_for() -> None:
    manager, seq = BlockManager(4, 4, enable_prefix_caching=False), Sequence([1] * 9, block_size=4)
    manager.allocate(seq)
    manager.cache_full_blocks(seq, 8)
    assert not manager.hash_to_block_id and not any(block.token_ids for block in manager.blocks)
    assert manager.match_prefix(seq) == [] and not seq.block_hashes, "and no hash is computed"


def test_a_block_that_can_be_found_is_found_by_one_content() -> None:
    manager, seq = BlockManager(4, 4), Sequence([1] * 5, block_size=4)
    manager.allocate(seq)
    block = manager.blocks[seq.block_table[0]]
    block.hash, manager.hash_to_block_id[77] = 77, block.block_id
    manager.cache_full_blocks(seq, 4)
    assert block.hash == 77 and manager.hash_to_block_id == {77: block.block_id}


def test_a_sequence_without_blocks_has_no_progress_either() -> None:
    manager, seq = BlockManager(4, 4), Sequence([1] * 5, block_size=4)
    manager.allocate(seq)
    manager.cache_full_blocks(seq, 4)
    seq.num_computed_tokens = 5
    manager.free(seq)
    assert (seq.block_table, seq.num_hashed_blocks, seq.num_computed_tokens) == ((), 0, 0)


def test_a_sampler_is_never_asked_for_nothing(tiny_model_dir: Path) -> None:
    """A step may hold nothing but a chunk of a prompt; a sampler of somebody's own need not expect no rows."""
    asked: list[int] = []

    def forward(self: Sampler, logits: torch.Tensor, *others: Any) -> torch.Tensor:
        asked.append(len(logits))
        return logits.argmax(-1)

    with build(tiny_model_dir, Parts({"Sampler.forward": forward}), max_num_batched_tokens=8) as llm:
        llm.generate([[5] * 30], cold(2), use_tqdm=False)
        assert llm.step_count == 5 and asked == [1, 1]


@pytest.mark.parametrize(("given", "kept"), [(None, 1024), (7, 7), (5000, 5000)])
def test_a_step_on_a_cpu_is_short_unless_somebody_says_otherwise(
    tiny_model_dir: Path, given: int | None, kept: int
) -> None:
    with build(tiny_model_dir, prefill_chunk=given) as llm:
        assert llm.config.prefill_chunk == llm.scheduler.prefill_chunk == kept


def test_a_token_without_text_does_not_cost_the_next_one_its_space() -> None:
    class Stripping:
        """Writes the first word of a text without the space in front of it, and special tokens not at all."""

        def decode(self, token_ids: list[int], skip_special_tokens: bool) -> str:
            return "".join([" one", "", " two"][token_id] for token_id in token_ids).removeprefix(" ")

    pieces = TextPieces(Stripping())
    assert [pieces.push([0, 1, 2][:count], False) for count in (1, 2, 3)] == ["one", "", " two"]
    assert pieces.push([0, 1, 2], True) == ""
