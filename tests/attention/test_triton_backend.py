"""The Triton kernels against the dense oracle: in the interpreter on a CPU, compiled on a GPU."""

import pytest
import torch

pytest.importorskip("triton")

from nanovllm.attention.torch_backend import TorchAttention
from nanovllm.attention.triton_backend import TritonAttention, next_power_of_two
from nanovllm.attention.triton_kernels import interpreted
from nanovllm.errors import ConfigError
from tests.attention.steps import DECODE, MODES, make_step, run

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3}

pytestmark = pytest.mark.skipif(
    DEVICE == "cpu" and not interpreted(), reason="triton was imported before TRITON_INTERPRET=1 was set"
)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("heads, kv_heads, head_dim, block_size", [(4, 2, 32, 4), (9, 3, 64, 16), (2, 1, 128, 256)])
def test_equals_the_oracle(mode: str, heads: int, kv_heads: int, head_dim: int, block_size: int) -> None:
    step = make_step(heads, kv_heads, head_dim, block_size, MODES[mode], device=DEVICE)
    assert step.error(run(TritonAttention, step)) < TOLERANCE[torch.float32]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(dtype: torch.dtype) -> None:
    step = make_step(4, 2, 64, 16, MODES["mixed"], dtype, DEVICE)
    assert step.error(run(TritonAttention, step)) < TOLERANCE[dtype]


@pytest.mark.parametrize("head_dim", [48, 80, 96, 160, 256])
def test_head_dims_that_are_no_powers_of_two(head_dim: int) -> None:
    step = make_step(2, 2, head_dim, 16, [(1, 33), (7, 20)], device=DEVICE)
    assert step.error(run(TritonAttention, step)) < TOLERANCE[torch.float32]


@pytest.mark.parametrize("heads, kv_heads", [(1, 1), (7, 1), (20, 1), (15, 5)])
def test_any_number_of_heads(heads: int, kv_heads: int) -> None:
    step = make_step(heads, kv_heads, 32, 16, [(1, 40), (3, 3)], device=DEVICE)
    assert step.error(run(TritonAttention, step)) < TOLERANCE[torch.float32]


@pytest.mark.parametrize("splits", [1, 2, 8])
def test_splits_do_not_change_the_result(splits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TritonAttention, "num_splits", lambda *_: splits)
    step = make_step(4, 2, 32, 16, DECODE, device=DEVICE)
    assert step.error(run(TritonAttention, step)) < TOLERANCE[torch.float32]


def test_the_oracle_agrees_with_the_torch_backend() -> None:
    for rows in MODES.values():
        step = make_step(4, 2, 32, 16, rows, device=DEVICE)
        assert step.error(run(TorchAttention, step)) < TOLERANCE[torch.float32]


def test_store_writes_its_slots_and_nothing_else() -> None:
    attention = TritonAttention(6, 3, 20, 1.0, 4)
    k, v = torch.randn(5, 3, 20, device=DEVICE), torch.randn(5, 3, 20, device=DEVICE)
    slots = torch.tensor([6, -1, 0, 11, -1], device=DEVICE)
    k_cache, v_cache = torch.zeros(3, 4, 3, 20, device=DEVICE), torch.ones(3, 4, 3, 20, device=DEVICE)
    k_expected, v_expected = k_cache.clone(), v_cache.clone()
    for token, slot in enumerate(slots.tolist()):
        if slot >= 0:
            k_expected[slot // 4, slot % 4], v_expected[slot // 4, slot % 4] = k[token], v[token]
    attention.store(k, v, k_cache, v_cache, slots)
    assert torch.equal(k_cache, k_expected) and torch.equal(v_cache, v_expected)


def test_splits_fill_the_gpu_and_depend_on_rows_alone() -> None:
    attention = TritonAttention(16, 8, 128, 1.0, 256)
    splits = [attention.num_splits(rows, torch.device(DEVICE)) for rows in (1, 2, 16, 256, 512)]
    assert splits == sorted(splits, reverse=True) and splits[0] > splits[-1]
    assert all(n == next_power_of_two(n) for n in splits)


@pytest.mark.skipif(DEVICE == "cuda", reason="the message is for CPUs")
def test_a_cpu_without_the_interpreter_is_told_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nanovllm.attention.triton_backend.interpreted", lambda: False)
    step = make_step(2, 1, 32, 16, [(1, 3)])
    with pytest.raises(ConfigError, match="TRITON_INTERPRET=1"):
        run(TritonAttention, step)
