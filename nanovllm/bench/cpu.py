"""`nanovllm bench cpu`: the default model on this CPU, beside transformers (and llama.cpp where it is installed).

Every row of the table compares two ways of doing the same work in this very run, in turns, with the same weights and
the same number of threads; it prints the median of the ratios and their smallest and largest. Absolute numbers of a
shared machine say little, ratios of one run a good deal. The last line is JSON.
"""

import argparse
import json
import os
import platform
import random
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median
from time import perf_counter
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM

from nanovllm.bench.common import StepClock, copy_bandwidth, step_bytes
from nanovllm.engine.events import StepRecord
from nanovllm.hub import ensure_default_model
from nanovllm.llm import LLM
from nanovllm.sampling_params import SamplingParams

COLD = 1e-6


@dataclass
class Workload:
    """Prompts and how many tokens each of them generates, end tokens ignored."""

    prompts: list[list[int]]
    lengths: list[int]

    @property
    def num_tokens(self) -> int:
        return sum(self.lengths)

    def params(self) -> list[SamplingParams]:
        return [SamplingParams(temperature=COLD, max_tokens=length, ignore_eos=True) for length in self.lengths]


def single_stream(rng: random.Random, count: int) -> Workload:
    return Workload([[rng.randrange(100, 40_000) for _ in range(32)]], [count])


def mixed_requests(rng: random.Random, count: int = 16) -> Workload:
    """Prompts of 32 to 256 ids, outputs of 32 to 128."""
    prompts = [[rng.randrange(100, 40_000) for _ in range(rng.randint(32, 256))] for _ in range(count)]
    return Workload(prompts, [rng.randint(32, 128) for _ in range(count)])


def shared_prefix(rng: random.Random, count: int = 64) -> Workload:
    """One prefix of 512 ids, 16 own ids and 16 to generate for each request."""
    prefix = [rng.randrange(100, 40_000) for _ in range(512)]
    return Workload([prefix + [rng.randrange(100, 40_000) for _ in range(16)] for _ in range(count)], [16] * count)


def engine_seconds(llm: LLM, work: Workload) -> float:
    """Seconds of one `generate` from an empty prefix cache."""
    llm.scheduler.block_manager.reset()
    started = perf_counter()
    llm.generate(work.prompts, work.params(), use_tqdm=False)
    return perf_counter() - started


def transformers_seconds(model: Any, work: Workload) -> float:
    """Seconds of one static batch: padded to the longest prompt and run to the longest output."""
    width = max(map(len, work.prompts))
    ids = torch.zeros(len(work.prompts), width, dtype=torch.long)
    mask = torch.zeros_like(ids)
    for row, prompt in enumerate(work.prompts):
        ids[row, width - len(prompt) :] = torch.tensor(prompt)
        mask[row, width - len(prompt) :] = 1
    length = max(work.lengths)
    started = perf_counter()
    with torch.inference_mode():
        model.generate(
            ids, attention_mask=mask, do_sample=False, max_new_tokens=length, min_new_tokens=length, pad_token_id=0
        )
    return perf_counter() - started


def continuous_seconds(model: Any, work: Workload) -> float:
    """Seconds of transformers' own continuous batching; each request runs to the longest output (no other way)."""
    config = transformers.GenerationConfig(do_sample=False, max_new_tokens=max(work.lengths), eos_token_id=-1)
    started = perf_counter()
    with torch.inference_mode():
        outputs = model.generate_batch(inputs=work.prompts, generation_config=config, progress_bar=False)
    if not outputs:
        raise RuntimeError("generate_batch returned nothing")
    return perf_counter() - started


class Table:
    """Rows of ratios, printed as they come and kept for the JSON line."""

    def __init__(self, repeats: int) -> None:
        self.repeats = repeats
        self.rows: dict[str, Any] = {}

    def compare(
        self, name: str, ours: Callable[[], float], theirs: Callable[[], float], num_tokens: int, goal: float
    ) -> None:
        """Time both in turns and print how many times faster the first is."""
        ours(), theirs()  # the first run of either pays for what is set up lazily
        pairs = [(ours(), theirs()) for _ in range(self.repeats)]
        ratios = [b / a for a, b in pairs]
        self.add(
            name,
            goal=f">= {goal} x",
            ratio=round(median(ratios), 2),
            least=round(min(ratios), 2),
            most=round(max(ratios), 2),
            ours_tok_s=round(num_tokens / median(a for a, _ in pairs), 1),
            theirs_tok_s=round(num_tokens / median(b for _, b in pairs), 1),
        )

    def add(self, name: str, **values: Any) -> None:
        self.rows[name] = values
        print(f"  {name}: " + "  ".join(f"{key} {value}" for key, value in values.items()), flush=True)


def decode_steps(llm: LLM, rows: int) -> tuple[float, float, float]:
    """Median (host ms, step ms, achieved GB/s) of decode steps of `rows` rows at a context of about 100."""
    rng = random.Random(rows)
    work = Workload([[rng.randrange(100, 40_000) for _ in range(64)] for _ in range(rows)], [64] * rows)
    clock = StepClock(llm)
    llm.generate(work.prompts, work.params(), use_tqdm=False)
    steps = [step for step in clock.steps if not step.is_prefill][5:]
    host = median(step.schedule + step.prepare + step.postprocess for step in steps)
    wall = median(step.wall for step in steps)
    return host * 1e3, wall * 1e3, step_bytes(llm, [100] * rows) / wall / 1e9


CHILD = """
import json, resource, sys, time
started = time.perf_counter()
import nanovllm
imported = time.perf_counter() - started
import torch, transformers
from transformers import AutoTokenizer
AutoTokenizer.from_pretrained(sys.argv[1], local_files_only=True)
from nanovllm import LLM, SamplingParams
torch.ones(64, 64) @ torch.ones(64, 64)
peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
before, started = peak(), time.perf_counter()
llm = LLM(sys.argv[1], max_num_batched_tokens=2048)
built = time.perf_counter() - started
params = SamplingParams(temperature=1e-6, max_tokens=8, ignore_eos=True)
llm.generate([[100 + i + j for j in range(512)] for i in range(4)], params, use_tqdm=False)
used = [block for block in llm.scheduler.block_manager.blocks if block.hash is not None]
weights = sum(p.numel() * p.element_size() for p in {id(p): p for p in llm.model_runner.model.parameters()}.values())
pool = llm.model_runner.kv_cache.nbytes * (len(used) + 8) // llm.config.num_kvcache_blocks
print(json.dumps({"import_s": imported, "construction_s": built, "above_bytes": peak() - before, "weights": weights,
                  "touched_pool": pool}))
"""


def in_a_fresh_process(folder: str) -> dict[str, float]:
    """Import and construction time, and the peak of memory, of a process that does nothing else."""
    result = subprocess.run([sys.executable, "-c", CHILD, folder], capture_output=True, text=True, check=True)
    numbers: dict[str, float] = json.loads(result.stdout.splitlines()[-1])
    return numbers


def hook_cost(llm: LLM, work: Workload, repeats: int) -> list[float]:
    """Slow-down of a run with one step hook against one without, in per cent, run by run."""
    seen: list[StepRecord] = []
    costs = []
    for _ in range(repeats):
        bare = engine_seconds(llm, work)
        with llm.observe(lambda record: seen.__setitem__(slice(None), [record])):
            hooked = engine_seconds(llm, work)
        costs.append(100 * (hooked / bare - 1))
    return costs


def compare_with_transformers(table: Table, folder: str, llm: LLM, dtype: str, tokens: int) -> None:
    rng = random.Random(0)
    stream, mixed = single_stream(rng, tokens), mixed_requests(rng)
    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=getattr(torch, dtype), local_files_only=True, trust_remote_code=False
    )
    model.generation_config.eos_token_id = None
    for name, work, goal in (("one stream", stream, 2.5), ("16 mixed requests", mixed, 7.0)):
        table.compare(
            f"{name}, {dtype}, against transformers",
            lambda work=work: engine_seconds(llm, work),  # type: ignore[misc]
            lambda work=work: transformers_seconds(model, work),  # type: ignore[misc]
            work.num_tokens,
            goal,
        )
    try:
        table.compare(
            "16 mixed requests, against transformers' continuous batching",
            lambda: engine_seconds(llm, mixed),
            lambda: continuous_seconds(model, mixed),
            mixed.num_tokens,
            3.0,
        )
    except Exception as error:  # whatever keeps it from running here is the result of this row
        table.add("16 mixed requests, against transformers' continuous batching", not_run=f"{error!r}"[:200])


def compare_options(table: Table, folder: str, llm: LLM, dtype: str, tokens: int) -> None:
    """int8 against the plain engine, and the prefix cache against none."""
    rng = random.Random(1)
    stream, shared = single_stream(rng, tokens), shared_prefix(rng)
    with LLM(folder, dtype=dtype, device="cpu", quantization="int8") as quantized:
        table.compare(
            "one stream, int8, against the plain engine",
            lambda: engine_seconds(quantized, stream),
            lambda: engine_seconds(llm, stream),
            stream.num_tokens,
            1.4,
        )
    with LLM(folder, dtype=dtype, device="cpu", enable_prefix_caching=False) as uncached:
        table.compare(
            "64 requests that share 512 tokens, against no prefix cache",
            lambda: engine_seconds(llm, shared),
            lambda: engine_seconds(uncached, shared),
            shared.num_tokens,
            3.0,
        )


def main(argv: list[str]) -> int:
    """Run the table; see the module's text."""
    parser = argparse.ArgumentParser(prog="nanovllm bench cpu", description=__doc__)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--tokens", type=int, default=64, help="generated by the single stream")
    parser.add_argument("--quick", action="store_true", help="only the comparison with transformers")
    args = parser.parse_args(argv)
    torch.set_num_threads(args.threads)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    folder = str(ensure_default_model())
    table = Table(args.repeats)
    with LLM(folder, device="cpu") as llm:
        dtype = str(llm.model_runner.dtype).removeprefix("torch.")
        facts = {
            "threads": args.threads,
            "dtype": dtype,
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "python": platform.python_version(),
            "copy_GBps": round(copy_bandwidth("cpu") / 1e9, 1),
        }
        print("  ".join(f"{name} {value}" for name, value in facts.items()), flush=True)
        compare_with_transformers(table, folder, llm, dtype, args.tokens)
        if not args.quick:
            compare_options(table, folder, llm, dtype, args.tokens)
            costs = hook_cost(llm, mixed_requests(random.Random(2)), args.repeats)
            table.add(
                "a hook attached", goal="<= 1 % slower", percent=round(median(costs), 2),
                least=round(min(costs), 2), most=round(max(costs), 2),
            )  # fmt: skip
            child = in_a_fresh_process(folder)
            above = (child["above_bytes"] - child["weights"] - child["touched_pool"]) / 1e6
            table.add("import nanovllm", goal="<= 0.3 s", seconds=round(child["import_s"], 3))
            table.add("construction", goal="<= 4 s", seconds=round(child["construction_s"], 2))
            table.add("peak above weights and pool, budget 2,048", goal="<= 300 MB", MB=round(above))
            for rows in (1, 16):
                host, wall, bandwidth = decode_steps(llm, rows)
                table.add(
                    f"decode step of {rows} rows", goal="host <= 1.0 ms" if rows == 16 else "-",
                    host_ms=round(host, 3), step_ms=round(wall, 2), GBps=round(bandwidth, 1),
                )  # fmt: skip
    print(json.dumps({"bench": "cpu", **facts, "rows": table.rows}), flush=True)
    return 0
