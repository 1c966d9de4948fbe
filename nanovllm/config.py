"""Config: every option of an engine, checked in one place."""

import os
from dataclasses import dataclass, field, fields
from difflib import get_close_matches
from numbers import Integral, Real
from pathlib import Path
from typing import Any

from nanovllm._html import ReprHTML, shown
from nanovllm.errors import MAX_INTEGER, ConfigError, ModelNotFoundError, UnsupportedModelError
from nanovllm.model_folder import check_config
from nanovllm.paths import missing_model_message

ATTENTION_BACKENDS = ("auto", "flash", "triton", "torch")
SCHEDULING_POLICIES = ("prefill_first", "mixed")
DTYPES = ("auto", "float32", "bfloat16", "float16")
LOAD_FORMATS = ("safetensors", "random")
QUANTIZATIONS = (None, "int8")


@dataclass(slots=True)
class Config(ReprHTML):
    """Options of an engine. The first eleven fields are the course's (chapter 3.2), in its order and with its defaults.

    model: folder of a model in Hugging Face's layout.
    max_num_batched_tokens: tokens computed in one step at most (the token budget); it bounds prefill.
    max_num_seqs: sequences resident at a time, half-prefilled ones included; it bounds decode.
    max_model_len: prompt plus generated tokens of one sequence (a prompt that long still gets one token); cut to what
        the model was trained for.
    gpu_memory_utilization: share of the GPU's memory that weights, activations and KV cache may take together.
    tensor_parallel_size: processes (GPUs) that share every layer, 1 to 8.
    enforce_eager: never capture CUDA graphs.
    hf_config: the model's own configuration, as transformers reads it; from the folder `model` unless given.
    eos: the tokenizer's end token, filled in by the engine; -1 where it has none.
    kvcache_block_size: tokens in one KV block, a multiple of 256 (what flash-attn's paged kernels want). Naming a
        backend without that limit (`attention_backend="torch"` or `"triton"`) also allows smaller powers of two.
    num_kvcache_blocks: blocks in the pool; -1: as many as the memory holds, filled in by the engine.

    Further options, by keyword only:

    device: "auto" (CUDA if there is any), "cpu", "cuda" or "cuda:1".
    dtype: of weights and KV cache; "auto": the model's own on a GPU, bfloat16 on a CPU that computes it natively,
        float32 elsewhere.
    attention_backend: "auto", "flash", "triton" or "torch".
    seed: of the sampling noise; None draws a fresh one.
    scheduling_policy: "prefill_first" (a step is prefill or decode, as in the course) or "mixed" (running sequences
        decode in every step and prompts fill the rest of the budget).
    prefill_chunk: prompt tokens in one step at most; None: 1,024 on a CPU, the whole budget on a GPU.
    enable_prefix_caching: reuse the KV blocks of prompts that begin alike.
    kv_cache_memory: bytes of the KV pool on a CPU (default 1 GiB; a pool given in blocks stands as it is).
    load_format: "safetensors", or "random" for weights drawn from `seed` (benchmarks need only the shapes).
    quantization: None, or "int8" for weight-only int8 linear layers.
    compile: fuse the small operations of the layers by Triton kernels on a GPU; on a CPU do a decode step in one call
        of a library that a C compiler builds once (None: where it can be; True: or say why not).
    stop_token_ids: further end tokens, filled in by the engine from the model's generation config.

    Raises `ConfigError` (a ValueError and an AssertionError) that names the value, the limit and the remedy.
    """

    model: str
    max_num_batched_tokens: int = 16384
    max_num_seqs: int = 512
    max_model_len: int = 4096
    gpu_memory_utilization: float = 0.9
    tensor_parallel_size: int = 1
    enforce_eager: bool = False
    hf_config: Any = None
    eos: int = -1
    kvcache_block_size: int = 256
    num_kvcache_blocks: int = -1

    device: str = field(default="auto", kw_only=True)
    dtype: str = field(default="auto", kw_only=True)
    attention_backend: str = field(default="auto", kw_only=True)
    seed: int | None = field(default=None, kw_only=True)
    scheduling_policy: str = field(default="prefill_first", kw_only=True)
    prefill_chunk: int | None = field(default=None, kw_only=True)
    enable_prefix_caching: bool = field(default=True, kw_only=True)
    kv_cache_memory: int = field(default=1 << 30, kw_only=True)
    load_format: str = field(default="safetensors", kw_only=True)
    quantization: str | None = field(default=None, kw_only=True)
    compile: bool | None = field(default=None, kw_only=True)
    stop_token_ids: tuple[int, ...] = field(default=(), kw_only=True)

    def __post_init__(self) -> None:
        self.check_options()
        if not isinstance(self.model, (str, os.PathLike)):
            raise ConfigError(f"model must be the path of a model folder, got {shown(self.model)}")
        self.model = os.path.expanduser(os.fsdecode(self.model))
        if not os.path.isdir(self.model):
            raise ModelNotFoundError(missing_model_message(self.model))
        if self.hf_config is None:
            self.hf_config = load_hf_config(self.model)
        limit = getattr(self.hf_config, "max_position_embeddings", None)
        if isinstance(limit, bool) or not isinstance(limit, int) or limit < 1:
            raise UnsupportedModelError(f"{self.model}: max_position_embeddings is {shown(limit)}, not a size")
        self.max_model_len = min(self.max_model_len, limit)

    def check_options(self) -> None:
        """Check every option that can be judged without looking at the model."""
        for name in ("max_num_batched_tokens", "max_num_seqs", "max_model_len", "kv_cache_memory"):
            setattr(self, name, self._integer(name, at_least=1))
        self.kvcache_block_size = self._integer("kvcache_block_size", at_least=1)
        self.tensor_parallel_size = self._integer("tensor_parallel_size")
        self.num_kvcache_blocks = self._integer("num_kvcache_blocks")
        self.eos = self._integer("eos")
        for name in ("seed", "prefill_chunk"):
            if getattr(self, name) is not None:
                setattr(self, name, self._integer(name, at_least=0 if name == "seed" else 1))
        for name in ("enforce_eager", "enable_prefix_caching"):
            self._one_of(name, (True, False))
        self._one_of("compile", (None, True, False))
        self._one_of("attention_backend", ATTENTION_BACKENDS)
        self._one_of("scheduling_policy", SCHEDULING_POLICIES)
        self._one_of("dtype", DTYPES)
        self._one_of("load_format", LOAD_FORMATS)
        self._one_of("quantization", QUANTIZATIONS)
        if not isinstance(self.stop_token_ids, (tuple, list, set, frozenset)):
            raise ConfigError(f"stop_token_ids must be token ids, got {shown(self.stop_token_ids)}")
        check = self.check_integer
        self.stop_token_ids = tuple(check("stop_token_ids", each, at_least=0) for each in self.stop_token_ids)
        if not isinstance(self.device, str):
            raise ConfigError(f"device must be 'auto', 'cpu', 'cuda' or 'cuda:N', got {shown(self.device)}")
        share = self.gpu_memory_utilization
        if isinstance(share, bool) or not isinstance(share, Real) or not 0 < share <= 1:
            raise ConfigError(f"gpu_memory_utilization must be above 0 and at most 1, got {shown(share)}")
        self.gpu_memory_utilization = float(share)
        if not 1 <= self.tensor_parallel_size <= 8:
            raise ConfigError(f"tensor_parallel_size must be 1 to 8, got {self.tensor_parallel_size}")
        if self.num_kvcache_blocks != -1 and self.num_kvcache_blocks < 1:
            raise ConfigError(
                f"num_kvcache_blocks must be positive, or -1 to size the pool by memory, got {self.num_kvcache_blocks}"
            )
        self.check_block_size()

    def check_block_size(self) -> None:
        """Multiples of 256 for every backend; also smaller powers of two where a backend was named that can."""
        size = self.kvcache_block_size
        if size % 256 == 0:
            return
        if self.attention_backend not in ("torch", "triton"):
            raise ConfigError(
                f"kvcache_block_size={size} must be a multiple of 256; for smaller blocks (powers of two) name a "
                'backend that can use them: attention_backend="torch" or "triton"'
            )
        if size & (size - 1):
            raise ConfigError(f"kvcache_block_size={size} must be a power of two or a multiple of 256")

    def __reduce__(self) -> tuple[Any, ...]:
        """Only values travel to other processes, not the class: a replaced check (`engine.parts`) has done its work."""
        return restored, ({f.name: getattr(self, f.name) for f in fields(Config)},)

    def _integer(self, name: str, at_least: int | None = None) -> int:
        return self.check_integer(name, getattr(self, name), at_least)

    @staticmethod
    def check_integer(name: str, value: Any, at_least: int | None = None) -> int:
        """`value` as an int. A bool is none, though Python counts it as one; numpy's integers are."""
        if isinstance(value, bool) or not isinstance(value, Integral):
            raise ConfigError(f"{name} must be an integer, got {shown(value)}")
        number = int(value)
        if at_least is not None and number < at_least:
            raise ConfigError(f"{name} must be at least {at_least}, got {shown(number)}")
        if abs(number) > MAX_INTEGER:
            raise ConfigError(f"{name} must be below 2^63, got {shown(number)}")
        return number

    def _one_of(self, name: str, allowed: tuple[Any, ...]) -> None:
        value = getattr(self, name)
        if not any(value is choice or (isinstance(value, str) and value == choice) for choice in allowed):
            raise ConfigError(f"{name} must be one of {', '.join(map(repr, allowed))}; got {shown(value)}")

    def _repr_rows(self) -> list[tuple[str, Any]]:
        rows = ReprHTML._repr_rows(self)
        return [(name, type(value).__name__ if name == "hf_config" else value) for name, value in rows]


def restored(values: dict[str, Any]) -> Config:
    """A `Config` of values that were checked in another process."""
    config = object.__new__(Config)
    for name, value in values.items():
        setattr(config, name, value)
    return config


def load_hf_config(model: str) -> Any:
    """The folder's `config.json` as transformers reads it; never code from the folder, never the network.

    Raises `UnsupportedModelError` where the file is missing, damaged, or of an architecture unknown to transformers.
    """
    check_config(Path(model))
    from transformers import AutoConfig  # takes about a second, and only an engine needs it

    try:
        return AutoConfig.from_pretrained(model, trust_remote_code=False, local_files_only=True)
    except Exception as error:
        raise UnsupportedModelError(f"cannot read config.json in {model}: {type(error).__name__}: {error}") from error


def nearest_option(name: str) -> str | None:
    """The Config field whose name is closest to a mistyped one."""
    matches = get_close_matches(name, [f.name for f in fields(Config)], n=1)
    return matches[0] if matches else None
