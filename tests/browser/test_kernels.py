"""The player's controls with other versions of ipykernel, which serve clicks in different ways.

Each version needs an environment of its own. They are used where they lie, in the folder NANOVLLM_KERNELS, and made
there only if NANOVLLM_MAKE_KERNELS is set: that asks the package index for a few packages and takes a minute or two.
"""

import os
import subprocess
import venv
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.browser import test_live, test_player
from tests.browser.rig import CHROMIUM, Lab

pytestmark = [pytest.mark.browser, pytest.mark.slow]
VERSIONS = {"6.31": "ipykernel==6.31.*", "7.3": "ipykernel==7.3.*", "newest": "ipykernel"}


@pytest.fixture(scope="module", params=list(VERSIONS))
def other_lab(request: pytest.FixtureRequest) -> Iterator[Lab]:
    if CHROMIUM is None:
        pytest.skip("no Chromium on this machine")
    folder = os.environ.get("NANOVLLM_KERNELS")
    if not folder:
        pytest.skip("NANOVLLM_KERNELS names no folder with environments for other versions of ipykernel")
    python = Path(folder, request.param, "bin", "python")
    if not python.exists():
        if not os.environ.get("NANOVLLM_MAKE_KERNELS"):
            pytest.skip(f"{python} is not there, and NANOVLLM_MAKE_KERNELS is not set")
        venv.create(python.parents[1], with_pip=True)
        packages = [VERSIONS[request.param], "anywidget", "ipywidgets", "matplotlib", "numpy"]
        subprocess.run([python, "-m", "pip", "install", "-q", *packages], check=True, timeout=280)
    with Lab(kernel=python) as lab:
        yield lab


def test_mouse(other_lab: Lab) -> None:
    test_player.test_every_control_by_mouse(other_lab)


def test_interrupt(other_lab: Lab) -> None:
    test_player.test_interrupting_pauses_and_play_goes_on(other_lab)


def test_run_again(other_lab: Lab) -> None:
    test_player.test_running_its_cell_again_leaves_one_player(other_lab)


def test_live_stopped_and_run_again(other_lab: Lab) -> None:
    test_live.test_interrupt_and_run_again(other_lab)
