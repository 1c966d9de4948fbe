"""Embedding and head cut over a vocabulary that the ranks do not divide."""

import pytest
import torch

from nanovllm.layers.embed_head import ParallelLMHead, VocabParallelEmbedding
from nanovllm.layers.parallel import TPGroup


class Apart(TPGroup):
    """A rank whose collectives leave its own part as it is."""

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        return x

    def gather(self, x: torch.Tensor, dim: int = -1) -> torch.Tensor:
        return x


@pytest.mark.parametrize(("vocab", "size"), [(10, 1), (10, 4), (11, 3), (3, 4), (12, 4)])
def test_embeddings_sum_to_the_whole(vocab: int, size: int) -> None:
    table, ids = torch.randn(vocab, 6), torch.arange(vocab).flip(0)
    total = torch.zeros(vocab, 6)
    for rank in range(size):
        layer = VocabParallelEmbedding(vocab, 6, tp=Apart(rank, size))
        layer.weight.data.fill_(float("nan"))
        layer.weight_loader(layer.weight, table)
        total += layer(ids)
    assert torch.equal(total, table[ids])


@pytest.mark.parametrize(("vocab", "size"), [(10, 1), (10, 4), (11, 3), (3, 4), (12, 4)])
def test_gathered_logits_leave_the_padding_out(vocab: int, size: int) -> None:
    table, hidden = torch.randn(vocab, 6), torch.randn(5, 6)
    shards = []
    for rank in range(size):
        head = ParallelLMHead(vocab, 6, tp=Apart(rank, size))
        head.weight.data.fill_(float("nan"))
        head.weight_loader(head.weight, table)
        shards.append(head.multiply(hidden))
    assert len({tuple(shard.shape) for shard in shards}) == 1, "a gather needs equal shapes"

    class Rank0(TPGroup):
        def gather(self, x: torch.Tensor, dim: int = -1) -> torch.Tensor:
            return torch.cat([x, *shards[1:]], dim)

    head = ParallelLMHead(vocab, 6, tp=Rank0(0, size))
    head.weight_loader(head.weight, table)
    logits = head(hidden)
    assert logits.shape == (5, vocab)
    assert torch.allclose(logits, hidden @ table.T, atol=1e-6)
