"""Token embedding and language-model head, cut over the vocabulary.

With V tokens and n ranks every rank holds ceil(V / n) rows; the last ones of all may be padding (zeros),
which the gathered logits leave out. V = 10 on 4 ranks: 3 rows each, ids 0-2, 3-5, 6-8, and 9 with two rows of padding.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nanovllm.layers.linear import ReplicatedLinear, new_parameter
from nanovllm.layers.parallel import ALONE, TPGroup


def load_vocab_shard(param: nn.Parameter, loaded: Tensor, tp: TPGroup) -> None:
    """Copy this rank's rows of loaded [V, ...]; rows past V become zero."""
    size = param.shape[0]
    rows = loaded[tp.rank * size : (tp.rank + 1) * size]
    param.data[: len(rows)].copy_(rows)
    param.data[len(rows) :].zero_()


class VocabParallelEmbedding(nn.Module):
    """Token ids [T] -> embeddings [T, D]; each rank looks up its own ids and the sum over ranks is the result."""

    def __init__(self, vocab_size: int, dim: int, tp: TPGroup = ALONE) -> None:
        super().__init__()
        self.tp = tp
        self.rows = -(-vocab_size // tp.size)
        self.weight = new_parameter((self.rows, dim), self.weight_loader, {None: (vocab_size, dim)})

    def weight_loader(self, param: nn.Parameter, loaded: Tensor, shard_id: Any = None) -> None:
        load_vocab_shard(param, loaded, self.tp)

    def forward(self, input_ids: Tensor) -> Tensor:
        if self.tp.size == 1:
            return F.embedding(input_ids, self.weight)
        local = input_ids - self.tp.rank * self.rows
        mine = (local >= 0) & (local < self.rows)
        embedded = F.embedding(torch.where(mine, local, 0), self.weight)
        return self.tp.all_reduce(embedded.masked_fill(~mine.unsqueeze(-1), 0))


class ParallelLMHead(ReplicatedLinear):
    """Hidden states [S, D] -> logits [S, V] on rank 0, None on the others."""

    def __init__(self, vocab_size: int, dim: int, tp: TPGroup = ALONE) -> None:
        nn.Module.__init__(self)
        self.vocab_size = vocab_size
        self._build(dim, {None: vocab_size}, dim, -(-vocab_size // tp.size), False, tp)

    def weight_loader(self, param: nn.Parameter, loaded: Tensor, shard_id: Any = None) -> None:
        load_vocab_shard(param, loaded, self.tp)

    def forward(self, x: Tensor) -> Tensor | None:  # type: ignore[override]
        logits = self.tp.gather(self.multiply(x))
        return None if logits is None else logits[:, : self.vocab_size]
