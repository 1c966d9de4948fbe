"""From logits to token ids: one path for every temperature."""

from collections.abc import Callable

import torch
from torch import Tensor, nn

COLD = 1e-5  # at this temperature or below a row draws no noise: its sample is the argmax


class Sampler(nn.Module):
    """Draws one token a row from softmax(logits / temperature), by the exponential race.

    If E_i ~ Exp(1) are independent, argmax_i p_i / E_i is a draw from p. In logarithms, with p = softmax(x / t), and
    multiplied by t, that is argmax_i x_i - t * log E_i: no softmax is needed, and at t = 0 it *is* the argmax. Above
    t = 1 the same score is divided by t, so that it stays finite for every temperature.
    """

    def __init__(self) -> None:
        super().__init__()
        self.kernel: Callable[..., Tensor] | None = None  # a faster stand-in on a GPU, see models/fuse.py

    def forward(
        self,
        logits: Tensor,
        temperatures: Tensor,
        generator: torch.Generator | None = None,
        needs_noise: bool = True,
    ) -> Tensor:
        """logits [S, V], temperatures [S] -> token ids [S]; equal scores go to the lowest id.

        needs_noise: False if every temperature is at most 1e-5; the host knows, so the device need not be asked.
        """
        if self.kernel is not None:
            return self.kernel(logits, temperatures, generator, needs_noise)
        if not needs_noise:
            return logits.argmax(-1)
        t = temperatures.unsqueeze(-1)  # [S, 1]
        noise = torch.empty_like(logits, dtype=torch.float32).exponential_(generator=generator)
        noise = noise.clamp_min_(torch.finfo(torch.float32).tiny).log_()  # an E of 0 would make 0 * log E a NaN
        scale = torch.where(t <= COLD, 0.0, t.clamp(max=1.0))
        return (logits.float() / t.clamp(min=1.0) - scale * noise).argmax(-1)
