"""A slow scheduler for the graders of chapter 5: lists of requests and the slow pool of chapter 4, nothing shared with
the engine.

`Trial` drives the answer's scheduler and the slow one side by side and rejects the answer where they differ.
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from random import Random
from typing import Any

from nanovllm.engine.parts import Parts
from nanovllm.engine.scheduler import Scheduler
from nanovllm.engine.sequence import Sequence, SequenceStatus
from nanovllm.sampling_params import SamplingParams
from nanovllm.workbook.grading import Answer, type_of
from nanovllm.workbook.oracles.kv_cache import SlowPool, faults

END_TOKEN = 0


@dataclass(repr=False)
class Options:
    """A scheduler's options, small."""

    max_num_batched_tokens: int = 16
    max_num_seqs: int = 8
    max_model_len: int = 1000
    eos: int = END_TOKEN
    kvcache_block_size: int = 4
    num_kvcache_blocks: int = 50
    enable_prefix_caching: bool = True
    scheduling_policy: str = "prefill_first"
    prefill_chunk: int | None = None
    stop_token_ids: tuple[int, ...] = ()

    def __repr__(self) -> str:
        """What differs from the defaults above."""
        given = [(field.name, getattr(self, field.name)) for field in fields(self)]
        default = Options.__dict__
        return ", ".join(f"{name}={value!r}" for name, value in given if value != default[name])


class Named(Sequence):
    """A sequence that stands in a story under its name."""

    def __init__(self, name: str, token_ids: list[int], max_tokens: int = 64, block_size: int = 4) -> None:
        super().__init__(token_ids, SamplingParams(max_tokens=max_tokens), block_size=block_size)
        self.name = name

    def __repr__(self) -> str:
        return self.name


class Request:
    """A request as the slow scheduler keeps it. `target`: tokens that it has to catch up with before it decodes."""

    def __init__(self, name: str, tokens: list[int], max_tokens: int) -> None:
        self.name, self.tokens, self.max_tokens = name, list(tokens), max_tokens
        self.num_prompt = len(tokens)
        self.computed = self.target = self.chunk = 0


class SlowScheduler:
    """What a scheduler must do, in the plainest way."""

    def __init__(self, options: Options) -> None:
        self.options = options
        self.chunk = min(options.prefill_chunk or 10**9, options.max_num_batched_tokens)
        self.seats = min(options.max_num_seqs, options.max_num_batched_tokens)
        self.pool = SlowPool(options.num_kvcache_blocks, options.kvcache_block_size)
        self.waiting: list[Request] = []
        self.running: list[Request] = []
        self.victims: list[str] = []  # of this step

    def schedule(self) -> list[tuple[str, int]]:
        """The rows of the next step: name, tokens to compute."""
        self.victims = []
        budget = self.options.max_num_batched_tokens
        if self.options.scheduling_policy == "mixed":
            rows = self.decodes()
            return rows + self.prompts(budget - len(rows), admit=not self.victims)
        return self.prompts(budget) or self.decodes()

    def prompts(self, budget: int, admit: bool = True) -> list[tuple[str, int]]:
        left = min(budget, self.chunk)
        rows = self.under_way(left)
        return rows + (self.newcomers(left - sum(count for _, count in rows)) if admit else [])

    def under_way(self, left: int) -> list[tuple[str, int]]:
        rows = []
        for request in self.running:
            count = min(request.target - request.computed, left)
            if count > 0:
                rows.append(self.plan(request, count))
                left -= count
        return rows

    def newcomers(self, left: int) -> list[tuple[str, int]]:
        rows: list[tuple[str, int]] = []
        while left > 0 and self.waiting and len(self.running) < self.seats:
            request = self.waiting[0]
            if not self.pool.can_allocate(request.tokens):
                return rows
            self.running.append(self.waiting.pop(0))
            hits = self.pool.hits(request.tokens)
            self.pool.allocate(request.name, request.tokens)
            request.computed, request.target = len(hits) * self.options.kvcache_block_size, len(request.tokens)
            count = min(request.target - request.computed, left)
            rows.append(self.plan(request, count))
            left -= count
        return rows

    def decodes(self) -> list[tuple[str, int]]:
        rows: list[tuple[str, int]] = []
        for request in list(self.running):
            if request not in self.running or request.computed < request.target:
                continue
            slots = self.options.kvcache_block_size * len(self.pool.tables[request.name])
            while request in self.running and slots < len(request.tokens) and not self.pool.queue:
                self.preempt_last()
            if request in self.running:
                if slots < len(request.tokens):
                    self.pool.take(request.name)
                rows.append(self.plan(request, 1))
        return rows

    def preempt_last(self) -> None:
        victim = self.running.pop()
        self.pool.free(victim.name)
        victim.computed = 0
        self.waiting.insert(0, victim)
        self.victims.append(victim.name)

    def plan(self, request: Request, count: int) -> tuple[str, int]:
        """Write the row down, and make the blocks findable that it fills."""
        request.chunk = count
        if self.options.enable_prefix_caching:
            self.pool.cache(request.name, request.tokens, request.computed + count)
        return request.name, count

    def take_in(self, tokens: Mapping[str, int]) -> list[str]:
        """Book a step: `tokens` holds the next token of every row that caught up. Returns who ended."""
        ended = []
        for request in list(self.running):
            if not request.chunk:
                continue
            request.computed, request.chunk = request.computed + request.chunk, 0
            if request.computed < len(request.tokens):
                continue
            request.tokens.append(tokens[request.name])
            generated = len(request.tokens) - request.num_prompt
            room = self.options.kvcache_block_size * self.options.num_kvcache_blocks
            is_long = len(request.tokens) >= min(self.options.max_model_len, room + 1)
            if request.tokens[-1] == END_TOKEN or generated >= request.max_tokens or is_long:
                self.running.remove(request)
                self.pool.free(request.name)
                ended.append(request.name)
        return ended


def next_token(tokens: list[int]) -> int:
    """What the model of these trials would say: any function of the tokens that is seldom the end token."""
    return (sum(tokens) * 7 + len(tokens) * 3) % 11


def make_scheduler(answer: Answer, options: Options, replaced: Mapping[str, Any] | None = None) -> Any:
    """A scheduler on the answer's code, with its calls in the story."""
    answer.note(f"scheduler = Scheduler({options})")
    parts = answer.parts.merged(Parts(replaced)) if replaced else answer.parts
    return answer.watch(parts.resolve(Scheduler)(options, parts.resolve), "scheduler")


def enqueue(answer: Answer, scheduler: Any, **prompts: int | list[int]) -> list[Named]:
    """New requests in the queue, by name: their tokens, or how many they have (then no two begin alike)."""
    seqs = []
    for name, prompt in prompts.items():
        tokens = [100 * ord(name) + i for i in range(prompt)] if isinstance(prompt, int) else prompt
        seqs.append(Named(name, tokens, block_size=scheduler.block_manager.block_size))
        scheduler.raw.add(seqs[-1])
        answer.note(f"add {name}: a prompt of {len(tokens)} tokens")
    return seqs


def seated(answer: Answer, scheduler: Any, name: str, num_tokens: int, num_computed: int) -> Named:
    """A running sequence with so many of its tokens computed; if that is all of them, it has got its first token."""
    (seq,) = enqueue(answer, scheduler, **{name: num_tokens})
    scheduler.raw.waiting.remove(seq)
    scheduler.raw.admit(seq)
    seq.num_computed_tokens = num_computed
    if num_computed == num_tokens:
        seq.append_token(7)
    answer.note(f"{name} has a seat, {num_computed} of {seq.num_tokens} tokens computed")
    return seq


def run_step(answer: Answer, scheduler: Any, token: int = 7) -> list[tuple[str, int]]:
    """One whole step, in which every row that catches up gets `token`. Returns the rows."""
    seqs, is_prefill = scheduler.raw.schedule()
    rows = rows_of(answer, seqs)
    answer.note("a step: " + ", ".join(f"{name}: {count}" for name, count in rows))
    ends = [seq.num_computed_tokens + seq.num_scheduled_tokens for seq in seqs]
    tokens = [token if end == seq.num_tokens else None for seq, end in zip(seqs, ends, strict=True)]
    scheduler.raw.postprocess(seqs, tokens, is_prefill)
    return rows


def whole(answer: Answer, scheduler: Any) -> None:
    """Reject the answer where an invariant of scheduler or pool is broken."""
    raw = scheduler.raw
    answer.require(len(raw.running) <= raw.max_num_seqs, f"{len(raw.running)} resident sequences",
                   f"at most {raw.max_num_seqs}")  # fmt: skip
    wrong = [seq for seq in raw.running if seq.status is not SequenceStatus.RUNNING]
    answer.require(not wrong, wrong, "only sequences with status RUNNING in `running`")
    wrong = [seq for seq in raw.waiting if seq.block_table or seq.status is SequenceStatus.RUNNING]
    answer.require(not wrong, wrong, "no blocks and no status RUNNING in `waiting`")
    both = [seq for seq in raw.waiting if seq in raw.running]
    answer.require(not both, both, "every sequence in one queue")
    found = faults(raw.block_manager, list(raw.running))
    answer.require(found is None, found or "", "a pool in which every count is right")


def named(seqs: Any) -> Any:
    """Names in place of sequences, where there are some."""
    return [getattr(seq, "name", seq) for seq in seqs] if isinstance(seqs, (list, tuple)) else seqs


def rows_of(answer: Answer, seqs: Any) -> list[tuple[str, int]]:
    """(name, tokens to compute) of every planned row."""
    answer.require(isinstance(seqs, list), type_of(seqs), "a list of sequences")
    strange = next((seq for seq in seqs if not isinstance(seq, Sequence)), None)
    answer.require(strange is None, strange, "a list of sequences")
    return [(seq.name, seq.num_scheduled_tokens) for seq in seqs]


def planned_rows(answer: Answer, scheduler: Any, seqs: Any) -> list[tuple[str, int]]:
    """`rows_of` a list that is not one of the scheduler's own."""
    rows = rows_of(answer, seqs)
    answer.note(f"its rows, as (sequence, planned tokens): {rows}")
    own = "The rows are a list of their own: whoever changes it must not change who has a seat."
    answer.require(seqs is not scheduler.raw.running, "the list `running` itself", "another list", own)
    return rows


class Trial:
    """The answer's scheduler and the slow one, on the same requests."""

    def __init__(self, answer: Answer, options: Options, replaced: Mapping[str, Any] | None = None) -> None:
        answer.story.clear()
        self.answer, self.options = answer, options
        self.scheduler = make_scheduler(answer, options, replaced)
        self.slow = SlowScheduler(options)
        self.seqs: dict[str, Named] = {}
        self.num_steps = 0

    def add(self, name: str, tokens: list[int], max_tokens: int = 64) -> Named:
        """A request for both."""
        seq = Named(name, tokens, max_tokens, self.options.kvcache_block_size)
        self.seqs[name] = seq
        self.scheduler.raw.add(seq)
        self.slow.waiting.append(Request(name, tokens, max_tokens))
        self.answer.note(f"add {name}: a prompt of {len(tokens)} tokens")
        return seq

    @property
    def is_finished(self) -> bool:
        return not self.slow.waiting and not self.slow.running

    def step(self) -> list[tuple[str, int]]:
        """One step of both, compared after planning and after booking. Returns the rows."""
        scheduler, answer = self.scheduler.raw, self.answer
        self.num_steps += 1
        answer.note(f"step {self.num_steps}: {self.situation()}")
        result = scheduler.schedule()
        rows = rows_of(answer, result[0])
        expected = self.slow.schedule()
        answer.note("schedule() -> " + (", ".join(f"{name}: {count}" for name, count in rows) or "nothing"))
        answer.equal(rows, expected, "The rows of a step, and the tokens that each of them computes.")
        is_prefill = any(request.chunk and request.computed < request.target for request in self.slow.running)
        answer.equal(result[1], is_prefill, "schedule() tells whether any row computes prompt tokens.")
        self.compare()
        tokens = {
            request.name: next_token(request.tokens)
            for request in self.slow.running
            if request.chunk and request.computed + request.chunk == len(request.tokens)
        }
        scheduler.postprocess(result[0], [tokens.get(name) for name, _ in rows], result[1])
        ended = self.slow.take_in(tokens)
        self.compare()
        for name in ended:
            seq = self.seqs.pop(name)
            answer.equal(seq.is_finished, True, f"{name} has its last token, so it is finished.")
        return expected

    def situation(self) -> str:
        """Queues and free blocks in words."""
        running = ", ".join(
            f"{seq.name} {seq.num_computed_tokens}/{seq.num_tokens}" for seq in self.scheduler.raw.running
        )
        waiting = ", ".join(map(repr, self.scheduler.raw.waiting))
        free = len(self.scheduler.raw.block_manager.free_block_ids)
        return f"running [{running}], waiting [{waiting}], {free} blocks free"

    def compare(self) -> None:
        """Reject the answer where the two differ."""
        scheduler, slow, answer = self.scheduler.raw, self.slow, self.answer
        running = [request.name for request in slow.running]
        answer.equal(named(scheduler.running), running, "`running`: those with a seat, in the order of their seats.")
        waiting = [request.name for request in slow.waiting]
        answer.equal(named(list(scheduler.waiting)), waiting, "`waiting`: who lost a seat in front, then by arrival.")
        for request in (*slow.running, *slow.waiting):
            seq = self.seqs[request.name]
            answer.equal(seq.token_ids, request.tokens, f"The tokens of {request.name}: one more when it caught up.")
            answer.equal(seq.num_computed_tokens, request.computed, f"num_computed_tokens of {request.name}.")
            table = tuple(slow.pool.tables.get(request.name, ()))
            answer.equal(seq.block_table, table, f"The blocks of {request.name}: none without a seat.")
        answer.equal(list(scheduler.block_manager.free_block_ids), slow.pool.queue, "The free queue of the pool.")
        whole(answer, self.scheduler)

    def run(self, max_steps: int = 2000) -> None:
        """Steps until nothing is left."""
        while not self.is_finished:
            self.answer.require(self.num_steps < max_steps, f"{max_steps} steps and no end", "an end")
            self.step()


def random_options(rng: Random, policy: str | None = None) -> Options:
    """Sizes that do not divide each other, and pools in which blocks run out."""
    return Options(
        max_num_batched_tokens=rng.randint(2, 20),
        max_num_seqs=rng.randint(1, 6),
        max_model_len=rng.choice([25, 1000]),
        kvcache_block_size=rng.choice([1, 2, 3, 4, 5]),
        num_kvcache_blocks=rng.randint(4, 14),
        scheduling_policy=policy or rng.choice(["prefill_first", "mixed"]),
        prefill_chunk=rng.choice([None, None, 1, 3, 7]),
    )


def random_trial(answer: Answer, policy: str | None = None, num_requests: int = 6) -> None:
    """Random requests that arrive over time and often begin alike, run to their end on both schedulers."""
    rng = answer.rng
    options = random_options(rng, policy)
    trial = Trial(answer, options)
    longest = min(options.num_kvcache_blocks * options.kvcache_block_size, options.max_model_len - 1)
    stem = [rng.randint(1, 3) for _ in range(rng.randint(0, longest))]
    left = rng.randint(2, num_requests)
    while left or not trial.is_finished:
        answer.require(trial.num_steps < 500, "500 steps and no end", "an end")
        while left and (trial.is_finished or rng.random() < 0.4):
            head = stem[: rng.randint(0, len(stem))] if rng.random() < 0.6 else []
            tokens = (head + [rng.randint(1, 3) for _ in range(rng.randint(1, 9))])[:longest]
            trial.add(chr(ord("A") + num_requests - left), tokens, rng.randint(1, 12))
            left -= 1
        trial.step()
