"""The sampler draws from softmax(logits / temperature), and is an argmax in the cold."""

import pytest
import torch

from nanovllm.layers.sampler import Sampler


def draws(logits: list[float], temperature: float, count: int, seed: int = 0) -> torch.Tensor:
    """Relative frequency of each token in `count` draws."""
    generator = torch.Generator().manual_seed(seed)
    rows = torch.tensor([logits]).expand(count, -1)
    ids = Sampler()(rows, torch.full((count,), temperature), generator, True)
    return torch.bincount(ids, minlength=len(logits)) / count


@pytest.mark.parametrize("temperature", [0.3, 0.6, 1.0, 1.7, 10.0])
def test_frequencies_follow_the_softmax(temperature: float) -> None:
    logits = [2.0, 1.0, 0.0, -1.0, 1.9, -30.0]
    want = torch.softmax(torch.tensor(logits) / temperature, 0)
    count = 100_000
    error = (draws(logits, temperature, count) - want).abs()
    assert (error < 5 * (want * (1 - want) / count).sqrt() + 1e-4).all()


def test_temperature_scales_the_logits_and_not_the_probabilities() -> None:
    """At 0.5, logits (1, 0) give e^2 : 1; a temperature applied after the softmax would give another ratio."""
    first, second = draws([1.0, 0.0], 0.5, 100_000)
    assert abs(float(first / second) - 7.389) < 0.3


def test_huge_temperature_is_uniform_and_finite() -> None:
    frequency = draws([100.0, 0.0, -100.0, 50.0], 1e30, 40_000)
    assert (frequency - 0.25).abs().max() < 0.02


@pytest.mark.parametrize("needs_noise", [True, False])
@pytest.mark.parametrize("temperature", [1e-5, 1e-6, 2e-10])
def test_cold_rows_take_the_lowest_of_the_best(temperature: float, needs_noise: bool) -> None:
    logits = torch.tensor([[1.0, 3.0, 3.0, 2.0], [5.0, -1e30, 5.0, 5.0], [-1e38, -1e38, -3e38, -1e38]])
    ids = Sampler()(logits, torch.full((3,), temperature), torch.Generator().manual_seed(1), needs_noise)
    assert ids.tolist() == [1, 0, 0]


def test_rows_of_one_batch_keep_their_own_temperature() -> None:
    logits = torch.tensor([[0.0, 0.1]]).repeat(2000, 1)
    temperatures = torch.tensor([1e-6, 1.0]).repeat(1000)
    ids = Sampler()(logits, temperatures, torch.Generator().manual_seed(3), True)
    assert (ids[0::2] == 1).all()
    assert 350 < int((ids[1::2] == 0).sum()) < 650


def test_bfloat16_logits_tie_exactly_and_the_lowest_id_wins() -> None:
    logits = torch.tensor([[7.0, 8.001, 8.0, 8.002]], dtype=torch.bfloat16)
    for needs_noise in (True, False):
        assert Sampler()(logits, torch.tensor([1e-6]), None, needs_noise).tolist() == [1]


def test_wide_vocabulary_ties() -> None:
    """The argmax works on pieces of a row; the lowest id must win across them too."""
    for dtype in (torch.float32, torch.bfloat16):
        logits = torch.zeros(3, 49_152, dtype=dtype)
        for row, best in enumerate([(40_001, 17, 49_151), (49_151, 49_150), (0, 49_151)]):
            logits[row, list(best)] = 4.0
        ids = Sampler()(logits, torch.full((3,), 1e-6), None, False)
        assert ids.tolist() == [17, 49_150, 0]


def test_a_seeded_generator_repeats() -> None:
    logits, temperatures = torch.randn(50, 30), torch.full((50,), 1.0)
    first, again, other = (
        Sampler()(logits, temperatures, torch.Generator().manual_seed(seed), True) for seed in (7, 7, 8)
    )
    assert torch.equal(first, again) and not torch.equal(first, other)


def test_noise_of_zero_spoils_no_cold_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """Exp(1) rounds to 0 now and then; its logarithm is infinite, and 0 times that is no number."""
    monkeypatch.setattr(torch.Tensor, "exponential_", lambda self, generator=None: self.zero_())
    logits = torch.tensor([[1.0, 3.0, 2.0], [1.0, 3.0, 2.0]])
    assert Sampler()(logits, torch.tensor([1e-6, 1.0])).tolist() == [1, 1]
