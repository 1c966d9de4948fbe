"""SamplingParams: how one request wants its tokens chosen, and when it wants to stop."""

import math
from dataclasses import dataclass
from numbers import Integral, Real

from nanovllm._html import ReprHTML, shown
from nanovllm.errors import MAX_INTEGER, SamplingParamsError


@dataclass(slots=True)
class SamplingParams(ReprHTML):
    """Sampling options of one request (the three fields of the course's chapter 3.2).

    temperature: divides the logits before the softmax; above 1 flattens, below 1 sharpens. It must exceed 1e-10:
        there is one sampling path, so there is no special case for 0. At 1e-5 and below no noise is drawn, which
        makes the same path return the most likely token.
    max_tokens: at most this many tokens are generated, at least 1.
    ignore_eos: keep generating past an end token, so that every request of a benchmark does the same work.

    The fields may be set afterwards; a request keeps the values that it was given, checked once more.

    Raises `SamplingParamsError` (a ValueError and an AssertionError).
    """

    temperature: float = 1.0
    max_tokens: int = 64
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        temperature, max_tokens = self.temperature, self.max_tokens
        if isinstance(temperature, bool) or not isinstance(temperature, Real):
            raise SamplingParamsError(f"temperature must be a number, got {shown(temperature)}")
        try:
            self.temperature = float(temperature)
        except (OverflowError, TypeError, ValueError):  # beyond every float
            self.temperature = math.inf
        if not self.temperature > 1e-10 or not math.isfinite(self.temperature):
            raise SamplingParamsError(
                f"temperature={shown(temperature)}: greedy sampling is not permitted; it must be finite and exceed "
                "1e-10; use temperature=1e-6 to always get the most likely token"
            )
        if isinstance(max_tokens, bool) or not isinstance(max_tokens, Integral) or not 1 <= max_tokens <= MAX_INTEGER:
            raise SamplingParamsError(f"max_tokens must be a positive integer below 2^63, got {shown(max_tokens)}")
        self.max_tokens = int(max_tokens)
        if not isinstance(self.ignore_eos, bool):
            raise SamplingParamsError(f"ignore_eos must be True or False, got {shown(self.ignore_eos)}")
