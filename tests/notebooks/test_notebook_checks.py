"""What the notebook checks must find, each tried on a page that has exactly that fault; and what tidying leaves."""

import base64
from copy import deepcopy
from pathlib import Path
from typing import Any

import nbformat
import pytest

from nanovllm.workbook import notebooks
from nanovllm.workbook.catalogue import Workbook
from nanovllm.workbook.page import exercise_card, fingerprint, show_source

WORKBOOK = Workbook.find()
CHAPTER = WORKBOOK.chapter("4")

GOAL = """# 4 · A chapter

> **Goal.** Something. **Minutes:** 10. **Needs:** nothing."""

PROSE = [
    "## 1. Blocks, worked by hand",
    "### Exercise 4.1",
    "## Plug your version in",
    "## An experiment",
    "## Check yourself",
    "## Takeaways\n\n## What a production engine does differently\n\n## Reading",
]

CODE = [
    "engine_map(4)",
    'first = predict("How many?", my_answer=None)',
    'first.compare(1)\nsecond = predict("Which?", my_answer=None)',
    "second.compare(2)",
    'show_source("Scheduler.schedule")',
    "with live(llm): pass",
    *(f'exercise_card("{e.id}")\ncheck("{e.id}")\nhint("{e.id}")' for e in CHAPTER.exercises),
    'use("4")',
    'quiz("4")',
]


def page() -> nbformat.NotebookNode:
    """A page with all of its parts, in a committed state: run, tidy and without outputs to speak of."""
    prose = [nbformat.v4.new_markdown_cell(text) for text in (GOAL, *PROSE)]
    notebook = nbformat.v4.new_notebook(cells=[*prose, *map(nbformat.v4.new_code_cell, CODE)])
    notebooks.tidy(notebook, {})
    for count, cell in enumerate((cell for cell in notebook.cells if cell.cell_type == "code"), 1):
        cell.execution_count = count
    return notebook


def page_faults(notebook: nbformat.NotebookNode, folder: Path) -> list[str]:
    return notebooks.check_page(notebook, folder / "04_a_chapter.ipynb", WORKBOOK)


def saved_faults(notebook: nbformat.NotebookNode) -> list[str]:
    return notebooks.check_saved(notebook, 1000)


def test_a_whole_page_has_no_fault(tmp_path: Path) -> None:
    assert page_faults(page(), tmp_path) == []
    assert saved_faults(page()) == []


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ("# 4 · A chapter", "# A chapter", "title"),
        ("**Goal.**", "Aim:", "goal"),
        ("**Minutes:** 10.", "", "minutes"),
        ("**Needs:** nothing.", "", "needs"),
        ("worked by hand", "in theory", "worked by hand"),
        ("### Exercise 4.1", "### Now you", "exercise"),
        ("## Plug your version in", "## Go", "plug your version in"),
        ("## An experiment", "## Go", "experiment"),
        ("## Check yourself", "## Go", "check yourself"),
        ("## Takeaways", "## End", "takeaways"),
        ("production engine", "big one", "production engine"),
        ("## Reading", "## Links", "reading"),
    ],
)
def test_a_missing_part_of_the_prose_is_found(old: str, new: str, says: str, tmp_path: Path) -> None:
    notebook = page()
    assert any(old in cell.source for cell in notebook.cells)
    for cell in notebook.cells:
        cell.source = cell.source.replace(old, new)
    assert any(says in fault for fault in page_faults(notebook, tmp_path))


@pytest.mark.parametrize(
    ("call", "says"),
    [
        ("engine_map(4)", "engine_map"),
        ("second = predict", "predictions"),
        ("second.compare(2)", "never compared"),
        ("show_source(", "show_source"),
        ("live(llm)", "view"),
        ('check("4.3")', "4.3"),
        ('hint("4.3")', "4.3"),
        ('exercise_card("4.3")', "4.3"),
        ('use("4")', "use"),
        ('quiz("4")', "quiz"),
    ],
)
def test_a_missing_call_is_found(call: str, says: str, tmp_path: Path) -> None:
    notebook = page()
    assert any(call in cell.source for cell in notebook.cells)
    for cell in notebook.cells:
        lines = cell.source.splitlines()
        cell.source = "\n".join("pass" if call in line else line for line in lines)
    assert any(says in fault for fault in page_faults(notebook, tmp_path))


def test_a_link_to_nothing_is_found(tmp_path: Path) -> None:
    notebook = page()
    (tmp_path / "there.ipynb").touch()
    notebook.cells[1].source += "\n[a](there.ipynb) [b](there.ipynb#2) [c](https://example.org/x) `[d](code)`"
    assert page_faults(notebook, tmp_path) == []
    notebook.cells[1].source += "\n[e](gone.ipynb)"
    assert page_faults(notebook, tmp_path) == ["the link 'gone.ipynb' leads to nothing"]


def test_pasted_engine_code_is_found(tmp_path: Path) -> None:
    notebook = page()
    source = repr(show_source("Scheduler.postprocess"))
    notebook.cells[1].source += f"\n```python\n{source}\n```"
    assert any("lines of the package" in fault for fault in page_faults(notebook, tmp_path))


# -- outputs


def with_output(**data: Any) -> nbformat.NotebookNode:
    notebook = page()
    cell = next(cell for cell in notebook.cells if cell.cell_type == "code")
    kind = data.pop("output_type", "display_data")
    metadata = data.pop("metadata", {})
    fields = data if kind != "display_data" else {"data": data, "metadata": metadata}
    cell.outputs = [nbformat.v4.new_output(kind, **fields)]
    return notebook


PICTURE = base64.b64encode(b"picture").decode()


@pytest.mark.parametrize(
    ("data", "says"),
    [
        ({"output_type": "error", "ename": "KeyError", "evalue": "x", "traceback": []}, "KeyError"),
        ({"output_type": "stream", "name": "stdout", "text": "Traceback (most recent call last):\n"}, "traceback"),
        ({"output_type": "stream", "name": "stderr", "text": "something is deprecated"}, "stderr"),
        ({"output_type": "stream", "name": "stdout", "text": f"{Path.home()}/model"}, "names a folder"),
        ({notebooks.WIDGET_VIEW: {}, "text/plain": "a view"}, "widget"),
        ({"text/plain": "x", "text/html": "<script>1</script>"}, "script"),
        ({"image/png": PICTURE, "text/plain": " "}, "without words"),
    ],
)
def test_a_bad_output_is_found(data: dict[str, Any], says: str) -> None:
    assert any(says in fault for fault in saved_faults(with_output(**data)))


@pytest.mark.parametrize(
    "data",
    [
        {"output_type": "stream", "name": "stdout", "text": "hello"},
        {"output_type": "stream", "name": "stderr", "text": "Generating: 100%|████| 4/4"},
        {"image/png": PICTURE, "text/plain": "A picture."},
        {"text/plain": "x", "text/html": "<table></table>"},
    ],
)
def test_a_good_output_is_left_alone(data: dict[str, Any]) -> None:
    assert saved_faults(with_output(**data)) == []


def test_source_that_has_changed_since_is_found() -> None:
    data, metadata = show_source("Scheduler.schedule", "LLM")._repr_mimebundle_()
    assert saved_faults(with_output(**data, metadata=deepcopy(metadata))) == []
    first = next(iter(metadata["nanovllm"]))
    metadata["nanovllm"][first] = fingerprint("what it was")
    assert any(
        "Scheduler.schedule as it was" in fault for fault in saved_faults(with_output(**data, metadata=metadata))
    )


def test_code_that_has_changed_since_the_run_is_found() -> None:
    notebook = page()
    notebook.cells[-1].source = 'quiz("3")'
    assert any("not from this code" in fault for fault in saved_faults(notebook))


def test_cells_run_out_of_order_are_found() -> None:
    notebook = page()
    notebook.cells[-1].execution_count = 99
    assert any("run as number 99" in fault for fault in saved_faults(notebook))


def test_size_and_metadata_are_watched() -> None:
    notebook = page()
    assert any("bytes" in fault for fault in notebooks.check_saved(notebook, 2_000_000))
    notebook.metadata["widgets"] = {}
    assert any("metadata" in fault for fault in saved_faults(notebook))


# -- tidying


def test_tidying_twice_changes_nothing() -> None:
    notebook = page()
    once = nbformat.writes(notebook)
    notebooks.tidy(notebook, {})
    for count, cell in enumerate((cell for cell in notebook.cells if cell.cell_type == "code"), 1):
        cell.execution_count = count
    assert nbformat.writes(notebook) == once


def test_ids_are_unique_and_follow_from_the_text() -> None:
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_markdown_cell("same") for _ in range(3)])
    notebooks.tidy(notebook, {})
    ids = [cell.id for cell in notebook.cells]
    assert len(set(ids)) == 3
    again = nbformat.v4.new_notebook(cells=[nbformat.v4.new_markdown_cell("same") for _ in range(3)])
    notebooks.tidy(again, {})
    assert [cell.id for cell in again.cells] == ids


def test_outputs_lose_paths_addresses_and_overwritten_text() -> None:
    notebook = with_output(
        output_type="stream", name="stderr", text="  0%|  |\r 50%|= |\r100%|==|\nin /some/where/x at 0x7f00deadbeef\n"
    )
    notebooks.tidy(notebook, {"/some/where": "~"})
    output = next(cell for cell in notebook.cells if cell.cell_type == "code").outputs[0]
    assert output.text == "100%|==|\nin ~/x at 0x…\n"


def test_a_widget_gives_way_to_the_still_form_beside_it() -> None:
    view = {"model_id": "1", "version_major": 2, "version_minor": 0}
    for still in ({"image/png": PICTURE}, {"text/html": "<pre>quiz</pre>"}):
        notebook = with_output(**{notebooks.WIDGET_VIEW: view, "text/plain": "a quiz", **still})
        notebooks.tidy(notebook, {})
        assert saved_faults(notebook) == []


def test_streams_cut_at_random_are_joined() -> None:
    pieces = [nbformat.v4.new_output("stream", name="stdout", text=text) for text in ("a", "b\n", "c")]
    other = nbformat.v4.new_output("stream", name="stderr", text="d")
    joined = notebooks.joined_streams([*pieces, other])
    assert [output.text for output in joined] == ["ab\nc", "d"]


def test_a_card_shown_on_a_page_is_no_pasted_code(tmp_path: Path) -> None:
    notebook = page()
    notebook.cells[1].source += "\n" + repr(exercise_card("4.1"))
    assert page_faults(notebook, tmp_path) == []


def test_a_saved_card_says_what_the_exercise_says_today() -> None:
    now, then = (with_output(**{"text/plain": repr(exercise_card("4.1")) + more}) for more in ("", "and an old line"))
    for notebook in (now, then):
        notebook.cells = [cell for cell in notebook.cells if cell.get("outputs")]
        notebook.cells[0].source = 'exercise_card("4.1")'
    assert list(notebooks.check_cards(now, WORKBOOK)) == []
    assert list(notebooks.check_cards(then, WORKBOOK)) == ["shows exercise 4.1 as it was, not as it is"]
