"""Linear layers whole and cut over ranks: the shards, put together by hand, equal the whole product."""

from dataclasses import dataclass, field

import pytest
import torch
from torch import Tensor, nn

from nanovllm.errors import ConfigError
from nanovllm.layers.linear import (
    ColumnParallelLinear,
    MergedColumnParallelLinear,
    QKVParallelLinear,
    ReplicatedLinear,
    RowParallelLinear,
)
from nanovllm.layers.parallel import TPGroup, dividing_sizes


@dataclass(frozen=True)
class Rank(TPGroup):
    """A rank whose all-reduce adds what the other ranks are said to have."""

    others: list[Tensor] = field(default_factory=list)

    def all_reduce(self, x: Tensor) -> Tensor:
        return x + sum(self.others)


def load(layer: nn.Module, tensors: dict[str, Tensor], shard_id: object = None) -> None:
    for name, tensor in tensors.items():
        param = getattr(layer, name)
        param.weight_loader(param, tensor, shard_id)


def test_replicated() -> None:
    layer = ReplicatedLinear(5, 7, bias=True)
    weight, bias, x = torch.randn(7, 5), torch.randn(7), torch.randn(3, 5)
    load(layer, {"weight": weight, "bias": bias})
    assert torch.allclose(layer(x), x @ weight.T + bias, atol=1e-6)


@pytest.mark.parametrize("size", [1, 2, 3])
def test_column_parallel_outputs_join_to_the_whole(size: int) -> None:
    weight, bias, x = torch.randn(12, 5), torch.randn(12), torch.randn(3, 5)
    outputs = []
    for rank in range(size):
        layer = ColumnParallelLinear(5, 12, bias=True, tp=TPGroup(rank, size))
        load(layer, {"weight": weight, "bias": bias})
        outputs.append(layer(x))
    assert torch.allclose(torch.cat(outputs, -1), x @ weight.T + bias, atol=1e-6)


@pytest.mark.parametrize("size", [1, 2, 4])
def test_merged_shards_hold_both_products_in_order(size: int) -> None:
    gate, up, x = torch.randn(8, 5), torch.randn(12, 5), torch.randn(3, 5)
    gates, ups = [], []
    for rank in range(size):
        layer = MergedColumnParallelLinear(5, [8, 12], tp=TPGroup(rank, size))
        load(layer, {"weight": up}, 1)
        load(layer, {"weight": gate}, 0)
        here_gate, here_up = layer(x).split((8 // size, 12 // size), -1)
        gates.append(here_gate)
        ups.append(here_up)
    assert torch.allclose(torch.cat(gates, -1), x @ gate.T, atol=1e-6)
    assert torch.allclose(torch.cat(ups, -1), x @ up.T, atol=1e-6)


@pytest.mark.parametrize("size", [1, 3])
def test_qkv_shards_keep_each_head_whole(size: int) -> None:
    """9 heads and 3 kv heads of 4: on rank 2 of 3 the local rows are heads 6 to 8 and kv head 2."""
    q, k, v = torch.randn(36, 5), torch.randn(12, 5), torch.randn(12, 5)
    biases = {"q": torch.randn(36), "k": torch.randn(12), "v": torch.randn(12)}
    for rank in range(size):
        layer = QKVParallelLinear(5, 4, 9, 3, bias=True, tp=TPGroup(rank, size))
        for shard_id, weight in {"v": v, "q": q, "k": k}.items():
            load(layer, {"weight": weight, "bias": biases[shard_id]}, shard_id)
        heads, kv_heads = 36 // size, 12 // size
        want = torch.cat(
            (
                q[rank * heads : (rank + 1) * heads],
                k[rank * kv_heads : (rank + 1) * kv_heads],
                v[rank * kv_heads : (rank + 1) * kv_heads],
            )
        )
        assert torch.equal(layer.weight, want)
        assert torch.equal(layer.bias[:heads], biases["q"][rank * heads : (rank + 1) * heads])


@pytest.mark.parametrize("size", [1, 2, 3])
def test_row_parallel_adds_its_bias_once_after_the_sum(size: int) -> None:
    weight, bias, x = torch.randn(7, 12), torch.randn(7), torch.randn(3, 12)
    parts = list(zip(x.chunk(size, -1), weight.chunk(size, -1), strict=True))
    for rank in range(size):
        others = [part @ w.T for other, (part, w) in enumerate(parts) if other != rank]
        layer = RowParallelLinear(12, 7, bias=True, tp=Rank(rank, size, others=others))
        load(layer, {"weight": weight, "bias": bias})
        assert torch.allclose(layer(parts[rank][0]), x @ weight.T + bias, atol=1e-5)


def test_sizes_that_do_not_divide_name_those_that_do() -> None:
    with pytest.raises(ConfigError, match=r"tensor_parallel_size=2 does not divide 9 .*: 1, 3$"):
        ColumnParallelLinear(5, 9, tp=TPGroup(0, 2))
    with pytest.raises(ConfigError, match="3 kv heads"):
        QKVParallelLinear(5, 4, 6, 3, tp=TPGroup(0, 2))
    with pytest.raises(ConfigError, match="15 input features"):
        RowParallelLinear(15, 4, tp=TPGroup(0, 2))
    assert dividing_sizes(9, 3, 1536) == [1, 3]
    assert dividing_sizes(16, 8, 3072) == [1, 2, 4, 8]


def test_size_one_needs_no_process_group() -> None:
    x = torch.randn(2, 3)
    assert TPGroup().all_reduce(x) is x and TPGroup().gather(x) is x
