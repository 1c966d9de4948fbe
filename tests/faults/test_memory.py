"""Too little memory, and files that fail while they are read: one error that says what and what to do, nothing held."""

import gc
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import SafetensorError, safe_open

from nanovllm import machine
from nanovllm.errors import MemoryBudgetError, WeightError
from nanovllm.machine import main_memory, require_memory
from nanovllm.models import loader
from nanovllm.worker import kv_cache
from tests.faults.engines import build
from tests.models.helpers import make_model
from tests.models.test_loader import rewrite
from tests.tiny_models import make_tiny_model

Q_PROJ = "model.layers.1.self_attn.q_proj.weight"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return make_tiny_model(tmp_path / "model")


def control_group(monkeypatch: pytest.MonkeyPatch, said: str | OSError) -> None:
    """What the container says that it may use."""

    def read_text(path: Path) -> str:
        assert str(path) == "/sys/fs/cgroup/memory.max"
        if isinstance(said, OSError):
            raise said
        return said

    monkeypatch.setattr(Path, "read_text", read_text)


def test_a_container_has_its_share_and_not_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        control_group(patch, f"{1 << 20}\n")
        assert main_memory() == 1 << 20
        with pytest.raises(MemoryBudgetError, match="^a pool needs 2.0 GiB, this machine gives 0.0 GiB in all; buy"):
            require_memory(2 << 30, "a pool", "buy more")
        require_memory(1 << 20, "a pool", "buy more")


@pytest.mark.parametrize("said", ["max\n", "", FileNotFoundError("no control groups"), PermissionError("no")])
def test_without_a_container_it_is_the_machines(said: str | OSError, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        control_group(patch, said)
        patch.setattr(machine.os, "sysconf", {"SC_PAGE_SIZE": 4096, "SC_PHYS_PAGES": 1000}.__getitem__)
        assert main_memory() == 4_096_000


@pytest.mark.parametrize("error", [ValueError("unrecognized"), OSError("no"), AttributeError("sysconf")])
def test_a_system_that_does_not_tell_is_not_asked_again(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    def sysconf(name: str) -> int:
        raise error

    with monkeypatch.context() as patch:
        control_group(patch, "max")
        patch.setattr(machine.os, "sysconf", sysconf)
        assert main_memory() is None
        require_memory(1 << 60, "a pool", "buy more")  # nobody knows, so it is tried


def test_a_pool_that_the_system_does_not_give(tiny_model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def zeros(size: int, dtype: Any) -> None:
        raise MemoryError

    monkeypatch.setattr(kv_cache, "np", SimpleNamespace(zeros=zeros, uint8=np.uint8))
    with pytest.raises(MemoryBudgetError, match="cannot give .* bytes for the KV pool; lower num_kvcache_blocks"):
        build(tiny_model_dir)


def test_weights_are_weighed_before_any_memory_is_taken(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Systems give each tensor what it asks for, and end the process when all of them are filled."""
    monkeypatch.setattr(machine, "main_memory", lambda: 1 << 10)
    monkeypatch.setattr(loader.torch, "empty_like", lambda *args, **options: pytest.fail("memory was taken"))
    with pytest.raises(MemoryBudgetError, match="^the model needs .* GiB in all; choose a smaller model"):
        make_model(folder)


def test_weights_that_torch_has_no_room_for(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def empty_like(*args: Any, **options: Any) -> None:
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory")

    monkeypatch.setattr(loader.torch, "empty_like", empty_like)
    with pytest.raises(MemoryBudgetError, match="no room on cpu for a model of .* bytes; choose a smaller"):
        make_model(folder)


@pytest.mark.parametrize("error", [MemoryError(), RuntimeError("unable to mmap: Cannot allocate memory")])
def test_a_file_with_more_bytes_than_there_are_addresses(
    folder: Path, error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_room(*args: Any, **options: Any) -> None:
        raise error

    monkeypatch.setattr(loader, "safe_open", no_room)
    with pytest.raises(MemoryBudgetError, match="no room for .*model.safetensors: .*; choose a smaller model"):
        make_model(folder)


@pytest.mark.parametrize("error", [SafetensorError("bad offsets"), OSError("the disk is gone")])
def test_a_tensor_that_cannot_be_read(folder: Path, error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    class Failing:
        """A file that breaks off at one tensor."""

        def __init__(self, *args: Any, **options: Any) -> None:
            self.file = safe_open(*args, **options)

        def __enter__(self) -> "Failing":
            return self

        def __exit__(self, *exc_info: object) -> None: ...

        def __getattr__(self, name: str) -> Any:
            return getattr(self.file, name)

        def get_tensor(self, name: str) -> torch.Tensor:
            if name == Q_PROJ:
                raise error
            tensor: torch.Tensor = self.file.get_tensor(name)
            return tensor

    monkeypatch.setattr(loader, "safe_open", Failing)
    with pytest.raises(WeightError, match=f"cannot read {Q_PROJ}: {error}"):
        make_model(folder)


def test_a_refused_file_is_closed_although_its_error_is_kept(folder: Path) -> None:
    """As a notebook keeps the last one, with all that its frames hold."""
    rewrite(folder, **{Q_PROJ: None})
    with pytest.raises(WeightError, match="missing") as caught:
        make_model(folder)
    gc.collect()
    assert caught.tb is not None and str(folder) not in Path("/proc/self/maps").read_text()
