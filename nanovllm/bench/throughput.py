"""`nanovllm bench throughput`: many requests of mixed length, given at once (the workload of nano-vllm's bench)."""

from random import Random
from time import perf_counter

from nanovllm.bench.common import StepClock, engine, parser, report, step_bytes
from nanovllm.cli import positive
from nanovllm.sampling_params import SamplingParams

SHORTEST = 100  # prompt and output


def workload(num_seqs: int, longest: int, vocab: int) -> tuple[list[list[int]], list[SamplingParams]]:
    """Prompts of 100 to `longest` ids (0 to `vocab`), then outputs of such lengths, drawn in that order from seed 0."""
    random = Random(0)
    prompts = [[random.randint(0, vocab) for _ in range(random.randint(SHORTEST, longest))] for _ in range(num_seqs)]
    lengths = [random.randint(SHORTEST, longest) for _ in range(num_seqs)]
    return prompts, [SamplingParams(temperature=0.6, ignore_eos=True, max_tokens=length) for length in lengths]


def main(argv: list[str]) -> None:
    """Time `generate` on the workload: the first run after construction, and repeats with a warm prefix cache."""
    options = parser("throughput", __doc__ or "")
    options.add_argument("--num-seqs", type=positive, default=256)
    options.add_argument("--longest", type=positive, default=1024, help="longest prompt and longest output")
    options.add_argument("--runs", type=positive, default=1, help="runs after construction, each reported")
    options.add_argument("--split", action="store_true", help="time the parts of each step (costs some speed)")
    args = options.parse_args(argv)
    if args.longest < SHORTEST:
        options.error(f"--longest must be at least {SHORTEST}, the shortest prompt and output")
    with engine(args, max_model_len=4096) as (llm, facts):
        prompts, params = workload(args.num_seqs, args.longest, min(llm.model_runner.vocab_size - 1, 10000))
        clock = StepClock(llm) if args.split else None
        for run in range(1, args.runs + 1):
            if clock is not None:
                clock.steps.clear()
            started = perf_counter()
            results = llm.generate(prompts, params, use_tqdm=False)
            seconds = perf_counter() - started
            tokens = sum(len(result["token_ids"]) for result in results)
            # Token i of an output reads the prompt and the i tokens before it, and its own.
            contexts = [
                len(prompt) + i + 1
                for prompt, result in zip(prompts, results, strict=True)
                for i in range(len(result["token_ids"]) - 1)
            ]
            steps = max(p.max_tokens for p in params) - 1
            moved = step_bytes(llm, contexts) + (steps - 1) * step_bytes(llm, [])
            report(
                "throughput", facts, run=run, seconds=round(seconds, 3), output_tokens=tokens,
                output_tok_per_s=round(tokens / seconds), decode_bytes_GB=round(moved / 1e9, 1),
                bandwidth_share=round(moved / seconds / 1e9 / facts["copy_GBps"], 3),
                **(clock.summary() if clock is not None else {}),
            )  # fmt: skip
