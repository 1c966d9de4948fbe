"""What config.json may say, in the shapes of transformers 4.51 and of 5.x; everything else is refused by name."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from nanovllm.attention import TorchAttention
from nanovllm.errors import ConfigError, UnsupportedModelError
from nanovllm.layers.parallel import TPGroup
from nanovllm.layers.rotary_embedding import Llama3Scaling
from nanovllm.models import ModelConfig, build_model, supported_models

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def hf(**changes: Any) -> SimpleNamespace:
    """A configuration as transformers 5 hands it over; a change to None removes the attribute."""
    options: dict[str, Any] = {
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": 100,
        "hidden_size": 36,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "head_dim": 4,
        "max_position_embeddings": 128,
        "rms_norm_eps": 1e-5,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "tie_word_embeddings": True,
        "hidden_act": "silu",
    }
    return SimpleNamespace(**{key: value for key, value in {**options, **changes}.items() if value is not None})


def build(config: SimpleNamespace, tp: TPGroup | None = None) -> Any:
    return build_model(config, tp or TPGroup(), TorchAttention(9, 3, 4, 0.5, 4))


def test_the_old_and_the_new_names_of_rope_mean_the_same() -> None:
    new = ModelConfig.from_hf(hf(rope_parameters={**LLAMA3, "rope_theta": 5e5}))
    old = ModelConfig.from_hf(hf(rope_parameters=None, rope_theta=5e5, rope_scaling=LLAMA3))
    older = {key: value for key, value in LLAMA3.items() if key != "rope_type"} | {"type": "llama3"}
    assert new == old == ModelConfig.from_hf(hf(rope_parameters=None, rope_theta=5e5, rope_scaling=older))
    assert new.rope_theta == 5e5 and new.rope_scaling == Llama3Scaling(8.0, 1.0, 4.0, 8192)
    plain = ModelConfig.from_hf(hf(rope_parameters=None, rope_theta=1e4, rope_scaling=None))
    assert plain == ModelConfig.from_hf(hf()) and plain.rope_scaling is None


def test_head_dim_may_be_absent_and_kv_heads_too() -> None:
    config = ModelConfig.from_hf(hf(head_dim=None, num_key_value_heads=None))
    assert (config.head_dim, config.num_kv_heads) == (4, 9)


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, "GPT2LMHeadModel"),
        ({"architectures": None}, "architectures"),
        ({"architectures": [7]}, "architectures"),
        ({"architectures": []}, "architectures"),
        ({"hidden_act": "gelu"}, "gelu"),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0}}, "yarn"),
        ({"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}}, "linear"),
        ({"rope_parameters": None, "rope_theta": 1e4, "rope_scaling": {"type": "dynamic", "factor": 2.0}}, "dynamic"),
        ({"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5}}, "partial_rotary_factor"),
        ({"rope_parameters": {"rope_theta": -1.0}}, "rope_theta"),
        ({"rope_parameters": None}, "rope_theta"),
        ({"rope_parameters": [1]}, "rope options"),
        ({"rope_parameters": {**LLAMA3, "rope_theta": 1e4, "high_freq_factor": 1.0}}, "high_freq_factor"),
        ({"rope_parameters": {"rope_type": "llama3", "rope_theta": 1e4}}, "factor"),
        ({"layer_types": ["full_attention", "sliding_attention"], "sliding_window": 64}, "sliding_window=64"),
        ({"use_sliding_window": True, "sliding_window": 64, "max_window_layers": 1}, "sliding_window=64"),
        ({"quantization_config": {"quant_method": "awq"}}, "quantization_config"),
        ({"hidden_size": -1}, "hidden_size"),
        ({"hidden_size": 2**60}, "hidden_size"),
        ({"vocab_size": "many"}, "vocab_size"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers"),
        ({"num_hidden_layers": 2.5}, "num_hidden_layers"),
        ({"num_attention_heads": True}, "num_attention_heads"),
        ({"num_key_value_heads": 2}, "num_key_value_heads"),
        ({"head_dim": 3}, "head_dim"),
        ({"head_dim": 2**20}, "head_dim"),
        ({"intermediate_size": None}, "intermediate_size"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps"),
        ({"rms_norm_eps": "1e-5"}, "rms_norm_eps"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings"),
    ],
)
def test_what_is_not_implemented_is_refused_by_name(changes: dict[str, Any], name: str) -> None:
    with pytest.raises(UnsupportedModelError, match=name):
        build(hf(**changes))


def test_an_unused_sliding_window_is_no_hindrance() -> None:
    build(hf(use_sliding_window=False, sliding_window=64, max_window_layers=1))
    build(hf(layer_types=["full_attention"] * 2, sliding_window=64))
    build(hf(use_sliding_window=True, sliding_window=64, max_window_layers=2))


def test_ranks_that_do_not_divide_name_the_sizes_that_would() -> None:
    build(hf(), TPGroup(1, 3))
    with pytest.raises(ConfigError, match=r"tensor_parallel_size=2 .* 9 heads; .*: 1, 3$"):
        build(hf(), TPGroup(0, 2))
    with pytest.raises(ConfigError, match=r"tensor_parallel_size=8 .* 4 kv heads; .*: 1, 2, 4$"):
        build(hf(num_attention_heads=16, num_key_value_heads=4), TPGroup(0, 8))


def test_a_model_is_built_without_memory_for_weights() -> None:
    """A configuration that passes for plausible, with 32 TB of weights."""
    model = build(hf(hidden_size=2**20, intermediate_size=2**20, vocab_size=2**23))
    assert all(param.device.type == "meta" for param in model.parameters())


def test_an_unknown_architecture_lists_the_known_ones() -> None:
    assert set(supported_models()) == {"Qwen3ForCausalLM", "Qwen2ForCausalLM", "LlamaForCausalLM"}
    with pytest.raises(UnsupportedModelError, match="Qwen3ForCausalLM, Qwen2ForCausalLM, LlamaForCausalLM"):
        build(hf(architectures=["BertModel"]))


def test_the_rotary_table_is_as_long_as_asked() -> None:
    model = build_model(hf(), TPGroup(), TorchAttention(9, 3, 4, 0.5, 4), max_position=50)
    assert model.model.layers[0].self_attn.rotary.cos_sin.shape == (50, 4)
    assert model.model.layers[0].self_attn.rotary is model.model.layers[1].self_attn.rotary
    assert torch.isfinite(model.model.layers[0].self_attn.rotary.cos_sin).all()
