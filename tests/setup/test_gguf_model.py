"""From GGUF to a Hugging Face folder: numbers, row order, tokenizer, configuration."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, GGUFWriter, TokenType
from gguf.quants import quantize
from safetensors import safe_open
from safetensors.torch import load_file
from transformers import AutoTokenizer

from nanovllm.errors import UnsupportedModelError
from nanovllm.gguf_model import LAYER_NAMES, OUTER_NAMES, convert_gguf, hf_name, split_pairs, to_bfloat16
from tests.models.helpers import load_reference
from tests.tiny_models import CHAT_TEMPLATE, make_tiny_model

HEADS, KV_HEADS, HEAD_DIM, LAYERS = 4, 2, 16, 2


def gguf_row_order(weights: np.ndarray[Any, Any], num_heads: int) -> np.ndarray[Any, Any]:
    """What GGUF's writer does to a query or key projection, row by row: the halves of each head become pairs."""
    rows = np.empty_like(weights)
    half = weights.shape[0] // num_heads // 2
    for head in range(num_heads):
        start = head * 2 * half
        for i in range(half):
            rows[start + 2 * i] = weights[start + i]
            rows[start + 2 * i + 1] = weights[start + half + i]
    return rows


def write_gguf(
    path: Path, checkpoint: Path, *, tied: bool = True, architecture: str = "llama", rule: str = "smollm"
) -> Path:
    """A GGUF file of a tiny Llama checkpoint: matrices in Q8_0, the rest in float32."""
    tensors = load_file(checkpoint / "model.safetensors")
    tokens = json.loads((checkpoint / "tokenizer.json").read_text(encoding="utf-8"))["model"]
    vocab = sorted(tokens["vocab"], key=tokens["vocab"].get)
    vocab += [f"<unused{i}>" for i in range(300 - len(vocab))]
    writer = GGUFWriter(path, architecture)
    writer.add_context_length(2048)
    writer.add_embedding_length(64)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(128)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_rope_dimension_count(HEAD_DIM)
    writer.add_rope_freq_base(100000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(300)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(rule)
    writer.add_token_list(vocab)
    writer.add_token_types([TokenType.CONTROL if text.startswith("<|") else TokenType.NORMAL for text in vocab])
    writer.add_token_merges([" ".join(pair) for pair in tokens["merges"]])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_pad_token_id(2)
    writer.add_chat_template(CHAT_TEMPLATE)
    for name, tensor in gguf_tensors(tensors, tied).items():
        if tensor.ndim == 2:
            kind = GGMLQuantizationType.Q8_0
            writer.add_tensor(name, quantize(tensor, kind), raw_dtype=kind)
        else:
            writer.add_tensor(name, tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def gguf_tensors(tensors: dict[str, torch.Tensor], tied: bool) -> dict[str, np.ndarray[Any, Any]]:
    """The tensors of a checkpoint under GGUF's names and in its row order."""
    names = {f"model.layers.{layer}.{hf}.weight": f"blk.{layer}.{gguf}.weight"
             for layer in range(LAYERS) for gguf, hf in LAYER_NAMES.items()}  # fmt: skip
    names |= {hf: gguf for gguf, hf in OUTER_NAMES.items() if not (tied and gguf == "output.weight")}
    found = {}
    for hf, gguf in names.items():
        array = tensors[hf].numpy()
        if ".attn_q." in gguf or ".attn_k." in gguf:
            array = gguf_row_order(array, HEADS if ".attn_q." in gguf else KV_HEADS)
        found[gguf] = array
    return found


@pytest.fixture(scope="module", params=[True, False], ids=["tied", "untied"])
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A tiny Llama checkpoint, and what came of it by way of GGUF."""
    folder = tmp_path_factory.mktemp("gguf")
    options = {"num_hidden_layers": LAYERS, "intermediate_size": 128, "tie_word_embeddings": request.param}
    checkpoint = make_tiny_model(folder / "checkpoint", "llama", **options)
    (folder / "converted").mkdir()
    convert_gguf(write_gguf(folder / "tiny.gguf", checkpoint, tied=request.param), folder / "converted")
    return checkpoint, folder / "converted"


def test_weights_come_back_under_their_names(pair: tuple[Path, Path]) -> None:
    before, after = (load_file(folder / "model.safetensors") for folder in pair)
    assert before.keys() == after.keys()
    for name, tensor in after.items():
        assert tensor.dtype == torch.bfloat16 and tensor.shape == before[name].shape
        # Q8_0 keeps 1/254 of a block's largest value, bfloat16 8 bits.
        error = (tensor.float() - before[name]).abs().max()
        assert error <= before[name].abs().max() * (1 / 254 + 1 / 256), name


def test_the_converted_model_computes_the_same(pair: tuple[Path, Path]) -> None:
    """Rows in the wrong order would leave every weight in the file and yet change every logit."""
    models = [load_reference(folder) for folder in pair]
    input_ids = torch.tensor([[5, 80, 131, 7, 260, 44, 9, 201]])
    with torch.no_grad():
        before, after = (model(input_ids).logits for model in models)
    assert (before - after).abs().max() < 0.05 * before.abs().max()
    assert torch.nn.functional.cosine_similarity(before.flatten(), after.flatten(), dim=0) > 0.999


def test_the_file_is_well_formed(pair: tuple[Path, Path]) -> None:
    file = pair[1] / "model.safetensors"
    with safe_open(file, framework="pt") as opened:
        assert opened.metadata() == {"format": "pt"}
    assert int.from_bytes(file.read_bytes()[:8], "little") % 8 == 0


def test_configuration_has_the_words_of_both_transformers(pair: tuple[Path, Path]) -> None:
    config = json.loads((pair[1] / "config.json").read_text(encoding="utf-8"))
    assert config["rope_theta"] == config["rope_parameters"]["rope_theta"] == 100000.0
    assert config["torch_dtype"] == config["dtype"] == "bfloat16"
    assert config["rms_norm_eps"] == 1e-5
    assert (config["bos_token_id"], config["eos_token_id"], config["pad_token_id"]) == (1, 2, 2)
    assert config["tie_word_embeddings"] is ("lm_head.weight" not in load_file(pair[1] / "model.safetensors"))


def test_tokenizer_and_template(pair: tuple[Path, Path]) -> None:
    tokenizer = AutoTokenizer.from_pretrained(pair[1])
    assert tokenizer.eos_token == "<|im_end|>" and tokenizer.bos_token == "<|im_start|>"
    text = "the quick brown fox, it 's 42 café\n\n"
    assert tokenizer.decode(tokenizer.encode(text)) == text
    shown = tokenizer.apply_chat_template(
        [{"role": "user", "content": "hi"}], tokenize=False, add_generation_prompt=True
    )
    assert shown == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert tokenizer.encode("<|im_end|>") == [2]


def test_digits_stand_alone(pair: tuple[Path, Path]) -> None:
    tokenizer = AutoTokenizer.from_pretrained(pair[1])
    pieces = tokenizer.backend_tokenizer.pre_tokenizer.pre_tokenize_str("12 3a")
    assert [piece for piece, _ in pieces] == ["1", "2", "Ġ", "3", "a"]


@pytest.mark.parametrize("change", [{"architecture": "qwen2"}, {"rule": "llama-bpe"}])
def test_other_files_are_refused_by_name(change: dict[str, str], pair: tuple[Path, Path], tmp_path: Path) -> None:
    tied = "lm_head.weight" not in load_file(pair[0] / "model.safetensors")
    source = write_gguf(tmp_path / "other.gguf", pair[0], tied=tied, **change)
    (tmp_path / "out").mkdir()
    with pytest.raises(UnsupportedModelError, match=next(iter(change.values()))):
        convert_gguf(source, tmp_path / "out")


def test_a_tensor_without_a_place_is_refused() -> None:
    assert hf_name("blk.12.ffn_down.weight") == "model.layers.12.mlp.down_proj.weight"
    for name in ("blk.0.attn_q.bias", "rope_freqs.weight", "blk.0.ffn_gate_exps.weight"):
        with pytest.raises(UnsupportedModelError, match=name):
            hf_name(name)


def test_split_pairs_undoes_the_row_order_of_gguf() -> None:
    weights = np.arange(24.0).reshape(8, 3)
    assert (split_pairs(gguf_row_order(weights, 2), 2) == weights).all()
    assert split_pairs(np.array([[0.0], [2.0], [1.0], [3.0]]), 1).ravel().tolist() == [0, 1, 2, 3]


def test_bfloat16_rounds_as_torch_does() -> None:
    values = np.random.default_rng(0).standard_normal(100_000).astype(np.float32)
    ties = np.array([1 + 1 / 256, 1 + 3 / 256, -1 - 1 / 256, 0.0, -0.0, 3e38], dtype=np.float32)
    for array in (values, ties):
        expected = torch.from_numpy(array).to(torch.bfloat16).view(torch.uint16).numpy()
        assert (to_bfloat16(array) == expected).all()
