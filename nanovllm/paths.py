"""Where models lie on this machine, and what to say about one that does not.

Knows folders only: no network, no torch, no configuration of a model. So it may stand below `config`.
"""

import os
import re
from difflib import get_close_matches
from pathlib import Path

DEFAULT_MODEL = "SmolLM2-135M-Instruct"
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


def cache_home() -> Path:
    """The folder that holds fetched models: `NANOVLLM_HOME`, or else `~/.cache/nanovllm`."""
    chosen = os.environ.get("NANOVLLM_HOME")
    return Path(os.path.expanduser(chosen)).absolute() if chosen else Path.home() / ".cache" / "nanovllm"


def default_model_path() -> Path:
    """Where the default model is, or will be once it has been fetched."""
    return cache_home() / DEFAULT_MODEL


def is_model_folder(folder: str | os.PathLike[str]) -> bool:
    """True for a folder with a `config.json` and at least one safetensors file."""
    path = Path(folder)
    return (path / "config.json").is_file() and next(path.glob("*.safetensors"), None) is not None


def is_hub_id(name: str) -> bool:
    """True for a name of the form `owner/model`, as Hugging Face's hub uses it."""
    return _HUB_ID.fullmatch(name) is not None and ".." not in name and "--" not in name


def list_models() -> dict[str, Path]:
    """The models in the cache folder by name: `model` or `owner/model`, in alphabetical order."""
    home = cache_home()
    if not home.is_dir():
        return {}
    found = {}
    for folder in sorted(path for path in home.iterdir() if path.is_dir() and not path.name.startswith(".")):
        inner = [folder] if is_model_folder(folder) else sorted(folder.iterdir())
        for path in inner:
            if is_model_folder(path):
                found[path.relative_to(home).as_posix()] = path
    return found


def missing_model_message(name: str) -> str:
    """Why `name` is not a model folder, and the command or the path that helps."""
    here = list_models()
    message = f"model folder {name!r} does not exist"
    if name in here:
        return f"{message}, but that model has been fetched: give its path, {str(here[name])!r}"
    if name == DEFAULT_MODEL or Path(os.path.expanduser(name)).absolute() == default_model_path():
        return f"{message}; fetch the default model with: nanovllm model get"
    if is_hub_id(name):
        return f"{message}; fetch it from Hugging Face's hub with: nanovllm model get {name}"
    if not here:
        return f"{message}, and no model has been fetched yet; fetch the default one with: nanovllm model get"
    lines = "".join(f"\n  {path}" for path in here.values())
    close = get_close_matches(Path(name).name, [path.name for path in here.values()], n=1)
    hint = f" (did you mean {close[0]!r}?)" if close else ""
    return f"{message}{hint}; models on this machine:{lines}\nfetch another one with: nanovllm model get OWNER/NAME"
