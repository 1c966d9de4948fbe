"""Steps of attention over pages with known answers: a dense float64 oracle that knows no tiles, pages or splits."""

from dataclasses import dataclass

import torch
from torch import Tensor

from nanovllm.attention.base import AttentionBackend, AttentionMetadata

Row = tuple[int, int]  # queries, and the context with them


@dataclass
class Step:
    """Random queries, keys, values and block tables for `rows`; keys of earlier steps are in the cache already."""

    rows: list[Row]
    num_decodes: int
    q: Tensor
    k: Tensor
    v: Tensor
    k_cache: Tensor
    v_cache: Tensor
    metadata: AttentionMetadata
    expected: Tensor  # [T, N, H] float64; NaN in padded rows

    def error(self, out: Tensor) -> float:
        """|out - expected| / |expected|, over the rows that are not padding. Infinite if anything is not finite."""
        assert out.shape == self.expected.shape
        real = ~self.expected.isnan().any(-1).any(-1)
        if not out.isfinite().all():
            return float("inf")
        difference = out.double()[real] - self.expected[real]
        return float(difference.norm() / self.expected[real].norm())


def make_step(
    heads: int,
    kv_heads: int,
    head_dim: int,
    block_size: int,
    rows: list[Row],
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    seed: int = 0,
) -> Step:
    """`rows` with one query first count as decodes. A context of 0 is a padded row (slot -1)."""
    g = torch.Generator(device).manual_seed(seed)
    blocks = [-(-context // block_size) for _, context in rows]
    order = torch.randperm(sum(blocks) + 2, generator=torch.Generator().manual_seed(seed)).tolist()
    # Unused blocks hold huge values: reading one shows.
    caches = [
        torch.full((len(order), block_size, kv_heads, head_dim), 1e4, dtype=dtype, device=device) for _ in range(2)
    ]
    tables = torch.zeros(len(rows), max(*blocks, 1), dtype=torch.int32)
    slots: list[Tensor] = []
    parts: list[tuple[Tensor, Tensor, Tensor]] = []
    for row, (queries, context) in enumerate(rows):
        own = torch.tensor([order.pop() for _ in range(blocks[row])], dtype=torch.int32)
        tables[row, : len(own)] = own
        position = torch.arange(context - queries, context)
        slot = own.long()[position // block_size] * block_size + position % block_size if context else position * 0 - 1
        slots.append(slot)
        shape = (max(context, queries), kv_heads, head_dim)
        keys, values = (torch.randn(shape, generator=g, device=device).to(dtype) for _ in range(2))
        queries_of_row = torch.randn(queries, heads, head_dim, generator=g, device=device).to(dtype)
        before = torch.arange(max(context - queries, 0))
        old = own.long()[before // block_size] * block_size + before % block_size
        for cache, new in zip(caches, (keys, values), strict=True):
            cache.view(-1, kv_heads, head_dim)[old.to(device)] = new[: len(before)]
        parts.append((queries_of_row, keys, values))
    q = torch.cat([part[0] for part in parts])
    k, v = (torch.cat([part[i][len(part[i]) - n :] for part, (n, _) in zip(parts, rows, strict=True)]) for i in (1, 2))
    qkv = torch.cat([q, k, v], 1)  # as in a model, where q, k and v are views of one product
    q, k, v = qkv.split([heads, kv_heads, kv_heads], 1)
    lens = torch.tensor([n for n, _ in rows])
    decodes = next((i for i, (n, _) in enumerate(rows) if n != 1), len(rows))
    metadata = AttentionMetadata(
        torch.cat(slots).to(device),
        tables.to(device),
        torch.tensor([context for _, context in rows], dtype=torch.int32, device=device),
        torch.cat([lens[:0], torch.zeros(1, dtype=torch.long), lens.cumsum(0)]).int().to(device),
        max_query_len=int(lens.max()),
        max_context_len=max(context for _, context in rows),
        num_decodes=decodes,
    )
    expected = torch.cat([dense(*part, context) for part, (_, context) in zip(parts, rows, strict=True)])
    return Step(rows, decodes, q, k, v, caches[0], caches[1], metadata, expected)


def dense(q: Tensor, k: Tensor, v: Tensor, context: int) -> Tensor:
    """Softmax attention of q [n, N, H] over all keys [context, K, H], in float64."""
    if not context:
        return torch.full(q.shape, float("nan"), dtype=torch.float64, device=q.device)
    n, heads, dim = q.shape
    k, v = (x.double().repeat_interleave(heads // x.shape[1], 1) for x in (k, v))
    scores = torch.einsum("nhd,chd->hnc", q.double(), k) * dim**-0.5
    hidden = torch.arange(context, device=q.device) > torch.arange(context - n, context, device=q.device)[:, None]
    return torch.einsum("hnc,chd->nhd", scores.masked_fill(hidden, float("-inf")).softmax(-1), v)


def run(backend: type[AttentionBackend], step: Step) -> Tensor:
    """One call of the backend's `forward` on the step, on its own copy of the cache."""
    block_size, kv_heads, head_dim = step.k_cache.shape[1:]
    attention = backend(step.q.shape[1], kv_heads, head_dim, head_dim**-0.5, block_size)
    k_cache, v_cache = step.k_cache.clone(), step.v_cache.clone()
    return attention.forward(step.q, step.k, step.v, k_cache, v_cache, step.metadata)


DECODE = [(1, 1), (1, 15), (1, 16), (1, 17), (1, 64), (1, 0), (1, 65), (1, 130)]
PREFILL = [(1 + 1, 2), (16, 16), (17, 17), (33, 33), (129, 129)]
BEHIND_PREFIX = [(2, 3), (2, 18), (16, 32), (17, 80), (3, 130)]
MIXED = [(1, 7), (1, 65), (5, 5), (2, 34), (40, 70)]
MODES = {"decode": DECODE, "prefill": PREFILL, "behind a prefix": BEHIND_PREFIX, "mixed": MIXED}
