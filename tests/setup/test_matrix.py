"""The install matrix (matrix.py): run where NANOVLLM_MATRIX is set, because it fetches gigabytes; its parts always."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.setup import matrix


def test_the_oldest_row_pins_the_lower_bounds() -> None:
    oldest = matrix.requirements(True, [])
    assert "torch~=2.6.0" in oldest and "transformers~=4.51.0" in oldest and "safetensors~=0.4.3" in oldest
    assert any(each.startswith("triton~=3.2.0; platform_system") for each in oldest)
    assert not [each for each in oldest if ">=" in each.split(";")[0]], "a bound that stays open"


def test_the_newest_row_is_what_pyproject_says_and_versions_can_be_set() -> None:
    newest = matrix.requirements(False, ["torch==2.13.0"])
    assert "torch==2.13.0" in newest and "transformers>=4.51" in newest


def test_this_interpreter_is_found() -> None:
    assert matrix.interpreter("{}.{}".format(*sys.version_info)) == sys.executable
    assert matrix.interpreter("2.0") is None


@pytest.mark.slow
@pytest.mark.timeout(4 * 3600)
@pytest.mark.skipif("NANOVLLM_MATRIX" not in os.environ, reason="set NANOVLLM_MATRIX=1 to install and test every row")
def test_the_matrix() -> None:
    result = subprocess.run([sys.executable, str(Path(matrix.__file__))])
    assert result.returncode == 0
