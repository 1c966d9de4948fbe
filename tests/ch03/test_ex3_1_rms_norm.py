"""Grader of exercise 3.1: RMSNorm with the residual addition before it."""

import math
from typing import Any

import torch

from nanovllm.layers.layernorm import RMSNorm
from nanovllm.workbook.grading import Answer, type_of

CLOSE = 1e-5  # a few roundings of float32 on values around 1


def make(answer: Answer, weight: list[float], eps: float = 1e-6) -> Any:
    """A norm on the answer's code."""
    answer.story.clear()
    answer.note(f"norm: size {len(weight)}, weight {weight if len(weight) < 5 else '…'}, eps {eps}")
    norm = answer.parts.resolve(RMSNorm)(len(weight), eps)
    norm.weight.data = torch.tensor(weight)
    return answer.watch(norm, "norm")


def by_hand(row: list[float], weight: list[float], eps: float) -> list[float]:
    size = math.sqrt(sum(value * value for value in row) / len(row) + eps)
    return [value / size * factor for value, factor in zip(row, weight, strict=True)]


def random(answer: Answer, *shape: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(answer.rng.randrange(2**31))
    return torch.randn(*shape, generator=generator) * 3


def test_contract__what_comes_back(answer: Answer) -> None:
    """Without a residual one tensor comes back, with one a pair; the arguments are not changed."""
    norm = make(answer, [1.0, 2.0, 0.5])
    x, residual = torch.tensor([[1.0, 2.0, 3.0]]), torch.tensor([[0.5, -1.0, 4.0]])
    before = x.clone(), residual.clone()
    answer.require(isinstance(norm.forward(x), torch.Tensor), norm.forward(x), "a tensor")
    pair = norm.forward(x, residual)
    answer.require(isinstance(pair, tuple) and len(pair) == 2, type_of(pair), "a tuple of two tensors")
    answer.equal((x, residual), before, "It may not change its inputs.")
    answer.equal(norm.raw.weight.data, torch.tensor([1.0, 2.0, 0.5]), "It may not change the weight.")
    answer.equal(norm.forward(x), norm.forward(x), "Asked again, it answers the same.")


def test_example__three_and_four(answer: Answer) -> None:
    """Each vector is divided by the root of the mean of its squares, then multiplied with the weight."""
    norm = make(answer, [1.0, 2.0], eps=0.0)
    answer.equal(norm.forward(torch.tensor([[3.0, 4.0]])), torch.tensor([[0.848528, 2.262742]]), tolerance=CLOSE)


def test_oracle__every_vector_by_itself(answer: Answer) -> None:
    """Each vector along the last dimension is normed by its own size, whatever the other dimensions are."""
    for shape in ((1, 5), (4, 3), (2, 3, 6), (7,), (3, 2, 2, 4)):
        weight = [round(answer.rng.uniform(0.2, 2.0), 3) for _ in range(shape[-1])]
        eps = answer.rng.choice([1e-6, 1e-5])
        norm, x = make(answer, weight, eps), random(answer, *shape)
        rows = [by_hand(row, weight, eps) for row in x.reshape(-1, shape[-1]).tolist()]
        answer.equal(norm.forward(x), torch.tensor(rows).reshape(shape), tolerance=CLOSE)


def test_oracle__the_residual_is_added_first(answer: Answer) -> None:
    """With a residual, what is normed is the sum of both."""
    for shape in ((3, 6), (1, 2), (4, 3), (2, 3, 6), (7,), (3, 2, 2, 4)):
        weight = [round(answer.rng.uniform(0.2, 2.0), 3) for _ in range(shape[-1])]
        eps = answer.rng.choice([1e-6, 1e-5])
        norm, x, residual = make(answer, weight, eps), random(answer, *shape), random(answer, *shape)
        rows = [by_hand(row, weight, eps) for row in (x + residual).reshape(-1, shape[-1]).tolist()]
        normed, total = norm.forward(x, residual)
        answer.equal(normed, torch.tensor(rows).reshape(shape), tolerance=CLOSE)
        rule = "The second value is the sum of both, as it is: the next layer's residual."
        answer.equal(total, x + residual, rule, tolerance=CLOSE)


def test_oracle__one_norm_for_many_steps(answer: Answer) -> None:
    """What a norm has seen before does not matter: every call is about its own arguments."""
    weight = [0.5, 1.0, 2.0, 1.5]
    norm = make(answer, weight)
    for step in range(4):
        x, residual = random(answer, 3, 4), random(answer, 3, 4) if step % 2 else None
        total = x if residual is None else x + residual
        got = norm.forward(x, residual)
        expected = torch.tensor([by_hand(row, weight, 1e-6) for row in total.tolist()])
        answer.equal(got if residual is None else got[0], expected, tolerance=CLOSE)


def test_boundary__the_sum_is_the_next_residual(answer: Answer) -> None:
    """The second value is the sum itself, neither normed nor weighted: the total that the next layer adds to."""
    norm, x, residual = make(answer, [2.0, 3.0]), torch.tensor([[1.0, 2.0]]), torch.tensor([[10.0, 20.0]])
    answer.equal(norm.forward(x, residual)[1], torch.tensor([[11.0, 22.0]]), tolerance=CLOSE)


def test_boundary__any_size_of_numbers(answer: Answer) -> None:
    """Large numbers and small ones are normed alike, and their sum is not cut: hidden states reach thousands."""
    norm = make(answer, [1.0, 1.0], eps=1e-6)
    answer.equal(norm.forward(torch.tensor([[3e4, 4e4]])), torch.tensor([[0.848528, 1.131371]]), tolerance=CLOSE)
    normed, total = norm.forward(torch.tensor([[1e4, -4e4]]), torch.tensor([[2e4, 8e4]]))
    answer.equal(normed, torch.tensor([[0.848528, 1.131371]]), tolerance=CLOSE)
    answer.equal(total, torch.tensor([[3e4, 4e4]]))


def test_boundary__parts_of_a_larger_tensor(answer: Answer) -> None:
    """x may be a part of a larger tensor, whose vectors do not adjoin in memory (queries beside keys and values)."""
    norm, whole = make(answer, [1.0, 2.0, 0.5]), random(answer, 4, 5, 7)
    answer.note("x = whole[:, 1:4, 2:5], of shape [4, 3, 3]")
    x, residual = whole[:, 1:4, 2:5], whole[:, 2:5, 4:7]
    for total, got in ((x, norm.forward(x)), (x + residual, norm.forward(x, residual)[0])):
        rows = [by_hand(row, [1.0, 2.0, 0.5], 1e-6) for row in total.reshape(-1, 3).tolist()]
        answer.equal(got, torch.tensor(rows).reshape(4, 3, 3), tolerance=CLOSE)


def test_boundary__a_zero_vector(answer: Answer) -> None:
    """A vector of zeros stays zeros: eps keeps the division whole."""
    norm = make(answer, [1.0, 1.0, 1.0])
    answer.equal(norm.forward(torch.zeros(2, 3)), torch.zeros(2, 3))


def test_boundary__eps_stands_inside_the_root(answer: Answer) -> None:
    """eps is added to the mean of the squares, before the root is taken, with a residual and without."""
    norm, half = make(answer, [1.0, 1.0], eps=3.0), torch.tensor([[0.5, 0.5]])
    answer.equal(norm.forward(torch.tensor([[1.0, 1.0]])), half, tolerance=CLOSE)
    normed, _ = norm.forward(torch.tensor([[0.75, 0.25]]), torch.tensor([[0.25, 0.75]]))
    answer.equal(normed, half, tolerance=CLOSE)


def test_boundary__no_mean_is_subtracted(answer: Answer) -> None:
    """Equal numbers stay equal numbers: RMSNorm subtracts no mean."""
    norm = make(answer, [1.0, 1.0, 1.0, 1.0], eps=0.0)
    answer.equal(norm.forward(torch.full((1, 4), 7.0)), torch.ones(1, 4), tolerance=CLOSE)


def test_boundary__a_zero_residual_is_a_residual(answer: Answer) -> None:
    """A residual of zeros is one: two values come back."""
    norm, x = make(answer, [1.0, 1.0]), torch.tensor([[3.0, 4.0]])
    pair = norm.forward(x, torch.zeros(1, 2))
    answer.require(isinstance(pair, tuple) and len(pair) == 2, type_of(pair), "a tuple of two tensors")
    answer.equal(pair[1], x)
