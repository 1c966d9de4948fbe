"""Grader of exercise 8.3: the context of a row, split over programs."""

import itertools
import math
from typing import Any

import torch

from nanovllm.attention.triton_backend import TritonAttention
from nanovllm.workbook.grading import Answer
from nanovllm.workbook.oracles.pages import Pages, launches

CLOSE = 1e-4  # float32 sums over a few dozen products
SCALE = 0.37
FILLER = 7.0  # what stands where nothing may be written


def run(answer: Answer, pages: Pages, splits: int, strided: bool = False) -> Any:
    _, block_size, kv_heads, head_dim = pages.k_cache.shape
    attention = answer.parts.resolve(TritonAttention)(pages.q.shape[1], kv_heads, head_dim, SCALE, block_size)
    asked: list[int] = []

    def num_splits(rows: int, device: torch.device) -> int:
        asked.append(rows)
        return splits

    attention.num_splits = num_splits
    answer.note(f"num_splits gives {splits}")
    q = torch.cat([pages.q, pages.q], 1)[:, : pages.q.shape[1]] if strided else pages.q
    before = pages.tables.clone(), pages.context_lens.clone()
    with launches(type(attention).decode, "split_kernel") as spy:
        got = attention.decode(q, pages.k_cache, pages.v_cache, pages.tables, pages.context_lens)
    answer.equal((pages.tables, pages.context_lens), before, "It may not change its inputs.")
    rule = "self.num_splits(rows, device) says how many splits there are."
    answer.equal(asked, [len(pages.contexts)], rule)
    answer.equal([call["SPLITS"] for call in spy.calls], [splits], rule)
    spy.check_tiles(answer, "SIZE", "PADDED")
    for name in ("part_ptr", "lse_ptr"):
        kind = spy.calls[0][name].dtype
        answer.require(kind == torch.float32, f"{name}: {kind}", "float32", "Parts and lse are float32.")
    return got


def compare(answer: Answer, contexts: list[int], splits: int, **options: Any) -> None:
    pages = Pages(answer, contexts, **options)
    answer.equal(run(answer, pages, splits), pages.expected(SCALE), tolerance=CLOSE)


def merged(answer: Answer, parts: list[list[float]], lses: list[float]) -> Any:
    """merge for one row and one head."""
    answer.story.clear()
    answer.note(f"merge(part {parts}, lse {lses})")
    part, lse = torch.tensor(parts)[None, None], torch.tensor(lses)[None, None]
    before = part.clone(), lse.clone()
    got = answer.merge(part, lse)
    answer.equal((part, lse), before, "It may not change its inputs.")
    return got


def test_contract__shapes_and_inputs(answer: Answer) -> None:
    """decode returns [B, N, H] in q's type and changes nothing; merge returns [B, N, H] float32."""
    pages = Pages(answer, [5, 9], heads=4, kv_heads=2)
    before = pages.q.clone(), pages.k_cache.clone(), pages.v_cache.clone()
    got = run(answer, pages, 2)
    answer.equal((list(got.shape), got.dtype), ([2, 4, 4], torch.float32))
    answer.equal((pages.q, pages.k_cache, pages.v_cache), before, "It may not change its inputs.")
    got = answer.merge(torch.zeros(2, 3, 4, 5), torch.zeros(2, 3, 4))
    answer.equal((list(got.shape), got.dtype), ([2, 3, 5], torch.float32))


def test_contract__each_program_its_stretch(answer: Answer) -> None:
    """Program (row, head, split) leaves attention and lse of its own stretch behind, and writes nothing else."""
    with answer.about("The parts of all stretches, merged by their lse, are the attention over the whole context."):
        compare(answer, [3], 2)
    for contexts, splits in (([10, 5], 4), ([7, 0], 3)):
        pages = Pages(answer, contexts, head_dim=3)
        part, lse = torch.full((2, 2, splits, 3), FILLER), torch.full((2, 2, splits), FILLER)
        for grid in ((1, 1, 1), (2, 2, splits)):
            answer.note(f"split_kernel[{grid}] on outputs full of {FILLER}, SPLITS={splits}, SIZE=16, PADDED=4")
            answer.split_kernel[grid](
                pages.q, pages.k_cache, pages.v_cache, pages.tables, pages.context_lens, part, lse,
                pages.tables.stride(0), SCALE, N=2, K=1, H=3, BLOCK_SIZE=4, SPLITS=splits, SIZE=16, PADDED=4,
            )  # fmt: skip
            expected = stretches(pages, splits, grid)
            answer.equal(lse, expected[1], "lse: log of the sum of exp(score) over the stretch.", tolerance=CLOSE)
            empty = lse[..., None].isneginf()
            answer.require(bool(part.isfinite().all()), "a part that is not finite", "finite numbers in every part")
            got = torch.where(empty, 0.0, part)
            answer.equal(got, expected[0], "part: the attention over the stretch alone.", tolerance=CLOSE)


def stretches(pages: Pages, splits: int, grid: tuple[int, ...]) -> tuple[torch.Tensor, torch.Tensor]:
    """part and lse as the programs of `grid` must leave them, with zeros for the part of an empty stretch."""
    part, lse = torch.full((2, 2, splits, 3), FILLER), torch.full((2, 2, splits), FILLER)
    for row, head, split in itertools.product(*map(range, grid)):
        context = pages.contexts[row]
        stretch = -(-context // splits)
        first = min(split * stretch, context)
        values, weight = pages.attend(row, head, SCALE, first, min(first + stretch, context))
        part[row, head, split], lse[row, head, split] = torch.tensor(values), weight
    return part, lse


def test_example__two_stretches(answer: Answer) -> None:
    """Values 1 and 4 with sums 2 and 1 make 2."""
    answer.equal(merged(answer, [[1.0], [4.0]], [math.log(2), 0.0]), torch.tensor([[[2.0]]]), tolerance=CLOSE)
    compare(answer, [10], 4)


def test_oracle__any_number_of_splits(answer: Answer) -> None:
    """The result does not depend on the number of splits."""
    for splits in (1, 3, 8):
        compare(answer, [33, 5], splits)


def test_oracle__heads_and_blocks(answer: Answer) -> None:
    """Shared kv heads, and blocks of other sizes than the stretches."""
    for heads, kv_heads, block_size in ((6, 2, 4), (2, 2, 1), (3, 1, 12)):
        compare(answer, [21], 2, heads=heads, kv_heads=kv_heads, block_size=block_size)


def test_oracle__head_dims(answer: Answer) -> None:
    """Head dims that are no powers of two, and large ones."""
    for head_dim in (5, 160):
        compare(answer, [9], 2, heads=1, head_dim=head_dim)


def test_oracle__merge(answer: Answer) -> None:
    """Each stretch weighs as much as its share of the sum of exp(lse)."""
    for _ in range(30):
        splits = answer.rng.randint(1, 5)
        parts = [[round(answer.rng.uniform(-3, 3), 2) for _ in range(2)] for _ in range(splits)]
        lses = [round(answer.rng.uniform(-4, 4), 2) for _ in range(splits)]
        sums = [math.exp(lse) for lse in lses]
        expected = [sum(s * p[i] for s, p in zip(sums, parts, strict=True)) / sum(sums) for i in range(2)]
        answer.equal(merged(answer, parts, lses), torch.tensor([[expected]]), tolerance=CLOSE)


def test_boundary__merge_empty_stretches(answer: Answer) -> None:
    """A stretch with lse -inf counts nothing, whatever stands in its part."""
    empty = -math.inf
    answer.equal(merged(answer, [[3.0], [math.nan]], [0.5, empty]), torch.tensor([[[3.0]]]), tolerance=CLOSE)
    answer.equal(merged(answer, [[1e30], [3.0]], [empty, -200.0]), torch.tensor([[[3.0]]]), tolerance=CLOSE)
    answer.equal(merged(answer, [[7.0], [math.nan]], [empty, empty]), torch.tensor([[[0.0]]]))


def test_boundary__merge_large_sums(answer: Answer) -> None:
    """Only differences between the lse count: 500 and -500 are no trouble."""
    expected = torch.tensor([[[2.0]]])
    for base in (500.0, -500.0):
        answer.equal(merged(answer, [[1.0], [4.0]], [base + math.log(2), base]), expected, tolerance=1e-3)


def test_boundary__merge_rows_of_their_own(answer: Answer) -> None:
    """Each row and head has its own largest lse: one with large sums takes nothing from another with small ones."""
    answer.note("merge: two rows of lse around 500 and around -500")
    part = torch.tensor([1.0, 4.0]).expand(2, 1, 2)[..., None].clone()
    lse = torch.tensor([[500.0 + math.log(2), 500.0], [-500.0 + math.log(2), -500.0]])[:, None].clone()
    answer.equal(answer.merge(part, lse), torch.full((2, 1, 1), 2.0), tolerance=1e-3)


def test_boundary__contexts_shorter_than_the_splits(answer: Answer) -> None:
    """With fewer tokens than splits, some programs have nothing to do."""
    compare(answer, [1, 2, 5], 4)
    compare(answer, [3], 8)


def test_boundary__padded_rows(answer: Answer) -> None:
    """A row with context 0 gives zeros."""
    compare(answer, [5, 0, 3], 4)


def test_boundary__large_scores(answer: Answer) -> None:
    """Scores of several hundred overflow nothing, neither in a stretch nor between them."""
    pages = Pages(answer, [40])
    pages.q *= 400
    answer.note("q is multiplied by 400")
    answer.equal(run(answer, pages, 4), pages.expected(SCALE), tolerance=1e-2)


def test_boundary__low_scores(answer: Answer) -> None:
    """Every score is far below 0: the largest of them is still the one that counts."""
    pages = Pages(answer, [19])
    pages.make_scores_low()
    answer.note("every score is below -20,000")
    answer.equal(run(answer, pages, 2), pages.expected(SCALE), tolerance=1e-2)


def test_boundary__half_precision(answer: Answer) -> None:
    """The result has the number format of q, and everything in between is float32."""
    pages = Pages(answer, [9, 4])
    pages.halve()
    answer.note("everything in float16")
    answer.equal(run(answer, pages, 2), pages.expected(SCALE), tolerance=1e-2)


def test_boundary__tables_in_wider_ones(answer: Answer) -> None:
    """Tables that are a view of wider ones: a row begins `stride(0)` elements behind the one before."""
    pages = Pages(answer, [5, 18])
    pages.widen_tables()
    answer.note("block_tables is the left half of a tensor")
    answer.equal(run(answer, pages, 2), pages.expected(SCALE), tolerance=CLOSE)


def test_boundary__a_view_of_q(answer: Answer) -> None:
    """Queries that come as a view of a larger tensor."""
    pages = Pages(answer, [5, 18])
    answer.equal(run(answer, pages, 2, strided=True), pages.expected(SCALE), tolerance=CLOSE)
