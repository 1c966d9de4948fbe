"""Grader of exercise 2.3: the loop of generate, on an engine whose steps are written down beforehand."""

from collections.abc import Callable

from nanovllm.workbook.grading import Answer, type_of

Step = tuple[list[tuple[int, list[int]]], int]


class ScriptedEngine:
    """Steps from a script; each takes the seconds written beside it. `pause`: what drawing the progress bar takes, and
    asking whether all is done; apart from these, time does not pass."""

    def __init__(self, answer: Answer, steps: list[Step], seconds: list[float] | None = None, start: float = 0.0,
                 pause: float = 0.0) -> None:  # fmt: skip
        self.answer, self.steps, self.time, self.pause = answer, list(steps), start, pause
        self.seconds = seconds or [0.5] * len(steps)
        self.reports: list[tuple[str, int, float]] = []
        self.done = 0

    def step(self) -> Step:
        if self.done == len(self.steps):
            self.answer.reject("one more step()", "no step once is_finished() says True")
        finished, num_tokens = self.steps[self.done]
        self.time += self.seconds[self.done]
        self.done += 1
        self.answer.note(f"step() -> ({finished}, {num_tokens})")
        return [(seq_id, list(token_ids)) for seq_id, token_ids in finished], num_tokens

    def is_finished(self) -> bool:
        self.time += self.pause
        return self.done == len(self.steps)

    def report(self, phase: str, num_tokens: int, seconds: float) -> None:
        self.answer.note(f"report({phase!r}, {num_tokens}, {seconds:g})")
        self.reports.append((phase, num_tokens, seconds))
        self.time += self.pause

    def clock(self) -> float:
        return self.time


def run(answer: Answer, seq_ids: list[int], steps: list[Step], seconds: list[float] | None = None,
        start: float = 0.0, pause: float = 0.0) -> tuple[object, ScriptedEngine]:  # fmt: skip
    """The answer's loop on a script."""
    answer.story.clear()
    answer.note(f"drive({seq_ids}, ...), an engine of {len(steps)} steps")
    engine = ScriptedEngine(answer, steps, seconds, start, pause)
    ids = list(seq_ids)
    got = answer.drive(ids, engine.step, engine.is_finished, engine.report, engine.clock)
    answer.equal(ids, seq_ids, "It may not change its inputs.")
    answer.equal(engine.done, len(steps), "The loop goes on until is_finished() says True.")
    return got, engine


def test_contract__a_list_of_lists(answer: Answer) -> None:
    """It returns a list with the token ids of each request, and starts anew when it is called again."""
    steps: list[Step] = [([], 4), ([(3, [9, 8])], -1)]
    with answer.about("Steps are made until the engine is done, and what each of them has finished is kept."):
        got, _ = run(answer, [3], steps)
    answer.require(isinstance(got, list), type_of(got), "a list")
    answer.equal(got, [[9, 8]], "A request's result is the list of its token ids, without its number.")
    got, _ = run(answer, [4], [([(4, [1])], 2)])
    answer.equal(got, [[1]], "A second call knows nothing of the first.")


def test_example__the_second_finishes_first(answer: Answer) -> None:
    """Results come in the order of seq_ids, however early each finished."""
    steps: list[Step] = [([], 12), ([(1, [7, 2])], -2), ([(0, [5, 6, 2])], -1)]
    got, engine = run(answer, [0, 1], steps, [3.0, 1.0, 0.25])
    answer.equal(got, [[5, 6, 2], [7, 2]])
    rule = "A positive count is a prefill of so many tokens, a negative one a decode of so many rows."
    answer.equal(engine.reports, [("Prefill", 12, 3.0), ("Decode", 2, 1.0), ("Decode", 1, 0.25)], rule)


def test_boundary__a_request_that_ends_in_its_prefill(answer: Answer) -> None:
    """A request may end in any step: with max_tokens=1 it ends in the prefill."""
    got, engine = run(answer, [0, 1], [([(0, [4])], 9), ([(1, [6])], 7)])
    answer.equal(got, [[4], [6]])
    answer.equal([report[:2] for report in engine.reports], [("Prefill", 9), ("Prefill", 7)])


def test_boundary__several_end_in_one_step(answer: Answer) -> None:
    """One step may end several requests, the last one listed first."""
    got, _ = run(answer, [0, 1, 2], [([], 30), ([(2, [3]), (0, [1]), (1, [2])], -3)])
    answer.equal(got, [[1], [2], [3]])


def test_boundary__requests_of_somebody_else(answer: Answer) -> None:
    """What was queued by hand is run to its end, and is not part of our results."""
    steps: list[Step] = [([(90, [1, 1])], 5), ([(7, [2])], -2), ([], -1), ([(91, [3, 3])], -1)]
    got, engine = run(answer, [7], steps)
    answer.equal(got, [[2]])
    answer.equal(len(engine.reports), 4, "Steps of other requests are reported as well.")


def test_boundary__order_of_the_prompts(answer: Answer) -> None:
    """The order is that of seq_ids, not that of the numbers, and a result may be empty."""
    got, _ = run(answer, [5, 2, 9], [([(2, [20]), (9, [])], 8), ([(5, [50])], -1)])
    answer.equal(got, [[50], [20], []])


def test_boundary__nothing_to_do(answer: Answer) -> None:
    """An engine with nothing to do is not stepped, and no prompts give no results."""
    got, engine = run(answer, [], [])
    answer.equal(got, [])
    answer.equal(engine.reports, [])
    got, engine = run(answer, [], [([(1, [5])], -1)])
    answer.equal(got, [])
    got, engine = run(answer, [4], [([], 0), ([(4, [5])], 3)])
    answer.equal(got, [[5]])
    answer.equal([report[:2] for report in engine.reports], [("Prefill", 3)], "A step that did nothing has no phase.")


def test_boundary__seconds_of_one_step(answer: Answer) -> None:
    """A report tells what its own step took, not what the loop took so far."""
    steps: list[Step] = [([], 10), ([], -1), ([], -1), ([(0, [1, 2, 3])], -1)]
    _, engine = run(answer, [0], steps, [8.0, 0.25, 0.5, 2.0], start=1000.0)
    answer.equal([report[2] for report in engine.reports], [8.0, 0.25, 0.5, 2.0], tolerance=1e-9)


def test_boundary__seconds_of_the_step_alone(answer: Answer) -> None:
    """What the progress bar takes, and what asking for the end takes, is not the step's."""
    steps: list[Step] = [([], 10), ([], -1), ([(0, [1, 2])], -1)]
    _, engine = run(answer, [0], steps, [8.0, 0.25, 2.0], pause=64.0)
    answer.equal([report[2] for report in engine.reports], [8.0, 0.25, 2.0], tolerance=1e-9)


def test_boundary__one_token(answer: Answer) -> None:
    """The sign tells the phase: a prefill of one token is a prefill, a decode of one row a decode."""
    _, engine = run(answer, [0], [([], 1), ([], -1), ([(0, [5, 6])], -1)])
    answer.equal([report[:2] for report in engine.reports], [("Prefill", 1), ("Decode", 1), ("Decode", 1)])


def test_boundary__an_error_comes_out(answer: Answer) -> None:
    """An error of a step is the caller's to know: it ends the loop, and comes out as it is."""
    for kind in (RuntimeError, ValueError, KeyboardInterrupt):
        answer.story.clear()
        answer.note(f"drive([0], ...), an engine whose second step raises a {kind.__name__}")
        engine = ScriptedEngine(answer, [([], 4), ([], -1), ([(0, [1])], -1)])

        def step(engine: ScriptedEngine = engine, kind: type[BaseException] = kind) -> Step:
            if engine.done == 1:
                engine.done = 2  # whoever asks again gets the third step
                raise kind("out of luck")
            return engine.step()

        def act(engine: ScriptedEngine = engine, step: Callable[[], Step] = step) -> object:
            return answer.drive([0], step, engine.is_finished, engine.report, engine.clock)

        answer.raises(kind, act)


def test_boundary__a_long_run(answer: Answer) -> None:
    """However many steps it takes: thousands are usual."""
    steps: list[Step] = [([], 4), *([([], -1)] * 3000), ([(0, [1])], -1)]
    got, engine = run(answer, [0], steps)
    answer.equal(got, [[1]])
    answer.equal(len(engine.reports), 3002)


def test_oracle__random_engines(answer: Answer) -> None:
    """Whatever finishes when: our results in our order, and a report after each step that did something."""
    rng = answer.rng
    for _ in range(120):
        others = rng.sample(range(100), rng.randint(0, 3))
        ours = rng.sample(range(100, 200), rng.randint(0, 5))
        texts = {seq_id: [rng.randint(0, 50) for _ in range(rng.randint(1, 4))] for seq_id in (*others, *ours)}
        left = rng.sample(list(texts), len(texts))
        steps: list[Step] = []
        while left:
            ended = [left.pop() for _ in range(min(len(left), rng.choice([0, 0, 1, 1, 2])))]
            count = rng.choice([rng.randint(1, 90), -rng.randint(1, 9), -rng.randint(1, 9), 0 if not ended else 3])
            steps.append(([(seq_id, texts[seq_id]) for seq_id in ended], count))
        seconds = [rng.randint(1, 40) / 8 for _ in steps]
        pause = rng.choice([0.0, 0.5, 3.0])
        got, engine = run(answer, ours, steps, seconds, start=rng.randint(0, 99), pause=pause)
        answer.equal(got, [texts[seq_id] for seq_id in ours])
        expected = [("Prefill" if count > 0 else "Decode", abs(count), took)
                    for (_, count), took in zip(steps, seconds, strict=True) if count]  # fmt: skip
        answer.equal(engine.reports, expected, "One report for each step that did something, about this step alone.")
