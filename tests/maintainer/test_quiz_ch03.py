"""The keys of chapter 3's quiz, recomputed from the engine."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from nanovllm import LLM, SamplingParams
from nanovllm.attention.base import AttentionMetadata
from nanovllm.attention.torch_backend import TorchAttention
from nanovllm.engine.parts import Parts
from nanovllm.engine.sequence import Sequence
from nanovllm.layers.rotary_embedding import RotaryEmbedding
from nanovllm.layers.sampler import Sampler
from nanovllm.workbook.quizzes import answer
from nanovllm.worker.input_batch import InputBatchBuilder


def accepts(number: int, value: object) -> bool:
    return answer("3", number, value).text.startswith("✓")


def scheduled(total: int, computed: int, count: int) -> Sequence:
    seq = Sequence(list(range(total)), block_size=16)
    seq.block_table = tuple(range(-(-total // 16)))
    seq.num_computed_tokens, seq.num_scheduled_tokens = computed, count
    return seq


def test_question_1_rows_that_give_a_token() -> None:
    seqs = [scheduled(3, 0, 3), scheduled(9, 0, 5), scheduled(7, 6, 1), scheduled(4, 0, 4)]
    assert accepts(1, InputBatchBuilder().logits_indices(seqs))
    assert not accepts(1, [2, 7, 8, 12])


def test_question_2_colder_is_sharper() -> None:
    rows, generator = 200_000, torch.Generator().manual_seed(0)
    logits, temperatures = torch.tensor([2.0, 1.0]).expand(rows, 2), torch.full((rows,), 0.5)
    first = (Sampler()(logits, temperatures, generator, True) == 0).double().mean().item()
    assert accepts(2, round(100 * first))
    assert not accepts(2, 73)


def test_question_3_the_first_query_behind_a_prefix() -> None:
    """Attention of a query of zeros is the mean of the values that it sees, which tells how many they are."""
    arrays = InputBatchBuilder().build([scheduled(20, 16, 4)])
    metadata = AttentionMetadata(
        *(torch.from_numpy(a) for a in (arrays.slot_mapping, arrays.block_tables, arrays.context_lens)),
        torch.from_numpy(arrays.cu_seqlens_q), arrays.max_query_len, arrays.max_context_len, arrays.num_decodes,
    )  # fmt: skip
    k, v = torch.zeros(2, 16, 1, 1), torch.ones(2, 16, 1, 1).cumsum(1).flatten().cumsum(0).view(2, 16, 1, 1)
    out = TorchAttention(1, 1, 1, 1.0, 16).attend(torch.zeros(4, 1, 1), k, v, metadata)
    means = v.flatten().cumsum(0) / torch.arange(1, 33)
    seen = int((means - out[0]).abs().argmin()) + 1
    assert accepts(3, seen)
    assert not accepts(3, 16)


def test_question_4_one_path() -> None:
    logits = torch.randn(50, 30, generator=torch.Generator().manual_seed(0))
    cold = Sampler()(logits, torch.full((50,), 1e-6), torch.Generator().manual_seed(1), True)
    assert torch.equal(cold, logits.argmax(-1)), "the path with noise gives the argmax when it is cold"
    assert accepts(4, "b")


def test_question_5_heads_that_share() -> None:
    """Only kv head 1 has a value that is not zero: the heads whose result is not zero read it."""
    metadata = AttentionMetadata(
        torch.tensor([0]), torch.zeros(1, 1, dtype=torch.int32), torch.ones(1, dtype=torch.int32),
        torch.tensor([0, 1], dtype=torch.int32), 1, 1, 1,
    )  # fmt: skip
    v = torch.zeros(1, 4, 3, 2)
    v[:, :, 1] = 1.0
    out = TorchAttention(9, 3, 2, 1.0, 4).attend(torch.zeros(1, 9, 2), torch.zeros(1, 4, 3, 2), v, metadata)
    readers = [head for head in range(9) if bool(out[0, head].any())]
    assert readers == [3, 4, 5] and accepts(5, "b")
    assert not accepts(5, "a")


def test_question_6_the_order_in_a_layer(tiny_model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []

    def noted(letter: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*args: Any) -> Any:
            calls.append(letter)
            return function(*args)

        return wrapped

    # A plugged-in rotation is always called; the shipped one may be part of a fused operator.
    parts = Parts({"RotaryEmbedding.forward": noted("b", RotaryEmbedding.forward)})
    with LLM(str(tiny_model_dir), parts, dtype="float32", device="cpu", num_kvcache_blocks=4) as llm:
        layer, attention = llm.model_runner.model.model.layers[0].self_attn, llm.model_runner.attention
        for module, letter in ((layer.qkv_proj, "d"), (layer.o_proj, "e")):
            module.register_forward_pre_hook(lambda *_, letter=letter: calls.append(letter))
        monkeypatch.setattr(attention, "store", noted("a", attention.store))
        monkeypatch.setattr(attention, "attend", noted("c", attention.attend))
        llm.generate([[5, 6, 7]], SamplingParams(max_tokens=1), use_tqdm=False)
    first_layer = calls[: calls.index("e") + 1]
    assert accepts(6, first_layer), first_layer
    assert not accepts(6, "d a b c e".split())
