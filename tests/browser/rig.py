"""A real JupyterLab under headless Chromium, for tests: open a notebook, run it, see what a person would see.

Needs only a Chromium on the PATH (or named in CHROMIUM) and Playwright's Python client; no browser is downloaded.
Everything that the server and the browser write lies in one temporary folder.
"""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from contextlib import suppress
from pathlib import Path
from secrets import token_hex
from typing import Any, Self

import nbformat

CHROMIUM = os.environ.get("CHROMIUM") or shutil.which("chromium") or shutil.which("chromium-browser")
SHOTS = os.environ.get("NANOVLLM_SHOTS")  # keep the screenshots in this folder
QUIET = ("favicon", "/lsp/status", "ResizeObserver loop", "React DevTools", "net::ERR_INTERNET_DISCONNECTED")
FLAGS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-background-networking",
    "--no-first-run",
]
# Every cell is drawn, wherever the page stands; no news, no pop-ups, no saving behind the test's back.
SETTINGS = {
    "apputils-extension/notification": '{"fetchNews": "false", "checkForUpdates": false, "doNotDisturbMode": true}',
    "docmanager-extension/plugin": '{"autosave": false}',
    "notebook-extension/tracker": '{"windowingMode": "none", "scrollPastEnd": false}',
}
IS_DONE = """() => window.testDone && window.testPanel.sessionContext.session?.kernel?.status === 'idle'
    && ![...document.querySelectorAll('.jp-InputPrompt')].some(p => p.textContent.includes('[*]'))"""


def write_notebook(path: Path, cells: list[str]) -> Path:
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells])
    notebook.metadata["kernelspec"] = {"name": "python3", "display_name": "Python 3", "language": "python"}
    nbformat.write(notebook, path)
    return path


class Lab:
    """One server and one browser for many notebooks, which lie in `folder`. Starts in about 3 s.

    kernel: the Python that runs the notebooks, if it is not the server's own.
    """

    def __init__(self, kernel: Path | None = None) -> None:
        self.home = Path(tempfile.mkdtemp(prefix="nanovllm-lab-"))
        self.folder = self.home / "notebooks"
        self.folder.mkdir()
        self.token = token_hex(16)
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        for name, text in SETTINGS.items():
            path = self.home / "settings/@jupyterlab" / f"{name}.jupyterlab-settings"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        if kernel is not None:
            path = self.home / "data/kernels/python3/kernel.json"
            path.parent.mkdir(parents=True)
            argv = [str(kernel), "-m", "ipykernel_launcher", "-f", "{connection_file}"]
            path.write_text(json.dumps({"argv": argv, "display_name": "Python 3", "language": "python"}))
        folders = {"CONFIG_DIR": "config", "RUNTIME_DIR": "runtime", "DATA_DIR": "data"}
        own = {f"JUPYTER_{name}": str(self.home / folder) for name, folder in folders.items()}
        own |= {"JUPYTERLAB_SETTINGS_DIR": str(self.home / "settings"), "IPYTHONDIR": str(self.home / "ipython"),
                "JUPYTERLAB_WORKSPACES_DIR": str(self.home / "workspaces"), "OMP_NUM_THREADS": "1",
                "PYTHONPATH": str(Path(__file__).parents[2]),
                "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}  # fmt: skip
        command = [sys.executable, "-m", "jupyterlab", "--no-browser", "--allow-root", "--expose-app-in-browser",
                   "--ServerApp.ip=127.0.0.1", f"--ServerApp.port={self.port}", "--ServerApp.port_retries=0",
                   f"--IdentityProvider.token={self.token}", f"--ServerApp.root_dir={self.folder}"]  # fmt: skip
        with open(self.home / "server.log", "wb") as log:
            environment = {**os.environ, **own}
            self.server = subprocess.Popen(command, stdout=log, stderr=log, env=environment, start_new_session=True)

    def __enter__(self) -> Self:
        from playwright.sync_api import sync_playwright

        deadline = time.monotonic() + 60
        while True:
            with suppress(OSError):
                urllib.request.urlopen(f"http://127.0.0.1:{self.port}/api/status?token={self.token}", timeout=2).close()
                break
            if self.server.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError((self.home / "server.log").read_text()[-2000:])
            time.sleep(0.1)
        self.playwright = sync_playwright().start()
        self.browser = self.playwright.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.browser.close()
        self.playwright.stop()
        self.server.send_signal(signal.SIGTERM)
        try:
            self.server.wait(10)
        except subprocess.TimeoutExpired:
            os.killpg(self.server.pid, signal.SIGKILL)
            self.server.wait(5)
        shutil.rmtree(self.home, ignore_errors=True)

    def open(self, name: str, *, theme: str = "JupyterLab Light", width: int = 1280) -> "Notebook":
        path = self.home / "settings/@jupyterlab/apputils-extension/themes.jupyterlab-settings"
        path.write_text(f'{{"theme": "{theme}"}}')
        return Notebook(self, name, width)


class Notebook:
    """A notebook in a browser window of its own. `page` is Playwright's, for clicks and keys."""

    def __init__(self, lab: Lab, name: str, width: int) -> None:
        self.path = lab.folder / name
        self.complaints: list[str] = []
        self.context = lab.browser.new_context(viewport={"width": width, "height": 1400}, reduced_motion="reduce")
        self.page = self.context.new_page()
        self.page.on("console", self._hear)
        self.page.on("pageerror", lambda error: self.complaints.append(f"page: {error}"))
        address = f"http://127.0.0.1:{lab.port}/doc/tree/{name}?reset&token={lab.token}"
        self.page.goto(address, wait_until="domcontentloaded")
        self.page.wait_for_function("() => window.jupyterapp?.shell?.currentWidget?.sessionContext", timeout=60_000)
        self.page.evaluate("""async () => {
            await window.jupyterapp.restored;
            const panel = window.testPanel = window.jupyterapp.shell.currentWidget;
            await panel.revealed; await panel.context.ready; await panel.sessionContext.ready;
            window.testDone = true }""")
        self.page.wait_for_function(IS_DONE, timeout=60_000)

    def _hear(self, message: Any) -> None:
        line = f"{message.text} @ {(message.location or {}).get('url', '')}"
        if message.type == "error" and not any(word in line for word in QUIET):
            self.complaints.append(f"console: {line}")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        with suppress(Exception):
            self.page.evaluate("() => window.testPanel.sessionContext.shutdown()")
        self.context.close()

    def run(self, cell: int | None = None, *, wait: float | None = 60.0) -> None:
        """Run one cell, or all; wait for the end at most `wait` seconds, or not at all."""
        self.page.evaluate("""cell => {
            window.testDone = false;
            if (cell !== null) window.testPanel.content.activeCellIndex = cell;
            const name = cell === null ? 'notebook:run-all-cells' : 'notebook:run-cell';
            window.jupyterapp.commands.execute(name).finally(() => { window.testDone = true }); }""", cell)  # fmt: skip
        if wait is not None:
            self.wait(wait)

    def wait(self, seconds: float = 60.0) -> None:
        """A kernel calls itself idle in the middle of a run too: so also no pending cell, and the command's own end."""
        self.page.wait_for_function(IS_DONE, timeout=seconds * 1000)

    def interrupt(self) -> None:
        self.page.evaluate("() => window.testPanel.sessionContext.session.kernel.interrupt()")

    def save(self) -> Any:
        self.page.evaluate("() => window.testPanel.context.save()")
        return nbformat.read(self.path, as_version=4)

    def outputs(self) -> list[list[dict[str, Any]]]:
        cells = self.page.evaluate("() => window.testPanel.content.model.toJSON().cells.map(c => c.outputs || [])")
        return list(cells)

    def shown(self) -> dict[str, int]:
        """What a person sees below the cells: pictures, live canvases, and outputs that say they are broken."""
        counts = self.page.evaluate("""() => {
            const all = s => [...document.querySelectorAll('.jp-OutputArea-output ' + s)];
            const texts = [...document.querySelectorAll('.jp-OutputArea-output')].map(e => e.textContent);
            return { images: all('img').filter(e => e.complete && e.naturalWidth > 50).length,
                     canvases: all('canvas.nv-canvas').filter(e => e.clientWidth > 50).length,
                     broken: texts.filter(t => /Error displaying widget|model not found/i.test(t)).length } }""")
        return dict(counts)

    def shot(self, name: str) -> None:
        if SHOTS:
            self.page.screenshot(path=str(Path(SHOTS) / f"{name}.png"))
