"""The gate of the MLP."""

import torch.nn.functional as F
from torch import Tensor, nn


class SiluAndMul(nn.Module):
    """x [..., 2 F], the gate and then the values -> silu(gate) * values [..., F]."""

    def forward(self, x: Tensor) -> Tensor:
        gate, values = x.chunk(2, -1)
        return F.silu(gate) * values
