"""Every notebook from top to bottom: with nothing solved, with the answers in place, and twice in one kernel."""

import re
import resource
from copy import deepcopy
from pathlib import Path

import nbformat
import pytest

from nanovllm.workbook import notebooks
from nanovllm.workbook.catalogue import Workbook

WORKBOOK = Workbook.find()
PATHS = sorted((WORKBOOK.root / "notebooks").glob("[0-9][0-9]_*.ipynb"))
CPU_SECONDS = 4 * 60  # a page takes a minute on two cores at most; as much again for a machine with busy neighbours

pages = pytest.mark.parametrize("path", PATHS, ids=lambda path: path.stem)


def cpu_seconds() -> float:
    """Of all processes that were started here and have ended, kernels and what they started included."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def checked(notebook: nbformat.NotebookNode) -> dict[str, str]:
    """Exercise -> the text of its check."""
    found = {}
    for cell in notebook.cells:
        call = re.fullmatch(r'check\("(\d+\.\d+)"\)', cell.source.strip()) if cell.cell_type == "code" else None
        if call:
            found[call[1]] = "\n".join(str(output.get("data", {}).get("text/plain", "")) for output in cell.outputs)
    return found


@pages
def test_page_has_its_parts(path: Path) -> None:
    assert notebooks.check_page(nbformat.read(path, as_version=4), path, WORKBOOK) == []


@pytest.mark.timeout(600)
@pages
def test_runs_with_everything_unsolved(path: Path, default_model_dir: Path) -> None:
    before = cpu_seconds()
    notebook = notebooks.execute(path, WORKBOOK)
    assert cpu_seconds() - before < CPU_SECONDS
    assert notebooks.check_saved(notebook, len(nbformat.writes(notebook).encode())) == []
    for exercise, text in checked(notebook).items():
        assert "TODO" in text or "not run here" in text, f"check({exercise!r}) says {text!r}"


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pages
def test_runs_twice_in_one_kernel_with_the_answers_in_place(
    path: Path, default_model_dir: Path, tmp_path: Path
) -> None:
    notebook = nbformat.read(path, as_version=4)
    second = deepcopy(notebook.cells)
    for cell in second:
        cell.id += "-again"
    notebook.cells += second
    twice = tmp_path / path.name
    nbformat.write(notebook, twice)
    ran = notebooks.execute(twice, WORKBOOK, target="solutions")
    assert all(output.output_type != "error" for cell in ran.cells for output in cell.get("outputs", ()))
    halves = [nbformat.v4.new_notebook(cells=cells, metadata=ran.metadata) for cells in
              (ran.cells[: len(ran.cells) // 2], ran.cells[len(ran.cells) // 2 :])]  # fmt: skip
    assert notebooks.check_saved(halves[0], len(nbformat.writes(halves[0]).encode())) == []
    for half in halves:
        for exercise, text in checked(half).items():
            assert "failed" not in text and "TODO" not in text, f"check({exercise!r}) says {text!r}"
            assert "passed" in text or "not run here" in text, f"check({exercise!r}) says {text!r}"
