"""Many requests through a small pool: every one right, nobody starves, nothing leaks. And a soak of random mischief.

NANOVLLM_SOAK_SECONDS sets the length of the long soak (60 unless set; 600 is ten minutes).
"""

import gc
import os
import random
import signal
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from nanovllm import LLM, Parts
from nanovllm.engine.events import StepRecord
from nanovllm.layers.sampler import Sampler
from tests.engine.fake import check_invariants
from tests.faults.engines import assert_whole, build, child_processes, cold, resident_bytes, token_ids

MIB = 1 << 20


class Referee:
    """A step hook that checks fairness, and measures waits.

    longest_gap: between two tokens of one running request, in (steps, tokens that others had computed meanwhile).
    """

    def __init__(self, llm: LLM) -> None:
        self.llm = llm
        self.running: set[int] = set()
        self.preempted: set[int] = set()
        self.last_token: dict[int, tuple[int, int]] = {}
        self.num_steps = self.num_tokens = self.num_preemptions = 0
        self.longest_gap = (0, 0)

    def __call__(self, record: StepRecord) -> None:
        self.num_steps += 1
        self.num_tokens += record.num_tokens
        self.num_preemptions += len(record.preempted)
        decoding = {row.seq_id for row in record.rows if not row.is_prefill}
        if self.llm.config.scheduling_policy == "mixed":
            # `running`: those that had their prompt done before this step.
            assert self.running - set(record.preempted) <= decoding, "a running request got no token"
        self.preempted.update(record.preempted)
        for admission in record.admitted:
            assert admission.is_resumed or not self.preempted, "a newcomer before one that had lost its blocks"
            self.preempted.discard(admission.seq_id)
        for row in record.rows:
            if row.sampled_token_id is not None:
                if row.seq_id in self.last_token and row.seq_id in self.running:
                    steps, tokens = self.last_token[row.seq_id]
                    gap = (self.num_steps - steps - 1, self.num_tokens - tokens - record.num_tokens)
                    self.longest_gap = max(self.longest_gap, gap)
                self.last_token[row.seq_id] = (self.num_steps, self.num_tokens)
                self.running.add(row.seq_id)
        self.running -= {finish.seq_id for finish in record.finished} | set(record.preempted)
        if self.num_steps % 50 == 0:
            check_invariants(self.llm.scheduler)


def load(path: Path, policy: str, count: int, sample: int) -> str:
    """`count` requests through a pool that holds 5 % of their tokens; returns what was measured."""
    rng = random.Random(policy)
    prompts = [[rng.randrange(3, 299) for _ in range(rng.choice((2, 5, 17, 40, 90)))] for _ in range(count)]
    for number in range(0, count, 4):  # a quarter begins alike
        prompts[number][:0] = range(100, 120)
    params = [cold(rng.randrange(1, 40)) for _ in prompts]
    total = sum(len(prompt) + each.max_tokens for prompt, each in zip(prompts, params, strict=True))
    num_blocks = max(total // 20 // 4, 40)
    with build(path, num_kvcache_blocks=num_blocks, scheduling_policy=policy, max_num_batched_tokens=1024) as llm:
        llm.generate(prompts[:50], params[:50], use_tqdm=False)
        before = resident_bytes()
        referee = Referee(llm)
        with llm.observe(referee):
            outputs = token_ids(llm.generate(prompts, params, use_tqdm=False))
        assert_whole(llm)
        grown = resident_bytes() - before
    assert [len(ids) for ids in outputs] == [each.max_tokens for each in params]
    assert referee.num_preemptions > count // 100, "the pool was tight"
    with build(path, num_kvcache_blocks=64, enable_prefix_caching=False) as alone:
        for number in rng.sample(range(count), sample):
            expected = token_ids(alone.generate([prompts[number]], params[number], use_tqdm=False))
            assert expected == [outputs[number]], f"request {number} is not what it is alone"
    assert grown < 40 * MIB, f"{grown / MIB:.0f} MiB more after {count} requests"
    steps, tokens = referee.longest_gap
    return (
        f"{policy}: {count} requests, {referee.num_steps} steps, {referee.num_preemptions} preemptions; longest wait "
        f"between two tokens: {steps} steps, {tokens} tokens; resident memory {grown / MIB:+.1f} MiB"
    )


@pytest.mark.parametrize("policy", ["prefill_first", "mixed"])
def test_many_requests_through_a_small_pool(tiny_model_dir: Path, policy: str) -> None:
    print(load(tiny_model_dir, policy, count=200, sample=15))


@pytest.mark.slow
@pytest.mark.timeout(3000)
@pytest.mark.parametrize("policy", ["prefill_first", "mixed"])
def test_2000_requests_through_a_small_pool(tiny_model_dir: Path, policy: str) -> None:
    print(load(tiny_model_dir, policy, count=2000, sample=100))


def test_the_referee_sees_a_starved_request(tiny_model_dir: Path) -> None:
    """The fairness that is checked above is not true of everything: prefill-first lets decodes wait."""
    with build(tiny_model_dir, max_num_batched_tokens=8) as llm:
        referee = Referee(llm)
        llm.add_request([5, 6, 7], cold(9))
        with llm.observe(referee):
            llm.step()
            llm.step()
            llm.add_request(list(range(10, 50)), cold(2))
            llm.generate([[5, 6]], cold(2), use_tqdm=False)
            assert referee.longest_gap == (6, 42), "40 + 2 prompt tokens, 8 a step, came in between"
            llm.config.scheduling_policy = "mixed"  # what the referee goes by; the engine goes on as it was built
            llm.add_request([5, 6, 7], cold(9))
            llm.step()
            llm.add_request(list(range(10, 50)), cold(2))
            with pytest.warns(UserWarning, match="got no token"):
                llm.step()


# ---- soak --------------------------------------------------------------------------------------------------------


class Flaky(Sampler):
    """Fails now and then."""

    def __init__(self) -> None:
        super().__init__()
        self.rng = random.Random(1)

    def forward(self, *args: Any, **options: Any) -> Any:
        if self.rng.random() < 0.003:
            raise MemoryError("now and then")
        return super().forward(*args, **options)


PROMPTS = [list(range(5, 5 + length)) for length in (1, 3, 4, 5, 21, 60)]
MESSAGES = [{"role": "user", "content": "the quick brown fox"}]


class Mischief:
    """Random calls, among them everything that goes wrong in a classroom."""

    def __init__(self, llm: LLM, seed: int) -> None:
        self.llm, self.rng = llm, random.Random(seed)
        self.numbers: list[int] = []
        self.streams: list[Iterator[str]] = []
        self.counts = {"interrupts": 0, "errors": 0, "calls": 0}

    def params(self) -> Any:
        return cold(self.rng.choice((1, 2, 7, 30)))

    def prompts(self) -> list[list[int]]:
        return [self.rng.choice(PROMPTS) for _ in range(self.rng.randrange(1, 6))]

    def add(self) -> None:
        self.numbers.append(self.llm.add_request(self.rng.choice(PROMPTS), self.params()))

    def abort(self) -> None:
        if self.numbers:
            self.llm.abort(self.numbers.pop(self.rng.randrange(len(self.numbers))))

    def step(self) -> None:
        self.llm.step()

    def generate(self) -> None:
        self.llm.generate(self.prompts(), self.params(), use_tqdm=False)

    def chat(self) -> None:
        self.llm.chat(MESSAGES, self.params())

    def open_stream(self) -> None:
        stream = self.llm.stream(self.rng.choice(PROMPTS), self.params())
        next(stream, None)
        self.streams.append(stream)

    def read_stream(self) -> None:
        if self.streams:
            next(self.rng.choice(self.streams), None)

    def forget_stream(self) -> None:
        if self.streams:
            held = [self.streams.pop(self.rng.randrange(len(self.streams)))]
            if self.rng.random() < 0.5:
                thread = threading.Thread(target=held.clear)
                thread.start()
                thread.join()

    def collect_outputs(self) -> None:
        for number in self.numbers:
            self.llm.get_output(number)

    def hook(self) -> None:
        kind = self.rng.randrange(4)
        if kind == 0:
            self.llm.add_step_hook(lambda record: [][0], key=self.rng.randrange(3))
        elif kind == 1:
            self.llm.add_step_hook(lambda record: self.llm.snapshot(), key=self.rng.randrange(3))
        elif kind == 2:
            self.llm.add_step_hook(lambda record: self.llm.step(), key=self.rng.randrange(3))
        else:
            self.llm.remove_step_hook(self.rng.randrange(3))

    def bad_input(self) -> None:
        with suppress(ValueError):
            self.llm.generate([[5], [10**9]], use_tqdm=False)
        with suppress(ValueError):
            self.llm.add_request("", self.params())

    def once(self) -> None:
        names = (
            "add", "add", "abort", "step", "step", "generate", "generate", "chat", "open_stream", "read_stream",
            "forget_stream", "collect_outputs", "hook", "bad_input",
        )  # fmt: skip
        call: Callable[[], None] = getattr(self, self.rng.choice(names))
        timer = None
        if self.rng.random() < 0.15:
            timer = threading.Timer(self.rng.uniform(0, 0.03), os.kill, (os.getpid(), signal.SIGINT))
        self.counts["calls"] += 1
        try:
            try:
                if timer is not None:
                    timer.start()  # the signal may come before this returns
                call()
            finally:
                if timer is not None:
                    while timer.is_alive() or timer.ident is None:
                        time.sleep(0.001)
                    time.sleep(0.001)
        except KeyboardInterrupt:
            self.counts["interrupts"] += 1
        except MemoryError:
            self.counts["errors"] += 1
        check_invariants(self.llm.scheduler)

    def tidy(self) -> None:
        """Give up all that is under way."""
        self.streams.clear()
        gc.collect()
        for seq in (*self.llm.scheduler.waiting, *self.llm.scheduler.running):
            self.llm.abort(seq.seq_id)
        self.collect_outputs()
        self.llm._unclaimed.clear()  # of requests whose number was lost in an interrupt
        self.numbers.clear()
        assert_whole(self.llm)


def soak(path: Path, seconds: float) -> str:
    with build(path) as alone:
        expected = [token_ids(alone.generate([prompt], cold(5), use_tqdm=False))[0] for prompt in PROMPTS]
    handler = signal.signal(signal.SIGINT, signal.default_int_handler)
    threads, children = threading.active_count(), child_processes()
    options: dict[str, Any] = {"num_kvcache_blocks": 40, "max_num_batched_tokens": 24, "max_num_seqs": 6}
    try:
        with build(path, Parts({"Sampler": Flaky}), **options) as llm, warnings.catch_warnings():
            warnings.simplefilter("ignore")
            mischief = Mischief(llm, seed=7)
            end, before, checked = time.monotonic() + seconds, 0, 0
            while time.monotonic() < end or not checked:
                for _ in range(60):
                    mischief.once()
                mischief.tidy()
                with suppress(MemoryError):
                    outputs = token_ids(llm.generate(PROMPTS, cold(5), use_tqdm=False))
                    assert outputs == expected
                    checked += 1
                before = before or resident_bytes()
            grown = resident_bytes() - before
        assert threading.active_count() == threads and child_processes() == children
    finally:
        signal.signal(signal.SIGINT, handler)
    assert grown < 40 * MIB, f"{grown / MIB:.0f} MiB more after {mischief.counts}"
    return f"{seconds:.0f} s: {mischief.counts}, {checked} checks, resident memory {grown / MIB:+.1f} MiB"


def test_a_short_soak(tiny_model_dir: Path) -> None:
    print(soak(tiny_model_dir, 3))


@pytest.mark.slow
@pytest.mark.timeout(3000)
@pytest.mark.skipif("NANOVLLM_SOAK_SECONDS" not in os.environ, reason="set NANOVLLM_SOAK_SECONDS to soak for so long")
def test_a_soak(tiny_model_dir: Path) -> None:
    """On its own, and not beside other tests: an interrupt that comes when the soak is over hits what runs then."""
    print(soak(tiny_model_dir, float(os.environ["NANOVLLM_SOAK_SECONDS"])))
