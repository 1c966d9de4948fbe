"""Graders run Triton in its interpreter on every machine, since their tensors are a CPU's; other tests use the GPU."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from nanovllm.workbook.pytest_plugin import grades_only


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["tests/ch02", "tests/ch08"], True),
        (["tests/ch08/test_ex8_1_store.py::test_contract"], True),
        (["/books/mine/tests/ch08"], True),
        (["tests/ch08", "tests/gpu"], False),
        (["tests/attention/test_triton_backend.py"], False),
        (["tests/chapters"], False),
    ],
)
def test_what_is_graded(arguments: list[str], expected: bool) -> None:
    config: Any = SimpleNamespace(args=arguments, invocation_params=SimpleNamespace(dir=Path("/books/workbook")))
    assert grades_only(config) is expected


def test_from_inside_the_folder() -> None:
    config: Any = SimpleNamespace(args=["."], invocation_params=SimpleNamespace(dir=Path("/books/workbook/tests/ch08")))
    assert grades_only(config)
