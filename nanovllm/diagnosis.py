"""`nanovllm doctor`, and `nanovllm.doctor()` in a notebook: what this machine has, and what will run on it.

Only looks: it loads no model, reads nothing but what the system says of itself, and sends nothing anywhere.
"""

import argparse
import os
import platform
import shutil
from html import escape
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

from nanovllm import __version__
from nanovllm.attention import describe_backends
from nanovllm.layers.compiled import find_compiler
from nanovllm.paths import cache_home, default_model_path, is_model_folder, list_models
from nanovllm.worker.device import cpu_computes_bfloat16, select_device, select_dtype

PACKAGES = ("torch", "triton", "transformers", "flash-attn", "jupyterlab", "ipywidgets", "anywidget", "matplotlib")
GIB = 1 << 30
DEMO_MEMORY = 2 * GIB  # what `nanovllm demo` takes at its peak on a CPU, Python and torch included, with room to spare

Row = tuple[str, str]


class Report:
    """Sections of (name, finding) rows; prints as text and shows as a table in a notebook."""

    def __init__(self, sections: dict[str, list[Row]]) -> None:
        self.sections = sections

    def __repr__(self) -> str:
        width = max(len(name) for rows in self.sections.values() for name, _ in rows)
        blocks = [
            "\n".join([title, *(f"  {name:<{width}}  {finding}" for name, finding in rows)])
            for title, rows in self.sections.items()
        ]
        return "\n\n".join(blocks)

    def _repr_html_(self) -> str:
        left = 'style="text-align:left"'
        lines = []
        for title, rows in self.sections.items():
            lines.append(f'<tr><th colspan="2" {left}>{escape(title)}</th></tr>')
            for name, finding in rows:
                lines.append(f"<tr><td {left}>{escape(name)}</td><td {left}>{escape(finding)}</td></tr>")
        return f"<table>{''.join(lines)}</table>"


def doctor() -> Report:
    """Look at this machine and say what will and will not run on it."""
    device = select_device("auto")
    return Report(
        {
            "Versions": versions(),
            "Machine": machine(device),
            "Attention backends": [
                (name, f"{'yes' if usable else 'no'}: {reason}") for name, usable, reason in describe_backends(device)
            ],
            "Models": models(),
            "What runs here": abilities(device),
        }
    )


def main(argv: list[str]) -> int:
    """Print the report."""
    parser = argparse.ArgumentParser("nanovllm doctor", description="What this machine has, and what will run on it.")
    parser.parse_args(argv)
    print(doctor())
    return 0


def installed(package: str) -> str | None:
    """The version of an installed package, or None."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def versions() -> list[Row]:
    system = f"{platform.system()} {platform.release()} on {platform.machine()}"
    rows = [("nanovllm", __version__), ("Python", platform.python_version()), ("system", system)]
    return rows + [(package, installed(package) or "not installed") for package in PACKAGES]


def machine(device: torch.device) -> list[Row]:
    """Processors, memory, disk, and the number format that an engine would choose here."""
    threads = torch.get_num_threads()
    count = f"{threads} thread{'s' if threads != 1 else ''}"
    rows = [("CPU", f"{cpu_name()}, {os.cpu_count()} cores; torch uses {count}")]
    for number in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
        free, total = torch.cuda.mem_get_info(number)
        capability = ".".join(map(str, torch.cuda.get_device_capability(number)))
        name = f"{torch.cuda.get_device_name(number)}, compute capability {capability}"
        rows.append((f"GPU {number}", f"{name}, {free / GIB:.1f} of {total / GIB:.1f} GiB free"))
    if device.type == "cpu":
        rows.append(("GPU", "none that torch can use"))
    rows.append(("device", f"{device} is what LLM(...) takes here"))
    rows.append(("number format", number_format(device)))
    available, total_memory = memory()
    rows.append(("memory", f"{gib(available)} available of {gib(total_memory)}"))
    home = cache_home()
    rows.append(("disk", f"{gib(shutil.disk_usage(existing_parent(home)).free)} free for models in {home}"))
    return rows


def number_format(device: torch.device) -> str:
    """What `dtype="auto"` means here, and why."""
    dtype = str(select_dtype("auto", device, torch.bfloat16)).removeprefix("torch.")
    if device.type == "cuda":
        return f"{dtype} for a bfloat16 model"
    reason = "has" if cpu_computes_bfloat16() else "lacks"
    return f"{dtype}: this CPU {reason} instructions for bfloat16"


def models() -> list[Row]:
    here = list_models()
    rows = [(name, str(folder)) for name, folder in here.items()]
    if not is_model_folder(default_model_path()):
        rows.insert(0, ("default model", "not here yet; fetch it with: nanovllm model get"))
    return rows


def abilities(device: torch.device) -> list[Row]:
    """One line for each thing that depends on the machine."""
    gpus = torch.cuda.device_count() if device.type == "cuda" else 0
    available, _ = memory()
    short = available is not None and available < DEMO_MEMORY
    widgets = installed("jupyterlab") and installed("anywidget")
    distributed = torch.distributed.is_available()
    return [
        ("demo, notebooks", f"short of memory: {gib(DEMO_MEMORY)} are wanted" if short else "yes"),
        ("live views", "yes" if widgets else "no: they need jupyterlab and anywidget"),
        ("compiled steps on a CPU", compiled_steps()),
        ("CUDA graphs", "yes" if gpus else "no: they need an NVIDIA GPU; decoding runs eagerly"),
        ("tensor parallelism", tensor_parallelism(gpus) if distributed else "no: this torch has no torch.distributed"),
        ("Triton kernels", triton_kernels(gpus)),
        ("gpu tests", "yes" if gpus else "no: `pytest -m gpu` skips them here"),
    ]


def tensor_parallelism(gpus: int) -> str:
    if gpus > 1:
        return f"yes: up to {gpus} ranks, one a GPU"
    return "yes, to learn from: ranks are processes on the CPU (device='cpu'), which gains no speed"


def compiled_steps() -> str:
    compiler = find_compiler()
    if compiler is None:
        return "no: there is no C compiler (cc, gcc, clang); with one a CPU decodes about twice as fast"
    return f"yes: {compiler} builds them when the first engine is made"


def triton_kernels(gpus: int) -> str:
    if installed("triton") is None:
        return "no: there is no triton for this system; chapter 8's kernels can be read but not run"
    return "yes" if gpus else "in Triton's interpreter (TRITON_INTERPRET=1): right, but slow"


def cpu_name() -> str:
    """The processor's name where the system tells it."""
    info = Path("/proc/cpuinfo")
    if info.is_file():
        for line in info.read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def memory() -> tuple[int | None, int | None]:
    """Bytes of main memory: available, and in all; None where the system does not tell."""
    info = Path("/proc/meminfo")
    if info.is_file():
        sizes = dict(line.split(":", 1) for line in info.read_text(encoding="utf-8").splitlines() if ":" in line)
        kilobytes = {key: int(value.split()[0]) for key, value in sizes.items()}
        return kilobytes["MemAvailable"] * 1024, kilobytes["MemTotal"] * 1024
    try:
        return None, os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError, AttributeError):
        return None, None


def gib(size: int | None) -> str:
    return "an unknown amount" if size is None else f"{size / GIB:.1f} GiB"


def existing_parent(path: Path) -> Path:
    """The nearest folder on the way up that exists."""
    return next(folder for folder in (path, *path.parents) if folder.is_dir())
