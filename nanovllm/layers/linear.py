"""Linear layers, cut over tensor-parallel ranks.

A column-parallel layer holds some of the outputs and needs no communication; a row-parallel layer holds some of the
inputs, and its partial outputs are summed over the ranks. One after the other they need a single all-reduce.

Every parameter carries `weight_loader(param, loaded, shard_id)`, which copies this rank's part of a whole checkpoint
tensor, and `full_shapes`, the shape of that whole tensor per shard id. A shard id says which of several checkpoint
tensors it is that one parameter holds: "q", "k" or "v", say; None where nothing is merged.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nanovllm.layers.parallel import ALONE, TPGroup

Shapes = dict[Any, tuple[int, ...]]


def new_parameter(shape: tuple[int, ...], weight_loader: Callable[..., None], full_shapes: Shapes) -> nn.Parameter:
    """An uninitialised parameter that knows how it is loaded."""
    param = nn.Parameter(torch.empty(shape), requires_grad=False)
    param.weight_loader = weight_loader  # type: ignore[attr-defined]
    param.full_shapes = full_shapes  # type: ignore[attr-defined]
    return param


class ReplicatedLinear(nn.Module):
    """x [..., in] -> x @ weight.T + bias [..., out]; every rank holds all of it. Base of the layers below.

    The layers below call `_build` instead of this constructor. Its `sizes` are the whole output sizes per shard id (one
    entry, None, unless the layer merges several products), and `in_size`, `out_size` what this rank holds.
    """

    def __init__(self, in_features: int, out_features: int, bias: bool = False, tp: TPGroup = ALONE) -> None:
        super().__init__()
        self._build(in_features, {None: out_features}, in_features, out_features, bias, tp)

    def _build(
        self, in_features: int, sizes: dict[Any, int], in_size: int, out_size: int, bias: bool, tp: TPGroup
    ) -> None:
        self.tp = tp
        self.product: Callable[[Tensor], Tensor] | None = None  # a faster stand-in, see models/prepare.py and fuse.py
        shapes: Shapes = {key: (out, in_features) for key, out in sizes.items()}
        self.weight: nn.Parameter | None = new_parameter((out_size, in_size), self.weight_loader, shapes)
        self.bias: nn.Parameter | None = None
        if bias:
            self.bias = new_parameter((out_size,), self.weight_loader, {key: (out,) for key, out in sizes.items()})

    def weight_loader(self, param: nn.Parameter, loaded: Tensor, shard_id: Any = None) -> None:
        """Copy this rank's part of `loaded`, a whole weight [out, in] or bias [out], to its place in `param`."""
        param.data.copy_(loaded)

    def inner_bias(self) -> Tensor | None:
        """The bias that this rank adds to its own product."""
        return self.bias

    def multiply(self, x: Tensor) -> Tensor:
        """This rank's product: [..., out_size]."""
        if self.product is not None:
            return self.product(x)
        assert self.weight is not None, "a layer without a weight has a product"
        return F.linear(x, self.weight, self.inner_bias())

    def forward(self, x: Tensor) -> Tensor:
        return self.multiply(x)


class ColumnParallelLinear(ReplicatedLinear):
    """Rank r of n holds rows [r * out / n, (r + 1) * out / n) of the weight, that is, its share of the outputs.

    The plain case. The models here use the two below, which do the same for several products at once.
    """

    def __init__(self, in_features: int, out_features: int, bias: bool = False, tp: TPGroup = ALONE) -> None:
        nn.Module.__init__(self)
        self._build(in_features, {None: out_features}, in_features, tp.share(out_features, "output features"), bias, tp)

    def weight_loader(self, param: nn.Parameter, loaded: Tensor, shard_id: Any = None) -> None:
        size = loaded.shape[0] // self.tp.size
        param.data.copy_(loaded.narrow(0, self.tp.rank * size, size))


class MergedColumnParallelLinear(ReplicatedLinear):
    """Several column-parallel products of the same input as one; shard id i is the i-th product.

    Two products of 8 outputs on rank 1 of 2: the local weight has 8 rows, rows 4 to 7 of the first product and then
    rows 4 to 7 of the second.
    """

    def __init__(self, in_features: int, out_features: list[int], bias: bool = False, tp: TPGroup = ALONE) -> None:
        nn.Module.__init__(self)
        self.shares = [tp.share(size, "output features") for size in out_features]
        self._build(in_features, dict(enumerate(out_features)), in_features, sum(self.shares), bias, tp)

    def weight_loader(self, param: nn.Parameter, loaded: Tensor, shard_id: Any = None) -> None:
        size, offset = self.shares[shard_id], sum(self.shares[:shard_id])
        param.data.narrow(0, offset, size).copy_(loaded.narrow(0, self.tp.rank * size, size))


class QKVParallelLinear(ReplicatedLinear):
    """Queries, keys and values as one product: rows of q, then k, then v; shard ids "q", "k", "v".

    9 heads and 3 kv heads of 64 on rank 2 of 3: heads 6 to 8 (rows 384 to 575 of q_proj) land in local rows 0 to 191,
    kv head 2 of k_proj in rows 192 to 255, and of v_proj in rows 256 to 319.
    """

    def __init__(
        self,
        in_features: int,
        head_dim: int,
        num_heads: int,
        num_kv_heads: int,
        bias: bool = False,
        tp: TPGroup = ALONE,
    ) -> None:
        nn.Module.__init__(self)
        q_size, kv_size = tp.share(num_heads, "heads") * head_dim, tp.share(num_kv_heads, "kv heads") * head_dim
        self.placement = {"q": (0, q_size), "k": (q_size, kv_size), "v": (q_size + kv_size, kv_size)}
        sizes = {"q": num_heads * head_dim, "k": num_kv_heads * head_dim, "v": num_kv_heads * head_dim}
        self._build(in_features, sizes, in_features, q_size + 2 * kv_size, bias, tp)

    def weight_loader(self, param: nn.Parameter, loaded: Tensor, shard_id: Any = None) -> None:
        offset, size = self.placement[shard_id]
        param.data.narrow(0, offset, size).copy_(loaded.narrow(0, self.tp.rank * size, size))


class RowParallelLinear(ReplicatedLinear):
    """Rank r of n holds columns [r * in / n, (r + 1) * in / n): x [..., in / n] -> the summed product [..., out].

    The bias is added once, after the sum; on every rank, since each goes on with the whole result.
    """

    def __init__(self, in_features: int, out_features: int, bias: bool = False, tp: TPGroup = ALONE) -> None:
        nn.Module.__init__(self)
        self._build(in_features, {None: out_features}, tp.share(in_features, "input features"), out_features, bias, tp)

    def weight_loader(self, param: nn.Parameter, loaded: Tensor, shard_id: Any = None) -> None:
        if param.dim() == 2:
            size = loaded.shape[1] // self.tp.size
            loaded = loaded.narrow(1, self.tp.rank * size, size)
        param.data.copy_(loaded)

    def inner_bias(self) -> Tensor | None:
        return self.bias if self.tp.size == 1 else None

    def forward(self, x: Tensor) -> Tensor:
        total = self.tp.all_reduce(self.multiply(x))
        return total if self.bias is None or self.tp.size == 1 else total + self.bias
