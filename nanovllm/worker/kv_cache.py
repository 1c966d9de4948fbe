"""The KV cache: how many blocks the memory holds, and the tensor itself.

It knows sizes and devices, and nothing about which block belongs to whom.
"""

import math

import numpy as np
import torch
from torch import Tensor

from nanovllm.config import Config
from nanovllm.errors import MemoryBudgetError
from nanovllm.machine import require_memory


def block_bytes(num_layers: int, num_kv_heads: int, head_dim: int, block_size: int, dtype: torch.dtype) -> int:
    """Bytes of one block over all layers: keys and values, for `block_size` tokens.

    Qwen3-0.6B in bfloat16: 2 * 28 layers * 8 heads * 128 * 2 bytes = 112 KiB a token, 28 MiB a block of 256.
    """
    return 2 * num_layers * block_size * num_kv_heads * head_dim * dtype.itemsize


def num_blocks_on_cpu(config: Config, bytes_per_block: int) -> int:
    """Blocks in `kv_cache_memory` bytes, but at least one sequence of `max_model_len`.

    A CPU's memory belongs to other programs too, so the pool is bounded instead of taking a share of what is there.
    """
    needed = -(-config.max_model_len // config.kvcache_block_size)
    return max(config.kv_cache_memory // bytes_per_block, needed)


def num_blocks_on_gpu(config: Config, bytes_per_block: int, device: torch.device, rank_count: int = 1) -> int:
    """Blocks in what a GPU has left after weights and the largest step (the course's formula, chapter 3.6).

    total * gpu_memory_utilization - used - peak + current, where `used` counts every program on the card, `peak` is
    the most that torch held during warm-up and `current` what it holds now: peak - current is what a step needs on
    top. Raises `MemoryBudgetError` if not even one sequence of max_model_len fits.
    """
    free, total = torch.cuda.mem_get_info(device)
    stats = torch.cuda.memory_stats(device)
    peak, current = stats["allocated_bytes.all.peak"], stats["allocated_bytes.all.current"]
    budget = int(total * config.gpu_memory_utilization) - (total - free) - peak + current
    num_blocks = budget // bytes_per_block
    needed = -(-config.max_model_len // config.kvcache_block_size)
    if num_blocks < needed:
        gib = 1 << 30
        raise MemoryBudgetError(
            f"{max(num_blocks, 0)} KV blocks fit, one sequence of max_model_len={config.max_model_len} needs {needed} "
            f"of {bytes_per_block / gib:.3f} GiB: the card has {total / gib:.1f} GiB, of which "
            f"gpu_memory_utilization={config.gpu_memory_utilization} may be used, {(total - free) / gib:.1f} GiB are "
            f"in use and a step needs {(peak - current) / gib:.1f} GiB more; shorten max_model_len, lower "
            "max_num_batched_tokens, raise gpu_memory_utilization, or free the card of other programs"
        )
    return num_blocks


def allocate_kv_cache(
    num_layers: int, num_blocks: int, block_size: int, num_kv_heads: int, head_dim: int,
    dtype: torch.dtype, device: torch.device,
) -> Tensor:  # fmt: skip
    """The cache of all layers: [L, 2, num_blocks, block_size, K, H], zeroed. `cache[i, 0]` are layer i's keys.

    Zeros matter: a masked key has weight 0, but 0 * NaN is NaN. On a CPU the zeros come from the operating system page
    by page as they are touched (`calloc`), so a large pool costs memory only where it is used.
    """
    shape = (num_layers, 2, num_blocks, block_size, num_kv_heads, head_dim)
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    size = math.prod(shape) * dtype.itemsize
    remedy = "lower num_kvcache_blocks, kvcache_block_size, max_model_len or kv_cache_memory"
    require_memory(size, f"a KV pool of {num_blocks} blocks of {block_size} tokens", remedy)
    try:
        memory = np.zeros(size, np.uint8)
    except MemoryError as error:
        raise MemoryBudgetError(f"this machine cannot give {size:,} bytes for the KV pool; {remedy}") from error
    return torch.from_numpy(memory).view(dtype).view(shape)
