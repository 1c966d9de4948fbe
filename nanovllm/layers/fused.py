"""Small operators of a layer, each as one Triton kernel: a GPU spends more time on their traffic than on their sums.

Every function here has a plain twin of the same result in the layer that it serves; `models.fuse.install_fused` hands
them to the layers of a model on a GPU. A layer that somebody replaced keeps its own code: only the shipped classes are
given one. All statistics are float32, and values are rounded where the plain code rounds them, but for the rotation,
which rounds once instead of three times.

Letters: T tokens, N heads, K kv heads, H head dim, D model dim, F mlp dim, S sampled rows, V vocabulary.
"""

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra import libdevice
from triton.runtime.interpreter import InterpretedFunction


@triton.jit
def rms_norm_kernel(x_ptr, residual_ptr, weight_ptr, out_ptr, sum_ptr, eps, D: tl.constexpr, PADDED: tl.constexpr, ADD: tl.constexpr):  # fmt: skip  # noqa: E501
    """One program per row: sum = x + residual; out = sum / rms(sum) * weight."""
    row, column = tl.program_id(0).to(tl.int64), tl.arange(0, PADDED)
    mask, at = column < D, row * D + column
    dtype = out_ptr.dtype.element_ty
    x = tl.load(x_ptr + at, mask=mask, other=0.0).to(tl.float32)
    if ADD:
        x = (x + tl.load(residual_ptr + at, mask=mask, other=0.0).to(tl.float32)).to(dtype)
        tl.store(sum_ptr + at, x, mask=mask)
        x = x.to(tl.float32)
    x = x * tl.rsqrt(tl.sum(x * x, 0) / D + eps)
    weight = tl.load(weight_ptr + column, mask=mask, other=0.0).to(tl.float32)
    tl.store(out_ptr + at, (x.to(dtype).to(tl.float32) * weight).to(dtype), mask=mask)


def rms_norm(x: Tensor, weight: Tensor, eps: float, residual: Tensor | None = None) -> Tensor | tuple[Tensor, Tensor]:
    """x, residual [..., D] -> the normed rows, and with a residual also the sum."""
    x = x.contiguous()
    out = torch.empty_like(x)
    total = x if residual is None else torch.empty_like(x)
    size = x.shape[-1]
    padded = triton.next_power_of_2(size)
    rms_norm_kernel[(x.numel() // size,)](
        x, x if residual is None else residual.contiguous(), weight, out, total, eps,
        D=size, PADDED=padded, ADD=residual is not None, num_warps=min(max(padded // 512, 1), 16),
    )  # fmt: skip
    return out if residual is None else (out, total)


@triton.jit
def silu_and_mul_kernel(x_ptr, out_ptr, F: tl.constexpr, TILE: tl.constexpr):
    """One program per (row, TILE outputs)."""
    row, column = tl.program_id(0).to(tl.int64), tl.program_id(1) * TILE + tl.arange(0, TILE)
    mask = column < F
    dtype = out_ptr.dtype.element_ty
    gate = tl.load(x_ptr + row * 2 * F + column, mask=mask, other=0.0).to(tl.float32)
    value = tl.load(x_ptr + row * 2 * F + F + column, mask=mask, other=0.0).to(tl.float32)
    gate = (gate / (1.0 + tl.exp(-gate))).to(dtype).to(tl.float32)
    tl.store(out_ptr + row * F + column, (gate * value).to(dtype), mask=mask)


def silu_and_mul(x: Tensor) -> Tensor:
    """x [..., 2 F], gate then values -> silu(gate) * values [..., F]."""
    x = x.contiguous()
    size = x.shape[-1] // 2
    out = x.new_empty(*x.shape[:-1], size)
    silu_and_mul_kernel[(out.numel() // size, triton.cdiv(size, 1024))](x, out, F=size, TILE=1024)
    return out


@triton.jit
def norm_and_rotate(x_ptr, weight_ptr, cos, sin, mask, eps, H: tl.constexpr, HALF: tl.constexpr, NORM: tl.constexpr):
    """The two halves of heads [M, H / 2] at x_ptr, normed and turned. x_ptr points at first halves, mask [M, H / 2]."""
    dtype = x_ptr.dtype.element_ty
    first = tl.load(x_ptr, mask=mask, other=0.0).to(tl.float32)
    second = tl.load(x_ptr + HALF, mask=mask, other=0.0).to(tl.float32)
    if NORM:
        scale = tl.rsqrt((tl.sum(first * first, 1) + tl.sum(second * second, 1)) / H + eps)[:, None]
        first = (first * scale).to(dtype).to(tl.float32) * tl.load(weight_ptr, mask=mask, other=0.0).to(tl.float32)
        second = (second * scale).to(dtype).to(tl.float32)
        second = second * tl.load(weight_ptr + HALF, mask=mask, other=0.0).to(tl.float32)
        first, second = first.to(dtype).to(tl.float32), second.to(dtype).to(tl.float32)
    return (first * cos - second * sin).to(dtype), (second * cos + first * sin).to(dtype)


@triton.jit
def rotate_and_store_kernel(
    qkv_ptr, positions_ptr, cos_sin_ptr, q_weight_ptr, k_weight_ptr, k_cache_ptr, v_cache_ptr, slot_mapping_ptr, eps,
    K: tl.constexpr, GROUP: tl.constexpr, H: tl.constexpr, GROUP_PADDED: tl.constexpr, HALF_PADDED: tl.constexpr,
    NORM: tl.constexpr,
):  # fmt: skip
    """One program per (token, kv head): its GROUP query heads turned in place, its key and value into the cache.

    A row of qkv is N query heads, K keys, K values; kv head 1 of K = 8 with GROUP = 2 has query heads 2 and 3, its key
    at head N + 1 = 17 of the row and its value at head N + K + 1 = 25. The pairs that turn are (i, i + H / 2).
    """
    token, kv_head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    HALF: tl.constexpr = H // 2
    pair, member = tl.arange(0, HALF_PADDED), tl.arange(0, GROUP_PADDED)
    real = (pair < HALF)[None, :]
    angles = cos_sin_ptr + tl.load(positions_ptr + token) * H + pair[None, :]
    cos = tl.load(angles, mask=real, other=0.0).to(tl.float32)
    sin = tl.load(angles + HALF, mask=real, other=0.0).to(tl.float32)

    row_ptr = qkv_ptr + token * ((GROUP + 2) * K * H) + pair[None, :]
    q_ptr = row_ptr + (kv_head * GROUP + member)[:, None] * H
    q_mask = (member < GROUP)[:, None] & real
    q_first, q_second = norm_and_rotate(q_ptr, q_weight_ptr + pair[None, :], cos, sin, q_mask, eps, H, HALF, NORM)
    tl.store(q_ptr, q_first, mask=q_mask)
    tl.store(q_ptr + HALF, q_second, mask=q_mask)

    slot = tl.load(slot_mapping_ptr + token)
    if slot >= 0:
        k_ptr = row_ptr + (GROUP * K + kv_head) * H
        v_ptr = k_ptr + K * H
        k_first, k_second = norm_and_rotate(k_ptr, k_weight_ptr + pair[None, :], cos, sin, real, eps, H, HALF, NORM)
        at = (slot * K + kv_head) * H + pair[None, :]
        tl.store(k_cache_ptr + at, k_first, mask=real)
        tl.store(k_cache_ptr + at + HALF, k_second, mask=real)
        tl.store(v_cache_ptr + at, tl.load(v_ptr, mask=real), mask=real)
        tl.store(v_cache_ptr + at + HALF, tl.load(v_ptr + HALF, mask=real), mask=real)


def rotate_and_store(
    num_kv_heads: int, head_dim: int, cos_sin: Tensor, norms: tuple[Tensor, Tensor, float] | None,
    qkv: Tensor, positions: Tensor, k_cache: Tensor, v_cache: Tensor, slot_mapping: Tensor,
) -> Tensor:  # fmt: skip
    """Norm of queries and keys (where the model has it), rotary embedding and KV store in one pass.

    qkv [T, (N + 2 K) H], changed in place; cos_sin [max_position, H]; norms: (query weight [H], key weight [H], eps).
    Returns the queries, a view [T, N, H] of qkv.
    """
    assert qkv.is_contiguous() and k_cache.is_contiguous() and v_cache.is_contiguous() and cos_sin.is_contiguous()
    tokens, heads = qkv.shape[0], qkv.shape[1] // head_dim - 2 * num_kv_heads
    group = heads // num_kv_heads
    q_weight, k_weight, eps = norms or (cos_sin, cos_sin, 0.0)
    rotate_and_store_kernel[(tokens, num_kv_heads)](
        qkv, positions, cos_sin, q_weight, k_weight, k_cache, v_cache, slot_mapping, eps,
        K=num_kv_heads, GROUP=group, H=head_dim, GROUP_PADDED=triton.next_power_of_2(group),
        HALF_PADDED=triton.next_power_of_2(head_dim // 2), NORM=norms is not None, num_warps=1,
    )  # fmt: skip
    return qkv[:, : heads * head_dim].view(tokens, heads, head_dim)


@triton.jit
def log(x):
    """The natural logarithm; on an NVIDIA GPU its own instruction, which is within 2^-22 and saves half of the time."""
    if FAST_LOG:
        return libdevice.fast_logf(x)
    else:
        return tl.log(x)


FAST_LOG = tl.constexpr(torch.version.hip is None and not isinstance(log, InterpretedFunction))


@triton.jit
def exponential(bits):
    """Exp(1) from 32 random bits: -log(1 - u) with u in (0, 1); near 0 by its series, where 1 - u would round to 1.

    u is at most 1 - 2^-24, so the result is finite and above 0, and so is its logarithm.
    """
    u = tl.minimum((bits.to(tl.float32) + 0.5) * 2.3283064365386963e-10, 0.99999994)  # 2^-32
    return tl.where(u < 1e-3, u * (1.0 + u * (0.5 + u * 0.33333334)), -log(1.0 - u))


@triton.jit(do_not_specialize=["seed", "offset"])
def race_kernel(
    logits_ptr, temperatures_ptr, best_ptr, id_ptr, seed, offset, stride,
    V: tl.constexpr, LANES: tl.constexpr, NOISE: tl.constexpr,
):  # fmt: skip
    """One program per (row, 4 * LANES logits): the best score among them and its token id.

    A Philox call (7 rounds, which pass all statistical tests: Salmon et al. 2011) gives four random numbers per lane,
    so a lane looks at four logits, LANES apart. The counters (lane, tile, row, offset) never repeat within a seed
    while `offset` counts the calls. The strict > keeps the lowest id among equal scores.
    """
    row, tile = tl.program_id(0).to(tl.int64), tl.program_id(1)
    temperature = tl.load(temperatures_ptr + row)
    spread = tl.where(temperature <= 1e-5, 0.0, tl.minimum(temperature, 1.0))
    shrink = 1.0 / tl.maximum(temperature, 1.0)
    lane = tl.arange(0, LANES)
    zero = lane * 0
    bits = tl.philox(seed, lane, zero + tile, zero + tl.program_id(0), zero + offset, 7)
    best, best_id = float("-inf"), tile * 4 * LANES
    for part in tl.static_range(4):
        column = (tile * 4 + part) * LANES + lane
        score = tl.load(logits_ptr + row * stride + column, mask=column < V, other=float("-inf")).to(tl.float32)
        if NOISE:
            score = score * shrink - spread * log(exponential(bits[part]))
        top, at = tl.max(score, 0, return_indices=True)
        best_id = tl.where(top > best, (tile * 4 + part) * LANES + at, best_id)
        best = tl.maximum(best, top)
    tl.store(best_ptr + row * tl.num_programs(1) + tile, best)
    tl.store(id_ptr + row * tl.num_programs(1) + tile, best_id)


@triton.jit
def finish_kernel(best_ptr, id_ptr, out_ptr, TILES: tl.constexpr, PADDED: tl.constexpr):
    """One program per row: the winner among the winners of its tiles."""
    row, tile = tl.program_id(0), tl.arange(0, PADDED)
    best = tl.load(best_ptr + row * TILES + tile, mask=tile < TILES, other=float("-inf"))
    _, winner = tl.max(best, 0, return_indices=True)
    tl.store(out_ptr + row, tl.load(id_ptr + row * TILES + winner).to(tl.int64))


def next_counter(generator: torch.Generator | None, device: torch.device) -> tuple[int, int]:
    """(seed, offset) of one call, both within 31 bits; the generator (None: the device's own) moves on.

    A GPU's generator is a Philox counter that the host keeps, so it is read and moved without waiting for the device.
    """
    if generator is None:
        generator = torch.cuda.default_generators[device.index] if device.type == "cuda" else torch.default_generator
    if generator.device.type == "cpu":
        return int(torch.randint(1 << 31, (1,), generator=generator)), 0
    offset = generator.get_offset()
    generator.set_offset(offset + 4)  # torch counts in fours
    return generator.initial_seed() % (1 << 31), offset // 4 % (1 << 31)


def sample(logits: Tensor, temperatures: Tensor, generator: torch.Generator | None, needs_noise: bool) -> Tensor:
    """The exponential race of `Sampler` in one pass over logits [S, V] -> token ids [S] int64."""
    rows, size = logits.shape
    lanes = 1024
    tiles = triton.cdiv(size, 4 * lanes)
    seed, offset = next_counter(generator, logits.device) if needs_noise else (0, 0)
    best = torch.empty(rows, tiles, dtype=torch.float32, device=logits.device)
    ids = torch.empty(rows, tiles, dtype=torch.int32, device=logits.device)
    out = torch.empty(rows, dtype=torch.int64, device=logits.device)
    race_kernel[(rows, tiles)](
        logits, temperatures, best, ids, seed, offset, logits.stride(0),
        V=size, LANES=lanes, NOISE=needs_noise,
    )  # fmt: skip
    finish_kernel[(rows,)](best, ids, out, TILES=tiles, PADDED=triton.next_power_of_2(tiles))
    return out


@triton.jit
def row_linear_kernel(x_ptr, weight_ptr, out_ptr, IN: tl.constexpr, OUTPUTS: tl.constexpr, TILE: tl.constexpr):
    """One program (of a single warp) per OUTPUTS outputs: x [IN] @ weight [OUT, IN].T.

    With one row a product is nothing but reading the weight once. The loops are unrolled, and a single warp needs no
    barrier, so that many loads are under way before the first sum.
    """
    column, place = tl.arange(0, TILE), tl.arange(0, OUTPUTS)
    first = tl.program_id(0) * OUTPUTS
    out = tl.zeros([OUTPUTS], tl.float32)
    for output in tl.static_range(OUTPUTS):
        acc = tl.zeros([TILE], tl.float32)
        for start in tl.static_range(0, IN, TILE):
            weight = tl.load(weight_ptr + (first + output) * IN + start + column).to(tl.float32)
            acc += weight * tl.load(x_ptr + start + column).to(tl.float32)
        out = tl.where(place == output, tl.sum(acc, 0), out)
    tl.store(out_ptr + first + place, out.to(out_ptr.dtype.element_ty))


def linear(weight: Tensor, x: Tensor) -> Tensor:
    """x [T, in] @ weight [out, in].T -> [T, out]; a single row by a kernel that does nothing but read the weight."""
    (rows, size), outputs = x.shape, weight.shape[0]
    if rows != 1 or size % 512 or outputs % 4:
        return F.linear(x, weight)
    out = x.new_empty(rows, outputs)
    step = 4 if outputs >= 4096 else 1
    row_linear_kernel[(outputs // step,)](x, weight, out, IN=size, OUTPUTS=step, TILE=512, num_warps=1)
    return out
