"""Large tensors move into huge pages and keep their values; where the system has none, nothing happens."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from nanovllm.layers import huge_pages
from nanovllm.layers.cpu import PackedProduct, can_pack
from nanovllm.layers.huge_pages import HUGE_PAGE, collapse_into_huge_pages, extent, prefer_huge_pages


def huge_bytes() -> int:
    """Bytes of this process in huge pages."""
    found = re.search(r"AnonHugePages:\s+(\d+) kB", Path("/proc/self/smaps_rollup").read_text())
    assert found is not None
    return 1024 * int(found[1])


@pytest.fixture
def collapses() -> None:
    if not collapse_into_huge_pages([torch.zeros(2 * HUGE_PAGE, dtype=torch.uint8)]):
        pytest.skip("this system moves nothing into huge pages")


@pytest.mark.usefixtures("collapses")
def test_tensors_keep_values_and_addresses() -> None:
    tensors = [torch.randn(size) for size in (3 << 20, 5 << 18, 100)]
    copies, places = [tensor.clone() for tensor in tensors], [tensor.data_ptr() for tensor in tensors]
    before = huge_bytes()
    assert collapse_into_huge_pages(tensors) >= 12 << 20
    assert huge_bytes() - before >= 8 << 20
    assert places == [tensor.data_ptr() for tensor in tensors]
    assert all(torch.equal(tensor, copy) for tensor, copy in zip(tensors, copies, strict=True))


@pytest.mark.usefixtures("collapses")
@pytest.mark.skipif(not can_pack(torch.zeros(16, 16, dtype=torch.bfloat16)), reason="no bfloat16 products here")
def test_a_weight_in_onednns_layout() -> None:
    weight, x = torch.randn(4096, 1024).bfloat16(), torch.randn(3, 1024).bfloat16()
    product = PackedProduct(weight, None)
    want = product(x)
    assert extent(product.weight)[1] == weight.nbytes
    assert collapse_into_huge_pages([product.weight]) >= weight.nbytes - 2 * HUGE_PAGE
    assert torch.equal(product(x), want)


@pytest.mark.usefixtures("collapses")
def test_untouched_memory_comes_in_huge_pages_and_only_where_it_is_used() -> None:
    pool = prefer_huge_pages(torch.empty(64 << 20, dtype=torch.uint8))
    before = huge_bytes()
    pool[: 16 << 20] = 1
    assert 12 << 20 <= huge_bytes() - before <= 18 << 20


def test_small_tensors_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    monkeypatch.setattr(huge_pages, "advise", lambda *args: asked.append(args) or True)
    assert collapse_into_huge_pages([torch.zeros(1000), torch.zeros(0)]) == 0
    assert prefer_huge_pages(torch.zeros(1000)).shape == (1000,) and not asked


def test_a_page_is_asked_for_once(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    monkeypatch.setattr(huge_pages, "advise", lambda start, size, advice: asked.append(start) or True)
    monkeypatch.setattr(huge_pages, "extent", lambda place: place)
    tensors: Any = [(HUGE_PAGE // 2, 2 * HUGE_PAGE), (2 * HUGE_PAGE + 4096, HUGE_PAGE // 2), (9 * HUGE_PAGE, HUGE_PAGE)]
    assert collapse_into_huge_pages(tensors) == 4 * HUGE_PAGE
    assert sorted(asked) == [0, HUGE_PAGE, 2 * HUGE_PAGE, 9 * HUGE_PAGE]


def test_where_there_is_no_such_advice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huge_pages, "find_madvise", lambda: None)
    assert collapse_into_huge_pages([torch.zeros(1 << 20)]) == 0
