"""RMSNorm, with the residual addition that mostly precedes it."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn


class RMSNorm(nn.Module):
    """x / sqrt(mean(x²) + eps) * weight over the last dimension; the statistics are float32 (Zhang & Sennrich, 2019).

    With a residual it is added first and the sum returned as well: the next layer's residual.
    """

    def __init__(self, size: int, eps: float = 1e-6) -> None:
        super().__init__()
        self.eps = eps
        self.kernel: Callable[..., Any] | None = None  # a faster stand-in, see models/prepare.py and fuse.py
        self.weight = nn.Parameter(torch.ones(size), requires_grad=False)

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Tensor | tuple[Tensor, Tensor]:
        if self.kernel is not None:
            return self.kernel(x, self.weight, self.eps, residual)
        if residual is None:
            return self.normalize(x)
        x = x + residual
        return self.normalize(x), x

    def normalize(self, x: Tensor) -> Tensor:
        """The norm alone: [..., size] -> [..., size]."""
        exact = x.float()
        exact = exact * torch.rsqrt(exact.square().mean(-1, keepdim=True) + self.eps)
        return exact.to(x.dtype) * self.weight
