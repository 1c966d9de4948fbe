"""Grader of exercise 3.6: causal attention over paged keys and values."""

import math
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any
from unittest.mock import patch

import torch

from nanovllm.attention.base import AttentionMetadata
from nanovllm.attention.torch_backend import TorchAttention
from nanovllm.workbook.grading import Answer, type_of

CLOSE = 1e-4  # float32 sums over a few dozen products


class Step:
    """Rows of (queries, context) in a pool whose unused slots are NaN; keys and values also as plain lists."""

    def __init__(
        self, answer: Answer, rows: list[tuple[int, int]], block_size: int = 4, heads: int = 2, kv_heads: int = 1,
        head_dim: int = 3, num_decodes: int = 0, attention: Any = None,
    ) -> None:  # fmt: skip
        answer.story.clear()
        answer.note(f"rows of (queries, context): {rows}; blocks of {block_size}, {heads} heads on {kv_heads} kv heads")
        generator = torch.Generator().manual_seed(answer.rng.randrange(2**31))
        widths = [-(-context // block_size) for _, context in rows]
        num_blocks = sum(widths) + 3
        free = answer.rng.sample(range(num_blocks), num_blocks)
        self.k_cache = torch.full((num_blocks, block_size, kv_heads, head_dim), math.nan)
        self.v_cache = torch.full_like(self.k_cache, math.nan)
        self.keys: list[torch.Tensor] = []
        self.values: list[torch.Tensor] = []
        # Behind a row's last block: numbers of no block, and of blocks that are somebody else's.
        shape = (len(rows), max(widths, default=1) + 1)
        rubbish = [answer.rng.choice([10**6, -1, answer.rng.randrange(num_blocks)]) for _ in range(shape[0] * shape[1])]
        tables = torch.tensor(rubbish, dtype=torch.int32).reshape(shape)
        for b, (_, context) in enumerate(rows):
            k = torch.randn(context, kv_heads, head_dim, generator=generator)
            v = torch.randn(context, kv_heads, head_dim, generator=generator)
            table = [free.pop() for _ in range(widths[b])]
            tables[b, : len(table)] = torch.tensor(table, dtype=torch.int32)
            for position in range(context):
                block, offset = table[position // block_size], position % block_size
                self.k_cache[block, offset], self.v_cache[block, offset] = k[position], v[position]
            self.keys.append(k)
            self.values.append(v)
        ends = [0]
        for queries, _ in rows:
            ends.append(ends[-1] + queries)
        self.q = torch.randn(ends[-1], heads, head_dim, generator=generator)
        contexts = [context for _, context in rows]
        self.metadata = AttentionMetadata(
            slot_mapping=torch.full((ends[-1],), -1), block_tables=tables,
            context_lens=torch.tensor(contexts, dtype=torch.int32), cu_seqlens_q=torch.tensor(ends, dtype=torch.int32),
            max_query_len=max(queries for queries, _ in rows), max_context_len=max(contexts), num_decodes=num_decodes,
        )  # fmt: skip
        self.rows, self.scale = rows, 0.37
        self.attention = attention
        if attention is None:
            self.attention = answer.parts.resolve(TorchAttention)(heads, kv_heads, head_dim, self.scale, block_size)

    def got(self) -> Any:
        return self.attention.attend(self.q, self.k_cache, self.v_cache, self.metadata)

    def slowly(self) -> torch.Tensor:
        """Query by query, head by head, key by key, in Python numbers."""
        out, at, shared = [], 0, self.q.shape[1] // self.keys[0].shape[1]
        for b, (queries, context) in enumerate(self.rows):
            for i in range(queries):
                visible = context - queries + i + 1
                heads = []
                for n, query in enumerate(self.q[at].tolist()):
                    keys, values = (
                        self.keys[b][:visible, n // shared].tolist(),
                        self.values[b][:visible, n // shared].tolist(),
                    )
                    scores = [self.scale * sum(x * y for x, y in zip(query, key, strict=True)) for key in keys]
                    weights = [math.exp(score - max(scores)) for score in scores]
                    total = sum(weights)
                    heads.append(
                        [sum(w * v[h] for w, v in zip(weights, values, strict=True)) / total for h in range(len(query))]
                    )
                out.append(heads)
                at += 1
        return torch.tensor(out).reshape(self.q.shape)


def compare(answer: Answer, *args: Any, **options: Any) -> None:
    step = Step(answer, *args, **options)
    answer.equal(step.got(), step.slowly(), tolerance=CLOSE)


def test_contract__shape_and_inputs(answer: Answer) -> None:
    """The result has the shape and type of q, and neither q nor the cache is changed."""
    step = Step(answer, [(3, 5), (1, 8)], heads=6, kv_heads=2)
    before = step.q.clone(), step.k_cache.clone(), step.v_cache.clone()
    got = step.got()
    answer.require(isinstance(got, torch.Tensor), type_of(got), "a tensor")
    answer.equal((list(got.shape), got.dtype), ([4, 6, 3], torch.float32))
    answer.equal(step.q, before[0], "It may not change q.")
    answer.equal((step.k_cache, step.v_cache), before[1:], "It may not change the cache.")
    answer.equal(step.got(), got, "Asked again, it answers the same.")


def test_example__three_queries_of_five_tokens(answer: Answer) -> None:
    """3 queries and 5 tokens: the queries stand at positions 2, 3 and 4, and see 3, 4 and 5 tokens."""
    compare(answer, [(3, 5)])


def test_oracle__whole_prompts(answer: Answer) -> None:
    """In a whole prompt, query i sees the first i + 1 tokens of its own sequence."""
    for rows in ([(1, 1)], [(7, 7)], [(4, 4), (8, 8)], [(5, 5), (1, 1), (9, 9)]):
        compare(answer, rows)


def test_oracle__decodes(answer: Answer) -> None:
    """A decode's one query sees all tokens of its sequence."""
    for rows in ([(1, 6)], [(1, 4), (1, 5), (1, 8), (1, 17)], [(1, 1), (1, 150), (1, 2)]):
        compare(answer, rows, num_decodes=len(rows))


def test_oracle__one_backend_for_many_steps(answer: Answer) -> None:
    """Layers and steps share the backend: each call is about its own arguments, whatever the last one was."""
    first = Step(answer, [(1, 6), (2, 7)], num_decodes=1)
    answer.equal(first.got(), first.slowly(), tolerance=CLOSE)
    for rows in ([(1, 6), (2, 7)], [(1, 7), (2, 9)], [(1, 8), (2, 2)]):
        step = Step(answer, rows, num_decodes=1, attention=first.attention)
        answer.note("(the same backend as in the step before)")
        answer.equal(step.got(), step.slowly(), tolerance=CLOSE)
    step.q.neg_()  # the next layer: other queries, keys and values, but the same metadata
    step.v_cache.mul_(2.0)
    step.values = [2.0 * values for values in step.values]
    answer.note("then another layer: q = -q, v_cache *= 2")
    answer.equal(step.got(), step.slowly(), tolerance=CLOSE)


def test_oracle__heads_share(answer: Answer) -> None:
    """Neighbouring heads share a kv head: of 6 heads on 2, heads 0, 1, 2 read the first and 3, 4, 5 the second."""
    for heads, kv_heads in ((1, 1), (4, 4), (6, 2), (9, 3), (5, 1)):
        compare(answer, [(3, 6), (1, 5)], heads=heads, kv_heads=kv_heads)


def test_oracle__random_steps(answer: Answer) -> None:
    """Chunks, prefix hits, whole prompts and decodes in one step, over blocks of any size."""
    for _ in range(25):
        count = answer.rng.randint(1, 5)
        decodes = answer.rng.randint(0, count)
        rows = [(1, answer.rng.randint(1, 14)) for _ in range(decodes)]
        for _ in range(count - decodes):
            queries = answer.rng.randint(1, 6)
            rows.append((queries, queries + answer.rng.choice([0, 1, 3, 8])))
        kv_heads = answer.rng.randint(1, 3)
        compare(
            answer, rows, block_size=answer.rng.choice([1, 2, 4, 16]), heads=kv_heads * answer.rng.randint(1, 3),
            kv_heads=kv_heads, head_dim=answer.rng.choice([2, 5]), num_decodes=decodes,
        )  # fmt: skip


def test_boundary__behind_a_prefix(answer: Answer) -> None:
    """Behind cached tokens the queries are the last of the context, not the first."""
    compare(answer, [(2, 5)])
    compare(answer, [(2, 18), (3, 3)])
    compare(answer, [(5, 90), (3, 40)])


def test_boundary__rubbish_behind_the_last_token(answer: Answer) -> None:
    """Slots behind a row's last token may hold anything, even NaN, and must not reach the result."""
    step = Step(answer, [(5, 5), (1, 6)])
    answer.require(not bool(step.got().isnan().any()), "NaN in the result", "finite numbers")


def test_boundary__exact_blocks(answer: Answer) -> None:
    """Contexts of exactly one and two blocks, and one more and one less."""
    for context in (3, 4, 5, 7, 8, 9):
        compare(answer, [(1, context), (2, context)])


def test_boundary__padding(answer: Answer) -> None:
    """A row with context_len 0 is padding: it reads nothing and gives finite values, and the others are right."""
    step = Step(answer, [(1, 5), (1, 1)], num_decodes=2)
    expected = step.slowly()
    step.metadata.context_lens[1] = 0
    step.metadata.block_tables[1] = 10**6
    answer.note("then context_lens[1] = 0")
    got = step.got()
    answer.equal(got[0], expected[0], tolerance=CLOSE)
    answer.require(bool(got[1].isfinite().all()), got[1], "finite numbers in the padded row")


def never_written(make: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Memory that nobody has written to may hold anything; from this it comes full of NaN, so that it shows."""

    def filled(*args: Any, **options: Any) -> torch.Tensor:
        made = make(*args, **options)
        return made.fill_(math.nan) if made.is_floating_point() else made

    return filled


def test_boundary__padding_in_between(answer: Answer) -> None:
    """What stands behind a padded row is computed as if that were not there, and the row itself is filled."""
    step = Step(answer, [(1, 5), (1, 1), (1, 6), (3, 4)], num_decodes=3)
    expected = step.slowly()
    step.metadata.context_lens[1] = 0
    step.metadata.block_tables[1] = 10**6
    answer.note("then context_lens[1] = 0")
    with ExitStack() as stack:
        for owner, name in ((torch, "empty"), (torch, "empty_like"), (torch.Tensor, "new_empty")):
            stack.enter_context(patch.object(owner, name, never_written(getattr(owner, name))))
        got = step.got()
    answer.require(bool(got[1].isfinite().all()), got[1], "finite numbers in the padded row")
    answer.equal(torch.cat([got[:1], got[2:]]), torch.cat([expected[:1], expected[2:]]), tolerance=CLOSE)


def test_boundary__large_scores(answer: Answer) -> None:
    """Scores of several hundred overflow an exponential: the softmax must not become NaN."""
    step = Step(answer, [(4, 4)])
    step.q *= 500
    answer.note("q is multiplied by 500")
    answer.equal(step.got(), step.slowly(), tolerance=1e-2)


def test_boundary__equal_queries_in_two_rows(answer: Answer) -> None:
    """A row sees its own tokens only, whatever its neighbour asks."""
    step = Step(answer, [(2, 6), (2, 6)])
    step.q[2:] = step.q[:2]
    answer.note("both rows ask the same")
    answer.equal(step.got(), step.slowly(), tolerance=CLOSE)
