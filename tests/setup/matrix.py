"""The install matrix: the suite on the oldest and the newest versions that pyproject.toml admits.

    python tests/setup/matrix.py                          every row that this machine can try
    python tests/setup/matrix.py --rows oldest --tests tests/models tests/engine
    python tests/setup/matrix.py --set torch==2.13.0      one version everywhere, such as one that is at hand

Each row is an environment of its own under --folder, which stays, so that a second run starts at once. A row whose
Python is missing, or whose packages cannot be had, is told and not counted as failed. Prints a table in Markdown; exits
with 1 if a row failed. `NANOVLLM_MATRIX=1 make test-slow` runs it too.
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import tomllib
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TESTS = ("tests/engine", "tests/models", "tests/layers", "tests/attention", "tests/faults", "tests/viz")
SHOWN = ("torch", "transformers", "numpy")


@dataclass(frozen=True)
class Row:
    """One environment. oldest: every direct dependency at its lower bound; else the newest that fits."""

    name: str
    python: str
    oldest: bool


ROWS = (
    Row("oldest", "3.11", True),
    Row("newest", "3.11", False),
    Row("newest-3.12", "3.12", False),
    Row("newest-3.13", "3.13", False),
)


def requirements(oldest: bool, settings: list[str]) -> list[str]:
    """What pyproject.toml wants, without markers' losers; lower bounds made exact for the oldest row."""
    table = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    wanted = [*table["dependencies"], *table["optional-dependencies"]["test"]]
    fixed = {name_of(each): each for each in settings}
    found = []
    for requirement in wanted:
        name = name_of(requirement)
        if name in fixed:
            requirement = fixed[name]
        elif oldest:
            # "numpy>=1.26" -> "numpy~=1.26.0": the first minor version, with its bug fixes.
            requirement = re.sub(r">=(\d+\.\d+)(\.\d+)?(?=$|;)", lambda m: f"~={m[1]}{m[2] or '.0'}", requirement)
            requirement = re.sub(r">=(\d+)(?=$|;)", r"~=\1.0", requirement)
        found.append(requirement)
    return found


def name_of(requirement: str) -> str:
    match = re.match(r"[\w.-]+", requirement)
    assert match is not None, f"{requirement!r} is no requirement"
    return match[0].lower().replace("_", "-")


def interpreter(version: str) -> str | None:
    """A Python of that version: this one, one on the path, or one of pyenv's."""
    if "{}.{}".format(*sys.version_info) == version:
        return sys.executable
    if found := shutil.which(f"python{version}"):
        return found
    home = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"))
    candidates = sorted(home.glob(f"versions/{version}.*/bin/python"))
    return str(candidates[-1]) if candidates else None


def run(command: list[str], log: Path) -> int:
    """Run, with all output at the end of `log`."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    with log.open("ab") as file:
        return subprocess.run(command, cwd=ROOT, stdout=file, stderr=subprocess.STDOUT, env=environment).returncode


def try_row(row: Row, folder: Path, tests: list[str], settings: list[str]) -> tuple[str, str]:
    """(versions, outcome) of a row."""
    python = interpreter(row.python)
    if python is None:
        return "", f"not tried: no Python {row.python} here"
    place, log = folder / row.name, folder / f"{row.name}.log"
    own = place / "bin" / "python"
    stamp = place / ".installed"
    wanted = "\n".join(requirements(row.oldest, settings))
    if not stamp.exists() or stamp.read_text() != wanted:
        subprocess.run([python, "-m", "venv", "--clear", str(place)], check=True)
        if run([str(own), "-m", "pip", "install", "--quiet", *wanted.split("\n")], log):
            return "", f"not tried: the packages cannot be had, see {log}"
        stamp.write_text(wanted)
    code = f"from importlib.metadata import version; print(*(n + ' ' + version(n) for n in {SHOWN!r}), sep=', ')"
    versions = subprocess.run([str(own), "-c", code], capture_output=True, text=True).stdout.strip()
    log.write_bytes(b"")
    status = run([str(own), "-m", "pytest", "-q", "-m", "not slow and not browser", *tests], log)
    last = log.read_text(errors="replace").strip().splitlines()[-1:]
    return versions, ("passed: " if status == 0 else "FAILED: ") + "".join(last).strip("= ")


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", nargs="+", choices=[row.name for row in ROWS], default=[row.name for row in ROWS])
    parser.add_argument("--tests", nargs="+", default=list(TESTS))
    parser.add_argument("--set", nargs="+", default=[], dest="settings", metavar="NAME==VERSION")
    default = os.environ.get("NANOVLLM_MATRIX_FOLDER", str(Path(tempfile.gettempdir()) / "nanovllm-matrix"))
    parser.add_argument("--folder", type=Path, default=Path(default))
    options = parser.parse_args(argv)
    options.folder.mkdir(parents=True, exist_ok=True)
    print("| row | Python | versions | outcome |\n|---|---|---|---|", flush=True)
    failed = False
    for row in ROWS:
        if row.name in options.rows:
            versions, outcome = try_row(row, options.folder, options.tests, options.settings)
            failed |= outcome.startswith("FAILED")
            print(f"| {row.name} | {row.python} | {versions} | {outcome} |", flush=True)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
