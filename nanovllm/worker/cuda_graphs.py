"""CUDA graphs of decode steps: the few hundred kernel launches of a step, recorded once and replayed by one call.

A graph replays the same kernels on the same addresses, so a step's inputs are written into the buffers that the graph
was captured with, and its result is read from where it was then. Batch sizes are captured in steps of eight; a batch in
between is padded with rows that write nowhere (slot -1) and read nothing (context 0). Handing a graph of 300 kernels to
an H200 takes the host 8 us; cutting it into pieces, so that the GPU might start sooner, made a step 0.1 ms longer.

It knows neither sequences nor sampling: the runner samples from the logits that come back.
"""

import gc
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from nanovllm.attention.base import AttentionMetadata
from nanovllm.worker.input_batch import BatchArrays, InputBatch

MAX_GRAPH_SIZE = 512
ALIGNMENT = 256  # bytes; Triton compiles a kernel anew for pointers that are less aligned than those it knows


class StepInputs:
    """The inputs of a decode step of up to `rows` rows: one pinned buffer, its twin on the GPU, one copy a step.

    `host` and `device` hold the same fields at the same places, each at a multiple of 256 bytes: 20 rows of input_ids
    take 160 bytes, and the positions begin at 256. The block tables come last, so that a step copies only as many of
    their rows as it has.
    """

    def __init__(self, rows: int, max_blocks: int, device: torch.device) -> None:
        shapes: dict[str, tuple[Any, tuple[int, ...]]] = {
            "input_ids": (np.int64, (rows,)),
            "positions": (np.int64, (rows,)),
            "slot_mapping": (np.int64, (rows,)),
            "context_lens": (np.int32, (rows,)),
            "temperatures": (np.float32, (rows,)),
            "block_tables": (np.int32, (rows, max_blocks)),
        }
        starts, size = {}, 0
        for name, (dtype, shape) in shapes.items():
            starts[name] = size
            size += -(-int(np.prod(shape)) * np.dtype(dtype).itemsize // ALIGNMENT) * ALIGNMENT
        self.tables_start, self.table_bytes = starts["block_tables"], max_blocks * 4  # bytes of one row's table
        self.pinned = torch.zeros(size, dtype=torch.uint8)
        if device.type == "cuda":
            self.pinned = self.pinned.pin_memory()
        self.memory = torch.zeros(size, dtype=torch.uint8, device=device)
        self.host: dict[str, NDArray[Any]] = {}
        self.device: dict[str, Tensor] = {}
        for name, (dtype, shape) in shapes.items():
            span = slice(starts[name], starts[name] + int(np.prod(shape)) * np.dtype(dtype).itemsize)
            self.host[name] = self.pinned[span].numpy().view(dtype).reshape(shape)
            self.device[name] = self.memory[span].view(getattr(torch, np.dtype(dtype).name)).view(shape)

    def write(self, arrays: BatchArrays, size: int) -> None:
        """Put a step of B rows, padded to `size`, on its way to the GPU."""
        host, rows = self.host, len(arrays.input_ids)
        host["input_ids"][:rows] = arrays.input_ids
        host["positions"][:rows] = arrays.positions
        host["slot_mapping"][:rows] = arrays.slot_mapping
        host["slot_mapping"][rows:size] = -1
        host["context_lens"][:rows] = arrays.context_lens
        host["context_lens"][rows:size] = 0
        host["temperatures"][: len(arrays.temperatures)] = arrays.temperatures
        host["block_tables"][:rows, : arrays.block_tables.shape[1]] = arrays.block_tables
        used = self.tables_start + rows * self.table_bytes
        self.memory[:used].copy_(self.pinned[:used], non_blocking=True)


Recording = tuple[Callable[[], None], Tensor | None]  # run it again; where its logits are then


class DecodeGraphs:
    """Graphs of decode steps for the sizes of `graph_sizes`, sharing their inputs and their memory.

    forward: from an `InputBatch` of one query a row to logits [B, V] (None on ranks above 0). inputs: the buffers that
    every graph reads, with as many rows as the largest size. Captures everything at construction.
    """

    def __init__(self, forward: Callable[[InputBatch], Tensor | None], max_num_seqs: int, inputs: StepInputs) -> None:
        self.sizes, self.inputs, device = self.graph_sizes(max_num_seqs), inputs, inputs.memory.device
        rows = self.sizes[-1]
        # size_for[n]: the smallest graph for n rows.
        self.size_for = [next(size for size in self.sizes if size >= max(n, 1)) for n in range(rows + 1)]
        inputs.host["slot_mapping"][:] = -1
        inputs.memory.copy_(inputs.pinned)
        self.cu_seqlens_q = torch.arange(rows + 1, dtype=torch.int32, device=device)
        self.last_size = 0  # of the graph that was replayed last
        self.pool: Any = None
        self.copied: torch.cuda.Event | None = None  # the inputs of the last step are on the GPU
        self.logits: Tensor | None = None  # of whichever graph ran last
        if device.type == "cuda":
            self.copied, self.stream = torch.cuda.Event(), torch.cuda.Stream(device)
            gc.collect()  # an old graph that is freed during a capture would spoil it
            self.pool = torch.cuda.graph_pool_handle()
        # The largest first: the smaller ones fit into its memory.
        self.graphs: dict[int, Recording] = {n: self.record(forward, self.batch(n)) for n in reversed(self.sizes)}
        if device.type == "cuda":
            torch.cuda.empty_cache()  # what the steps before the captures took

    @staticmethod
    def graph_sizes(max_num_seqs: int) -> list[int]:
        """Batch sizes to capture: 1, 2, 4, 8, then every eighth, and the largest batch itself (at most 512).

        20 -> [1, 2, 4, 8, 16, 20]; 512 -> 67 sizes. Padding then costs at most seven rows.
        """
        largest = min(max_num_seqs, MAX_GRAPH_SIZE)
        return [size for size in (1, 2, 4, *range(8, largest, 8)) if size < largest] + [largest]

    def record(self, forward: Callable[[InputBatch], Tensor | None], batch: InputBatch) -> Recording:
        """Capture one step on a stream of its own: how to run it again, and the logits that are new each time.

        MEMORY: what a graph needs for itself can be taken again by those captured after it, on the same stream, but not
        what somebody keeps: 67 tables of logits over a vocabulary of 151,936 would be 5 GB. So all graphs copy theirs
        into one, which takes 40 us for 256 rows.
        """
        self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream):
            logits = forward(batch)  # compiles kernels and makes workspaces, which a capture must not do
            if self.logits is None and logits is not None:
                self.logits = torch.empty_like(logits)
            kept = None if self.logits is None else self.logits[: len(batch.input_ids)]
            graph = torch.cuda.CUDAGraph()
            graph.capture_begin(pool=self.pool, capture_error_mode="thread_local")
            logits = forward(batch)
            if kept is not None and logits is not None:
                kept.copy_(logits)
            graph.capture_end()
        torch.cuda.current_stream().wait_stream(self.stream)
        return graph.replay, kept

    def batch(self, size: int) -> InputBatch:
        """The first `size` rows of the inputs."""
        views = {name: field[:size] for name, field in self.inputs.device.items()}
        metadata = AttentionMetadata(
            views["slot_mapping"], views["block_tables"], views["context_lens"], self.cu_seqlens_q[: size + 1],
            max_query_len=1, max_context_len=0, num_decodes=size,  # 0: a graph must not depend on how long contexts are
        )  # fmt: skip
        no_indices = self.cu_seqlens_q[:0].long()
        return InputBatch(views["input_ids"], views["positions"], metadata, no_indices, views["temperatures"], False)

    def fits(self, arrays: BatchArrays) -> bool:
        """Whether the step is one of decodes only and not larger than the largest graph."""
        rows, width = arrays.block_tables.shape
        return arrays.num_decodes == rows <= self.sizes[-1] and width <= self.inputs.host["block_tables"].shape[1]

    def run(self, arrays: BatchArrays) -> tuple[Tensor | None, Tensor]:
        """Start the step: (logits [B, V], temperatures [S]); None for logits on ranks above 0."""
        rows = len(arrays.input_ids)
        size = self.last_size = self.size_for[rows]
        if self.copied is not None:
            self.copied.synchronize()  # nobody waits for a step that samples nothing, nor do ranks above 0 for any
        self.inputs.write(arrays, size)
        if self.copied is not None:
            self.copied.record()
        replay, logits = self.graphs[size]
        replay()
        return None if logits is None else logits[:rows], self.inputs.device["temperatures"][: len(arrays.temperatures)]
