"""Large tensors move into huge pages and keep their values; where the system has none, nothing happens."""

import mmap
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from nanovllm.layers import huge_pages
from nanovllm.layers.cpu import PackedProduct, can_pack
from nanovllm.layers.huge_pages import HUGE_PAGE, collapse_into_huge_pages, extent, prefer_huge_pages


def fresh(size: int) -> torch.Tensor:
    """Bytes in a mapping of their own: memory from the heap may lie in huge pages since an earlier test."""
    return torch.frombuffer(mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS), dtype=torch.uint8)


def mapping_of(tensor: torch.Tensor) -> str:
    """What the system says of the mapping that a tensor starts in."""
    for region in re.split(r"^(?=[0-9a-f]+-[0-9a-f]+ )", Path("/proc/self/smaps").read_text(), flags=re.MULTILINE):
        start, end = (int(end, 16) for end in region.split()[0].split("-")) if region else (0, 0)
        if start <= tensor.data_ptr() < end:
            return region
    raise AssertionError("a tensor lies outside of all mappings")


def kilobytes(tensor: torch.Tensor, field: str) -> int:
    found = re.search(rf"^{field}:\s+(\d+) kB", mapping_of(tensor), re.MULTILINE)
    assert found is not None
    return int(found[1])


@pytest.fixture
def collapses() -> None:
    if collapse_into_huge_pages([fresh(8 << 20).zero_()]) < 6 << 20:
        pytest.skip("this system moves nothing into huge pages, or has none free")


@pytest.mark.usefixtures("collapses")
def test_tensors_keep_values_and_addresses() -> None:
    memory = fresh(32 << 20)
    memory.random_()
    tensors = [memory[: 12 << 20], memory[12 << 20 : 17 << 20], memory[17 << 20 : (17 << 20) + 100]]
    copies, places = [tensor.clone() for tensor in tensors], [tensor.data_ptr() for tensor in tensors]
    moved = collapse_into_huge_pages(tensors)
    assert 0 < moved <= 20 << 20
    assert kilobytes(memory, "AnonHugePages") >= (moved - 4 * HUGE_PAGE) >> 10  # the ends may be another mapping's
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


@pytest.mark.skipif(not Path("/sys/kernel/mm/transparent_hugepage").exists(), reason="a system without huge pages")
def test_untouched_memory_comes_in_huge_pages_and_only_where_it_is_used() -> None:
    pool = fresh(64 << 20)
    assert prefer_huge_pages(pool) is pool
    inner = pool[HUGE_PAGE:]
    assert re.search(r"^VmFlags:.* hg\b", mapping_of(inner), re.MULTILINE)  # asked for; the system gives what it has
    before = kilobytes(inner, "Rss")  # of the mapping: it may be one with an earlier pool's
    inner[: 16 << 20] = 1
    assert 15 << 10 <= kilobytes(inner, "Rss") - before <= 18 << 10


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
