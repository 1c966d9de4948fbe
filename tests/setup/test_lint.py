"""ruff and mypy pass, with the settings in pyproject.toml."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", *arguments], cwd=ROOT, capture_output=True, text=True)


@pytest.mark.parametrize("where", ["nanovllm", "tests", "exercises", "solutions", "example.py"])
def test_ruff(where: str) -> None:
    result = run("ruff", "check", "--output-format=concise", where)
    assert result.returncode == 0, result.stdout + result.stderr


@pytest.mark.timeout(600)
def test_mypy_strict() -> None:
    result = run("mypy")
    assert result.returncode == 0, result.stdout + result.stderr
    assert "Success" in result.stdout
