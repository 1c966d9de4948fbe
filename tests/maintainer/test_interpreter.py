"""Graders run Triton in its interpreter on every machine, since their tensors are a CPU's; other tests use the GPU."""

import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from nanovllm.workbook import pytest_plugin
from nanovllm.workbook.catalogue import Workbook
from nanovllm.workbook.pytest_plugin import grades_only, has_gpu


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


@pytest.mark.parametrize("usable", [True, False])
def test_pytorch_says_whether_a_gpu_can_be_used(usable: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A driver alone is none: the GPU may be hidden, and PyTorch may be built without CUDA."""
    monkeypatch.setattr(pytest_plugin, "DRIVERS", (str(tmp_path / "nothing"), str(tmp_path)))
    cuda = SimpleNamespace(is_available=lambda: usable)
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(cuda=cuda))
    assert has_gpu() is usable


def test_without_a_driver_pytorch_is_not_even_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pytest_plugin, "DRIVERS", (str(tmp_path / "nothing"),))
    monkeypatch.setitem(sys.modules, "torch", None)  # an import would fail
    assert has_gpu() is False


@pytest.mark.parametrize(
    ("folder", "gpu", "expected"),
    [
        ("ch08", True, "1"),
        ("ch08", False, "1"),
        ("gpu", True, None),
        ("attention", True, None),
        ("attention", False, "1"),
    ],
)
def test_the_interpreter_is_chosen_before_the_tests(
    folder: str, gpu: bool, expected: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = Workbook.find().root
    monkeypatch.setenv("TRITON_INTERPRET", "")
    monkeypatch.delenv("TRITON_INTERPRET")
    monkeypatch.setattr(pytest_plugin, "has_gpu", lambda: gpu)
    option = SimpleNamespace(
        answers=None, workbook=str(root), target="solutions", chain=False, grade_seed=0, ex=None, ch=None
    )
    place = SimpleNamespace(dir=root)
    config: Any = SimpleNamespace(
        args=[f"tests/{folder}"], invocation_params=place, option=option, stash=pytest.Stash()
    )
    pytest_plugin.pytest_configure(config)
    assert os.environ.get("TRITON_INTERPRET") == expected
