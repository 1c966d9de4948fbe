"""Grader of exercise 7.3: the product of a row-parallel layer."""

from typing import Any

import torch

from nanovllm.layers.linear import RowParallelLinear
from nanovllm.layers.parallel import TPGroup
from nanovllm.workbook.grading import Answer, type_of
from nanovllm.workbook.oracles.ranks import on_ranks, random

CLOSE = 1e-5  # sums of a dozen float32 products in another order


def run(
    answer: Answer, weight: torch.Tensor, x: torch.Tensor, bias: torch.Tensor | None, size: int
) -> tuple[list[Any], list[int]]:
    """Every rank's result for its share of the inputs, and the collectives that it called."""
    answer.story.clear()
    said = "no bias" if bias is None else "a bias"
    answer.note(f"RowParallelLinear: weight {list(weight.shape)}, x {list(x.shape)}, {said}, {size} ranks")
    share = weight.shape[1] // size

    def work(tp: TPGroup) -> Any:
        columns = slice(tp.rank * share, (tp.rank + 1) * share)
        layer = answer.parts.resolve(RowParallelLinear)(weight.shape[1], weight.shape[0], bias=bias is not None, tp=tp)
        layer.to(weight.dtype)
        layer.weight.data.copy_(weight[:, columns])
        if bias is not None:
            layer.bias.data.copy_(bias)
        mine = x[..., columns].clone()
        if mine.dim() == 3:  # as a view whose rows do not lie one behind the other
            mine = mine.transpose(0, 1).contiguous().transpose(0, 1)
        before = mine.clone()
        result = layer(mine)
        answer.equal(mine, before, "It may not change its input.")
        return result

    return on_ranks(answer, size, work)


def slowly(weight: torch.Tensor, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    product = x.double() @ weight.double().T
    return (product if bias is None else product + bias.double()).float()


def test_contract__a_tensor_on_every_rank(answer: Answer) -> None:
    """It returns a tensor [..., out], the same on every rank, and leaves x as it is."""
    results, _ = run(answer, random(answer, 3, 4), random(answer, 2, 4), None, 2)
    for result in results:
        answer.require(isinstance(result, torch.Tensor), type_of(result), "a tensor")
        answer.equal(list(result.shape), [2, 3])


def test_example__431(answer: Answer) -> None:
    """The ranks hold 30 and 400, the bias is 1: both return 431."""
    weight, x, bias = torch.tensor([[3.0, 4.0]]), torch.tensor([[10.0, 100.0]]), torch.tensor([1.0])
    results, _ = run(answer, weight, x, bias, 2)
    answer.equal(results, [torch.tensor([[431.0]])] * 2)


def test_oracle__equals_one_rank(answer: Answer) -> None:
    """All ranks together compute what one rank with everything computes."""
    for size in (1, 2, 3, 4):
        for has_bias in (False, True):
            weight, x = random(answer, 5, 3 * size), random(answer, 4, 3 * size)
            bias = random(answer, 5) if has_bias else None
            results, _ = run(answer, weight, x, bias, size)
            answer.equal(results, [slowly(weight, x, bias)] * size, tolerance=CLOSE)


def test_boundary__bias_is_added_once(answer: Answer) -> None:
    """However many ranks there are, the bias is in the result once."""
    for size in (1, 2, 3, 4):
        for bias in (torch.tensor([5.0, -3.0]), torch.tensor([0.0, 2.0])):
            results, _ = run(answer, torch.zeros(2, size), torch.ones(1, size), bias, size)
            answer.equal(results, [bias[None]] * size, tolerance=CLOSE)


def test_boundary__every_rank_has_the_result(answer: Answer) -> None:
    """Ranks above 0 go on with the whole result too, bias included."""
    weight, x, bias = random(answer, 2, 6), random(answer, 1, 6), random(answer, 2)
    results, _ = run(answer, weight, x, bias, 3)
    answer.equal(results[2], slowly(weight, x, bias), tolerance=CLOSE)
    answer.equal(results[1], results[0], tolerance=CLOSE)


def test_boundary__one_collective(answer: Answer) -> None:
    """One sum over the ranks is enough."""
    for bias in (None, torch.ones(3)):
        _, calls = run(answer, random(answer, 3, 4), random(answer, 2, 4), bias, 2)
        answer.equal(calls, [1, 1])


def test_boundary__zeros_on_one_rank(answer: Answer) -> None:
    """A rank whose part is zero calls the sum like the others."""
    x = torch.tensor([[0.0, 0.0, 1.0, 2.0]])
    weight, bias = random(answer, 3, 4), random(answer, 3)
    results, _ = run(answer, weight, x, bias, 2)
    answer.equal(results, [slowly(weight, x, bias)] * 2, tolerance=CLOSE)


def test_boundary__other_number_formats(answer: Answer) -> None:
    """The product has the number format of x and weight."""
    for dtype in (torch.bfloat16, torch.float64):
        weight, x = torch.tensor([[3.0, 4.0], [1.0, 2.0]]).to(dtype), torch.tensor([[8.0, 16.0]]).to(dtype)
        for bias in (None, torch.tensor([2.0, 4.0]).to(dtype)):
            results, _ = run(answer, weight, x, bias, 2)
            answer.equal(results[1], slowly(weight, x, bias).to(dtype))


def test_boundary__other_shapes_of_x(answer: Answer) -> None:
    """x may have any number of dimensions in front of the last, and any number of rows."""
    for shape in ((4,), (1, 4), (2, 3, 4)):
        weight, x, bias = random(answer, 3, 4), random(answer, *shape), random(answer, 3)
        results, _ = run(answer, weight, x, bias, 2)
        answer.equal(results[0], slowly(weight, x, bias), tolerance=CLOSE)


def test_boundary__the_layer_stays(answer: Answer) -> None:
    """Neither weight nor bias changes; each call gives a tensor of its own, which later calls leave alone."""
    weight, bias = random(answer, 3, 4), random(answer, 3)

    def work(tp: TPGroup) -> Any:
        layer = answer.parts.resolve(RowParallelLinear)(4, 3, bias=True, tp=tp)
        layer.weight.data.copy_(weight[:, tp.rank * 2 : tp.rank * 2 + 2])
        layer.bias.data.copy_(bias)
        results = [layer(torch.full((1, 2), value)) for value in (1.0, 3.0, 1.0)]
        return results, layer.bias.data.clone(), layer.weight.data.clone()

    answer.note("the same layer called with ones, with threes, and with ones again")
    for rank, (results, kept, columns) in enumerate(on_ranks(answer, 2, work)[0]):
        answer.equal((kept, columns), (bias, weight[:, rank * 2 : rank * 2 + 2]))
        for result, value in zip(results, (1.0, 3.0, 1.0), strict=True):
            answer.equal(result, slowly(weight, torch.full((1, 4), value), bias), tolerance=CLOSE)
