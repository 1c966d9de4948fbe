"""Logits equal those of transformers: prefill, behind a prefix, decode and mixed; whole, and cut over ranks."""

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from nanovllm.layers.layernorm import RMSNorm
from nanovllm.layers.parallel import TPGroup
from tests.models.helpers import Pages, make_model, reference_logits
from tests.tiny_models import make_tiny_model

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3": ("qwen3", {}),
    "qwen3 untied, biased": ("qwen3", {"tie_word_embeddings": False, "attention_bias": True}),
    "qwen2": ("qwen2", {}),
    "qwen2 untied": ("qwen2", {"tie_word_embeddings": False}),
    "llama": ("llama", {}),
    "llama tied, 9 heads and 3": (
        "llama",
        {
            "tie_word_embeddings": True,
            "num_attention_heads": 9,
            "num_key_value_heads": 3,
            "hidden_size": 72,
            "head_dim": 8,
        },
    ),  # fmt: skip
    "llama biased": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama 3 scaling": ("llama", {"rope_parameters": LLAMA3}),
    "one kv head": ("qwen3", {"num_key_value_heads": 1}),
}
TOKENS = [7, 250, 3, 44, 44, 12, 199, 0, 298, 31, 5, 77, 150, 8, 91, 23, 64, 2, 111, 40]


@pytest.fixture(scope="module", params=VARIANTS, ids=lambda name: name.replace(" ", "-"))
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    architecture, overrides = VARIANTS[request.param]
    return make_tiny_model(tmp_path_factory.mktemp("model"), architecture, **overrides)


def test_every_way_to_compute_a_sequence_gives_the_logits_of_transformers(folder: Path) -> None:
    model, want = make_model(folder), reference_logits(folder, TOKENS)
    other = [5, 6, 7, 8, 9]
    want_other = reference_logits(folder, other)

    whole = Pages(model, [20]).step(model, [(0, TOKENS, 0)])
    assert (whole - want).abs().max() < 1e-4

    pages = Pages(model, [20, 5])
    pieces = [pages.step(model, [(0, TOKENS[:7], 0), (1, other[:3], 0)])]  # two prompts
    assert (pieces[0][7:] - want_other[:3]).abs().max() < 1e-4
    pieces.append(pages.step(model, [(1, other[3:4], 3), (0, TOKENS[7:13], 7)]))  # a decode beside a chunk
    assert (pieces[1][:1] - want_other[3:4]).abs().max() < 1e-4
    for i in range(13, 20):  # decode alone, then in company
        rows = [(0, TOKENS[i : i + 1], i)] + ([(1, other[4:], 4)] if i == 16 else [])
        pieces.append(pages.step(model, rows))
    got = torch.cat((pieces[0][:7], pieces[1][1:], *[piece[:1] for piece in pieces[2:]]))
    assert (got - want).abs().max() < 1e-4
    assert (pieces[5][1:] - want_other[4:]).abs().max() < 1e-4
    assert torch.equal(got.argmax(-1), want.argmax(-1))


class Meeting:
    """Collectives between threads that stand for ranks."""

    def __init__(self, size: int) -> None:
        self.barrier, self.parts = threading.Barrier(size, timeout=30), [torch.empty(0)] * size

    def exchange(self, rank: int, x: Tensor) -> list[Tensor]:
        self.parts[rank] = x.clone()
        self.barrier.wait()
        parts = list(self.parts)
        self.barrier.wait()
        return parts


class ThreadRank(TPGroup):
    """A rank that meets the others in one process."""

    def __init__(self, rank: int, size: int, meeting: Meeting) -> None:
        super().__init__(rank, size)
        object.__setattr__(self, "meeting", meeting)

    def all_reduce(self, x: Tensor) -> Tensor:
        return torch.stack(self.meeting.exchange(self.rank, x)).sum(0)  # type: ignore[attr-defined]

    def gather(self, x: Tensor, dim: int = -1) -> Tensor | None:
        parts = self.meeting.exchange(self.rank, x)  # type: ignore[attr-defined]
        return torch.cat(parts, dim) if self.rank == 0 else None


def on_ranks(size: int, work: Callable[[TPGroup], Any]) -> list[Any]:
    """What `work` returns on each rank, the ranks being threads."""
    meeting, results = Meeting(size), [None] * size
    failures: list[BaseException] = []

    def run(rank: int) -> None:
        try:
            results[rank] = work(ThreadRank(rank, size, meeting))
        except BaseException as error:
            failures.append(error)
            meeting.barrier.abort()

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures, failures
    return results


@pytest.mark.parametrize(
    ("architecture", "overrides", "size"),
    [
        ("qwen3", {}, 2),
        ("qwen2", {"vocab_size": 301}, 2),
        ("llama", {"attention_bias": True, "mlp_bias": True, "vocab_size": 303}, 2),
        ("llama", {"num_attention_heads": 9, "num_key_value_heads": 3, "hidden_size": 72, "head_dim": 8,
                   "intermediate_size": 96, "vocab_size": 301}, 3),
    ],
)  # fmt: skip
def test_ranks_together_equal_one(architecture: str, overrides: dict[str, Any], size: int, tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path, architecture, **overrides)
    want = reference_logits(folder, TOKENS)

    def work(tp: TPGroup) -> Any:
        model = make_model(folder, tp=tp)
        pages = Pages(model, [20])
        return pages.step(model, [(0, TOKENS[:19], 0)]), pages.step(model, [(0, TOKENS[19:], 19)])

    results = on_ranks(size, work)
    assert all(result == (None, None) for result in results[1:]), "only rank 0 has logits"
    assert (torch.cat(results[0]) - want).abs().max() < 1e-4


def test_random_weights_are_one_model_on_any_number_of_ranks(tiny_model_dir: Path) -> None:
    def work(tp: TPGroup) -> Any:
        model = make_model(tiny_model_dir, tp=tp, load_format="random", seed=3)
        return Pages(model, [20]).step(model, [(0, TOKENS, 0)])

    alone, pair = make_model(tiny_model_dir, load_format="random", seed=3), on_ranks(2, work)
    want = Pages(alone, [20]).step(alone, [(0, TOKENS, 0)])
    assert (pair[0] - want).abs().max() < 1e-4 and want.std() > 0.01
    assert 0.019 < float(alone.model.layers[0].mlp.down_proj.weight.std()) < 0.021
    assert (alone.model.norm.weight == 1).all()
    other = make_model(tiny_model_dir, load_format="random", seed=4)
    assert not torch.equal(other.model.norm.weight, other.lm_head.weight[0])
    assert not torch.equal(alone.lm_head.weight, other.lm_head.weight)


def test_replacement_classes_run_in_the_model(tiny_model_dir: Path) -> None:
    """A learner's norm: another class, with parameters that know nothing of loaders."""
    built = []

    class PlainNorm(torch.nn.Module):
        def __init__(self, size: int, eps: float) -> None:
            super().__init__()
            self.weight, self.eps = torch.nn.Parameter(torch.ones(size)), eps
            built.append(size)

        def forward(self, x: Tensor, residual: Tensor | None = None) -> Any:
            total = x if residual is None else x + residual
            out = total / (total.pow(2).mean(-1, keepdim=True) + self.eps).sqrt() * self.weight
            return out if residual is None else (out, total)

    def resolve(cls: Any) -> Any:
        return PlainNorm if cls is RMSNorm else cls

    model = make_model(tiny_model_dir, resolve=resolve)
    got = Pages(model, [20]).step(model, [(0, TOKENS, 0)])
    assert len(built) == 3 * 4 + 1
    assert (got - reference_logits(tiny_model_dir, TOKENS)).abs().max() < 1e-4


def test_tied_models_hold_the_embedding_once(tiny_model_dir: Path) -> None:
    model = make_model(tiny_model_dir)
    assert model.lm_head.weight is model.model.embed_tokens.weight
