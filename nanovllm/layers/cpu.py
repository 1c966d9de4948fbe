"""Ways around the slow spots of PyTorch on a CPU. Each has a plain twin of the same result in the layer that it serves.

A decode step of a small model is a few dozen microseconds a layer, so what counts is how many operators run and how
the weights lie in memory. The times in this file: SmolLM2-135M, one row, one thread of a 2.6 GHz server CPU.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from nanovllm.attention.base import AttentionBackend

PACK_ROWS = 64  # the batch size that the packed layout is made for; it serves 1 to 1,024 rows nearly as well


def can_pack(weight: Tensor) -> bool:
    """Whether oneDNN can keep this weight in its own blocked layout: bfloat16 on a CPU that multiplies it natively."""
    if weight.dtype != torch.bfloat16 or not torch.backends.mkldnn.is_available():
        return False
    operators = torch.ops.mkldnn
    return hasattr(operators, "_linear_pointwise") and bool(operators._is_mkldnn_bf16_supported())


class PackedProduct:
    """x @ weight.T + bias with the weight blocked as oneDNN reads it, once, instead of anew in every call.

    PERF: 30 layers in 23.5 ms instead of 33.2. In float32 a single row gains nothing, so float32 stays plain.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self.weight, self.bias = torch.ops.mkldnn._reorder_linear_weight(weight, PACK_ROWS), bias
        self.multiply = torch.ops.mkldnn._linear_pointwise.default

    def __call__(self, x: Tensor) -> Tensor:
        product: Tensor = self.multiply(x, self.weight, self.bias, "none", [], "")
        return product


def can_quantize(weight: Tensor) -> bool:
    """Whether PyTorch's int8 product takes this weight; with other widths it reads past the end of a row."""
    return weight.shape[1] % 16 == 0 and hasattr(torch.ops.aten, "_weight_int8pack_mm")


class Int8Product:
    """x @ (q * scale).T + bias, with weights q in int8 and one scale per output: half the bytes of bfloat16.

    Each output's weights are divided by their largest magnitude / 127 and rounded, so a weight is off by at most half
    a step: about 1 % of a product (root mean square). PERF: one row, 30 layers in 22 ms instead of 30; its time grows
    with the rows, so more than `MOST_ROWS` are multiplied by a weight that is widened for the call.
    """

    MOST_ROWS = 16

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        largest = weight.abs().amax(1, keepdim=True).clamp(min=127 * torch.finfo(weight.dtype).tiny)
        scale = (largest.float() / 127).to(weight.dtype)  # rounded now: the weights are divided by what multiplies them
        self.weight = (weight.float() / scale.float()).round().to(torch.int8)
        self.scale, self.bias = scale.squeeze(1), bias

    def __call__(self, x: Tensor) -> Tensor:
        if len(x) <= self.MOST_ROWS:
            product: Tensor = torch.ops.aten._weight_int8pack_mm(x, self.weight, self.scale)
        else:
            # Scaled before the sum: in float16 a sum over weights of up to 127 may be infinite.
            product = F.linear(x, self.weight.to(x.dtype) * self.scale[:, None])
        return product if self.bias is None else product + self.bias


class FastNorm:
    """RMSNorm in few operators: x * gain / |(|x|, floor)|, where gain = weight * sqrt(D) and floor = sqrt(D * eps).

    sqrt(mean(x²) + eps) = sqrt(|x|² + D * eps) / sqrt(D), and a square root of two squares is one `hypot`.
    PERF: 6 us instead of 19.
    """

    def __init__(self, weight: Tensor, eps: float) -> None:
        size = weight.shape[0]
        self.gain, self.floor = weight.float() * size**0.5, torch.tensor([(size * eps) ** 0.5], dtype=torch.float32)

    def __call__(
        self, x: Tensor, weight: Tensor, eps: float, residual: Tensor | None = None
    ) -> Tensor | tuple[Tensor, Tensor]:
        if residual is None:
            return self.normalize(x)
        x = x + residual
        return self.normalize(x), x

    def normalize(self, x: Tensor) -> Tensor:
        """The norm alone: [..., D] -> [..., D]."""
        exact = x.float()
        length = torch.hypot(torch.linalg.vector_norm(exact, dim=-1, keepdim=True), self.floor)
        return (exact / length).mul_(self.gain).to(x.dtype)


class RotateAndStore:
    """Rotation of queries and keys, and the store of keys and values, over the fused qkv row as a whole.

    Turning the pair (a, b) gives (a cos - b sin, b cos + a sin): the row times (cos, cos), plus the row with its halves
    swapped times (-sin, sin). Three operators on whole heads, q and k at once. PERF: 9 us instead of 33.
    """

    def __init__(self, backend: AttentionBackend, table: Tensor, norms: list[FastNorm]) -> None:
        self.num_heads, self.num_kv_heads, self.head_dim = backend.num_heads, backend.num_kv_heads, backend.head_dim
        self.backend, self.table, self.norms = backend, table, norms

    def __call__(
        self, qkv: Tensor, positions: Tensor, k_cache: Tensor, v_cache: Tensor, slot_mapping: Tensor
    ) -> Tensor:
        """qkv [T, (N + 2 K) H] -> the turned queries [T, N, H]."""
        turning = self.num_heads + self.num_kv_heads
        heads = qkv.view(len(qkv), -1, self.head_dim)  # [T, N + 2 K, H]
        qk = heads[:, :turning]
        if self.norms:
            parts = qk.split((self.num_heads, self.num_kv_heads), 1)
            qk = torch.cat([norm.normalize(part) for norm, part in zip(self.norms, parts, strict=True)], 1)
        cos, sin = self.table.index_select(0, positions).unsqueeze(1).chunk(2, -1)  # [T, 1, H] each
        first, second = qk.chunk(2, -1)
        turned = torch.addcmul(qk * cos, torch.cat((second, first), -1), sin)
        self.backend.store(turned[:, self.num_heads :], heads[:, turning:], k_cache, v_cache, slot_mapping)
        return turned[:, : self.num_heads]


def wide_table(cos_sin: Tensor) -> Tensor:
    """[P, H] with cos and sin of H / 2 angles -> [P, 2 H]: cos, cos, -sin, sin."""
    cos, sin = cos_sin.chunk(2, -1)
    return torch.cat((cos, cos, -sin, sin), -1)
