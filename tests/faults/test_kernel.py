"""A Jupyter kernel: interrupted with ■, and restarted again and again with an engine alive; nothing accumulates."""

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from jupyter_client.manager import KernelManager

ROOT = Path(__file__).resolve().parents[2]
SETUP = """
import sys, os
sys.path.insert(0, {root!r})
from tests.faults.engines import *
llm = build({model!r})
llm.add_step_hook(lambda record: llm.snapshot())
print(len(llm.chat([{{"role": "user", "content": "the quick"}}], cold(3))["token_ids"]))
pieces = llm.stream("the lazy dog", cold(50))
next(pieces)
print(os.getpid(), *child_processes())
"""


@contextmanager
def kernel() -> Iterator[KernelManager]:
    manager = KernelManager(kernel_name="python3")
    manager.start_kernel(cwd=str(ROOT))
    try:
        yield manager
    finally:
        manager.shutdown_kernel(now=True)


def execute(manager: KernelManager, code: str, interrupt_after: float | None = None) -> tuple[str, str]:
    """What a cell prints, and the name of the error that it ends with."""
    client = manager.client()
    client.start_channels()
    try:
        client.wait_for_ready(timeout=120)
        message_id = client.execute(code)
        printed, error, deadline = "", "", time.monotonic() + 200
        while time.monotonic() < deadline:
            if interrupt_after is not None and "started" in printed:
                time.sleep(interrupt_after)
                manager.interrupt_kernel()
                interrupt_after = None
            message: dict[str, Any] = client.get_iopub_msg(timeout=200)
            if message["parent_header"].get("msg_id") != message_id:
                continue
            content = message["content"]
            if message["msg_type"] == "stream" and content["name"] == "stdout":
                printed += content["text"]
            elif message["msg_type"] == "error":
                error = content["ename"]
            elif message["msg_type"] == "status" and content["execution_state"] == "idle":
                return printed, error
        raise TimeoutError(code)
    finally:
        client.stop_channels()


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
        return Path(f"/proc/{pid}/stat").read_text().split()[2] != "Z"
    except (ProcessLookupError, FileNotFoundError):
        return False


def shared_memory() -> set[str]:
    here = os.listdir("/dev/shm") if Path("/dev/shm").is_dir() else []
    return {name for name in here if "chromium" not in name}  # a browser test may run at the same time


@pytest.mark.slow
@pytest.mark.timeout(3000)
def test_ten_restarts_with_an_engine_alive(tiny_model_dir: Path) -> None:
    code = SETUP.format(root=str(ROOT), model=str(tiny_model_dir))
    before = shared_memory()
    seen: list[int] = []
    with kernel() as manager:
        for number in range(10):
            printed, error = execute(manager, code)
            assert error == ""
            length, pid, *children = map(int, printed.split())
            assert length == 3 and len(children) == 1, "the engine works, with one helper for its chat template"
            assert not [old for old in seen if is_alive(old)], "a process of an earlier kernel is left"
            seen += [pid, *children]
            manager.restart_kernel(now=number % 2 == 0)  # now: by SIGKILL, else politely
    deadline = time.monotonic() + 10
    while any(map(is_alive, seen)) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not [pid for pid in seen if is_alive(pid)]
    assert shared_memory() <= before


@pytest.mark.slow
@pytest.mark.timeout(1000)
def test_an_interrupted_cell_costs_nothing(tiny_model_dir: Path) -> None:
    """The user's ■, as Jupyter sends it; then the next cell gets the right answer."""
    with kernel() as manager:
        _, error = execute(manager, SETUP.format(root=str(ROOT), model=str(tiny_model_dir)))
        assert error == ""
        expected, _ = execute(manager, "print(token_ids(llm.generate(PROMPTS, cold(5), use_tqdm=False)))")
        for delay in (0.0, 0.1, 0.4):
            busy = "print('started', flush=True)\nwhile True: llm.generate(PROMPTS, cold(100), use_tqdm=True)"
            assert execute(manager, busy, delay)[1] == "KeyboardInterrupt"
            answer, error = execute(manager, "print(token_ids(llm.generate(PROMPTS, cold(5), use_tqdm=False)))")
            assert (answer, error) == (expected, "")
        assert execute(manager, "pieces.close(); assert_whole(llm)")[1] == ""
