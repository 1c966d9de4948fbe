"""What a runner takes of the memory, and what it gives back at its end, and when: played on a CPU, without a model."""

import gc
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from nanovllm.engine.parts import Parts
from nanovllm.errors import MemoryBudgetError
from nanovllm.worker.kv_cache import allocate_kv_cache
from nanovllm.worker.model_runner import ModelRunner


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What was done, in order; what went wrong in a finalizer, too."""
    done: list[str] = []
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: done.append("memory"))
    monkeypatch.setattr(sys, "unraisablehook", lambda what: done.append(repr(what.exc_value)))
    return done


def runner(calls: list[str]) -> Any:
    made = object.__new__(ModelRunner)
    made.device = torch.device("cuda")
    made.link = SimpleNamespace(close=lambda: calls.append("link"))  # type: ignore[assignment]
    made.model = made.kv_cache = made.sampler = made.graphs = object()  # type: ignore[assignment]
    return made


def test_exit_gives_the_memory_back_before_it_leaves_the_others(calls: list[str]) -> None:
    made = runner(calls)
    made.exit()
    assert calls == ["memory", "link"]
    assert made.model is made.kv_cache is made.sampler is made.graphs is None


def test_one_that_nobody_closed_gives_its_memory_back(calls: list[str]) -> None:
    made = runner(calls)
    del made
    gc.collect()
    assert calls == ["memory"]


def test_not_while_python_ends(calls: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Modules are half gone then, and the memory goes with the process."""
    made = runner(calls)
    with monkeypatch.context() as patch:
        patch.setattr(sys, "is_finalizing", lambda: True)
        del made
        gc.collect()
    assert calls == []


def test_one_that_was_never_built_has_nothing(calls: list[str]) -> None:
    made = object.__new__(ModelRunner)  # what is left where the first line of __init__ fails
    del made
    gc.collect()
    assert calls == []


def test_a_pool_that_a_gpu_cannot_give_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def too_large(*args: object, **options: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(torch, "zeros", too_large)
    with pytest.raises(MemoryBudgetError, match=r"32,768 bytes for the KV pool; lower num_kvcache_blocks"):
        allocate_kv_cache(2, 16, 16, 2, 4, torch.float32, torch.device("meta"))


def test_the_pool_is_as_large_as_the_smallest_of_all_ranks() -> None:
    """Every rank stores its share of the same blocks, so a block that one of them lacks is no block."""
    made = object.__new__(ModelRunner)
    made.device, made.dtype = torch.device("cpu"), torch.float32
    made.model = SimpleNamespace(num_layers=2, num_kv_heads=1, head_dim=4)
    made.config = SimpleNamespace(  # type: ignore[assignment]
        num_kvcache_blocks=-1, kvcache_block_size=4, kv_cache_memory=1 << 16, max_model_len=16
    )
    made.link = SimpleNamespace(smallest=lambda value: value - 3)  # type: ignore[assignment]
    cache = made._allocate_kv_cache(Parts())
    assert made.config.num_kvcache_blocks == (1 << 16) // 256 - 3 == cache.shape[2]
    made.model = made.link = None  # type: ignore[assignment]
