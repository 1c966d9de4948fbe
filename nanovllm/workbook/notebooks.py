"""Run the notebooks in place, and check them: ``python -m nanovllm.workbook.notebooks [--check] [NOTEBOOK ...]``.

The committed notebooks are the only copy of themselves. Running one executes it from top to bottom on the CPU with
fresh exercises, then writes it back with its outputs and without whatever would differ from run to run for no reason.
Each code cell remembers a hash of the source that its outputs came from. `--check` runs nothing: it says where code
and outputs have parted, what a page lacks, and what would read badly on a page that cannot run it.
"""

import argparse
import ast
import json
import os
import re
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import nbclient
import nbformat

from nanovllm.errors import NanoVLLMError
from nanovllm.workbook.catalogue import Workbook
from nanovllm.workbook.generate import stubs
from nanovllm.workbook.page import PACKAGE, exercise_card, fingerprint, source_text
from nanovllm.workbook.state import write_text

MAX_BYTES = 1_000_000
CELL_TIMEOUT = 300
WIDGET_VIEW = "application/vnd.jupyter.widget-view+json"
KERNEL = {"display_name": "Python 3 (ipykernel)", "language": "python", "name": "python3"}
# What stands in the headings of every chapter that has exercises, and what every page ends with.
EXERCISE_HEADINGS = ("worked by hand", "exercise", "plug your version in", "experiment", "check yourself")
PAGE_HEADINGS = ("takeaways", "production engine", "reading")
CODE_WIDTH = 120  # columns of a code cell: more are cut off in a window of 1,280 pixels
PASTED_LINES = 4  # so many lines in a row that also stand in the package are a copy of it


# -- running


def execute(path: Path, workbook: Workbook, target: str = "exercises") -> nbformat.NotebookNode:
    """Run a notebook from top to bottom, on the CPU and with fresh stubs (or the solutions) as its exercises.

    Returns it with tidy outputs; the file stays as it is. Raises `nbclient.exceptions.CellExecutionError`.
    """
    notebook = nbformat.read(path, as_version=4)
    with scratch_workbook(workbook, target) as root:
        client = nbclient.NotebookClient(
            notebook,
            timeout=CELL_TIMEOUT,
            kernel_name=KERNEL["name"],
            resources={"metadata": {"path": str(root / "notebooks")}},
            store_widget_state=False,
            record_timing=False,
            extra_arguments=["--log-level=ERROR"],  # no warning that the kernel listens on this machine's TCP ports
        )
        client.execute(env=kernel_environment(root))
        tidy(notebook, {str(root): "~/nanovllm", str(workbook.root): "~/nanovllm", str(Path.home()): "~"})
    return notebook


def kernel_environment(root: Path) -> dict[str, str]:
    """What a run depends on: no GPU, no network, still pictures instead of widgets, and the scratch workbook."""
    return {
        **os.environ,
        "CUDA_VISIBLE_DEVICES": "",
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "NANOVLLM_LIVE": "0",
        "NANOVLLM_WORKBOOK": str(root),
    }


@contextmanager
def scratch_workbook(workbook: Workbook, target: str) -> Iterator[Path]:
    """A root folder with the workbook's own files and unsolved exercises, so that a run touches nobody's answers."""
    with tempfile.TemporaryDirectory(prefix="nanovllm-") as folder:
        root = Path(folder).resolve()
        for name in ("solutions", "tests", "notebooks", "nanovllm", "pyproject.toml"):
            if (workbook.root / name).exists():
                (root / name).symlink_to(workbook.root / name)
        (root / "exercises").mkdir()
        for file, text in stubs(workbook).items():
            if target == "solutions":
                text = (workbook.solutions / file.name).read_text(encoding="utf-8")
            (root / "exercises" / file.name).write_text(text, encoding="utf-8")
        yield root


# -- tidying


def tidy(notebook: nbformat.NotebookNode, names: dict[str, str]) -> None:
    """Leave only what a reader needs: outputs whose texts name no folder of this machine, and stable metadata.

    names: what to write in the place of a folder's path.
    """
    version = notebook.metadata.get("language_info", {}).get("version", "3.11").rsplit(".", 1)[0]
    notebook.metadata = {"kernelspec": KERNEL, "language_info": {"name": "python", "version": version}}
    notebook.nbformat, notebook.nbformat_minor = 4, 5
    seen: Counter[str] = Counter()
    for cell in notebook.cells:
        cell.source = "\n".join(line.rstrip() for line in cell.source.strip("\n").split("\n"))
        base = fingerprint(f"{cell.cell_type}\n{cell.source}")[:10]
        seen[base] += 1
        cell.id = base if seen[base] == 1 else f"{base}-{seen[base]}"
        tags = cell.metadata.get("tags")
        cell.metadata = {"tags": tags} if tags else {}
        if cell.cell_type == "code":
            cell.metadata["nanovllm"] = {"ran": fingerprint(cell.source)}
            cell.outputs = [tidy_output(output, names) for output in joined_streams(cell.outputs)]


def joined_streams(outputs: list[Any]) -> list[Any]:
    """Neighbouring pieces of one stream as one piece: where a stream was cut depends on time."""
    joined: list[Any] = []
    for output in outputs:
        last = joined[-1] if joined else None
        if last is not None and output.output_type == last.output_type == "stream" and output.name == last.name:
            last.text += output.text
        else:
            joined.append(output)
    return joined


def tidy_output(output: Any, names: dict[str, str]) -> Any:
    """One output: terminal text as a terminal would show it, paths of this machine replaced."""
    if output.output_type == "stream":
        output.text = replaced("\n".join(last_writing(line) for line in output.text.split("\n")), names)
    data = output.get("data", {})
    if data.keys() & {"image/png", "text/html"}:
        data.pop(WIDGET_VIEW, None)  # the static form of the same says more than a widget without its kernel
    for mime, value in data.items():
        if isinstance(value, str) and not mime.startswith("image/"):
            data[mime] = replaced(value, names)
    return output


def last_writing(line: str) -> str:
    """What remains of a line in which carriage returns went back to its beginning, as progress bars do."""
    return next((part for part in reversed(line.split("\r")) if part.strip()), "")


def replaced(text: str, names: dict[str, str]) -> str:
    for path, name in names.items():
        text = text.replace(path, name)
    return re.sub(r"0x[0-9a-f]{8,}", "0x…", text)


# -- checking what a page says


def check_page(notebook: nbformat.NotebookNode, path: Path, workbook: Workbook) -> list[str]:
    """What the sources of a page lack or should not have; nothing about its outputs."""
    number = int(path.name[:2])
    code = [cell.source for cell in notebook.cells if cell.cell_type == "code"]
    prose = "\n\n".join(cell.source for cell in notebook.cells if cell.cell_type == "markdown")
    calls = [call for source in code for call in calls_in(source)]
    return [
        *check_anatomy(prose, number, workbook),
        *check_calls(calls, number, workbook),
        *check_links(prose, path.parent),
        *check_pasted(notebook),
        *(
            f"a line is too long to be seen whole: {line.strip()[:60]}…"
            for line in "\n".join(code).split("\n")
            if len(line) > CODE_WIDTH
        ),
    ]


def check_anatomy(prose: str, number: int, workbook: Workbook) -> Iterator[str]:
    """The parts of a page that are prose (design: goal, theory by hand, exercises, experiment, takeaways, reading)."""
    lines = prose.splitlines()
    if not re.match(rf"# {number} · \S", lines[0] if lines else ""):
        yield f"the first line is not a title of the form '# {number} · …'"
    card = prose.split("\n## ")[0].lower()
    for word in ("**goal", "minutes", "needs"):
        if word not in card:
            yield f"the goal card above the first section says nothing about {word.strip('*')!r}"
    headings = [line.lower() for line in lines if line.startswith("##")]
    has_exercises = any(chapter.number == str(number) for chapter in workbook.chapters)
    for wanted in (*(EXERCISE_HEADINGS if has_exercises else ()), *PAGE_HEADINGS):
        if not any(wanted in heading for heading in headings):
            yield f"no heading says {wanted!r}"


def calls_in(source: str) -> Iterator[tuple[str, str | None]]:
    """Name and first literal argument of every call in a code cell."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call):
            name = node.func.id if isinstance(node.func, ast.Name) else getattr(node.func, "attr", "")
            first = node.args[0] if node.args else None
            yield name, str(first.value) if isinstance(first, ast.Constant) else None


def check_calls(calls: list[tuple[str, str | None]], number: int, workbook: Workbook) -> Iterator[str]:
    """The parts of a page that are code: map, predictions, live source, views, exercise cards, quiz."""
    count = Counter(name for name, _ in calls)
    if ("engine_map", str(number)) not in calls:
        yield f"no engine_map({number})"
    if count["predict"] < 2:
        yield f"{count['predict']} predictions, at least 2 are wanted"
    if count["compare"] < count["predict"]:
        yield "a prediction is never compared with what happened"
    if not count["show_source"]:
        yield "no code is shown from the package (show_source)"
    if not any(name in ("live", "Player", "Dashboard", "Replay") or name.endswith("View") for name in count):
        yield "no view of the engine at work (live, Player, or a view of a Recorder)"
    for chapter in workbook.chapters:
        if chapter.number != str(number):
            continue
        for exercise in chapter.exercises:
            for name in ("exercise_card", "check", "hint"):
                if (name, exercise.id) not in calls:
                    yield f'exercise {exercise.id} has no {name}("{exercise.id}")'
        if chapter.exercises and not count["use"]:
            yield "the learner's code is never put into the engine (use)"
        if chapter.quiz and ("quiz", chapter.number) not in calls:
            yield f'no quiz("{chapter.number}")'


def check_links(prose: str, folder: Path) -> Iterator[str]:
    """Links to files beside the notebook that lead nowhere."""
    prose = re.sub(r"```.*?```|`[^`\n]*`", "", prose, flags=re.DOTALL)
    for target in re.findall(r"\]\(([^)\s]+)\)", prose):
        file = target.partition("#")[0]
        if file and not re.match(r"[a-z]+:", file) and not (folder / file).exists():
            yield f"the link {target!r} leads to nothing"


def check_pasted(notebook: nbformat.NotebookNode) -> Iterator[str]:
    """Lines of the package that were copied into a cell, where they would go stale."""
    package = {run for path in PACKAGE.rglob("*.py") for run in runs_of_lines(path.read_text(encoding="utf-8"))}
    for index, cell in enumerate(notebook.cells):
        if any(run in package for run in runs_of_lines(cell.source)):
            yield f"cell {index} holds lines of the package; show them with show_source"


def runs_of_lines(text: str) -> Iterator[tuple[str, ...]]:
    lines = [line.strip() for line in text.splitlines() if len(line.strip()) > 12 and not line.strip().startswith("#")]
    lines = [line for line in lines if not line.startswith(("from ", "import "))]
    return zip(*(lines[start:] for start in range(PASTED_LINES)), strict=False)


# -- checking what a saved page shows


def check_saved(notebook: nbformat.NotebookNode, size: int) -> list[str]:
    """What is wrong with the outputs of a saved notebook: stale, missing, broken, or nobody else's business."""
    found = []
    if size > MAX_BYTES:
        found.append(f"{size:,} bytes, the limit is {MAX_BYTES:,}")
    if set(notebook.metadata) - {"kernelspec", "language_info"} or notebook.metadata.get("kernelspec") != KERNEL:
        found.append("its metadata is not what a run leaves; run it with `make notebooks`")
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    for position, cell in enumerate(cells, 1):
        name = f"code cell {position} ({cell.source.splitlines()[0][:40] if cell.source else 'empty'})"
        if cell.metadata.get("nanovllm", {}).get("ran") != fingerprint(cell.source):
            found.append(f"{name}: its outputs are not from this code")
        if cell.execution_count != position:
            found.append(f"{name}: it was run as number {cell.execution_count}")
        found += [f"{name}: {fault}" for output in cell.outputs for fault in check_output(output)]
    return found


def check_output(output: Any) -> Iterator[str]:
    """What is wrong with one output."""
    if output.output_type == "error":
        yield f"ended with {output.ename}"
        return
    data = {"text/plain": output.text} if output.output_type == "stream" else output.get("data", {})
    words = "\n".join(value for mime, value in data.items() if isinstance(value, str) and not mime.startswith("image/"))
    if "Traceback (most recent call last)" in words:
        yield "shows a traceback"
    if str(Path.home()) + os.sep in words:
        yield "names a folder of the machine that it ran on"
    if output.output_type == "stream" and output.name == "stderr" and "%|" not in output.text:
        yield f"wrote to stderr: {output.text.strip()[:60]!r}"
    if WIDGET_VIEW in data:
        yield "leaves a widget, which nobody can see without its kernel"
    if "<script" in words:
        yield "brings a script, which most pages refuse to run"
    if any(mime.startswith("image/") for mime in data) and not str(data.get("text/plain", "")).strip():
        yield "is a picture without words"
    for asked, shown in (output.get("metadata", {}).get("nanovllm") or {}).items():
        try:
            _, source = source_text(*json.loads(asked))
        except NanoVLLMError:
            source = ""
        if fingerprint(source) != shown:
            yield f"shows {json.loads(asked)[0]} as it was, not as it is"


def check_cards(notebook: nbformat.NotebookNode, workbook: Workbook) -> Iterator[str]:
    """Exercises whose saved card is not what the card says today."""
    for cell in notebook.cells:
        for name, exercise in calls_in(cell.source) if cell.cell_type == "code" else ():
            if name == "exercise_card" and exercise is not None:
                card = repr(exercise_card(exercise, workbook))
                if all(output.get("data", {}).get("text/plain") != card for output in cell.outputs):
                    yield f"shows exercise {exercise} as it was, not as it is"


def check(path: Path, workbook: Workbook) -> list[str]:
    """Everything that is wrong with a committed notebook."""
    notebook = nbformat.read(path, as_version=4)
    saved = check_saved(notebook, path.stat().st_size)
    return [*check_page(notebook, path, workbook), *saved, *check_cards(notebook, workbook)]


# -- the command


def run(path: Path, workbook: Workbook) -> list[str]:
    """Execute a notebook, write it back, and check it."""
    started = time.perf_counter()
    try:
        notebook = execute(path, workbook)
    except nbclient.exceptions.CellExecutionError as error:
        return [f"a cell failed:\n{error}"]
    text = json.dumps(notebook, indent=1, ensure_ascii=False, sort_keys=True) + "\n"
    nbformat.validate(notebook)
    write_text(path, text)
    print(f"{path.name}: {time.perf_counter() - started:.0f} s, {len(text.encode()):,} bytes")
    return check(path, workbook)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m nanovllm.workbook.notebooks", description=__doc__)
    parser.add_argument("notebook", nargs="*", type=Path, help="files; all of notebooks/ if left out")
    parser.add_argument("--check", action="store_true", help="run nothing; exit 1 if something is wrong")
    args = parser.parse_args(argv)
    workbook = Workbook.find()
    faults = 0
    for path in args.notebook or sorted((workbook.root / "notebooks").glob("[0-9][0-9]_*.ipynb")):
        for fault in check(path, workbook) if args.check else run(path, workbook):
            print(f"{path.name}: {fault}")
            faults += 1
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
