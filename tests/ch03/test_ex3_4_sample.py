"""Grader of exercise 3.4: temperature sampling by the exponential race."""

import math
from typing import Any

import torch

from nanovllm.layers.sampler import Sampler
from nanovllm.workbook.grading import Answer

DRAWS = 20_000
SLACK = 0.02  # more than five standard deviations of a share among DRAWS draws


def make(answer: Answer) -> Any:
    answer.story.clear()
    return answer.watch(answer.parts.resolve(Sampler)(), "sampler")


def generator(answer: Answer) -> torch.Generator:
    return torch.Generator().manual_seed(answer.rng.randrange(2**31))


def shares(ids: torch.Tensor, size: int) -> list[float]:
    return [float(count) / len(ids) for count in torch.bincount(ids, minlength=size)]


def softmax(logits: list[float], temperature: float) -> list[float]:
    top = max(logits)
    weights = [math.exp((value - top) / temperature) for value in logits]
    return [weight / sum(weights) for weight in weights]


def test_contract__ids_and_inputs(answer: Answer) -> None:
    """It returns one int64 id a row and does not change its arguments."""
    for values, needs_noise in (([1.0, 0.5, 2.0], True), ([1.0, 1e-6, 1e-5], True), ([1e-6] * 3, False), ([0.7], True),
                                ([1e-6], True), ([1e-6], False)):  # fmt: skip
        sampler, temperatures = make(answer), torch.tensor(values)
        logits = torch.randn(len(values), 7, generator=generator(answer))
        before = logits.clone(), temperatures.clone()
        answer.note(f"(temperatures {values})")
        got = sampler.forward(logits, temperatures, generator(answer), needs_noise)
        answer.equal((list(got.shape), got.dtype), ([len(values)], torch.int64))
        answer.require(bool(((got >= 0) & (got < 7)).all()), got, "ids from 0 to 6")
        answer.equal((logits, temperatures), before, "It may not change its inputs.")


def test_contract__the_generator_decides(answer: Answer) -> None:
    """All noise comes from the generator: the same seed draws the same tokens, another seed others."""
    sampler, logits, temperatures = make(answer), torch.zeros(64, 50), torch.ones(64)
    runs = [sampler.forward(logits, temperatures, torch.Generator().manual_seed(seed), True) for seed in (5, 5, 6)]
    answer.equal(runs[0], runs[1], "The same seed draws the same tokens.")
    answer.require(not torch.equal(runs[0], runs[2]), "the same tokens", "other tokens with another seed")
    for source in (torch.Generator().manual_seed(5), None):
        answer.story.clear()
        one, two = (sampler.forward(logits, temperatures, source, True) for _ in range(2))
        what = "PyTorch's own (no generator was given)" if source is None else "the generator"
        answer.require(not torch.equal(one, two), "the same tokens", f"other noise in each step, from {what}",
                       "Every step draws anew: the noise goes on from where the generator stands.")  # fmt: skip


def test_example__three_tokens(answer: Answer) -> None:
    """Logits (0, ln 2, ln 4) at temperature 1 are drawn in shares of 1/7, 2/7 and 4/7."""
    sampler = make(answer)
    answer.note(f"{DRAWS} rows of logits (0, ln 2, ln 4), temperature 1")
    logits = torch.tensor([0.0, math.log(2), math.log(4)]).expand(DRAWS, 3)
    got = shares(sampler.forward(logits, torch.ones(DRAWS), generator(answer), True), 3)
    answer.equal(got, [1 / 7, 2 / 7, 4 / 7], tolerance=SLACK)


def test_oracle__distribution(answer: Answer) -> None:
    """The shares are those of softmax(logits / temperature): the temperature divides logits, not probabilities."""
    for temperature in (0.5, 1.0, 1.7, 4.0):
        sampler = make(answer)
        values = [answer.rng.uniform(-2, 2) for _ in range(6)]
        answer.note(f"{DRAWS} rows of logits {[round(v, 2) for v in values]}, temperature {temperature}")
        logits = torch.tensor(values).expand(DRAWS, 6)
        got = shares(sampler.forward(logits, torch.full((DRAWS,), temperature), generator(answer), True), 6)
        answer.equal(got, softmax(values, temperature), tolerance=SLACK)


def test_oracle__many_tokens(answer: Answer) -> None:
    """Every token of the vocabulary can be drawn, however many are more likely."""
    sampler, logits = make(answer), torch.linspace(0.0, 0.5, 400)
    answer.note("5,000 rows of 400 logits from 0 to 0.5, temperature 1")
    ids = sampler.forward(logits.expand(5000, 400), torch.ones(5000), generator(answer), True)
    expected = logits.softmax(-1).view(4, 100).sum(-1)
    got = torch.bincount(ids, minlength=400).view(4, 100).sum(-1).float() / 5000
    answer.equal(got, expected, tolerance=2 * SLACK, rule="Shares of the ids 0-99, 100-199, 200-299, 300-399.")


def test_oracle__each_row_has_its_own_temperature(answer: Answer) -> None:
    """Rows are divided by their own temperatures."""
    sampler = make(answer)
    answer.note(f"{DRAWS} rows of logits (0, 1, 2); temperatures 0.5 and 3 in turns")
    temperatures = torch.tensor([0.5, 3.0]).repeat(DRAWS // 2)
    ids = sampler.forward(torch.tensor([0.0, 1.0, 2.0]).expand(DRAWS, 3), temperatures, generator(answer), True)
    for first, temperature in ((0, 0.5), (1, 3.0)):
        answer.equal(shares(ids[first::2], 3), softmax([0.0, 1.0, 2.0], temperature), tolerance=1.5 * SLACK)


def test_oracle__rows_are_independent(answer: Answer) -> None:
    """Every entry has a clock of its own: rows do not share their luck, neighbours neither."""
    sampler = make(answer)
    answer.note(f"{DRAWS} rows of two equal logits")
    ids = sampler.forward(torch.zeros(DRAWS, 2), torch.ones(DRAWS), generator(answer), True)
    for distance in (1, 2, DRAWS // 4, DRAWS // 2):
        together = (ids == ids.roll(distance)).double().mean().item()
        rule = f"Rows {distance} apart draw the same of two tokens in half of all cases."
        answer.equal(together, 0.5, tolerance=2 * SLACK, rule=rule)


def test_oracle__one_sampler_for_many_steps(answer: Answer) -> None:
    """Each step has its own rows: what the step before was like does not matter."""
    sampler = make(answer)
    for values in ([1.0, 1e-6], [1e-6, 1.0], [1e-6, 4.0], [0.3, 1e-6]):
        answer.note(f"{DRAWS} rows of logits (0, 1), temperatures {values} in turns")
        ids = sampler.forward(
            torch.tensor([0.0, 1.0]).expand(DRAWS, 2), torch.tensor(values).repeat(DRAWS // 2), generator(answer), True
        )
        for first, temperature in enumerate(values):
            expected = softmax([0.0, 1.0], temperature) if temperature > 1e-5 else [0.0, 1.0]
            answer.equal(shares(ids[first::2], 2), expected, tolerance=1.5 * SLACK)


def test_boundary__cold_rows(answer: Answer) -> None:
    """At 1e-5 and below a row takes its largest logit, without noise, and without a NaN at any temperature."""
    sampler = make(answer)
    logits = torch.tensor([[1.0, 30.0, 29.9999], [5.0, 4.0, 3.0], [-80.0, -90.0, -70.0]]).repeat(200, 1)
    for temperature in (1e-5, 1e-6, 1.1e-10):
        answer.story.clear()
        got = sampler.forward(logits, torch.full((600,), temperature), generator(answer), True)
        answer.equal(got.view(200, 3), torch.tensor([1, 0, 2]).expand(200, 3))


def test_boundary__just_cold(answer: Answer) -> None:
    """A row at exactly 1e-5 takes its largest logit, however little larger that is."""
    sampler = make(answer)
    for temperature in (1e-5, 9e-6, 2e-6):
        answer.note(f"400 rows of logits (0, 1e-6), temperature {temperature}")
        got = sampler.forward(
            torch.tensor([0.0, 1e-6]).expand(400, 2), torch.full((400,), temperature), generator(answer), True
        )
        answer.equal(got, torch.ones(400, dtype=torch.int64))


def test_boundary__just_warm(answer: Answer) -> None:
    """A row above 1e-5 is drawn, as cool as it may be: logits that differ by t * ln 2 give shares of 1/3 and 2/3."""
    for temperature in (1.5e-5, 1e-4, 1e-3, 0.02, 0.2):
        sampler = make(answer)
        answer.note(f"{DRAWS} rows of logits (0, {temperature} * ln 2), temperature {temperature}")
        logits = torch.tensor([0.0, temperature * math.log(2)]).expand(DRAWS, 2)
        got = shares(sampler.forward(logits, torch.full((DRAWS,), temperature), generator(answer), True), 2)
        answer.equal(got, [1 / 3, 2 / 3], tolerance=SLACK)


def test_boundary__cold_and_warm_in_one_batch(answer: Answer) -> None:
    """A cold row beside warm ones is still the argmax, and the warm ones still draw."""
    sampler = make(answer)
    answer.note(f"{DRAWS} rows of logits (1, 1.1); every second one at 1e-6, the others at 1")
    temperatures = torch.tensor([1e-6, 1.0]).repeat(DRAWS // 2)
    ids = sampler.forward(torch.tensor([1.0, 1.1]).expand(DRAWS, 2), temperatures, generator(answer), True)
    answer.equal(shares(ids[0::2], 2), [0.0, 1.0])
    answer.equal(shares(ids[1::2], 2), softmax([1.0, 1.1], 1.0), tolerance=1.5 * SLACK)


def test_boundary__ties(answer: Answer) -> None:
    """Where equal logits are the largest of a cold row, the lowest id wins."""
    sampler, logits = make(answer), torch.zeros(50, 9)
    logits[:, [3, 5, 8]] = 2.0
    for needs_noise in (True, False):
        got = sampler.forward(logits, torch.full((50,), 1e-6), generator(answer), needs_noise)
        answer.equal(got, torch.full((50,), 3))


def test_boundary__very_hot(answer: Answer) -> None:
    """At a huge temperature all tokens are equally likely."""
    sampler = make(answer)
    answer.note(f"{DRAWS} rows of logits (-50, 0, 50), temperature 1e30")
    logits = torch.tensor([-50.0, 0.0, 50.0]).expand(DRAWS, 3)
    got = shares(sampler.forward(logits, torch.full((DRAWS,), 1e30), generator(answer), True), 3)
    answer.equal(got, [1 / 3] * 3, tolerance=SLACK)


def test_boundary__large_logits(answer: Answer) -> None:
    """However large logits are, and however cool the row, no exponential overflows: rows keep their shares."""
    sampler = make(answer)
    answer.note(f"{DRAWS} rows: logits (-400, 300, 300) at 1 and (-4, -5, -4 + 0.01 * ln 2) at 0.01 in turns")
    logits = torch.tensor([[-400.0, 300.0, 300.0], [-4.0, -5.0, -4.0 + 0.01 * math.log(2)]]).repeat(DRAWS // 2, 1)
    temperatures = torch.tensor([1.0, 0.01]).repeat(DRAWS // 2)
    ids = sampler.forward(logits, temperatures, generator(answer), True)
    answer.equal(shares(ids[0::2], 3), [0.0, 0.5, 0.5], tolerance=1.5 * SLACK)
    answer.equal(shares(ids[1::2], 3), [1 / 3, 0.0, 2 / 3], tolerance=1.5 * SLACK)


def test_boundary__no_noise_asked_for(answer: Answer) -> None:
    """needs_noise False says that all rows are cold, so each takes its largest logit."""
    sampler, logits = make(answer), torch.randn(40, 11, generator=generator(answer))
    got = sampler.forward(logits, torch.full((40,), 1e-6), None, False)
    answer.equal(got.tolist(), [row.index(max(row)) for row in logits.tolist()])


def test_boundary__low_precision_logits(answer: Answer) -> None:
    """bfloat16 logits far apart are drawn as well as float32 ones."""
    sampler = make(answer)
    answer.note(f"{DRAWS} bfloat16 rows of logits (0, 1)")
    logits = torch.tensor([0.0, 1.0], dtype=torch.bfloat16).expand(DRAWS, 2)
    got = shares(sampler.forward(logits, torch.ones(DRAWS), generator(answer), True), 2)
    answer.equal(got, softmax([0.0, 1.0], 1.0), tolerance=SLACK)
