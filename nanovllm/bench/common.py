"""What the GPU benches share: options, model folders without weights, the clock on a step, the measured bandwidth."""

import argparse
import json
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import torch
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from nanovllm.cli import positive
from nanovllm.config import Config
from nanovllm.llm import LLM
from nanovllm.paths import default_model_path

QWEN3 = {
    "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "head_dim": 128, "vocab_size": 151936,
    "max_position_embeddings": 40960, "rms_norm_eps": 1e-6, "rope_theta": 1e6, "hidden_act": "silu",
    "attention_bias": False, "dtype": "bfloat16", "torch_dtype": "bfloat16",
}  # fmt: skip
SIZES = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")
PRESETS: dict[str, dict[str, Any]] = {
    name: {**QWEN3, **dict(zip(SIZES, sizes, strict=True)), "tie_word_embeddings": tied}
    for name, sizes, tied in (
        ("qwen3-0.6b", (1024, 3072, 28, 16, 8), True),
        ("qwen3-1.7b", (2048, 6144, 28, 16, 8), True),
        ("qwen3-4b", (2560, 9728, 36, 32, 8), True),
        ("qwen3-8b", (4096, 12288, 36, 32, 8), False),
    )
}


def parser(name: str, description: str) -> argparse.ArgumentParser:
    """The options that every bench takes."""
    options = argparse.ArgumentParser(prog=f"nanovllm bench {name}", description=description)
    which = options.add_mutually_exclusive_group()
    which.add_argument("--model", help="model folder (default: the default model)")
    which.add_argument("--random-weights", choices=PRESETS, help="shapes of this model, weights drawn at random")
    options.add_argument("--backend", default="auto", help="attention backend: auto, flash, triton or torch")
    options.add_argument("--device", default="auto")
    options.add_argument("--dtype", default="auto")
    options.add_argument("--tp", type=positive, default=1, help="tensor-parallel ranks")
    options.add_argument("--eager", action="store_true", help="no CUDA graphs")
    options.add_argument("--no-fuse", action="store_true", help="plain layers instead of the fused kernels")
    options.add_argument("--label", default="", help="a word for the JSON line")
    return options


@contextmanager
def model_folder(args: argparse.Namespace) -> Iterator[tuple[str, dict[str, Any]]]:
    """The folder to load, and the engine options that go with it; a preset gets a folder for the time of the bench."""
    if args.random_weights is None:
        yield args.model or str(default_model_path()), {}
        return
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(PRESETS[args.random_weights]))
        write_tokenizer(Path(folder))
        yield folder, {"load_format": "random", "seed": 0}


def write_tokenizer(folder: Path) -> None:
    """A tokenizer of a few words: benches work on token ids, but an engine has a tokenizer."""
    words = {word: index for index, word in enumerate(("<unk>", "<end>", "the", "a"))}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>").save_pretrained(folder)


@contextmanager
def engine(args: argparse.Namespace, **options: Any) -> Iterator[tuple[LLM, dict[str, Any]]]:
    """An engine as the command line asks for, and what a reader of the JSON line must know about it."""
    on_gpu = torch.cuda.is_available() and args.device != "cpu"
    with model_folder(args) as (folder, more):
        options |= more | {
            "attention_backend": args.backend, "device": args.device, "dtype": args.dtype,
            "tensor_parallel_size": args.tp, "enforce_eager": args.eager, "compile": False if args.no_fuse else None,
        }  # fmt: skip
        Config(folder, **options)  # says now what is wrong, and not after the next line's seconds
        bandwidth = copy_bandwidth("cuda" if on_gpu else "cpu")
        started = perf_counter()
        with LLM(folder, **options) as llm:
            runner = llm.model_runner
            yield (
                llm,
                {
                    "model": args.random_weights or Path(folder).name,
                    "device": torch.cuda.get_device_name(runner.device) if on_gpu else "cpu",
                    "dtype": str(runner.dtype).removeprefix("torch."),
                    "backend": runner.attention.name,
                    "tensor_parallel_size": args.tp,
                    "cuda_graphs": runner.graphs is not None,
                    **({"label": args.label} if args.label else {}),
                    "construction_s": round(perf_counter() - started, 2),
                    "copy_GBps": round(bandwidth / 1e9, 1),
                    "num_kvcache_blocks": llm.config.num_kvcache_blocks,
                },
            )


def copy_bandwidth(device: str) -> float:
    """Bytes a second that a large copy on the device moves, read and written bytes both counted; best of five."""
    size = 1 << (31 if device == "cuda" else 28)
    source = torch.ones(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    times = []
    for _ in range(5):
        synchronize(device)
        started = perf_counter()
        target.copy_(source)
        synchronize(device)
        times.append(perf_counter() - started)
    return 2 * size / min(times)


def synchronize(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def step_bytes(llm: LLM, contexts: list[int]) -> int:
    """Bytes that a decode step must read on each rank: every weight once (of an embedding only its rows), every cached
    key and value once."""
    runner, config = llm.model_runner, llm.model_runner.model.config
    layers, _, _, _, kv_heads, dim = runner.kv_cache.shape
    heads = config.num_heads // runner.tp.size
    attention = config.hidden_size * dim * (2 * heads + 2 * kv_heads)
    mlp = 3 * config.hidden_size * config.intermediate_size // runner.tp.size
    head = config.hidden_size * config.vocab_size // runner.tp.size
    kv = sum(contexts) * 2 * layers * kv_heads * dim
    weight_bytes = 1 if llm.config.quantization == "int8" else int(runner.dtype.itemsize)
    return (layers * (attention + mlp) + head) * weight_bytes + kv * int(runner.dtype.itemsize)


@dataclass
class StepTimes:
    """Seconds of one step. `gpu` runs from the moment that the inputs are handed over to the end of sampling."""

    is_prefill: bool
    rows: int
    tokens: int
    schedule: float = 0.0
    prepare: float = 0.0
    gpu: float = 0.0
    postprocess: float = 0.0
    wall: float = 0.0


@dataclass
class StepClock:
    """Times every step of an engine from outside, by wrapping the parts of a step on this one instance."""

    llm: LLM
    steps: list[StepTimes] = field(default_factory=list)

    def __post_init__(self) -> None:
        scheduler, runner = self.llm.scheduler, self.llm.model_runner
        self._on_gpu = runner.device.type == "cuda"
        if self._on_gpu:
            self._begin, self._end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        self._parts: dict[str, float] = {}
        for owner, name in ((scheduler, "schedule"), (runner.builder, "build"), (scheduler, "postprocess")):
            setattr(owner, name, self._timed(name, getattr(owner, name)))
        self._run, self._sample, self._step = runner.run, runner.sample, self.llm._step
        own: tuple[tuple[Any, Any], ...] = ((runner, self.run), (runner, self.sample), (self.llm, self.step))
        for whole, method in own:
            setattr(whole, "_step" if whole is self.llm else method.__name__, method)

    def _timed(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any) -> Any:
            started = perf_counter()
            result = function(*args)
            self._parts[name] = perf_counter() - started
            return result

        return timed

    def sample(self, *args: Any) -> Any:
        result = self._sample(*args)
        if self._on_gpu:
            self._end.record()
        return result

    def run(self, arrays: Any) -> Any:
        started = perf_counter()
        if self._on_gpu:
            self._begin.record()
        result = self._run(arrays)
        self._parts["gpu"] = perf_counter() - started
        if self._on_gpu and result:
            self._parts["gpu"] = self._begin.elapsed_time(self._end) / 1e3
        return result

    def step(self, *args: Any) -> Any:
        started = perf_counter()
        seqs, num_tokens = self._step(*args)
        wall = perf_counter() - started
        parts = self._parts
        self.steps.append(
            StepTimes(
                num_tokens > 0,
                len(seqs),
                abs(num_tokens),
                parts.get("schedule", 0.0),
                parts.get("build", 0.0),
                parts.get("gpu", 0.0),
                parts.get("postprocess", 0.0),
                wall,
            )  # fmt: skip
        )
        return seqs, num_tokens

    def summary(self) -> dict[str, Any]:
        """Totals in seconds, prefill and decode apart; `host` is `wall` less `gpu`."""
        result: dict[str, Any] = {}
        for phase, steps in (
            ("prefill", [s for s in self.steps if s.is_prefill]),
            ("decode", [s for s in self.steps if not s.is_prefill]),
        ):
            parts = ("schedule", "prepare", "gpu", "postprocess", "wall")
            totals = {name: round(sum(getattr(s, name) for s in steps), 4) for name in parts}
            result[phase] = {"steps": len(steps), "tokens": sum(s.tokens for s in steps), **totals}
            result[phase]["host"] = round(totals["wall"] - totals["gpu"], 4)
        return result


def medians(steps: list[StepTimes]) -> dict[str, float]:
    """Median milliseconds of each part over some steps."""
    names = ("schedule", "prepare", "gpu", "postprocess", "wall")
    return {f"{name}_ms": round(median(getattr(s, name) for s in steps) * 1e3, 4) for name in names}


def report(bench: str, facts: dict[str, Any], **results: Any) -> None:
    """Results for people, line by line, and then everything on one JSON line."""
    for name, value in {**facts, **results}.items():
        if isinstance(value, dict):
            print(f"  {name}: " + "  ".join(f"{key} {number:,}" for key, number in value.items()))
        else:
            print(f"  {name}: {value:,}" if isinstance(value, (int, float)) else f"  {name}: {value}")
    print(json.dumps({"bench": bench, **facts, **results}), flush=True)
