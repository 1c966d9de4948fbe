"""Grader of exercise 5.5: short before long, and nobody starves. Any policy with these properties passes."""

from typing import Any

from nanovllm.engine.events import FinishReason
from nanovllm.engine.scheduler import Scheduler
from nanovllm.engine.sequence import SequenceStatus
from nanovllm.workbook.grading import Answer
from nanovllm.workbook.oracles.scheduler import Named, Options, make_scheduler, whole

FREELY, AT_MOST = 4, 8  # a long one may be overtaken 4 times for sure, and never more than 8 times


class Counter:
    """A scheduler on the answer's code, and how often each of its newcomers was overtaken."""

    def __init__(self, answer: Answer, label: str = "scheduler", **options: Any) -> None:
        self.answer, self.label = answer, label
        self.options = Options(**{"num_kvcache_blocks": 4000, "max_num_batched_tokens": 5000, **options})
        self.scheduler = make_scheduler(answer, self.options)
        self.overtaken: dict[str, int] = {}
        self.num_arrived = 0

    @property
    def raw(self) -> Scheduler:
        scheduler: Scheduler = self.scheduler.raw
        return scheduler

    def arrive(self, *sizes: int) -> list[Named]:
        """Newcomers with prompts of these lengths, named by their arrival."""
        seqs = []
        for size in sizes:
            name = f"{chr(ord('A') + self.num_arrived % 26)}{self.num_arrived // 26 or ''}"
            seq = Named(name, [self.num_arrived * 1000 + i for i in range(size)])
            self.num_arrived += 1
            self.raw.add(seq)
            self.overtaken[name] = 0
            seqs.append(seq)
        return seqs

    def newcomers(self) -> list[Any]:
        found = [seq for seq in self.raw.waiting if seq.status is SequenceStatus.WAITING]
        return sorted(found, key=lambda seq: seq.seq_id)

    def ask(self, promised: bool = True) -> Any:
        """Whose turn it is, checked against everything that is promised (or not: then it is one of the queue)."""
        answer, queue = self.answer, list(self.raw.waiting)
        told = ", ".join(f"{seq!r} {seq.num_tokens}" for seq in queue[:12])
        answer.note(f"{self.label}: waiting [{told}{', …' if len(queue) > 12 else ''}]")
        got = self.raw.next_waiting()
        answer.note(f"{self.label}.next_waiting() -> {got!r}")
        answer.require(any(got is seq for seq in queue), got, "one of the waiting sequences")
        answer.equal(list(self.raw.waiting), queue, "It only answers: the queue stays as it is.")
        if not promised:
            return got
        back = [seq for seq in queue if seq.status is SequenceStatus.PREEMPTED]
        if back:
            answer.equal(got, back[0], "Who lost a seat comes before all newcomers, the first in the queue first.")
            return got
        eldest, *others = self.newcomers()
        if self.overtaken[eldest.name] < FREELY and any(2 * seq.num_tokens <= eldest.num_tokens for seq in others):
            rule = f"Short before long: so far {self.overtaken[eldest.name]} have overtaken {eldest!r}."
            answer.require(got is not eldest, f"{got!r} ({got.num_tokens} tokens)", "somebody shorter", rule)
        for seq in self.newcomers():
            if seq.seq_id < got.seq_id:
                answer.require(self.overtaken[seq.name] < AT_MOST, f"{got!r}, past {seq!r} for the ninth time",
                               f"nobody overtaken more than {AT_MOST} times", "Nobody starves.")  # fmt: skip
        return got

    def seat(self) -> Any:
        """Ask, and give the seat."""
        seq = self.ask()
        if seq.status is SequenceStatus.WAITING:
            for other in self.newcomers():
                self.overtaken[other.name] += other.seq_id < seq.seq_id
        self.raw.waiting.remove(seq)
        self.raw.admit(seq)
        return seq

    def end(self, seq: Any) -> None:
        """The sequence is done."""
        self.raw.finish(seq, FinishReason.LENGTH)
        self.raw.running.remove(seq)


def start(answer: Answer, *sizes: int) -> Counter:
    answer.story.clear()
    counter = Counter(answer)
    counter.arrive(*sizes)
    return counter


def test_contract__one_of_the_queue(answer: Answer) -> None:
    """It returns one of the waiting sequences and changes nothing; asked again, it answers the same."""
    counter = start(answer, 7)
    answer.equal(counter.ask().name, "A", "Only one waits.")
    counter.arrive(3, 5, 2, 1, 2, 3)
    got = counter.ask(promised=False)  # whose turn it should be is the business of the tests below
    for _ in range(30):
        answer.equal(counter.ask(promised=False), got, "Nobody was seated and nobody came, so the answer is the same.")


def test_example__forty_nine_and_fifteen(answer: Answer) -> None:
    """The one that arrived first is four times as long as another, so it is not next."""
    counter = start(answer, 40, 9, 15)
    answer.require(counter.ask().name in "BC", "A", "B or C")


def test_boundary__shorter_but_not_by_half(answer: Answer) -> None:
    """Exactly half as long is short enough to go first; nobody shorter means that anybody may be next."""
    counter = start(answer, 10, 5)
    answer.equal(counter.ask().name, "B")
    counter = start(answer, 9, 9, 9)
    counter.seat()
    counter.seat()
    answer.require(counter.seat().status is SequenceStatus.RUNNING, "nobody", "the last one")


def test_boundary__who_lost_a_seat(answer: Answer) -> None:
    """Who lost a seat gets one before all newcomers, however long it is; of several, the first in the queue."""
    counter = start(answer, 30)
    seqs = [counter.seat()]
    counter.arrive(20)
    seqs.append(counter.seat())
    for seq in reversed(seqs):
        counter.raw.preempt(seq)
    counter.arrive(2, 3)
    answer.note("both were seated and have lost their seats; then two newcomers came")
    answer.equal([counter.seat(), counter.seat()], seqs)
    counter.seat()


def test_boundary__asking_is_not_overtaking(answer: Answer) -> None:
    """While the pool has no room, it is asked step after step; that overtakes nobody."""
    counter = start(answer, 40, 4, 4)
    for _ in range(30):
        got = counter.ask()
    answer.require(got.name in "BC", got, "B or C, after 30 questions as after one")
    counter.seat()
    for _ in range(30):
        counter.ask()


def test_boundary__short_and_long_of_any_size(answer: Answer) -> None:
    """Half as long is half as long, for few tokens and for many, and wherever the short one stands."""
    for sizes in ((2, 1), (3, 1), (1000, 500), (300, 140, 290), (40, *[50] * 20, 20)):
        start(answer, *sizes).ask()


def test_boundary__newcomers_between_two_questions(answer: Answer) -> None:
    """While the pool has no room, shorter ones keep coming, and the answer may change; that overtakes nobody."""
    counter = start(answer, 60)
    for size in range(29, 9, -1):
        counter.arrive(size)
        counter.ask()


def test_boundary__a_second_seat(answer: Answer) -> None:
    """Who lost its seat and gets it back overtakes nobody: it did so with its first seat."""
    counter = start(answer, 40, 4)
    answer.equal(counter.seat().name, "B")
    for _ in range(10):
        counter.raw.preempt(counter.raw.running[-1])
        answer.equal(counter.seat().name, "B")
        counter.ask()
    answer.note("B has lost its seat and got it back ten times")
    counter.arrive(4)
    counter.ask()


def test_boundary__those_who_came_before(answer: Answer) -> None:
    """Who arrived earlier and gets its seat earlier has overtaken nobody."""
    counter = start(answer, *[2] * 12, 40)
    for _ in range(12):
        counter.end(counter.seat())
    counter.arrive(3)
    counter.ask()


def test_boundary__several_long_ones(answer: Answer) -> None:
    """Not only the first is protected: every one of them is seated in time."""
    counter = start(answer, 50, 60, 40, 70)
    for _ in range(60):
        counter.arrive(2)
        counter.end(counter.seat())
    left = {seq.name for seq in counter.raw.waiting} & set("ABCD")
    answer.require(not left, f"{', '.join(sorted(left))} still waiting", "all four long ones seated after 60 seats")


def test_boundary__two_schedulers(answer: Answer) -> None:
    """Two schedulers do not know of each other."""
    one = start(answer, 40, 3)
    two = Counter(answer, "the other scheduler")
    two.arrive(50)
    for _ in range(4):
        one.arrive(3)
        two.arrive(4)
        one.end(one.seat())
        two.end(two.seat())
    fresh = Counter(answer, "a new scheduler")
    fresh.arrive(40, 9)
    answer.equal(fresh.ask().name, "B")


def test_oracle__random_arrivals(answer: Answer) -> None:
    """Whoever comes when, at every seat all three properties hold."""
    rng = answer.rng
    for _ in range(25):
        counter = start(answer)
        running: list[Any] = []
        for _ in range(40):
            if rng.random() < 0.6 or not counter.raw.waiting:
                counter.arrive(*(rng.choice([2, 3, 5, 8, 20, 50]) for _ in range(rng.randint(1, 2))))
            if rng.random() < 0.25:
                counter.ask()
            if rng.random() < 0.15 and counter.raw.running:
                counter.raw.preempt(counter.raw.running[-1])
            running = list(counter.raw.running)
            if running and rng.random() < 0.5:
                counter.end(rng.choice(running))
            counter.seat()


def test_oracle__a_long_one_under_a_stream_of_short_ones(answer: Answer) -> None:
    """However many short ones keep coming, the long one is seated after 4 to 8 of them."""
    for patience in (1, 2, 3):
        counter = start(answer, 60)
        seated: list[Any] = []
        while not seated or seated[-1].name != "A":
            counter.arrive(*[3] * patience)
            seated.append(counter.seat())
            counter.end(seated[-1])
            answer.require(len(seated) <= AT_MOST + 1, f"{len(seated)} seats, none for A", "A after 8 at the latest")
        answer.require(len(seated) > FREELY, f"A after {len(seated) - 1} others", "A after 4 others or more")


def test_invariant__inside_the_engine(answer: Answer) -> None:
    """In the real scheduler, with a tight pool and few seats, every request ends and all blocks come back."""
    rng = answer.rng
    for _ in range(10):
        answer.story.clear()
        options = Options(
            num_kvcache_blocks=rng.randint(6, 12),
            max_num_seqs=rng.randint(1, 4),
            max_num_batched_tokens=rng.randint(4, 16),
            scheduling_policy=rng.choice(["mixed", "prefill_first"]),
        )
        scheduler = make_scheduler(answer, options)
        ended, total = 0, 12
        for step in range(600):
            if step < total:
                scheduler.raw.add(Named(f"S{step}", [step * 99 + i for i in range(rng.randint(1, 20))], 5))
            seqs, is_prefill = scheduler.raw.schedule()
            tokens = [7 if s.num_computed_tokens + s.num_scheduled_tokens == s.num_tokens else None for s in seqs]
            scheduler.raw.postprocess(seqs, tokens, is_prefill)
            ended += sum(seq.is_finished for seq in seqs)
            whole(answer, scheduler)
            if ended == total and step >= total:
                break
        answer.equal(ended, total, "Every request ends.")
        answer.equal(len(scheduler.block_manager.free_block_ids), options.num_kvcache_blocks, "All blocks are free.")
