"""What a view draws is what the engine's own state says: after every step, for random workloads."""

import random

import pytest

from nanovllm.engine.events import EngineSnapshot
from nanovllm.engine.sequence import SequenceStatus
from nanovllm.sampling_params import SamplingParams
from nanovllm.viz.history import ABORT, DECODE, FINISH, HIT, PREEMPT, PREEMPTED, PREFILL, RESIDENT, WAITING
from nanovllm.viz.recorder import Recorder
from nanovllm.viz.state import EngineState
from tests.viz.toy import ToyEngine

POLICIES = ("prefill_first", "mixed")


def assert_same(state: EngineState, snapshot: EngineSnapshot, resumed: set[int] = frozenset()) -> None:  # type: ignore[assignment]
    """Everything that the state claims, compared with the engine's own account."""
    assert state.step == snapshot.step and state.is_complete
    assert state.ref_count.tolist() == [block.ref_count for block in snapshot.blocks]
    assert state.is_cached.tolist() == [block.is_cached for block in snapshot.blocks]
    counts = state.counts()
    assert counts.cached_free + counts.empty == len(snapshot.free_block_ids)
    holders: dict[int, set[int]] = {}
    for seq in snapshot.running:
        for block_id in seq.block_table:
            holders.setdefault(block_id, set()).add(seq.seq_id)
    assert {block_id: set(seq_ids) for block_id, seq_ids in state.holders.items()} == holders
    assert all(state.owner[block_id] in seq_ids for block_id, seq_ids in holders.items())
    assert (state.owner >= 0).sum() == len(holders)
    assert state.sequences.keys() == {seq.seq_id for seq in (*snapshot.waiting, *snapshot.running)}
    for seq in (*snapshot.waiting, *snapshot.running):
        info = state.sequences[seq.seq_id]
        assert (info.status, info.num_tokens, info.num_computed_tokens, info.num_prompt_tokens, info.block_table) == (
            seq.status, len(seq.token_ids), seq.num_computed_tokens, seq.num_prompt_tokens, seq.block_table,
        )  # fmt: skip
        if seq.seq_id not in resumed and seq.status == "running":
            assert info.num_cached_tokens == seq.num_cached_tokens
    assert state.tokens is not None
    for block in snapshot.blocks:
        if block.is_cached:
            assert state.tokens[block.block_id].tolist() == list(block.token_ids)
    for seq in snapshot.running:
        for position in range(seq.num_computed_tokens):
            index, offset = divmod(position, snapshot.block_size)
            assert state.tokens[seq.block_table[index], offset] == seq.token_ids[position]


def random_prompt(rng: random.Random) -> list[int]:
    """Often one of two beginnings, so that blocks are shared."""
    start = [[1] * 9, [2, 3] * 6][rng.randrange(2)] if rng.random() < 0.7 else []
    return start + [rng.randrange(5) for _ in range(rng.randint(1, 8))]


def random_engine(rng: random.Random, policy: str) -> ToyEngine:
    return ToyEngine(
        kvcache_block_size=rng.choice([1, 2, 4, 8]),
        num_kvcache_blocks=rng.choice([32, 40, 64]),
        max_num_batched_tokens=rng.choice([4, 16, 64]),
        max_num_seqs=rng.randint(1, 6),
        scheduling_policy=policy,
        enable_prefix_caching=rng.random() < 0.85,
    )


@pytest.mark.parametrize("policy", POLICIES)
def test_the_folded_state_equals_the_snapshot_after_every_step(policy: str) -> None:
    preemptions = aborts = evictions = hits = 0
    for seed in range(40):
        rng = random.Random(seed)
        llm = random_engine(rng, policy)
        recorder = Recorder(keep=rng.choice([1, 3, 1000]))
        attached_at = rng.choice([0, 0, 3, 7])
        seen: set[int] = set()
        alive: list[int] = []
        for step in range(60):
            if step == attached_at:
                recorder.attach(llm)
                assert recorder.head is not None
                assert_same(recorder.head, llm.snapshot(), {s.seq_id for s in llm.snapshot().running})
            while rng.random() < 0.3 and step < 40:
                prompt = random_prompt(rng)
                if len(prompt) < llm.scheduler.block_manager.capacity:
                    alive.append(llm.add_request(prompt, SamplingParams(max_tokens=rng.randint(1, 20))))
            if alive and rng.random() < 0.08:
                aborts += llm.abort(rng.choice(alive))
            if rng.random() < 0.05 and step > attached_at:
                recorder.sync(llm.snapshot())  # must neither lose nor double what the next record tells again
            before = {seq.seq_id for seq in llm.scheduler.running}
            if llm.is_finished():
                continue
            llm.step()
            seen |= {seq.seq_id for seq in llm.scheduler.waiting if seq.status is SequenceStatus.PREEMPTED} & before
            if step >= attached_at:
                assert recorder.head is not None
                assert_same(recorder.head, llm.snapshot(), seen | ({*before} if step == attached_at else set()))
                seen |= before if step == attached_at else set()
        totals = recorder.history.totals
        preemptions += totals["preemptions"]
        evictions += totals["evictions"]
        hits += totals["hits"]
    assert preemptions > 20 and aborts > 20 and evictions > 100 and hits > 100  # else nothing was tried


@pytest.mark.parametrize("policy", POLICIES)
def test_the_timeline_is_what_the_scheduler_did(policy: str) -> None:
    for seed in range(25):
        rng = random.Random(100 + seed)
        llm, recorder = random_engine(rng, policy), Recorder()
        recorder.attach(llm)
        expected: dict[tuple[int, int], tuple[int, int]] = {}  # (seq_id, step) -> what happened, how it stood after
        inner = llm.scheduler.schedule
        did: dict[int, int] = {}

        def schedule(inner=inner, did=did, llm=llm):  # type: ignore[no-untyped-def]
            waiting = {seq.seq_id: seq for seq in llm.scheduler.waiting}
            running = {seq.seq_id: seq for seq in llm.scheduler.running}
            seqs, is_prefill = inner()
            for seq in seqs:
                did[seq.seq_id] = PREFILL if seq.is_prefilling else DECODE
                if seq.seq_id in waiting and seq.num_computed_tokens:
                    did[seq.seq_id] |= HIT
            for seq in running.values():
                if seq.status is SequenceStatus.PREEMPTED:
                    did[seq.seq_id] = did.get(seq.seq_id, 0) | PREEMPT
            return seqs, is_prefill

        llm.scheduler.schedule = schedule  # type: ignore[method-assign]
        aborted: dict[int, int] = {}
        alive: list[int] = []
        for _ in range(60):
            if rng.random() < 0.4 and llm.step_count < 40:
                alive.append(llm.add_request(random_prompt(rng), SamplingParams(max_tokens=rng.randint(1, 12))))
            if alive and rng.random() < 0.05 and not llm.is_finished():
                seq_id = rng.choice(alive)
                if llm.abort(seq_id):
                    aborted[seq_id] = llm.step_count + 1
            did.clear()
            finished, _ = llm.step()
            if not did:
                continue
            step = llm.step_count
            for seq_id, flags in did.items():
                over = FINISH if seq_id in dict(finished) else 0
                expected[seq_id, step] = (flags | over, RESIDENT if flags & (PREFILL | DECODE) else PREEMPTED)
            for seq in (*llm.scheduler.waiting, *llm.scheduler.running):
                stand = {"waiting": WAITING, "running": RESIDENT, "preempted": PREEMPTED}[str(seq.status)]
                expected.setdefault((seq.seq_id, step), (0, stand))
        ids = list(recorder.history.rows)
        timeline = recorder.history.timeline(ids)
        shown = {}
        for row, seq_id in enumerate(ids):
            for column in range(len(recorder.history.columns)):
                event, stand = int(timeline.events[row, column]), int(timeline.standing[row, column])
                if event & ABORT:
                    assert aborted[seq_id] == column + 1
                elif event or stand:
                    shown[seq_id, column + 1] = (event, RESIDENT if event & FINISH else stand)
        assert shown == expected


def test_a_failed_step_and_what_follows() -> None:
    llm, recorder = ToyEngine(max_num_seqs=3), Recorder()
    recorder.attach(llm)
    for _ in range(5):
        llm.add_request([1] * 12, SamplingParams(max_tokens=10))
    llm.step()
    llm.step()
    llm.fail_at = 2
    with pytest.raises(RuntimeError):
        llm.step()
    llm.step()
    assert recorder.head is not None
    assert_same(recorder.head, llm.snapshot())
    while not llm.is_finished():
        llm.step()
        assert_same(recorder.head, llm.snapshot())


def test_watching_from_mid_run_without_a_snapshot_says_so_and_keeps_up() -> None:
    llm, recorder = ToyEngine(), Recorder()
    for seed in range(3):
        llm.add_request([seed] * 10, SamplingParams(max_tokens=30))
    for _ in range(5):
        llm.step()
    llm.add_step_hook(recorder)  # the plain hook: no snapshot
    for _ in range(5):
        llm.step()
    assert recorder.head is not None and not recorder.head.is_complete
    assert {s.seq_id: s.block_table for s in recorder.head.by_status("running")} == {
        seq.seq_id: seq.block_table for seq in llm.scheduler.running
    }
    recorder.sync(llm.snapshot())
    assert_same(recorder.head, llm.snapshot())


def test_observe_takes_a_snapshot_first() -> None:
    llm, recorder = ToyEngine(), Recorder()
    llm.add_request([5] * 10, SamplingParams(max_tokens=30))
    for _ in range(5):
        llm.step()
    with llm.observe(recorder):
        llm.step()
        assert recorder.head is not None
        assert_same(recorder.head, llm.snapshot())
    llm.step()
    assert recorder.head.step == 6


def test_the_state_after_each_kept_step_can_be_folded_again() -> None:
    rng = random.Random(5)
    llm, recorder = random_engine(rng, "prefill_first"), Recorder(keep=20)
    recorder.attach(llm)
    snapshots = {}
    for _ in range(12):
        llm.add_request(random_prompt(rng), SamplingParams(max_tokens=12))
    while not llm.is_finished():
        llm.step()
        snapshots[llm.step_count] = llm.snapshot()
    resumed = set(range(12))  # whose count of cached tokens is that of the newest admission
    steps = list(recorder.steps)
    assert len(steps) == 20 and steps[-1] == llm.step_count
    for step in [*steps, *reversed(steps), *rng.sample(steps, 10)]:
        assert_same(recorder.at(step), snapshots[step], resumed)
