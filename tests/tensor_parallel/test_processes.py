"""Engines of two ranks in processes of their own: scripts with and without a guard, notebooks, and callers that die."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.tensor_parallel.helpers import is_running, named_shared_memory, parent_of

pytestmark = pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="looks into /proc")

ROOT = Path(__file__).parents[2]
ENGINE = """
from nanovllm import LLM, SamplingParams

def engine():
    return LLM({model!r}, tensor_parallel_size=2, device="cpu", dtype="float32", attention_backend="torch",
               kvcache_block_size=16, num_kvcache_blocks=64, max_model_len=256)

def tokens(llm, count=4):
    params = SamplingParams(temperature=1e-6, max_tokens=count, ignore_eos=True)
    return llm.generate([[1, 2, 3]], params, use_tqdm=False)[0]["token_ids"]
"""


@pytest.fixture
def running() -> Iterator[list[subprocess.Popen[str]]]:
    """Processes to end after the test, whatever happens in it."""
    started: list[subprocess.Popen[str]] = []
    yield started
    for process in started:
        process.kill()
        process.communicate()


def start(running: list[subprocess.Popen[str]], *command: str, **options: Any) -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [sys.executable, *command], cwd=ROOT, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}, **options,
    )  # fmt: skip
    running.append(process)
    return process


def write_script(folder: Path, model: Path, body: str) -> str:
    path = folder / "script.py"
    path.write_text(ENGINE.format(model=str(model)) + body, encoding="utf-8")
    return str(path)


def wait_until(condition: Any, seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if condition():
            return True
        time.sleep(0.05)
    return bool(condition())


def patience() -> float:
    """The promise is ten seconds, on a machine that does nothing else."""
    return 10 * max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1))


def child_pids(pid: int) -> list[int]:
    return [int(each) for each in os.listdir("/proc") if each.isdigit() and parent_of(int(each)) == pid]


def test_a_script_without_a_main_guard_is_told_to_add_one(
    tmp_path: Path, tiny_model_dir: Path, running: list[subprocess.Popen[str]]
) -> None:
    body = """
import time
started = time.monotonic()
try:
    llm = engine()
finally:
    print("seconds", time.monotonic() - started, flush=True)
"""
    process = start(running, write_script(tmp_path, tiny_model_dir, body))
    out, err = process.communicate(timeout=120)
    assert process.returncode == 1
    assert err.splitlines()[-1].startswith("nanovllm.errors.ConfigError: rank 1 could not start")
    assert 'put its code under `if __name__ == "__main__":`' in err and "script.py" in err
    assert err.count("Traceback") == 1  # nothing of the rank's own
    assert float(out.splitlines()[-1].split()[1]) < patience()  # idle: 4 s, nearly all of it imports in the rank


def test_a_script_with_a_guard_works_and_needs_no_exit(
    tmp_path: Path, tiny_model_dir: Path, running: list[subprocess.Popen[str]]
) -> None:
    body = """
if __name__ == "__main__":
    llm = engine()
    print(llm.ps[0].pid, tokens(llm))
"""
    process = start(running, write_script(tmp_path, tiny_model_dir, body))
    out, err = process.communicate(timeout=120)
    assert (process.returncode, err) == (0, "")
    assert out.count(",") == 3
    assert not is_running(int(out.split()[0]))


def test_a_script_whose_stderr_is_closed(
    tmp_path: Path, tiny_model_dir: Path, running: list[subprocess.Popen[str]]
) -> None:
    body = """
if __name__ == "__main__":
    print(tokens(engine()))
"""
    close_and_run = "import os, sys; os.close(2); os.execv(sys.executable, [sys.executable, sys.argv[1]])"
    process = start(running, "-c", close_and_run, write_script(tmp_path, tiny_model_dir, body))
    out, err = process.communicate(timeout=120)
    assert (process.returncode, err, out.count(",")) == (0, "", 3)


def test_a_forked_copy_generates_without_torchs_threads(
    tmp_path: Path, default_model_dir: Path, running: list[subprocess.Popen[str]]
) -> None:
    """They do not come along, and an operation that shares its work with them would wait for ever."""
    body = """
if __name__ == "__main__":
    import os, torch
    torch.set_num_threads(2)
    def build(compile):
        return LLM(sys.argv[1], max_model_len=256, compile=compile, seed=0)
    engines = [build(None), build(False)]
    expected = [tokens(llm) for llm in engines]
    pid = os.fork()
    if pid == 0:
        os._exit([tokens(llm) for llm in (*engines, build(None))] != [*expected, expected[0]])
    print(os.waitpid(pid, 0)[1])
"""
    script = write_script(tmp_path, default_model_dir, "import sys" + body)
    process = start(running, script, str(default_model_dir))
    out, err = process.communicate(timeout=120)
    assert (process.returncode, err, out) == (0, "", "0\n")


def test_a_forked_copy_leaves_the_ranks_alone(
    tiny_model_dir: Path, tmp_path: Path, running: list[subprocess.Popen[str]]
) -> None:
    """Whether it uses the engine, closes it, forgets it, or merely ends, as every copy does."""
    body = """
if __name__ == "__main__":
    import gc, os, sys
    from nanovllm import EngineDeadError
    llm = engine()
    expected = tokens(llm)
    for copy in range(4):
        pid = os.fork()
        if pid == 0:
            if copy == 1:
                try:
                    tokens(llm)
                except EngineDeadError as error:
                    print(error)
            elif copy == 2:
                llm.exit()
            elif copy == 3:
                del llm
                gc.collect()
            sys.exit(0)
        assert os.waitpid(pid, 0)[1] == 0
        assert tokens(llm) == expected
"""
    process = start(running, write_script(tmp_path, tiny_model_dir, body))
    out, err = process.communicate(timeout=90)
    assert process.returncode == 0, err
    assert "forked copy" in out and "can only join" not in err


def test_a_script_that_cannot_be_imported(tiny_model_dir: Path, running: list[subprocess.Popen[str]]) -> None:
    process = start(running, "-", stdin=subprocess.PIPE)
    body = ENGINE.format(model=str(tiny_model_dir)) + "\nif __name__ == '__main__': engine()\n"
    _, err = process.communicate(body, timeout=120)
    assert process.returncode == 1
    assert err.splitlines()[-1].startswith("nanovllm.errors.ConfigError: ") and "<stdin> cannot be imported" in err
    assert err.count("Traceback") == 1  # no rank was started


WHERE = {
    "idle": "print('ready', flush=True); time.sleep(600)",
    "in a step": "print('ready', flush=True)\n    while True: tokens(llm, 200)",
    "at start-up": "",
}


@pytest.mark.parametrize(
    "where", ["in a step", *(pytest.param(each, marks=pytest.mark.slow) for each in ("idle", "at start-up"))]
)
def test_ranks_go_with_a_caller_that_is_killed(
    where: str,
    tmp_path: Path,
    tiny_model_dir: Path,
    running: list[subprocess.Popen[str]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    before = named_shared_memory()
    temporary = tmp_path / "temporary"  # of its own: other tests use /tmp at the same time
    temporary.mkdir()
    monkeypatch.setenv("TMPDIR", str(temporary))
    body = f"""
import time
if __name__ == "__main__":
    print("started", flush=True)
    llm = engine()
    {WHERE[where]}
"""
    process = start(running, write_script(tmp_path, tiny_model_dir, body))
    assert process.stdout is not None
    assert process.stdout.readline() == "started\n"
    if where == "at start-up":
        assert wait_until(lambda: len(child_pids(process.pid)) == 2, 60)  # the rank and Python's resource tracker
        time.sleep(0.5)
    else:
        assert process.stdout.readline() == "ready\n"
        time.sleep(0.5)
    pids = child_pids(process.pid)
    assert len(pids) == 2
    process.kill()
    process.wait()
    assert wait_until(lambda: not any(map(is_running, pids)), patience())  # at start-up: when the imports are done
    assert "leaked" not in process.communicate()[1]
    assert named_shared_memory() <= before
    assert not os.listdir(temporary)


@pytest.mark.slow
def test_ctrl_c_in_a_terminal_stops_the_call_and_not_the_ranks(
    tmp_path: Path, tiny_model_dir: Path, running: list[subprocess.Popen[str]]
) -> None:
    """The signal goes to the whole process group, as a terminal sends it."""
    body = """
if __name__ == "__main__":
    llm = engine()
    expected = tokens(llm)
    print("ready", flush=True)
    try:
        while True: tokens(llm, 200)
    except KeyboardInterrupt:
        assert llm.ps[0].is_alive()
        assert tokens(llm) == expected
        llm.exit()
        print("right", flush=True)
"""
    process = start(running, write_script(tmp_path, tiny_model_dir, body), start_new_session=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    time.sleep(0.5)
    os.killpg(process.pid, signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert (process.returncode, out, err) == (0, "right\n", "")


@pytest.mark.slow
def test_in_a_notebook(tmp_path: Path, tiny_model_dir: Path) -> None:
    """A real kernel: cells, an interrupt, a rank that is killed, an engine built anew, and a restart with it alive."""
    from jupyter_client.manager import KernelManager

    manager = KernelManager(kernel_name="python3")
    manager.start_kernel(cwd=str(ROOT), env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)})
    client = manager.client()
    client.start_channels()
    client.wait_for_ready(timeout=60)

    def cell(code: str) -> tuple[str, str]:
        """(text, error) of a cell."""
        texts: list[str] = []

        def hook(message: dict[str, Any]) -> None:
            if message["msg_type"] == "stream":
                texts.append(message["content"]["text"])

        reply = client.execute_interactive(code, output_hook=hook, timeout=120)["content"]
        return "".join(texts), reply.get("ename", "") + " " + reply.get("evalue", "")

    try:
        assert cell(ENGINE.format(model=str(tiny_model_dir)))[1] == " "
        text, error = cell("llm = engine(); expected = tokens(llm); print(llm.ps[0].pid)")
        assert error == " "
        pid = int(text)
        client.execute("while True: tokens(llm, 200)")
        time.sleep(1)
        manager.interrupt_kernel()
        assert client.get_shell_msg(timeout=30)["content"]["ename"] == "KeyboardInterrupt"
        assert cell("print(tokens(llm) == expected and llm.ps[0].is_alive())") == ("True\n", " ")
        os.kill(pid, signal.SIGKILL)
        text, error = cell("tokens(llm)")
        assert error.startswith("EngineDeadError rank 1") and "SIGKILL" in error
        text, error = cell("llm = engine(); print(tokens(llm) == expected, llm.ps[0].pid)")
        right, pid = text.split()[0], int(text.split()[1])
        assert right == "True" and is_running(pid)
        manager.restart_kernel(now=True)
        assert wait_until(lambda: not is_running(pid), 10)
    finally:
        client.stop_channels()
        manager.shutdown_kernel(now=True)
