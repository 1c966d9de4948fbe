"""SamplingParams: how one request wants its tokens chosen, and when it wants to stop."""

import math
from dataclasses import dataclass
from numbers import Integral, Real

from nanovllm._html import ReprHTML
from nanovllm.errors import SamplingParamsError


@dataclass(slots=True)
class SamplingParams(ReprHTML):
    """Sampling options of one request (the three fields of the course's chapter 3.2).

    temperature: divides the logits before the softmax; above 1 flattens, below 1 sharpens. It must exceed 1e-10:
        there is one sampling path, so there is no special case for 0. At 1e-5 and below no noise is drawn, which
        makes the same path return the most likely token.
    max_tokens: at most this many tokens are generated, at least 1.
    ignore_eos: keep generating past an end token, so that every request of a benchmark does the same work.

    Raises `SamplingParamsError` (a ValueError and an AssertionError).
    """

    temperature: float = 1.0
    max_tokens: int = 64
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        temperature, max_tokens = self.temperature, self.max_tokens
        if isinstance(temperature, bool) or not isinstance(temperature, Real):
            raise SamplingParamsError(f"temperature must be a number, got {temperature!r}")
        try:
            self.temperature = float(temperature)
        except OverflowError:
            self.temperature = math.inf
        if not self.temperature > 1e-10 or not math.isfinite(self.temperature):
            raise SamplingParamsError(
                f"temperature={temperature!r}: greedy sampling is not permitted; it must be finite and exceed 1e-10; "
                "use temperature=1e-6 to always get the most likely token"
            )
        if isinstance(max_tokens, bool) or not isinstance(max_tokens, Integral) or max_tokens < 1:
            raise SamplingParamsError(f"max_tokens must be a positive integer, got {max_tokens!r}")
        self.max_tokens = int(max_tokens)
        if not isinstance(self.ignore_eos, bool):
            raise SamplingParamsError(f"ignore_eos must be True or False, got {self.ignore_eos!r}")
