"""Chapter 8: kernels in Triton. Three of the engine's own, each a kernel and the launch that starts its programs.

A kernel is one *program* that runs many times side by side. `tl.program_id(0)` tells a program which it is; everything
else follows from that number. A program works on tiles, whole arrays of numbers whose sizes are powers of two and known
when it is compiled (`tl.constexpr`); what a tile has too much is masked off.

    tl.arange(0, 8)                            the numbers 0 to 7
    tl.load(ptr + offsets, mask=m, other=0.0)  numbers behind a pointer; where the mask is False nothing is read
    tl.store(ptr + offsets, values, mask=m)    the other way
    tl.sum(x, 0), tl.max(x, 0), tl.exp(x)      along a dimension, or number by number
    x[:, None], x[None, :]                     as in numpy

Pointers count elements, not bytes. Without a GPU all of this runs in Triton's interpreter, slowly and exactly.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from nanovllm.attention.triton_backend import TritonAttention, next_power_of_two

TILE = 16  # keys that a program looks at at once


@triton.jit
def store_kernel(k_ptr, v_ptr, k_cache_ptr, v_cache_ptr, slots_ptr, WIDTH: tl.constexpr, PADDED: tl.constexpr):
    """Exercise 8.1, part one. One program a token: copy its keys and values into its slot of the cache.

    k and v are [T, K, H] and contiguous: token t's WIDTH = K * H numbers begin at element t * WIDTH. The caches are
    [num_blocks, block_size, K, H] and contiguous, so slot s begins at element s * WIDTH. PADDED is WIDTH rounded up to
    a power of two. slots: [T] int64; a token with slot -1 is padding and writes nothing.

    Slots can be so many that slot * WIDTH exceeds 32 bits; what `tl.load` gives for an int64 tensor is int64 already.
    """
    # --- your code (8.1) ---
    token = tl.program_id(0)
    slot = tl.load(slots_ptr + token)
    column = tl.arange(0, PADDED)
    real = (column < WIDTH) & (slot >= 0)
    keys = tl.load(k_ptr + token * WIDTH + column, mask=real, other=0.0)
    values = tl.load(v_ptr + token * WIDTH + column, mask=real, other=0.0)
    tl.store(k_cache_ptr + slot * WIDTH + column, keys, mask=real)
    tl.store(v_cache_ptr + slot * WIDTH + column, values, mask=real)
    # --- end ---


def store(self: TritonAttention, k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slot_mapping: Tensor) -> None:
    """Exercise 8.1, part two. Start `store_kernel`: ``store_kernel[(number of programs,)](arguments, NAME=constant)``.

    k, v: [T, K, H]; the kernel wants them contiguous, and they may come as views that are not (`tensor.contiguous()`).
    The caches are written in place. Returns nothing.
    """
    # --- your code (8.1) ---
    width = self.num_kv_heads * self.head_dim
    grid = (slot_mapping.shape[0],)
    store_kernel[grid](
        k.contiguous(), v.contiguous(), k_cache, v_cache, slot_mapping, WIDTH=width, PADDED=next_power_of_two(width)
    )
    # --- end ---


@triton.jit
def decode_kernel(
    q_ptr, k_cache_ptr, v_cache_ptr, tables_ptr, contexts_ptr, out_ptr, table_stride, scale,
    N: tl.constexpr, K: tl.constexpr, H: tl.constexpr, BLOCK_SIZE: tl.constexpr, SIZE: tl.constexpr,
    PADDED: tl.constexpr,
):  # fmt: skip
    """Exercise 8.2, part one. Attention of one query: one program for each row and head.

    The program (row, head) = (program_id(0), program_id(1)) reads its query of H numbers, which begins at element
    (row * N + head) * H of q (and its result goes there in out). Heads share keys: head h reads kv head h // (N // K).

    Position p of the row lies in block table[p // BLOCK_SIZE] at place p % BLOCK_SIZE, where the row's table begins at
    tables_ptr + row * table_stride; the key of kv head j in that slot begins at element (slot * K + j) * H. The row has
    contexts[row] positions; 0 means a padded row, whose result is zeros and for which nothing may be read.

    Work through the context SIZE keys at a time and keep three things: the largest score so far, the sum of
    exp(score - largest), and the sum of exp(score - largest) * value. When a tile raises the largest from m to m', the
    two sums are multiplied by exp(m - m'). At the end divide. Scores are scale * (q · k). PADDED is H rounded up to a
    power of two.
    """
    # --- your code (8.2) ---
    row, head = tl.program_id(0), tl.program_id(1)
    context = tl.load(contexts_ptr + row)
    dim = tl.arange(0, PADDED)
    inside = dim < H
    q = tl.load(q_ptr + (row * N + head) * H + dim, mask=inside, other=0.0).to(tl.float32)
    largest = -1.0e30
    total = 0.0
    acc = tl.zeros([PADDED], dtype=tl.float32)
    for start in range(0, context, SIZE):
        position = start + tl.arange(0, SIZE)
        seen = position < context
        block = tl.load(tables_ptr + row * table_stride + position // BLOCK_SIZE, mask=seen, other=0).to(tl.int64)
        slot = block * BLOCK_SIZE + position % BLOCK_SIZE
        at = (slot * K + head // (N // K))[:, None] * H + dim[None, :]
        mask = seen[:, None] & inside[None, :]
        k = tl.load(k_cache_ptr + at, mask=mask, other=0.0).to(tl.float32)
        v = tl.load(v_cache_ptr + at, mask=mask, other=0.0).to(tl.float32)
        score = tl.where(seen, tl.sum(k * q[None, :], 1) * scale, -1.0e30)
        higher = tl.maximum(largest, tl.max(score, 0))
        shrink = tl.exp(largest - higher)
        weight = tl.where(seen, tl.exp(score - higher), 0.0)
        total = total * shrink + tl.sum(weight, 0)
        acc = acc * shrink + tl.sum(weight[:, None] * v, 0)
        largest = higher
    result = acc / tl.where(total > 0.0, total, 1.0)
    tl.store(out_ptr + (row * N + head) * H + dim, result.to(out_ptr.dtype.element_ty), mask=inside)
    # --- end ---


def decode(
    self: TritonAttention, q: Tensor, k_cache: Tensor, v_cache: Tensor, block_tables: Tensor, context_lens: Tensor
) -> Tensor:
    """Exercise 8.2, part two. Start `decode_kernel`, and return its result: [B, N, H] in q's dtype.

    q: [B, N, H], maybe not contiguous. block_tables: [B, max_blocks] int32, context_lens: [B] int32.
    """
    # --- your code (8.2) ---
    q = q.contiguous()
    out = torch.empty_like(q)
    heads, size = self.num_heads, self.head_dim
    decode_kernel[(q.shape[0], heads)](
        q, k_cache, v_cache, block_tables, context_lens, out, block_tables.stride(0), self.scale, N=heads,
        K=self.num_kv_heads, H=size, BLOCK_SIZE=self.block_size, SIZE=TILE, PADDED=next_power_of_two(size),
    )  # fmt: skip
    return out
    # --- end ---


@triton.jit
def split_kernel(
    q_ptr, k_cache_ptr, v_cache_ptr, tables_ptr, contexts_ptr, part_ptr, lse_ptr, table_stride, scale,
    N: tl.constexpr, K: tl.constexpr, H: tl.constexpr, BLOCK_SIZE: tl.constexpr, SPLITS: tl.constexpr,
    SIZE: tl.constexpr, PADDED: tl.constexpr,
):  # fmt: skip
    """Exercise 8.3, part one. The same as 8.2, with the context cut into SPLITS stretches, one program for each.

    With one long row and few heads, 8.2 starts so few programs that most of a GPU idles. Here the program (row, head,
    split) looks only at the positions from split * stretch on, `stretch` of them, where stretch is the context divided
    by SPLITS and rounded up. It leaves two things behind, and `merge` puts them together:

        part [B, N, SPLITS, H] float32    the attention over its stretch alone (divided by its own sum)
        lse  [B, N, SPLITS] float32       log of the sum of exp(score) over its stretch; -inf if that is empty

    A context of 10 in 4 splits: stretch 3, positions 0-2, 3-5, 6-8 and 9. A context of 5: stretch 2, positions 0-1,
    2-3, 4, and nothing. The part of an empty stretch may be anything finite.
    """
    # --- your code (8.3) ---
    row, head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    context = tl.load(contexts_ptr + row)
    stretch = (context + SPLITS - 1) // SPLITS
    first = split * stretch
    behind = tl.minimum(first + stretch, context)
    dim = tl.arange(0, PADDED)
    inside = dim < H
    q = tl.load(q_ptr + (row * N + head) * H + dim, mask=inside, other=0.0).to(tl.float32)
    largest = -1.0e30
    total = 0.0
    acc = tl.zeros([PADDED], dtype=tl.float32)
    for start in range(first, behind, SIZE):
        position = start + tl.arange(0, SIZE)
        seen = position < behind
        block = tl.load(tables_ptr + row * table_stride + position // BLOCK_SIZE, mask=seen, other=0).to(tl.int64)
        slot = block * BLOCK_SIZE + position % BLOCK_SIZE
        at = (slot * K + head // (N // K))[:, None] * H + dim[None, :]
        mask = seen[:, None] & inside[None, :]
        k = tl.load(k_cache_ptr + at, mask=mask, other=0.0).to(tl.float32)
        v = tl.load(v_cache_ptr + at, mask=mask, other=0.0).to(tl.float32)
        score = tl.where(seen, tl.sum(k * q[None, :], 1) * scale, -1.0e30)
        higher = tl.maximum(largest, tl.max(score, 0))
        shrink = tl.exp(largest - higher)
        weight = tl.where(seen, tl.exp(score - higher), 0.0)
        total = total * shrink + tl.sum(weight, 0)
        acc = acc * shrink + tl.sum(weight[:, None] * v, 0)
        largest = higher
    safe = tl.where(total > 0.0, total, 1.0)
    place = (row * N + head) * SPLITS + split
    tl.store(part_ptr + place * H + dim, acc / safe, mask=inside)
    tl.store(lse_ptr + place, tl.where(total > 0.0, largest + tl.log(safe), float("-inf")))
    # --- end ---


def merge(part: Tensor, lse: Tensor) -> Tensor:
    """Exercise 8.3, part two. Put the stretches together, in PyTorch: part [B, N, SPLITS, H], lse [B, N, SPLITS].

    Each stretch's attention is right for itself; in the whole it weighs as much as its share of the softmax sum, which
    is exp(lse). Returns [B, N, H] float32. Stretches with lse -inf count nothing, whatever stands in their part, and
    where all are empty the result is zeros. No score is too large: lse may be 500, and exp(500) is infinite.

    Two stretches with values 1 and 4 and sums 2 and 1 (lse ln 2 and 0): (2 * 1 + 1 * 4) / 3 = 2.
    """
    # --- your code (8.3) ---
    top = lse.amax(dim=-1, keepdim=True)
    top = torch.where(top.isinf(), torch.zeros_like(top), top)
    weight = torch.exp(lse - top)  # [B, N, SPLITS]
    share = weight / weight.sum(dim=-1, keepdim=True).clamp(min=1e-38)
    return torch.where(weight[..., None] > 0, part * share[..., None], 0.0).sum(dim=-2)
    # --- end ---


def decode_split(
    self: TritonAttention, q: Tensor, k_cache: Tensor, v_cache: Tensor, block_tables: Tensor, context_lens: Tensor
) -> Tensor:
    """Exercise 8.3, part three. Start `split_kernel` with ``self.num_splits(rows, q.device)`` splits and `merge`.

    As in 8.2: q [B, N, H], maybe not contiguous; returns [B, N, H] in q's dtype.
    """
    # --- your code (8.3) ---
    q = q.contiguous()
    rows, heads, size = q.shape
    splits = self.num_splits(rows, q.device)
    part = torch.empty(rows, heads, splits, size, dtype=torch.float32, device=q.device)
    lse = torch.empty(rows, heads, splits, dtype=torch.float32, device=q.device)
    split_kernel[(rows, heads, splits)](
        q, k_cache, v_cache, block_tables, context_lens, part, lse, block_tables.stride(0), self.scale, N=heads,
        K=self.num_kv_heads, H=size, BLOCK_SIZE=self.block_size, SPLITS=splits, SIZE=TILE,
        PADDED=next_power_of_two(size),
    )  # fmt: skip
    return merge(part, lse).to(q.dtype)
    # --- end ---
