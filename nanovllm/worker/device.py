"""Which device and which number format an engine uses, and why."""

import torch

from nanovllm.errors import ConfigError


def select_device(name: str, rank: int = 0) -> torch.device:
    """The device of a rank: "auto" is CUDA if there is any, and rank r takes GPU r. Raises `ConfigError`."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ConfigError(f"device must be 'auto', 'cpu', 'cuda' or 'cuda:N', got {name!r}") from error
    if device.type == "cuda":
        if not torch.cuda.is_available():
            raise ConfigError(f"device={name!r}, but torch sees no CUDA device; use device='cpu'")
        device = torch.device("cuda", (device.index or 0) + rank)
        if device.index >= torch.cuda.device_count():
            raise ConfigError(f"rank {rank} needs {device}, but torch sees {torch.cuda.device_count()} CUDA devices")
    elif device.type != "cpu":
        raise ConfigError(f"device must be 'auto', 'cpu', 'cuda' or 'cuda:N', got {name!r}")
    return device


def select_dtype(name: str, device: torch.device, model_dtype: torch.dtype | None) -> torch.dtype:
    """The number format of weights and KV cache. "auto": the model's own on a GPU (float16 where a GPU is too old for
    bfloat16), bfloat16 on a CPU with instructions for it, float32 on any other.
    """
    if name != "auto":
        dtype = getattr(torch, name)
        assert isinstance(dtype, torch.dtype), f"{name} is not a dtype"
        return dtype
    if device.type == "cuda":
        dtype = model_dtype if model_dtype in (torch.float32, torch.float16) else torch.bfloat16
        return torch.float16 if dtype is torch.bfloat16 and not torch.cuda.is_bf16_supported(False) else dtype
    return torch.bfloat16 if cpu_computes_bfloat16() else torch.float32


def cpu_computes_bfloat16() -> bool:
    """Whether this CPU multiplies bfloat16 natively (AVX512-BF16 or AMX); emulation is slower than float32."""
    checks = ("_is_avx512_bf16_supported", "_is_amx_tile_supported")
    return any(getattr(torch.cpu, check, lambda: False)() for check in checks)
