"""`nanovllm demo`: eight questions, answered in one batch, and one line about what the engine did for it."""

import argparse
from time import perf_counter
from typing import Any

import torch

from nanovllm.engine.events import StepRecord
from nanovllm.hub import resolve_model
from nanovllm.llm import LLM
from nanovllm.sampling_params import SamplingParams

QUESTIONS = (
    "Which country is Paris the capital of?",
    "What is photosynthesis?",
    "What is the opposite of hot?",
    "Write a friendly greeting for a new colleague.",
    "What is an operating system?",
    "What is water made of?",
    "Explain in one sentence what gravity is.",
    "Suggest a title for a story about a lost cat.",
)


def main(argv: list[str]) -> int:
    """Run the demo on the default model, or on another one."""
    parser = argparse.ArgumentParser("nanovllm demo", description="Answer eight questions in one batch.")
    parser.add_argument("--model", default="default", help="a model's folder, or a name from `nanovllm model list`")
    parser.add_argument("--max-tokens", type=int, default=128, help="longest answer, in tokens (default %(default)s)")
    parser.add_argument("--temperature", type=float, default=0.3, help="default %(default)s; 1e-6: the likeliest")
    parser.add_argument("--seed", type=int, help="make the answers repeat")
    options = parser.parse_args(argv)
    params = SamplingParams(temperature=options.temperature, max_tokens=options.max_tokens)
    # Small blocks where the backend allows them: then the questions share the block that holds the system prompt.
    blocks: dict[str, Any] = (
        {} if torch.cuda.is_available() else {"attention_backend": "torch", "kvcache_block_size": 16}
    )
    with LLM(str(resolve_model(options.model)), seed=options.seed, **blocks) as llm:
        run(llm, params)
    return 0


def run(llm: LLM, params: SamplingParams) -> None:
    """Ask, print the answers, and sum up."""
    records: list[StepRecord] = []
    conversations = [[{"role": "user", "content": question}] for question in QUESTIONS]
    with llm.observe(records.append):
        started = perf_counter()
        answers = llm.chat(conversations, params, use_tqdm=True)
        seconds = perf_counter() - started
    for question, answer in zip(QUESTIONS, answers, strict=True):
        print(f"\n> {question}\n{answer['text'].strip()}")
    tokens = sum(len(answer["token_ids"]) for answer in answers)
    prompt_tokens = sum(answer.num_prompt_tokens for answer in answers)
    cached = sum(answer.num_cached_tokens for answer in answers)
    preemptions = sum(len(record.preempted) for record in records)
    print(
        f"\n{tokens:,} tokens in {seconds:.1f} s: {tokens / seconds:,.0f} tok/s, {len(records)} steps; prefix cache: "
        f"{cached:,} of {prompt_tokens:,} prompt tokens; preemptions: {preemptions}"
    )
