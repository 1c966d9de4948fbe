"""Decode steps that a plugged-in recorder records and replays on a CPU: the same tokens, and no long wait for them."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import Tensor

from nanovllm import LLM, SamplingParams
from nanovllm.engine.parts import Parts
from nanovllm.worker.cuda_graphs import DecodeGraphs
from nanovllm.worker.input_batch import InputBatch
from nanovllm.worker.model_runner import MAX_RECORDED_ON_CPU

PROMPTS = [[5 + i, 6, 7 + i] for i in range(MAX_RECORDED_ON_CPU + 8)]


class Recorder:
    """Runs the step again from the same buffers."""

    def __init__(self) -> None:
        self.recorded: list[int] = []
        self.replayed: list[int] = []

    def record(
        self, graphs: DecodeGraphs, forward: Callable[[InputBatch], Tensor | None], batch: InputBatch
    ) -> tuple[Callable[[], None], Tensor | None]:
        logits, rows = forward(batch), len(batch.input_ids)
        assert logits is not None
        self.recorded.append(rows)

        def replay() -> None:
            self.replayed.append(rows)
            again = forward(batch)
            assert again is not None
            logits.copy_(again)

        return replay, logits


def build(path: Path, recorder: Recorder | None, **options: Any) -> LLM:
    def record(self: DecodeGraphs, forward: Any, batch: InputBatch) -> Any:
        assert recorder is not None
        return recorder.record(self, forward, batch)

    settings: dict[str, Any] = {
        "dtype": "float32", "device": "cpu", "attention_backend": "torch", "kvcache_block_size": 16,
        "num_kvcache_blocks": 64, "max_model_len": 256, "seed": 0,
    }  # fmt: skip
    return LLM(str(path), Parts({"DecodeGraphs.record": record} if recorder else {}), **{**settings, **options})


def tokens(llm: LLM, prompts: list[list[int]]) -> list[list[int]]:
    params = SamplingParams(temperature=1e-6, max_tokens=4, ignore_eos=True)
    return [output["token_ids"] for output in llm.generate(prompts, params, use_tqdm=False)]


def test_small_batches_are_recorded_and_large_ones_run(tiny_model_dir: Path) -> None:
    with build(tiny_model_dir, None) as llm:
        assert llm.model_runner.graphs is None
        expected = tokens(llm, PROMPTS)
    recorder = Recorder()
    with build(tiny_model_dir, recorder) as llm:
        assert llm.config.max_num_seqs > MAX_RECORDED_ON_CPU
        assert recorder.recorded == [32, 24, 16, 8, 4, 2, 1], "the largest first, and not all 67"
        assert tokens(llm, PROMPTS[:5]) == expected[:5]
        assert recorder.replayed == [8] * 3
        assert tokens(llm, PROMPTS) == expected
        assert recorder.replayed == [8] * 3, "too large for a recording"


def test_fewer_seats_than_that(tiny_model_dir: Path) -> None:
    recorder = Recorder()
    with build(tiny_model_dir, recorder, max_num_seqs=3):
        assert recorder.recorded == [3, 2, 1]
    with build(tiny_model_dir, recorder, max_num_seqs=3, enforce_eager=True):
        assert recorder.recorded == [3, 2, 1], "nobody asked for recordings"


def test_a_replay_knows_how_long_its_contexts_are(tiny_model_dir: Path) -> None:
    """Backends size their memory by it, in tokens; 48 and more of them here, in a table of 16 blocks."""
    prompts, seen = [[5, 6] * 24, [7, 8] * 20], []

    def look(model: Any, args: tuple[Any, ...]) -> None:
        metadata = args[3]
        seen.append((metadata.max_context_len, int(metadata.context_lens.max())))

    with build(tiny_model_dir, None) as llm:
        expected = tokens(llm, prompts)
    with build(tiny_model_dir, Recorder(), max_num_seqs=2) as llm:
        llm.model_runner.model.register_forward_pre_hook(look)
        assert tokens(llm, prompts) == expected
    assert seen == [(length, length) for length in (48, 49, 50, 51)]


def test_a_row_that_ends_becomes_padding_in_the_next_replay(tiny_model_dir: Path) -> None:
    """Six rows and then five in the graph of eight: the sixth writes nowhere, in the same buffers as before."""
    lengths = [SamplingParams(temperature=1e-6, max_tokens=3 + i, ignore_eos=True) for i in range(6)]

    def run(llm: LLM) -> list[list[int]]:
        return [output["token_ids"] for output in llm.generate(PROMPTS[:6], lengths, use_tqdm=False)]

    with build(tiny_model_dir, None, compile=False) as llm:
        expected = run(llm)
    recorder = Recorder()
    with build(tiny_model_dir, recorder, compile=False) as llm:
        assert run(llm) == expected
        assert recorder.replayed == [8, 8, 8, 4, 4, 2, 1]
