"""The tokenizer of a model folder: a fast one, read from `tokenizer.json` and a few known options.

`AutoTokenizer` hands every entry of `tokenizer_config.json` to the tokenizer's constructor, file names among them, and
`tokenizer.json` holds the whole tokenizer anyway. So the entries that matter are picked here and the others ignored.
Knows text and token ids; nothing of models and engines.
"""

from pathlib import Path
from typing import Any

from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast

from nanovllm._html import shown
from nanovllm.errors import UnsupportedModelError
from nanovllm.model_folder import MIB, read_table, read_text

MAX_TOKENIZER = 64 * MIB  # the largest in use have about 35
SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


def load_tokenizer(folder: Path, vocab_size: int) -> PreTrainedTokenizerFast:
    """The folder's tokenizer. Raises `UnsupportedModelError` where there is none, it is damaged, or it knows token ids
    that a model of `vocab_size` tokens does not have."""
    text = read_text(folder, "tokenizer.json", MAX_TOKENIZER)
    if text is None:
        raise UnsupportedModelError(f"{folder} has no tokenizer.json; only fast tokenizers are used")
    options = tokenizer_options(folder)
    try:
        core = Tokenizer.from_str(text)
        tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, **options)
        largest = max(tokenizer.get_vocab().values(), default=0)
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":  # how Rust fails in Python
            raise
        reason = f"{type(error).__name__}: {error}"
        raise UnsupportedModelError(f"cannot read tokenizer.json in {folder}: {reason}") from error
    if largest >= vocab_size:
        token = shown(tokenizer.convert_ids_to_tokens(largest))
        raise UnsupportedModelError(
            f"{folder}: the tokenizer has token {largest} ({token}), the model's vocabulary ends at {vocab_size - 1}"
        )
    return tokenizer


def tokenizer_options(folder: Path) -> dict[str, Any]:
    """What is taken of tokenizer_config.json (and special_tokens_map.json, where older models keep special tokens)."""
    table = read_table(folder, "special_tokens_map.json") or {}
    table |= read_table(folder, "tokenizer_config.json") or {}
    options: dict[str, Any] = {}
    for name in SPECIAL_TOKENS:
        token = token_text(table.get(name))
        if token is not None:
            options[name] = token
    more = table.get("additional_special_tokens") or table.get("extra_special_tokens")
    more = list(more.values()) if isinstance(more, dict) else more
    if isinstance(more, list) and (texts := [text for each in more if (text := token_text(each)) is not None]):
        options["additional_special_tokens"] = texts
    if isinstance(table.get("clean_up_tokenization_spaces"), bool):
        options["clean_up_tokenization_spaces"] = table["clean_up_tokenization_spaces"]
    template = read_text(folder, "chat_template.jinja")
    if template is None:
        template = default_template(table.get("chat_template"))
    if template is not None:
        options["chat_template"] = template
    return options


def token_text(entry: Any) -> str | None:
    """The text of a special token, which is written as a string or as a table with its "content"."""
    text = entry.get("content") if isinstance(entry, dict) else entry
    return text if isinstance(text, str) else None


def default_template(entry: Any) -> str | None:
    """The chat template: a string, or of several named ones the one called "default"."""
    if isinstance(entry, list):
        entry = next((e.get("template") for e in entry if isinstance(e, dict) and e.get("name") == "default"), None)
    return entry if isinstance(entry, str) else None
