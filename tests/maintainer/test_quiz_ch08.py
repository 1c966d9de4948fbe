"""The keys of chapter 8's quiz, recomputed from the engine's kernels (in the interpreter where there is no GPU)."""

import math

import pytest
import torch

from nanovllm.workbook.quizzes import answer

pytest.importorskip("triton")

from nanovllm.attention.triton_backend import TritonAttention, next_power_of_two  # noqa: E402


def accepts(number: int, value: object) -> bool:
    return answer("8", number, value).text.startswith("✓")


def test_question_1_masked_columns() -> None:
    assert accepts(1, next_power_of_two(5 * 80) - 5 * 80)
    assert not accepts(1, 48)


def test_question_2_stretches() -> None:
    """As the kernel computes them: cdiv(cdiv(context, splits), tile) * tile."""
    stretch = math.ceil(math.ceil(585 / 4) / 64) * 64
    assert accepts(2, [split * stretch for split in range(4)])
    assert not accepts(2, [0, 147, 294, 441])


def test_question_3_online_softmax() -> None:
    scores = torch.tensor([2.0, 2.0, 2.0, 2.0 + math.log(2)])  # three equal scores: the sum is 3 after them
    assert accepts(3, round(float(torch.exp(scores - scores.max()).sum()), 6))
    assert not accepts(3, 4.0)


def test_question_4_the_grid_depends_on_rows_alone() -> None:
    attention = TritonAttention(16, 8, 64, 1.0, 256)
    assert attention.num_splits(4, torch.device("cpu")) >= attention.num_splits(64, torch.device("cpu"))
    assert accepts(4, "b") and not accepts(4, "c")


def test_question_5_heads_in_one_tile() -> None:
    assert TritonAttention(9, 3, 64, 1.0, 256).group == 3
    assert accepts(5, "b") and not accepts(5, "a")
