"""Engines of several ranks on tiny models, and what they may leave behind."""

import os
from pathlib import Path
from typing import Any

from nanovllm import LLM, SamplingParams
from nanovllm.engine.parts import Parts

PROMPTS = [[5, 6, 7, 8], [9] * 40, list(range(20, 130)), [1]]


def build(path: Path, size: int = 2, parts: dict[str, Any] | None = None, **options: Any) -> LLM:
    """A float32 engine on the CPU; `parts` are names in faulty.py."""
    settings: dict[str, Any] = {
        "dtype": "float32", "device": "cpu", "attention_backend": "torch", "kvcache_block_size": 16,
        "num_kvcache_blocks": 64, "max_model_len": 256, "seed": 0, "tensor_parallel_size": size,
    }  # fmt: skip
    return LLM(str(path), parts=Parts(parts), **{**settings, **options})


def cold_tokens(llm: LLM, prompts: list[Any] = PROMPTS, max_tokens: int = 12) -> list[list[int]]:
    """What the engine generates at near-zero temperature."""
    params = SamplingParams(temperature=1e-6, max_tokens=max_tokens, ignore_eos=True)
    return [output["token_ids"] for output in llm.generate(prompts, params, use_tqdm=False)]


def faulty(name: str) -> str:
    """A replacement from faulty.py, in the form that travels."""
    return f"{Path(__file__).with_name('faulty.py')}::{name}"


def is_running(pid: int) -> bool:
    """Whether a process exists and is no zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def holdings() -> dict[str, Any]:
    """What this process holds that an engine could leave behind. (The resource tracker, which stays, is not in it.)"""
    me = os.getpid()
    children = {
        int(pid) for pid in os.listdir("/proc")
        if pid.isdigit() and parent_of(int(pid)) == me and "resource_tracker" not in command_of(int(pid))
    }  # fmt: skip
    links = [link_of(fd) for fd in os.listdir("/proc/self/fd")]
    return {
        "children": children,
        "shared memory": named_shared_memory(),
        "sockets": sum(link.startswith("socket:") for link in links),
        "files": len(links),
    }


def named_shared_memory() -> set[str]:
    """Names in /dev/shm, but for what a process that is none of ours uses: tests running beside these, a browser."""
    names = set(os.listdir("/dev/shm"))  # first: what somebody makes after it does not count
    pids = {int(pid) for pid in os.listdir("/proc") if pid.isdigit()}
    others = [pid for pid in pids if not descends_from(pid, os.getpid())]
    theirs = {Path(line).name for pid in others for line in mapped_shared_memory(pid)}
    return {name for name in names if name not in theirs and "chromium" not in name}


def descends_from(pid: int, ancestor: int) -> bool:
    while pid and pid != ancestor:
        pid = parent_of(pid)
    return pid == ancestor


def mapped_shared_memory(pid: int) -> list[str]:
    """Paths under /dev/shm that a process has in its address space."""
    try:
        maps = Path(f"/proc/{pid}/maps").read_text()
    except OSError:
        return []
    return [line.split(maxsplit=5)[5] for line in maps.splitlines() if "/dev/shm/" in line]


def parent_of(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    except OSError:
        return 0


def command_of(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text()
    except OSError:
        return ""


def link_of(fd: str) -> str:
    try:
        return os.readlink(f"/proc/self/fd/{fd}")
    except OSError:
        return ""
