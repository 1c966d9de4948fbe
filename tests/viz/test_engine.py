"""The views over the real engine, on a tiny model: what is recorded is what the engine has."""

import random
import signal
from pathlib import Path

import pytest

from nanovllm import LLM, SamplingParams
from nanovllm.viz import Player, Recorder, live
from tests.viz.test_truth import assert_same

OPTIONS = dict(
    attention_backend="torch", kvcache_block_size=4, num_kvcache_blocks=24, max_num_batched_tokens=16, max_num_seqs=4,
    dtype="float32", seed=0,
)  # fmt: skip


def random_prompts(count: int) -> list[list[int]]:
    rng = random.Random(3)
    return [
        [5, 6, 7, 8, 9] * rng.randint(0, 2) + [rng.randrange(5, 40) for _ in range(rng.randint(1, 9))]
        for _ in range(count)
    ]


@pytest.mark.parametrize("policy", ["prefill_first", "mixed"])
def test_after_every_step_the_record_equals_the_engine(tiny_model_dir: Path, policy: str) -> None:
    with LLM(str(tiny_model_dir), scheduling_policy=policy, **OPTIONS) as llm:  # type: ignore[arg-type]
        recorder, resumed = Recorder(), set()
        params = SamplingParams(max_tokens=24, ignore_eos=True)
        seq_ids = [llm.add_request(prompt, params) for prompt in random_prompts(8)]
        with llm.observe(recorder):
            while not llm.is_finished():
                llm.step()
                resumed |= set(recorder.records[-1].preempted)
                assert recorder.head is not None
                assert_same(recorder.head, llm.snapshot(), resumed)
                if llm.step_count == 9:
                    assert llm.abort(seq_ids[2])
        assert resumed and recorder.history.totals["finished"] == 8


def test_an_interrupted_generate_leaves_engine_and_picture_whole(tiny_model_dir: Path) -> None:
    with LLM(str(tiny_model_dir), **OPTIONS) as llm:  # type: ignore[arg-type]
        params = SamplingParams(max_tokens=24, ignore_eos=True)
        with pytest.raises(KeyboardInterrupt), live(llm) as view:
            llm.add_step_hook(lambda r: signal.raise_signal(signal.SIGINT) if r.step == 4 else None, key="stop")
            llm.generate(random_prompts(6), params, use_tqdm=False)
        assert llm.step_count == 4 and llm.is_finished() and view.recorder.head is not None
        assert_same(view.recorder.head, llm.snapshot())
        assert view.recorder.head.counts().held == 0


def test_a_player_over_the_engine_writes_what_generate_writes(tiny_model_dir: Path) -> None:
    prompts, params = random_prompts(4), SamplingParams(temperature=1e-6, max_tokens=12, ignore_eos=True)
    with LLM(str(tiny_model_dir), **OPTIONS) as llm:  # type: ignore[arg-type]
        expected = [result["token_ids"] for result in llm.generate(prompts, params, use_tqdm=False)]
        player = Player(llm, prompts, params, paused=True).step(3).back().finish()
        assert player.token_ids == expected
        assert all(isinstance(text, str) and text for text in player.texts)
