"""What `make lab` starts: its pages link to the exercises, which JupyterLab shows only below its own root."""

import json
import os
import shutil
import signal
import socket
import subprocess
import time
from contextlib import suppress
from pathlib import Path
from typing import Any
from urllib.error import URLError
from urllib.request import urlopen

import pytest

pytest.importorskip("jupyterlab")
pytestmark = pytest.mark.skipif(shutil.which("make") is None, reason="needs make")
ROOT = Path(__file__).parents[2]


def test_the_first_notebook_is_named_and_the_exercises_can_be_reached(tmp_path: Path) -> None:
    # Below `make test` make would also say which directory it enters.
    command = ["make", "--no-print-directory", "-n", "-o", "model", "lab"]
    recipe = subprocess.check_output(command, cwd=ROOT, text=True)
    assert "/lab/tree/notebooks/00_start_here.ipynb" in recipe
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    own = {name: str(tmp_path) for name in ("JUPYTER_CONFIG_DIR", "JUPYTER_RUNTIME_DIR", "JUPYTER_DATA_DIR")}
    server = subprocess.Popen(
        f"exec {recipe.strip()} --no-browser --ServerApp.port={port} --ServerApp.port_retries=0", shell=True,
        cwd=ROOT, env=os.environ | own | {"JUPYTER_TOKEN": "secret"}, start_new_session=True,
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip

    def contents(path: str) -> Any:
        with urlopen(f"http://127.0.0.1:{port}/api/contents/{path}?token=secret&content=0") as reply:
            return json.load(reply)

    try:
        deadline = time.monotonic() + 60
        while True:
            try:
                contents("")
                break
            except (URLError, ConnectionError):
                assert time.monotonic() < deadline and server.poll() is None, "the server does not answer"
                time.sleep(0.2)
        for path in ("notebooks/00_start_here.ipynb", "exercises/ch02_config_and_generate.py", "nanovllm/llm.py"):
            assert contents(path)["path"] == path
    finally:
        with suppress(ProcessLookupError):  # it ended by itself
            os.killpg(server.pid, signal.SIGKILL)
        server.wait()
