"""What the README names exists: commands, files, options, public names."""

import re
from dataclasses import fields
from pathlib import Path

import pytest

import nanovllm
from nanovllm import cli
from nanovllm.config import Config

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def test_make_targets_exist() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    named = set(re.findall(r"make ([a-z-]+)\b", README)) & {
        "demo",
        "lab",
        "test",
        "test-slow",
        "notebooks",
        "clean",
        "setup",
    }
    assert {"demo", "lab", "test"} <= named
    for target in named:
        assert re.search(rf"^{target}:", makefile, re.M), target


def test_commands_exist() -> None:
    named = set(re.findall(r"\bnanovllm (demo|doctor|model|check|hint|grade|bench|quiz|progress)\b", README))
    assert {"doctor", "model", "check", "grade", "bench"} <= named <= set(cli.COMMANDS)


@pytest.mark.parametrize("path", sorted(set(re.findall(r"`([a-z_]+/[a-z0-9_/]+\.py)`", README))))
def test_files_exist(path: str) -> None:
    assert (ROOT / path).is_file() or (ROOT / "nanovllm" / path).is_file()


def test_options_exist() -> None:
    known = {field.name for field in fields(Config)} | {"temperature", "max_tokens"}
    named = set(re.findall(r"\b([a-z_]+)=\"?[a-z0-9.]", README))
    assert {"attention_backend", "scheduling_policy"} <= named <= known, named - known


def test_imports_of_the_examples_exist() -> None:
    lines = re.findall(r"from nanovllm import (.+)", README)
    assert lines
    for line in lines:
        assert set(line.split(", ")) <= set(nanovllm.__all__)
