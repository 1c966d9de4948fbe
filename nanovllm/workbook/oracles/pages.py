"""Pages of keys and values for kernels, attention over them number by number, and what a launch looks like."""

import inspect
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

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

    def make_scores_low(self) -> None:
        """Queries and keys for which every score is far below 0: some -30,000 at a scale of 0.37."""
        self.q.abs_().add_(1.0).mul_(20_000.0)
        for keys in (self.k_cache, *self.keys):
            keys.abs_().add_(1.0).neg_()

    def halve(self) -> None:
        """Everything in float16."""
        self.q, self.k_cache, self.v_cache = self.q.half(), self.k_cache.half(), self.v_cache.half()
        self.keys, self.values = [k.half() for k in self.keys], [v.half() for v in self.values]

    def widen_tables(self) -> None:
        """Tables that are a view of wider ones, so that a row begins further behind the one before than it is wide."""
        self.tables = torch.cat([self.tables, torch.zeros_like(self.tables)], 1)[:, : self.tables.shape[1]]

    def attend(self, row: int, head: int, scale: float, start: int, stop: int) -> tuple[list[float], float]:
        """Attention of one query over the positions start to stop - 1, in Python numbers, and log(sum(exp(score)))."""
        keys = self.keys[row][start:stop, head // self.group].tolist()
        values = self.values[row][start:stop, head // self.group].tolist()
        query = self.q[row, head].tolist()
        scores = [scale * sum(a * b for a, b in zip(query, key, strict=True)) for key in keys]
        if not scores:
            return [0.0] * len(query), -math.inf
        weights = [math.exp(score - max(scores)) for score in scores]
        summed = [sum(w * value[i] for w, value in zip(weights, values, strict=True)) for i in range(len(query))]
        return [number / sum(weights) for number in summed], max(scores) + math.log(sum(weights))

    def expected(self, scale: float) -> Tensor:
        """[B, N, H]: every row, head and key by itself; zeros for a row without context."""
        heads = range(self.q.shape[1])
        rows = [
            [self.attend(row, head, scale, 0, context)[0] for head in heads]
            for row, context in enumerate(self.contexts)
        ]
        return torch.tensor(rows).to(self.q.dtype)


class Launches:
    """Stands for a kernel, starts it, and keeps what it was started with."""

    def __init__(self, kernel: Any) -> None:
        self.kernel = kernel
        self.calls: list[dict[str, Any]] = []

    def __getitem__(self, grid: Any) -> Callable[..., Any]:
        def launch(*args: Any, **options: Any) -> Any:
            names = list(inspect.signature(self.kernel.fn).parameters)
            self.calls.append({**dict(zip(names, args, strict=False)), **options})
            return self.kernel[grid](*args, **options)

        return launch

    def check_tiles(self, answer: Answer, *names: str) -> None:
        """Reject constants that no GPU takes: the interpreter has no mind of its own there."""
        for call in self.calls:
            for name in names:
                size = call[name]
                answer.require(size > 0 and size & (size - 1) == 0, f"{name}={size}", f"a power of two for {name}",
                               "A tile's size is a power of two; a GPU takes no other.")  # fmt: skip


@contextmanager
def launches(method: Any, name: str) -> Iterator[Launches]:
    """The launches of kernel `name` by a learner's method, while the block runs."""
    spy = Launches(method.__globals__[name])
    method.__globals__[name] = spy
    try:
        yield spy
    finally:
        method.__globals__[name] = spy.kernel
