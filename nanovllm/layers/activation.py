"""The gate of the MLP."""

from collections.abc import Callable

import torch.nn.functional as F
from torch import Tensor, nn


class SiluAndMul(nn.Module):
    """x [..., 2 F], the gate and then the values -> silu(gate) * values [..., F]."""

    def __init__(self) -> None:
        super().__init__()
        self.kernel: Callable[[Tensor], Tensor] | None = None  # a faster stand-in, see models/prepare.py and fuse.py

    def forward(self, x: Tensor) -> Tensor:
        if self.kernel is not None:
            return self.kernel(x)
        gate, values = x.chunk(2, -1)
        return F.silu(gate) * values
