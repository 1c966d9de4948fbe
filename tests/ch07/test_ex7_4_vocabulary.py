"""Grader of exercise 7.4: embedding and head cut over the vocabulary."""

from typing import Any

import torch

from nanovllm.layers.embed_head import ParallelLMHead, VocabParallelEmbedding
from nanovllm.layers.parallel import TPGroup
from nanovllm.workbook.grading import Answer
from nanovllm.workbook.oracles.ranks import on_ranks, random

CLOSE = 1e-5  # sums of a few float32 products in another order
PADDING = 1e6  # what stands in rows that belong to no token: it must not be seen


def fill(weight: torch.Tensor, table: torch.Tensor, tp: TPGroup) -> None:
    """This rank's rows of the table; rows past its end get the padding value."""
    weight.data.fill_(PADDING)
    mine = table[tp.rank * len(weight) : (tp.rank + 1) * len(weight)]
    weight.data[: len(mine)].copy_(mine)


def embed(answer: Answer, table: torch.Tensor, ids: list[int], size: int) -> tuple[list[Any], list[int]]:
    answer.story.clear()
    answer.note(f"VocabParallelEmbedding: {len(table)} tokens on {size} ranks, ids {ids}")

    def work(tp: TPGroup) -> Any:
        layer = answer.parts.resolve(VocabParallelEmbedding)(*table.shape, tp=tp).to(table.dtype)
        fill(layer.weight, table, tp)
        given = torch.tensor(ids, dtype=torch.int64)
        before, kept = given.clone(), layer.weight.data.clone()
        result = layer(given)
        answer.equal((given, layer.weight.data), (before, kept), "It may not change ids or weight.")
        return result

    return on_ranks(answer, size, work)


def head(answer: Answer, table: torch.Tensor, x: torch.Tensor, size: int) -> tuple[list[Any], list[int]]:
    answer.story.clear()
    answer.note(f"ParallelLMHead: {len(table)} tokens on {size} ranks, x {list(x.shape)}")

    def work(tp: TPGroup) -> Any:
        layer = answer.parts.resolve(ParallelLMHead)(*table.shape, tp=tp)
        fill(layer.weight, table, tp)
        given, kept = x.clone(), layer.weight.data.clone()
        result = layer(given)
        answer.equal((given, layer.weight.data), (x, kept), "It may not change x or weight.")
        return result

    return on_ranks(answer, size, work)


def test_contract__what_comes_back(answer: Answer) -> None:
    """The embedding returns [T, D] on every rank; the head [S, V] on rank 0 and None on the others."""
    results, _ = embed(answer, random(answer, 6, 3), [5, 0], 2)
    answer.equal([list(result.shape) for result in results], [[2, 3], [2, 3]])
    results, _ = head(answer, random(answer, 6, 3), random(answer, 4, 3), 2)
    answer.equal(list(results[0].shape), [4, 6])
    answer.equal(results[1], None)


def test_example__ten_tokens_on_four_ranks(answer: Answer) -> None:
    """Id 4 is row 1 of rank 1; of ten tokens on four ranks, ten logits come back."""
    table = torch.arange(10.0)[:, None] * torch.ones(1, 2)
    answer.equal(embed(answer, table, [4, 7], 4)[0][0], torch.tensor([[4.0, 4.0], [7.0, 7.0]]))
    answer.equal(head(answer, table, torch.tensor([[1.0, 0.0]]), 4)[0][0], torch.arange(10.0)[None])


def test_oracle__embedding(answer: Answer) -> None:
    """Every rank gets the rows of the whole table."""
    for size in (1, 2, 3, 4):
        for vocab in (4 * size, 4 * size - 1, 7):
            table = random(answer, vocab, 3)
            ids = [answer.rng.randrange(vocab) for _ in range(9)]
            expected = torch.stack([table[token] for token in ids])
            answer.equal(embed(answer, table, ids, size)[0], [expected] * size, tolerance=CLOSE)


def test_oracle__head(answer: Answer) -> None:
    """Rank 0 gets the logits of the whole vocabulary, in the order of the ids."""
    for size in (1, 2, 3, 4):
        for vocab in (4 * size, 4 * size - 1, 7):
            table, x = random(answer, vocab, 3), random(answer, 5, 3)
            results, _ = head(answer, table, x, size)
            answer.equal(results[0], (x.double() @ table.double().T).float(), tolerance=CLOSE)
            answer.equal(results[1:], [None] * (size - 1))


def test_boundary__ids_of_other_ranks(answer: Answer) -> None:
    """An id that belongs to another rank contributes nothing here, below and above this rank's own."""
    table = torch.arange(1.0, 9.0)[:, None]
    for token in range(8):
        answer.equal(embed(answer, table, [token], 4)[0], [table[token : token + 1]] * 4, tolerance=CLOSE)


def test_boundary__edges_of_the_shares(answer: Answer) -> None:
    """First and last id of each rank."""
    table = torch.arange(1.0, 7.0)[:, None]
    answer.equal(embed(answer, table, [0, 2, 3, 5], 2)[0][0], torch.tensor([[1.0], [3.0], [4.0], [6.0]]))


def test_boundary__padding_is_cut_off(answer: Answer) -> None:
    """Logits of padded rows are no tokens, and must not be there, however large they are."""
    results, _ = head(answer, torch.ones(5, 2), torch.ones(1, 2), 4)
    answer.equal(list(results[0].shape), [1, 5])
    answer.require(bool((results[0] < 10).all()), results[0], "logits of the five tokens")


def test_boundary__huge_rows_elsewhere(answer: Answer) -> None:
    """What a rank does not own is not multiplied by 0 but left out: infinity times 0 is NaN."""
    table = torch.tensor([[float("inf")], [1.0], [2.0], [3.0]])
    answer.equal(embed(answer, table, [1, 3], 2)[0][0], torch.tensor([[1.0], [3.0]]))


def test_boundary__other_number_formats(answer: Answer) -> None:
    """Embeddings have the number format of the table."""
    for dtype in (torch.bfloat16, torch.float64):
        table = torch.arange(12.0).reshape(6, 2).to(dtype)
        for size in (1, 3):
            answer.equal(embed(answer, table, [4, 1], size)[0], [table[[4, 1]]] * size)


def test_boundary__tensors_of_their_own(answer: Answer) -> None:
    """What comes back is no part of the layer: later calls leave it alone, and writing into it changes no weight."""
    table, ids = random(answer, 6, 2), (torch.tensor([0, 1, 2]), torch.tensor([5, 3, 4]))
    for size in (1, 3):
        answer.story.clear()
        answer.note(f"VocabParallelEmbedding: 6 tokens on {size} ranks, ids [0, 1, 2], then [5, 3, 4]")

        def work(tp: TPGroup) -> Any:
            layer = answer.parts.resolve(VocabParallelEmbedding)(*table.shape, tp=tp)
            fill(layer.weight, table, tp)
            before, results = layer.weight.data.clone(), [layer(given) for given in ids]
            kept = [result.clone() for result in results]
            results[0].fill_(99.0)
            return kept, layer.weight.data.clone(), before

        for kept, weight, before in on_ranks(answer, size, work)[0]:
            answer.equal(kept, [table[given] for given in ids], tolerance=CLOSE)
            answer.equal(weight, before)


def test_boundary__logits_of_their_own(answer: Answer) -> None:
    """Logits that came back stay as they are when the head is called again."""
    table, x = random(answer, 5, 3), random(answer, 2, 3)
    for size in (1, 2):
        answer.story.clear()
        answer.note(f"ParallelLMHead: 5 tokens on {size} ranks, called with x and with -x")

        def work(tp: TPGroup) -> Any:
            layer = answer.parts.resolve(ParallelLMHead)(*table.shape, tp=tp)
            fill(layer.weight, table, tp)
            return [layer(x), layer(-x)]

        expected = (x.double() @ table.double().T).float()
        answer.equal(on_ranks(answer, size, work)[0][0], [expected, -expected], tolerance=CLOSE)


def test_boundary__one_collective_each(answer: Answer) -> None:
    """The embedding needs one sum, the head one gathering."""
    answer.equal(embed(answer, random(answer, 6, 2), [1, 5], 3)[1], [1, 1, 1])
    answer.equal(head(answer, random(answer, 6, 2), random(answer, 2, 2), 3)[1], [1, 1, 1])


def test_boundary__alone(answer: Answer) -> None:
    """A single rank looks up and multiplies as if nothing was cut."""
    table = random(answer, 5, 3)
    answer.equal(embed(answer, table, [4, 0], 1)[0][0], table[[4, 0]])
    answer.equal(list(head(answer, table, random(answer, 2, 3), 1)[0][0].shape), [2, 5])
