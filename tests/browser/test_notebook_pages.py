"""Every notebook in a real JupyterLab: as a reader finds it, and with all of its cells run."""

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from nanovllm.workbook.catalogue import Workbook
from nanovllm.workbook.notebooks import scratch_workbook
from tests.browser.rig import Lab, Notebook

pytestmark = [pytest.mark.browser, pytest.mark.slow, pytest.mark.timeout(600)]

WORKBOOK = Workbook.find()
PATHS = sorted((WORKBOOK.root / "notebooks").glob("[0-9][0-9]_*.ipynb"))
SECONDS = 560

pages = pytest.mark.parametrize("path", PATHS, ids=lambda path: path.stem)


@pytest.fixture
def unsolved() -> Iterator[Path]:
    """A workbook whose exercises are untouched, so that a run neither meets nor changes anybody's answers."""
    with scratch_workbook(WORKBOOK, "exercises") as root:
        yield root


def execute(notebook: Notebook, code: str) -> None:
    """Run code in the notebook's kernel without a cell."""
    run = "code => window.testPanel.sessionContext.session.kernel.requestExecute({code, silent: true}).done"
    notebook.page.evaluate(f"async code => {{ await ({run})(code); }}", code)


@pages
def test_reads_well_before_anything_is_run(path: Path, lab: Lab) -> None:
    shutil.copy(path, lab.folder / path.name)
    with lab.open(path.name, theme="JupyterLab Dark") as notebook:
        assert all(output["output_type"] != "error" for outputs in notebook.outputs() for output in outputs)
        shown = notebook.shown()
        assert shown["images"] >= 1 and shown["broken"] == 0
        assert notebook.complaints == []


@pages
def test_all_cells_run_in_the_browser(path: Path, lab: Lab, unsolved: Path, default_model_dir: Path) -> None:
    shutil.copy(path, lab.folder / path.name)
    with lab.open(path.name) as notebook:
        execute(notebook, f"import os; os.environ['NANOVLLM_WORKBOOK'] = {str(unsolved)!r}")
        notebook.run(wait=SECONDS)
        notebook.page.wait_for_timeout(1000)
        errors = [o["ename"] for outputs in notebook.outputs() for o in outputs if o["output_type"] == "error"]
        shown = notebook.shown()
        assert errors == []
        assert shown["images"] >= 1 and shown["broken"] == 0
        assert notebook.complaints == []
        notebook.shot(path.stem)
