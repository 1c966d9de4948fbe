"""Grader of exercise 3.2: rotary embedding by the position in the sequence."""

import math
from typing import Any

import torch

from nanovllm.layers.rotary_embedding import RotaryEmbedding
from nanovllm.workbook.grading import Answer, type_of

CLOSE = 1e-4  # angles up to 200 in float32


def make(answer: Answer, head_dim: int, theta: float = 100.0, max_position: int = 64) -> Any:
    answer.story.clear()
    answer.note(f"rotary: head_dim {head_dim}, theta {theta}, table of {max_position} positions")
    return answer.watch(answer.parts.resolve(RotaryEmbedding)(head_dim, max_position, theta), "rotary")


def random(answer: Answer, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(answer.rng.randrange(2**31)))


def by_hand(vector: list[float], position: int, theta: float) -> list[float]:
    """Every pair as a complex number, turned by its angle."""
    half = len(vector) // 2
    turned = [0.0] * len(vector)
    for i in range(half):
        angle = position * theta ** (-2 * i / len(vector))
        z = complex(vector[i], vector[i + half]) * complex(math.cos(angle), math.sin(angle))
        turned[i], turned[i + half] = z.real, z.imag
    return turned


def expected(x: torch.Tensor, positions: list[int], theta: float) -> torch.Tensor:
    rows = [[by_hand(head, at, theta) for head in heads] for heads, at in zip(x.tolist(), positions, strict=True)]
    return torch.tensor(rows)


def test_contract__shapes_and_inputs(answer: Answer) -> None:
    """Both come back in their own shapes, and the arguments are not changed."""
    rotary, q, k = make(answer, 4), random(answer, 3, 6, 4), random(answer, 3, 2, 4)
    positions = torch.tensor([5, 0, 9])
    before, table = (q.clone(), k.clone(), positions.clone()), rotary.raw.cos_sin.clone()
    pair = rotary.forward(positions, q, k)
    answer.require(isinstance(pair, tuple) and len(pair) == 2, type_of(pair), "a tuple (q, k)")
    answer.equal((list(pair[0].shape), list(pair[1].shape)), ([3, 6, 4], [3, 2, 4]), "q comes first, then k.")
    answer.equal((q, k, positions), before, "It may not change its inputs.")
    answer.equal(rotary.raw.cos_sin, table, "It may not change the table.")
    answer.equal(rotary.forward(positions, q, k), pair, "Asked again, it answers the same.")


def test_example__a_quarter_turn(answer: Answer) -> None:
    """The pair (a, b) becomes (a cos - b sin, b cos + a sin)."""
    rotary = make(answer, 2)
    rotary.raw.cos_sin[5] = torch.tensor([0.0, 1.0])
    answer.note("cos_sin[5] = (0, 1)")
    q, k = rotary.forward(torch.tensor([5]), torch.tensor([[[3.0, 4.0]]]), torch.tensor([[[1.0, 0.0]]]))
    answer.equal((q, k), (torch.tensor([[[-4.0, 3.0]]]), torch.tensor([[[0.0, 1.0]]])), tolerance=CLOSE)


def test_oracle__angles_by_hand(answer: Answer) -> None:
    """Number i of the first half and number i of the second half form a pair, turned by position * theta^(-2i/H)."""
    for head_dim, heads, kv_heads in ((2, 1, 1), (4, 3, 1), (6, 4, 2), (16, 9, 3), (8, 8, 1), (4, 14, 2)):
        rotary = make(answer, head_dim)
        positions = [answer.rng.randrange(64) for _ in range(7)]
        q, k = random(answer, 7, heads, head_dim), random(answer, 7, kv_heads, head_dim)
        got = rotary.forward(torch.tensor(positions), q, k)
        answer.equal(got[0], expected(q, positions, 100.0), tolerance=CLOSE)
        answer.equal(got[1], expected(k, positions, 100.0), tolerance=CLOSE)


def test_oracle__one_table_for_many_steps(answer: Answer) -> None:
    """Each step turns by its own positions, however many tokens the step before had, and wherever they stood."""
    rotary, places = make(answer, 4), torch.zeros(3, dtype=torch.int64)
    for positions in ([0, 1, 2], [3, 4, 5], [41, 7, 12], [42, 8, 13]):
        q, k = random(answer, 3, 2, 4), random(answer, 3, 1, 4)
        places.copy_(torch.tensor(positions))  # the engine's input tensors are filled anew for each step, too
        answer.note(f"positions {positions}")
        answer.equal(
            rotary.forward(places, q, k),
            (expected(q, positions, 100.0), expected(k, positions, 100.0)),
            tolerance=CLOSE,
        )
    rotary.raw.cos_sin[42] = torch.tensor([1.0, 1.0, 0.0, 0.0])
    answer.note("cos_sin[42] = (1, 1, 0, 0)")
    answer.equal(rotary.forward(places, q, k)[0][0], q[0], tolerance=CLOSE)


def test_oracle__only_distances_count(answer: Answer) -> None:
    """The product of a turned query and a turned key depends on how far apart they stand, not on where."""
    rotary, q, k = make(answer, 8), random(answer, 1, 1, 8), random(answer, 1, 1, 8)
    products = []
    for start in (0, 3, 40):
        here, there = torch.tensor([start + 7]), torch.tensor([start])
        turned_q, turned_k = rotary.forward(here, q, k)[0], rotary.forward(there, q, k)[1]
        products.append((turned_q * turned_k).sum())
    answer.equal(products[1:], [products[0], products[0]], tolerance=CLOSE)


def test_boundary__a_chunk_goes_on(answer: Answer) -> None:
    """A chunk's tokens turn by their positions in the sequence, as they would in one piece."""
    rotary, q, k = make(answer, 4), random(answer, 8, 2, 4), random(answer, 8, 1, 4)
    whole = rotary.forward(torch.arange(8), q, k)
    chunk = rotary.forward(torch.arange(3, 8), q[3:], k[3:])
    answer.equal(chunk, (whole[0][3:], whole[1][3:]), tolerance=CLOSE)


def test_boundary__packed_sequences_and_decodes(answer: Answer) -> None:
    """Tokens of several sequences lie side by side, so positions jump and repeat."""
    rotary = make(answer, 4)
    for positions in ([0, 1, 2, 0, 1, 63, 17, 17], [5, 30, 2, 8], [3, 3, 3], [62, 63, 0, 1]):
        q, k = random(answer, len(positions), 2, 4), random(answer, len(positions), 2, 4)
        got = rotary.forward(torch.tensor(positions), q, k)
        answer.equal(got, (expected(q, positions, 100.0), expected(k, positions, 100.0)), tolerance=CLOSE)


def test_boundary__parts_of_a_larger_tensor(answer: Answer) -> None:
    """Queries and keys may be parts of one tensor, so the tokens of each do not adjoin in memory."""
    rotary, qkv = make(answer, 4), random(answer, 3, 32)
    q, k, _ = qkv.split([16, 8, 8], dim=-1)
    q, k, positions = q.unflatten(-1, (4, 4)), k.unflatten(-1, (2, 4)), [9, 4, 30]
    answer.note("q and k: the first 16 and the next 8 columns of a tensor [3, 32]")
    got = rotary.forward(torch.tensor(positions), q, k)
    answer.equal(got, (expected(q, positions, 100.0), expected(k, positions, 100.0)), tolerance=CLOSE)


def test_boundary__position_zero_turns_nothing(answer: Answer) -> None:
    """At position 0 every angle is 0."""
    rotary, q, k = make(answer, 6), random(answer, 2, 2, 6), random(answer, 2, 2, 6)
    answer.equal(rotary.forward(torch.tensor([0, 0]), q, k), (q, k), tolerance=CLOSE)


def test_boundary__as_many_tokens_as_heads(answer: Answer) -> None:
    """Angles belong to tokens, not to heads, also where there are equally many of both."""
    rotary, q, k = make(answer, 4), random(answer, 3, 3, 4), random(answer, 3, 3, 4)
    positions = [9, 4, 30]
    answer.equal(rotary.forward(torch.tensor(positions), q, k)[0], expected(q, positions, 100.0), tolerance=CLOSE)


def test_boundary__the_table_decides(answer: Answer) -> None:
    """Angles come from the table, which may be a stretched one (Llama 3), not from a formula of one's own."""
    rotary, q = make(answer, 4), random(answer, 1, 1, 4)
    rotary.raw.cos_sin[7] = torch.tensor([1.0, 1.0, 0.0, 0.0])
    answer.note("cos_sin[7] = (1, 1, 0, 0)")
    answer.equal(rotary.forward(torch.tensor([7]), q, q), (q, q), tolerance=CLOSE)
