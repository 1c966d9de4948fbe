"""What `prepare_for_device` puts in the place of the plain layers gives their results."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from nanovllm.errors import ConfigError
from nanovllm.layers.cpu import FastNorm, Int8Product, PackedProduct, can_pack, can_quantize, wide_table
from nanovllm.layers.layernorm import RMSNorm
from nanovllm.layers.linear import RowParallelLinear
from nanovllm.layers.parallel import TPGroup
from nanovllm.layers.rotary_embedding import RotaryEmbedding
from nanovllm.models import prepare_for_device
from tests.models.helpers import Pages, make_model
from tests.tiny_models import make_tiny_model

TOKENS = [7, 250, 3, 44, 44, 12, 199, 0, 298, 31, 5, 77]
VARIANTS: list[tuple[str, dict[str, Any]]] = [
    ("qwen3", {}),
    ("qwen2", {"tie_word_embeddings": False}),
    ("llama", {"attention_bias": True, "mlp_bias": True}),
]
needs_bfloat16 = pytest.mark.skipif(
    not can_pack(torch.zeros(16, 16, dtype=torch.bfloat16)), reason="this CPU does not multiply bfloat16 natively"
)


def run(model: Any, dtype: torch.dtype) -> Tensor:
    """Logits of a prompt, a chunk behind it and three decodes."""
    pages = Pages(model, [12, 12], dtype=dtype)
    pages.cache.zero_()
    steps = [[(0, TOKENS[:5], 0), (1, TOKENS[:3], 0)], [(1, TOKENS[3:4], 3), (0, TOKENS[5:9], 5)]]
    steps += [[(0, TOKENS[i : i + 1], i), (1, TOKENS[i - 5 : i - 4], i - 5)] for i in (9, 10, 11)]
    return torch.cat([pages.step(model, rows) for rows in steps]).float()


def relative_error(got: Tensor, want: Tensor) -> float:
    return float((got - want).norm() / want.norm())


@pytest.mark.parametrize(("architecture", "overrides"), VARIANTS)
def test_a_prepared_float32_model_gives_the_same_logits(
    architecture: str, overrides: dict[str, Any], tmp_path: Path
) -> None:
    folder = make_tiny_model(tmp_path, architecture, **overrides)
    plain, fast = make_model(folder), make_model(folder)
    prepare_for_device(fast, "cpu", torch.float32)
    assert fast.model.norm.kernel is not None and fast.model.layers[0].self_attn.rotate_and_store is not None
    assert (run(fast, torch.float32) - run(plain, torch.float32)).abs().max() < 1e-4


@needs_bfloat16
@pytest.mark.parametrize(("architecture", "overrides"), VARIANTS)
def test_a_prepared_bfloat16_model_is_as_near_to_float32_as_the_plain_one(
    architecture: str, overrides: dict[str, Any], tmp_path: Path
) -> None:
    folder = make_tiny_model(tmp_path, architecture, **overrides)
    exact = run(make_model(folder), torch.float32)
    plain, fast = make_model(folder, dtype=torch.bfloat16), make_model(folder, dtype=torch.bfloat16)
    prepare_for_device(fast, "cpu", torch.bfloat16)
    plain_error = relative_error(run(plain, torch.bfloat16), exact)
    assert relative_error(run(fast, torch.bfloat16), exact) < max(1.3 * plain_error, 0.01)


@needs_bfloat16
@pytest.mark.parametrize("rows", [1, 3, 16, 64, 100])
def test_packed_product(rows: int) -> None:
    weight, bias, x = (torch.randn(*shape).bfloat16() for shape in ((70, 48), (70,), (rows, 48)))
    want = x.double() @ weight.double().T + bias.double()
    assert relative_error(PackedProduct(weight, bias)(x).double(), want) < 2.0**-8
    assert relative_error(PackedProduct(weight, None)(x).double(), want - bias.double()) < 2.0**-8


@needs_bfloat16
def test_a_packed_weight_replaces_the_plain_one_and_the_embedding_stays(tmp_path: Path) -> None:
    model = make_model(make_tiny_model(tmp_path, "qwen3"), dtype=torch.bfloat16)
    prepare_for_device(model, "cpu", torch.bfloat16)
    left = dict(model.named_parameters())
    assert not [name for name in left if "proj" in name or "lm_head" in name]
    assert "model.embed_tokens.weight" in left


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", [1, 5, 16, 17, 40])
def test_int8_product(rows: int, dtype: torch.dtype) -> None:
    weight, bias, x = (torch.randn(*shape).to(dtype) for shape in ((70, 64), (70,), (rows, 64)))
    weight[3] = 0
    product = Int8Product(weight, bias)
    exact = x.double() @ weight.double().T + bias.double()
    widened = x.double() @ (product.weight.double() * product.scale.double()[:, None]).T + bias.double()
    assert relative_error(product(x).double(), widened) < 2.0**-7
    assert relative_error(widened, exact) < 0.02
    assert (product(x)[:, 3] == bias[3]).all()


def test_int8_product_in_float16() -> None:
    """1,024 weights of 127 steps each sum to 130,048 steps, and float16 ends at 65,504."""
    product = Int8Product(torch.ones(32, 1024, dtype=torch.float16), None)
    for rows in (1, 20):
        assert (product(torch.ones(rows, 1024, dtype=torch.float16)) - 1024).abs().max() <= 4


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_int8_weights_are_off_by_half_a_step(dtype: torch.dtype) -> None:
    weight = torch.randn(500, 64).to(dtype)
    product = Int8Product(weight, None)
    steps = (weight.double() / product.scale.double()[:, None]) - product.weight.double()
    assert steps.abs().max() < 0.51


def test_int8_leaves_widths_that_its_kernel_cannot_read(tmp_path: Path) -> None:
    assert can_quantize(torch.zeros(3, 32)) and not can_quantize(torch.zeros(32, 72))
    folder = make_tiny_model(
        tmp_path, "llama", hidden_size=72, num_attention_heads=9, num_key_value_heads=3, head_dim=8
    )
    plain, fast = make_model(folder), make_model(folder)
    prepare_for_device(fast, "cpu", torch.float32, "int8")
    assert fast.model.layers[0].self_attn.qkv_proj.product is None
    assert isinstance(fast.model.layers[0].mlp.down_proj.product, Int8Product)
    assert relative_error(run(fast, torch.float32), run(plain, torch.float32)) < 0.05


def test_an_int8_model_is_near_the_plain_one(tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path, "qwen3")
    plain, fast = make_model(folder), make_model(folder)
    prepare_for_device(fast, "cpu", torch.float32, "int8")
    assert 1e-4 < relative_error(run(fast, torch.float32), run(plain, torch.float32)) < 0.05


def test_int8_is_for_cpus() -> None:
    with pytest.raises(ConfigError, match="quantization='int8' is for CPUs"):
        prepare_for_device(torch.nn.Module(), "cuda:0", torch.bfloat16, "int8")  # type: ignore[arg-type]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(1, 48), (7, 48), (3, 5, 48)])
def test_fast_norm(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    norm = RMSNorm(48, 1e-5).to(dtype)
    norm.weight.data.uniform_(0.5, 1.5)
    fast = FastNorm(norm.weight, norm.eps)
    for spread in (1e-4, 1.0, 300.0):
        x, residual = ((torch.randn(shape) * spread).to(dtype) for _ in range(2))
        want, total = norm(x, residual)
        got, same = fast(x, norm.weight, norm.eps, residual)
        assert torch.equal(same, total)
        tolerance = 1e-5 if dtype == torch.float32 else 2.0**-6
        assert (got - want).abs().max() <= tolerance * want.abs().max()
        assert (fast(x, norm.weight, norm.eps) - norm(x)).abs().max() <= tolerance * norm(x).abs().max()


def test_wide_table_holds_what_the_row_is_multiplied_by() -> None:
    table = wide_table(RotaryEmbedding(4, 10, 100.0).cos_sin)
    angles = torch.tensor([3.0, 0.3])
    cos, sin = angles.cos(), angles.sin()
    assert torch.allclose(table[3], torch.cat((cos, cos, -sin, sin)), atol=1e-6)


@pytest.mark.parametrize(
    ("part", "untouched"),
    [
        ("RMSNorm", lambda model: model.model.norm.kernel),
        ("RotaryEmbedding", lambda model: model.model.layers[0].self_attn.rotate_and_store),
        ("RowParallelLinear", lambda model: model.model.layers[0].mlp.down_proj.product),
    ],
)
def test_replacements_run_as_they_are(part: str, untouched: Callable[[Any], Any], tiny_model_dir: Path) -> None:
    """A subclass, as a replaced method makes one, keeps its own code and its weights."""
    calls = []

    def resolve(cls: Any) -> Any:
        if cls.__name__ != part:
            return cls

        def forward(self: Any, *args: Any) -> Any:
            calls.append(1)
            return cls.forward(self, *args)

        return type(cls.__name__, (cls,), {"forward": forward})

    model = make_model(tiny_model_dir, resolve=resolve, dtype=torch.bfloat16)
    prepare_for_device(model, "cpu", torch.bfloat16)
    assert untouched(model) is None
    run(model, torch.bfloat16)
    assert calls


def test_row_parallel_bias_is_inside_the_product_only_on_one_rank() -> None:
    alone = RowParallelLinear(8, 4, bias=True)
    pair = RowParallelLinear(8, 4, bias=True, tp=TPGroup(0, 2))
    assert alone.inner_bias() is alone.bias and pair.inner_bias() is None
