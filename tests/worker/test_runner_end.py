"""What a runner gives back at its end, and when: played on a CPU, for a GPU keeps its memory until it is told."""

import gc
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch

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
