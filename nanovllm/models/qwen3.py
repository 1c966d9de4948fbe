"""Qwen3 (dense): the one to read first. Everything is in decoder.py; this names what only some families have."""

from nanovllm.models.decoder import DecoderForCausalLM


class Qwen3ForCausalLM(DecoderForCausalLM):
    """Each head of q and k is normalised before it is turned; biases as config.json says (released ones: none)."""

    qkv_bias = None
    output_bias = None
    qk_norm = True
