"""What a loaded model becomes before its first step: the same layers, in the form that suits the device.

Only the shipped classes are touched. Where somebody put a class or a method of their own in the place of a layer, that
one runs as it is, with its plain weights.
"""

from typing import Any

import torch
from torch import nn

from nanovllm.attention.torch_backend import TorchAttention
from nanovllm.errors import ConfigError
from nanovllm.layers.cpu import FastNorm, Int8Product, PackedProduct, RotateAndStore, can_pack, can_quantize, wide_table
from nanovllm.layers.embed_head import ParallelLMHead
from nanovllm.layers.layernorm import RMSNorm
from nanovllm.layers.linear import MergedColumnParallelLinear, QKVParallelLinear, RowParallelLinear
from nanovllm.layers.rotary_embedding import RotaryEmbedding
from nanovllm.models.decoder import Attention, DecoderForCausalLM

LINEARS: tuple[type, ...] = (QKVParallelLinear, MergedColumnParallelLinear, RowParallelLinear, ParallelLMHead)


def prepare_for_device(
    model: DecoderForCausalLM, device: torch.device | str, dtype: torch.dtype, quantization: str | None = None
) -> None:
    """Make a loaded model fast on a CPU; the results stay the same up to rounding (int8: up to about 1 %).

    quantization: None, or "int8" for weight-only int8 products. Raises `ConfigError` for int8 elsewhere than on a CPU.
    A packed or quantised copy takes the place of the plain weight, layer by layer; the embedding keeps its own.
    """
    if torch.device(device).type != "cpu":
        if quantization is not None:
            raise ConfigError(f"quantization={quantization!r} is for CPUs, and this model runs on {device}")
        return
    tables: dict[int, torch.Tensor] = {}
    for module in list(model.modules()):
        if type(module) in LINEARS:
            replace_product(module, quantization)
        elif type(module) is RMSNorm:
            module.kernel = FastNorm(module.weight, module.eps)
        elif type(module) is Attention and as_shipped(module):
            table = tables.setdefault(id(module.rotary), wide_table(module.rotary.cos_sin))
            norms = (module.q_norm, module.k_norm) if module.qk_norm else ()
            fast = [FastNorm(norm.weight, norm.eps) for norm in norms]
            module.rotate_and_store = RotateAndStore(module.attention, table, fast)


def replace_product(layer: Any, quantization: str | None) -> None:
    """Give a linear layer its packed or quantised weight and let the plain one go."""
    if quantization == "int8" and can_quantize(layer.weight):
        layer.product = Int8Product(layer.weight, layer.inner_bias())
    elif can_pack(layer.weight):
        layer.product = PackedProduct(layer.weight, layer.inner_bias())
    else:
        return
    layer.weight = None


def as_shipped(layer: nn.Module) -> bool:
    """Whether everything between the two projections of an attention layer is the package's own."""
    assert isinstance(layer, Attention)
    norms = not layer.qk_norm or type(layer.q_norm) is type(layer.k_norm) is RMSNorm
    return norms and type(layer.attention) is TorchAttention and type(layer.rotary) is RotaryEmbedding
