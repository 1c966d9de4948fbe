"""Grader of exercise 7.1: this rank's part of column- and row-parallel weights."""

from typing import Any

import torch

from nanovllm.layers.linear import ColumnParallelLinear, RowParallelLinear
from nanovllm.layers.parallel import TPGroup
from nanovllm.workbook.grading import Answer

IN_PLACE = "A parameter is filled in place: it is neither exchanged for another tensor nor a view of the loaded one."


def load(answer: Answer, cls: type[Any], loaded: torch.Tensor, size: int, bias: bool = False) -> list[torch.Tensor]:
    """What every rank holds after loading the weight [out, in] (or the bias [out] of such a layer)."""
    answer.story.clear()
    answer.note(f"{cls.__name__}: a loaded {'bias' if bias else 'weight'} {list(loaded.shape)} on {size} ranks")
    outputs = loaded.shape[0]
    inputs = 12 if bias else loaded.shape[1]
    before, parts = loaded.clone(), []
    for rank in range(size):
        layer = answer.parts.resolve(cls)(inputs, outputs, bias=bias, tp=TPGroup(rank, size))
        param = layer.bias if bias else layer.weight
        param.data.fill_(-7.0)
        address, kind = param.data_ptr(), (list(param.shape), param.dtype)
        result = layer.weight_loader(param, loaded)
        answer.equal(result, None, "It returns nothing.")
        answer.equal((list(param.shape), param.dtype), kind, "Shape and number format of the parameter stay.")
        answer.require(param.data_ptr() == address, "another tensor", "the same tensor, filled", IN_PLACE)
        parts.append(param.data.clone())
    answer.equal(loaded, before, "The loaded tensor belongs to all ranks and stays as it is.")
    return parts


def numbered(*shape: int) -> torch.Tensor:
    return torch.arange(float(torch.Size(shape).numel())).reshape(shape)


def test_contract__filled_in_place(answer: Answer) -> None:
    """The parameter is filled in place, keeps its shape, and is no view of the loaded tensor."""
    for cls, shape in ((ColumnParallelLinear, [3, 4]), (RowParallelLinear, [6, 2])):
        with answer.about("A column-parallel weight is cut by its outputs, a row-parallel one by its inputs."):
            parts = load(answer, cls, numbered(6, 4), 2)
            answer.equal([list(part.shape) for part in parts], [shape, shape])
        layer, loaded = answer.parts.resolve(cls)(4, 6, tp=TPGroup(0, 2)), numbered(6, 4)
        address = layer.weight.data_ptr()
        layer.weight_loader(layer.weight, loaded)
        loaded.fill_(99.0)
        answer.require(layer.weight.data_ptr() == address, "another tensor", "the same tensor, filled")
        answer.require(not bool((layer.weight == 99.0).any()), "a view of the loaded tensor", "a copy")


def test_example__six_outputs_on_three_ranks(answer: Answer) -> None:
    """Of 6 outputs on 3 ranks, rank 1 holds outputs 2 and 3; of 6 inputs, it holds inputs 2 and 3."""
    answer.equal(load(answer, ColumnParallelLinear, numbered(6, 2), 3)[1], numbered(6, 2)[2:4])
    answer.equal(load(answer, RowParallelLinear, numbered(2, 6), 3)[1], numbered(2, 6)[:, 2:4])


def test_oracle__together_they_are_the_whole(answer: Answer) -> None:
    """The ranks' parts, side by side in the order of the ranks, are the whole tensor."""
    for size in (1, 2, 3, 4):
        outputs, inputs = size * answer.rng.randint(1, 4), size * answer.rng.randint(1, 4) + 0
        weight = torch.randn(outputs, inputs, generator=torch.Generator().manual_seed(answer.rng.randrange(2**31)))
        answer.equal(torch.cat(load(answer, ColumnParallelLinear, weight, size), 0), weight)
        answer.equal(torch.cat(load(answer, RowParallelLinear, weight, size), 1), weight)


def test_oracle__a_square_weight(answer: Answer) -> None:
    """In a square weight outputs and inputs are still different things."""
    weight = numbered(4, 4)
    answer.equal(load(answer, ColumnParallelLinear, weight, 2)[1], weight[2:])
    answer.equal(load(answer, RowParallelLinear, weight, 2)[1], weight[:, 2:])


def test_boundary__column_bias_is_cut(answer: Answer) -> None:
    """A column-parallel layer's bias is cut like its outputs."""
    answer.equal(torch.cat(load(answer, ColumnParallelLinear, numbered(6), 3, bias=True)), numbered(6))


def test_boundary__row_bias_is_whole(answer: Answer) -> None:
    """A row-parallel layer has all outputs on every rank, so every rank keeps the whole bias."""
    for part in load(answer, RowParallelLinear, numbered(6), 3, bias=True):
        answer.equal(part, numbered(6))


def test_boundary__one_rank_holds_everything(answer: Answer) -> None:
    """Alone, a rank holds the whole weight."""
    for cls in (ColumnParallelLinear, RowParallelLinear):
        answer.equal(load(answer, cls, numbered(3, 5), 1)[0], numbered(3, 5))


def test_boundary__loaded_again(answer: Answer) -> None:
    """Who loads another weight into the same layer gets that one."""
    for cls, expected in ((ColumnParallelLinear, [[50.0, 51.0]]), (RowParallelLinear, [[50.0], [52.0]])):
        answer.story.clear()
        answer.note(f"{cls.__name__}: two weights [2, 2], one after the other, on rank 0 of 2")
        layer = answer.parts.resolve(cls)(2, 2, tp=TPGroup(0, 2))
        for start in (0.0, 50.0):
            layer.weight_loader(layer.weight, numbered(2, 2) + start)
        answer.equal(layer.weight.data, torch.tensor(expected))


def test_boundary__last_rank(answer: Answer) -> None:
    """The last rank's part ends with the last output, or input."""
    answer.equal(load(answer, ColumnParallelLinear, numbered(8, 4), 4)[3], numbered(8, 4)[6:])
    answer.equal(load(answer, RowParallelLinear, numbered(4, 8), 4)[3], numbered(4, 8)[:, 6:])


def test_boundary__another_dtype(answer: Answer) -> None:
    """A checkpoint in another number format is converted while it is copied."""
    answer.equal(load(answer, ColumnParallelLinear, numbered(4, 2).to(torch.bfloat16), 2)[1], numbered(4, 2)[2:])
    answer.equal(load(answer, RowParallelLinear, numbered(2, 4).to(torch.bfloat16), 2)[1], numbered(2, 4)[:, 2:])
    answer.equal(load(answer, RowParallelLinear, numbered(4).to(torch.bfloat16), 2, bias=True)[1], numbered(4))
