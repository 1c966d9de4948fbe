"""Run a model of this package over paged caches, step by step, without an engine."""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from nanovllm.attention import AttentionMetadata, TorchAttention
from nanovllm.layers import shipped
from nanovllm.layers.huge_pages import collapse_into_huge_pages
from nanovllm.layers.parallel import ALONE, TPGroup
from nanovllm.models import ModelConfig, build_model, load_model


def options(folder: Path | str, load_format: str = "safetensors", seed: int | None = None) -> Any:
    """The fields of Config that the loader reads."""
    return SimpleNamespace(model=str(folder), load_format=load_format, seed=seed)


def make_model(
    folder: Path,
    block_size: int = 4,
    tp: TPGroup = ALONE,
    dtype: torch.dtype = torch.float32,
    resolve: Callable[[Any], Any] = shipped,
    **load: Any,
) -> Any:
    """The model of a folder, loaded."""
    hf_config = AutoConfig.from_pretrained(folder)
    config = ModelConfig.from_hf(hf_config)
    heads, kv_heads = config.heads_on_rank(tp)
    attention = TorchAttention(heads, kv_heads, config.head_dim, config.scale, block_size)
    model = build_model(hf_config, tp, attention, resolve, dtype)
    load_model(model, options(folder, **load))
    return model


def load_reference(folder: Path | str) -> Any:
    """The model of a folder in transformers, float32: its versions do not agree on the name of the option."""
    model = AutoModelForCausalLM.from_pretrained(folder, local_files_only=True).float().eval()
    collapse_into_huge_pages(model.parameters())  # generating with it is most of the time of some tests
    return model


def reference_logits(folder: Path, token_ids: list[int]) -> Tensor:
    """Logits [T, V] of transformers, float32."""
    model = load_reference(folder)
    with torch.inference_mode():
        logits: Tensor = model(torch.tensor([token_ids])).logits[0]
    return logits


class Pages:
    """The KV pool of some sequences, each with blocks of its own in scattered order; unwritten slots are NaN."""

    def __init__(self, model: Any, lens: list[int], block_size: int = 4, dtype: torch.dtype = torch.float32) -> None:
        self.block_size = block_size
        counts = [-(-length // block_size) for length in lens]
        order = torch.randperm(sum(counts) + 2, generator=torch.Generator().manual_seed(5)).tolist()
        self.tables = [[order.pop() for _ in range(count)] for count in counts]
        shape = (model.num_layers, 2, sum(counts) + 2, block_size, model.num_kv_heads, model.head_dim)
        self.cache = torch.full(shape, float("nan"), dtype=dtype)

    def step(self, model: Any, rows: list[tuple[int, list[int], int]]) -> Tensor:
        """Compute rows (sequence, its tokens of this step, tokens before), decodes first: logits of all tokens."""
        positions, metadata = self.metadata(rows)
        with torch.inference_mode():
            hidden = model(torch.tensor([t for _, tokens, _ in rows for t in tokens]), positions, self.cache, metadata)
            logits: Tensor = model.compute_logits(hidden)
        return logits

    def metadata(self, rows: list[tuple[int, list[int], int]]) -> tuple[Tensor, AttentionMetadata]:
        """Positions [T] and metadata of such a step."""
        positions, slots, starts = [], [], [0]
        for sequence, tokens, before in rows:
            at = range(before, before + len(tokens))
            positions += at
            table = self.tables[sequence]
            slots += [table[p // self.block_size] * self.block_size + p % self.block_size for p in at]
            starts.append(starts[-1] + len(tokens))
        widest = max(len(self.tables[sequence]) for sequence, _, _ in rows)
        tables = [self.tables[sequence] + [-1] * (widest - len(self.tables[sequence])) for sequence, _, _ in rows]
        contexts = [before + len(tokens) for _, tokens, before in rows]
        return torch.tensor(positions), AttentionMetadata(
            torch.tensor(slots),
            torch.tensor(tables, dtype=torch.int32),
            torch.tensor(contexts, dtype=torch.int32),
            torch.tensor(starts, dtype=torch.int32),
            max(len(tokens) for _, tokens, _ in rows),
            max(contexts),
            next((i for i, (_, tokens, _) in enumerate(rows) if len(tokens) > 1), len(rows)),
        )
