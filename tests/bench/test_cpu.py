"""The arithmetic of the CPU bench, and the GGUF file that it hands to llama.cpp."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, GGUFReader, GGUFWriter, dequantize, quantize

from nanovllm.bench import cpu
from nanovllm.bench.cpu import Engine, Table, Workload, in_a_fresh_process
from nanovllm.bench.llama_cpp import write_gguf


def test_ratios_are_taken_round_by_round(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Two engines in three rounds; the first run of each is thrown away. Ratios 2, 3, 2.5 and 1, 1, 1."""
    times: dict[Any, list[float]] = {"fast": [99.0, 1.0, 1.0, 2.0], "slow": [99.0, 2.0, 3.0, 5.0]}
    theirs = iter([99.0, 2.0, 3.0, 5.0])
    monkeypatch.setattr(cpu, "engine_seconds", lambda llm, work: times[llm].pop(0))
    table = Table(3)
    engines: list[Any] = [Engine("compiled", "fast", 2.0), Engine("plain", "slow", None)]  # type: ignore[arg-type]
    table.compare("work, {}", engines, Workload([[1]], [30]), lambda: next(theirs))
    assert table.rows["work, compiled"] == {
        "goal": ">= 2.0 x", "ratio": 2.5, "least": 2.0, "most": 3.0, "ours_tok_s": 30.0, "theirs_tok_s": 10.0,
    }  # fmt: skip
    assert table.rows["work, plain"]["ratio"] == 1.0 and table.rows["work, plain"]["goal"] == "-"
    assert "work, compiled: goal >= 2.0 x  ratio 2.5" in capsys.readouterr().out


@pytest.mark.parametrize("kind", [GGMLQuantizationType.BF16, GGMLQuantizationType.Q8_0])
def test_the_gguf_file_holds_the_same_model(tmp_path: Path, kind: GGMLQuantizationType) -> None:
    matrix, vector = np.random.default_rng(0).normal(size=(6, 64)).astype(np.float32), np.arange(5, dtype=np.float32)
    source = GGUFWriter(tmp_path / "source.gguf", "llama")
    source.add_uint32("llama.block_count", 3)
    source.add_array("tokenizer.ggml.tokens", ["a", "b"])
    source.add_tensor("m", quantize(matrix, GGMLQuantizationType.Q4_1), raw_dtype=GGMLQuantizationType.Q4_1)
    source.add_tensor("v", vector)
    source.write_header_to_file()
    source.write_kv_data_to_file()
    source.write_tensors_to_file()
    source.close()

    write_gguf(tmp_path / "source.gguf", tmp_path / "made.gguf", kind)
    made = GGUFReader(tmp_path / "made.gguf")
    assert made.fields["llama.block_count"].contents() == 3
    assert made.fields["tokenizer.ggml.tokens"].contents() == ["a", "b"]
    tensors = {tensor.name: tensor for tensor in made.tensors}
    assert tensors["m"].tensor_type is kind and np.array_equal(tensors["v"].data, vector)
    four_bits = dequantize(quantize(matrix, GGMLQuantizationType.Q4_1), GGMLQuantizationType.Q4_1)
    got = dequantize(tensors["m"].data, kind).reshape(6, 64)
    assert np.abs(got - four_bits).max() < np.abs(four_bits).max() / (256 if kind.name == "BF16" else 100)


def test_what_the_parent_holds_is_not_counted(default_model_dir: Path) -> None:
    held = torch.ones(700 << 20, dtype=torch.uint8)
    found = in_a_fresh_process(str(default_model_dir))
    assert found["above_bytes"] > found["weights"] + found["touched_pool"] and len(held)
