"""Tiny seeded checkpoints with a small, real tokenizer, written on the fly: what most tests run on.

Odd shapes on purpose: the head size is not hidden size / heads, heads and kv heads differ, the vocabulary is no power
of two. Weights are drawn wide enough that the logits of different tokens are well apart.
"""

import json
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

ARCHITECTURES = ("qwen3", "qwen2", "llama")
SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
VOCAB_SIZE = 300  # the tokenizer's 299 tokens and one row that no token uses

CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
CORPUS = (
    "the quick brown fox jumps over the lazy dog",
    "a block table maps the blocks of a sequence to the blocks of the pool",
    "the scheduler takes the waiting requests first and then the running ones",
    "one token after another, and the cache keeps the keys and the values of all of them",
)
COMMON: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 112,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 2048,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "initializer_range": 0.2,
}
DEFAULTS: dict[str, dict[str, Any]] = {
    "qwen3": {"head_dim": 32, "rope_theta": 1e6, "rms_norm_eps": 1e-6, "tie_word_embeddings": True},
    "qwen2": {"rope_theta": 1e6, "rms_norm_eps": 1e-6, "tie_word_embeddings": True},
    "llama": {"head_dim": 16, "rope_theta": 1e5, "rms_norm_eps": 1e-5, "tie_word_embeddings": False},
}
CLASSES: dict[str, tuple[type, type]] = {
    "qwen3": (Qwen3Config, Qwen3ForCausalLM),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM),
    "llama": (LlamaConfig, LlamaForCausalLM),
}


def make_tiny_tokenizer() -> PreTrainedTokenizerFast:
    """Byte-level BPE with 299 tokens: 3 special ones, the 256 bytes and 40 merges learned from `CORPUS`."""
    byte_pair = Tokenizer(models.BPE())
    byte_pair.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    byte_pair.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE - 1,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    byte_pair.train_from_iterator(CORPUS, trainer)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=byte_pair,
        bos_token="<|im_start|>",
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        clean_up_tokenization_spaces=False,
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def make_tiny_model(
    folder: Path | str, architecture: str = "qwen3", *, seed: int = 0, dtype: str = "float32", **overrides: Any
) -> Path:
    """Write a tiny checkpoint into `folder` (made if need be) and return the folder.

    overrides: fields of the model's configuration (`tie_word_embeddings=False`, `num_hidden_layers=2`,
        `rope_parameters={...}`, `attention_bias=True`, …).
    """
    path = Path(folder)
    path.mkdir(parents=True, exist_ok=True)
    config_class, model_class = CLASSES[architecture]
    options = {**COMMON, **DEFAULTS[architecture], **overrides}
    if "rope_parameters" in overrides:
        del options["rope_theta"]
        if not hasattr(config_class(), "rope_parameters"):  # transformers 4 has two fields for it
            rope = dict(options.pop("rope_parameters"))
            options.update(rope_theta=rope.pop("rope_theta"), rope_scaling=rope)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = model_class(config_class(**options))
        for name, parameter in model.named_parameters():
            # transformers starts biases at 0 and norm weights at 1, where a mistake with them would not show.
            if name.endswith("bias"):
                torch.nn.init.normal_(parameter, std=0.2)
            elif "norm" in name:
                torch.nn.init.uniform_(parameter, 0.6, 1.4)
    model.to(getattr(torch, dtype)).save_pretrained(path, safe_serialization=True)
    make_tiny_tokenizer().save_pretrained(path)
    return path


def edit_json(path: Path, **changes: Any) -> None:
    """Set fields of a JSON file; None removes one."""
    content = json.loads(path.read_text(encoding="utf-8"))
    content.update(changes)
    path.write_text(json.dumps({key: value for key, value in content.items() if value is not None}), encoding="utf-8")
