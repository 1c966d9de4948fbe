"""What an engine says of itself in a cell, and what it says of parts that take no place."""

import warnings
from pathlib import Path
from typing import Any

import pytest

from nanovllm import LLM, ConfigError, SamplingParams
from nanovllm.engine.parts import Parts
from nanovllm.workbook import Workbook

OPTIONS: dict[str, Any] = dict(attention_backend="torch", kvcache_block_size=4, num_kvcache_blocks=16, max_model_len=32)


def test_an_engine_names_its_model_its_pool_and_its_requests(tiny_model_dir: Path) -> None:
    llm = LLM(str(tiny_model_dir), **OPTIONS)
    assert repr(llm) == f"LLM({str(tiny_model_dir)!r}: cpu, 16 blocks of 4 tokens, 0 running, 0 waiting)"
    llm.add_request([1, 2, 3], SamplingParams(max_tokens=2))
    assert "0 running, 1 waiting" in repr(llm)
    llm.step()
    assert "1 running, 0 waiting" in repr(llm)
    llm.exit()
    assert repr(llm).endswith("tokens, closed)")


def test_an_engine_that_is_not_built_can_be_named() -> None:
    assert "LLM" in repr(LLM.__new__(LLM, "nowhere"))


@pytest.mark.parametrize(
    ("seam", "meant"),
    [("Samplr", "Sampler"), ("Samplr.forward", "Sampler"), ("sampler", "Sampler"),
     ("Sampler.foward", "Sampler.forward"), ("BlockManager.alocate", "BlockManager.allocate"),
     ("LLMEngine.drives", "LLMEngine.drive")],
)  # fmt: skip
def test_a_part_with_a_misspelt_name_is_told(tiny_model_dir: Path, seam: str, meant: str) -> None:
    with pytest.warns(UserWarning, match=f"'{seam}' takes no place in this engine; did you mean '{meant}'"):
        LLM(str(tiny_model_dir), parts=Parts({seam: print}), **OPTIONS).exit()


def test_a_misspelt_part_leaves_nothing_where_warnings_are_errors(tiny_model_dir: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(UserWarning, match="did you mean"):
            LLM(str(tiny_model_dir), parts=Parts({"Samplr": print}), **OPTIONS)


def test_no_seam_of_the_exercises_is_taken_for_a_mistake(tiny_model_dir: Path) -> None:
    with LLM(str(tiny_model_dir), **OPTIONS):
        seams = {seam for exercise in Workbook.find().exercises for seam in exercise.seams.values()}
        assert len(seams) > 30 and Parts(dict.fromkeys(seams, print)).misspelt() == []


@pytest.mark.parametrize("seam", ["Sampler", "Sampler.forward", "BlockManager.allocate"])
def test_a_part_that_cannot_be_called_is_refused_by_name(tiny_model_dir: Path, seam: str) -> None:
    with pytest.raises(ConfigError, match=f"the part '{seam}' must be a class or a function, got 5"):
        LLM(str(tiny_model_dir), parts=Parts({seam: 5}), **OPTIONS)
