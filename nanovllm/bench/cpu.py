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
from typing import Any, NamedTuple

import torch
import transformers
from gguf import GGMLQuantizationType
from transformers import AutoModelForCausalLM

from nanovllm.bench.common import StepClock, copy_bandwidth, step_bytes
from nanovllm.bench.llama_cpp import LlamaCpp
from nanovllm.cli import positive
from nanovllm.engine.events import StepRecord
from nanovllm.errors import ConfigError
from nanovllm.hub import ensure_default_model
from nanovllm.llm import LLM
from nanovllm.sampling_params import SamplingParams
from nanovllm.worker.device import select_dtype

COLDEST = 1e-6


@dataclass
class Workload:
    """Prompts and how many tokens each of them generates, end tokens ignored."""

    prompts: list[list[int]]
    lengths: list[int]

    @property
    def num_tokens(self) -> int:
        return sum(self.lengths)

    def params(self) -> list[SamplingParams]:
        return [SamplingParams(temperature=COLDEST, max_tokens=length, ignore_eos=True) for length in self.lengths]


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


class Engine(NamedTuple):
    """One way to build the engine, and what is asked of it against the other side (None: only reported)."""

    name: str
    llm: LLM
    goal: float | None


class Table:
    """Rows of ratios, printed as they come and kept for the JSON line."""

    def __init__(self, repeats: int) -> None:
        self.repeats = repeats
        self.rows: dict[str, Any] = {}

    def compare(self, name: str, ours: list[Engine], work: Workload, theirs: Callable[[], float]) -> None:
        """Time all in turns, and print for each engine how many times faster than the other side it is."""
        for engine in ours:  # the first run of each pays for what is set up lazily
            engine_seconds(engine.llm, work)
        theirs()
        rounds = [[engine_seconds(engine.llm, work) for engine in ours] + [theirs()] for _ in range(self.repeats)]
        for engine, *times in zip(ours, *[each[:-1] for each in rounds], strict=True):
            ratios = [each[-1] / time for each, time in zip(rounds, times, strict=True)]
            self.add(
                name.format(engine.name),
                goal="-" if engine.goal is None else f">= {engine.goal} x",
                ratio=round(median(ratios), 2),
                least=round(min(ratios), 2),
                most=round(max(ratios), 2),
                ours_tok_s=round(work.num_tokens / median(times), 1),
                theirs_tok_s=round(work.num_tokens / median(each[-1] for each in rounds), 1),
            )

    def add(self, name: str, **values: Any) -> None:
        self.rows[name] = values
        print(f"  {name}: " + "  ".join(f"{key} {value}" for key, value in values.items()), flush=True)


def decode_steps(clock: StepClock, rows: int) -> tuple[float, float, float]:
    """Median (host ms, step ms, achieved GB/s) of decode steps of `rows` rows at a context of about 100."""
    rng = random.Random(rows)
    work = Workload([[rng.randrange(100, 40_000) for _ in range(64)] for _ in range(rows)], [64] * rows)
    clock.steps.clear()
    clock.llm.generate(work.prompts, work.params(), use_tqdm=False)
    steps = [step for step in clock.steps if not step.is_prefill][5:]
    host = median(step.schedule + step.prepare + step.postprocess for step in steps)
    wall = median(step.wall for step in steps)
    return host * 1e3, wall * 1e3, step_bytes(clock.llm, [100] * rows) / wall / 1e9


# Its peak is read from /proc where there is one: `getrusage` of a new process counts what its parent held at the fork.
CHILD = """
import json, os, re, resource, sys, time
started = time.perf_counter()
import nanovllm
imported = time.perf_counter() - started
import torch, transformers
from transformers import AutoTokenizer
AutoTokenizer.from_pretrained(sys.argv[1], local_files_only=True)
from nanovllm import LLM, SamplingParams
torch.ones(64, 64) @ torch.ones(64, 64)
def peak():
    if os.path.exists("/proc/self/status"):
        return int(re.search(r"VmHWM:\\s+(\\d+)", open("/proc/self/status").read())[1]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)

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


def build_engines(table: Table, folder: str, dtype: str) -> dict[str, LLM]:
    """By name: PyTorch's operators alone ("plain"), with the compiled library, and with int8 weights as well."""
    engines = {"plain": LLM(folder, dtype=dtype, device="cpu", compile=False)}
    try:
        engines["compiled"] = LLM(folder, dtype=dtype, device="cpu", compile=True)
    except ConfigError as error:  # no compiler here
        table.add("compiled", not_run=str(error))
    engines["int8"] = LLM(folder, dtype=dtype, device="cpu", quantization="int8")
    return engines


def goals(engines: dict[str, LLM], **goals: float | None) -> list[Engine]:
    """Those of the engines that have a goal, with it."""
    return [Engine(name, engines[name], goal) for name, goal in goals.items() if name in engines]


def compare_with_transformers(table: Table, folder: str, engines: dict[str, LLM], dtype: str, tokens: int) -> None:
    rng = random.Random(0)
    stream, mixed = single_stream(rng, tokens), mixed_requests(rng)
    keyword = "dtype" if transformers.__version__ >= "4.56" else "torch_dtype"  # of 4.x and 5.x, which is all there is
    model = AutoModelForCausalLM.from_pretrained(
        folder, local_files_only=True, trust_remote_code=False, **{keyword: getattr(torch, dtype)}
    )
    model.generation_config.eos_token_id = None
    ours = goals(engines, plain=2.5, compiled=3.5, int8=3.5)
    table.compare("one stream, {}, against transformers", ours, stream, lambda: transformers_seconds(model, stream))
    ours = goals(engines, plain=7.0, compiled=9.0, int8=None)
    name = "16 mixed requests, {}, against transformers"
    table.compare(name, ours, mixed, lambda: transformers_seconds(model, mixed))
    name = "16 mixed requests, {}, against transformers' continuous batching"
    try:
        ours = goals(engines, plain=3.0, compiled=3.0)
        table.compare(name, ours, mixed, lambda: continuous_seconds(model, mixed))
    except Exception as error:  # whatever keeps it from running here is the result of this row
        table.add(name.format("any"), not_run=f"{error!r}"[:200])


def compare_with_llama_cpp(table: Table, engines: dict[str, LLM], threads: int, tokens: int) -> None:
    stream = single_stream(random.Random(0), tokens)
    kinds = {
        GGMLQuantizationType.BF16: goals(engines, plain=0.6, compiled=0.8),
        GGMLQuantizationType.Q8_0: goals(engines, int8=0.7),
    }
    for kind, ours in kinds.items():
        name = f"one stream, {{}}, against llama.cpp's {kind.name}"
        try:
            other = LlamaCpp(kind, threads, len(stream.prompts[0]) + tokens + 1)
        except (ImportError, RuntimeError) as error:
            table.add(name.format("any"), not_run=str(error))
            continue
        table.compare(name, ours, stream, lambda other=other: other.seconds(stream.prompts[0], tokens))  # type: ignore[misc]


def compare_prefix_cache(table: Table, folder: str, engines: dict[str, LLM], dtype: str) -> None:
    shared = shared_prefix(random.Random(1))
    ours = list(goals(engines, plain=3.0, compiled=3.0))[-1:]
    compile = ours[0].name == "compiled"
    with LLM(folder, dtype=dtype, device="cpu", compile=compile, enable_prefix_caching=False) as uncached:
        name = "64 requests that share 512 tokens, {}, against no prefix cache"
        table.compare(name, ours, shared, lambda: engine_seconds(uncached, shared))


def report_costs(table: Table, folder: str, engines: dict[str, LLM], repeats: int) -> None:
    """What a hook, a start and a step cost."""
    llm = engines.get("compiled", engines["plain"])
    costs = hook_cost(llm, mixed_requests(random.Random(2)), repeats)
    table.add(
        "a hook attached", goal="<= 1 % slower", percent=round(median(costs), 2),
        least=round(min(costs), 2), most=round(max(costs), 2),
    )  # fmt: skip
    child = in_a_fresh_process(folder)
    above = (child["above_bytes"] - child["weights"] - child["touched_pool"]) / 1e6
    table.add("import nanovllm", goal="<= 0.3 s", seconds=round(child["import_s"], 3))
    table.add("construction", goal="<= 4 s", seconds=round(child["construction_s"], 2))
    table.add("peak above weights and pool, budget 2,048", goal="<= 300 MB", MB=round(above))
    for name, engine in engines.items():
        clock = StepClock(engine)
        for rows in (1, 16):
            host, wall, bandwidth = decode_steps(clock, rows)
            table.add(
                f"decode step of {rows} rows, {name}", goal="host <= 1.0 ms" if rows == 16 else "-",
                host_ms=round(host, 3), step_ms=round(wall, 2), GBps=round(bandwidth, 1),
            )  # fmt: skip


def main(argv: list[str]) -> int:
    """Run the table; see the module's text."""
    parser = argparse.ArgumentParser(prog="nanovllm bench cpu", description=__doc__)
    parser.add_argument("--repeats", type=positive, default=5)
    parser.add_argument("--threads", type=positive, default=torch.get_num_threads())
    parser.add_argument("--tokens", type=positive, default=64, help="generated by the single stream")
    parser.add_argument("--quick", action="store_true", help="only the comparison with transformers")
    args = parser.parse_args(argv)
    torch.set_num_threads(args.threads)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    folder = str(ensure_default_model())
    table = Table(args.repeats)
    dtype = str(select_dtype("auto", torch.device("cpu"), None)).removeprefix("torch.")
    facts = {
        "threads": args.threads,
        "dtype": dtype,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "python": platform.python_version(),
        "copy_GBps": round(copy_bandwidth("cpu") / 1e9, 1),
    }
    print("  ".join(f"{name} {value}" for name, value in facts.items()), flush=True)
    engines = build_engines(table, folder, dtype)
    compare_with_transformers(table, folder, engines, dtype, args.tokens)
    if not args.quick:
        compare_with_llama_cpp(table, engines, args.threads, args.tokens)
        compare_prefix_cache(table, folder, engines, dtype)
        report_costs(table, folder, engines, args.repeats)
    for llm in engines.values():
        llm.exit()
    print(json.dumps({"bench": "cpu", **facts, "rows": table.rows}), flush=True)
    return 0
