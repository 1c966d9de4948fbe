"""The whole engine with Triton backend and fused layers, in Triton's interpreter: the torch backend's tokens."""

from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")

from nanovllm import LLM, SamplingParams
from nanovllm.attention.triton_kernels import interpreted
from nanovllm.models.fuse import install_fused

pytestmark = pytest.mark.skipif(not interpreted(), reason="on a GPU, tests/gpu does this compiled")
PROMPTS = [[5, 6, 7], list(range(3, 21))]


def test_same_tokens(tiny_model_dir: Path) -> None:
    """Chunks, decodes and mixed steps of both."""
    tokens = []
    for backend, fused in (("torch", False), ("triton", False), ("triton", True)):
        with LLM(
            str(tiny_model_dir), device="cpu", dtype="float32", attention_backend=backend, kvcache_block_size=16,
            num_kvcache_blocks=40, max_num_batched_tokens=12, scheduling_policy="mixed", seed=0,
        ) as llm:  # fmt: skip
            runner = llm.model_runner
            if fused:
                install_fused(runner.model, runner.sampler)
                layer = runner.model.model.layers[0]
                assert layer.self_attn.rotate_and_store and layer.input_layernorm.kernel and runner.sampler.kernel
            params = SamplingParams(temperature=1e-6, max_tokens=3, ignore_eos=True)
            tokens.append([result["token_ids"] for result in llm.generate(PROMPTS, params, use_tqdm=False)])
    assert tokens[0] == tokens[1] == tokens[2]


def test_replaced_layers_are_left_alone(tiny_model_dir: Path) -> None:
    from nanovllm.engine.parts import Parts
    from nanovllm.layers.layernorm import RMSNorm

    calls: list[int] = []

    def normalize(self: RMSNorm, x: torch.Tensor) -> torch.Tensor:
        calls.append(1)
        return RMSNorm.normalize(self, x)

    with LLM(
        str(tiny_model_dir), parts=Parts({"RMSNorm.normalize": normalize}), device="cpu", dtype="float32",
        attention_backend="triton", kvcache_block_size=16, num_kvcache_blocks=8,
    ) as llm:  # fmt: skip
        install_fused(llm.model_runner.model)
        layer = llm.model_runner.model.model.layers[0]
        assert layer.input_layernorm.kernel is None and layer.self_attn.rotate_and_store is None
        assert layer.mlp.act_fn.kernel is not None
        llm.generate([[5, 6, 7]], SamplingParams(max_tokens=1), use_tqdm=False)
    assert calls
