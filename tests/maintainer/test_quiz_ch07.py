"""The keys of chapter 7's quiz, recomputed from the engine."""

import inspect
from pathlib import Path

import torch

from nanovllm.attention.torch_backend import TorchAttention
from nanovllm.config import Config
from nanovllm.engine.sequence import Sequence
from nanovllm.layers.embed_head import VocabParallelEmbedding
from nanovllm.layers.linear import RowParallelLinear
from nanovllm.layers.parallel import TPGroup, dividing_sizes
from nanovllm.models import build_model
from nanovllm.workbook.quizzes import answer
from nanovllm.worker import tensor_parallel
from nanovllm.worker.input_batch import InputBatchBuilder
from nanovllm.worker.message_channel import decode, encode


def accepts(number: int, value: object) -> bool:
    return answer("7", number, value).text.startswith("✓")


def test_question_1_sizes() -> None:
    assert accepts(1, dividing_sizes(9, 3))
    assert not accepts(1, [1, 2, 3])


def test_question_2_all_reduces_of_a_layer(tiny_model_dir: Path) -> None:
    """Every row-parallel product sums once; a layer has two of them."""
    hf_config = Config(str(tiny_model_dir)).hf_config
    attention = TorchAttention(4, 2, 32, 1.0, 16)
    model = build_model(hf_config, TPGroup(), attention, lambda cls: cls, torch.float32, "cpu")
    rows = [module for module in model.model.layers[0].modules() if isinstance(module, RowParallelLinear)]
    assert accepts(2, len(rows))
    assert not accepts(2, 4)


def test_question_3_a_bias_on_every_rank() -> None:
    size, bias = 4, torch.tensor([0.5])
    summed = sum(torch.zeros(1) + bias for _ in range(size))
    right = RowParallelLinear(4, 1, bias=True)
    right.weight.data.zero_()  # type: ignore[union-attr]
    right.bias.data.copy_(bias)  # type: ignore[union-attr]
    assert accepts(3, float(summed - right(torch.zeros(1, 4))))
    assert not accepts(3, 2.0)


def test_question_4_padding() -> None:
    rows = [len(VocabParallelEmbedding(10, 2, TPGroup(rank, 4)).weight) for rank in range(4)]
    assert accepts(4, sum(rows) - 10)
    assert not accepts(4, 0)


def test_question_5_spawn() -> None:
    assert '"spawn"' in inspect.getsource(tensor_parallel) and accepts(5, "b")
    assert not accepts(5, "c")


def test_question_6_rows_of_numbers() -> None:
    seq = Sequence([5, 6, 7], block_size=4)
    seq.block_table, seq.num_scheduled_tokens = (0,), 3
    method, args = decode(bytearray(encode("run", (InputBatchBuilder().build([seq]),))))
    assert method == "run" and args[0][0].tolist() == [5, 6, 7]
    try:
        encode("run", (seq,))
    except TypeError:
        assert accepts(6, "c")
    else:
        raise AssertionError("a live sequence went into a message")
    assert not accepts(6, "a")
