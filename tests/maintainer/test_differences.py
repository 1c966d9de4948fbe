"""How two values differ, as a failure tells it: the first place with both values, and how many differ."""

from typing import Any

import numpy as np
import pytest
import torch

from nanovllm.engine.parts import Parts
from nanovllm.workbook.catalogue import Workbook
from nanovllm.workbook.grading import Answer, Rejected, difference, type_of

ZEROS = torch.zeros(3, 4)
ONE_OFF = ZEROS.clone()
ONE_OFF[2, 1] = 0.5


@pytest.mark.parametrize(
    ("got", "expected", "said"),
    [
        (ONE_OFF, ZEROS, "[2, 1]: got 0.5, expected 0; 1 of 12 differ"),
        ([ZEROS, ONE_OFF], [ZEROS, ZEROS], "[1][2, 1]: got 0.5, expected 0; 1 of 12 differ"),
        (ZEROS[:2], ZEROS, "shape [2, 4], not [3, 4]"),
        (ZEROS.half(), ZEROS, "dtype torch.float16, not torch.float32"),
        (torch.tensor(1), torch.tensor(2), "got 1, expected 2; 1 of 1 differ"),
        (torch.tensor([np.nan, np.inf, 1.0]), torch.tensor([np.nan, np.inf, 2.0]),
         "[2]: got 1, expected 2; 1 of 3 differ"),
        (None, ZEROS, "a NoneType, not a tensor"),
        ([12, 13, 14, 6], [12, 13, 14, 3], "[3]: got 6, expected 3; 1 of 4 differ"),
        ([[1, 2], [3, 4]], [[1, 2], [3, 5]], "[1][1]: got 4, expected 5; 1 of 2 differ"),
        ([1, 2, 3], [1, 2], "3 items, not 2"),
        ([1, 5, 3], [1, 2], "[1]: got 5, expected 2; 3 items, not 2"),
        ({"a": [1]}, {"a": [2]}, "['a'][0]: got 1, expected 2; 1 of 1 differ"),
        ([1, 2.0], [1, 2], "[1]: a float, not an int"),
        (np.array([1, 2, 9]), np.array([1, 2, 3]), "[2]: got 9, expected 3; 1 of 3 differ"),
        (np.array([1, 2]), np.array([1, 2, 3]), "int64 [2], not int64 [3]"),
        ([1, 2], np.array([1, 2]), "a list, not a numpy array"),
        (7, 8, ""), (True, 1, "a bool, not an int"), (1, True, ""), (0.5, 0.25, ""), ("x", "y", ""), (0, None, ""),
    ],
)  # fmt: skip
def test_what_differs(got: Any, expected: Any, said: str) -> None:
    assert difference(got, expected) == said


@pytest.mark.parametrize(
    ("got", "expected"),
    [(ZEROS, ZEROS.clone()), ((1, 2), [1, 2]), (np.array([1.0]), np.array([1.0])), (1, 1.0), (np.int64(3), 3),
     ({"a": ONE_OFF}, {"a": ONE_OFF}), (torch.tensor([np.nan, np.inf]), torch.tensor([np.nan, np.inf]))],
)  # fmt: skip
def test_what_is_as_good(got: Any, expected: Any) -> None:
    assert difference(got, expected) is None


def told(got: Any, expected: Any, name: str = "") -> list[str]:
    """The lines `got` and `expected` of a failure."""
    answer = Answer(Workbook.find().exercise("8.1"), {}, Parts())
    with pytest.raises(Rejected) as caught:
        answer.equal(got, expected, "a rule", name=name)
    return [line.split(maxsplit=1)[1] for line in caught.value.lines() if not line.startswith("rule")]


def test_a_cache_is_told_by_its_name_and_place() -> None:
    """What began alike was cut before the place where it differed."""
    got, expected = told(ONE_OFF.expand(4, 3, 4), ZEROS.expand(4, 3, 4), "k_cache")
    assert got == "tensor [4, 3, 4] float32 (k_cache[0, 2, 1]: got 0.5, expected 0; 4 of 48 differ)"
    assert expected == "tensor [4, 3, 4] float32"
    assert told([ONE_OFF], [ZEROS])[0].endswith("([0][2, 1]: got 0.5, expected 0; 1 of 12 differ)")


def test_a_long_list_is_told_by_its_place_and_a_short_one_shown() -> None:
    long = list(range(100, 200))
    assert told([*long[:70], 0, *long[71:]], long)[0].endswith("… ([70]: got 0, expected 170; 1 of 100 differ)")
    assert told([12, 13, 14, 6], [12, 13, 14, 3]) == ["[12, 13, 14, 6]", "[12, 13, 14, 3]"]
    assert told([12, 13.0], [12, 13])[0] == "[12, 13.0] ([1]: a float, not an int)"


def test_the_article_fits_the_type() -> None:
    assert [type_of(value) for value in (1, [], None, np.zeros(1))] == [
        "an int", "a list", "a NoneType", "a ndarray",
    ]  # fmt: skip
