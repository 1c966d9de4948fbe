"""Rotary position embedding (Su et al., 2021), with the frequency scaling of Llama 3."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class Llama3Scaling:
    """How Llama 3.1 stretches the wavelengths that exceed its first training length (Meta, 2024).

    Waves shorter than original / high_freq_factor stay; those longer than original / low_freq_factor are stretched by
    `factor`; between them the frequency slides from one to the other.
    """

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position: int

    def apply(self, inv_freq: Tensor) -> Tensor:
        """Frequencies [H/2], in radians per position, with the slow ones slowed down."""
        turns = self.original_max_position * inv_freq / (2 * math.pi)  # full turns within the first training length
        keep = (turns - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor)
        keep = keep.clamp(0, 1)
        return keep * inv_freq + (1 - keep) * inv_freq / self.factor


class RotaryEmbedding(nn.Module):
    """Turns each pair (x[i], x[i + H/2]) of a head by the angle position * theta^(-2i/H).

    The table holds cos and sin side by side, [max_position, H]; row p serves the token at position p of its sequence,
    wherever that token lies in the flat batch. With H = 4, theta = 100 and position 3 the angles are 3 and 0.3.
    """

    cos_sin: Tensor

    def __init__(
        self, head_dim: int, max_position: int, theta: float = 10000.0, scaling: Llama3Scaling | None = None
    ) -> None:
        super().__init__()
        inv_freq = theta ** (-torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)
        if scaling is not None:
            inv_freq = scaling.apply(inv_freq)
        angles = torch.arange(max_position, dtype=torch.float32)[:, None] * inv_freq  # [max_position, H/2]
        self.register_buffer("cos_sin", torch.cat((angles.cos(), angles.sin()), -1), persistent=False)

    def forward(self, positions: Tensor, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        """positions [T], q [T, N, H], k [T, K, H] -> both turned."""
        cos, sin = self.cos_sin[positions].unsqueeze(1).chunk(2, -1)  # [T, 1, H/2] each
        return rotate(q, cos, sin), rotate(k, cos, sin)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x [T, heads, H] with its halves turned against each other by cos, sin [T, 1, H/2]."""
    first, second = x.chunk(2, -1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1)
