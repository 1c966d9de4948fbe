"""`nanovllm bench latency`: how long a token takes when 1, 8 or 64 streams decode together."""

from random import Random
from statistics import median

from nanovllm.bench.common import StepClock, engine, medians, parser, report, step_bytes
from nanovllm.cli import positive
from nanovllm.sampling_params import SamplingParams


def main(argv: list[str]) -> None:
    """Time whole calls of `generate`: prompts of one length, outputs of one length, a batch at a time."""
    options = parser("latency", __doc__ or "")
    options.add_argument("--batch", type=positive, nargs="+", default=[1, 8, 64])
    options.add_argument("--input", type=positive, default=128, help="prompt ids")
    options.add_argument("--output", type=positive, default=256, help="generated ids")
    args = options.parse_args(argv)
    if args.output < 2:
        options.error("--output must be at least 2: the first id comes from the prefill")
    random = Random(0)
    with engine(args, max_model_len=4096) as (llm, facts):
        clock = StepClock(llm)
        vocab = min(llm.model_runner.vocab_size - 1, 10000)
        params = SamplingParams(temperature=0.6, ignore_eos=True, max_tokens=args.output)
        for batch in args.batch:
            clock.steps.clear()
            prompts = [[random.randint(0, vocab) for _ in range(args.input)] for _ in range(batch)]
            llm.generate(prompts, params, use_tqdm=False)
            decodes = [step for step in clock.steps if not step.is_prefill]
            wall = median(step.wall for step in decodes)
            moved = step_bytes(llm, [args.input + args.output // 2] * batch)
            report(
                "latency", facts, batch=batch, first_token_ms=round(clock.steps[0].wall * 1e3, 2),
                tok_per_s=round(batch * len(decodes) / sum(step.wall for step in decodes), 1),
                bandwidth_share=round(moved / wall / 1e9 / facts["copy_GBps"], 3), step=medians(decodes),
            )  # fmt: skip
