"""The KV cache: how many blocks the memory holds, and the tensor itself.

It knows sizes and devices, and nothing about which block belongs to whom.
"""

import math

import numpy as np
import torch
from torch import Tensor

from nanovllm.config import Config
from nanovllm.errors import MemoryBudgetError
from nanovllm.layers.huge_pages import prefer_huge_pages
from nanovllm.machine import require_memory


class KVCacheSizer:
    """From numbers of bytes to a number of blocks."""

    @staticmethod
    def block_bytes(num_layers: int, num_kv_heads: int, head_dim: int, block_size: int, itemsize: int) -> int:
        """Bytes of one block over all layers: keys and values, for `block_size` tokens; itemsize: bytes of a number.

        Qwen3-0.6B in bfloat16: 2 * 28 layers * 8 heads * 128 * 2 bytes = 112 KiB a token, 28 MiB a block of 256.
        """
        return 2 * num_layers * block_size * num_kv_heads * head_dim * itemsize

    @staticmethod
    def num_blocks(total: int, used: int, peak: int, current: int, utilization: float, bytes_per_block: int) -> int:
        """Blocks in what a GPU has left after weights and the largest step (the course's formula, chapter 3.6).

        total * utilization - used - peak + current: `used` counts every program on the card, `peak` is the most that
        torch held during warm-up and `current` what it holds now, so peak - current is what a step needs on top. A card
        of 24 GB at 0.9 with 5 in use, a peak of 6 and now 4: 21.6 - 5 - 6 + 4 = 14.6 GB. Never negative.
        """
        return max(0, (int(total * utilization) - used - peak + current) // bytes_per_block)

    def on_cpu(self, config: Config, bytes_per_block: int) -> int:
        """Blocks in `kv_cache_memory` bytes, but at least one sequence of `max_model_len`.

        A CPU's memory belongs to other programs too, so the pool is bounded instead of taking a share of what is there.
        """
        return max(config.kv_cache_memory // bytes_per_block, blocks_of_one_sequence(config))

    def on_gpu(self, config: Config, bytes_per_block: int, device: torch.device) -> int:
        """`num_blocks` from what the card and torch report. Raises `MemoryBudgetError` if not even one sequence of
        max_model_len fits."""
        free, total = torch.cuda.mem_get_info(device)
        stats = torch.cuda.memory_stats(device)
        peak, current = stats["allocated_bytes.all.peak"], stats["allocated_bytes.all.current"]
        share, used = config.gpu_memory_utilization, total - free
        num_blocks = self.num_blocks(total, used, peak, current, share, bytes_per_block)
        if num_blocks < blocks_of_one_sequence(config):
            gib, needed = 1 << 30, blocks_of_one_sequence(config)
            raise MemoryBudgetError(
                f"{num_blocks} KV blocks fit, one sequence of max_model_len={config.max_model_len} needs {needed} of "
                f"{bytes_per_block / gib:.3f} GiB: the card has {total / gib:.1f} GiB, of which "
                f"gpu_memory_utilization={share} may be used, {used / gib:.1f} GiB are in use by all programs and a "
                f"step needs {(peak - current) / gib:.1f} GiB more; shorten max_model_len, lower "
                "max_num_batched_tokens, raise gpu_memory_utilization, or free the card of other programs"
            )
        return num_blocks


def blocks_of_one_sequence(config: Config) -> int:
    """Blocks that hold a sequence of `max_model_len` tokens."""
    return -(-config.max_model_len // config.kvcache_block_size)


def allocate_kv_cache(
    num_layers: int, num_blocks: int, block_size: int, num_kv_heads: int, head_dim: int,
    dtype: torch.dtype, device: torch.device,
) -> Tensor:  # fmt: skip
    """The cache of all layers: [L, 2, num_blocks, block_size, K, H], zeroed. `cache[i, 0]` are layer i's keys.

    Zeros matter: a masked key has weight 0, but 0 * NaN is NaN. On a CPU the zeros come from the operating system page
    by page as they are touched (`calloc`), so a large pool costs memory only where it is used.
    """
    shape = (num_layers, 2, num_blocks, block_size, num_kv_heads, head_dim)
    size = math.prod(shape) * dtype.itemsize
    remedy = "lower num_kvcache_blocks, kvcache_block_size, max_model_len or kv_cache_memory"
    if device.type != "cpu":
        try:
            return torch.zeros(shape, dtype=dtype, device=device)
        except torch.OutOfMemoryError as error:
            raise MemoryBudgetError(f"this GPU cannot give {size:,} bytes for the KV pool; {remedy}") from error
    require_memory(size, f"a KV pool of {num_blocks} blocks of {block_size} tokens", remedy)
    try:
        memory = np.zeros(size, np.uint8)
    except MemoryError as error:
        raise MemoryBudgetError(f"this machine cannot give {size:,} bytes for the KV pool; {remedy}") from error
    return prefer_huge_pages(torch.from_numpy(memory)).view(dtype).view(shape)
