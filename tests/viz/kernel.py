"""A real Jupyter kernel without a browser: runs cells, and keeps their outputs as a notebook would."""

import json
import queue
import threading
from collections.abc import Callable
from pathlib import Path
from time import monotonic
from typing import Any, Self

ROOT = Path(__file__).parents[2]
PNG, TEXT, VIEW = "image/png", "text/plain", "application/vnd.jupyter.widget-view+json"

SETUP = """
import gc, json
from ipywidgets.widgets.widget import _instances
from nanovllm.sampling_params import SamplingParams
from nanovllm.viz import *
from tests.viz.toy import ToyEngine, prompts_like_chats
llm = ToyEngine(step_seconds=0.002)
prompts, params = prompts_like_chats(8), SamplingParams(max_tokens=30)

def health():
    manager = llm.scheduler.block_manager
    used = sum(block.ref_count for block in manager.blocks)
    print(json.dumps(dict(hooks=len(llm.hooks), widgets=len(_instances), idle=llm.is_finished(), used=used,
                          free=manager.num_free_blocks, steps=llm.step_count)))
"""


class Kernel:
    """`run` returns the outputs of one cell, display updates applied as a front end does."""

    def __init__(self, python: str | None = None, env: dict[str, str] | None = None) -> None:
        import os

        from jupyter_client.manager import KernelManager

        self.manager = KernelManager(kernel_name="python3")
        if python is not None:
            self.manager.kernel_spec.argv[0] = python
        paths = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
        self.manager.start_kernel(env={**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1", **(env or {})})
        self.client = self.manager.client()
        self.client.start_channels()
        self.client.wait_for_ready(timeout=60)
        self.by_display_id: dict[str, list[dict[str, Any]]] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.client.stop_channels()
        self.manager.shutdown_kernel(now=True)

    def run(self, code: str, interrupt_after: float | None = None, timeout: float = 60.0) -> list[dict[str, Any]]:
        """Run a cell to its end; `interrupt_after` seconds SIGINT comes, as from ■."""
        outputs: list[dict[str, Any]] = []
        timer = None
        sent = self.client.execute(code, store_history=True)
        if interrupt_after is not None:
            timer = threading.Timer(interrupt_after, self.manager.interrupt_kernel)
            timer.start()
        end = monotonic() + timeout
        while True:
            message = self.client.get_iopub_msg(timeout=max(0.1, end - monotonic()))
            mine = message["parent_header"].get("msg_id") == sent
            if message["msg_type"] == "status" and mine and message["content"]["execution_state"] == "idle":
                break
            self.take(message, outputs if mine else None)
        if timer is not None:
            timer.join()
        return outputs

    def listen(self, seconds: float) -> None:
        """Let the kernel go on by itself, and apply what it sends."""
        end = monotonic() + seconds
        while monotonic() < end:
            try:
                self.take(self.client.get_iopub_msg(timeout=0.1), None)
            except queue.Empty:
                continue

    def wait(self, is_done: Callable[[], Any], seconds: float = 30.0) -> None:
        """Listen until something holds. Raises TimeoutError."""
        end = monotonic() + seconds
        while not is_done():
            if monotonic() > end:
                raise TimeoutError(f"not within {seconds} s")
            self.listen(0.05)

    def take(self, message: dict[str, Any], outputs: list[dict[str, Any]] | None) -> None:
        kind, content = message["msg_type"], message["content"]
        display_id = content.get("transient", {}).get("display_id")
        if kind == "update_display_data":
            for output in self.by_display_id.get(display_id, []):
                output["data"] = content["data"]
        elif kind in ("display_data", "execute_result", "stream", "error") and outputs is not None:
            output = {"kind": kind, **content}
            if kind == "stream" and outputs and outputs[-1].get("name") == content["name"]:
                outputs[-1]["text"] += content["text"]  # one print may come in two messages
                return
            outputs.append(output)
            if display_id:
                self.by_display_id.setdefault(display_id, []).append(output)

    def health(self) -> dict[str, Any]:
        """Of the engine `llm` that SETUP made, and of the widgets."""
        outputs = self.run("health()")
        assert [output["kind"] for output in outputs] == ["stream"], outputs
        state: dict[str, Any] = json.loads(outputs[0]["text"])
        return state


def pictures(outputs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [output["data"] for output in outputs if PNG in output.get("data", {})]


def views(outputs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [output["data"] for output in outputs if VIEW in output.get("data", {})]


def errors(outputs: list[dict[str, Any]]) -> list[str]:
    return [output["ename"] for output in outputs if output["kind"] == "error"]
