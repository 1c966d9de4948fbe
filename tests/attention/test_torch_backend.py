"""The PyTorch backend against a dense oracle that computes one query and one head at a time."""

import math

import pytest
import torch
from torch import Tensor

from nanovllm.attention import AttentionMetadata, TorchAttention, describe_backends, select_backend
from nanovllm.errors import ConfigError


def make_case(
    lens: list[tuple[int, int]], heads: int, kv_heads: int, head_dim: int, block_size: int, seed: int = 0
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, AttentionMetadata]:
    """(q, k, v, k_cache, v_cache, metadata) for rows of (queries, context); what no row may read is NaN.

    The keys of earlier steps are in the cache; those of this step are only in k and v. Decodes come first.
    """
    generator = torch.Generator().manual_seed(seed)
    blocks_of = [-(-context // block_size) for _, context in lens]
    order = (torch.randperm(sum(blocks_of) + 3, generator=generator)).tolist()
    k_cache = torch.full((len(order), block_size, kv_heads, head_dim), math.nan)
    v_cache = k_cache.clone()
    tables = torch.full((len(lens), max(blocks_of)), -7, dtype=torch.int32)
    slot_mapping, starts = [], [0]
    for b, (queries, context) in enumerate(lens):
        blocks = [order.pop() for _ in range(blocks_of[b])]
        tables[b, : len(blocks)] = torch.tensor(blocks)
        slots = [blocks[p // block_size] * block_size + p % block_size for p in range(context)]
        for slot in slots[: context - queries]:
            for cache in (k_cache, v_cache):
                cache.view(-1, kv_heads, head_dim)[slot] = torch.randn(kv_heads, head_dim, generator=generator)
        slot_mapping += slots[context - queries :]
        starts.append(starts[-1] + queries)
    T = starts[-1]
    metadata = AttentionMetadata(
        slot_mapping=torch.tensor(slot_mapping),
        block_tables=tables,
        context_lens=torch.tensor([context for _, context in lens], dtype=torch.int32),
        cu_seqlens_q=torch.tensor(starts, dtype=torch.int32),
        max_query_len=max(queries for queries, _ in lens),
        max_context_len=max(context for _, context in lens),
        num_decodes=next((b for b, (queries, _) in enumerate(lens) if queries > 1), len(lens)),
    )
    q = torch.randn(T, heads, head_dim, generator=generator)
    k, v = (torch.randn(T, kv_heads, head_dim, generator=generator) for _ in range(2))
    return q, k, v, k_cache, v_cache, metadata


def dense(q: Tensor, k_cache: Tensor, v_cache: Tensor, metadata: AttentionMetadata, scale: float) -> Tensor:
    """What the interface promises, read word for word: a loop over rows, queries and heads, in float64."""
    block_size, kv_heads = k_cache.shape[1:3]
    group = q.shape[1] // kv_heads
    out = torch.zeros(q.shape, dtype=torch.float64)
    starts = metadata.cu_seqlens_q.tolist()
    for b, context in enumerate(metadata.context_lens.tolist()):
        table, queries = metadata.block_tables[b].tolist(), starts[b + 1] - starts[b]
        for i in range(queries):
            seen = context - queries + i + 1
            where = [(table[p // block_size], p % block_size) for p in range(seen)]
            for head in range(q.shape[1]):
                keys = torch.stack([k_cache[block, offset, head // group] for block, offset in where]).double()
                values = torch.stack([v_cache[block, offset, head // group] for block, offset in where]).double()
                weights = torch.softmax(keys @ q[starts[b] + i, head].double() * scale, 0)
                out[starts[b] + i, head] = weights @ values
    return out


CASES = {
    "decode": [(1, 1), (1, 5), (1, 8), (1, 9), (1, 7), (1, 33)],
    "one decode": [(1, 17)],
    "prefill": [(1, 1), (4, 4), (3, 3), (5, 5), (8, 8), (13, 13)],
    "behind a prefix": [(2, 6), (3, 8), (1, 9), (4, 5), (9, 13)],
    "mixed": [(1, 4), (1, 12), (3, 3), (5, 9), (1, 1), (2, 30)],
}


@pytest.mark.parametrize("block_size", [1, 4, 16])
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(9, 3, 8), (4, 4, 6), (6, 1, 10)])
@pytest.mark.parametrize("lens", CASES.values(), ids=CASES.keys())
def test_equals_the_dense_oracle(
    lens: list[tuple[int, int]], heads: int, kv_heads: int, head_dim: int, block_size: int
) -> None:
    q, k, v, k_cache, v_cache, metadata = make_case(lens, heads, kv_heads, head_dim, block_size)
    backend = TorchAttention(heads, kv_heads, head_dim, 0.3, block_size)
    got = backend.forward(q, k, v, k_cache, v_cache, metadata)
    assert (got - dense(q, k_cache, v_cache, metadata, 0.3)).abs().max() < 1e-5


def test_queries_may_be_a_view_of_a_fused_product() -> None:
    q, k, v, k_cache, v_cache, metadata = make_case(CASES["mixed"], 4, 2, 8, 4)
    qkv = torch.cat((q, k, v), 1)
    views = qkv.split((4, 2, 2), dim=1)
    got = TorchAttention(4, 2, 8, 0.3, 4).forward(*views, k_cache, v_cache, metadata)
    assert (got - dense(q, k_cache, v_cache, metadata, 0.3)).abs().max() < 1e-5


def test_the_same_backend_serves_several_layers_and_steps() -> None:
    backend = TorchAttention(4, 2, 8, 0.3, 4)
    for seed in range(3):
        for name in ("mixed", "decode", "prefill"):
            q, k, v, k_cache, v_cache, metadata = make_case(CASES[name], 4, 2, 8, 4, seed)
            for layer in range(2):
                got = backend.forward(q, k * (layer + 1), v * (layer + 1), k_cache, v_cache, metadata)
                assert (got - dense(q, k_cache, v_cache, metadata, 0.3)).abs().max() < 1e-5


def test_a_decode_step_after_a_decode_step_reads_what_was_written_in_between() -> None:
    """The second step looks like the first one continued, but another sequence has taken over the same blocks."""
    backend = TorchAttention(2, 1, 8, 0.3, 4)
    q, k, v, k_cache, v_cache, metadata = make_case([(1, 6), (1, 3)], 2, 1, 8, 4)
    backend.forward(q, k, v, k_cache, v_cache, metadata)
    tables = metadata.block_tables.clone()
    slots = torch.tensor([int(tables[0, 0]) * 4 + p for p in range(4)] + [int(tables[0, 1]) * 4 + p for p in range(2)])
    prompt = AttentionMetadata(
        slots, tables[:1], torch.tensor([6], dtype=torch.int32), torch.tensor([0, 6], dtype=torch.int32), 6, 6, 0
    )
    fresh = torch.randn(6, 1, 8)
    backend.forward(torch.randn(6, 2, 8), fresh, fresh, k_cache, v_cache, prompt)
    step = AttentionMetadata(
        torch.tensor([int(tables[0, 1]) * 4 + 2, int(tables[1, 0]) * 4 + 3]),
        tables,
        torch.tensor([7, 4], dtype=torch.int32),
        metadata.cu_seqlens_q,
        1,
        7,
        2,
    )
    got = backend.forward(q, k, v, k_cache, v_cache, step)
    assert (got - dense(q, k_cache, v_cache, step, 0.3)).abs().max() < 1e-5


def test_padding_writes_nothing_and_reads_nothing() -> None:
    q, k, v, k_cache, v_cache, metadata = make_case([(1, 5), (1, 2)], 4, 2, 8, 4)
    before = k_cache.clone()
    padded = AttentionMetadata(
        slot_mapping=torch.cat((metadata.slot_mapping, torch.tensor([-1]))),
        block_tables=torch.cat((metadata.block_tables, torch.full_like(metadata.block_tables[:1], -1))),
        context_lens=torch.tensor([5, 2, 0], dtype=torch.int32),
        cu_seqlens_q=torch.tensor([0, 1, 2, 3], dtype=torch.int32),
        max_query_len=1,
        max_context_len=5,
        num_decodes=3,
    )
    extra = [torch.cat((x, torch.randn(1, *x.shape[1:]))) for x in (q, k, v)]
    k_cache[0], v_cache[0] = 1.0, 1.0  # a padded row reads something finite: block 0
    before[0] = 1.0
    got = TorchAttention(4, 2, 8, 0.3, 4).forward(*extra, k_cache, v_cache, padded)
    want = dense(q, k_cache, v_cache, metadata, 0.3)
    assert (got[:2] - want).abs().max() < 1e-5 and got[2].isfinite().all()
    changed = (k_cache.view(-1, 2, 8).nan_to_num() != before.view(-1, 2, 8).nan_to_num()).any(-1).any(-1).nonzero()
    assert sorted(changed.squeeze(1).tolist()) == sorted(metadata.slot_mapping.tolist())


def test_bfloat16_rounds_only_at_the_end() -> None:
    q, k, v, k_cache, v_cache, metadata = (
        x.bfloat16() if isinstance(x, Tensor) else x for x in make_case([(1, 200), (7, 90)], 4, 2, 32, 16)
    )
    got = TorchAttention(4, 2, 32, 0.2, 16).forward(q, k, v, k_cache, v_cache, metadata)
    want = dense(q, k_cache, v_cache, metadata, 0.2)
    assert (got.double() - want).abs().max() < 2.0**-8 * max(1.0, float(want.abs().max()))


def test_selection_by_name_and_its_reasons() -> None:
    backend, reason = select_backend("torch", "cpu", torch.float32, 64, 16)
    assert backend is TorchAttention and reason
    backend, reason = select_backend("auto", "cpu", torch.float32, 64, 256)
    assert backend is TorchAttention and "flash" in reason and "triton" in reason
    with pytest.raises(ConfigError, match="flash.*cannot be used here"):
        select_backend("flash", "cpu", torch.float32, 64, 256)
    rows = describe_backends("cpu")
    assert [name for name, _, _ in rows] == ["flash", "triton", "torch"]
    assert rows[2][1] and not rows[0][1] and rows[0][2]
