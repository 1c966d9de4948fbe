"""Hands the fused kernels of `layers.fused` to the layers of a model on a GPU.

Only the shipped classes are touched: where somebody put a class or a method of their own in the place of a layer, that
one runs as it is, and so does everything that a fused kernel would have skipped.
"""

from functools import partial
from typing import Any

from torch import nn

from nanovllm.attention.base import AttentionBackend
from nanovllm.layers.activation import SiluAndMul
from nanovllm.layers.layernorm import RMSNorm
from nanovllm.layers.linear import MergedColumnParallelLinear, QKVParallelLinear, RowParallelLinear
from nanovllm.layers.rotary_embedding import RotaryEmbedding
from nanovllm.layers.sampler import Sampler
from nanovllm.models.decoder import Attention


def install_fused(*modules: nn.Module) -> None:
    """Let every shipped layer in `modules` use its fused kernel. Needs Triton."""
    from nanovllm.layers import fused  # triton is optional

    kernels: dict[type, Any] = {RMSNorm: fused.rms_norm, SiluAndMul: fused.silu_and_mul, Sampler: fused.sample}
    linears = (QKVParallelLinear, MergedColumnParallelLinear, RowParallelLinear)
    for module in (layer for root in modules for layer in root.modules()):
        if type(module) in kernels:
            module.kernel = kernels[type(module)]
        elif type(module) in linears and module.product is None and module.bias is None:
            module.product = partial(fused.linear, module.weight)
        elif type(module) is Attention and can_fuse(module):
            norms = (module.q_norm.weight, module.k_norm.weight, module.q_norm.eps) if module.qk_norm else None
            module.rotate_and_store = partial(
                fused.rotate_and_store, module.num_kv_heads, module.head_dim, module.rotary.cos_sin, norms
            )


def can_fuse(layer: Attention) -> bool:
    """Whether everything that the fused kernel does in one is as shipped: both norms, the rotation and the store."""
    from nanovllm.attention.triton_backend import TritonAttention

    backend = type(layer.attention)
    stores = getattr(backend, "store", None) is TritonAttention.store and backend.forward is AttentionBackend.forward
    norms = not layer.qk_norm or type(layer.q_norm) is type(layer.k_norm) is RMSNorm
    return stores and norms and type(layer.rotary) is RotaryEmbedding
