"""Chapter 2: from options and prompts to text. Five pieces of the way that a request takes through the engine.

Functions whose first argument is `self` are methods; they run inside the engine's own class, which the annotation of
`self` names. The others are static methods of it: they get nothing but their arguments. What you may use:

    ConfigError, RequestError     the errors that the engine raises at its boundary
    shown(value)                  how a message shows a value that it was given: its repr, cut where it is long
    MAX_INTEGER                   2^63 - 1, the largest number that an option may have
    FinishReason.STOP, .LENGTH    why a sequence ends
    BROKEN                        the character that a tokenizer writes where bytes are missing
"""

from collections.abc import Callable
from numbers import Integral
from typing import Any

from nanovllm._html import shown
from nanovllm.config import Config
from nanovllm.engine.events import FinishReason
from nanovllm.engine.scheduler import Scheduler
from nanovllm.engine.sequence import Sequence
from nanovllm.errors import MAX_INTEGER, ConfigError, RequestError
from nanovllm.sampling_params import SamplingParams
from nanovllm.text_pieces import TextPieces

BROKEN = "\ufffd"


def check_integer(name: str, value: Any, at_least: int | None = None) -> int:
    """Exercise 2.1, part one. The value of the option `name` as a plain int, or a `ConfigError`.

    >>> check_integer("max_num_seqs", 8, at_least=1)
    8

    Integers of other libraries count as well, whatever is a `numbers.Integral`: numpy.int64(8) comes out as 8. True
    and False do not count, although Python's bool is an int (`max_num_seqs=True` is a slip of the pen); neither do 8.0
    and "8". `at_least` is the smallest value that is allowed (None: no limit below), and nothing may be larger than
    MAX_INTEGER or smaller than -MAX_INTEGER.

    The message of the error names the option and shows the value; where the value is too small, also the limit:

    >>> check_integer("max_num_seqs", 0, at_least=1)
    ConfigError: max_num_seqs must be at least 1, got 0
    """
    # --- your code (2.1) ---
    if not isinstance(value, Integral) or isinstance(value, bool):
        raise ConfigError(f"{name} wants an integer; {shown(value)} is none")
    if at_least is not None and value < at_least:
        raise ConfigError(f"{name} is {shown(value)}, but the smallest that works is {at_least}")
    if not -MAX_INTEGER <= value <= MAX_INTEGER:
        raise ConfigError(f"{name} is {shown(value)}, which is beyond 2^63")
    return int(value)
    # --- end ---


def check_block_size(self: Config) -> None:
    """Exercise 2.1, part two. Raise a `ConfigError` if `self.kvcache_block_size` (1 or more) cannot work.

    A multiple of 256 works with every attention backend. The backends "torch" and "triton" can also use smaller
    powers of two (1, 2, 4, ... 128), but only where `self.attention_backend` names one of them: "auto" may turn out to
    be another one. Nothing else works.

    The message names kvcache_block_size and the value. Where another `attention_backend` would make the size work, the
    message names that option too, since this is the way out.
    """
    # --- your code (2.1) ---
    size = self.kvcache_block_size
    small_blocks = self.attention_backend in ("torch", "triton")
    is_power_of_two = size.bit_count() == 1
    if size % 256 == 0 or (small_blocks and is_power_of_two):
        return
    ways = "a multiple of 256"
    if not small_blocks:
        ways += ', or a power of two with attention_backend="torch" or "triton"'
    raise ConfigError(f"kvcache_block_size={size} does not work; it must be {ways}")
    # --- end ---


def broadcast(sampling_params: Any, num_prompts: int) -> list[SamplingParams]:
    """Exercise 2.2. One `SamplingParams` for each of `num_prompts` prompts, as a new list.

    >>> broadcast(SamplingParams(max_tokens=5), 2)
    [SamplingParams(..., max_tokens=5, ...), SamplingParams(..., max_tokens=5, ...)]

    * a `SamplingParams`: it counts for every prompt;
    * None (`generate` was called without any): `SamplingParams()` counts for every prompt;
    * a list or a tuple: one each, so it must have exactly `num_prompts` items. What the items are is checked later.

    Anything else, and a list of another length, raises a `RequestError` before anything is queued: `zip` would drop
    prompts silently. Of a list of another length, the message names both numbers. The given list stays as it is.
    """
    # --- your code (2.2) ---
    if sampling_params is None or isinstance(sampling_params, SamplingParams):
        one_for_all = sampling_params or SamplingParams()
        return [one_for_all for _ in range(num_prompts)]
    if not isinstance(sampling_params, list | tuple):
        raise RequestError(f"{shown(sampling_params)} is neither a SamplingParams nor a list of them")
    if len(sampling_params) == num_prompts:
        return [*sampling_params]
    raise RequestError(f"{len(sampling_params)} sampling params for {num_prompts} prompts; one for all or one each")
    # --- end ---


def drive(
    seq_ids: list[int],
    step: Callable[[], tuple[list[tuple[int, list[int]]], int]],
    is_finished: Callable[[], bool],
    report: Callable[[str, int, float], None],
    clock: Callable[[], float],
) -> list[list[int]]:
    """Exercise 2.3. The main loop of `generate`: step until nothing is left, and return the results in order.

    `step()` runs one step of the engine. It returns `(finished, num_tokens)`: the requests that ended in this step as
    pairs `(seq_id, token_ids)`, and a number whose sign tells the phase. Positive: the step computed prompts, that many
    tokens. Negative: it was a decode step of that many rows, a token each. 0: there was nothing to do.

    `is_finished()` tells whether the engine has nothing left to do. Other requests than ours may be in it (somebody
    queued them by hand); the loop runs until they are done too, but does not return them.

    `report(phase, num_tokens, seconds)` feeds the progress bar. Call it after each step that did something, with
    "Prefill" or "Decode", the number of tokens (positive) and what this one step took by `clock()`.

    Returns the token ids of the requests `seq_ids`, in the order of `seq_ids`: the order of the prompts, and not the
    order in which they finished. Of two requests 0 and 1, where 1 finishes first:

        step() -> ([], 12)               a prefill of 12 tokens            report("Prefill", 12, ...)
        step() -> ([(1, [7, 2])], -2)    a decode of two rows, 1 ends      report("Decode", 2, ...)
        step() -> ([(0, [5, 6, 2])], -1) a decode of one row, 0 ends       report("Decode", 1, ...)
        result: [[5, 6, 2], [7, 2]]
    """
    # --- your code (2.3) ---
    completions: dict[int, list[int]] = {}
    while not is_finished():
        before = clock()
        finished, num_tokens = step()
        seconds = clock() - before
        for seq_id, token_ids in finished:
            completions[seq_id] = token_ids
        if num_tokens > 0:
            report("Prefill", num_tokens, seconds)
        elif num_tokens < 0:
            report("Decode", -num_tokens, seconds)
    return [completions[seq_id] for seq_id in seq_ids]
    # --- end ---


def stop_reason(self: Scheduler, seq: Sequence) -> FinishReason | None:
    """Exercise 2.4. Why a sequence ends after the token that it just got (`seq.last_token`); None: it goes on.

    FinishReason.STOP
        the token is an end token (one of `self.stop_token_ids`), unless `seq.ignore_eos` says that these do not count.
    FinishReason.LENGTH
        it has generated `seq.max_tokens` tokens (`seq.num_completion_tokens` so far), or it is as long as a sequence
        may be: prompt and generated tokens together (`seq.num_tokens`) have reached `self.max_model_len`, or are one
        more than the pool holds (`self.block_manager.capacity` tokens). That last token has no slot any more, and needs
        none, because nothing is computed after it.

    Where both hold, it is STOP: the model was done, and that the limit is reached too changes nothing. With
    max_tokens=3 and the end token 2, a sequence that has generated [5, 6] goes on; with [5, 6, 7] it ends by LENGTH,
    with [5, 2] by STOP, and with [5, 6, 2] by STOP. Only looks: whoever asks changes the sequence.
    """
    # --- your code (2.4) ---
    is_end_token = seq.token_ids[-1] in self.stop_token_ids
    if is_end_token and not seq.ignore_eos:
        return FinishReason.STOP
    out_of_tokens = seq.num_completion_tokens >= seq.max_tokens
    out_of_context = seq.num_tokens >= self.max_model_len
    out_of_blocks = seq.num_tokens > self.block_manager.capacity
    return FinishReason.LENGTH if out_of_tokens or out_of_context or out_of_blocks else None
    # --- end ---


def push(self: TextPieces, token_ids: list[int], is_last: bool) -> str:
    """Exercise 2.5. The text that has been added to a stream since the last call.

    `token_ids` is the whole list generated so far, one or more tokens longer than at the last call. `is_last`: the
    request is finished. `self._decode(token_ids)` gives the text of any list of ids, without special tokens.

    * All pieces together are the text of all tokens, whatever that is: `"".join(pieces) == self._decode(token_ids)`.
    * A character may be spread over several tokens: "é" is two bytes, and a byte may be a token. Until its last byte is
      there, a text ends in BROKEN; then nothing is handed out (""), and the next call gives the whole character. At the
      end (`is_last`) everything is handed out as it is. Asked once more after that, there is nothing to add.
    * Everything else is handed out at once: a stream that waits is no stream.
    * Many tokenizers write a token differently at the very beginning: decoded alone, " world" becomes "world". So new
      tokens must be decoded together with what is in front of them.
    * But not with everything in front of them: a stream of n tokens may decode a few tokens in each call (before the
      last one), not all n. The tokens of the piece before are enough.

    >>> pieces = TextPieces(tokenizer)            # a token is a byte here
    >>> [pieces.push(list(b"caf\\xc3"[:n]), False) for n in (1, 2, 3, 4)], pieces.push(list(b"caf\\xc3\\xa9"), False)
    (['c', 'a', 'f', ''], 'é')

    `self.start` and `self.read` (both 0 at first) are for two places in the list, `self.sent` ("" at first) is for the
    text handed out so far; they are yours, and so is any attribute that you add.
    """
    # --- your code (2.5) ---
    if is_last:
        rest = self._decode(token_ids)[len(self.sent) :]
        self.sent += rest
        return rest
    known = self._decode(token_ids[self.start : self.read])
    text = self._decode(token_ids[self.start :])
    new = "" if text.endswith(BROKEN) else text[len(known) :]
    if new:
        self.sent += new
        self.start = self.read
        self.read = len(token_ids)
    return new
    # --- end ---
