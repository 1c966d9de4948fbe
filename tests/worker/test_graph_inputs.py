"""What a captured decode step may be given, and what its padding rows hold; without a GPU."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from nanovllm.worker.cuda_graphs import DecodeGraphs, StepInputs


def arrays(rows: int, width: int = 2, num_decodes: int | None = None) -> Any:
    numbers = np.arange(rows)
    return SimpleNamespace(
        input_ids=numbers + 10, positions=numbers + 20, slot_mapping=numbers + 30, context_lens=numbers + 21,
        temperatures=np.ones(rows, np.float32), block_tables=np.ones((rows, width), np.int32),
        num_decodes=rows if num_decodes is None else num_decodes,
    )  # fmt: skip


def test_only_steps_of_decodes_that_fit_are_replayed() -> None:
    graphs = object.__new__(DecodeGraphs)
    graphs.sizes, graphs.inputs = [1, 2, 4], StepInputs(4, 3, torch.device("cpu"))
    assert graphs.fits(arrays(4, 3)) and graphs.fits(arrays(1, 1))
    assert not graphs.fits(arrays(5, 3)), "more rows than the largest graph has"
    assert not graphs.fits(arrays(4, 4)), "wider block tables than the inputs have"
    assert not graphs.fits(arrays(4, 3, num_decodes=3)), "one row computes a prompt"


def test_inputs_change_only_when_the_last_ones_are_copied() -> None:
    """Nobody waits for a step that samples nothing, and the next one may come before its inputs are on the GPU."""
    graphs, seen = object.__new__(DecodeGraphs), []
    graphs.inputs, graphs.size_for = StepInputs(2, 3, torch.device("cpu")), [1, 1, 2]
    graphs.graphs = {2: (lambda: seen.append("replay"), None)}
    pinned, memory = graphs.inputs.host["input_ids"], graphs.inputs.device["input_ids"]
    graphs.copied = SimpleNamespace(  # type: ignore[assignment]
        synchronize=lambda: seen.append(f"wait with {pinned[0]}"), record=lambda: seen.append(f"copied {memory[0]}")
    )
    step = arrays(2)
    graphs.run(step)
    step.input_ids = step.input_ids + 5
    graphs.run(step)
    assert seen == ["wait with 0", "copied 10", "replay", "wait with 10", "copied 15", "replay"]


def test_padding_rows_write_nowhere_and_read_nothing() -> None:
    """Also where a longer step has left its numbers."""
    inputs = StepInputs(4, 3, torch.device("cpu"))
    inputs.write(arrays(4), 4)
    inputs.write(arrays(1), 2)
    assert inputs.device["slot_mapping"].tolist()[:2] == [30, -1]
    assert inputs.device["context_lens"].tolist()[:2] == [21, 0]
