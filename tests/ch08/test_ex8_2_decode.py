"""Grader of exercise 8.2: attention of one query a row over pages."""

from typing import Any

import torch

from nanovllm.attention.triton_backend import TritonAttention
from nanovllm.workbook.grading import Answer, type_of
from nanovllm.workbook.oracles.pages import Launches, Pages, launches

CLOSE = 1e-4  # float32 sums over a few dozen products
SCALE = 0.37


FILLER = 7.0  # what stands where nothing may be written


def run(answer: Answer, pages: Pages, scale: float = SCALE, strided: bool = False) -> Any:
    _, block_size, kv_heads, head_dim = pages.k_cache.shape
    attention = answer.parts.resolve(TritonAttention)(pages.q.shape[1], kv_heads, head_dim, scale, block_size)
    q = torch.cat([pages.q, pages.q], 1)[:, : pages.q.shape[1]] if strided else pages.q
    before = pages.tables.clone(), pages.context_lens.clone()
    got = attention.decode(q, pages.k_cache, pages.v_cache, pages.tables, pages.context_lens)
    answer.equal((pages.tables, pages.context_lens), before, "It may not change its inputs.")
    return got


def compare(answer: Answer, contexts: list[int], **options: Any) -> None:
    pages = Pages(answer, contexts, **options)
    answer.equal(run(answer, pages), pages.expected(SCALE), tolerance=CLOSE)


def test_contract__shape_and_inputs(answer: Answer) -> None:
    """It returns [B, N, H] in q's type, and changes neither q nor the cache."""
    pages = Pages(answer, [5, 9], heads=4, kv_heads=2)
    before = pages.q.clone(), pages.k_cache.clone(), pages.v_cache.clone()
    got = run(answer, pages)
    answer.require(isinstance(got, torch.Tensor), type_of(got), "a tensor")
    answer.equal((list(got.shape), got.dtype), ([2, 4, 4], torch.float32))
    answer.equal((pages.q, pages.k_cache, pages.v_cache), before, "It may not change its inputs.")
    kept = got.clone()
    run(answer, Pages(answer, [7, 3], heads=4, kv_heads=2))
    answer.equal(got, kept, "Each call makes a result of its own: a later one leaves it alone.")


def test_contract__a_program_for_each_row_and_head(answer: Answer) -> None:
    """Program (row, head) of the kernel writes the H numbers of its own result, zeros for a padded row."""
    if not answer.parts:
        return  # the shipped kernel takes other arguments
    with answer.about("The result of a row and head: softmax over the scaled scores of all its tokens, times values."):
        compare(answer, [3])
    pages = Pages(answer, [5, 0, 3], head_dim=3)
    expected = torch.full((3 * 2 * 3 + 8,), FILLER)
    out = expected.clone()
    for grid, written in (((1, 1), 1), ((3, 2), 6)):
        answer.note(f"decode_kernel[{grid}] on an output full of {FILLER}, SIZE=16, PADDED=4")
        answer.decode_kernel[grid](
            pages.q, pages.k_cache, pages.v_cache, pages.tables, pages.context_lens, out, pages.tables.stride(0), SCALE,
            N=2, K=1, H=3, BLOCK_SIZE=4, SIZE=16, PADDED=4,
        )  # fmt: skip
        expected[: 3 * written] = pages.expected(SCALE).flatten()[: 3 * written]
        answer.equal(out, expected, tolerance=CLOSE)


def test_example__five_tokens(answer: Answer) -> None:
    """One query over five tokens in two blocks."""
    compare(answer, [5])


def test_oracle__contexts_of_all_lengths(answer: Answer) -> None:
    """The softmax over all tokens of the row, whatever the tile size."""
    for contexts in ([1], [3, 16], [17, 2, 33], [40, 15]):
        compare(answer, contexts)


def test_oracle__heads_share(answer: Answer) -> None:
    """Neighbouring heads share a kv head."""
    for heads, kv_heads in ((1, 1), (3, 3), (6, 2), (9, 3)):
        compare(answer, [18], heads=heads, kv_heads=kv_heads)


def test_oracle__blocks_of_all_sizes(answer: Answer) -> None:
    """Blocks smaller and larger than a tile."""
    for block_size in (1, 3, 8, 64):
        compare(answer, [19, 4], block_size=block_size)


def test_boundary__tiles_are_powers_of_two(answer: Answer) -> None:
    """A tile's size is a power of two, whatever the size of a block and of a head."""
    pages = Pages(answer, [7], block_size=3, head_dim=5)
    attention = answer.parts.resolve(TritonAttention)(2, 1, 5, SCALE, 3)
    if not answer.parts:
        return  # the shipped kernel has tiles of other names
    spy: Launches
    with launches(type(attention).decode, "decode_kernel") as spy:
        attention.decode(pages.q, pages.k_cache, pages.v_cache, pages.tables, pages.context_lens)
    spy.check_tiles(answer, "SIZE", "PADDED")


def test_boundary__the_last_tile(answer: Answer) -> None:
    """Positions behind the context weigh nothing, though their slots hold rubbish."""
    for context in (15, 16, 17, 31, 32, 33):
        compare(answer, [context])


def test_boundary__large_scores(answer: Answer) -> None:
    """Scores of several hundred overflow no exponential, in whichever tile they are."""
    for sign in (1.0, -1.0):
        pages = Pages(answer, [40])
        pages.q *= 400 * sign
        answer.note(f"q is multiplied by {400 * sign:g}")
        answer.equal(run(answer, pages), pages.expected(SCALE), tolerance=1e-2)


def test_boundary__low_scores(answer: Answer) -> None:
    """Every score is far below 0: the largest of them is still the one that counts."""
    pages = Pages(answer, [19])
    pages.make_scores_low()
    answer.note("every score is below -20,000")
    answer.equal(run(answer, pages), pages.expected(SCALE), tolerance=1e-2)


def test_boundary__rising_scores(answer: Answer) -> None:
    """The largest score comes last, so everything before it is rescaled."""
    pages = Pages(answer, [50], heads=1)
    order = torch.linspace(-20, 20, 50)[:, None, None] * torch.ones(1, 1, 4)
    pages.keys[0] = order
    for position in range(50):
        block = int(pages.tables[0, position // 4])
        pages.k_cache[block, position % 4] = order[position]
    pages.q.fill_(0.1)
    answer.note("scores rise along the row")
    answer.equal(run(answer, pages), pages.expected(SCALE), tolerance=CLOSE)


def test_boundary__padded_rows(answer: Answer) -> None:
    """A row with context 0 gives zeros, reads nothing, and does no harm to its neighbours."""
    compare(answer, [5, 0, 3])


def test_boundary__odd_head_dims(answer: Answer) -> None:
    """Head dims that are no powers of two."""
    for head_dim in (3, 12, 160):
        compare(answer, [6, 20], head_dim=head_dim, heads=1, kv_heads=1)


def test_boundary__half_precision(answer: Answer) -> None:
    """The result has the number format of q."""
    pages = Pages(answer, [9, 4])
    pages.halve()
    answer.note("everything in float16")
    answer.equal(run(answer, pages), pages.expected(SCALE), tolerance=1e-2)


def test_boundary__tables_in_wider_ones(answer: Answer) -> None:
    """Tables that are a view of wider ones: a row begins `stride(0)` elements behind the one before."""
    pages = Pages(answer, [5, 18, 2])
    pages.widen_tables()
    answer.note("block_tables is the left half of a tensor")
    answer.equal(run(answer, pages), pages.expected(SCALE), tolerance=CLOSE)


def test_boundary__a_view_of_q(answer: Answer) -> None:
    """Queries that come as a view of a larger tensor."""
    pages = Pages(answer, [5, 18, 2])
    answer.note("q is a view that is not contiguous")
    answer.equal(run(answer, pages, strided=True), pages.expected(SCALE), tolerance=CLOSE)


def test_boundary__scale(answer: Answer) -> None:
    """The scale is the one of the backend, not a formula of one's own."""
    pages = Pages(answer, [7])
    answer.equal(run(answer, pages, scale=2.0), pages.expected(2.0), tolerance=CLOSE)
