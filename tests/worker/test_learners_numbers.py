"""What a learner's part computes wrongly is an error with a name, and never an end of the process.

The kernels that run a step look at no bound, so an engine with replaced parts looks at its numbers before.
"""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from nanovllm import LLM, SamplingParams
from nanovllm.engine.parts import Parts
from nanovllm.engine.sequence import Sequence
from nanovllm.layers.sampler import Sampler
from nanovllm.worker.input_batch import BatchArrays, InputBatchBuilder
from tests.tiny_models import make_tiny_model

FAR = 10**7  # times a key's size: outside of everything that the process has
PROMPTS = [[5, 6, 7, 8, 9], [6, 7]]

prepare_decode, prepare_prefill = InputBatchBuilder.prepare_decode, InputBatchBuilder.prepare_prefill
slot_mapping, sampler_forward = Sequence.slot_mapping, Sampler.forward


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose widths the compiled step takes, where there is a compiler."""
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2}
    return make_tiny_model(tmp_path_factory.mktemp("models") / "wide", "qwen3", head_dim=32, **sizes)


def engine(folder: Path, parts: dict[str, Any]) -> LLM:
    options: dict[str, Any] = {
        "dtype": "float32", "device": "cpu", "attention_backend": "torch", "kvcache_block_size": 4,
        "num_kvcache_blocks": 16, "max_model_len": 32, "seed": 0,
    }  # fmt: skip
    return LLM(str(folder), Parts(parts), **options)


def generate(llm: LLM) -> list[list[int]]:
    params = SamplingParams(temperature=1e-6, max_tokens=6, ignore_eos=True)
    return [output["token_ids"] for output in llm.generate(PROMPTS, params, use_tqdm=False)]


def with_arrays(prepare: Any, **changes: Any) -> Any:
    """`prepare`, with fields changed by functions of their right values."""

    def wrong(self: InputBatchBuilder, seqs: list[Sequence]) -> BatchArrays:
        arrays: BatchArrays = prepare(self, seqs)
        return arrays._replace(**{name: change(getattr(arrays, name)) for name, change in changes.items()})

    return wrong


def in_decode(**changes: Any) -> dict[str, Any]:
    return {"InputBatchBuilder.prepare_decode": with_arrays(prepare_decode, **changes)}


def in_prefill(**changes: Any) -> dict[str, Any]:
    return {"InputBatchBuilder.prepare_prefill": with_arrays(prepare_prefill, **changes)}


def sampled(change: Any) -> dict[str, Any]:
    """A sampler whose result is changed by a function."""
    return {"Sampler.forward": lambda self, *args: change(sampler_forward(self, *args))}


def far_slots(self: Sequence, start: int, stop: int) -> list[int]:
    return [slot + FAR for slot in slot_mapping(self, start, stop)]


@pytest.mark.parametrize(
    ("parts", "error", "words"),
    [
        (in_decode(slot_mapping=lambda a: a + FAR), IndexError, r"slot_mapping\[0\] is 100000.*-1 to 63"),
        (in_decode(slot_mapping=lambda a: a - 64), IndexError, "slot_mapping"),
        (in_decode(block_tables=lambda a: a + FAR), IndexError, r"block_tables\[0, 0\] is 1000000.*0 to 15"),
        (in_decode(positions=lambda a: a + 32), IndexError, r"positions\[0\] is 37; it must be 0 to 31"),
        (in_decode(context_lens=lambda a: a + 1), IndexError, r"context_lens\[0\] is 7; it must be 0 to 6"),
        (in_decode(max_context_len=lambda n: 0), IndexError, "context_lens"),
        (in_decode(input_ids=lambda a: -a), IndexError, "input_ids"),
        (in_decode(num_decodes=lambda n: n + 1), IndexError, "num_decodes is 3; the step has 2 rows and 2 tokens"),
        (in_decode(positions=lambda a: a[:1]), ValueError, r"positions is int64 of shape \[1\].*int64 of shape \[2\]"),
        (in_decode(slot_mapping=lambda a: a.astype(np.int32)), ValueError, "slot_mapping is int32 .*needs int64"),
        (in_decode(block_tables=lambda a: a.astype(np.int64)), ValueError, "block_tables is int64 .*needs int32"),
        (in_prefill(slot_mapping=lambda a: a + FAR), IndexError, "slot_mapping"),
        (in_prefill(cu_seqlens_q=lambda a: a + 1), IndexError, r"cu_seqlens_q\[2\] is 8; it must be 0 to 7"),
        (in_prefill(logits_indices=lambda a: a + 1), IndexError, r"logits_indices\[1\] is 7; it must be 0 to 6"),
        ({"Sequence.slot_mapping": far_slots}, IndexError, "slot_mapping"),
        (sampled(lambda ids: ids + FAR), IndexError, "the sampler returned 10000.*; token ids are 0 to 299"),
        (sampled(lambda ids: -1 - ids), IndexError, "the sampler returned -"),
        (sampled(lambda ids: ids[:-1]), ValueError, r"ids of shape \[1\]; these logits need \[2\]"),
        (sampled(lambda ids: ids.repeat(2)), ValueError, r"ids of shape \[4\]"),
        (sampled(lambda ids: ids[:, None]), ValueError, r"ids of shape \[2, 1\]"),
        (sampled(lambda ids: ids.float()), TypeError, "must return a tensor of integers, got torch.float32"),
        (sampled(lambda ids: ids > 0), TypeError, "integers, got torch.bool"),
        (sampled(lambda ids: ids.tolist()), TypeError, "integers, got list"),
        (sampled(lambda ids: None), TypeError, "integers, got NoneType"),
    ],
)
def test_a_number_that_leads_outside_is_named(folder: Path, parts: dict[str, Any], error: Any, words: str) -> None:
    with engine(folder, parts) as llm:
        with pytest.raises(error, match=words):
            generate(llm)
        assert llm.is_finished() and len(llm.snapshot().free_block_ids) == 16, "the engine is whole"


def test_right_parts_change_nothing(folder: Path) -> None:
    """What stands behind a row's last block is never read, so it may be anything."""

    def padded(tables: Any) -> Any:
        return np.pad(tables, ((0, 0), (0, 3)), constant_values=-FAR)

    def column(values: Any) -> Any:
        """The same values as a column of a larger array: kernels read what lies behind the first."""
        return np.stack([values, values + 1, values + 2], 1)[:, 0]

    columns = dict.fromkeys(("input_ids", "positions", "slot_mapping", "context_lens"), column)
    with engine(folder, {}) as llm:
        expected = generate(llm)
    for parts in (
        in_decode(block_tables=padded), in_prefill(block_tables=padded), in_decode(**columns), in_prefill(**columns),
        in_decode(block_tables=np.asfortranarray), sampled(lambda ids: ids.int()),
    ):  # fmt: skip
        with engine(folder, parts) as llm:
            assert generate(llm) == expected
