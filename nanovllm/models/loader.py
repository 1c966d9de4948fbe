"""Weights: from safetensors files, or drawn at random, into the parameters of a model.

Only safetensors are read, never a pickle. Everything is checked before any memory is taken: the files lie in the
model's folder, every parameter finds its tensor, no tensor is left over, and shapes and number types fit.

Two tensors may be left over. `…rotary_emb.inv_freq` is computed here. With tied embeddings `lm_head.weight` may be
there if it equals the embedding; if it differs, file and config.json contradict each other, and that is an error.
"""

from collections.abc import Iterable
from contextlib import ExitStack
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from nanovllm.config import Config
from nanovllm.errors import MemoryBudgetError, WeightError
from nanovllm.machine import require_memory
from nanovllm.model_folder import file_in, read_table
from nanovllm.models.decoder import DecoderForCausalLM

INDEX_NAME = "model.safetensors.index.json"
FLOAT_DTYPES = ("F64", "F32", "F16", "BF16")
Target = tuple[str, Any, "tuple[int, ...] | None"]  # parameter, shard id, shape in the checkpoint


def load_model(model: DecoderForCausalLM, config: Config) -> None:
    """Fill `model` as `config.load_format` says. Raises `WeightError` naming the tensors or files at fault."""
    if config.load_format == "random":
        materialize(model)
        randomize(model, config.seed or 0)
    else:
        load_folder(model, Path(config.model))
    for param in model.parameters():
        # It is bound to the parameter's own layer: a cycle, for which a dropped model would wait for the collector.
        param.__dict__.pop("weight_loader", None)


def load_folder(model: DecoderForCausalLM, folder: Path) -> None:
    """Check the folder's safetensors against `model`, give the model memory, and copy this rank's shards into it."""
    targets = checkpoint_tensors(model)
    with ExitStack() as stack:
        handles = _open_files(folder, stack)
        handles = {name: handle for name, handle in handles.items() if not name.endswith("rotary_emb.inv_freq")}
        spare = None
        if model.config.tie_word_embeddings:
            spare = handles.pop("lm_head.weight", None)
        _check_names(targets, handles, folder)
        _check_shapes(targets, handles, folder)
        if spare is not None and not _equal(spare, "lm_head.weight", handles, "model.embed_tokens.weight"):
            raise WeightError(
                f"{folder}: config.json ties lm_head.weight to model.embed_tokens.weight, but the "
                "file holds a different one"
            )
        materialize(model)
        params = dict(model.named_parameters())
        for name, (param_name, shard_id, _) in targets.items():
            try:
                loaded = handles[name].get_tensor(name)
            except (SafetensorError, OSError) as error:
                raise WeightError(f"{folder}: cannot read {name}: {error}") from error
            load_parameter(params[param_name], loaded, shard_id)


def load_parameter(param: nn.Parameter, loaded: Tensor, shard_id: Any = None) -> None:
    """Hand a whole checkpoint tensor to the parameter's own loader; one without a loader is copied as it is."""
    loader = getattr(param, "weight_loader", None)
    if loader is None:
        param.data.copy_(loaded)
    elif shard_id is None:
        loader(param, loaded)
    else:
        loader(param, loaded, shard_id)


def checkpoint_tensors(model: DecoderForCausalLM) -> dict[str, Target]:
    """Every tensor that a checkpoint must hold, and where it goes.

    A merged parameter stands for several: `…self_attn.qkv_proj.weight` for `…q_proj.weight`, `…k_proj…`, `…v_proj…`.
    """
    parts: dict[str, list[tuple[str, Any]]] = {}
    for original, (merged, shard_id) in model.packed_modules_mapping.items():
        parts.setdefault(merged, []).append((original, shard_id))
    targets: dict[str, Target] = {}
    for name, param in model.named_parameters():
        shapes = getattr(param, "full_shapes", None)
        if shapes is None and not hasattr(param, "weight_loader"):
            shapes = {None: tuple(param.shape)}
        module, _, leaf = name.rpartition(".")
        path, _, last = module.rpartition(".")
        for original, shard_id in parts.get(last, [(last, None)]):
            targets[f"{path}.{original}.{leaf}".lstrip(".")] = (name, shard_id, shapes and shapes.get(shard_id))
    return targets


def materialize(model: DecoderForCausalLM) -> None:
    """Give every parameter memory on the model's device, in its dtype; what hangs on a parameter stays on it."""
    device, dtype = model.target_device, model.target_dtype
    size = sum(param.numel() for param in model.parameters()) * dtype.itemsize
    remedy = "choose a smaller model or a smaller dtype"
    if device.type == "cpu":
        require_memory(size, "the model", remedy)
    made: dict[int, nn.Parameter] = {}  # a tied parameter is one, and stays one
    for module in model.modules():
        for name, param in module.named_parameters(recurse=False, remove_duplicate=False):
            if id(param) not in made:
                try:
                    memory = torch.empty_like(param, device=device, dtype=dtype)
                except RuntimeError as error:  # what torch raises for want of memory, on every device
                    raise MemoryBudgetError(f"no room on {device} for a model of {size:,} bytes; {remedy}") from error
                new = nn.Parameter(memory, requires_grad=False)
                new.__dict__.update(param.__dict__)
                made[id(param)] = new
            setattr(module, name, made[id(param)])
        for name, buffer in module.named_buffers(recurse=False):
            setattr(module, name, buffer.to(device, dtype if buffer.is_floating_point() else buffer.dtype))


def randomize(model: DecoderForCausalLM, seed: int) -> None:
    """Norms 1, everything else normal(0, 0.02), seeded by `seed` and the tensor's name.

    Every rank draws the whole tensor and keeps its shard, so the ranks hold one model; on a GPU that takes seconds.
    """
    device, dtype = model.target_device, model.target_dtype
    params = dict(model.named_parameters())
    for name, (param_name, shard_id, shape) in checkpoint_tensors(model).items():
        param = params[param_name]
        if not hasattr(param, "weight_loader"):
            param.data.fill_(1.0)
            continue
        assert shape is not None, f"the whole shape of {name} is not known"
        digest = sha256(f"{seed} {name}".encode()).digest()
        generator = torch.Generator(device).manual_seed(int.from_bytes(digest[:7], "little"))
        whole = torch.empty(shape, device=device, dtype=dtype).normal_(0.0, 0.02, generator=generator)
        load_parameter(param, whole, shard_id)


def _weight_files(folder: Path) -> tuple[list[Path], dict[str, str] | None]:
    """The safetensors files to read, and the index that lists their tensors, if there is one."""
    table = read_table(folder, INDEX_NAME, error=WeightError)
    if table is None:
        single = folder / "model.safetensors"
        paths = [single] if single.exists() else sorted(folder.glob("*.safetensors"))
        if not paths:
            others = sorted(path.name for path in folder.glob("*") if path.suffix in (".bin", ".pt", ".pth", ".gguf"))
            there = f" (it has {', '.join(others[:5])}; only safetensors are read)" if others else ""
            raise WeightError(f"{folder} has no weights: no *.safetensors file{there}")
        return [_weight_file(folder, path.name) for path in paths], None
    index = table.get("weight_map")
    if not isinstance(index, dict) or not all(isinstance(value, str) for value in index.values()) or not index:
        raise WeightError(f"{folder / INDEX_NAME} cannot be read: weight_map is not a table of file names")
    return [_weight_file(folder, name) for name in sorted(set(index.values()))], index


def _weight_file(folder: Path, name: str) -> Path:
    path = file_in(folder, name, WeightError)
    if path is None:
        raise WeightError(f"{folder}: weight file {name!r} is missing")
    return path


def _open_files(folder: Path, stack: ExitStack) -> dict[str, Any]:
    """An open file for every tensor name."""
    paths, index = _weight_files(folder)
    handles: dict[str, Any] = {}
    for path in paths:
        try:
            handle = stack.enter_context(safe_open(path, framework="pt", device="cpu"))
            names = list(handle.keys())
        except (SafetensorError, OSError, ValueError) as error:
            raise WeightError(f"{path} cannot be read as safetensors (truncated or damaged?): {error}") from error
        except (MemoryError, RuntimeError) as error:  # there are fewer addresses or less memory than it has bytes
            raise MemoryBudgetError(f"no room for {path}: {error}; choose a smaller model") from error
        twice = [name for name in names if name in handles]
        if twice:
            raise WeightError(f"{folder}: in more than one file: {_listed(twice)}")
        if index is not None:
            _check_index(names, index, path, folder)
        handles.update(dict.fromkeys(names, handle))
    return handles


def _check_index(names: list[str], index: dict[str, str], path: Path, folder: Path) -> None:
    here = {name for name, file in index.items() if (folder.resolve() / file).resolve() == path}
    wrong = sorted(here.symmetric_difference(names))
    if wrong:
        raise WeightError(f"{folder}: {path.name} and the index disagree about {_listed(wrong)}")


def _check_names(targets: dict[str, Target], handles: dict[str, Any], folder: Path) -> None:
    problems = []
    if missing := sorted(targets.keys() - handles.keys()):
        problems.append(f"missing {_listed(missing)}")
    if surplus := sorted(handles.keys() - targets.keys()):
        problems.append(f"surplus {_listed(surplus)}")
    if problems:
        raise WeightError(f"{folder}: the tensors are not those of this architecture: {'; '.join(problems)}")


def _check_shapes(targets: dict[str, Target], handles: dict[str, Any], folder: Path) -> None:
    wrong = []
    for name, (_, _, shape) in targets.items():
        header = handles[name].get_slice(name)
        found, dtype = tuple(header.get_shape()), header.get_dtype()
        if shape is not None and found != shape:
            wrong.append(f"{name} has shape {list(found)} instead of {list(shape)}")
        if dtype not in FLOAT_DTYPES:
            wrong.append(f"{name} has type {dtype} instead of one of {', '.join(FLOAT_DTYPES)}")
    if wrong:
        raise WeightError(f"{folder}: {_listed(wrong, '; ')}")


def _equal(one: Any, name: str, handles: dict[str, Any], other: str) -> bool:
    if one.get_slice(name).get_dtype() not in FLOAT_DTYPES:
        return False  # torch compares only some of the others
    return bool(torch.equal(one.get_tensor(name), handles[other].get_tensor(other)))


def _listed(names: Iterable[str], joint: str = ", ", most: int = 6) -> str:
    """The first few names and how many more there are."""
    items = list(names)
    return joint.join(items[:most]) + (f" and {len(items) - most} more" if len(items) > most else "")
