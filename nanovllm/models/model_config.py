"""ModelConfig: the facts of a `config.json` that the models need, checked. What would change the result and is not
implemented (another activation, a sliding window, other rope scalings, …) is refused by name.

It reads the attributes that transformers 4.51 to 5.x give a configuration: `rope_theta` with `rope_scaling`, or
`rope_parameters`; `head_dim`, or none.
"""

from dataclasses import dataclass
from typing import Any

from nanovllm._html import shown
from nanovllm.errors import ConfigError, UnsupportedModelError
from nanovllm.layers.parallel import TPGroup, dividing_sizes
from nanovllm.layers.rotary_embedding import Llama3Scaling
from nanovllm.model_folder import MAX_LAYERS

MAX_WIDTH, MAX_VOCAB, MAX_POSITION, MAX_FLOAT = 1 << 20, 1 << 24, 1 << 31, 1e38  # beyond: damaged


@dataclass(frozen=True)
class ModelConfig:
    """Sizes and options of a decoder-only model; of the whole model, not of one rank."""

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position: int
    rms_norm_eps: float
    rope_theta: float
    rope_scaling: Llama3Scaling | None
    tie_word_embeddings: bool
    attention_bias: bool
    mlp_bias: bool

    @property
    def scale(self) -> float:
        """What scores are multiplied by before the softmax."""
        return float(self.head_dim**-0.5)

    def heads_on_rank(self, tp: TPGroup) -> tuple[int, int]:
        """(heads, kv heads) that one rank holds. Raises `ConfigError` naming the sizes that would work."""
        divided = {"heads": self.num_heads, "kv heads": self.num_kv_heads, "mlp features": self.intermediate_size}
        for what, total in divided.items():
            if total % tp.size:
                sizes = ", ".join(map(str, dividing_sizes(*divided.values())))
                raise ConfigError(
                    f"tensor_parallel_size={tp.size} does not divide the model's {total} {what}; sizes that do: {sizes}"
                )
        return self.num_heads // tp.size, self.num_kv_heads // tp.size

    @classmethod
    def from_hf(cls, hf_config: Any) -> "ModelConfig":
        """Read and check a transformers configuration. Raises `UnsupportedModelError` naming what does not fit."""
        _refuse_unsupported(hf_config)
        hidden_size = _size(hf_config, "hidden_size", MAX_WIDTH)
        num_heads = _size(hf_config, "num_attention_heads", MAX_WIDTH)
        num_kv_heads = _size(hf_config, "num_key_value_heads", MAX_WIDTH, default=num_heads)
        head_dim = _size(hf_config, "head_dim", MAX_WIDTH, default=hidden_size // num_heads)
        if num_heads % num_kv_heads:
            raise UnsupportedModelError(
                f"num_attention_heads={num_heads} is not a multiple of num_key_value_heads={num_kv_heads}"
            )
        if head_dim % 2 or head_dim * num_heads > MAX_WIDTH:
            raise UnsupportedModelError(f"head_dim={head_dim} with {num_heads} heads: it must be even and plausible")
        theta, scaling = _rope(hf_config)
        return cls(
            architecture=architecture_name(hf_config),
            vocab_size=_size(hf_config, "vocab_size", MAX_VOCAB),
            hidden_size=hidden_size,
            intermediate_size=_size(hf_config, "intermediate_size", MAX_WIDTH),
            num_layers=_size(hf_config, "num_hidden_layers", MAX_LAYERS),
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            max_position=_size(hf_config, "max_position_embeddings", MAX_POSITION),
            rms_norm_eps=_positive("rms_norm_eps", getattr(hf_config, "rms_norm_eps", None)),
            rope_theta=theta,
            rope_scaling=scaling,
            tie_word_embeddings=_flag(hf_config, "tie_word_embeddings"),
            attention_bias=_flag(hf_config, "attention_bias"),
            mlp_bias=_flag(hf_config, "mlp_bias"),
        )


def architecture_name(hf_config: Any) -> str:
    """The first name under "architectures". Raises `UnsupportedModelError` where there is none."""
    names = getattr(hf_config, "architectures", None)
    if not isinstance(names, (list, tuple)) or not names or not isinstance(names[0], str):
        raise UnsupportedModelError(f"config.json names no architecture: architectures is {shown(names)}")
    return names[0]


def _refuse_unsupported(hf_config: Any) -> None:
    activation = getattr(hf_config, "hidden_act", None)
    if activation not in ("silu", "swish"):
        raise UnsupportedModelError(f"hidden_act is {shown(activation)}; only 'silu' is implemented")
    if getattr(hf_config, "quantization_config", None):
        raise UnsupportedModelError("quantization_config is set; quantised checkpoints are not implemented")
    layer_types = getattr(hf_config, "layer_types", None)
    if isinstance(layer_types, (list, tuple)) and layer_types:
        if len(layer_types) != getattr(hf_config, "num_hidden_layers", None):
            raise UnsupportedModelError(f"layer_types names {len(layer_types)} layers, not num_hidden_layers")
        sliding = any(kind != "full_attention" for kind in layer_types)
    else:  # transformers 4.51: from layer max_window_layers on, if the switch is on
        first, layers = getattr(hf_config, "max_window_layers", 0), getattr(hf_config, "num_hidden_layers", 0)
        sliding = bool(getattr(hf_config, "use_sliding_window", False)) and (
            not isinstance(first, int) or not isinstance(layers, int) or first < layers
        )
    if sliding:
        window = getattr(hf_config, "sliding_window", None)
        raise UnsupportedModelError(f"sliding window attention (sliding_window={shown(window)}) is not implemented")


def _rope(hf_config: Any) -> tuple[float, Llama3Scaling | None]:
    """Theta and scaling, from `rope_parameters` (5.x) or from `rope_theta` and `rope_scaling` (4.x)."""
    options = getattr(hf_config, "rope_parameters", None) or getattr(hf_config, "rope_scaling", None) or {}
    if not isinstance(options, dict):
        raise UnsupportedModelError(f"the rope options are {shown(options)}, not a table")
    kind = options.get("rope_type", options.get("type", "default"))
    if kind not in ("default", "llama3"):
        raise UnsupportedModelError(f"rope scaling {shown(kind)} is not implemented; only 'default' and 'llama3' are")
    share = options.get("partial_rotary_factor", getattr(hf_config, "partial_rotary_factor", None))
    if share not in (None, 1.0):
        raise UnsupportedModelError(f"partial_rotary_factor={shown(share)} is not implemented")
    theta = _positive("rope_theta", options.get("rope_theta", getattr(hf_config, "rope_theta", None)))
    if kind == "default":
        return theta, None
    factor, low, high, original = (
        _positive(f"rope option {name}", options.get(name))
        for name in ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
    )
    if high <= low:
        raise UnsupportedModelError(f"rope option high_freq_factor={high} must exceed low_freq_factor={low}")
    return theta, Llama3Scaling(factor, low, high, int(original))


def _size(hf_config: Any, name: str, limit: int, default: int | None = None) -> int:
    value = getattr(hf_config, name, None)
    value = default if value is None else value
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= limit:
        raise UnsupportedModelError(f"{name} in config.json is {shown(value)}, not a size from 1 to {limit}")
    return value


def _positive(name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < MAX_FLOAT:
        raise UnsupportedModelError(f"{name} in config.json is {shown(value)}, not a positive number")
    return float(value)


def _flag(hf_config: Any, name: str) -> bool:
    value = getattr(hf_config, name, None) or False
    if not isinstance(value, bool):
        raise UnsupportedModelError(f"{name} in config.json is {shown(value)}, not true or false")
    return value
