"""RMSNorm, rotary embedding and the MLP's gate, each against its formula or against transformers."""

import math
from typing import Any

import pytest
import torch
from torch.nn import functional as F
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRMSNorm, LlamaRotaryEmbedding, apply_rotary_pos_emb

from nanovllm.layers.activation import SiluAndMul
from nanovllm.layers.layernorm import RMSNorm
from nanovllm.layers.rotary_embedding import Llama3Scaling, RotaryEmbedding

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rms_norm_equals_transformers(dtype: torch.dtype) -> None:
    ours, theirs = RMSNorm(48, 1e-5).to(dtype), LlamaRMSNorm(48, 1e-5).to(dtype)
    weight, x = torch.rand(48).to(dtype) + 0.5, (torch.randn(7, 48) * 3).to(dtype)
    ours.weight.data.copy_(weight)
    theirs.weight.data.copy_(weight)
    tolerance = 1e-6 if dtype == torch.float32 else 2.0**-6
    assert (ours(x) - theirs(x)).abs().max() <= tolerance * theirs(x).abs().max()


def test_rms_norm_adds_the_residual_first_and_returns_the_sum() -> None:
    norm = RMSNorm(16)
    norm.weight.data.uniform_(0.5, 1.5)
    x, residual = torch.randn(5, 16), torch.randn(5, 16)
    kept = x.clone(), residual.clone()
    out, total = norm(x, residual)
    assert torch.equal(total, kept[0] + kept[1])
    assert torch.allclose(out, total / (total.square().mean(-1, keepdim=True) + 1e-6).sqrt() * norm.weight, atol=1e-6)


def test_rms_norm_takes_heads() -> None:
    norm = RMSNorm(8)
    x = torch.randn(3, 5, 8)
    assert torch.allclose(norm(x)[2, 4], norm(x[2, 4]), atol=1e-6)


@pytest.mark.parametrize("scaling", [None, LLAMA3], ids=["default", "llama3"])
def test_rotary_equals_transformers(scaling: dict[str, Any] | None) -> None:
    options = scaling or {"rope_type": "default", "rope_theta": 10000.0}
    rope = {"rope_parameters": options}
    if not hasattr(LlamaConfig(), "rope_parameters"):  # transformers 4
        rope = {"rope_theta": options["rope_theta"], "rope_scaling": scaling}
    config = LlamaConfig(hidden_size=64, num_attention_heads=4, max_position_embeddings=300, **rope)
    positions = torch.tensor([0, 1, 2, 130, 131, 7, 299])
    q, k = torch.randn(7, 4, 16), torch.randn(7, 2, 16)
    ours = RotaryEmbedding(16, 300, options["rope_theta"], Llama3Scaling(8.0, 1.0, 4.0, 64) if scaling else None)
    got_q, got_k = ours(positions, q, k)
    cos, sin = LlamaRotaryEmbedding(config)(q, positions[None])
    want_q, want_k = apply_rotary_pos_emb(q.transpose(0, 1)[None], k.transpose(0, 1)[None], cos, sin)
    assert (got_q - want_q[0].transpose(0, 1)).abs().max() < 1e-5
    assert (got_k - want_k[0].transpose(0, 1)).abs().max() < 1e-5


def test_rotary_scores_depend_on_the_distance_alone() -> None:
    rotary = RotaryEmbedding(8, 100)
    generator = torch.Generator().manual_seed(0)  # two distances may score alike by chance
    q, k = (torch.randn(1, 1, 8, generator=generator) for _ in range(2))

    def score(at_q: int, at_k: int) -> float:
        turned, _ = rotary(torch.tensor([at_q]), q, k)
        _, turned_k = rotary(torch.tensor([at_k]), q, k)
        return float((turned * turned_k).sum())

    assert math.isclose(score(9, 4), score(60, 55), abs_tol=1e-5)
    assert not math.isclose(score(9, 4), score(9, 5), abs_tol=1e-3)


def test_rotary_worked_example() -> None:
    """Head dim 4, theta 100, position 3: the angles are 3 * 100^0 and 3 * 100^-0.5 = 0.3."""
    q = torch.tensor([[[1.0, 2.0, 3.0, 4.0]]])
    turned, _ = RotaryEmbedding(4, 10, 100.0)(torch.tensor([3]), q, q)
    want = [
        math.cos(3) - 3 * math.sin(3),
        2 * math.cos(0.3) - 4 * math.sin(0.3),
        3 * math.cos(3) + math.sin(3),
        4 * math.cos(0.3) + 2 * math.sin(0.3),
    ]
    assert torch.allclose(turned[0, 0], torch.tensor(want), atol=1e-6)


def test_rotary_table_is_not_part_of_a_checkpoint() -> None:
    assert not RotaryEmbedding(8, 10).state_dict()


def test_silu_and_mul() -> None:
    x = torch.randn(3, 10)
    assert torch.allclose(SiluAndMul()(x), F.silu(x[:, :5]) * x[:, 5:])
