"""What a caller may give as prompts and messages: told apart, checked, and brought into one form.

Plain Python; knows neither the vocabulary nor the engine, which check the rest.
"""

from collections.abc import Mapping
from operator import index
from typing import Any

from nanovllm._html import shown
from nanovllm.errors import RequestError


def is_conversation(value: Any) -> bool:
    """Whether `value` is one chat conversation: a list of messages."""
    return isinstance(value, (list, tuple)) and bool(value) and all(isinstance(item, Mapping) for item in value)


def prompt_list(prompts: Any) -> list[Any]:
    """One or many prompts as a list: a string, or a flat list of token ids, is one. Raises `RequestError`."""
    if isinstance(prompts, str):
        return [prompts]
    if not isinstance(prompts, (list, tuple)) and not hasattr(prompts, "tolist"):
        raise RequestError(f"prompts must be text, token ids, or a list of either; got {shown(prompts)}")
    if getattr(prompts, "ndim", 1) == 0:  # an array or a tensor that is a single number
        raise RequestError(f"prompts must be text, token ids, or a list of either; got {shown(prompts)}")
    every = list(prompts)
    return [prompts] if every and is_number(every[0]) else every


def is_number(value: Any) -> bool:
    """Whether `value` can be a token id, right or wrong, and not a list of them (a tensor of one number is a list)."""
    try:
        index(value)
    except (TypeError, RuntimeError):  # the second of tensors without numbers, on the meta device
        return False
    return getattr(value, "ndim", 0) == 0


def token_id_list(prompt: Any) -> list[int]:
    """A list of ints from anything like a list of them: a tuple, an integer array or tensor; bools are refused.

    Raises `RequestError`.
    """
    try:
        if isinstance(prompt, (str, bytes, bytearray, Mapping)):
            raise TypeError(f"{type(prompt).__name__} is no list of token ids")
        items = prompt.tolist() if hasattr(prompt, "tolist") else list(prompt)
        if any(map(is_truth_value, items)):
            raise TypeError("a bool is not a token id")
        return [index(item) for item in items]
    except (TypeError, RuntimeError) as error:  # the second of sparse tensors
        raise RequestError(f"a prompt must be text or a list of token ids; got {shown(prompt)}: {error}") from error


def whole_number(value: Any) -> int:
    """`value` as an int; -1, which numbers no request, if it is none."""
    try:
        return -1 if is_truth_value(value) else index(value)
    except TypeError:
        return -1


def is_truth_value(value: Any) -> bool:
    """Whether `value` is a bool, Python's or NumPy's; `operator.index` takes the first, and with NumPy 1 the second."""
    return isinstance(value, bool) or getattr(getattr(value, "dtype", None), "kind", None) == "b"
