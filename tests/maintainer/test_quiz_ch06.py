"""The keys of chapter 6's quiz, recomputed from the engine."""

import ast
import inspect
from typing import Any

import torch

from nanovllm.engine.sequence import Sequence
from nanovllm.workbook.quizzes import answer
from nanovllm.worker.cuda_graphs import DecodeGraphs, StepInputs
from nanovllm.worker.input_batch import InputBatchBuilder
from nanovllm.worker.kv_cache import KVCacheSizer
from nanovllm.worker.model_runner import ModelRunner


def accepts(number: int, value: object) -> bool:
    return answer("6", number, value).text.startswith("✓")


def scheduled(total: int, computed: int, count: int) -> Sequence:
    seq = Sequence(list(range(total)), block_size=4)
    seq.block_table = tuple(range(-(-total // 4)))
    seq.num_computed_tokens, seq.num_scheduled_tokens = computed, count
    return seq


def test_question_1_bytes_of_a_token() -> None:
    assert accepts(1, KVCacheSizer.block_bytes(30, 3, 64, 1, 2))
    assert not accepts(1, 11_520)


def test_question_2_blocks_of_a_card() -> None:
    gb = 10**9
    assert accepts(2, KVCacheSizer.num_blocks(80 * gb, 18 * gb, 20 * gb, 16 * gb, 0.9, gb))
    assert not accepts(2, 34)


def test_question_3_boundaries() -> None:
    arrays = InputBatchBuilder().build([scheduled(12, 8, 4), scheduled(3, 0, 3), scheduled(21, 20, 1)])
    assert accepts(3, arrays.cu_seqlens_q.tolist())
    assert not accepts(3, arrays.context_lens.tolist())


def test_question_4_rows_of_the_graph() -> None:
    class Model:
        def __call__(self, batch: Any) -> torch.Tensor:
            return batch.input_ids.float()[:, None]

    class OnCPU(DecodeGraphs):
        def record(self, forward: Any, batch: Any) -> Any:
            return (lambda: None), forward(batch)

    graphs = OnCPU(Model(), 100, StepInputs(100, 2, torch.device("cpu")))
    assert accepts(4, graphs.size_for[41])
    assert not accepts(4, 41)


def test_question_5_addresses_stay() -> None:
    """The buffers that a step is written into are those that the batches of all graphs are made of."""
    inputs = StepInputs(8, 2, torch.device("cpu"))
    before = inputs.device["input_ids"].data_ptr()
    inputs.write(InputBatchBuilder().build([scheduled(5, 4, 1)]), 4)
    assert inputs.device["input_ids"].data_ptr() == before and accepts(5, "a")
    assert not accepts(5, "d")


def test_question_6_the_order_of_construction() -> None:
    """Read off the constructor: the calls in the order in which they stand, and the warm-up inside the sizing."""
    source = inspect.getsource(ModelRunner)
    tree = ast.parse(source)
    names = {"_build_model": "b", "_allocate_kv_cache": "a", "_capture_graphs": "c"}
    init = next(n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef) and n.name == "__init__")
    calls = [n.func.attr for n in ast.walk(init) if isinstance(n, ast.Call) and isinstance(n.func, ast.Attribute)]
    order = sorted((c for c in set(calls) & set(names)), key=lambda c: source.index(f"self.{c}("))
    assert order == ["_build_model", "_allocate_kv_cache", "_capture_graphs"]
    sizing = inspect.getsource(ModelRunner._allocate_kv_cache)
    assert sizing.index("self.warmup()") < sizing.index("on_gpu(")
    assert accepts(6, "b d a c")
    assert not accepts(6, "b a d c")
