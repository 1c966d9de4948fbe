"""`nanovllm bench decode`: decode steps of one batch size at one context, against the bytes that they must read."""

from itertools import pairwise
from random import Random
from statistics import median
from time import perf_counter

import torch

from nanovllm.bench.common import StepClock, engine, medians, parser, report, step_bytes
from nanovllm.cli import positive
from nanovllm.llm import LLM
from nanovllm.sampling_params import SamplingParams


def gpu_alone(llm: LLM, repeats: int = 20) -> float | None:
    """Seconds of the GPU's work in the step that was replayed last, without the host: replays back to back.

    None where no graph was used, or where the other ranks would have to replay it too.
    """
    runner = llm.model_runner
    if runner.graphs is None or not runner.graphs.last_size or llm.ps:
        return None
    size = runner.graphs.last_size
    replay, logits = runner.graphs.graphs[size]
    temperatures = runner.graphs.inputs.device["temperatures"][:size]
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    with torch.inference_mode():
        begin.record()
        for _ in range(repeats):
            replay()
            runner.sampler(logits, temperatures, runner.generator, True)
        end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end) / 1e3 / repeats


def time_steps(llm: LLM, count: int) -> list[float]:
    """The seconds of each of `count` steps."""
    times = [perf_counter()]
    for _ in range(count):
        llm.step()
        times.append(perf_counter())
    return [end - start for start, end in pairwise(times)]


def main(argv: list[str]) -> None:
    """Fill the cache by prefill, then time decode steps around the wanted context."""
    options = parser("decode", __doc__ or "")
    options.add_argument("--rows", type=positive, default=256)
    options.add_argument("--context", type=positive, default=585)
    options.add_argument("--steps", type=positive, default=48)
    args = options.parse_args(argv)
    quarter = max(args.steps // 4, 1)
    length = args.context - quarter
    if length < 1:
        options.error(f"--context must exceed a quarter of --steps, which is {quarter}")
    random = Random(0)
    longest = args.context + args.steps + 8
    with engine(args, max_model_len=max(4096, longest), max_num_seqs=args.rows) as (llm, facts):
        vocab = min(llm.model_runner.vocab_size - 1, 10000)
        for _ in range(args.rows):
            prompt = [random.randint(0, vocab) for _ in range(length)]
            llm.add_request(prompt, SamplingParams(temperature=0.6, ignore_eos=True, max_tokens=args.steps + 8))
        while llm.step()[1] > 0:
            pass  # prefill
        # The first half of the steps undisturbed, around the wanted context, with the GPU's own time taken in between;
        # the second half with a clock on every part.
        steps = time_steps(llm, quarter)
        alone = gpu_alone(llm)
        steps += time_steps(llm, quarter)
        wall = median(steps)
        clock = StepClock(llm)
        time_steps(llm, 2 * quarter)
        moved = step_bytes(llm, [args.context] * args.rows)
        report(
            "decode", facts, rows=args.rows, context=args.context, step_ms=round(wall * 1e3, 3),
            least_ms=round(min(steps) * 1e3, 3), most_ms=round(max(steps) * 1e3, 3),
            gpu_alone_ms=alone and round(alone * 1e3, 3),
            unhidden_host_ms=alone and round((wall - alone) * 1e3, 3),
            read_GB=round(moved / 1e9, 3), GBps=round(moved / wall / 1e9, 1),
            bandwidth_share=round(moved / wall / 1e9 / facts["copy_GBps"], 3), step=medians(clock.steps),
        )  # fmt: skip
