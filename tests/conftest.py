"""Fixtures shared by all tests: tiny checkpoints, made once per run, and the default model if it is here."""

import os
import signal
from pathlib import Path

import pytest

from nanovllm.paths import default_model_path, is_model_folder

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # no test may reach the network by accident
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # a shell's background job: its children would ignore it as well
    signal.signal(signal.SIGINT, signal.default_int_handler)


def tiny_model(factory: pytest.TempPathFactory, architecture: str) -> Path:
    from tests.tiny_models import make_tiny_model  # transformers takes seconds to import, and not every test needs it

    return make_tiny_model(factory.mktemp("models") / architecture, architecture)


@pytest.fixture(scope="session")
def tiny_model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Qwen3, the course's architecture."""
    return tiny_model(tmp_path_factory, "qwen3")


@pytest.fixture(scope="session")
def tiny_qwen2_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Qwen2: biases on query, key and value."""
    return tiny_model(tmp_path_factory, "qwen2")


@pytest.fixture(scope="session")
def tiny_llama_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Llama: its own lm_head."""
    return tiny_model(tmp_path_factory, "llama")


@pytest.fixture(scope="session")
def tiny_model_dirs(tiny_model_dir: Path, tiny_qwen2_dir: Path, tiny_llama_dir: Path) -> dict[str, Path]:
    """All three by architecture."""
    return {"qwen3": tiny_model_dir, "qwen2": tiny_qwen2_dir, "llama": tiny_llama_dir}


@pytest.fixture(scope="session")
def default_model_dir() -> Path:
    """The default model; skips where it has not been fetched."""
    path = default_model_path()
    if not is_model_folder(path):
        pytest.skip("the default model is not here; fetch it with: nanovllm model get")
    return path


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Test processes side by side must find the same names, so an object's address may not be part of one."""
    for item in items:
        if " at 0x" in item.nodeid:
            raise pytest.UsageError(f"give the cases of this test names of their own: {item.nodeid}")
