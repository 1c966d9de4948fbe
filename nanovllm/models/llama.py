"""Llama 2 and 3, and models that share its architecture (SmolLM2, TinyLlama)."""

from nanovllm.models.decoder import DecoderForCausalLM


class LlamaForCausalLM(DecoderForCausalLM):
    """No norm on the heads; biases as config.json says (the released models: none); Llama 3 scales its rotary waves."""

    qkv_bias = None
    output_bias = None
    qk_norm = False
