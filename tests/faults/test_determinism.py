"""What is the same from run to run, and what is not.

With `seed=` a new engine gives the same tokens for the same calls with the same options, on one machine. A second call
of one engine goes on with the noise where the first ended. At near-zero temperature a float32 engine on a CPU gives a
prompt the same tokens whatever is computed beside it, as long as the two best logits are 1e-4 apart.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from nanovllm import Parts, SamplingParams
from nanovllm.layers.sampler import Sampler
from tests.faults.engines import build, cold, token_ids

PROMPTS = [list(range(5, 5 + length)) for length in (1, 3, 4, 5, 21, 60, 61, 100)]
WARM = SamplingParams(temperature=0.9, max_tokens=24, ignore_eos=True)

# Every setting that changes which rows are computed together, or how.
SETTINGS: dict[str, dict[str, Any]] = {
    "as it is": {},
    "blocks of 16": {"kvcache_block_size": 16},
    "blocks of 256": {"kvcache_block_size": 256, "num_kvcache_blocks": 16},
    "chunks of 7": {"prefill_chunk": 7},
    "budget of 16": {"max_num_batched_tokens": 16},
    "two at a time": {"max_num_seqs": 2},
    "mixed": {"scheduling_policy": "mixed", "max_num_batched_tokens": 32},
    "tight pool": {"num_kvcache_blocks": 36},
    "no prefix cache": {"enable_prefix_caching": False},
}


@pytest.mark.parametrize("policy", ["prefill_first", "mixed"])
def test_a_seed_repeats_the_tokens(tiny_model_dir: Path, policy: str) -> None:
    runs = []
    for seed in (7, 7, 8):
        with build(tiny_model_dir, seed=seed, scheduling_policy=policy, num_kvcache_blocks=90) as llm:
            calls = [token_ids(llm.generate(PROMPTS, WARM, use_tqdm=False)) for _ in range(2)]
            calls.append(["".join(llm.stream("the quick", WARM))])  # type: ignore[list-item]
        runs.append(calls)
    assert runs[0] == runs[1] != runs[2]
    assert runs[0][0] != runs[0][1], "the second call of an engine draws other noise than the first"


def test_a_seed_repeats_the_tokens_in_another_process(tiny_model_dir: Path) -> None:
    """Also with another seed of Python's own hashes, which block hashes must not depend on."""
    code = (
        "import json\n"
        "from tests.faults.test_determinism import *\n"
        f"with build({str(tiny_model_dir)!r}, seed=3, num_kvcache_blocks=60) as llm:\n"
        "    print(json.dumps(token_ids(llm.generate(PROMPTS, WARM, use_tqdm=False))))\n"
    )
    results = []
    for hash_seed in ("1", "2"):
        environment = {**os.environ, "PYTHONHASHSEED": hash_seed}
        result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment)
        results.append(json.loads(result.stdout or f'"{result.stderr[-500:]}"'))
    with build(tiny_model_dir, seed=3, num_kvcache_blocks=60) as llm:
        assert results == [token_ids(llm.generate(PROMPTS, WARM, use_tqdm=False))] * 2


def test_without_a_seed_the_noise_is_fresh(tiny_model_dir: Path) -> None:
    runs = []
    for _ in range(2):
        with build(tiny_model_dir, seed=None, num_kvcache_blocks=90) as llm:
            runs.append(token_ids(llm.generate(PROMPTS, WARM, use_tqdm=False)))
    assert runs[0] != runs[1]


class Gaps(Sampler):
    """Remembers how far apart the two best logits of each row were."""

    def __init__(self) -> None:
        super().__init__()
        self.gaps: list[float] = []

    def forward(self, logits: torch.Tensor, *args: Any, **options: Any) -> torch.Tensor:
        best = logits.float().topk(2).values
        self.gaps += (best[:, 0] - best[:, 1]).tolist()
        return super().forward(logits, *args, **options)


def alone(path: Path, prompts: list[list[int]], count: int, **options: Any) -> list[tuple[list[int], list[float]]]:
    """Tokens and gaps of every prompt by itself."""
    results = []
    with build(path, Parts({"Sampler": Gaps}), enable_prefix_caching=False, **options) as llm:
        for prompt in prompts:
            llm.model_runner.sampler.gaps.clear()
            tokens = token_ids(llm.generate([prompt], cold(count), use_tqdm=False))[0]
            results.append((tokens, list(llm.model_runner.sampler.gaps)))
    return results


def differences(path: Path, prompts: list[list[int]], count: int, limit: float, **options: Any) -> dict[str, int]:
    """By setting: prompts whose tokens differ from those of the prompt alone, where its gap had exceeded `limit`."""
    expected = alone(path, prompts, count, **options)
    found = {}
    for name, setting in SETTINGS.items():
        with build(path, **{"num_kvcache_blocks": 400, **options, **setting}) as llm:
            outputs = token_ids(llm.generate(prompts, cold(count), use_tqdm=False))
        found[name] = 0
        for output, (tokens, gaps) in zip(outputs, expected, strict=True):
            first = next((i for i, pair in enumerate(zip(output, tokens, strict=True)) if pair[0] != pair[1]), None)
            found[name] += first is not None and gaps[first] > limit
    return found


@pytest.mark.parametrize("model", ["qwen3", "qwen2", "llama"])
def test_a_float32_engine_is_batch_invariant(tiny_model_dirs: dict[str, Path], model: str) -> None:
    assert differences(tiny_model_dirs[model], PROMPTS, 12, 1e-4) == dict.fromkeys(SETTINGS, 0)


def real_prompts(path: Path) -> list[list[int]]:
    from nanovllm.tokenizer import load_tokenizer

    tokenizer = load_tokenizer(path, 49152)
    texts = ["The capital of France is", "Once upon a time", "def fibonacci(n):", "1, 2, 3, 4,", "Dear Sir or Madam,"]
    texts += [f"Question {number}: what is {number} times {number + 1}? Answer:" for number in range(7)]
    return [tokenizer.encode(text) for text in texts]


@pytest.mark.slow
@pytest.mark.timeout(3000)
def test_a_float32_engine_is_batch_invariant_on_the_real_model(default_model_dir: Path) -> None:
    found = differences(default_model_dir, real_prompts(default_model_dir), 24, 1e-4, max_model_len=512)
    assert found == dict.fromkeys(SETTINGS, 0)


@pytest.mark.slow
@pytest.mark.timeout(3000)
def test_in_bfloat16_the_batch_changes_the_numbers(default_model_dir: Path) -> None:
    """Stated in the README: which settings may change a token. Run to run, with the same settings, none does."""
    prompts = real_prompts(default_model_dir)
    options: dict[str, Any] = {"dtype": "bfloat16", "max_model_len": 512}
    found = differences(default_model_dir, prompts, 24, 0.0, **options)
    print(f"bfloat16: of {len(prompts)} prompts differ from the prompt alone: {found}")
    runs = []
    for _ in range(2):
        with build(default_model_dir, num_kvcache_blocks=400, **options) as llm:
            runs.append(token_ids(llm.generate(prompts, cold(24), use_tqdm=False)))
    assert runs[0] == runs[1]
