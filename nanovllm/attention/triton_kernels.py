"""Four Triton kernels: store keys and values, decode over pages, merge the parts of a split context, prefill.

Each kernel is one *program* run many times: `tl.program_id` tells a program which piece is its own, and a program
works on whole tiles of numbers at once. Tile sizes must be powers of two and known when the kernel is compiled
(`tl.constexpr`); sizes that are not powers of two are rounded up and masked.

Nothing here knows a model, a scheduler or a batch object: only pointers, strides and lengths. The kernels run on any
GPU that Triton supports, and on a CPU under Triton's interpreter (`TRITON_INTERPRET=1`, set before triton is imported).

Scores are kept in base 2: softmax(x) = 2^(x log2 e) / sum, because exp2 is one instruction. `scale` is therefore the
usual 1 / sqrt(H) times log2(e).
"""

import triton
import triton.language as tl
from triton.runtime.interpreter import InterpretedFunction


def interpreted() -> bool:
    """Whether these kernels run in Triton's interpreter (on the CPU) and not on a GPU."""
    return isinstance(matmul, InterpretedFunction)


@triton.jit
def matmul(a, b, acc):
    """acc + a @ b in float32. (Triton's interpreter takes bfloat16 operands for integers, so it gets float32 ones.)"""
    if INTERPRETED:
        return tl.dot(a.to(tl.float32), b.to(tl.float32), acc, input_precision="ieee")
    else:
        return tl.dot(a, b, acc, input_precision="ieee")


INTERPRETED = tl.constexpr(interpreted())


@triton.jit
def store_kernel(
    k_ptr, v_ptr, k_cache_ptr, v_cache_ptr, slot_mapping_ptr, k_stride, v_stride,
    WIDTH: tl.constexpr, PADDED: tl.constexpr,
):  # fmt: skip
    """One program per token: copy its K * H keys and as many values into the token's slot.

    The cache [num_blocks, block_size, K, H] is contiguous, so slot 147 begins at element 147 * K * H, whatever the
    block size. Slots are int64: a pool of many blocks has more elements than int32 can count.
    """
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slot_mapping_ptr + token)
    if slot >= 0:
        column = tl.arange(0, PADDED)
        mask = column < WIDTH
        tl.store(k_cache_ptr + slot * WIDTH + column, tl.load(k_ptr + token * k_stride + column, mask=mask), mask=mask)
        tl.store(v_cache_ptr + slot * WIDTH + column, tl.load(v_ptr + token * v_stride + column, mask=mask), mask=mask)


@triton.jit
def first_block(block_table_ptr, start, last, BLOCK_SIZE: tl.constexpr):
    """The block in which position `start` lies (0 where there is none)."""
    return tl.load(block_table_ptr + start // BLOCK_SIZE, mask=start < last, other=0)


@triton.jit
def tile_slots(block_table_ptr, block, start, last, BLOCK_SIZE: tl.constexpr, TILE: tl.constexpr):
    """Cache slots [TILE] of the positions start .. start + TILE of one sequence, and the block of the next tile.

    With block size 256, tile 64 and block table (7, 2, 9): start 320 lies in block 2 at offset 64, so the slots are
    2 * 256 + 64 .. 2 * 256 + 127. A tile never crosses a block if the block size is a multiple of it: then one look
    into the table is enough, and it is taken one tile ahead, because the keys cannot be fetched before it is back.
    Smaller blocks need one look per position.
    """
    offset = tl.arange(0, TILE)
    if BLOCK_SIZE % TILE == 0:
        slot = block.to(tl.int64) * BLOCK_SIZE + start % BLOCK_SIZE + offset
        return slot, first_block(block_table_ptr, start + TILE, last, BLOCK_SIZE)
    else:
        position = start + offset
        blocks = tl.load(block_table_ptr + position // BLOCK_SIZE, mask=position < last, other=0).to(tl.int64)
        return blocks * BLOCK_SIZE + position % BLOCK_SIZE, block


@triton.jit
def online_softmax(scores, v, row_max, row_sum, acc):
    """Add one tile to a running softmax-weighted sum: scores [M, TILE], v [TILE, H], row_max, row_sum [M], acc [M, H].

    When a tile raises the maximum of a row from m to m', everything summed so far is too large by 2^(m' - m); it is
    shrunk by that factor and the tile is added. (Milakov and Gimelshein 2018; the heart of flash attention.)
    The first tile of a row holds at least one key that the row sees, so row_max is finite from the first call on and
    -inf is never subtracted from -inf.
    """
    new_max = tl.maximum(row_max, tl.max(scores, 1))
    shrink = tl.exp2(row_max - new_max)
    weights = tl.exp2(scores - new_max[:, None])
    acc = acc * shrink[:, None]
    acc = matmul(weights.to(v.dtype), v, acc)
    return new_max, row_sum * shrink + tl.sum(weights, 1), acc


@triton.jit(do_not_specialize=["table_stride"])
def decode_kernel(
    q_ptr, k_cache_ptr, v_cache_ptr, block_tables_ptr, context_lens_ptr, out_ptr, part_ptr, lse_ptr,
    q_stride, table_stride, scale,
    K: tl.constexpr, GROUP: tl.constexpr, H: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    SPLITS: tl.constexpr, TILE: tl.constexpr, GROUP_PADDED: tl.constexpr, H_PADDED: tl.constexpr,
):  # fmt: skip
    """One program per (kv head, split, row): one query token against one stretch of its context.

    Decoding reads every cached key and value once and computes little with each, so all that counts is memory
    bandwidth. Three things serve it. The GROUP query heads that share a kv head stand in one tile, so a key is read
    once and not GROUP times. The kv heads of a token lie side by side in memory and are neighbours in the grid. And
    where rows * K programs are too few to fill the GPU, the context is cut into SPLITS stretches that other programs
    take (flash-decoding); `merge_kernel` puts them together. Context 585 in 4 splits with tile 64:
    cdiv(585, 4) = 147, rounded up to whole tiles 192, so the stretches are 0-191, 192-383, 384-575 and 576-584.
    """
    kv_head, split, row = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    context = tl.load(context_lens_ptr + row)
    stretch = tl.cdiv(tl.cdiv(context, SPLITS), TILE) * TILE
    first = split * stretch
    last = tl.minimum(first + stretch, context)
    if (SPLITS == 1) | (first < last):
        member, dim = tl.arange(0, GROUP_PADDED), tl.arange(0, H_PADDED)
        head = kv_head * GROUP + member
        q_mask = (member < GROUP)[:, None] & (dim < H)[None, :]
        q = tl.load(q_ptr + row * q_stride + head[:, None] * H + dim[None, :], mask=q_mask, other=0.0)
        row_max = tl.full([GROUP_PADDED], float("-inf"), tl.float32)
        row_sum = tl.zeros([GROUP_PADDED], tl.float32)
        acc = tl.zeros([GROUP_PADDED, H_PADDED], tl.float32)
        table_ptr = block_tables_ptr + row * table_stride
        block = first_block(table_ptr, first, last, BLOCK_SIZE)
        for start in range(first, last, TILE):
            slot, block = tile_slots(table_ptr, block, start, last, BLOCK_SIZE, TILE)
            visible = start + tl.arange(0, TILE) < last
            at = (slot[:, None] * K + kv_head) * H + dim[None, :]
            mask = visible[:, None] & (dim < H)[None, :]
            k = tl.load(k_cache_ptr + at, mask=mask, other=0.0)
            scores = matmul(q, tl.trans(k), None) * scale
            scores = tl.where(visible[None, :], scores, float("-inf"))
            v = tl.load(v_cache_ptr + at, mask=mask, other=0.0)
            row_max, row_sum, acc = online_softmax(scores, v, row_max, row_sum, acc)
        acc = acc / tl.where(row_sum > 0, row_sum, 1.0)[:, None]  # a padded row (context 0) yields zeros
        flat = row * (K * GROUP) + head
        if SPLITS == 1:
            tl.store(out_ptr + flat[:, None] * H + dim[None, :], acc.to(out_ptr.dtype.element_ty), mask=q_mask)
        else:
            part = flat * SPLITS + split
            tl.store(part_ptr + part[:, None] * H + dim[None, :], acc, mask=q_mask)
            tl.store(lse_ptr + part, row_max + tl.log2(row_sum), mask=member < GROUP)


@triton.jit
def merge_kernel(
    part_ptr, lse_ptr, context_lens_ptr, out_ptr,
    N: tl.constexpr, H: tl.constexpr, SPLITS: tl.constexpr, TILE: tl.constexpr, H_PADDED: tl.constexpr,
):  # fmt: skip
    """One program per (head, row): weigh the splits' results by 2^lse, the share of the softmax sum that each saw.

    Splits behind the end of a short context wrote nothing: context 70 in 4 splits with tile 64 fills the first two.
    (Tried and slower: no second launch, but the split that arrives last merges. One row took 7.6 us instead of 5.9,
    because then a single program reads what here one program a head reads.)
    """
    head, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    context = tl.load(context_lens_ptr + row)
    stretch = tl.cdiv(tl.cdiv(context, SPLITS), TILE) * TILE
    split, dim = tl.arange(0, SPLITS), tl.arange(0, H_PADDED)
    filled = split * stretch < context
    part = (row * N + head) * SPLITS + split
    lse = tl.load(lse_ptr + part, mask=filled, other=-1e30)  # finite: in a padded row it is subtracted from itself
    weight = tl.where(filled, tl.exp2(lse - tl.max(lse, 0)), 0.0)
    values = tl.load(part_ptr + part[:, None] * H + dim[None, :], mask=filled[:, None] & (dim < H)[None, :], other=0.0)
    total = tl.maximum(tl.sum(weight, 0), 1.0)  # the largest weight is 1, so only a padded row (all zero) is touched
    out = tl.sum(values * weight[:, None], 0) / total
    tl.store(out_ptr + (row * N + head) * H + dim, out.to(out_ptr.dtype.element_ty), mask=dim < H)


@triton.jit(do_not_specialize=["table_stride", "first_row"])
def prefill_kernel(
    q_ptr, k_cache_ptr, v_cache_ptr, block_tables_ptr, context_lens_ptr, cu_seqlens_q_ptr, out_ptr,
    first_row, q_stride, out_stride, table_stride, scale,
    K: tl.constexpr, GROUP: tl.constexpr, H: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    QUERIES: tl.constexpr, TILE: tl.constexpr, H_PADDED: tl.constexpr,
):  # fmt: skip
    """One program per (QUERIES query tokens, head, row), against all the keys that those queries may see.

    The keys come from the pages whether they were computed in this step, in an earlier chunk or for another sequence
    with the same prefix; so one kernel serves all three. Query i of a row sees the first
    context - query_len + i + 1 keys: 3 queries at context 5 see 3, 4 and 5 of them.
    """
    # Late queries see most keys: hand them out first, so that the longest programs do not end up alone at the end.
    tile_of_queries = tl.num_programs(0) - 1 - tl.program_id(0)
    head, row = tl.program_id(1), first_row + tl.program_id(2)
    begin = tl.load(cu_seqlens_q_ptr + row)
    query_len = tl.load(cu_seqlens_q_ptr + row + 1) - begin
    first_query = tile_of_queries * QUERIES
    if first_query < query_len:
        context = tl.load(context_lens_ptr + row)
        query, dim = first_query + tl.arange(0, QUERIES), tl.arange(0, H_PADDED)
        token = (begin + query).to(tl.int64)
        q_mask = (query < query_len)[:, None] & (dim < H)[None, :]
        q = tl.load(q_ptr + token[:, None] * q_stride + head * H + dim[None, :], mask=q_mask, other=0.0)
        sees = context - query_len + query + 1
        last = tl.minimum(context - query_len + first_query + QUERIES, context)
        row_max = tl.full([QUERIES], float("-inf"), tl.float32)
        row_sum = tl.zeros([QUERIES], tl.float32)
        acc = tl.zeros([QUERIES, H_PADDED], tl.float32)
        table_ptr = block_tables_ptr + row.to(tl.int64) * table_stride
        block = first_block(table_ptr, 0, last, BLOCK_SIZE)
        for start in range(0, last, TILE):
            slot, block = tile_slots(table_ptr, block, start, last, BLOCK_SIZE, TILE)
            position = start + tl.arange(0, TILE)
            at = (slot[:, None] * K + head // GROUP) * H + dim[None, :]
            mask = (position < last)[:, None] & (dim < H)[None, :]
            k = tl.load(k_cache_ptr + at, mask=mask, other=0.0)
            scores = matmul(q, tl.trans(k), None) * scale
            scores = tl.where(position[None, :] < sees[:, None], scores, float("-inf"))
            v = tl.load(v_cache_ptr + at, mask=mask, other=0.0)
            row_max, row_sum, acc = online_softmax(scores, v, row_max, row_sum, acc)
        out = (acc / row_sum[:, None]).to(out_ptr.dtype.element_ty)
        tl.store(out_ptr + token[:, None] * out_stride + head * H + dim[None, :], out, mask=q_mask)
