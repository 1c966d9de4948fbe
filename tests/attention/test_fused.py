"""The fused kernels against their plain twins: in Triton's interpreter on a CPU, compiled on a GPU.

(They stand in this folder because its conftest chooses the interpreter.)
"""

from functools import partial

import pytest
import torch

pytest.importorskip("triton")

from nanovllm.attention.triton_backend import TritonAttention
from nanovllm.attention.triton_kernels import interpreted
from nanovllm.layers import fused
from nanovllm.layers.activation import SiluAndMul
from nanovllm.layers.layernorm import RMSNorm
from nanovllm.layers.rotary_embedding import RotaryEmbedding
from nanovllm.layers.sampler import Sampler

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# bfloat16 has 8 bits: results differ by a last bit where a sum is rounded the other way (the interpreter truncates).
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2}

pytestmark = pytest.mark.skipif(
    DEVICE == "cpu" and not interpreted(), reason="triton was imported before TRITON_INTERPRET=1 was set"
)


def close(a: torch.Tensor, b: torch.Tensor, dtype: torch.dtype) -> bool:
    assert a.shape == b.shape and a.dtype == b.dtype
    return torch.allclose(a.float(), b.float(), rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


def normal(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape))).to(DEVICE, dtype)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("size", [32, 96, 1024])
def test_rms_norm(size: int, dtype: torch.dtype) -> None:
    norm = RMSNorm(size).to(DEVICE, dtype)
    norm.weight.data = normal(size, dtype=dtype)
    x, residual = normal(5, size, dtype=dtype), normal(6, size, dtype=dtype)[:5]
    assert close(fused.rms_norm(x, norm.weight, norm.eps), norm(x), dtype)
    for ours, plain in zip(fused.rms_norm(x, norm.weight, norm.eps, residual), norm(x, residual), strict=True):
        assert close(ours, plain, dtype)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("size", [7, 112, 1500])
def test_silu_and_mul(size: int, dtype: torch.dtype) -> None:
    x = normal(3, 2 * size, dtype=dtype)
    assert close(fused.silu_and_mul(x), SiluAndMul()(x), dtype)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("with_norms", [False, True])
@pytest.mark.parametrize("heads, kv_heads, head_dim", [(4, 2, 32), (9, 3, 24), (6, 1, 96)])
def test_rotate_and_store(heads: int, kv_heads: int, head_dim: int, with_norms: bool, dtype: torch.dtype) -> None:
    rotary = RotaryEmbedding(head_dim, 100).to(DEVICE, dtype)
    q_norm, k_norm = RMSNorm(head_dim).to(DEVICE, dtype), RMSNorm(head_dim).to(DEVICE, dtype)
    q_norm.weight.data, k_norm.weight.data = normal(head_dim, dtype=dtype), normal(head_dim, dtype=dtype) + 1
    qkv = normal(6, (heads + 2 * kv_heads) * head_dim, dtype=dtype)
    positions = torch.tensor([0, 5, 99, 3, 1, 2], device=DEVICE)
    slots = torch.tensor([3, -1, 0, 19, 5, -1], device=DEVICE)
    caches = [torch.zeros(5, 4, kv_heads, head_dim, dtype=dtype, device=DEVICE) for _ in range(4)]

    q, k, v = qkv.unflatten(-1, (-1, head_dim)).split((heads, kv_heads, kv_heads), 1)
    if with_norms:
        q, k = q_norm(q), k_norm(k)
    q, k = rotary(positions, q, k)
    TritonAttention(heads, kv_heads, head_dim, 1.0, 4).store(k, v, caches[0], caches[1], slots)

    norms = (q_norm.weight, k_norm.weight, q_norm.eps) if with_norms else None
    ours = fused.rotate_and_store(
        kv_heads, head_dim, rotary.cos_sin, norms, qkv.clone(), positions, caches[2], caches[3], slots
    )
    assert close(ours, q, dtype)
    assert close(caches[2], caches[0], dtype) and torch.equal(caches[3], caches[1])


def sample(logits: torch.Tensor, temperature: float, seed: int = 0, needs_noise: bool = True) -> torch.Tensor:
    temperatures = torch.full((len(logits),), temperature, device=DEVICE)
    return fused.sample(logits, temperatures, torch.Generator(DEVICE).manual_seed(seed), needs_noise)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("size", [5, 4096, 4097, 10000])
def test_cold_rows_are_the_argmax_and_ties_go_to_the_lowest_id(size: int, dtype: torch.dtype) -> None:
    logits = normal(4, size, dtype=dtype)
    logits[0, 3] = logits[0, size - 1] = 50
    expected = Sampler()(logits, torch.full((4,), 1e-6, device=DEVICE)).tolist()
    assert expected[0] == 3
    assert sample(logits, 1e-6).tolist() == sample(logits, 1.0, needs_noise=False).tolist() == expected


def test_rows_of_different_temperatures_do_not_mix() -> None:
    logits = normal(2, 600)
    temperatures = torch.tensor([1e-6, 50.0], device=DEVICE)
    generators = [torch.Generator(DEVICE).manual_seed(seed) for seed in range(8)]
    draws = [fused.sample(logits, temperatures, generator, True).tolist() for generator in generators]
    assert {cold for cold, _ in draws} == {int(logits[0].argmax())}
    assert len({warm for _, warm in draws}) > 4


@pytest.mark.parametrize("temperature", [0.6, 1.7])
def test_draws_follow_the_softmax(temperature: float) -> None:
    """The shares of three likely tokens, far apart in the vocabulary, within 5 standard deviations."""
    count = 20000 if DEVICE == "cuda" else 200  # the interpreter takes 20 ms for each
    logits = torch.full((1, 3000), -80.0, device=DEVICE)
    places = [10, 1500, 2999]
    logits[0, places] = torch.tensor([0.0, 2.0, 1.0], device=DEVICE)
    shares = (logits[0, places] / temperature).softmax(-1).tolist()
    drawn = sample(logits.expand(count, -1), temperature, seed=1)
    assert set(drawn.tolist()) <= set(places)
    for place, share in zip(places, shares, strict=True):
        assert abs(float((drawn == place).double().mean()) - share) < 5 * (share * (1 - share) / count) ** 0.5


def test_the_noise_repeats_with_the_seed_and_changes_from_call_to_call() -> None:
    draw = partial(sample, torch.zeros(6, 3000, device=DEVICE), 1.0)
    assert draw(1).tolist() == draw(1).tolist() != draw(2).tolist()
    generator = torch.Generator(DEVICE).manual_seed(1)
    logits, ones = torch.zeros(6, 3000, device=DEVICE), torch.ones(6, device=DEVICE)
    first, second = (fused.sample(logits, ones, generator, True).tolist() for _ in range(2))
    assert first != second


def test_no_number_of_bits_gives_a_race_time_without_a_logarithm() -> None:
    """The extreme random bits: the race time stays finite and above 0 at both ends."""
    import triton
    import triton.language as tl

    @triton.jit
    def times(bits_ptr, out_ptr):  # type: ignore[no-untyped-def]
        lane = tl.arange(0, 4)
        tl.store(out_ptr + lane, fused.exponential(tl.load(bits_ptr + lane).to(tl.uint32, bitcast=True)))

    bits = torch.tensor([0, 1, -1, 1 << 30], dtype=torch.int32, device=DEVICE)
    out = torch.empty(4, device=DEVICE)
    times[(1,)](bits, out)
    assert out.isfinite().all() and (out > 0).all()
    assert torch.allclose(out[3].cpu(), torch.tensor(0.2876821), atol=1e-5)  # -log(1 - 1/4)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("rows, size, outputs", [(1, 512, 8), (2, 1024, 16), (4, 1536, 24), (3, 512, 8), (1, 500, 8)])
def test_linear(rows: int, size: int, outputs: int, dtype: torch.dtype) -> None:
    """The kernel for 1, 2 and 4 rows; and sizes that it leaves to torch."""
    x, weight = normal(rows, size, dtype=dtype), normal(outputs, size, dtype=dtype) / size**0.5
    assert close(fused.linear(weight, x), torch.nn.functional.linear(x, weight), dtype)
