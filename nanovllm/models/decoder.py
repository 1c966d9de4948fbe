"""The decoder that Qwen3, Qwen2 and Llama share; their own files say in what they differ.

Letters: T tokens of the step (all sequences laid end to end), S sampled rows, N heads and K kv heads of this rank,
H head dim, D model dim, F mlp dim of this rank, V vocabulary. There is no batch dimension: what belongs to which
sequence only attention needs to know, and its metadata says so.
"""

from collections.abc import Callable
from typing import Any, ClassVar, cast

import torch
from torch import Tensor, nn

from nanovllm.attention.base import AttentionBackend, AttentionMetadata
from nanovllm.layers import Resolve, shipped
from nanovllm.layers.activation import SiluAndMul
from nanovllm.layers.embed_head import ParallelLMHead, VocabParallelEmbedding
from nanovllm.layers.layernorm import RMSNorm
from nanovllm.layers.linear import MergedColumnParallelLinear, QKVParallelLinear, RowParallelLinear
from nanovllm.layers.parallel import TPGroup
from nanovllm.layers.rotary_embedding import RotaryEmbedding
from nanovllm.models.model_config import ModelConfig


class Attention(nn.Module):
    """Project, turn by position, store and attend over the cached tokens, project back: [T, D] -> [T, D]."""

    def __init__(
        self,
        config: ModelConfig,
        family: "type[DecoderForCausalLM]",
        tp: TPGroup,
        attention: AttentionBackend,
        rotary: RotaryEmbedding,
        resolve: Resolve,
    ) -> None:
        super().__init__()
        self.num_heads, self.num_kv_heads = config.heads_on_rank(tp)
        self.head_dim = config.head_dim
        self.attention, self.rotary = attention, rotary
        qkv_bias = config.attention_bias if family.qkv_bias is None else family.qkv_bias
        output_bias = config.attention_bias if family.output_bias is None else family.output_bias
        self.qkv_proj = resolve(QKVParallelLinear)(
            config.hidden_size, config.head_dim, config.num_heads, config.num_kv_heads, bias=qkv_bias, tp=tp
        )
        self.o_proj = resolve(RowParallelLinear)(
            config.num_heads * config.head_dim, config.hidden_size, bias=output_bias, tp=tp
        )
        # Norms, rotation and store in one, where models/fuse.py (GPU), prepare.py or compiled_step.py (CPU) puts it.
        self.rotate_and_store: Callable[..., Tensor] | None = None
        self.qk_norm = family.qk_norm
        if self.qk_norm:
            self.q_norm = resolve(RMSNorm)(config.head_dim, config.rms_norm_eps)
            self.k_norm = resolve(RMSNorm)(config.head_dim, config.rms_norm_eps)

    def forward(
        self, x: Tensor, positions: Tensor, k_cache: Tensor, v_cache: Tensor, metadata: AttentionMetadata
    ) -> Tensor:
        heads, kv_heads = self.num_heads, self.num_kv_heads
        qkv = self.qkv_proj(x)
        if self.rotate_and_store is not None:
            q = self.rotate_and_store(qkv, positions, k_cache, v_cache, metadata.slot_mapping)  # [T, N, H]
            out = self.attention.attend(q, k_cache, v_cache, metadata)  # [T, N, H]
        else:
            qkv = qkv.unflatten(-1, (heads + 2 * kv_heads, self.head_dim))  # [T, N + 2K, H]
            q, k, v = qkv.split((heads, kv_heads, kv_heads), dim=1)  # [T, N, H], [T, K, H], [T, K, H]
            if self.qk_norm:
                q, k = self.q_norm(q), self.k_norm(k)
            q, k = self.rotary(positions, q, k)
            out = self.attention.forward(q, k, v, k_cache, v_cache, metadata)  # [T, N, H]
        return cast(Tensor, self.o_proj(out.flatten(1)))


class MLP(nn.Module):
    """Down(silu(gate(x)) * up(x)): [T, D] -> [T, D]; gate and up are one product."""

    def __init__(self, config: ModelConfig, tp: TPGroup, resolve: Resolve) -> None:
        super().__init__()
        size, inner = config.hidden_size, config.intermediate_size
        self.gate_up_proj = resolve(MergedColumnParallelLinear)(size, [inner, inner], bias=config.mlp_bias, tp=tp)
        self.act_fn = resolve(SiluAndMul)()
        self.down_proj = resolve(RowParallelLinear)(inner, size, bias=config.mlp_bias, tp=tp)

    def forward(self, x: Tensor) -> Tensor:
        return cast(Tensor, self.down_proj(self.act_fn(self.gate_up_proj(x))))


class DecoderLayer(nn.Module):
    """Attention and MLP, each behind a norm. The residual sum travels beside the hidden state, so that each addition
    is done by the norm that reads it."""

    def __init__(
        self,
        config: ModelConfig,
        family: "type[DecoderForCausalLM]",
        tp: TPGroup,
        attention: AttentionBackend,
        rotary: RotaryEmbedding,
        resolve: Resolve,
    ) -> None:
        super().__init__()
        self.self_attn = Attention(config, family, tp, attention, rotary, resolve)
        self.mlp = MLP(config, tp, resolve)
        self.input_layernorm = resolve(RMSNorm)(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = resolve(RMSNorm)(config.hidden_size, config.rms_norm_eps)

    def forward(
        self,
        x: Tensor,
        residual: Tensor | None,
        positions: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        metadata: AttentionMetadata,
    ) -> tuple[Tensor, Tensor]:
        if residual is None:
            x, residual = self.input_layernorm(x), x
        else:
            x, residual = self.input_layernorm(x, residual)
        x = self.self_attn(x, positions, k_cache, v_cache, metadata)
        x, residual = self.post_attention_layernorm(x, residual)
        return self.mlp(x), cast(Tensor, residual)


class Decoder(nn.Module):
    """Embedding, layers, last norm: token ids [T] -> hidden states [T, D]."""

    def __init__(
        self,
        config: ModelConfig,
        family: "type[DecoderForCausalLM]",
        tp: TPGroup,
        attention: AttentionBackend,
        max_position: int,
        resolve: Resolve,
    ) -> None:
        super().__init__()
        with torch.device("cpu"):  # a computed table, not a weight to be loaded: it needs its values now
            rotary = resolve(RotaryEmbedding)(config.head_dim, max_position, config.rope_theta, config.rope_scaling)
        self.embed_tokens = resolve(VocabParallelEmbedding)(config.vocab_size, config.hidden_size, tp=tp)
        self.layers = nn.ModuleList(
            DecoderLayer(config, family, tp, attention, rotary, resolve) for _ in range(config.num_layers)
        )
        self.norm = resolve(RMSNorm)(config.hidden_size, config.rms_norm_eps)
        self.compiled_step: Any = None  # on a CPU, a `CompiledStep` for steps of nothing but decodes

    def forward(self, input_ids: Tensor, positions: Tensor, kv_cache: Tensor, metadata: AttentionMetadata) -> Tensor:
        if self.compiled_step is not None and self.compiled_step.takes(input_ids, kv_cache, metadata):
            return cast(Tensor, self.compiled_step(input_ids, positions, kv_cache, metadata))
        x, residual = self.embed_tokens(input_ids), None
        for layer, (k_cache, v_cache) in zip(self.layers, kv_cache.unbind(0), strict=True):
            x, residual = layer(x, residual, positions, k_cache, v_cache, metadata)
        x, _ = self.norm(x, residual)
        return cast(Tensor, x)


class DecoderForCausalLM(nn.Module):
    """A language model: `forward` gives hidden states, `compute_logits` the scores of the next token.

    hf_config: what transformers reads from config.json. tp: this rank's share. attention: the backend that all layers
    use. resolve: gives the class to build for each layer. max_position: rows of the rotary table (None: the model's
    own limit). Raises `UnsupportedModelError` or, where heads do not divide over the ranks, `ConfigError`.
    """

    qkv_bias: ClassVar[bool | None]  # None: as `attention_bias` in config.json says
    output_bias: ClassVar[bool | None]
    qk_norm: ClassVar[bool]
    target_device: torch.device  # where the weights will live, and as what; `build_model` says so
    target_dtype: torch.dtype
    packed_modules_mapping: ClassVar[dict[str, tuple[str, str | int]]] = {  # in the checkpoint -> (here, shard id)
        "q_proj": ("qkv_proj", "q"),
        "k_proj": ("qkv_proj", "k"),
        "v_proj": ("qkv_proj", "v"),
        "gate_proj": ("gate_up_proj", 0),
        "up_proj": ("gate_up_proj", 1),
    }

    def __init__(
        self,
        hf_config: Any,
        tp: TPGroup,
        attention: AttentionBackend,
        resolve: Resolve = shipped,
        max_position: int | None = None,
    ) -> None:
        super().__init__()
        self.config = config = ModelConfig.from_hf(hf_config)
        _, self.num_kv_heads = config.heads_on_rank(tp)  # of this rank; `config` has those of the whole model
        self.num_layers, self.head_dim, self.vocab_size = config.num_layers, config.head_dim, config.vocab_size
        self.model = Decoder(config, type(self), tp, attention, max_position or config.max_position, resolve)
        self.lm_head = resolve(ParallelLMHead)(config.vocab_size, config.hidden_size, tp=tp)
        if config.tie_word_embeddings:
            self.lm_head.weight = self.model.embed_tokens.weight

    def forward(
        self, input_ids: Tensor, positions: Tensor, kv_cache: Tensor, attn_metadata: AttentionMetadata
    ) -> Tensor:
        """input_ids, positions [T], kv_cache [L, 2, num_blocks, block_size, K, H] -> hidden states [T, D]."""
        return cast(Tensor, self.model(input_ids, positions, kv_cache, attn_metadata))

    def compute_logits(self, hidden: Tensor) -> Tensor | None:
        """Hidden states [S, D] -> logits [S, V] on rank 0, None on the others."""
        return cast("Tensor | None", self.lm_head(hidden))
