"""The default model as it lies on this machine: files, tokenizer, and that it speaks.

The oracle of the tokenizer is byte-pair encoding written out once more, over the two patterns that llama.cpp applies
for "smollm", one after the other: every digit alone, then GPT-2's.
"""

import json
from pathlib import Path

import pytest
import regex
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from nanovllm.config import Config
from nanovllm.paths import default_model_path, is_model_folder

pytestmark = pytest.mark.skipif(not is_model_folder(default_model_path()), reason="the default model is not here")

GPT2 = regex.compile(r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+")
DIGIT = regex.compile(r"(\p{N})")

TEXTS = [
    "1. a\n\n2. b",
    "12 3 it's 2024!",
    "  two  spaces\tand tabs \n\n\n newlines  ",
    "Il était une fois, à 10h30… “déjà”",
    "价格是 42 元，共 3 件。",
    "x = [1, 22, 333]; y=x[0]*1e-6",
    "½ and ² and Ⅷ and ٣",
    "🙂🙂 ok",
    "",
]


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    found = AutoTokenizer.from_pretrained(default_model_path())
    assert isinstance(found, PreTrainedTokenizerFast)
    return found


class ByteLevelOracle:
    """Byte-pair encoding, slow and plain: merge the pair of the lowest rank until there is none."""

    def __init__(self, folder: Path) -> None:
        model = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))["model"]
        self.vocab: dict[str, int] = model["vocab"]
        self.ranks = {tuple(pair): rank for rank, pair in enumerate(model["merges"])}
        plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
        others = [byte for byte in range(256) if byte not in plain]
        self.letters = {byte: chr(byte) for byte in plain} | {byte: chr(256 + i) for i, byte in enumerate(others)}

    def encode(self, text: str) -> list[int]:
        words = [word for piece in DIGIT.split(text) for word in GPT2.findall(piece)]
        return [token_id for word in words for token_id in self.merge([self.letters[byte] for byte in word.encode()])]

    def merge(self, parts: list[str]) -> list[int]:
        while len(parts) > 1:
            rank, at = min((self.ranks.get((a, b), 10**9), i) for i, (a, b) in enumerate(zip(parts, parts[1:])))  # noqa: B905
            if rank == 10**9:
                break
            parts[at : at + 2] = [parts[at] + parts[at + 1]]
        return [self.vocab[part] for part in parts]


@pytest.fixture(scope="module")
def oracle() -> ByteLevelOracle:
    return ByteLevelOracle(default_model_path())


@pytest.mark.parametrize("text", TEXTS)
def test_token_ids_are_those_of_the_rule(
    text: str, tokenizer: PreTrainedTokenizerFast, oracle: ByteLevelOracle
) -> None:
    assert tokenizer.encode(text) == oracle.encode(text)
    assert tokenizer.decode(tokenizer.encode(text)) == text


@settings(max_examples=200, deadline=None)
@given(text=st.text(st.sampled_from("ab Zé'st.,1290\n\t½字🙂-"), max_size=40))
def test_token_ids_of_any_text(text: str, tokenizer: PreTrainedTokenizerFast, oracle: ByteLevelOracle) -> None:
    assert tokenizer.encode(text) == oracle.encode(text)


def test_known_ids(tokenizer: PreTrainedTokenizerFast) -> None:
    """The digit split: "1." is two tokens here, one without it."""
    assert tokenizer.encode("1. a\n\n2. b") == [33, 30, 253, 1116, 34, 30, 278]


def test_special_tokens(tokenizer: PreTrainedTokenizerFast) -> None:
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id, tokenizer.unk_token_id) == (
        1,
        2,
        2,
        0,
    )
    assert tokenizer.encode("a<|im_end|>b")[1] == 2
    assert tokenizer.clean_up_tokenization_spaces is False
    assert len(tokenizer.all_special_tokens) == 3
    assert tokenizer.decode([33, 2], skip_special_tokens=True) == "1"
    assert len(tokenizer) == 49152
    assert set(tokenizer("hi")) == {"input_ids", "attention_mask"}


def test_chat_template(tokenizer: PreTrainedTokenizerFast) -> None:
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    shown = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert shown == "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"


def test_configuration() -> None:
    config = Config(str(default_model_path())).hf_config
    assert config.architectures == ["LlamaForCausalLM"] and config.tie_word_embeddings is True
    assert (config.num_attention_heads, config.num_key_value_heads, config.head_dim) == (9, 3, 64)
    written = json.loads((default_model_path() / "config.json").read_text(encoding="utf-8"))
    assert written["rope_theta"] == written["rope_parameters"]["rope_theta"] == 100_000
    assert written["torch_dtype"] == written["dtype"] == "bfloat16"


def test_weights_are_bfloat16_and_complete() -> None:
    with safe_open(default_model_path() / "model.safetensors", framework="pt") as file:
        names = set(file.keys())
        assert len(names) == 30 * 9 + 2
        assert {file.get_slice(name).get_dtype() for name in names} == {"BF16"}
        assert file.get_slice("model.embed_tokens.weight").get_shape() == [49152, 576]
