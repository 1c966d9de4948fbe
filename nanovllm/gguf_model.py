"""From a GGUF file of the Llama architecture to an ordinary Hugging Face folder.

Three things differ between the two formats, and they are all that happens here. Weights: GGUF holds them quantised,
so each tensor is de-quantised to float32 and rounded to bfloat16. Order: GGUF stores the query and key rows so that a
rotated pair is adjacent, Hugging Face so that its halves are H/2 rows apart. Tokenizer: GGUF names a splitting rule
("smollm"), Hugging Face spells it out. Knows nothing of where the file came from. Needs no torch: bfloat16 is the
upper half of a float32, and a safetensors file is a JSON header before the raw bytes.
"""

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGUFReader, TokenType, dequantize
from gguf.gguf_reader import ReaderTensor

from nanovllm.errors import UnsupportedModelError

LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
OUTER_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}


def convert_gguf(gguf_file: Path, folder: Path) -> None:
    """Write the model in `gguf_file` into the existing, empty `folder` in Hugging Face's layout.

    Raises `UnsupportedModelError` for another architecture, splitting rule or tensor than those handled here.
    """
    reader = GGUFReader(gguf_file)
    values = {name: field.contents() for name, field in reader.fields.items()}
    if values.get("general.architecture") != "llama" or values.get("tokenizer.ggml.pre") != "smollm":
        raise UnsupportedModelError(
            f"{gguf_file.name} is of architecture {values.get('general.architecture')!r} with the splitting rule "
            f"{values.get('tokenizer.ggml.pre')!r}; only 'llama' with 'smollm' can be converted"
        )
    tied = not any(tensor.name == "output.weight" for tensor in reader.tensors)
    write_json(folder / "config.json", model_config(values, tied))
    write_json(folder / "generation_config.json", generation_config(values))
    write_json(folder / "tokenizer.json", tokenizer(values))
    write_json(folder / "tokenizer_config.json", tokenizer_config(values))
    write_json(folder / "special_tokens_map.json", special_tokens(values))
    heads = (values["llama.attention.head_count"], values["llama.attention.head_count_kv"])
    write_safetensors(folder / "model.safetensors", reader.tensors, *heads)


def model_config(values: dict[str, Any], tied: bool) -> dict[str, Any]:
    """`config.json`; rope and dtype in the words of both transformers 4 and 5."""
    theta = float(values["llama.rope.freq_base"])
    return {
        "architectures": ["LlamaForCausalLM"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": values["tokenizer.ggml.bos_token_id"],
        "dtype": "bfloat16",
        "eos_token_id": values["tokenizer.ggml.eos_token_id"],
        "head_dim": values["llama.rope.dimension_count"],
        "hidden_act": "silu",
        "hidden_size": values["llama.embedding_length"],
        "initializer_range": 0.041666666666666664,
        "intermediate_size": values["llama.feed_forward_length"],
        "max_position_embeddings": values["llama.context_length"],
        "mlp_bias": False,
        "model_type": "llama",
        "num_attention_heads": values["llama.attention.head_count"],
        "num_hidden_layers": values["llama.block_count"],
        "num_key_value_heads": values["llama.attention.head_count_kv"],
        "pad_token_id": values["tokenizer.ggml.padding_token_id"],
        # The file holds the float32 next to 1e-05; seven digits give back what was meant.
        "rms_norm_eps": float(f"{values['llama.attention.layer_norm_rms_epsilon']:.7g}"),
        "rope_parameters": {"rope_theta": theta, "rope_type": "default"},
        "rope_scaling": None,
        "rope_theta": theta,
        "tie_word_embeddings": tied,
        "torch_dtype": "bfloat16",
        "use_cache": True,
        "vocab_size": values["llama.vocab_size"],
    }


def generation_config(values: dict[str, Any]) -> dict[str, Any]:
    """`generation_config.json`: the three special ids."""
    names = {"bos_token_id": "bos", "eos_token_id": "eos", "pad_token_id": "padding"}
    return {key: values[f"tokenizer.ggml.{name}_token_id"] for key, name in names.items()}


def tokenizer(values: dict[str, Any]) -> dict[str, Any]:
    """`tokenizer.json`: byte-level BPE behind the rule "smollm": every digit alone, then GPT-2's pattern.

    The ids of "12 3" show it: four pieces, "1", "2", " ", "3", where GPT-2 alone would split "12", " 3".
    """
    tokens = values["tokenizer.ggml.tokens"]
    kinds = values["tokenizer.ggml.token_type"]
    special = [token_id for token_id, kind in enumerate(kinds) if kind == TokenType.CONTROL]
    plain = {"lstrip": False, "normalized": False, "rstrip": False, "single_word": False, "special": True}
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [{"id": token_id, "content": tokens[token_id], **plain} for token_id in special],
        "normalizer": None,
        "pre_tokenizer": {
            "type": "Sequence",
            "pretokenizers": [{"type": "Digits", "individual_digits": True}, byte_level],
        },
        "post_processor": None,
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "vocab": {token: token_id for token_id, token in enumerate(tokens)},
            "merges": [pair.split(" ") for pair in values["tokenizer.ggml.merges"]],
        },
    }


def special_tokens(values: dict[str, Any]) -> dict[str, str]:
    """The tokens that begin, end, pad and stand for the unknown."""
    tokens = values["tokenizer.ggml.tokens"]
    names = {"bos_token": "bos", "eos_token": "eos", "pad_token": "padding", "unk_token": "unknown"}
    return {key: tokens[values[f"tokenizer.ggml.{name}_token_id"]] for key, name in names.items()}


def tokenizer_config(values: dict[str, Any]) -> dict[str, Any]:
    """`tokenizer_config.json`; the class is one that transformers 4 and 5 both know."""
    return {
        "add_prefix_space": False,
        **special_tokens(values),
        "chat_template": values["tokenizer.chat_template"],
        "clean_up_tokenization_spaces": False,
        "model_input_names": ["input_ids", "attention_mask"],  # the class would add token types, which no Llama takes
        "model_max_length": values["llama.context_length"],
        "tokenizer_class": "PreTrainedTokenizerFast",
    }


def write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, ensure_ascii=False, indent=2) + "\n", encoding="utf-8")


def write_safetensors(path: Path, tensors: list[ReaderTensor], num_heads: int, num_kv_heads: int) -> None:
    """Write the tensors as bfloat16, one at a time, so that memory holds one of them in float32 at most.

    The format: 8 bytes with the header's length, the header (JSON, padded with spaces to a multiple of 8), the data.
    """
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for tensor in tensors:
        start, end = end, end + 2 * int(tensor.n_elements)
        shape = [int(size) for size in reversed(tensor.shape)]  # GGUF counts the fastest dimension first
        header[hf_name(tensor.name)] = {"dtype": "BF16", "shape": shape, "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as file:
        file.write(len(text).to_bytes(8, "little"))
        file.write(text)
        for weights in hf_weights(tensors, num_heads, num_kv_heads):
            file.write(to_bfloat16(weights).tobytes())
        file.flush()
        os.fsync(file.fileno())


def hf_weights(tensors: list[ReaderTensor], num_heads: int, num_kv_heads: int) -> Iterator[np.ndarray[Any, Any]]:
    """Every tensor in float32, in Hugging Face's row order."""
    for tensor in tensors:
        weights = dequantize(tensor.data, tensor.tensor_type)
        part = tensor.name.split(".")[-2]
        if part in ("attn_q", "attn_k"):
            weights = split_pairs(weights, num_heads if part == "attn_q" else num_kv_heads)
        yield weights


def hf_name(name: str) -> str:
    """ "blk.3.attn_q.weight" -> "model.layers.3.self_attn.q_proj.weight"."""
    if name in OUTER_NAMES:
        return OUTER_NAMES[name]
    block, *rest = name.split(".")
    if block == "blk" and len(rest) == 3 and rest[1] in LAYER_NAMES and rest[2] == "weight":
        return f"model.layers.{rest[0]}.{LAYER_NAMES[rest[1]]}.weight"
    raise UnsupportedModelError(f"the GGUF file holds a tensor that a Llama model has no place for: {name!r}")


def split_pairs(weights: np.ndarray[Any, Any], num_heads: int) -> np.ndarray[Any, Any]:
    """Undo GGUF's row order of a query or key projection [N * H, D], head by head.

    Rotary embedding turns rows in pairs. GGUF puts the two of a pair side by side (rows 0 and 1, 2 and 3, …), Hugging
    Face half a head apart (rows 0 and H/2, 1 and H/2 + 1, …). With H = 4, GGUF's rows a0 b0 a1 b1 become a0 a1 b0 b1.
    """
    rows, width = weights.shape
    pairs = weights.reshape(num_heads, rows // num_heads // 2, 2, width)
    return pairs.swapaxes(1, 2).reshape(rows, width)


def to_bfloat16(weights: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """The bits of `weights` as bfloat16 [same shape, uint16], rounded to nearest, ties to even.

    Half of the last kept bit is 0x8000. Adding 0x7FFF rounds a tie down and everything above it up; adding the last
    kept bit on top sends the tie of an odd number up, to the even one.
    """
    bits = np.ascontiguousarray(weights, dtype=np.float32).view(np.uint32)
    rounded: np.ndarray[Any, Any] = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype("<u2")
    return rounded
