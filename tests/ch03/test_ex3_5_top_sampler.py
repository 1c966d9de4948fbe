"""Grader of exercise 3.5: top-k and top-p as the learner's own sampler and sampling parameters."""

import math
from typing import Any

import torch

from nanovllm.sampling_params import SamplingParams
from nanovllm.workbook.grading import Answer, type_of

DRAWS = 1_200  # few, so that an answer that goes row by row is fast enough
SLACK = 0.075  # more than five standard deviations of a share among DRAWS draws


def generator(answer: Answer) -> torch.Generator:
    return torch.Generator().manual_seed(answer.rng.randrange(2**31))


def draw(answer: Answer, logits: list[float], temperature: float = 1.0, **fields: Any) -> list[float]:
    """The shares of the tokens among many equal rows."""
    answer.story.clear()
    answer.note(f"{DRAWS} rows of logits {[round(v, 3) for v in logits]}, temperature {temperature}, {fields}")
    params = answer.TopParams(temperature=temperature, **fields)
    ids = answer.TopSampler().forward(
        torch.tensor(logits).expand(DRAWS, len(logits)), torch.full((DRAWS,), temperature), generator(answer), True,
        [params] * DRAWS,
    )  # fmt: skip
    return shares(ids, len(logits))


def shares(ids: torch.Tensor, size: int) -> list[float]:
    return [float(count) / len(ids) for count in torch.bincount(ids, minlength=size)]


def drawn(answer: Answer, got: list[float], expected: list[float]) -> None:
    """Exactly the tokens with a share are drawn, and in about these shares."""
    never = [i for i, share in enumerate(expected) if share == 0.0 and got[i] > 0.0]
    answer.require(not never, f"shares {got}: token {never[0] if never else 0} is drawn", f"shares {expected}")
    answer.equal(got, expected, tolerance=SLACK)


def logs(*probabilities: float) -> list[float]:
    return [math.log(p) for p in probabilities]


def slowly(logits: list[float], temperature: float, top_k: int, top_p: float) -> list[float]:
    """Token by token: what is left, and in which shares."""
    weights = [math.exp((value - max(logits)) / temperature) for value in logits]
    order = sorted(range(len(logits)), key=lambda i: (-logits[i], i))
    order = order[:top_k] if top_k else order
    total, kept, reached = sum(weights[i] for i in order), [], 0.0
    for i in order:
        if kept and reached >= top_p:
            break
        kept.append(i)
        reached += weights[i] / total
    left = sum(weights[i] for i in kept)
    return [weights[i] / left if i in kept else 0.0 for i in range(len(logits))]


def test_contract__params(answer: Answer) -> None:
    """TopParams is a SamplingParams with two more fields, which keep everything unless set."""
    answer.note("TopParams()")
    params = answer.TopParams()
    answer.require(isinstance(params, SamplingParams), type_of(params), "a subclass of SamplingParams")
    values = (params.temperature, params.max_tokens, params.ignore_eos, params.top_k, params.top_p)
    answer.equal(values, (1.0, 64, False, 0, 1.0))
    params = answer.TopParams(temperature=0.5, max_tokens=3, top_k=7, top_p=0.25)
    answer.equal((params.temperature, params.max_tokens, params.top_k, params.top_p), (0.5, 3, 7, 0.25),
                 "What is given for a field is what it holds.")  # fmt: skip


def test_contract__sampler(answer: Answer) -> None:
    """It returns one int64 id a row and changes none of its arguments."""
    answer.note("TopSampler().forward(three rows of seven logits, …)")
    logits, temperatures = torch.randn(3, 7), torch.tensor([1.0, 0.5, 2.0])
    before = logits.clone(), temperatures.clone()
    rows = [answer.TopParams(top_k=2), SamplingParams(), answer.TopParams(top_p=0.5)]
    kept = [repr(row) for row in rows]
    with answer.about("A row may have plain SamplingParams, without top_k and top_p: it keeps every token."):
        got = answer.TopSampler().forward(logits, temperatures, torch.Generator().manual_seed(3), True, list(rows))
    answer.equal((list(got.shape), got.dtype), ([3], torch.int64))
    answer.equal((logits, temperatures), before, "It may not change its inputs.")
    answer.equal([repr(row) for row in rows], kept, "It may not change the params, which are the request's.")
    temperatures = torch.tensor([1.0, 1e-6, 1e-7])
    before = logits.clone(), temperatures.clone()
    answer.TopSampler().forward(logits, temperatures, torch.Generator().manual_seed(3), True, list(rows))
    answer.equal((logits, temperatures), before, "It may not change its inputs, cold rows neither.")


def test_contract__the_generator_decides(answer: Answer) -> None:
    """All noise comes from the generator: the same seed draws the same tokens."""
    answer.note("TopSampler().forward(64 rows of 50 equal logits, …), twice with the same seed")
    logits, temperatures, rows = torch.zeros(64, 50), torch.ones(64), [answer.TopParams(top_k=25)] * 64
    runs = [
        answer.TopSampler().forward(logits, temperatures, torch.Generator().manual_seed(3), True, list(rows))
        for _ in range(2)
    ]
    answer.equal(runs[0], runs[1], "The same seed draws the same tokens: all noise comes from the generator.")


def test_contract__one_row(answer: Answer) -> None:
    """A step of one row gives one id in a tensor of one dimension."""
    for temperature in (1.0, 1e-6):
        answer.story.clear()
        answer.note(f"TopSampler().forward(one row of five logits, temperature {temperature}, …)")
        got = answer.TopSampler().forward(
            torch.zeros(1, 5), torch.tensor([temperature]), generator(answer), temperature > 1e-5,
            [answer.TopParams(top_k=2)],
        )  # fmt: skip
        answer.equal((list(got.shape), got.dtype), ([1], torch.int64))


def test_contract__one_sampler_for_many_steps(answer: Answer) -> None:
    """The engine asks the same sampler in every step: each time for other rows, and with new noise."""
    sampler, source = answer.TopSampler(), generator(answer)
    answer.note("one sampler, 40 rows of 8 equal logits a step")
    logits, temperatures = torch.zeros(40, 8), torch.ones(40)
    steps = [sampler.forward(logits, temperatures, source, True, [SamplingParams()] * 40) for _ in range(2)]
    answer.require(not torch.equal(*steps), "the same tokens in two steps", "new noise from the generator")
    got = sampler.forward(logits, temperatures, source, True, [answer.TopParams(top_k=1)] * 40)
    answer.equal(got, torch.zeros(40, dtype=torch.int64), "Every step has params of its own, here top_k=1.")
    cold = torch.full((40,), 1e-6)
    got = sampler.forward(logits, cold, source, True, [SamplingParams(temperature=1e-6)] * 40)
    answer.equal(got, torch.zeros(40, dtype=torch.int64), "Every step has temperatures of its own, here 1e-6.")


def test_example__forty_thirty_twenty_ten(answer: Answer) -> None:
    """Of (0.4, 0.3, 0.2, 0.1) top_k=3 leaves 4/9, 3/9, 2/9, and top_p=0.5 keeps the first two of these."""
    logits = logs(0.4, 0.3, 0.2, 0.1)
    drawn(answer, draw(answer, logits, top_k=3), [4 / 9, 3 / 9, 2 / 9, 0.0])
    drawn(answer, draw(answer, logits, top_k=3, top_p=0.5), [4 / 7, 3 / 7, 0.0, 0.0])


def test_oracle__top_k(answer: Answer) -> None:
    """Exactly the k most likely tokens are drawn, in proportion to their probabilities."""
    for top_k in (1, 2, 4, 6):
        logits = [answer.rng.uniform(-1.5, 1.5) for _ in range(6)]
        drawn(answer, draw(answer, logits, top_k=top_k), slowly(logits, 1.0, top_k, 1.0))


def test_oracle__top_p(answer: Answer) -> None:
    """Exactly the tokens that it takes to reach top_p are drawn, in proportion to their probabilities."""
    for top_p in (0.2, 0.5, 0.8, 0.95):
        logits = [answer.rng.uniform(-1.5, 1.5) for _ in range(6)]
        drawn(answer, draw(answer, logits, top_p=top_p), slowly(logits, 1.0, 0, top_p))


def test_oracle__both_and_a_temperature(answer: Answer) -> None:
    """The temperature comes first, then top_k, then top_p."""
    for _ in range(4):
        logits = [answer.rng.uniform(-2, 2) for _ in range(7)]
        temperature, top_k, top_p = (
            answer.rng.choice([0.6, 2.0]),
            answer.rng.randint(2, 5),
            answer.rng.uniform(0.4, 0.9),
        )
        got = draw(answer, logits, temperature, top_k=top_k, top_p=top_p)
        drawn(answer, got, slowly(logits, temperature, top_k, top_p))


def test_boundary__fields_are_checked(answer: Answer) -> None:
    """Values that make no sense are refused when the params are made, the inherited ones included."""
    wrong: list[dict[str, Any]] = [
        {"top_k": -1}, {"top_k": 1.5}, {"top_k": 2.0}, {"top_k": True}, {"top_k": None},
        {"top_k": "3"}, {"top_p": 0.0}, {"top_p": -0.1}, {"top_p": 1.01},
        {"top_p": math.nan}, {"temperature": 0.0}, {"max_tokens": 0},
    ]  # fmt: skip
    for fields in wrong:
        answer.story.clear()
        answer.note(f"TopParams({', '.join(f'{name}={value}' for name, value in fields.items())})")
        answer.raises(ValueError, lambda fields=fields: answer.TopParams(**fields))
    answer.TopParams(top_k=0, top_p=1.0)
    answer.TopParams(top_k=10**6, top_p=1e-9)
    answer.TopParams(top_p=1)


def test_boundary__the_crossing_token_stays(answer: Answer) -> None:
    """The token with which the sum reaches top_p is kept, and none behind it."""
    drawn(answer, draw(answer, logs(0.6, 0.4), top_p=0.7), [0.6, 0.4])
    drawn(answer, draw(answer, logs(0.5, 0.3, 0.2), top_p=0.51), [5 / 8, 3 / 8, 0.0])


def test_boundary__reached_exactly(answer: Answer) -> None:
    """Where the sum reaches top_p exactly, nothing more is kept."""
    drawn(answer, draw(answer, [0.0] * 4, top_p=0.5), [0.5, 0.5, 0.0, 0.0])
    drawn(answer, draw(answer, [0.0] * 4, top_p=0.25), [1.0, 0.0, 0.0, 0.0])
    drawn(answer, draw(answer, [0.0] * 2, top_p=0.5), [1.0, 0.0])


def test_boundary__at_least_one_token(answer: Answer) -> None:
    """A top_p below the largest probability still leaves the most likely token."""
    drawn(answer, draw(answer, logs(0.3, 0.6, 0.1), top_p=0.01), [0.0, 1.0, 0.0])


def test_boundary__top_p_counts_after_top_k(answer: Answer) -> None:
    """top_p adds up the probabilities of what top_k has left."""
    # Of (0.3, 0.3, 0.2, 0.2) top_k=2 leaves 1/2 and 1/2; one of them reaches 0.45, though 0.3 would not.
    drawn(answer, draw(answer, logs(0.31, 0.3, 0.2, 0.19), top_k=2, top_p=0.45), [1.0, 0.0, 0.0, 0.0])


def test_boundary__top_k_beyond_the_vocabulary(answer: Answer) -> None:
    """A top_k larger than the vocabulary keeps everything."""
    drawn(answer, draw(answer, logs(0.5, 0.5), top_k=50), [0.5, 0.5])


def test_boundary__equal_logits(answer: Answer) -> None:
    """Among equal logits the lower id is kept first, so top_k keeps exactly k of them."""
    drawn(answer, draw(answer, [1.0, 1.0, 1.0, 1.0], top_k=2), [0.5, 0.5, 0.0, 0.0])


def test_boundary__order_of_ids_does_not_matter(answer: Answer) -> None:
    """What is drawn are token ids, not places in a sorted list."""
    drawn(answer, draw(answer, logs(0.1, 0.2, 0.7), top_k=2), [0.0, 2 / 9, 7 / 9])


def test_boundary__plain_params(answer: Answer) -> None:
    """Rows with plain SamplingParams keep everything, also beside rows with top_k."""
    answer.note(f"{DRAWS} rows of three equal logits; every second one has top_k=1")
    rows = [answer.TopParams(top_k=1), SamplingParams()] * (DRAWS // 2)
    ids = answer.TopSampler().forward(torch.zeros(DRAWS, 3), torch.ones(DRAWS), generator(answer), True, rows)
    answer.equal(ids[0::2], torch.zeros(DRAWS // 2, dtype=torch.int64))
    answer.equal(shares(ids[1::2], 3), [1 / 3] * 3, tolerance=1.5 * SLACK)


def test_oracle__rows_are_independent(answer: Answer) -> None:
    """Every row draws for itself: rows do not share their luck, neighbours neither."""
    answer.note(f"{DRAWS} rows of two equal logits, top_k=2")
    rows = [answer.TopParams(top_k=2)] * DRAWS
    ids = answer.TopSampler().forward(torch.zeros(DRAWS, 2), torch.ones(DRAWS), generator(answer), True, rows)
    for distance in (1, 2, DRAWS // 2):
        together = (ids == ids.roll(distance)).double().mean().item()
        rule = f"Rows {distance} apart draw the same of two tokens in half of all cases."
        answer.equal(together, 0.5, tolerance=2 * SLACK, rule=rule)


def test_oracle__every_row_has_its_own_options(answer: Answer) -> None:
    """Temperature, top_k and top_p are those of the row itself, whatever its neighbours want."""
    options: list[tuple[float, int, float]] = [
        (1.0, 0, 0.6),
        (2.0, 3, 1.0),
        (0.5, 0, 1.0),
        (1e-6, 0, 1.0),
        (1.0, 4, 0.9),
    ]
    logits = [0.0, 1.0, 0.5, 1.5, -0.5]
    answer.note(f"{5 * DRAWS // 2} rows of logits {logits}; (temperature, top_k, top_p) in turns: {options}")
    rows = [answer.TopParams(temperature=t, top_k=k, top_p=p) for t, k, p in options] * (DRAWS // 2)
    temperatures = torch.tensor([row.temperature for row in rows])
    ids = answer.TopSampler().forward(
        torch.tensor(logits).expand(len(rows), 5), temperatures, generator(answer), True, rows
    )
    for place, (temperature, top_k, top_p) in enumerate(options):
        got, wanted = shares(ids[place :: len(options)], 5), slowly(logits, temperature, top_k, top_p)
        never = [i for i, share in enumerate(wanted) if share == 0.0 and got[i] > 0.0]
        answer.require(not never, f"shares {got} of row {place}", f"shares {wanted}")
        answer.equal(got, wanted, tolerance=1.5 * SLACK)


def test_boundary__large_logits(answer: Answer) -> None:
    """However large logits are, and however cool the row, no exponential overflows: rows keep their shares."""
    answer.note(f"{DRAWS} rows: logits (-400, 300, 300) at 1 and (-4, -5, -4 + 0.01 * ln 2) at 0.01 in turns, top_k=2")
    logits = torch.tensor([[-400.0, 300.0, 300.0], [-4.0, -5.0, -4.0 + 0.01 * math.log(2)]]).repeat(DRAWS // 2, 1)
    temperatures, rows = torch.tensor([1.0, 0.01]).repeat(DRAWS // 2), [answer.TopParams(top_k=2)] * DRAWS
    ids = answer.TopSampler().forward(logits, temperatures, generator(answer), True, rows)
    answer.equal(shares(ids[0::2], 3), [0.0, 0.5, 0.5], tolerance=1.5 * SLACK)
    answer.equal(shares(ids[1::2], 3), [1 / 3, 0.0, 2 / 3], tolerance=1.5 * SLACK)


def test_boundary__cold_rows(answer: Answer) -> None:
    """At 1e-5 and below the most likely token is returned, the lowest id where several are equal."""
    answer.note("rows of logits (1, 3, 3, 2), temperature 1e-6, top_k=3, top_p=0.99")
    params = answer.TopParams(temperature=1e-6, top_k=3, top_p=0.99)
    logits = torch.tensor([1.0, 3.0, 3.0, 2.0]).expand(100, 4)
    for needs_noise in (True, False):
        got = answer.TopSampler().forward(
            logits, torch.full((100,), 1e-6), generator(answer), needs_noise, [params] * 100
        )
        answer.equal(got, torch.ones(100, dtype=torch.int64))


def test_boundary__just_cold_and_just_warm(answer: Answer) -> None:
    """A row at exactly 1e-5 takes its most likely token; above that it draws, beside cold rows too."""
    for temperature in (1e-5, 1.5e-5, 1e-3, 0.2):
        answer.story.clear()
        logits = [0.0, temperature * math.log(2)]
        answer.note(f"{DRAWS} rows of logits (0, {temperature} * ln 2) at {temperature}, one at 1e-6 behind them")
        temperatures = torch.tensor([temperature] * DRAWS + [1e-6])
        rows = [answer.TopParams(temperature=temperature, top_k=2)] * (DRAWS + 1)
        ids = answer.TopSampler().forward(
            torch.tensor(logits).expand(DRAWS + 1, 2), temperatures, generator(answer), True, rows
        )
        answer.equal(int(ids[-1]), 1, "A cold row takes its most likely token.")
        drawn(answer, shares(ids[:-1], 2), [0.0, 1.0] if temperature == 1e-5 else [1 / 3, 2 / 3])
