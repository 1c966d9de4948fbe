"""The loader refuses what does not fit, by name, before it takes memory for the model."""

import json
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from nanovllm.errors import WeightError
from tests.models.helpers import Pages, make_model, reference_logits
from tests.tiny_models import make_tiny_model

TOKENS = [7, 250, 3, 44, 44]
Q_PROJ = "model.layers.1.self_attn.q_proj.weight"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return make_tiny_model(tmp_path / "model", "qwen3", num_hidden_layers=2)


def rewrite(folder: Path, **changes: Any) -> None:
    """Replace tensors of model.safetensors; None removes one. Dots in names are written as in the file."""
    tensors = load_file(folder / "model.safetensors")
    tensors.update(changes)
    save_file({name: t.contiguous() for name, t in tensors.items() if t is not None}, folder / "model.safetensors")


def split(folder: Path, count: int = 2) -> dict[str, str]:
    """Cut model.safetensors into shards with an index; returns the index's table."""
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    table = {}
    for shard in range(count):
        name = f"model-{shard + 1:05}-of-{count:05}.safetensors"
        part = {key: tensors[key] for key in sorted(tensors)[shard::count]}
        save_file(part, folder / name)
        table.update(dict.fromkeys(part, name))
    write_index(folder, table)
    return table


def write_index(folder: Path, table: Any) -> None:
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": table}))


def logits(folder: Path) -> Tensor:
    model = make_model(folder)
    return Pages(model, [5]).step(model, [(0, TOKENS, 0)])


def test_one_file_shards_with_an_index_and_shards_without_one(folder: Path) -> None:
    want = reference_logits(folder, TOKENS)
    assert (logits(folder) - want).abs().max() < 1e-4
    split(folder)
    assert (logits(folder) - want).abs().max() < 1e-4
    (folder / "model.safetensors.index.json").unlink()
    assert (logits(folder) - want).abs().max() < 1e-4


def test_weights_of_another_float_type_are_converted(folder: Path) -> None:
    want = logits(folder)
    tensors = load_file(folder / "model.safetensors")
    save_file({name: t.double() for name, t in tensors.items()}, folder / "model.safetensors")
    assert torch.equal(logits(folder), want)


def test_a_missing_tensor_is_named(folder: Path) -> None:
    rewrite(folder, **{Q_PROJ: None})
    with pytest.raises(WeightError, match=f"missing {Q_PROJ}$"):
        make_model(folder)


def test_a_surplus_tensor_is_named(folder: Path) -> None:
    rewrite(folder, **{"model.layers.9.mlp.up_proj.weight": torch.zeros(2, 2)})
    with pytest.raises(WeightError, match="surplus model.layers.9.mlp.up_proj.weight$"):
        make_model(folder)


def test_a_merged_name_in_the_file_is_surplus(folder: Path) -> None:
    rewrite(folder, **{"model.layers.0.self_attn.qkv_proj.weight": torch.zeros(2, 2)})
    with pytest.raises(WeightError, match="surplus model.layers.0.self_attn.qkv_proj.weight"):
        make_model(folder)


def test_a_misshapen_tensor_is_named_with_both_shapes(folder: Path) -> None:
    rewrite(folder, **{Q_PROJ: torch.zeros(128, 63)})
    with pytest.raises(WeightError, match=rf"{Q_PROJ} has shape \[128, 63\] instead of \[128, 64\]"):
        make_model(folder)


def test_a_transposed_tensor_is_not_broadcast(folder: Path) -> None:
    rewrite(folder, **{"model.norm.weight": torch.ones(1)})
    with pytest.raises(WeightError, match=r"model.norm.weight has shape \[1\] instead of \[64\]"):
        make_model(folder)


@pytest.mark.parametrize("dtype", [torch.int64, torch.uint8, torch.bool, torch.float8_e4m3fn])
def test_a_tensor_that_is_not_float_is_named(folder: Path, dtype: torch.dtype) -> None:
    rewrite(folder, **{Q_PROJ: torch.zeros(128, 64).to(dtype)})
    with pytest.raises(WeightError, match=f"{Q_PROJ} has type"):
        make_model(folder)


def test_many_faults_are_counted(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    save_file({name: t for name, t in tensors.items() if "norm" in name}, folder / "model.safetensors")
    with pytest.raises(WeightError, match=r"missing model.embed_tokens.weight, .* and 9 more"):
        make_model(folder)


@pytest.mark.parametrize("left", [[], ["pytorch_model.bin", "model.gguf"]])
def test_a_folder_without_safetensors_says_what_it_has(folder: Path, left: list[str]) -> None:
    (folder / "model.safetensors").unlink()
    for name in left:
        (folder / name).write_bytes(pickle.dumps({"a": 1}))
    with pytest.raises(WeightError, match="no weights") as caught:
        make_model(folder)
    assert all(name in str(caught.value) for name in left)


@pytest.mark.parametrize("keep", [0, 5, 8, 200, 5_000, -1])
def test_a_truncated_file_is_named(folder: Path, keep: int) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(WeightError, match=r"model.safetensors cannot be read"):
        make_model(folder)


@pytest.mark.parametrize("header_length", [2**60, 2**40, 10**8])
def test_a_huge_header_length_is_refused(folder: Path, header_length: int) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(header_length.to_bytes(8, "little") + path.read_bytes()[8:])
    with pytest.raises(WeightError, match=r"model.safetensors cannot be read"):
        make_model(folder)


@pytest.mark.parametrize("position", [9, 40, 300, 900])
def test_a_damaged_header_is_refused(folder: Path, position: int) -> None:
    path = folder / "model.safetensors"
    content = bytearray(path.read_bytes())
    content[position] ^= 0xFF
    path.write_bytes(content)
    with pytest.raises(WeightError):
        make_model(folder)


@pytest.mark.parametrize("how", ["parent", "absolute", "nested", "link"])
def test_an_index_cannot_name_files_outside_the_folder(folder: Path, how: str) -> None:
    table = split(folder)
    shard = table[Q_PROJ]
    outside = folder.parent / "elsewhere.safetensors"
    (folder / shard).rename(outside)
    name = {"parent": "../elsewhere.safetensors", "absolute": str(outside), "nested": "a/../../elsewhere.safetensors"}
    if how == "link":
        (folder / shard).symlink_to(outside)
    else:
        write_index(folder, {key: name[how] if value == shard else value for key, value in table.items()})
    with pytest.raises(WeightError, match="outside the model folder"):
        make_model(folder)


def test_a_single_file_may_not_be_a_link_to_the_outside(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder.parent / "elsewhere.safetensors")
    (folder / "model.safetensors").symlink_to("../elsewhere.safetensors")
    with pytest.raises(WeightError, match="outside the model folder"):
        make_model(folder)


def test_links_of_the_hugging_face_cache_are_followed(folder: Path) -> None:
    repository = folder.parent / "models--a--b"
    snapshot = repository / "snapshots" / "0123abcd"
    snapshot.mkdir(parents=True)
    (repository / "blobs").mkdir()
    for path in list(folder.iterdir()):
        path.rename(repository / "blobs" / f"hash-of-{path.name}")
        (snapshot / path.name).symlink_to(f"../../blobs/hash-of-{path.name}")
    assert logits(snapshot).isfinite().all()


def test_only_links_of_the_hugging_face_cache_lead_to_its_blobs(folder: Path) -> None:
    """Not names with a path in them, and not from a folder that merely stands where a snapshot would."""
    snapshot, blobs = folder.parent / "snapshots" / "0123abcd", folder.parent / "blobs"
    snapshot.parent.mkdir()
    folder.rename(snapshot)
    table = split(snapshot)
    blobs.mkdir()
    shard = table[Q_PROJ]
    (snapshot / shard).rename(blobs / "hash")
    write_index(snapshot, {key: "../../blobs/hash" if value == shard else value for key, value in table.items()})
    with pytest.raises(WeightError, match="outside the model folder"):
        make_model(snapshot)
    write_index(snapshot, table)
    (snapshot / shard).symlink_to("../../blobs/hash")
    assert logits(snapshot).isfinite().all()
    snapshot.parent.rename(folder.parent / "models")
    with pytest.raises(WeightError, match="outside the model folder"):
        make_model(folder.parent / "models" / snapshot.name)


def test_a_folder_reached_through_a_link_is_fine(folder: Path) -> None:
    (folder.parent / "link").symlink_to(folder)
    assert logits(folder.parent / "link").isfinite().all()


def test_an_index_that_names_a_missing_file(folder: Path) -> None:
    table = split(folder)
    (folder / table[Q_PROJ]).unlink()
    with pytest.raises(WeightError, match=f"{table[Q_PROJ]}' is missing"):
        make_model(folder)


def test_a_tensor_in_two_shards_is_named(folder: Path) -> None:
    table = split(folder)
    other = next(name for name in table.values() if name != table[Q_PROJ])
    tensors = load_file(folder / other)
    save_file({**tensors, Q_PROJ: torch.zeros(128, 64)}, folder / other)
    with pytest.raises(WeightError, match=Q_PROJ):
        make_model(folder)
    (folder / "model.safetensors.index.json").unlink()
    with pytest.raises(WeightError, match=f"more than one file: {Q_PROJ}"):
        make_model(folder)


def test_an_index_that_disagrees_with_its_files_is_named(folder: Path) -> None:
    table = split(folder)
    write_index(folder, {**table, "model.ghost": table[Q_PROJ]})
    with pytest.raises(WeightError, match="disagree about model.ghost"):
        make_model(folder)


@pytest.mark.parametrize("content", ["", "{", "[]", "{}", '{"weight_map": []}', '{"weight_map": {"a": 3}}', "[" * 9**5])
def test_a_damaged_index_is_named(folder: Path, content: str) -> None:
    (folder / "model.safetensors.index.json").write_text(content)
    with pytest.raises(WeightError, match="index.json cannot be read"):
        make_model(folder)


def test_spare_rotary_frequencies_are_ignored(folder: Path) -> None:
    want = logits(folder)
    rewrite(folder, **{"model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(16)})
    assert torch.equal(logits(folder), want)


def test_a_tied_head_in_the_file_must_equal_the_embedding(folder: Path) -> None:
    want = logits(folder)
    table = load_file(folder / "model.safetensors")["model.embed_tokens.weight"]
    rewrite(folder, **{"lm_head.weight": table.clone()})
    assert torch.equal(logits(folder), want)
    for other in (table + 1, table[:-1], table.reshape(-1), torch.zeros(0), table.to(torch.float8_e4m3fn), table.int()):
        rewrite(folder, **{"lm_head.weight": other})
        with pytest.raises(WeightError, match="ties lm_head.weight"):
            make_model(folder)


def test_an_untied_model_needs_its_head(tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path, "llama")
    rewrite(folder, **{"lm_head.weight": None})
    with pytest.raises(WeightError, match="missing lm_head.weight"):
        make_model(folder)


def test_random_weights_need_no_file(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    model = make_model(folder, load_format="random")
    assert all(param.isfinite().all() for param in model.parameters())
