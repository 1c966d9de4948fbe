"""Slow twins of what the model runner prepares: one token at a time, in plain Python."""

from typing import Any

import numpy as np

from nanovllm.engine.sequence import Sequence
from nanovllm.sampling_params import SamplingParams
from nanovllm.workbook.grading import Answer, type_of

INT64, INT32, FLOAT32 = np.dtype(np.int64), np.dtype(np.int32), np.dtype(np.float32)
FIELDS = {
    "input_ids": "the tokens that are computed in this step, one row's behind the other's.",
    "positions": "where each of these tokens stands in its own sequence, counted from 0.",
    "slot_mapping": "the slot of each of these tokens, in the block that its sequence's table names.",
    "block_tables": "the block table of each row, filled up with 0 to the longest.",
    "context_lens": "the tokens of each row that lie in the cache after this step.",
    "cu_seqlens_q": "where each row's tokens begin, and in the end how many there are.",
    "logits_indices": "the place of each row's last token, for rows that catch up.",
    "temperatures": "one for each row that gives a logit, in their order.",
    "max_query_len": "the most tokens that one row computes.",
    "max_context_len": "the largest of context_lens.",
    "num_decodes": "how many rows in front compute exactly one token.",
    "needs_noise": "whether any of the temperatures exceeds COLD.",
}
TEMPERATURES = (1e-6, 1e-5, 2e-5, 0.3, 0.7, 1.5)  # the first two need no noise


def make_sequence(
    answer: Answer, total: int, computed: int, scheduled: int, block_size: int, used: list[int],
    temperature: float | None = None, spare_blocks: int = 0,
) -> Sequence:  # fmt: skip
    """A sequence of `total` distinct tokens over random blocks that no other one has (`used` collects them).

    Half of them have generated some of their tokens: they decode, or catch up after a preemption.
    """
    tokens = answer.rng.sample(range(1000), total)
    num_prompt = answer.rng.randint(1, total) if answer.rng.random() < 0.5 else total
    params = SamplingParams(temperature=answer.rng.choice(TEMPERATURES) if temperature is None else temperature)
    seq = Sequence(tokens[:num_prompt], params, block_size=block_size)
    for token in tokens[num_prompt:]:
        seq.append_token(token)
    if not num_prompt <= computed == total - 1:
        seq.num_prefill_tokens = total
    free = [block for block in range(100) if block not in used]
    needed = -(-total // block_size) + spare_blocks
    seq.block_table = tuple(answer.rng.sample(free, needed))
    used.extend(seq.block_table)
    seq.num_computed_tokens, seq.num_scheduled_tokens = computed, scheduled
    return seq


def expected_arrays(seqs: list[Sequence]) -> dict[str, Any]:
    """Every field of BatchArrays, token by token."""
    ids, positions, slots, logits, temperatures = [], [], [], [], []
    boundaries, contexts, decodes, leading = [0], [], 0, True
    for seq in seqs:
        stop = seq.num_computed_tokens + seq.num_scheduled_tokens
        for position in range(seq.num_computed_tokens, stop):
            ids.append(seq.token_ids[position])
            positions.append(position)
            block = seq.block_table[position // seq.block_size]
            slots.append(block * seq.block_size + position % seq.block_size)
        if stop == len(seq.token_ids):
            logits.append(len(ids) - 1)
            temperatures.append(seq.sampling_params.temperature)
        boundaries.append(len(ids))
        contexts.append(stop)
        leading = leading and seq.num_scheduled_tokens == 1
        decodes += leading
    width = max(len(seq.block_table) for seq in seqs)
    tables = [[*seq.block_table, *[0] * (width - len(seq.block_table))] for seq in seqs]
    return {
        "input_ids": (INT64, ids), "positions": (INT64, positions), "slot_mapping": (INT64, slots),
        "block_tables": (INT32, tables), "context_lens": (INT32, contexts), "cu_seqlens_q": (INT32, boundaries),
        "logits_indices": (INT64, logits), "temperatures": (FLOAT32, temperatures),
        "max_query_len": max(seq.num_scheduled_tokens for seq in seqs), "max_context_len": max(contexts),
        "num_decodes": decodes, "needs_noise": any(t > 1e-5 for t in temperatures),
    }  # fmt: skip


def compare_arrays(answer: Answer, got: Any, seqs: list[Sequence], by_field: bool = False) -> None:
    """Field by field: values, and the dtypes of arrays.

    by_field: a wrong field breaks the rule of that field; otherwise the rule of the test that is running.
    """
    for name, expected in expected_arrays(seqs).items():
        rule = f"{name}: {FIELDS[name] if by_field else answer.rule}"
        value: Any = getattr(got, name, None)
        if not isinstance(expected, tuple):
            value = bool(value) if isinstance(value, np.bool_) else value
            answer.equal(value, expected, rule)
            continue
        dtype, numbers = expected
        answer.require(isinstance(value, np.ndarray), f"{name}: {type_of(value)}", f"{name}: a numpy array")
        answer.equal(value.tolist(), np.array(numbers, dtype).tolist(), rule)
        answer.require(
            value.dtype == dtype, f"{name}: {value.dtype}", f"{name}: {dtype}", "The device expects this type."
        )


def describe(seqs: list[Sequence]) -> str:
    rows = [(s.num_computed_tokens, s.num_scheduled_tokens, s.num_tokens, s.num_prompt_tokens) for s in seqs]
    return f"(computed, scheduled, all, prompt tokens): {rows}; blocks of {seqs[0].block_size}"
