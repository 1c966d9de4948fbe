"""Pages of keys and values for kernels, and attention over them number by number."""

import math

import torch
from torch import Tensor

from nanovllm.workbook.grading import Answer

SPARE = 80  # entries of a block table behind a row's own


class Pages:
    """Rows of given contexts over random blocks of a pool whose other slots hold rubbish.

    Entries of a table behind a row's last block name a block of NaN that nobody owns: a kernel that reads there gets a
    wrong result, not a crash.
    """

    def __init__(
        self, answer: Answer, contexts: list[int], heads: int = 2, kv_heads: int = 1, head_dim: int = 4,
        block_size: int = 4,
    ) -> None:  # fmt: skip
        answer.story.clear()
        answer.note(
            f"contexts {contexts}, blocks of {block_size}, {heads} heads on {kv_heads} kv heads of {head_dim} numbers"
        )
        generator = torch.Generator().manual_seed(answer.rng.randrange(2**31))
        self.contexts, self.group = contexts, heads // kv_heads
        widths = [-(-context // block_size) for context in contexts]
        num_blocks = sum(widths) + 2
        free = answer.rng.sample(range(num_blocks), num_blocks)
        nobody = free.pop()
        shape = (num_blocks, block_size, kv_heads, head_dim)
        self.k_cache, self.v_cache = torch.full(shape, math.nan), torch.full(shape, math.nan)
        self.q = torch.randn(len(contexts), heads, head_dim, generator=generator)
        self.tables = torch.full((len(contexts), max(widths) + SPARE), nobody, dtype=torch.int32)
        self.context_lens = torch.tensor(contexts, dtype=torch.int32)
        self.keys, self.values = [], []
        for row, context in enumerate(contexts):
            k = torch.randn(context, kv_heads, head_dim, generator=generator)
            v = torch.randn(context, kv_heads, head_dim, generator=generator)
            table = [free.pop() for _ in range(widths[row])]
            self.tables[row, : len(table)] = torch.tensor(table, dtype=torch.int32)
            for position in range(context):
                at = table[position // block_size], position % block_size
                self.k_cache[at], self.v_cache[at] = k[position], v[position]
            self.keys.append(k)
            self.values.append(v)

    def expected(self, scale: float) -> Tensor:
        """[B, N, H]: every row, head and key by itself, in Python numbers; zeros for a row without context."""
        out = torch.zeros_like(self.q)
        for row, context in enumerate(self.contexts):
            for head in range(self.q.shape[1]):
                keys = self.keys[row][:, head // self.group].tolist()
                values = self.values[row][:, head // self.group].tolist()
                query = self.q[row, head].tolist()
                scores = [scale * sum(a * b for a, b in zip(query, key, strict=True)) for key in keys]
                if context:
                    weights = [math.exp(score - max(scores)) for score in scores]
                    for i in range(len(query)):
                        summed = sum(w * value[i] for w, value in zip(weights, values, strict=True))
                        out[row, head, i] = summed / sum(weights)
        return out
