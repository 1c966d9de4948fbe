"""Chapter 6: the model runner. Five pieces between a list of sequences and the work of the device.

Functions whose first argument is `self` are methods of the engine's own classes, and run inside them. Everything here
runs on a CPU. Arrays are numpy arrays of the dtypes that `BatchArrays` names:

    input_ids, positions, slot_mapping  int64 [T]     block_tables  int32 [B, max_blocks], 0 behind a row's last block
    context_lens  int32 [B]     cu_seqlens_q  int32 [B + 1]     logits_indices  int64 [S]     temperatures  float32 [S]
"""

from collections.abc import Callable

import numpy as np
from torch import Tensor

from nanovllm.engine.sequence import Sequence
from nanovllm.workbook import ExerciseTodo
from nanovllm.worker.cuda_graphs import DecodeGraphs, StepInputs
from nanovllm.worker.input_batch import BatchArrays, InputBatch, InputBatchBuilder

COLD = 1e-5  # a temperature above it needs noise


def block_bytes(num_layers: int, num_kv_heads: int, head_dim: int, block_size: int, itemsize: int) -> int:
    """Exercise 6.1, part one. Bytes of one KV block over all layers.

    A block holds `block_size` tokens. For each of them every layer keeps a key and a value, each of which has
    `num_kv_heads` heads of `head_dim` numbers of `itemsize` bytes.

    >>> block_bytes(num_layers=28, num_kv_heads=8, head_dim=128, block_size=256, itemsize=2)
    29360128
    """
    # --- your code (6.1) ---
    raise ExerciseTodo("6.1")
    # --- end ---


def num_blocks(total: int, used: int, peak: int, current: int, utilization: float, bytes_per_block: int) -> int:
    """Exercise 6.1, part two. How many blocks fit beside weights and activations (all sizes in bytes).

    total: the card's memory, of which the share `utilization` may be used. used: what is in use now, by all programs,
    this engine's weights among them. peak: the most that torch held while the largest step ran once. current: what
    torch holds now. So a step needs peak - current on top of what is used.

    A card of 24 at 0.9, 5 in use, a peak of 6 and 4 now: 21.6 - 5 - (6 - 4) = 14.6 are left for blocks:

    >>> num_blocks(24_000, 5_000, 6_000, 4_000, 0.9, 1_000)
    14

    Whole blocks only, and never fewer than 0.
    """
    # --- your code (6.1) ---
    raise ExerciseTodo("6.1")
    # --- end ---


def prepare_prefill(self: InputBatchBuilder, seqs: list[Sequence]) -> BatchArrays:
    """Exercise 6.2. The arrays of a step whose rows compute any number of tokens, packed one behind the other.

    Row b computes the tokens at the positions num_computed_tokens up to num_computed_tokens + num_scheduled_tokens of
    its sequence. `seq.slot_mapping(start, stop)` gives their slots, `self.logits_indices(seqs)` the rows that give a
    logit.

    Two rows that compute tokens 4, 5, 6 of 7 and token 9 of 10:

        positions [4, 5, 6, 9]     cu_seqlens_q [0, 3, 4]     context_lens [7, 10]: tokens in the cache after the step
        max_query_len 3            max_context_len 10         num_decodes 0: leading rows with exactly one query

    block_tables: the tables side by side, filled up with 0 to the longest. temperatures: one for each row that gives a
    logit, in their order. needs_noise: whether any of these exceeds COLD.
    """
    # --- your code (6.2) ---
    raise ExerciseTodo("6.2")
    # --- end ---


def prepare_decode(self: InputBatchBuilder, seqs: list[Sequence]) -> BatchArrays:
    """Exercise 6.3. The arrays of a step in which every row computes one token.

    The token of row b stands at position num_computed_tokens. Its slot lies in the block that the table names for that
    position: with blocks of 4, position 9 lies in logical block 2 at place 1, so with table (7, 2, 5) its slot is
    5 * 4 + 1 = 21. A row gives a logit if its sequence has caught up then; usually all do, but a prompt whose last
    token but one is computed here does not.

    Three rows at positions 9, 3 and 8: context_lens [10, 4, 9], cu_seqlens_q [0, 1, 2, 3], num_decodes 3.
    """
    # --- your code (6.3) ---
    raise ExerciseTodo("6.3")
    # --- end ---


def graph_sizes(max_num_seqs: int) -> list[int]:
    """Exercise 6.4, part one. The batch sizes for which a decode step is recorded, in rising order.

    1, 2, 4, then every multiple of 8 below the largest, and the largest itself, which is `max_num_seqs` but at most
    512. So no batch up to it is padded by more than seven rows.

    >>> graph_sizes(20)
    [1, 2, 4, 8, 16, 20]
    >>> graph_sizes(3)
    [1, 2, 3]
    """
    # --- your code (6.4) ---
    raise ExerciseTodo("6.4")
    # --- end ---


def write_inputs(self: StepInputs, arrays: BatchArrays, size: int) -> None:
    """Exercise 6.4, part two. Put the rows of a step into the fixed buffers, padded to `size` rows.

    `self.host` has the buffers "input_ids", "positions", "slot_mapping", "context_lens", "temperatures" [rows] and
    "block_tables" [rows, max_blocks]. What the last step left in them is still there. `arrays` has B rows, and maybe
    fewer temperatures and narrower block tables than the buffers.

    A padded row must write nowhere (slot -1) and read nothing (context length 0); whatever else stands in it does not
    matter. Rows from `size` on are not touched. In the end, copy to the device; this line is there already.
    """
    # --- your code (6.4) ---
    raise ExerciseTodo("6.4")
    # --- end ---
    self.memory.copy_(self.pinned, non_blocking=True)


def record(
    self: DecodeGraphs, forward: Callable[[InputBatch], Tensor | None], batch: InputBatch
) -> tuple[Callable[[], None], Tensor | None]:
    """Exercise 6.5. Record a decode step, as a CUDA graph does, on any device.

    `batch` is made of views of fixed buffers: before each replay the engine writes the next step's numbers into them.
    `forward(batch)` computes logits in a *new* tensor each time (or None, on a rank above 0).

    Returns (replay, logits). `replay()` takes nothing and returns nothing: it runs the step on whatever the buffers
    hold *now*, and leaves the result in `logits`, the same tensor every time: a graph knows addresses, not values.

    >>> replay, logits = graphs.record(forward, batch)
    >>> batch.input_ids.fill_(7); replay()         # logits now holds the result for 7
    """
    # --- your code (6.5) ---
    raise ExerciseTodo("6.5")
    # --- end ---
