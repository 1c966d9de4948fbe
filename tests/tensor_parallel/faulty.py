"""Replacements that misbehave on a signal in the prompt; given to engines as `faulty.py::Name`."""

import ctypes
import os
import signal
import sys
import time
from multiprocessing import parent_process
from typing import Any

import torch
from torch import Tensor

from nanovllm.layers.activation import SiluAndMul
from nanovllm.layers.embed_head import VocabParallelEmbedding
from nanovllm.layers.layernorm import RMSNorm
from nanovllm.worker.message_channel import MessageChannel

FAIL_ON_RANK_0, FAIL_ON_RANK_1, FAIL_EVERYWHERE, OUT_OF_MEMORY_ON_RANK_1, KILL, SEGFAULT, LAST_WORDS = range(7)
SIGNAL = [299, 298, 299]  # followed by one of them


class Embedding(VocabParallelEmbedding):
    """Does what a signal in its input says, before the first collective of the step."""

    def forward(self, input_ids: Tensor) -> Tensor:
        ids = input_ids.tolist()
        for i in range(len(ids) - len(SIGNAL)):
            if ids[i : i + len(SIGNAL)] == SIGNAL:
                self.obey(ids[i + len(SIGNAL)], self.tp.rank == 1)
        return super().forward(input_ids)

    def obey(self, fault: int, on_rank_1: bool) -> None:
        if fault == FAIL_EVERYWHERE or fault == (FAIL_ON_RANK_1 if on_rank_1 else FAIL_ON_RANK_0):
            raise ZeroDivisionError(f"planted on rank {self.tp.rank}")
        if on_rank_1 and fault == OUT_OF_MEMORY_ON_RANK_1:
            raise torch.OutOfMemoryError("planted: out of memory")
        if on_rank_1 and fault == KILL:
            os.kill(os.getpid(), signal.SIGKILL)
        if on_rank_1 and fault == SEGFAULT:
            ctypes.string_at(0)
        if on_rank_1 and fault == LAST_WORDS:
            print("goodbye, cruel world", file=sys.stderr, flush=True)
            os._exit(3)


class DiesAtConstruction(RMSNorm):
    """Its process is killed while rank 1 builds its model."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        if parent_process() is not None:  # a process that an engine started
            os.kill(os.getpid(), signal.SIGKILL)


class FailsAtConstruction(RMSNorm):
    """Raises while rank 1 builds its model."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        if parent_process() is not None:
            raise ZeroDivisionError("planted at construction")


class ReluAndMul(SiluAndMul):
    """Another activation: a model with it writes something else."""

    def forward(self, x: Tensor) -> Tensor:
        gate, up = x.chunk(2, -1)
        return gate.relu() * up


class SlowChannel(MessageChannel):
    """A reader that takes its time."""

    def read(self) -> tuple[str, tuple[Any, ...]]:
        time.sleep(0.01)
        return super().read()
