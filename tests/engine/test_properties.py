"""Scheduler and block manager under random workloads, with a worker that notices every wrong slot."""

import random
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from nanovllm.engine import scheduler as scheduler_module
from nanovllm.engine.events import FinishReason, Journal
from nanovllm.engine.scheduler import Scheduler
from nanovllm.sampling_params import SamplingParams
from tests.engine import fake
from tests.engine.fake import FakeConfig, FakeEngine, check_invariants, naive_completion


def random_workload(rng: random.Random) -> dict[str, int]:
    """One random pool, policy and set of requests (arrivals and aborts in mid-run included), run to its end."""
    block_size = rng.choice([1, 2, 3, 4, 8])
    config = FakeConfig(
        max_num_batched_tokens=rng.randint(1, 24),
        max_num_seqs=rng.randint(1, 6),
        max_model_len=rng.choice([20, 60, 200]),
        kvcache_block_size=block_size,
        num_kvcache_blocks=rng.randint(2, 40),
        enable_prefix_caching=rng.random() < 0.8,
        scheduling_policy=rng.choice(["prefill_first", "mixed"]),
        prefill_chunk=rng.choice([None, None, 1, 3, 8]),
    )
    engine = FakeEngine(config)
    longest = min(config.num_kvcache_blocks * block_size, config.max_model_len)
    shared = [rng.randint(1, 6) for _ in range(rng.randint(0, longest))]
    arrivals: list[tuple[list[int], SamplingParams, int, bool]] = []
    for _ in range(rng.randint(1, 12)):
        prompt = shared[: rng.randint(0, len(shared))] if rng.random() < 0.6 else []
        prompt = (prompt + [rng.randint(0, 6) for _ in range(rng.randint(1, 12))])[:longest]
        params = SamplingParams(max_tokens=rng.randint(1, 30), ignore_eos=rng.random() < 0.7)
        arrivals.append((prompt, params, rng.randint(0, 15), rng.random() < 0.1))
    expected: dict[int, list[int]] = {}
    doomed: list[int] = []
    while arrivals or not engine.scheduler.is_finished():
        assert engine.num_steps < 5_000, "no progress"
        due = [item for item in arrivals if item[2] <= engine.num_steps or engine.scheduler.is_finished()]
        arrivals = [item for item in arrivals if item not in due]
        for prompt, params, _, is_doomed in due:
            seq = engine.add(prompt, params)
            expected[seq.seq_id] = naive_completion(prompt, params, config)
            if is_doomed:
                doomed.append(seq.seq_id)
        engine.step()
        if doomed and rng.random() < 0.3:
            seq_id = doomed.pop()
            assert engine.scheduler.abort(seq_id) == (seq_id not in engine.finished)
            if seq_id not in engine.finished:
                del expected[seq_id]
            check_invariants(engine.scheduler)
    for seq_id, tokens in expected.items():
        seq = engine.finished[seq_id]
        assert seq.completion_token_ids == tokens
        assert seq.finish_reason in (FinishReason.STOP, FinishReason.LENGTH)
    manager = engine.scheduler.block_manager
    assert manager.num_free_blocks == manager.num_blocks
    return {
        "steps": engine.num_steps,
        "preemptions": engine.scheduler.num_preemptions,
        "hit_tokens": manager.num_hit_tokens,
    }


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.integers(0, 2**48))
def test_random_workloads_equal_the_naive_loop(seed: int) -> None:
    random_workload(random.Random(seed))


def test_short_ways_book_what_the_methods_would(monkeypatch: pytest.MonkeyPatch) -> None:
    """The loops over rows spare most rows some calls: nothing that anybody can see changes by it."""
    journals: list[Journal] = []

    def watched(*args: Any) -> Scheduler:
        scheduler = Scheduler(*args)
        journals.append(Journal())
        scheduler.watch(journals[-1])
        return scheduler

    monkeypatch.setattr(fake, "Scheduler", watched)
    counts = [random_workload(random.Random(f"short {seed}")) for seed in range(200)]
    short, journals[:] = journals[:], []
    monkeypatch.setattr(scheduler_module, "are_shipped", lambda *methods: False)
    assert [random_workload(random.Random(f"short {seed}")) for seed in range(200)] == counts
    assert [journal.drain() for journal in journals] == [journal.drain() for journal in short]


def test_the_workloads_do_what_they_are_for() -> None:
    """Preemptions and prefix hits happen; otherwise the test above would prove little."""
    totals = {"steps": 0, "preemptions": 0, "hit_tokens": 0}
    for seed in range(200):
        for name, count in random_workload(random.Random(seed)).items():
            totals[name] += count
    assert totals["preemptions"] > 50 and totals["hit_tokens"] > 500 and totals["steps"] > 2_000


@pytest.mark.slow
def test_twenty_thousand_random_workloads() -> None:
    for seed in range(20_000):
        random_workload(random.Random(f"workload {seed}"))
