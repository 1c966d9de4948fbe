"""Qwen2 and Qwen2.5 (dense)."""

from nanovllm.models.decoder import DecoderForCausalLM


class Qwen2ForCausalLM(DecoderForCausalLM):
    """Queries, keys and values have a bias, always; the output projection has none; no norm on the heads."""

    qkv_bias = True
    output_bias = False
    qk_norm = False
