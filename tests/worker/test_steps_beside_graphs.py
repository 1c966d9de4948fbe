"""When a runner waits for its device: NCCL was told that no collective starts while a CUDA graph with some runs."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from nanovllm.worker.input_batch import BatchArrays, InputBatch
from nanovllm.worker.model_runner import ModelRunner

CUDA, CPU = torch.device("cuda"), torch.device("cpu")


@pytest.mark.parametrize(
    ("size", "device", "graphs", "fits", "does"),
    [
        (2, CUDA, True, False, ["wait", "step"]),
        (2, CUDA, True, True, ["replay"]),
        (2, CUDA, False, False, ["step"]),
        (2, CPU, True, False, ["step"]),
        (1, CUDA, True, False, ["step"]),
    ],
    ids=["a step without a graph", "a replay", "no graphs", "no GPU", "one rank"],
)
def test_only_a_step_without_a_graph_waits_and_only_for_other_ranks_sake(
    size: int, device: torch.device, graphs: bool, fits: bool, does: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[str] = []

    def note(what: str, result: Any = None) -> Any:
        done.append(what)
        return result

    made = object.__new__(ModelRunner)
    made.device = device
    made.tp = SimpleNamespace(size=size)  # type: ignore[assignment]
    made.link = SimpleNamespace(settle=lambda: None)  # type: ignore[assignment]
    made.kv_cache = torch.empty(0)
    made.graphs = None
    if graphs:
        replay = SimpleNamespace(fits=lambda _: fits, run=lambda _: note("replay", (None, None)))
        made.graphs = replay  # type: ignore[assignment]
    made._logits = lambda *_: note("step")  # type: ignore[method-assign]
    monkeypatch.setattr(torch.cuda, "synchronize", lambda _: note("wait"))
    monkeypatch.setattr(InputBatch, "from_arrays", lambda *_: SimpleNamespace(temperatures=None))
    monkeypatch.setattr(ModelRunner, "__del__", lambda _: None)

    empty = np.zeros(0, np.int64)
    assert made.run(BatchArrays(*[empty] * 8, 1, 1, 0, False)) == []  # type: ignore[call-arg,arg-type]
    assert done == does
