"""Grader of exercise 7.2: this rank's share of each of several merged products."""

from typing import Any

import torch

from nanovllm.layers.linear import MergedColumnParallelLinear, QKVParallelLinear
from nanovllm.layers.parallel import TPGroup
from nanovllm.workbook.grading import Answer

EMPTY = -7.0


def numbered(start: int, *shape: int) -> torch.Tensor:
    return torch.arange(float(torch.Size(shape).numel())).reshape(shape) + start


def merged(answer: Answer, outputs: list[int], size: int, rank: int, bias: bool = False) -> Any:
    answer.story.clear()
    answer.note(f"MergedColumnParallelLinear: products of {outputs} outputs, 3 inputs, rank {rank} of {size}")
    layer = answer.parts.resolve(MergedColumnParallelLinear)(3, outputs, bias=bias, tp=TPGroup(rank, size))
    for param in layer.parameters():
        param.data.fill_(EMPTY)
    return layer


def qkv(answer: Answer, heads: int, kv_heads: int, dim: int, size: int, rank: int, bias: bool = False) -> Any:
    answer.story.clear()
    answer.note(f"QKVParallelLinear: {heads} heads, {kv_heads} kv heads of {dim}, 3 inputs, rank {rank} of {size}")
    layer = answer.parts.resolve(QKVParallelLinear)(3, dim, heads, kv_heads, bias=bias, tp=TPGroup(rank, size))
    for param in layer.parameters():
        param.data.fill_(EMPTY)
    return layer


def load(answer: Answer, layer: Any, param: Any, loaded: torch.Tensor, shard_id: Any) -> None:
    answer.note(f"load {shard_id!r}: {list(loaded.shape)}")
    before, address, kind = loaded.clone(), param.data_ptr(), (list(param.shape), param.dtype)
    answer.equal(layer.weight_loader(param, loaded, shard_id), None, "It returns nothing.")
    answer.equal(loaded, before, "The loaded tensor stays as it is.")
    answer.equal((list(param.shape), param.dtype), kind, "Shape and number format of the parameter stay.")
    rule = "A parameter is filled in place: it is not exchanged for another tensor."
    answer.require(param.data_ptr() == address, "another tensor", "the same tensor, filled", rule)


def cut(loaded: torch.Tensor, size: int, rank: int) -> torch.Tensor:
    """Output by output: those whose number falls into this rank's share."""
    share = len(loaded) // size
    return torch.stack([row for number, row in enumerate(loaded) if number // share == rank])


def test_contract__filled_in_place(answer: Answer) -> None:
    """The parameter is filled in place and is no view of the loaded tensor."""
    for layer, shard_id, loaded in (
        (merged(answer, [4, 4], 2, 1), 0, numbered(0, 4, 3)),
        (qkv(answer, 4, 2, 2, 2, 1), "q", numbered(0, 8, 3)),
    ):
        address = layer.weight.data_ptr()
        load(answer, layer, layer.weight, loaded, shard_id)
        loaded.fill_(99.0)
        answer.require(layer.weight.data_ptr() == address, "another tensor", "the same tensor, filled")
        answer.require(not bool((layer.weight == 99.0).any()), "a view of the loaded tensor", "a copy")


def test_example__rank_1_of_2_and_rank_2_of_3(answer: Answer) -> None:
    """The two examples of the docstrings."""
    layer = merged(answer, [4, 4], 2, 1)
    gate, up = numbered(0, 4, 3), numbered(100, 4, 3)
    load(answer, layer, layer.weight, gate, 0)
    load(answer, layer, layer.weight, up, 1)
    answer.equal(layer.weight.data, torch.cat([gate[2:], up[2:]]))
    layer = qkv(answer, 9, 3, 2, 3, 2)
    q, k, v = numbered(0, 18, 3), numbered(100, 6, 3), numbered(200, 6, 3)
    for shard_id, loaded in (("q", q), ("k", k), ("v", v)):
        load(answer, layer, layer.weight, loaded, shard_id)
    answer.equal(layer.weight.data, torch.cat([q[12:], k[4:], v[4:]]))


def test_oracle__merged_products(answer: Answer) -> None:
    """Behind one another: this rank's share of each product, whatever the order of loading."""
    for size in (1, 2, 3):
        outputs = [size * answer.rng.randint(1, 4) for _ in range(answer.rng.randint(2, 4))]
        loaded = [numbered(1000 * i, count, 3) for i, count in enumerate(outputs)]
        for rank in range(size):
            layer = merged(answer, outputs, size, rank)
            for shard_id in answer.rng.sample(range(len(outputs)), len(outputs)):
                load(answer, layer, layer.weight, loaded[shard_id], shard_id)
            answer.equal(layer.weight.data, torch.cat([cut(whole, size, rank) for whole in loaded]))


def test_oracle__qkv(answer: Answer) -> None:
    """Behind one another: this rank's queries, keys and values, whatever the order of loading."""
    for size, heads, kv_heads, dim in ((1, 3, 1, 2), (2, 4, 2, 3), (3, 9, 3, 4), (2, 8, 8, 1)):
        whole = {"q": numbered(0, heads * dim, 3), "k": numbered(1000, kv_heads * dim, 3),
                 "v": numbered(2000, kv_heads * dim, 3)}  # fmt: skip
        for rank in range(size):
            layer = qkv(answer, heads, kv_heads, dim, size, rank)
            for shard_id in answer.rng.sample("qkv", 3):
                load(answer, layer, layer.weight, whole[shard_id], shard_id)
            answer.equal(layer.weight.data, torch.cat([cut(whole[name], size, rank) for name in "qkv"]))


def test_boundary__other_parts_stay(answer: Answer) -> None:
    """Loading one product leaves the other products' parts as they are."""
    layer = merged(answer, [2, 4, 2], 2, 0)
    load(answer, layer, layer.weight, numbered(0, 4, 3), 1)
    answer.equal((layer.weight.data != EMPTY).any(1).tolist(), [False, True, True, False])
    layer = qkv(answer, 4, 2, 1, 2, 1)
    load(answer, layer, layer.weight, numbered(0, 2, 3), "k")
    answer.equal((layer.weight.data != EMPTY).any(1).tolist(), [False, False, True, False])


def test_boundary__loaded_again(answer: Answer) -> None:
    """Who loads other weights into the same layer gets those."""
    layer = qkv(answer, 4, 2, 1, 2, 1)
    for start in (0, 50):
        for shard_id, outputs in (("q", 4), ("k", 2), ("v", 2)):
            load(answer, layer, layer.weight, numbered(start, outputs, 3), shard_id)
    answer.equal(layer.weight.data, torch.cat([cut(numbered(50, outputs, 3), 2, 1) for outputs in (4, 2, 2)]))
    layer = merged(answer, [4, 2], 2, 1)
    for start in (0, 50):
        load(answer, layer, layer.weight, numbered(start, 4, 3), 0)
    answer.equal(layer.weight.data[:2], numbered(50, 4, 3)[2:])


def test_boundary__sizes_differ(answer: Answer) -> None:
    """Each product is cut by its own size: keys are fewer than queries, and products may differ."""
    layer = qkv(answer, 6, 2, 1, 2, 1)
    k = numbered(0, 2, 3)
    load(answer, layer, layer.weight, k, "k")
    answer.equal(layer.weight.data[3:4], k[1:])
    layer = merged(answer, [2, 6], 2, 1)
    second = numbered(0, 6, 3)
    load(answer, layer, layer.weight, second, 1)
    answer.equal(layer.weight.data[1:], second[3:])


def test_boundary__biases(answer: Answer) -> None:
    """Biases [out] are cut in the same way."""
    layer = merged(answer, [4, 2], 2, 1, bias=True)
    load(answer, layer, layer.bias, numbered(0, 4), 0)
    load(answer, layer, layer.bias, numbered(50, 2), 1)
    answer.equal(layer.bias.data, torch.tensor([2.0, 3.0, 51.0]))
    layer = qkv(answer, 4, 2, 1, 2, 1, bias=True)
    for shard_id, loaded in (("v", numbered(80, 2)), ("q", numbered(0, 4)), ("k", numbered(50, 2))):
        load(answer, layer, layer.bias, loaded, shard_id)
    answer.equal(layer.bias.data, torch.tensor([2.0, 3.0, 51.0, 81.0]))


def test_boundary__another_dtype(answer: Answer) -> None:
    """A checkpoint in another number format is converted while it is copied."""
    layer = merged(answer, [2, 2], 2, 1)
    load(answer, layer, layer.weight, numbered(0, 2, 3).to(torch.bfloat16), 1)
    answer.equal(layer.weight.data[1:], numbered(0, 2, 3)[1:])
    layer = qkv(answer, 4, 2, 1, 2, 1)
    load(answer, layer, layer.weight, numbered(0, 2, 3).to(torch.bfloat16), "v")
    answer.equal(layer.weight.data[3:], numbered(0, 2, 3)[1:])


def test_boundary__one_rank_holds_everything(answer: Answer) -> None:
    """Alone, a rank holds all products whole."""
    layer = merged(answer, [3, 2], 1, 0)
    load(answer, layer, layer.weight, numbered(0, 3, 3), 0)
    load(answer, layer, layer.weight, numbered(90, 2, 3), 1)
    answer.equal(layer.weight.data, torch.cat([numbered(0, 3, 3), numbered(90, 2, 3)]))
