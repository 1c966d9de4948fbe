"""Whatever is given: the documented result or one of the package's errors, and the engine stays as it was.

The cases are generated: every odd value in every place of the public interface that takes a value.
"""

import copy
import decimal
import fractions
import math
import re
import warnings
from collections import OrderedDict, UserList, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from nanovllm import LLM, Config, NanoVLLMError, SamplingParams
from nanovllm.errors import ConfigError, RequestError, SamplingParamsError, UnsupportedModelError
from tests.faults.engines import assert_whole, build, cold, token_ids

PROMPT = [5, 6, 7]


class Unprintable:
    def __repr__(self) -> str:
        raise ZeroDivisionError("no repr")


class Indexable:
    """An integer of somebody else's making."""

    def __index__(self) -> int:
        return 6


class Text(str):
    """A string of somebody else's making."""


NOT_EVEN_CLOSE: dict[str, Any] = {
    "None": None,
    "object": object(),
    "unprintable": Unprintable(),
    "type": int,
    "function": len,
    "bytes": b"abc",
    "bytearray": bytearray(b"abc"),
    "dict": {"a": 1},
    "set": {5, 6},
    "complex": 1 + 2j,
    "decimal": decimal.Decimal("1.5"),
    "ellipsis": ...,
    "module": math,
    "exception": ValueError("x"),
    "generator": (i for i in ()),
}
ODD_NUMBERS: dict[str, Any] = {
    "nan": math.nan, "inf": math.inf, "-inf": -math.inf, "-0.0": -0.0, "1.5": 1.5, "1e-400": 1e-400, "1e308": 1e308,
    "zero": 0, "minus one": -1, "2**31": 2**31, "2**63": 2**63, "2**64": 2**64, "-2**63-1": -(2**63) - 1,
    "10**400": 10**400, "10**5000": 10**5000, "-10**5000": -(10**5000), "True": True, "False": False,
    "np.int64": np.int64(-3), "np.uint64 max": np.uint64(2**64 - 1), "np.float32 nan": np.float32("nan"),
    "np.float64 inf": np.float64("inf"), "np.bool_": np.bool_(True), "np.array": np.array(1.5), "np.str_": np.str_("1"),
    "tensor": torch.tensor(-2), "tensor nan": torch.tensor(math.nan), "tensor list": torch.tensor([1, 2]),
    "fraction": fractions.Fraction(-1, 3), "np.datetime64": np.datetime64("2024-01-01"),
    "np.void": np.zeros(1, "i4,i4")[0],
}  # fmt: skip
ODD_TEXTS: dict[str, Any] = {
    "empty": "", "lone surrogate": "\ud800", "low surrogate": "a\udfffb", "digits": "12", "number": "1e5", "path": "/",
}  # fmt: skip
ODD = {**NOT_EVEN_CLOSE, **ODD_NUMBERS, **ODD_TEXTS}


def cases(values: dict[str, Any]) -> Any:
    return pytest.mark.parametrize("value", list(values.values()), ids=list(values))


@pytest.fixture(scope="module")
def llm(tiny_model_dir: Path) -> Iterator[LLM]:
    with build(tiny_model_dir) as engine:
        yield engine


@pytest.fixture(scope="module")
def answer(llm: LLM) -> list[int]:
    return token_ids(llm.generate([PROMPT], cold(2), use_tqdm=False))[0]


def attempt(llm: LLM, answer: list[int], call: Callable[[], Any]) -> tuple[Any, NanoVLLMError | None]:
    """The call's result or error, once it is sure that the engine does not remember the call."""
    config, step_count = copy.copy(llm.config), llm.step_count
    result, error = None, None
    try:
        result = call()
    except NanoVLLMError as caught:
        error = caught
        assert len(str(error)) < 2000, "the message holds the whole value"
        assert llm.step_count == step_count, "it was refused, but after work was done"
    assert_whole(llm)
    assert llm.config == config and not llm._hooks and not llm._unclaimed
    assert token_ids(llm.generate([PROMPT], cold(2), use_tqdm=False))[0] == answer
    return result, error


# ---- options -----------------------------------------------------------------------------------------------------


@cases(ODD)
@pytest.mark.parametrize("option", ["temperature", "max_tokens", "ignore_eos"])
def test_sampling_params(option: str, value: Any) -> None:
    try:
        params = SamplingParams(**{option: value})
    except SamplingParamsError as error:
        assert option in str(error) and len(str(error)) < 500
        return
    kept = getattr(params, option)
    if option == "temperature":
        assert type(kept) is float and 1e-10 < kept < math.inf and kept == value
    elif option == "max_tokens":
        assert type(kept) is int and 0 < kept < 2**63 and kept == value
    else:
        assert kept is value and type(value) is bool
    assert repr(params) and params._repr_html_()


INTEGERS = (
    "max_num_batched_tokens", "max_num_seqs", "max_model_len", "tensor_parallel_size", "kvcache_block_size",
    "num_kvcache_blocks", "eos", "seed", "prefill_chunk", "kv_cache_memory",
)  # fmt: skip
WORDS = ("device", "dtype", "attention_backend", "scheduling_policy", "load_format", "quantization")
OTHERS = ("enforce_eager", "enable_prefix_caching", "compile", "gpu_memory_utilization", "stop_token_ids", "hf_config")


@pytest.mark.parametrize("option", [*INTEGERS, *WORDS, *OTHERS])
def test_config(tiny_model_dir: Path, option: str) -> None:
    for name, value in ODD.items():
        try:
            config = Config(str(tiny_model_dir), **{option: value})
        except NanoVLLMError as error:
            assert len(str(error)) < 1000, name
            continue
        kept = getattr(config, option)
        if option in INTEGERS:
            assert kept is None or type(kept) is int, name
        elif option == "gpu_memory_utilization":
            assert type(kept) is float and 0 < kept <= 1, name
        elif option == "stop_token_ids":
            assert type(kept) is tuple and all(type(each) is int for each in kept), name
        elif option != "hf_config":
            assert kept is None or isinstance(kept, (bool, str)), name
        assert repr(config) and config._repr_html_()


@pytest.mark.parametrize("option", INTEGERS)
def test_a_truth_is_no_number_of_an_option(tiny_model_dir: Path, option: str) -> None:
    for value in (True, False):
        with pytest.raises(ConfigError, match=f"^{option} must be an integer, got {value}$"):
            Config(str(tiny_model_dir), **{option: value})


@cases({"negative": -1, "text": "2", "float": 2.0, "truth": True, "None": None, "list": [2], "huge": 2**63})
def test_end_tokens_that_are_none(tiny_model_dir: Path, value: Any) -> None:
    for ids in ([value], (5, value)):
        with pytest.raises(ConfigError, match="^stop_token_ids must be"):
            Config(str(tiny_model_dir), stop_token_ids=ids)
    assert Config(str(tiny_model_dir), stop_token_ids=[np.int64(2)]).stop_token_ids == (2,)


@cases({**ODD, "missing": "no/such/folder", "nul": "a\0b", "long": "x" * 5000, "dots": "../..", "file": __file__})
def test_model(value: Any) -> None:
    """Here "" and "/" are folders without a config.json."""
    with pytest.raises(NanoVLLMError) as caught:
        LLM(value)
    assert isinstance(caught.value, (ConfigError, UnsupportedModelError))


@pytest.mark.parametrize("value", ["gpu", "cpu:99", "cuda:99", "meta", "cuda:-1", "cuda:9999999999999", "mps", "cpu:x"])
def test_device(tiny_model_dir: Path, value: str) -> None:
    try:
        build(tiny_model_dir, device=value).exit()
    except NanoVLLMError as error:
        assert "device" in str(error)


@pytest.mark.parametrize(
    "options",
    [
        {"num_kvcache_blocks": 10**15},
        {"num_kvcache_blocks": 2**62},
        {"kvcache_block_size": 2**61},
        {"kv_cache_memory": 2**62},
    ],
)
def test_more_memory_than_there_is(tiny_model_dir: Path, options: dict[str, int]) -> None:
    with pytest.raises(NanoVLLMError, match="GiB|bytes"):
        build(tiny_model_dir, **{"num_kvcache_blocks": -1, **options})


def test_unknown_options_name_the_nearest(tiny_model_dir: Path) -> None:
    with pytest.warns(UserWarning, match="'max_modellen'.*'max_model_len'"):
        build(tiny_model_dir, max_modellen=5).exit()


@cases({"dict": {"Sampler": object}, "int": 5, "text": "Sampler", "list": ["Sampler"]})
def test_parts(tiny_model_dir: Path, value: Any) -> None:
    with pytest.raises(ConfigError, match="parts"):
        build(tiny_model_dir, value)


# ---- prompts -----------------------------------------------------------------------------------------------------

LIKE_5_6_7: dict[str, Any] = {
    "list": [5, 6, 7], "tuple": (5, 6, 7), "np.int64": np.array([5, 6, 7]), "np.uint8": np.array([5, 6, 7], np.uint8),
    "tensor": torch.tensor([5, 6, 7]), "int32 tensor": torch.tensor([5, 6, 7], dtype=torch.int32),
    "np ints": [np.int64(5), np.uint8(6), np.int16(7)], "tensors": [torch.tensor(5), torch.tensor(6), torch.tensor(7)],
    "mixed": [5, np.int32(6), torch.tensor(7)], "index": [5, Indexable(), 7], "range": range(5, 8),
    "deque": deque([5, 6, 7]), "UserList": UserList([5, 6, 7]), "view": np.arange(0, 20)[5:8],
    "slice": [0, 5, 6, 7][1:],
}  # fmt: skip
BAD_IDS: dict[str, Any] = {
    "negative": [-1], "vocab": [300], "huge": [10**30], "digits": [10**5000], "float": [5.0], "nan": [math.nan],
    "bool": [True], "np.bool": [np.bool_(True)], "text": [5, "6"], "None": [5, None], "nested": [[5]], "bytes": b"\5\6",
    "float array": np.array([5.0]), "bool array": np.array([True]), "float tensor": torch.tensor([5.0]),
    "object array": np.array([5, "a"], dtype=object), "text array": np.array(["the"]), "complex": [1j],
    "2d array": np.array([[5], [6]]), "2d tensor": torch.tensor([[5]]),
    "empty list": [], "empty tuple": (), "empty array": np.array([], np.int64), "empty tensor": torch.tensor([]),
    "dict": {5: 6}, "set of text": {"a"}, "uint64": np.array([2**64 - 1], np.uint64), "decimal": [decimal.Decimal(5)],
    "too long": [5] * 1000, "very long": [5] * 100_000, "dates": np.array(["2024"], "datetime64[s]"),
    "surrogate": "\ud800", "long text with a surrogate": "the " * 10_000 + "\ud800",
    "empty text": "", "masked": [5, np.ma.masked], "unprintable": [5, Unprintable()], "none": None,
    "sparse tensor": torch.tensor([5, 6]).to_sparse(), "meta tensor": torch.empty(2, dtype=torch.long, device="meta"),
    "generator of text": (c for c in "abc"), "long text": "the " * 10_000,
}  # fmt: skip


@cases(LIKE_5_6_7)
def test_lists_of_integers_of_every_kind(llm: LLM, answer: list[int], value: Any) -> None:
    result, error = attempt(llm, answer, lambda: llm.generate([value], cold(2), use_tqdm=False))
    assert error is None and token_ids(result) == [answer]
    assert all(type(each) is int for each in result[0]["token_ids"])
    if not isinstance(value, (range, deque, UserList)):
        result, error = attempt(llm, answer, lambda: llm.generate(value, cold(2), use_tqdm=False))
        assert error is None and token_ids(result) == [answer], "a flat list is one prompt"
    assert list(llm.stream(value, cold(2)))
    assert_whole(llm)


@cases(BAD_IDS)
def test_prompts_that_cannot_be_served(llm: LLM, answer: list[int], value: Any) -> None:
    calls: list[Callable[[], Any]] = [
        lambda: llm.generate([value], cold(2), use_tqdm=False),
        lambda: llm.generate([PROMPT, value], cold(2), use_tqdm=False),
        lambda: llm.add_request(value, cold(2)),
        lambda: llm.stream(value, cold(2)),
    ]
    for call in calls:
        _, error = attempt(llm, answer, call)
        assert isinstance(error, RequestError), "nothing was refused"


def test_many_prompts_as_one_array(llm: LLM, answer: list[int]) -> None:
    pair = [PROMPT, PROMPT]
    for two in (np.array(pair), torch.tensor(pair), (PROMPT, tuple(PROMPT)), [torch.tensor(PROMPT)] * 2):
        assert token_ids(llm.generate(two, cold(2), use_tqdm=False)) == [answer, answer]
    single = [torch.tensor([5]), torch.tensor([5, 6])]
    assert len(llm.generate(single, cold(1), use_tqdm=False)) == 2, "a tensor of one number is a prompt, not a number"


@cases({**ODD, "dict of prompts": {"a": "b"}, "one bad": ["the", 5], "other bad": [5, "the"], "lists": [[["the"]]]})
def test_prompts(llm: LLM, answer: list[int], value: Any) -> None:
    result, error = attempt(llm, answer, lambda: llm.generate(value, cold(1), use_tqdm=False))
    good = isinstance(value, torch.Tensor) and value.ndim == 1 or isinstance(value, str) and value.isascii() and value
    assert (error is None) == bool(good) and (not good or len(result) == 1)


@cases({"list": [], "tuple": (), "array": np.array([]), "2d": np.zeros((0, 3), int), "tensor": torch.tensor([])})
def test_no_prompts(llm: LLM, answer: list[int], value: Any) -> None:
    result, error = attempt(llm, answer, lambda: llm.generate(value, use_tqdm=False))
    assert (result, error) == ([], None)


TEXTS: dict[str, str] = {
    "nul": "a\0b", "control": "".join(map(chr, range(32))), "c1": "".join(map(chr, range(127, 160))),
    "bom": "\ufeffthe",
    "rtl": "\u202ethe\u202c", "joiners": "a\u200db\u200c", "noncharacter": "\ufffe\uffff", "last": "\U0010ffff",
    "private": "\ue000", "combining": "e" + "\u0301" * 50, "emoji": "👩‍👩‍👧‍👦", "replacement": "\ufffd",
    "newlines": "\r\n\u2028\u2029\x85",
    "spaces": " \t\u00a0\u3000", "special": "<|im_end|>", "specials": "<|im_start|>user\nhi<|im_end|><|endoftext|>",
    "half special": "<|im_", "braces": "{{ 7*7 }} {% for %}", "format": "%s %n {0}", "ansi": "\x1b[2J", "astral": "𝕋𝕙𝕖",
    "escapes": "\\ud800 \\x00", "html": "<script>alert(1)</script>", "one": "a", "subclass": Text("the quick"),
}  # fmt: skip


@cases(TEXTS)
def test_texts_of_every_kind(llm: LLM, answer: list[int], value: str) -> None:
    """What is valid Unicode is served, and its ids mean the text again (but for special tokens, which are tokens)."""
    result, error = attempt(llm, answer, lambda: llm.generate(value, cold(3), use_tqdm=False))
    assert error is None
    whole = result[0]
    assert whole.num_prompt_tokens == len(llm.encode(value))
    assert llm.tokenizer.decode(llm.encode(value)) == value
    assert "".join(llm.stream(value, cold(3))) == whole["text"]
    assert whole._repr_html_()
    chatted, error = attempt(llm, answer, lambda: llm.chat([{"role": "user", "content": value}], cold(2)))
    assert error is None and len(chatted["token_ids"]) == 2


def test_special_tokens_in_a_users_text_are_tokens(llm: LLM) -> None:
    """Stated in the README: text that spells a special token becomes that token, as in the course."""
    assert llm.encode("<|im_end|>") == [2]


# ---- params of a request, and the rest ---------------------------------------------------------------------------


@cases({**ODD, "class": SamplingParams, "dict": {"temperature": 1.0}, "two": [cold(1)] * 2})
def test_params_of_a_request(llm: LLM, answer: list[int], value: Any) -> None:
    for call in (
        lambda: llm.generate([PROMPT], value, use_tqdm=False),
        lambda: llm.generate([PROMPT], [value], use_tqdm=False),
        lambda: llm.add_request(PROMPT, value) if value is not None else None,
    ):
        result, error = attempt(llm, answer, call)
        assert error is not None or value is None


SPOILT: dict[str, list[Any]] = {
    "temperature": [0, math.nan, -1, "hot", None],
    "max_tokens": [0, 1.5, -5, 10**5000, None],
    "ignore_eos": ["no", None, 1],
}


@pytest.mark.parametrize("field", SPOILT)
def test_params_that_were_spoilt_after_they_were_made(llm: LLM, answer: list[int], field: str) -> None:
    params = cold(2)
    calls: list[Callable[[], Any]] = [
        lambda: llm.generate([PROMPT], params, use_tqdm=False),
        lambda: llm.add_request(PROMPT, params),
        lambda: llm.stream(PROMPT, params),
    ]
    for value in SPOILT[field]:
        setattr(params, field, value)
        for call in calls:
            _, error = attempt(llm, answer, call)
            assert isinstance(error, SamplingParamsError)


def test_params_that_change_while_the_request_runs(llm: LLM, answer: list[int]) -> None:
    params = cold(2)

    def spoil(record: Any) -> None:
        params.temperature, params.max_tokens = 0.0, -7

    with llm.observe(spoil):
        outputs = llm.generate([PROMPT], params, use_tqdm=False)
    assert token_ids(outputs) == [answer]


def test_params_of_a_class_of_ones_own(llm: LLM, answer: list[int]) -> None:
    @dataclass
    class TopK(SamplingParams):
        top_k: int = 3

    params = TopK(temperature=1e-6, max_tokens=2, ignore_eos=True, top_k=9)
    number = llm.add_request(PROMPT, params)
    kept = llm.scheduler.waiting[0].sampling_params
    params.top_k = 1  # a sampler that asks for params sees what was asked for when the request was added
    assert type(kept) is TopK and kept.top_k == 9
    llm.abort(number)
    assert token_ids(llm.generate([PROMPT], params, use_tqdm=False)) == [answer]


def test_lists_that_change_while_the_call_runs(llm: LLM, answer: list[int]) -> None:
    prompts, params = [list(PROMPT), list(PROMPT)], [cold(2), cold(2)]

    def spoil(record: Any) -> None:
        for prompt in prompts:
            prompt.append(-1)
        prompts.clear()
        params.clear()

    with llm.observe(spoil):
        outputs = llm.generate(prompts, params, use_tqdm=False)
    assert token_ids(outputs) == [answer, answer]
    array = np.array(PROMPT)
    llm.add_request(array, cold(2))
    array[:] = -1
    while not llm.is_finished():
        finished = llm.step()[0]
    assert finished[0][1] == answer


def test_results_that_are_changed_afterwards(llm: LLM, answer: list[int]) -> None:
    outputs = llm.generate([PROMPT], cold(2), use_tqdm=False)
    outputs[0]["token_ids"].append(-5)
    outputs[0].clear()
    assert token_ids(llm.generate([PROMPT], cold(2), use_tqdm=False)) == [answer]


@cases({**ODD, "negative": -5, "tensor of two": torch.tensor([1, 2])})
def test_numbers_of_requests(llm: LLM, answer: list[int], value: Any) -> None:
    for call in (lambda: llm.abort(value), lambda: llm.get_output(value)):
        result, error = attempt(llm, answer, call)
        assert error is None and not result


def test_a_request_by_its_numpy_number(llm: LLM) -> None:
    number = llm.add_request(PROMPT, cold(5))
    assert llm.abort(np.int64(number))  # type: ignore[arg-type]
    assert_whole(llm)


def test_a_truth_is_no_number_of_a_request(tiny_model_dir: Path) -> None:
    with build(tiny_model_dir) as llm:
        numbers = [llm.add_request(PROMPT, cold(2)) for _ in range(2)]
        assert numbers == [False, True], "they would compare as equal"
        assert not llm.abort(False) and not llm.abort(True)
        llm.generate(PROMPT, cold(2), use_tqdm=False)
        assert llm.get_output(True) is None and llm.get_output(1) is not None


@cases({**ODD, "array": np.array([1, 2]), "text": "yes"})
def test_use_tqdm(llm: LLM, answer: list[int], value: Any) -> None:
    result, error = attempt(llm, answer, lambda: llm.generate([PROMPT], cold(2), use_tqdm=value))
    assert (error is None) == isinstance(value, int)


MESSAGES: dict[str, Any] = {
    **ODD, "no role": [{"content": "hi"}], "no content": [{"role": "user"}], "empty": [{}], "text": ["hi"],
    "number": [5],
    "bytes": [{"role": "user", "content": b"hi"}], "object": [{"role": "user", "content": object()}],
    "surrogate": [{"role": "user", "content": "\ud800"}], "nested": [[[{"role": "user", "content": "hi"}]]],
    "int content": [{"role": "user", "content": 5}], "int keys": [{5: 6}],
    "endless": [{"role": "user", "content": "x" * 10**5}],
    "tuple keys": [{(1, 2): 3}], "mixed": [{"role": "user", "content": "hi"}, "hi"], "none": [None],
    "set": [{"role": {1}}],
    "huge int": [{"role": "user", "content": 10**5000}],
}  # fmt: skip


@cases(MESSAGES)
def test_conversations(llm: LLM, answer: list[int], value: Any) -> None:
    for call in (lambda: llm.chat(value, cold(1)), lambda: llm.chat_prompt(value)):
        result, error = attempt(llm, answer, call)
        if error is None:  # a template may render strange messages, and 0 conversations have 0 answers
            assert value == [] or all(isinstance(each, dict) for each in value)
        else:
            assert isinstance(error, RequestError)


@cases({"none": None, "several": {"default": "hi"}})
def test_a_model_without_a_chat_template(
    llm: LLM, answer: list[int], value: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(llm.tokenizer, "chat_template", value)
    for call in (lambda: llm.chat([{"role": "user", "content": "hi"}]), lambda: llm.chat_prompt([{}])):
        _, error = attempt(llm, answer, call)
        assert isinstance(error, RequestError) and "no chat template" in str(error)


def test_no_conversations_and_an_empty_one(llm: LLM, answer: list[int]) -> None:
    assert attempt(llm, answer, lambda: llm.chat([])) == ([], None), "a list of no conversations"
    for call in (lambda: llm.chat([[]]), lambda: llm.chat_prompt([]), lambda: llm.stream([])):
        _, error = attempt(llm, answer, call)
        assert isinstance(error, RequestError)


def test_conversations_of_somebody_elses_making(llm: LLM) -> None:
    plain = llm.chat_prompt([{"role": "user", "content": "hi"}])
    assert llm.chat_prompt((OrderedDict(role="user", content="hi"),)) == plain
    loop: dict[str, Any] = {"role": "user"}
    loop["content"] = loop
    with pytest.raises(RequestError, match="messages may hold"):
        llm.chat_prompt([loop])
    deep: Any = "hi"
    for _ in range(100_000):
        deep = [deep]
    with pytest.raises(RequestError):
        llm.chat_prompt([{"role": "user", "content": deep}])


@cases({**ODD, "negative": [-1], "huge": [10**30], "vocab": [300], "float": [1.5], "text": ["a"], "bool": [True]})
def test_decode(llm: LLM, answer: list[int], value: Any) -> None:
    result, error = attempt(llm, answer, lambda: llm.decode(value))
    assert isinstance(error, RequestError) or isinstance(result, str)


def test_decode_of_good_ids_of_every_kind(llm: LLM) -> None:
    for ids in LIKE_5_6_7.values():
        assert llm.decode(ids) == llm.tokenizer.decode([5, 6, 7], skip_special_tokens=True)


@cases({**ODD, "lone": "\udc80abc"})
def test_encode(llm: LLM, answer: list[int], value: Any) -> None:
    result, error = attempt(llm, answer, lambda: llm.encode(value))
    assert isinstance(error, RequestError) or (isinstance(value, str) and isinstance(result, list))


def test_text_that_is_no_unicode_is_told_what_is_wrong_with_it(llm: LLM) -> None:
    """The tokenizer itself would only say which types it takes, as if a string were none of them."""
    for call in (llm.encode, llm.add_request):
        with pytest.raises(RequestError, match="surrogates not allowed"):
            call("half a pair: \ud800")


@cases(ODD)
def test_observe(llm: LLM, answer: list[int], value: Any) -> None:
    def call() -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with llm.observe(value):
                llm.generate([PROMPT], cold(1), use_tqdm=False)

    _, error = attempt(llm, answer, call)
    assert (error is None) == callable(value)


def test_at_least_300_cases() -> None:
    """Parametrised ones, and those that are looped over inside a test."""
    source = Path(__file__).read_text()
    places = len(re.findall(r"^@cases\((?:\{\*\*)?(ODD|MESSAGES)", source, re.M))
    looped = len(ODD) * (len(INTEGERS) + len(WORDS) + len(OTHERS))
    assert places * len(ODD) + looped + 4 * len(BAD_IDS) + len(TEXTS) + len(LIKE_5_6_7) > 1500
