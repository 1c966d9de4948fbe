"""Which class runs which architecture, and how a model is built."""

from typing import Any

import torch

from nanovllm._html import shown
from nanovllm.attention.base import AttentionBackend
from nanovllm.errors import UnsupportedModelError
from nanovllm.layers import Resolve, shipped
from nanovllm.layers.parallel import TPGroup
from nanovllm.models.decoder import DecoderForCausalLM
from nanovllm.models.llama import LlamaForCausalLM
from nanovllm.models.model_config import architecture_name
from nanovllm.models.qwen2 import Qwen2ForCausalLM
from nanovllm.models.qwen3 import Qwen3ForCausalLM


def supported_models() -> dict[str, type[DecoderForCausalLM]]:
    """Class by the name that config.json gives the architecture."""
    return {cls.__name__: cls for cls in (Qwen3ForCausalLM, Qwen2ForCausalLM, LlamaForCausalLM)}


def model_class(hf_config: Any) -> type[DecoderForCausalLM]:
    """The class for this configuration. Raises `UnsupportedModelError` with the list of those there are."""
    name, models = architecture_name(hf_config), supported_models()
    if name not in models:
        raise UnsupportedModelError(f"architecture {shown(name)} is not implemented; these are: {', '.join(models)}")
    return models[name]


def build_model(
    hf_config: Any,
    tp: TPGroup,
    attention: AttentionBackend,
    resolve: Resolve = shipped,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    max_position: int | None = None,
) -> DecoderForCausalLM:
    """The model without weights, and without memory for them: `load_model` allocates once the file has been checked.

    max_position: rows of the rotary table, that is, the longest sequence; None: what config.json allows.
    """
    with torch.device("meta"):
        model = resolve(model_class(hf_config))(hf_config, tp, attention, resolve, max_position)
    model.target_device, model.target_dtype = torch.device(device), dtype
    return model.eval()
