"""Grader of exercise 2.1: options that cannot work are refused, with value, limit and remedy."""

from enum import IntEnum
from fractions import Fraction
from functools import total_ordering
from numbers import Integral
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from nanovllm.config import Config
from nanovllm.errors import MAX_INTEGER, ConfigError
from nanovllm.workbook.grading import Answer, type_of

MODEL = SimpleNamespace(max_position_embeddings=1 << 20)


@Integral.register
@total_ordering
class Whole:
    """An integer of some other library: no int, but a numbers.Integral."""

    def __init__(self, value: int) -> None:
        self.value = value

    def __index__(self) -> int:
        return self.value

    __int__ = __index__

    def __eq__(self, other: object) -> bool:
        return self.value == other

    def __lt__(self, other: Any) -> bool:
        return bool(self.value < other)

    def __hash__(self) -> int:
        return hash(self.value)

    def __neg__(self) -> int:
        return -self.value

    def __abs__(self) -> int:
        return abs(self.value)

    def __repr__(self) -> str:
        return str(self.value)


class Sizes(IntEnum):
    EIGHT = 8


def build(answer: Answer, **options: Any) -> Any:
    """A `Config` with these options, on the answer's code."""
    answer.story.clear()
    answer.note("Config(model, " + ", ".join(f"{name}={value!r}" for name, value in options.items()) + ")")
    return answer.parts.resolve(Config)(str(Path(__file__).parent), hf_config=MODEL, **options)


def refused(answer: Answer, said: list[str], **options: Any) -> None:
    """The options raise a `ConfigError` whose message has all the words in it."""
    error = answer.raises(ConfigError, lambda: build(answer, **options))
    names(answer, error, said)


def names(answer: Answer, error: BaseException, said: list[str]) -> None:
    missing = [word for word in said if word not in str(error)]
    answer.require(not missing, f"the message {str(error)!r}", f"a message with {' and '.join(missing)} in it",
                   "The message names the option, the value, and what would work.")  # fmt: skip


def works(answer: Answer, size: int, backend: str) -> None:
    config = build(answer, kvcache_block_size=size, attention_backend=backend)
    answer.equal((config.kvcache_block_size, config.attention_backend), (size, backend))


def test_contract__a_plain_int(answer: Answer) -> None:
    """An integer of any type (numpy's, an IntEnum) is one, and comes back as a plain int."""
    for value in (8, np.int64(8), np.uint8(8), Whole(8), Sizes.EIGHT):
        answer.story.clear()
        got = answer.call("check_integer", "max_num_seqs", value, 1)
        answer.require(type(got) is int, f"{got!r}, {type_of(got)}", "a plain int")
        answer.equal(got, 8, "The value itself comes back.")
    with answer.about("Without at_least there is no limit below."):
        answer.equal(answer.call("check_integer", "eos", -1), -1)
        answer.equal(answer.call("check_integer", "eos", -1, at_least=None), -1)


def test_contract__check_block_size_returns_nothing(answer: Answer) -> None:
    """check_block_size returns None and changes no option."""
    with answer.about("512 is a multiple of 256, which every backend can do."):
        config = build(answer, kvcache_block_size=512)
    answer.equal(config.check_block_size(), None)
    answer.equal((config.kvcache_block_size, config.attention_backend), (512, "auto"))


def test_example__eight_and_zero(answer: Answer) -> None:
    """8 is at least 1, and 0 is not: the error names option, value and limit."""
    answer.equal(answer.call("check_integer", "max_num_seqs", 8, at_least=1), 8)
    check = answer.check_integer
    answer.note("check_integer('max_num_seqs', 0, at_least=1)")
    names(answer, answer.raises(ConfigError, lambda: check("max_num_seqs", 0, at_least=1)), ["max_num_seqs", "0", "1"])


def test_boundary__bool_is_no_integer(answer: Answer) -> None:
    """True and False are slips of the pen, although Python counts them as 1 and 0."""
    for value in (True, False):
        answer.story.clear()
        answer.note(f"check_integer('an_option', {value}, None)")
        names(answer, refuse_integer(answer, value), ["an_option", repr(value)])
    refused(answer, ["max_num_seqs", "True"], max_num_seqs=True)


def test_boundary__no_other_type(answer: Answer) -> None:
    """8.0, "8", None and 8/1 are no integers, and they are not made into some."""
    for value in (8.0, "8", None, Fraction(8), [8], 8.5, np.float32(8), float("nan")):
        answer.story.clear()
        answer.note(f"check_integer('an_option', {value!r}, 1)")
        names(answer, refuse_integer(answer, value, 1), ["an_option", repr(value)])


def test_boundary__the_limits_themselves(answer: Answer) -> None:
    """The smallest and the largest value are allowed, their neighbours are not."""
    for value, at_least in ((1, 1), (0, 0), (MAX_INTEGER, 1), (MAX_INTEGER, None), (-MAX_INTEGER, None), (5, 5)):
        answer.story.clear()
        answer.equal(answer.call("check_integer", "an_option", value, at_least), value)
    for value, at_least in ((0, 1), (-1, 0), (MAX_INTEGER + 1, 1), (-MAX_INTEGER - 1, None), (4, 5)):
        answer.story.clear()
        answer.note(f"check_integer('an_option', {value}, {at_least})")
        names(answer, refuse_integer(answer, value, at_least), ["an_option", str(value)])


def test_boundary__what_the_message_names(answer: Answer) -> None:
    """A value that is too small is shown with its own limit, whatever that is."""
    for value, at_least in ((12, 37), (-60, -50), (-7, 4096)):
        answer.story.clear()
        answer.note(f"check_integer('an_option', {value}, {at_least})")
        names(answer, refuse_integer(answer, value, at_least), ["an_option", str(value), str(at_least)])


def test_boundary__number_of_another_library_out_of_range(answer: Answer) -> None:
    """Limits count for every kind of integer."""
    answer.note("check_integer('an_option', 35, 36), where 35 is a numbers.Integral and no int")
    names(answer, refuse_integer(answer, Whole(35), 36), ["an_option", "35", "36"])
    answer.note("check_integer('an_option', numpy.int64(0), 1)")
    names(answer, refuse_integer(answer, np.int64(0), 1), ["an_option", "0", "1"])
    answer.note("check_integer('an_option', numpy.uint64(2 ** 63), 1)")
    names(answer, refuse_integer(answer, np.uint64(2**63), 1), ["an_option", str(2**63)])


def test_boundary__the_way_out_is_named(answer: Answer) -> None:
    """Where naming a backend would make the block size work, the message says so."""
    said = ["kvcache_block_size", "16", "attention_backend"]
    refused(answer, said, kvcache_block_size=16)
    refused(answer, said, kvcache_block_size=16, attention_backend="flash")
    works(answer, 16, "torch")


def test_oracle__any_integer(answer: Answer) -> None:
    """An integer is allowed from `at_least` to MAX_INTEGER, and refused everywhere else."""
    for _ in range(200):
        answer.story.clear()
        at_least = answer.rng.choice([None, 0, 1, 7, -2])
        value = answer.rng.choice([answer.rng.randint(-3, 12), answer.rng.randint(-(2**64), 2**64)])
        if (at_least is None or at_least <= value) and abs(value) < 2**63:
            answer.equal(answer.call("check_integer", "an_option", value, at_least), value)
        else:
            answer.note(f"check_integer('an_option', {value}, {at_least})")
            names(answer, refuse_integer(answer, value, at_least), ["an_option", str(value)])


def refuse_integer(answer: Answer, value: Any, at_least: int | None = None) -> BaseException:
    return answer.raises(ConfigError, lambda: answer.check_integer("an_option", value, at_least))


def test_oracle__any_block_size(answer: Answer) -> None:
    """Multiples of 256 always work; powers of two below 256 where "torch" or "triton" was named; nothing else."""
    small = {1, 2, 4, 8, 16, 32, 64, 128}
    multiples = {256, 512, 768, 1024, 2560, 256 * 4097}
    for backend in ("auto", "flash", "torch", "triton"):
        for size in (*range(1, 70), 100, 127, 128, 129, 192, 255, 257, 384, 1000, 2**60 + 1, *sorted(multiples)):
            if size in multiples or (size in small and backend in ("torch", "triton")):
                works(answer, size, backend)
            else:
                said = ["kvcache_block_size", str(size), *(["attention_backend"] if size in small else [])]
                refused(answer, said, kvcache_block_size=size, attention_backend=backend)


def test_invariant__the_whole_config(answer: Answer) -> None:
    """Inside `Config` every option is checked under its own name, and the good ones stay what they were."""
    config = build(answer, max_num_seqs=np.int32(3), seed=0, num_kvcache_blocks=7, tensor_parallel_size=2, eos=-1)
    values = (config.max_num_seqs, config.seed, config.num_kvcache_blocks, config.tensor_parallel_size, config.eos)
    answer.equal(values, (3, 0, 7, 2, -1))
    for name in ("max_num_batched_tokens", "max_num_seqs", "max_model_len", "kv_cache_memory", "prefill_chunk"):
        refused(answer, [name, "-2"], **{name: -2})
        refused(answer, [name, "'2'"], **{name: "2"})
    refused(answer, ["stop_token_ids", "-5"], stop_token_ids=[3, -5])
