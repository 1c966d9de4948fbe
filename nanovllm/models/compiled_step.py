"""CompiledStep: a model's decode step as one call of the library that `layers.compiled` builds.

It takes the place of `Decoder.forward` where a step is nothing but decodes, all layers are the package's own and nobody
listens to them; otherwise the plain code runs. The two agree up to rounding, and this one rounds less.
"""

import ctypes
from ctypes import c_int64
from typing import cast

import torch
from torch import Tensor, nn

from nanovllm.attention.base import AttentionMetadata
from nanovllm.attention.torch_backend import TorchAttention
from nanovllm.layers.activation import SiluAndMul
from nanovllm.layers.compiled import (
    MAX_ROWS,
    CompiledNorm,
    CompiledProduct,
    CompiledRotateAndStore,
    CompiledSiluAndMul,
    LayerStruct,
    LinearStruct,
    ModelStruct,
    load_library,
    pointer,
)
from nanovllm.layers.cpu import Int8Product
from nanovllm.layers.embed_head import ParallelLMHead, VocabParallelEmbedding
from nanovllm.layers.layernorm import RMSNorm
from nanovllm.layers.linear import MergedColumnParallelLinear, QKVParallelLinear, ReplicatedLinear, RowParallelLinear
from nanovllm.layers.rotary_embedding import RotaryEmbedding
from nanovllm.models.decoder import MLP, Attention, Decoder, DecoderForCausalLM, DecoderLayer

SHIPPED = (
    Decoder, DecoderLayer, Attention, MLP, nn.ModuleList, RMSNorm, RotaryEmbedding, SiluAndMul, QKVParallelLinear,
    MergedColumnParallelLinear, RowParallelLinear, VocabParallelEmbedding,
)  # fmt: skip


def hindrance(model: DecoderForCausalLM, dtype: torch.dtype) -> str | None:
    """Why this model cannot have a compiled step, or None."""
    config, attention = model.config, decoder_layers(model)[0].self_attn.attention
    strangers = {type(module).__name__ for module in model.model.modules() if type(module) not in SHIPPED}
    if strangers or type(attention) is not TorchAttention or type(model.lm_head) is not ParallelLMHead:
        return f"a layer of it was replaced ({', '.join(sorted(strangers)) or 'attention or head'})"
    if model.lm_head.tp.size > 1:
        return "its layers are shared by several ranks"
    widths = (config.hidden_size, config.intermediate_size, config.num_heads * config.head_dim)
    if config.head_dim % 32 or any(width % 64 for width in widths):
        return f"its widths {widths} are no multiples of 64, or its head_dim {config.head_dim} is none of 32"
    if len({type(layer.product) for layer in model.modules() if isinstance(layer, ReplicatedLinear)}) > 1:
        return "only some of its weights are int8"
    return None if dtype in (torch.bfloat16, torch.float32) else f"it computes in {dtype}"


def decoder_layers(model: DecoderForCausalLM) -> list[DecoderLayer]:
    """The layers under their own type, which `nn.ModuleList` does not tell."""
    return [cast(DecoderLayer, layer) for layer in model.model.layers]


class CompiledStep:
    """input_ids, positions [T] -> normed hidden states [T, D], for steps of nothing but decodes, 64 rows a call."""

    def __init__(self, model: DecoderForCausalLM, dtype: torch.dtype) -> None:
        self.kernels = load_library(dtype, isinstance(model.lm_head.product, Int8Product))
        self.tiles, self.dtype = self.kernels.use_tiles(), dtype
        self.listened = [module for module in model.model.modules() if type(module) is not nn.ModuleList]
        self._kept: list[object] = []  # what the library has pointers to
        decoder, config = model.model, model.config
        layers = (LayerStruct * config.num_layers)(*map(self._layer, decoder_layers(model)))
        attention = decoder_layers(model)[0].self_attn
        self.cos_sin = attention.rotary.cos_sin.float().contiguous()
        self.struct = ModelStruct(
            self._keep(decoder.embed_tokens.weight), self._exact(decoder.norm.weight),
            self._keep(self.cos_sin), layers, config.num_layers, config.hidden_size,
            config.intermediate_size, config.num_heads, config.num_kv_heads, config.head_dim,
            attention.attention.block_size, config.rms_norm_eps, attention.attention.scale,
        )  # fmt: skip

    def takes(self, input_ids: Tensor, kv_cache: Tensor, metadata: AttentionMetadata) -> bool:
        """Whether this step is its kind, and no forward hook wants to see a layer run."""
        plain = metadata.num_decodes == len(input_ids) and kv_cache.is_contiguous()
        return plain and not any(module._forward_hooks or module._forward_pre_hooks for module in self.listened)

    def __call__(self, input_ids: Tensor, positions: Tensor, kv_cache: Tensor, metadata: AttentionMetadata) -> Tensor:
        rows, longest = len(input_ids), c_int64(metadata.max_context_len)
        model, half_layer = ctypes.byref(self.struct), c_int64(kv_cache[0, 0].numel())
        memory = torch.empty(self.kernels.work_bytes(model, min(rows, MAX_ROWS), longest), dtype=torch.uint8)
        hidden = torch.empty(rows, self.struct.D, dtype=self.dtype)
        tensors = (input_ids, positions, metadata.slot_mapping, metadata.block_tables, metadata.context_lens, hidden)
        for parts in zip(*(tensor.split(MAX_ROWS) for tensor in tensors), strict=True):
            ids, at, slots, tables, lengths, out = map(pointer, parts)
            self.kernels.decode_step(
                model, len(parts[0]), ids, at, slots, tables, c_int64(metadata.block_tables.stride(0)), lengths,
                longest, pointer(kv_cache), half_layer, out, pointer(memory), self.tiles,
            )  # fmt: skip
        return hidden

    def _layer(self, layer: DecoderLayer) -> LayerStruct:
        attention, mlp = layer.self_attn, layer.mlp
        linears = (attention.qkv_proj, attention.o_proj, mlp.gate_up_proj, mlp.down_proj)
        heads = (attention.q_norm.weight, attention.k_norm.weight) if attention.qk_norm else (None, None)
        norms = (layer.input_layernorm.weight, layer.post_attention_layernorm.weight, *heads)
        return LayerStruct(*map(self._linear, linears), *map(self._exact, norms))

    def _linear(self, layer: ReplicatedLinear) -> LinearStruct:
        """A layer's weight, plain or in int8."""
        if isinstance(layer.product, Int8Product):
            weight, scale = layer.product.weight, self._exact(layer.product.scale)
        else:
            assert layer.weight is not None
            weight, scale = layer.weight, None
        return LinearStruct(self._keep(weight), scale, self._exact(layer.bias), weight.shape[1], weight.shape[0])

    def _exact(self, tensor: Tensor | None) -> int | None:
        """Small tensors are handed over in float32."""
        return None if tensor is None else self._keep(tensor.float().contiguous())

    def _keep(self, tensor: Tensor) -> int:
        self._kept.append(tensor)
        return tensor.data_ptr()


def install_compiled_step(model: DecoderForCausalLM, dtype: torch.dtype) -> None:
    """Let the model use a compiled step, and compiled operators in its other steps. Raises `ConfigError` as they do."""
    model.model.compiled_step = step = CompiledStep(model, dtype)
    head = model.lm_head
    for module in model.modules():
        if type(module) is RMSNorm:
            module.kernel = CompiledNorm(step.kernels, module.weight)
        elif type(module) is SiluAndMul:
            module.kernel = CompiledSiluAndMul(step.kernels)
        elif type(module) is Attention:
            norms = (module.q_norm.weight, module.k_norm.weight, module.q_norm.eps) if module.qk_norm else None
            module.rotate_and_store = CompiledRotateAndStore(step.kernels, module.attention, step.cos_sin, norms)
        elif isinstance(module, ReplicatedLinear) and module.weight is not None:
            module.product = CompiledProduct(step.kernels, module.weight, module.bias, logits=module is head)
    if isinstance(head.product, Int8Product):  # the other layers keep their int8 products for steps with prompts
        head.product = CompiledProduct(step.kernels, head.product.weight, None, head.product.scale, logits=True)
