"""What a loaded model becomes before its first step: the same layers, in the form that suits the device.

Only the shipped classes are touched. Where somebody put a class or a method of their own in the place of a layer, that
one runs as it is, with its plain weights.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from nanovllm.attention.torch_backend import TorchAttention
from nanovllm.errors import ConfigError
from nanovllm.layers.cpu import FastNorm, Int8Product, PackedProduct, RotateAndStore, can_pack, can_quantize, wide_table
from nanovllm.layers.embed_head import ParallelLMHead
from nanovllm.layers.huge_pages import collapse_into_huge_pages
from nanovllm.layers.layernorm import RMSNorm
from nanovllm.layers.linear import MergedColumnParallelLinear, QKVParallelLinear, RowParallelLinear
from nanovllm.layers.rotary_embedding import RotaryEmbedding
from nanovllm.models.compiled_step import hindrance, install_compiled_step
from nanovllm.models.decoder import Attention, DecoderForCausalLM

LINEARS: tuple[type, ...] = (QKVParallelLinear, MergedColumnParallelLinear, RowParallelLinear, ParallelLMHead)


def prepare_for_device(
    model: DecoderForCausalLM,
    device: torch.device | str,
    dtype: torch.dtype,
    quantization: str | None = None,
    compile: bool | None = None,
) -> None:
    """Make a loaded model fast on a CPU; the results stay the same up to rounding (int8: up to about 1 %).

    quantization: None, or "int8" for weight-only int8 products; an int8 copy takes the place of the plain weight.
    compile: decode steps in one call, see `CompiledStep` (None: if this machine has a C compiler that can build it).
    Where there is none, weights are kept as oneDNN reads them and the small operators are fused in Python.
    Raises `ConfigError` for int8 elsewhere than on a CPU, and for compile=True where it cannot be.
    """
    if torch.device(device).type != "cpu":
        if quantization is not None:
            raise ConfigError(f"quantization={quantization!r} is for CPUs, and this model runs on {device}")
        return
    linears = [module for module in model.modules() if type(module) in LINEARS]
    if quantization == "int8":
        for layer in linears:
            quantize(layer)
    if compile is False or not compiled(model, dtype, required=compile is True):
        fuse_operators(model)
        for layer in linears:
            pack(layer)
    collapse_into_huge_pages(weights(model, linears))


def weights(model: DecoderForCausalLM, linears: list[Any]) -> Iterator[torch.Tensor]:
    """What a step reads: the layers' weights, plain or as the product keeps them."""
    yield from (param.data for param in model.parameters())
    yield from (layer.product.weight for layer in linears if layer.product is not None)


def compiled(model: DecoderForCausalLM, dtype: torch.dtype, required: bool) -> bool:
    """Install the compiled step if that can be. Raises `ConfigError` with the reason if it is required and cannot."""
    try:
        why = hindrance(model, dtype)
        if why is not None:
            raise ConfigError(f"compile=True: this model cannot have a compiled decode step: {why}")
        install_compiled_step(model, dtype)
    except ConfigError:
        if required:
            raise
        return False
    return True


def fuse_operators(model: DecoderForCausalLM) -> None:
    """Norms and rotation in few operators, which counts in steps of few tokens."""
    tables: dict[int, torch.Tensor] = {}
    for module in list(model.modules()):
        if type(module) is RMSNorm:
            module.kernel = FastNorm(module.weight, module.eps)
        elif type(module) is Attention and as_shipped(module):
            rotary = module.rotary
            if id(rotary) not in tables:  # one for all layers
                tables[id(rotary)] = wide_table(rotary.cos_sin)
            norms = (module.q_norm, module.k_norm) if module.qk_norm else ()
            fast = [FastNorm(norm.weight, norm.eps) for norm in norms]
            module.rotate_and_store = RotateAndStore(module.attention, tables[id(rotary)], fast)


def quantize(layer: Any) -> None:
    """Put an int8 weight in the place of the plain one, where the kernel can read it."""
    if can_quantize(layer.weight):
        layer.product, layer.weight = Int8Product(layer.weight, layer.inner_bias()), None


def pack(layer: Any) -> None:
    """Put oneDNN's own layout of the weight in the place of the plain one, where that is faster."""
    if layer.product is None and can_pack(layer.weight):
        layer.product, layer.weight = PackedProduct(layer.weight, layer.inner_bias()), None


def as_shipped(layer: nn.Module) -> bool:
    """Whether everything between the two projections of an attention layer is the package's own."""
    assert isinstance(layer, Attention)
    norms = not layer.qk_norm or type(layer.q_norm) is type(layer.k_norm) is RMSNorm
    return norms and type(layer.attention) is TorchAttention and type(layer.rotary) is RotaryEmbedding
