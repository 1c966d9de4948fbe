"""Two ranks on two GPUs: the same tokens as one, and deaths that are told in time."""

import os
import signal
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.multiprocessing as multiprocessing

from nanovllm import LLM, EngineDeadError, SamplingParams
from nanovllm.worker.device import select_device
from nanovllm.worker.tensor_parallel import LOOPBACK, Collectives
from tests.gpu.test_engine import SMALL, tokens, workload

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices"),
]


def build(folder: Path) -> LLM:
    options = {"dtype": "float32", "attention_backend": "triton", "max_num_seqs": 20, "seed": 0, **SMALL}
    return LLM(str(folder), tensor_parallel_size=2, **options)


def sum_twice(rank: int, port: int, listener: socket.socket | None, results: Any) -> None:
    """Put the largest difference between sums with NCCL and without, relative to the dtype's step, and the
    milliseconds of a sum without it, some time after a peer was late."""
    collectives = Collectives(rank, 2, port, listener.detach() if listener else None)
    collectives.device = select_device("cuda", rank)
    torch.cuda.set_device(collectives.device)
    collectives.join(0)
    one_shot, worst = collectives._one_shot, 0.0
    assert one_shot is not None
    torch.manual_seed(rank)
    for dtype, shape in [(torch.bfloat16, (64, 4096)), (torch.float32, (37, 576)), (torch.float16, (1, 1)),
                         (torch.bfloat16, (128, 4096)), (torch.bfloat16, (5, 4095))] * 40:  # fmt: skip
        x = torch.randn(shape, dtype=dtype, device=collectives.device)
        by_nccl, without = x.clone(), x.clone()
        collectives._one_shot = None
        collectives.allreduce([by_nccl])
        collectives._one_shot = one_shot
        collectives.allreduce([without])
        difference = (without.float() - by_nccl.float()).abs() / by_nccl.float().abs().clamp_min(1e-3)
        worst = max(worst, float(difference.max()) / torch.finfo(dtype).eps)
    zeros, graph = torch.zeros(64, 4096, dtype=torch.bfloat16, device=collectives.device), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        for _ in range(100):
            collectives.allreduce([zeros])
    collectives.smallest(0)
    time.sleep(0.05 * rank)
    graph.replay()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    graph.replay()
    end.record()
    torch.cuda.synchronize()
    results.put((worst, begin.elapsed_time(end) / 100))
    results.close()
    results.join_thread()  # else the end of this process may come before the numbers are away
    collectives.allreduce([x])  # nobody goes before both are through
    torch.cuda.synchronize()
    os._exit(0)


def test_small_sums_without_nccl_are_those_of_nccl_and_quick() -> None:
    runtime = pytest.importorskip("cuda.bindings.runtime")
    native = runtime.cudaDeviceP2PAttr.cudaDevP2PAttrNativeAtomicSupported
    if not all(runtime.cudaDeviceGetP2PAttribute(native, *pair)[1] for pair in ((0, 1), (1, 0))):
        pytest.skip("NVLink does not connect these GPUs, so they have nothing but NCCL")
    ctx = multiprocessing.get_context("spawn")
    results = ctx.Queue()
    listener = socket.create_server((LOOPBACK, 0))
    args = [(rank, listener.getsockname()[1], None if rank else listener, results) for rank in (0, 1)]
    ranks = [ctx.Process(target=sum_twice, args=each, daemon=True) for each in args]
    for process in ranks:
        process.start()
    try:
        got = [results.get(timeout=60) for _ in ranks]
    finally:
        for process in ranks:
            process.join(10)
            process.kill()
    assert all(worst <= 1.0 for worst, _ in got)
    # 0.006 on H200. Once it was 0.4 for as long as nothing disturbed it: a rank that had to wait for long asked whether
    # to go on, which took so long that the other had to wait for it and asked in its turn.
    assert all(milliseconds < 0.1 for _, milliseconds in got)


@pytest.mark.parametrize("enforce_eager", [True, False])
def test_two_gpus_give_the_tokens_of_one(tiny_model_dir: Path, enforce_eager: bool) -> None:
    expected = tokens(tiny_model_dir, enforce_eager=enforce_eager)
    assert tokens(tiny_model_dir, enforce_eager=enforce_eager, tensor_parallel_size=2) == expected


@pytest.mark.parametrize("moment", ["idle", "in a step"])
def test_a_rank_that_is_killed_closes_the_engine_and_nothing_else(tiny_model_dir: Path, moment: str) -> None:
    expected = tokens(tiny_model_dir)
    llm = build(tiny_model_dir)
    pid = llm.ps[0].pid

    def kill() -> None:
        os.kill(pid, signal.SIGKILL)

    def run(llm: LLM) -> None:
        while True:
            llm.generate(*workload(), use_tqdm=False)

    if moment == "idle":
        kill()
    else:
        threading.Timer(1.0, kill).start()
    started = time.perf_counter()
    with pytest.raises(EngineDeadError, match="rank 1 .* was killed by SIGKILL"):
        run(llm)
    assert time.perf_counter() - started < 10
    del llm
    assert tokens(tiny_model_dir) == expected
    assert tokens(tiny_model_dir, tensor_parallel_size=2) == expected


def test_a_failure_in_the_sampler_leaves_the_engine_usable(
    tiny_model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*args: object) -> torch.Tensor:
        raise ZeroDivisionError("planted in the sampler")

    prompts, params = workload(8)
    with build(tiny_model_dir) as llm:
        expected = llm.generate(prompts, params, use_tqdm=False)
        with monkeypatch.context() as patch, pytest.raises(ZeroDivisionError):
            patch.setattr(llm.model_runner, "sample", broken)
            llm.generate(prompts, params, use_tqdm=False)
        assert llm.generate(prompts, params, use_tqdm=False) == expected


def test_a_failure_in_the_middle_of_a_step_closes_the_engine(tiny_model_dir: Path) -> None:
    """The captured graphs know only the group that is lost."""
    with build(tiny_model_dir) as llm:
        fail: Callable[..., None] = lambda *args: 1 / 0  # type: ignore[assignment,return-value]  # noqa: E731
        llm.model_runner.model.model.layers[1].register_forward_pre_hook(fail)
        started = time.perf_counter()
        with pytest.raises(ZeroDivisionError):
            llm.generate([[1, 2, 3]], SamplingParams(temperature=1e-6, max_tokens=4), use_tqdm=False)
        with pytest.raises(EngineDeadError):
            llm.generate([[1, 2, 3]], SamplingParams(temperature=1e-6, max_tokens=4), use_tqdm=False)
        assert time.perf_counter() - started < 10
