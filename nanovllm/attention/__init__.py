"""Attention backends: one file each, one signature (base.py), and the choice between them."""

import importlib
import importlib.util
import os

import torch

from nanovllm.attention.base import AttentionBackend, AttentionMetadata
from nanovllm.attention.torch_backend import TorchAttention
from nanovllm.errors import ConfigError

__all__ = ["AttentionBackend", "AttentionMetadata", "TorchAttention", "describe_backends", "select_backend"]

BACKENDS = ("flash", "triton", "torch")  # in the order of preference


def select_backend(
    name: str, device: torch.device | str, dtype: torch.dtype, head_dim: int, block_size: int
) -> tuple[type[AttentionBackend], str]:
    """The class for `name` ("auto": the first that fits) and the reason for the choice.

    Raises `ConfigError` where a backend asked for by name cannot do it, with what stands in its way.
    """
    device = torch.device(device)
    hindrances: dict[str, str] = {}
    for candidate in BACKENDS if name == "auto" else (name,):
        hindrance = _hindrance(candidate, device, dtype, head_dim, block_size, by_name=name != "auto")
        if hindrance is None:
            others = "; ".join(f"no {other}: {why}" for other, why in hindrances.items())
            return _load(candidate), others or ("asked for" if name != "auto" else "the first choice fits")
        hindrances[candidate] = hindrance
    raise ConfigError(f'attention_backend="{name}" cannot be used here: {hindrances[name]}; "auto" picks one that can')


def describe_backends(device: torch.device | str) -> list[tuple[str, bool, str]]:
    """(name, usable on this device, reason) of every backend, for `nanovllm doctor`."""
    found = []
    for name in BACKENDS:
        why = _hindrance(name, torch.device(device), torch.bfloat16, 128, 256, by_name=False)
        found.append((name, why is None, why or "usable"))
    return found


def _hindrance(
    name: str, device: torch.device, dtype: torch.dtype, head_dim: int, block_size: int, by_name: bool
) -> str | None:
    """Why the backend cannot be used, or None. `by_name`: what works but is slow is then allowed."""
    if name == "torch":
        return None
    packages = {"flash": ("flash_attn", "triton"), "triton": ("triton",)}[name]  # Triton stores the keys for both
    for package in packages:
        if importlib.util.find_spec(package) is None:
            return f"the package {package} is not installed"
    if not 32 <= head_dim <= 256:
        return f"head_dim {head_dim} is not within 32 to 256"
    if name == "triton":
        interpreted = by_name and os.environ.get("TRITON_INTERPRET") == "1"
        return None if device.type == "cuda" or interpreted else "it needs a GPU (or TRITON_INTERPRET=1, for lessons)"
    if device.type != "cuda" or torch.cuda.get_device_capability(device)[0] < 8:
        return "it needs a GPU of the Ampere generation or newer"
    if dtype not in (torch.float16, torch.bfloat16):
        return f"it computes float16 and bfloat16, not {str(dtype).removeprefix('torch.')}"
    return f"its blocks are multiples of 256 tokens, not {block_size}" if block_size % 256 else None


def _load(name: str) -> type[AttentionBackend]:
    if name == "torch":
        return TorchAttention
    module = importlib.import_module(f"nanovllm.attention.{name}_backend")
    backend: type[AttentionBackend] = module.TritonAttention if name == "triton" else module.FlashAttention
    return backend
