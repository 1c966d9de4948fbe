"""Every attention backend on a real GPU against the dense oracle: all modes, odd sizes, mixed lengths of 1 to 5,000."""

import importlib.util

import pytest
import torch

from tests.attention.steps import make_step, run

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 5e-3, torch.float16: 1e-3}  # |out - exact| / |exact|
LENGTHS = [1, 255, 256, 257, 511, 512, 513, 1, 64, 100, 2048, 5000]
MODES = {
    "decode": [(1, context) for context in LENGTHS],
    "decode with padding": [(1, 0), (1, 300), (1, 0), (1, 1), (1, 0)],
    "one long context": [(1, 5000)],
    "prefill": [(n, n) for n in LENGTHS[1:]],
    "behind a cached prefix": [(2, 258), (1 + 1, 513), (256, 512), (257, 769), (100, 5000), (513, 600)],
    "mixed": [(1, 1), (1, 257), (1, 5000), (2, 2), (255, 511), (300, 300), (17, 1041)],
}
BACKENDS = [("triton", torch.float32), ("triton", torch.bfloat16), ("triton", torch.float16), ("flash", torch.bfloat16)]


def backend_class(name: str):  # type: ignore[no-untyped-def]
    if name == "flash":
        if importlib.util.find_spec("flash_attn") is None:
            pytest.skip("flash-attn is not installed")
        from nanovllm.attention.flash_backend import FlashAttention

        return FlashAttention
    from nanovllm.attention.triton_backend import TritonAttention

    return TritonAttention


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("backend, dtype", BACKENDS)
@pytest.mark.parametrize("heads, kv_heads, head_dim", [(4, 2, 128), (9, 3, 64)])
def test_backends_equal_the_oracle(
    mode: str, backend: str, dtype: torch.dtype, heads: int, kv_heads: int, head_dim: int
) -> None:
    step = make_step(heads, kv_heads, head_dim, 256, MODES[mode], dtype, "cuda")
    error = step.error(run(backend_class(backend), step))
    print(f"\n{backend} {dtype} H={head_dim} {mode}: {error:.1e}")
    assert error < TOLERANCE[dtype]


@pytest.mark.parametrize("head_dim, block_size", [(32, 16), (80, 32), (96, 256), (160, 64), (256, 256), (256, 4)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_triton_takes_other_sizes(head_dim: int, block_size: int, dtype: torch.dtype) -> None:
    for mode in ("decode", "mixed"):
        step = make_step(6, 2, head_dim, block_size, MODES[mode], dtype, "cuda")
        assert step.error(run(backend_class("triton"), step)) < TOLERANCE[dtype]


@pytest.mark.parametrize("mode", ["decode", "decode with padding"])
def test_flash_attn_decodes_too(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The package's own decode call, which the backend leaves aside because the Triton kernel is faster."""
    flash = backend_class("flash")
    monkeypatch.setattr(flash, "decode", flash.decode_by_kvcache)
    step = make_step(4, 2, 128, 256, MODES[mode], torch.bfloat16, "cuda")
    assert step.error(run(flash, step)) < TOLERANCE[torch.bfloat16]
