"""What is read of a model folder, and what is refused: a folder may come from anybody, and is data, never code.

Every file is opened through `file_in`, which refuses what lies elsewhere (`../`, absolute names, links that lead out)
and what is no file (a pipe would wait for ever). JSON is parsed here and bounded in size. Knows files and tables of
options; nothing of models, tensors and tokenizers.
"""

import json
from pathlib import Path
from typing import Any

from nanovllm._html import shown
from nanovllm.errors import NanoVLLMError, UnsupportedModelError

MIB = 1 << 20
MAX_JSON = 16 * MIB
MAX_LAYERS = 1_000
MODEL_TYPES = ("qwen3", "qwen2", "llama")  # config.json's "model_type" of the architectures in models/registry.py


def file_in(folder: Path, name: str, error: type[NanoVLLMError] = UnsupportedModelError) -> Path | None:
    """The file `name` of `folder`; None where there is none. Raises `error` for one that lies outside, or is no file.

    One link is followed out: the Hugging Face cache keeps files as snapshots/<revision>/<name> -> ../../blobs/<hash>.
    """
    try:
        root = folder.resolve()
        path = (root / name).resolve()
        blobs = root.parent.parent / "blobs" if root.parent.name == "snapshots" else root
        if Path(name).name != name or not (path.is_relative_to(root) or path.is_relative_to(blobs)):
            raise error(f"{folder}: {shown(name)} lies outside the model folder")
        if not path.exists():
            return None
        if not path.is_file():
            raise error(f"{folder}: {shown(name)} is not a regular file")
        return path
    except NanoVLLMError:
        raise
    except (OSError, RuntimeError, ValueError) as problem:  # a loop of links, a name that no file can have
        raise error(f"{folder}: cannot look for {shown(name)}: {problem}") from problem


def read_text(
    folder: Path, name: str, limit: int = MAX_JSON, error: type[NanoVLLMError] = UnsupportedModelError
) -> str | None:
    """The text of a file of the folder; None where there is none. Raises `error`. limit: bytes."""
    path = file_in(folder, name, error)
    if path is None:
        return None
    try:
        if path.stat().st_size > limit:
            raise ValueError(f"it has {path.stat().st_size:,} bytes, the limit is {limit:,}")
        return path.read_text(encoding="utf-8")
    except (OSError, ValueError) as problem:
        raise error(f"{folder / name} cannot be read: {problem}") from problem


def read_table(folder: Path, name: str, error: type[NanoVLLMError] = UnsupportedModelError) -> dict[str, Any] | None:
    """A JSON file of the folder, which must hold a table; None where there is none. Raises `error`."""
    text = read_text(folder, name, error=error)
    if text is None:
        return None
    try:
        table = json.loads(text)
    except (ValueError, RecursionError) as problem:
        raise error(f"{folder / name} cannot be read: {type(problem).__name__}: {problem}") from problem
    if not isinstance(table, dict):
        raise error(f"{folder / name} cannot be read: it holds {shown(table)}, not a table")
    if "auto_map" in table:
        raise UnsupportedModelError(
            f"{folder / name} asks for Python code of its own (auto_map={shown(table['auto_map'])}); code from a "
            "model folder is never run: use a model of an architecture that is built in"
        )
    return table


def check_config(folder: Path) -> None:
    """Refuse a config.json that must not even be given to transformers. Raises `UnsupportedModelError` by name.

    transformers builds lists as long as some of these numbers say, and goes where `configuration_files` points.
    """
    table = read_table(folder, "config.json")
    if table is None:
        raise UnsupportedModelError(f"cannot read config.json in {folder}: there is no such file")
    if table.get("model_type") not in MODEL_TYPES:
        raise UnsupportedModelError(
            f"{folder}: architecture {shown(table.get('architectures'))} (model_type {shown(table.get('model_type'))}) "
            f"is not implemented; these model types are: {', '.join(MODEL_TYPES)}"
        )
    if "configuration_files" in table:
        raise UnsupportedModelError(f"{folder}: config.json points to other files (configuration_files); none is read")
    for name in ("num_hidden_layers", "num_labels"):
        value = table.get(name, 1)
        if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= MAX_LAYERS:
            raise UnsupportedModelError(f"{name} in config.json is {shown(value)}, not a number from 1 to {MAX_LAYERS}")


def end_tokens(folder: Path, vocab_size: int) -> tuple[int, ...]:
    """End tokens that generation_config.json names; () without such a file. Raises `UnsupportedModelError`."""
    named = (read_table(folder, "generation_config.json") or {}).get("eos_token_id")
    ids = named if isinstance(named, list) else [] if named is None else [named]
    for token_id in ids:
        if isinstance(token_id, bool) or not isinstance(token_id, int) or not 0 <= token_id < vocab_size:
            raise UnsupportedModelError(
                f"{folder}: eos_token_id in generation_config.json is {shown(named)}, not token ids below {vocab_size}"
            )
    return tuple(ids)
