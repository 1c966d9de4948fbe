"""The engine on a real GPU: graphs, fused kernels and backends change nothing but the time."""

import warnings
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch

from nanovllm import LLM, SamplingParams
from nanovllm.engine.parts import Parts
from nanovllm.errors import MemoryBudgetError
from nanovllm.worker.cuda_graphs import DecodeGraphs
from nanovllm.worker.model_runner import ModelRunner
from tests.tiny_models import make_tiny_model

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
SMALL = {"num_kvcache_blocks": 200, "kvcache_block_size": 16, "max_model_len": 512, "max_num_batched_tokens": 700}


def workload(count: int = 37) -> tuple[list[list[int]], list[SamplingParams]]:
    random = Random(1)
    prompts = [[random.randint(3, 298) for _ in range(random.choice((1, 15, 16, 17, 40, 200)))] for _ in range(count)]
    params = [SamplingParams(temperature=1e-6, max_tokens=random.randint(1, 40), ignore_eos=True) for _ in range(count)]
    return prompts, params


def tokens(folder: Path, **options: Any) -> list[list[int]]:
    settings = {"dtype": "float32", "attention_backend": "triton", "max_num_seqs": 20, "seed": 0, **SMALL, **options}
    with LLM(str(folder), **settings) as llm:
        return [result["token_ids"] for result in llm.generate(*workload(), use_tqdm=False)]


@pytest.fixture(scope="module")
def folders(tiny_model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Qwen3, and Qwen2 and Llama with heads of 32, the smallest that the kernels take."""
    sizes = {"qwen2": {"hidden_size": 128}, "llama": {"hidden_size": 128, "head_dim": 32}}
    made = tmp_path_factory.mktemp("gpu")
    others = {name: make_tiny_model(made / name, name, **more) for name, more in sizes.items()}
    return {"qwen3": tiny_model_dir, **others}


@pytest.fixture(scope="module")
def plain_tokens(folders: dict[str, Path]) -> dict[str, list[list[int]]]:
    """By the plain layers and the oracle's attention, on the CPU."""
    return {name: tokens(folder, device="cpu", attention_backend="torch") for name, folder in folders.items()}


@pytest.mark.parametrize("architecture", ["qwen3", "qwen2", "llama"])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"enforce_eager": True},
        {"compile": False},
        {"attention_backend": "torch"},
        {"max_num_seqs": 1},
        {"max_num_seqs": 13},
        {"scheduling_policy": "mixed"},
        {"num_kvcache_blocks": 40},
    ],
    ids=lambda options: "-".join(f"{k}={v}" for k, v in options.items()) or "graphs",
)
def test_same_tokens_in_float32(
    architecture: str, options: dict[str, Any], folders: dict[str, Path], plain_tokens: dict[str, Any]
) -> None:
    assert tokens(folders[architecture], **options) == plain_tokens[architecture]


def test_sizes_of_the_graphs(tiny_model_dir: Path) -> None:
    options = {**SMALL, "attention_backend": "triton", "max_num_seqs": 20}
    with LLM(str(tiny_model_dir), **options) as llm:
        assert list(llm.model_runner.graphs.graphs) == list(reversed(DecodeGraphs.graph_sizes(20)))
    with LLM(str(tiny_model_dir), enforce_eager=True, **options) as llm:
        assert llm.model_runner.graphs is None


def test_a_batch_above_the_largest_graph_runs_eagerly(tiny_model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = tokens(tiny_model_dir)
    monkeypatch.setattr("nanovllm.worker.cuda_graphs.MAX_GRAPH_SIZE", 7)
    assert tokens(tiny_model_dir) == expected


def test_nothing_is_compiled_after_construction(tiny_model_dir: Path) -> None:
    from triton import knobs

    compiled: list[str] = []
    before = knobs.runtime.jit_post_compile_hook
    try:
        for options in ({}, {"enforce_eager": True}, {"scheduling_policy": "mixed"}):
            settings = {**SMALL, "attention_backend": "triton", "max_num_seqs": 20, **options}
            with LLM(str(tiny_model_dir), **settings) as llm:
                knobs.runtime.jit_post_compile_hook = lambda *_, **what: compiled.append(str(what.get("repr")))
                prompts, params = workload()
                warm = [SamplingParams(temperature=0.9, max_tokens=p.max_tokens, ignore_eos=True) for p in params]
                llm.generate(prompts, params, use_tqdm=False)
                llm.generate(prompts, warm, use_tqdm=False)
                knobs.runtime.jit_post_compile_hook = before
    finally:
        knobs.runtime.jit_post_compile_hook = before
    assert compiled == []


def test_the_seed_decides_the_draws(tiny_model_dir: Path) -> None:
    prompts, params = workload(5)
    params = [SamplingParams(temperature=1.0, max_tokens=20, ignore_eos=True) for _ in params]

    def draw(seed: int) -> list[list[int]]:
        with LLM(str(tiny_model_dir), attention_backend="triton", seed=seed, **SMALL) as llm:
            return [result["token_ids"] for result in llm.generate(prompts, params, use_tqdm=False)]

    assert draw(1) == draw(1) != draw(2)


def test_the_pool_fills_the_memory_and_a_second_engine_sees_what_is_left(tiny_model_dir: Path) -> None:
    options = {"attention_backend": "triton", "max_num_seqs": 8, "max_num_batched_tokens": 2048}
    total = torch.cuda.get_device_properties(0).total_memory
    with LLM(str(tiny_model_dir), gpu_memory_utilization=0.5, **options) as first:
        used = total - torch.cuda.mem_get_info()[0]
        assert 0.4 * total < used < 0.6 * total
        with pytest.raises(MemoryBudgetError, match="GiB"):
            LLM(str(tiny_model_dir), gpu_memory_utilization=0.5, **options)
        with LLM(str(tiny_model_dir), gpu_memory_utilization=0.8, **options) as second:
            pools = [llm.config.num_kvcache_blocks for llm in (first, second)]
            assert 0 < pools[1] < pools[0]
            prompts, params = workload(6)
            # Interleaved, step by step, without touching each other.
            for llm in (first, second):
                for prompt, each in zip(prompts, params, strict=True):
                    llm.add_request(prompt, each)
            done: list[dict[int, list[int]]] = [{}, {}]
            while not (first.is_finished() and second.is_finished()):
                for llm, finished in zip((first, second), done, strict=True):
                    finished.update(llm.step()[0])
            assert done[0] == done[1]


def test_graphs_share_their_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All 19 of them together take what the largest does: with a vocabulary of 150,000 each has logits of its own."""
    folder, rows, vocab = make_tiny_model(tmp_path, "qwen3", vocab_size=150_000), 128, 150_000
    capture, grown = ModelRunner._capture_graphs, []

    def measured(self: ModelRunner, parts: Parts) -> DecodeGraphs | None:
        torch.cuda.empty_cache()
        before = torch.cuda.memory_reserved()
        graphs = capture(self, parts)
        grown.append(torch.cuda.memory_reserved() - before)
        return graphs

    monkeypatch.setattr(ModelRunner, "_capture_graphs", measured)
    options: dict[str, Any] = {**SMALL, "dtype": "float32", "attention_backend": "triton", "max_num_seqs": rows}
    with LLM(str(folder), **options) as llm:
        assert llm.model_runner.graphs is not None and len(llm.model_runner.graphs.sizes) == 19
    table = rows * vocab * 4
    assert grown[0] < 3.5 * table, f"{grown[0] / table:.1f} tables of logits"  # the 19 by themselves: 8.6


def test_steps_that_sample_nothing_keep_their_inputs(tiny_model_dir: Path) -> None:
    """Nobody waits for such a step, so the next one comes while the GPU has yet to fetch what this one is to read."""
    options = {**SMALL, "dtype": "float32", "attention_backend": "triton", "max_num_seqs": 8, "prefill_chunk": 1}
    prompts, params = [list(range(3, 60)), list(range(40, 10, -1))], SamplingParams(1e-6, 12, True)
    results = []
    for eager in (True, False):
        with LLM(str(tiny_model_dir), enforce_eager=eager, **options) as llm:
            torch.cuda._sleep(200_000_000)  # a tenth of a second in which everything queues up
            results.append([result["token_ids"] for result in llm.generate(prompts, params, use_tqdm=False)])
    assert results[0] == results[1]


def test_a_sampler_of_ones_own_runs_behind_the_graph(tiny_model_dir: Path) -> None:

    class Least(torch.nn.Module):
        def forward(self, logits, temperatures, generator=None, needs_noise=True):  # type: ignore[no-untyped-def]
            return logits.argmin(-1)

    with LLM(str(tiny_model_dir), parts=Parts({"Sampler": Least}), attention_backend="triton", **SMALL) as llm:
        least = llm.generate([[5, 6, 7]], SamplingParams(max_tokens=4, ignore_eos=True), use_tqdm=False)[0]["token_ids"]
    with LLM(str(tiny_model_dir), attention_backend="triton", **SMALL) as llm:
        params = SamplingParams(temperature=1e-6, max_tokens=4, ignore_eos=True)
        most = llm.generate([[5, 6, 7]], params, use_tqdm=False)[0]["token_ids"]
    assert least != most


def test_no_warning_on_the_way(tiny_model_dir: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        tokens(tiny_model_dir)
