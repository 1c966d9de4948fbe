"""The compiled decode step gives the plain step's results, steps aside when asked to, and says why it cannot be."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from nanovllm.attention.torch_backend import TorchAttention
from nanovllm.errors import ConfigError
from nanovllm.layers.activation import SiluAndMul
from nanovllm.layers.compiled import (
    CompiledNorm,
    CompiledProduct,
    CompiledRotateAndStore,
    CompiledSiluAndMul,
    find_compiler,
    load_library,
)
from nanovllm.layers.cpu import Int8Product
from nanovllm.layers.layernorm import RMSNorm
from nanovllm.layers.parallel import TPGroup
from nanovllm.layers.rotary_embedding import RotaryEmbedding
from nanovllm.models import prepare_for_device
from nanovllm.models.compiled_step import CompiledStep, hindrance
from tests.models.helpers import Pages, make_model
from tests.tiny_models import make_tiny_model

WIDE: dict[str, Any] = {"intermediate_size": 128, "head_dim": 32}
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3": ("qwen3", WIDE),
    "qwen3, 9 heads and 3": (
        "qwen3",
        {**WIDE, "num_attention_heads": 18, "num_key_value_heads": 3, "tie_word_embeddings": False},
    ),
    "qwen2": (
        "qwen2",
        {"intermediate_size": 192, "hidden_size": 128, "num_attention_heads": 4, "num_key_value_heads": 4},
    ),
    "llama": ("llama", {**WIDE, "attention_bias": True, "mlp_bias": True, "num_key_value_heads": 1, "vocab_size": 301}),
}


@pytest.fixture(scope="module", autouse=True)
def compiler(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A compiler that can build the step, and a cache folder of our own."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("NANOVLLM_HOME", str(tmp_path_factory.mktemp("home")))
        try:
            load_library(torch.float32, False)
        except ConfigError as error:
            pytest.skip(f"no compiled step here: {error}")
        yield


@pytest.fixture(scope="module", params=VARIANTS, ids=lambda name: name.replace(" ", "-"))
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    architecture, overrides = VARIANTS[request.param]
    return make_tiny_model(tmp_path_factory.mktemp("model"), architecture, **overrides)


def prepared(
    folder: Path, dtype: torch.dtype, compile: bool, quantization: str | None = None, block_size: int = 4
) -> Any:
    model = make_model(folder, block_size=block_size, dtype=dtype)
    prepare_for_device(model, "cpu", dtype, quantization, compile)
    return model


def decode(model: Any, lens: list[int], steps: int, dtype: torch.dtype, block_size: int = 4) -> tuple[Tensor, Tensor]:
    """Prompts of `lens` tokens and `steps` decodes of all rows: the decodes' logits, and the cache."""
    pages = Pages(model, [length + steps for length in lens], block_size, dtype)
    generator = torch.Generator().manual_seed(1)
    tokens = [torch.randint(0, 298, (length + steps,), generator=generator).tolist() for length in lens]
    order = sorted(range(len(lens)), key=lambda row: lens[row] > 1)  # prompts of one token are decodes by shape
    pages.step(model, [(row, tokens[row][: lens[row]], 0) for row in order])
    logits = []
    for step in range(steps):
        rows = [(row, tokens[row][length + step : length + step + 1], length + step) for row, length in enumerate(lens)]
        logits.append(pages.step(model, rows).float())
    return torch.cat(logits), pages.cache.float()


def relative_error(got: Tensor, want: Tensor) -> float:
    return float((got - want).norm() / want.norm())


@pytest.mark.parametrize("lens", [[1], [5], [1, 3, 4, 5, 17], [(7 * row) % 23 + 1 for row in range(64)]])
def test_float32_equals_the_plain_step(folder: Path, lens: list[int]) -> None:
    """1 to 64 rows: every number of rows that the products treat apart, and unwritten slots that are NaN."""
    plain, fast = prepared(folder, torch.float32, False), prepared(folder, torch.float32, True)
    want, want_cache = decode(plain, lens, 3, torch.float32)
    got, cache = decode(fast, lens, 3, torch.float32)
    assert (got - want).abs().max() < 1e-4
    assert torch.equal(cache.isnan(), want_cache.isnan())
    assert (cache - want_cache).nan_to_num().abs().max() < 1e-4


@pytest.mark.parametrize("rows", [1, 2, 3, 4, 6, 15, 16, 17, 33, 64, 65, 130])
def test_every_number_of_rows(rows: int, tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path, "qwen3", num_hidden_layers=1, **WIDE)
    for dtype in (torch.float32, torch.bfloat16):
        want, _ = decode(prepared(folder, torch.float32, False), [2] * rows, 1, torch.float32)
        got, _ = decode(prepared(folder, dtype, True), [2] * rows, 1, dtype)
        assert relative_error(got, want) < (1e-5 if dtype == torch.float32 else 0.02)


def test_bfloat16_is_as_near_to_float32_as_the_plain_step(folder: Path) -> None:
    lens = [5, 1, 40, 16, 17]
    exact, _ = decode(prepared(folder, torch.float32, False), lens, 4, torch.float32)
    plain, _ = decode(prepared(folder, torch.bfloat16, False), lens, 4, torch.bfloat16)
    fast, _ = decode(prepared(folder, torch.bfloat16, True), lens, 4, torch.bfloat16)
    assert relative_error(fast, exact) < max(1.3 * relative_error(plain, exact), 0.01)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_int8_equals_the_plain_int8_step(folder: Path, dtype: torch.dtype) -> None:
    exact, plain = prepared(folder, torch.float32, False, "int8"), prepared(folder, dtype, False, "int8")
    fast = prepared(folder, dtype, True, "int8")
    assert isinstance(fast.model.layers[0].mlp.down_proj.product, Int8Product)
    want, _ = decode(exact, [3, 1, 20], 3, torch.float32)
    rounding = relative_error(decode(plain, [3, 1, 20], 3, dtype)[0], want)
    assert relative_error(decode(fast, [3, 1, 20], 3, dtype)[0], want) < max(1.3 * rounding, 1e-4)


@pytest.mark.parametrize("block_size", [1, 16, 256])
def test_block_sizes(block_size: int, tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path, "llama", num_hidden_layers=2, **WIDE)
    lens = [15, 16, 17, 1, 300]
    want, _ = decode(prepared(folder, torch.float32, False, None, block_size), lens, 2, torch.float32, block_size)
    got, _ = decode(prepared(folder, torch.float32, True, None, block_size), lens, 2, torch.float32, block_size)
    assert (got - want).abs().max() < 1e-4


def test_long_contexts_and_large_scores_stay_finite(tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path, "llama", num_hidden_layers=1, initializer_range=1.0, **WIDE)
    want, _ = decode(prepared(folder, torch.float32, False, None, 16), [900, 2], 1, torch.float32, 16)
    got, _ = decode(prepared(folder, torch.float32, True, None, 16), [900, 2], 1, torch.float32, 16)
    assert got.isfinite().all() and relative_error(got, want) < 1e-3


def test_padded_rows_write_nothing_and_stay_finite(tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path, "qwen3", num_hidden_layers=1, **WIDE)
    model = prepared(folder, torch.float32, True)
    pages = Pages(model, [4])
    pages.step(model, [(0, [5, 6, 7], 0)])
    before = pages.cache.clone()
    metadata = pages.metadata([(0, [9], 3)])[1]
    padded = type(metadata)(
        torch.tensor([int(metadata.slot_mapping[0]), -1]),
        torch.cat((metadata.block_tables, torch.full_like(metadata.block_tables, -1))),
        torch.tensor([4, 0], dtype=torch.int32),
        torch.tensor([0, 1, 2], dtype=torch.int32),
        1,
        4,
        2,
    )
    hidden = model(torch.tensor([9, 0]), torch.tensor([3, 0]), pages.cache, padded)
    changed = (pages.cache.nan_to_num() != before.nan_to_num()).any(-1).any(-1).sum()
    assert hidden.isfinite().all() and changed == 2  # the key and the value of one token


def calls_of(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Rows of every compiled step from here on."""
    calls: list[int] = []
    run = CompiledStep.__call__

    def counted(self: Any, input_ids: Tensor, *args: Any) -> Tensor:
        calls.append(len(input_ids))
        return run(self, input_ids, *args)

    monkeypatch.setattr(CompiledStep, "__call__", counted)
    return calls


def test_only_steps_of_decodes_alone_are_compiled(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls, model = calls_of(monkeypatch), prepared(folder, torch.float32, True)
    decode(model, [4, 6], 3, torch.float32)
    assert calls == [2, 2, 2]


def test_a_forward_hook_sees_its_layer_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = make_tiny_model(tmp_path, "qwen3", num_hidden_layers=2, **WIDE)
    calls, model = calls_of(monkeypatch), prepared(folder, torch.float32, True)
    seen: list[int] = []
    handle = model.model.layers[1].mlp.register_forward_hook(lambda module, args, output: seen.append(len(output)))
    decode(model, [4], 2, torch.float32)
    assert seen == [4, 1, 1] and not calls
    handle.remove()
    decode(model, [4], 2, torch.float32)
    assert len(seen) == 3 and calls == [1, 1]


def test_changed_weights_count_in_the_next_step(tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path, "qwen3", num_hidden_layers=2, **WIDE)
    plain, fast = prepared(folder, torch.float32, False), prepared(folder, torch.float32, True)
    for model in (plain, fast):
        model.model.layers[0].mlp.down_proj.weight.data.mul_(0.5)
    want, got = decode(plain, [4, 2], 2, torch.float32)[0], decode(fast, [4, 2], 2, torch.float32)[0]
    assert (got - want).abs().max() < 1e-4


def test_what_stands_in_the_way_is_named(tmp_path: Path) -> None:
    narrow = make_model(make_tiny_model(tmp_path / "a", "qwen3"))
    assert "no multiples of 64" in str(hindrance(narrow, torch.float32))
    with pytest.raises(ConfigError, match="no multiples of 64"):
        prepare_for_device(narrow, "cpu", torch.float32, None, True)
    prepare_for_device(narrow, "cpu", torch.float32, None, None)
    assert narrow.model.compiled_step is None

    wide = make_tiny_model(tmp_path / "b", "qwen3", **WIDE)
    assert "several ranks" in str(hindrance(make_model(wide, tp=TPGroup(0, 2)), torch.float32))
    assert "float16" in str(hindrance(make_model(wide), torch.float16))
    assert hindrance(make_model(wide), torch.float32) is None
    partly = make_model(wide)
    partly.lm_head.product = Int8Product(partly.lm_head.weight, None)
    assert "only some" in str(hindrance(partly, torch.float32))

    def resolve(cls: Any) -> Any:
        return type("Mine", (cls,), {}) if cls.__name__ == "SiluAndMul" else cls

    assert "Mine" in str(hindrance(make_model(wide, resolve=resolve), torch.float32))


def test_without_a_compiler_there_is_the_plain_step_or_a_clear_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = make_tiny_model(tmp_path, "qwen3", num_hidden_layers=1, **WIDE)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CC", raising=False)
    assert find_compiler() is None
    with pytest.raises(ConfigError, match="needs a C compiler"):
        prepared(folder, torch.float32, True)
    model = make_model(folder)
    prepare_for_device(model, "cpu", torch.float32)
    assert model.model.compiled_step is None and decode(model, [3], 1, torch.float32)[0].isfinite().all()


def test_a_compiler_that_fails_is_quoted_and_leaves_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = tmp_path / "cc"
    broken.write_text("#!/bin/sh\necho 'unknown option -fopenmp' >&2\nexit 1\n")
    broken.chmod(0o755)
    monkeypatch.setenv("CC", str(broken))
    monkeypatch.setenv("NANOVLLM_HOME", str(tmp_path / "home"))
    with pytest.raises(ConfigError, match="unknown option -fopenmp"):
        load_library(torch.float32, False)
    assert not list((tmp_path / "home" / "compiled").iterdir())


def test_a_library_that_cannot_be_loaded_is_no_end_of_the_engine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A damaged file, or a folder from which the system runs nothing."""
    folder = make_tiny_model(tmp_path / "model", "qwen3", num_hidden_layers=1, **WIDE)
    monkeypatch.setenv("NANOVLLM_HOME", str(tmp_path))
    (tmp_path / "cc").write_text('#!/bin/sh\nwhile [ "$1" != -o ]; do shift; done\necho no library > "$2"\n')
    (tmp_path / "cc").chmod(0o755)
    monkeypatch.setenv("CC", str(tmp_path / "cc"))
    with pytest.raises(ConfigError, match="cannot build the kernels"):
        prepared(folder, torch.float32, True)
    model = make_model(folder)
    prepare_for_device(model, "cpu", torch.float32)
    assert model.model.compiled_step is None


def test_a_library_is_built_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NANOVLLM_HOME", str(tmp_path))
    load_library(torch.float32, False)
    (library,) = (tmp_path / "compiled").iterdir()
    made = library.stat().st_mtime_ns
    load_library(torch.float32, False)
    load_library(torch.float32, True)
    assert library.stat().st_mtime_ns == made and len(list((tmp_path / "compiled").iterdir())) == 2


def test_somebody_elses_default_dtype_counts_for_nothing(default_model_dir: Path) -> None:
    """In a process of its own, since memory that is too small would end it."""
    code = (
        "import sys, torch; from nanovllm import LLM, SamplingParams\n"
        "prompts, params = [[5, 6, 7 + row] for row in range(20)], SamplingParams(1e-6, 4, True)\n"
        "told = []\n"
        "for dtype in (torch.float32, torch.bfloat16):\n"
        "    torch.set_default_dtype(dtype)\n"
        "    with LLM(sys.argv[1], max_model_len=256) as llm:\n"
        "        told.append([each['token_ids'] for each in llm.generate(prompts, params, use_tqdm=False)])\n"
        "assert told[0] == told[1]\n"
    )
    command = [sys.executable, "-c", code, str(default_model_dir)]
    result = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parents[2])
    assert result.returncode == 0, result.stderr


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(1, 64, 7), (5, 128, 48), (64, 64, 301), (70, 64, 33)])
def test_compiled_products(shape: tuple[int, int, int], dtype: torch.dtype) -> None:
    rows, inputs, outputs = shape
    x, weight, bias = torch.randn(rows, inputs), torch.randn(outputs, inputs), torch.randn(outputs)
    x, weight, bias = x.to(dtype), weight.to(dtype), bias.to(dtype)
    want = x.double() @ weight.double().T + bias.double()
    library = load_library(dtype, False)
    product = CompiledProduct(library, weight, bias)(x)
    logits = CompiledProduct(library, weight, bias, logits=True)(x)
    assert product.dtype == dtype and relative_error(product.double(), want) < (
        1e-6 if dtype == torch.float32 else 0.005
    )
    assert logits.dtype == torch.float32 and relative_error(logits.double(), want) < 1e-6


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "shape", [(1, 64, 48), (16, 576, 16), (17, 128, 301), (33, 64, 64), (48, 192, 32), (64, 64, 80)]
)
def test_compiled_int8_products(shape: tuple[int, int, int], dtype: torch.dtype) -> None:
    """Every number of tiles; a row of zeros, and one that a single large number rules."""
    rows, inputs, outputs = shape
    x, weight = torch.randn(rows, inputs), torch.randint(-127, 128, (outputs, inputs), dtype=torch.int8)
    scale, bias = torch.rand(outputs) + 0.5, torch.randn(outputs)
    x[rows // 2, 3] = 100.0
    if rows > 1:
        x[-1] = 0.0
    x, scale, bias = x.to(dtype), scale.to(dtype), bias.to(dtype)
    want = x.double() @ (weight.double() * scale.double()[:, None]).T + bias.double()
    product = CompiledProduct(load_library(dtype, True), weight, bias, scale, logits=True)
    got = product(x).double()
    # An input is off by at most half of 1 / (127 * 256) of its row's largest, which a sum of `inputs` of them averages.
    allowed = 1e-6 if dtype == torch.float32 else 2e-4
    for row in range(rows):
        assert relative_error(got[row], want[row]) < allowed * (10 if x[row].abs().max() > 50 else 1)
    assert rows == 1 or torch.equal(got[-1], bias.double())


TOLERANCE = {torch.float32: 1e-6, torch.bfloat16: 0.005}


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("shape", [(1, 64), (70, 576), (3, 5, 32)])
def test_compiled_norm(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    x, residual, weight = torch.randn(shape).to(dtype), torch.randn(shape).to(dtype), torch.randn(shape[-1]).to(dtype)
    plain = RMSNorm(shape[-1], 1e-5)
    plain.weight.data = weight.float()
    compiled = CompiledNorm(load_library(dtype, False), weight)
    alone = compiled(x, weight, 1e-5)
    assert isinstance(alone, Tensor) and alone.dtype == dtype
    assert relative_error(alone.float(), plain(x.float())) < TOLERANCE[dtype]
    normed, total = compiled(x, weight, 1e-5, residual)
    assert torch.equal(total, x + residual)
    assert relative_error(normed.float(), plain((x + residual).float())) < TOLERANCE[dtype]
    spread = torch.randn(*shape[:-1], 2 * shape[-1]).to(dtype)[..., : shape[-1]]  # rows that do not touch
    assert torch.equal(compiled(spread, weight, 1e-5), compiled(spread.contiguous(), weight, 1e-5))  # type: ignore[arg-type]


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_compiled_silu_and_mul(dtype: torch.dtype) -> None:
    x = torch.cat((torch.randn(9, 64), torch.tensor([[-300.0, 300.0] * 32]))).to(dtype) * 3
    got = CompiledSiluAndMul(load_library(dtype, False))(x)
    assert got.shape == (10, 32) and relative_error(got.float(), SiluAndMul()(x.float())) < TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("normed", [False, True])
def test_compiled_rotate_and_store(normed: bool, dtype: torch.dtype) -> None:
    heads, kv_heads, size, rows = 9, 3, 32, 5
    backend = TorchAttention(heads, kv_heads, size, 1.0, 4)
    qkv, positions = torch.randn(rows, (heads + 2 * kv_heads) * size).to(dtype), torch.tensor([0, 7, 3, 99, 4])
    slots = torch.tensor([11, 0, -1, 5, 2])
    rotary, norms = RotaryEmbedding(size, 100, 10_000.0), [RMSNorm(size, 1e-5) for _ in range(2)]
    for norm in norms:
        norm.weight.data = torch.randn(size).to(dtype).float()
    q, k, v = qkv.float().unflatten(1, (-1, size)).split((heads, kv_heads, kv_heads), 1)
    if normed:
        q, k = norms[0](q), norms[1](k)
    q, k = rotary(positions, q, k)
    want = torch.zeros(2, 3, 4, kv_heads, size)
    backend.store(k.contiguous(), v.contiguous(), want[0], want[1], slots)

    got = torch.zeros(2, 3, 4, kv_heads, size, dtype=dtype)
    weights = (norms[0].weight.to(dtype), norms[1].weight.to(dtype), 1e-5) if normed else None
    compiled = CompiledRotateAndStore(load_library(dtype, False), backend, rotary.cos_sin, weights)
    queries = compiled(qkv, positions, got[0], got[1], slots)
    assert relative_error(queries.float(), q) < TOLERANCE[dtype]
    assert relative_error(got.float(), want) < TOLERANCE[dtype]
    assert torch.equal(got != 0, want != 0)  # a padded row has written nowhere


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_a_step_that_samples_nothing(dtype: torch.dtype) -> None:
    """Chunks that are not the last of their prompts give no token, so no row of logits is wanted."""
    nothing, weight, library = torch.randn(0, 64).to(dtype), torch.randn(48, 64).to(dtype), load_library(dtype, False)
    for product in (CompiledProduct(library, weight, None), CompiledProduct(library, weight, None, logits=True)):
        assert product(nothing).shape == (0, 48)
    assert CompiledSiluAndMul(library)(nothing).shape == (0, 32)
    normed = CompiledNorm(library, torch.ones(64).to(dtype))(nothing, weight, 1e-5)
    assert isinstance(normed, Tensor) and normed.shape == (0, 64)
