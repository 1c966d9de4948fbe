"""Replaced parts: from files that fail, in the place of static methods, and only as long as somebody says.

And learners' parts that go about it in another way than the shipped ones, but rightly: the engine must not rely on more
than it asks for.
"""

from functools import partial, wraps
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from nanovllm import LLM, SamplingParams
from nanovllm.engine.block_manager import BlockManager
from nanovllm.engine.parts import Parts, active_parts, are_shipped, load_object
from nanovllm.engine.scheduler import Scheduler
from nanovllm.engine.sequence import Sequence, SequenceStatus
from nanovllm.errors import ConfigError


def test_a_file_that_fails_fails_again(tmp_path: Path) -> None:
    """Half a module must not be what the next one gets."""
    path = tmp_path / "answer.py"
    path.write_text("def blocks_needed(num_tokens, block_size):\n    return 3\n\n1 / 0\n")
    for _ in range(2):
        with pytest.raises(ZeroDivisionError):
            load_object(f"{path}::blocks_needed")
    path.write_text(path.read_text().replace("1 / 0", ""))
    assert load_object(f"{path}::blocks_needed")(8, 4) == 3


def test_what_no_part_can_be_is_told(tmp_path: Path) -> None:
    path = tmp_path / "answer.py"
    path.write_text("class Sampler:\n    pass\n")
    with pytest.raises(ConfigError, match='named by text, such as "Sampler".*got <class'):
        Parts({Sequence: Sequence})  # type: ignore[dict-item]
    with pytest.raises(AttributeError, match="answer.py has no 'Sampler.forwards'"):
        Parts({"Sampler": f"{path}::Sampler.forwards"}).get("Sampler", None)


def test_a_function_in_the_place_of_a_static_method_is_given_no_self() -> None:
    replaced = Parts({"BlockManager.blocks_needed": lambda num_tokens, block_size: 3}).resolve(BlockManager)
    assert replaced(4, 4).blocks_needed(8, 4) == replaced.blocks_needed(8, 4) == 3
    assert BlockManager.blocks_needed(8, 4) == 2


def test_parts_are_active_inside_their_block_only() -> None:
    before = active_parts()
    inner, outer = Parts({"Sampler": int}), Parts({"Sampler": str, "Config": str})
    with pytest.raises(ZeroDivisionError), outer.active():
        with inner.active() as merged:
            assert active_parts() is merged and merged.replacements == {"Sampler": int, "Config": str}
        assert active_parts().replacements == outer.replacements
        raise ZeroDivisionError
    assert active_parts() is before


# ---- another way that is right as well -----------------------------------------------------------------------------

PROMPTS = [[5, 6, 7, 8, 9, 10], [11, 12, 13, 14], [20, 21, 22, 23, 24, 25, 26]]


def generated(path: Path, parts: dict[str, Any], **options: Any) -> list[list[int]]:
    settings: dict[str, Any] = {"num_kvcache_blocks": 60, **options}
    with LLM(
        str(path), parts=Parts(parts), device="cpu", dtype="float32", attention_backend="torch", kvcache_block_size=4,
        max_model_len=100, **settings,
    ) as llm:  # fmt: skip
        outputs = llm.generate(PROMPTS, SamplingParams(1e-6, 8, True), use_tqdm=False)
    return [output["token_ids"] for output in outputs]


class Reserving(BlockManager):
    """Room for the whole answer at admission, as engines did before paging."""

    def allocate(self, seq: Sequence) -> int:
        cached = super().allocate(seq)
        while len(seq.block_table) * self.block_size < seq.num_prompt_tokens + seq.max_tokens:
            seq.block_table += (self.take_free_block(seq.seq_id),)
        return cached


class InTwos(BlockManager):
    def append(self, seq: Sequence) -> None:
        if len(seq.block_table) * self.block_size < len(seq.token_ids):
            seq.block_table += (self.take_free_block(seq.seq_id), self.take_free_block(seq.seq_id))


class RoundRobin(Scheduler):
    """One row a step, in a list that is filled anew."""

    turn = 0

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.rows: list[Sequence] = []

    def schedule_decodes(self) -> list[Sequence]:
        every = super().schedule_decodes()
        self.turn += 1
        self.rows[:] = every[self.turn % len(every) :][:1] if every else []
        return self.rows


class NewLists(Scheduler):
    """Seats in a new list whenever somebody loses one."""

    def preempt(self, seq: Sequence) -> None:
        self.running = self.running[:-1]
        self.block_manager.free(seq)
        seq.status = SequenceStatus.PREEMPTED
        self.num_preemptions += 1
        self.waiting.appendleft(seq)


class KeepsProgress(BlockManager):
    """`allocate` sets the progress anyway."""

    def free(self, seq: Sequence) -> None:
        for block_id in reversed(seq.block_table):
            self.release(block_id, seq.seq_id)
        seq.block_table, seq.num_hashed_blocks = (), 0


@pytest.mark.parametrize("policy", ["prefill_first", "mixed"])
@pytest.mark.parametrize(
    ("parts", "blocks"),
    [
        ({"BlockManager": Reserving}, 60),
        ({"BlockManager": InTwos}, 60),
        ({"Scheduler": RoundRobin}, 60),
        ({"Scheduler": NewLists, "BlockManager": KeepsProgress}, 6),
    ],
    ids=["reserving", "in twos", "round robin", "new lists"],
)
def test_the_same_tokens_by_another_way(tiny_model_dir: Path, parts: dict[str, Any], blocks: int, policy: str) -> None:
    got = generated(tiny_model_dir, parts, num_kvcache_blocks=blocks, scheduling_policy=policy)
    assert got == generated(tiny_model_dir, {})


class Short(Sequence):
    @property
    def max_tokens(self) -> int:
        return min(3, self.sampling_params.max_tokens)


class Flagged(Sequence):
    done = False

    @property
    def is_finished(self) -> bool:
        return self.done or super().is_finished


def flags(self: Scheduler, seqs: list[Sequence], token_ids: list[int | None], is_prefill: bool) -> None:
    for seq, token_id in zip(seqs, token_ids, strict=True):
        seq.num_computed_tokens += seq.num_scheduled_tokens
        if token_id is not None:
            seq.append_token(token_id)
            if self.stop_reason(seq):
                self.block_manager.free(seq)
                self.running.remove(seq)
                seq.done = True  # type: ignore[attr-defined]


def test_a_sequence_is_asked_for_its_limit_and_its_end(tiny_model_dir: Path) -> None:
    expected = generated(tiny_model_dir, {})
    assert generated(tiny_model_dir, {"Sequence": Short}) == [tokens[:3] for tokens in expected]
    assert generated(tiny_model_dir, {"Sequence": Flagged, "Scheduler.postprocess": flags}) == expected


@pytest.mark.parametrize("by_hand", [False, True], ids=["as a part", "by hand"])
@pytest.mark.parametrize(
    ("owner", "method"),
    [
        (BlockManager, "can_append"),
        (BlockManager, "append"),
        (Scheduler, "plan"),
        (Scheduler, "stop_reason"),
        (Sequence, "append_token"),
        (Sequence, "max_tokens"),
    ],
)
def test_what_somebody_replaced_is_asked_about_every_row(
    tiny_model_dir: Path, monkeypatch: pytest.MonkeyPatch, owner: type[Any], method: str, by_hand: bool
) -> None:
    """The loops over rows do by themselves what the shipped methods would do for most of them, see `are_shipped`."""
    expected = generated(tiny_model_dir, {})
    shipped, asked = vars(owner)[method], []
    function = getattr(shipped, "fget", shipped)

    @wraps(function)  # which makes it look like the shipped one
    def replacement(self: Any, *args: Any) -> Any:
        asked.append(self)
        return function(self, *args)

    replaced = property(replacement) if isinstance(shipped, property) else replacement
    if by_hand:
        monkeypatch.setattr(owner, method, replaced)
    parts = {} if by_hand else {owner.__name__: type(owner.__name__, (owner,), {method: replaced})}
    assert generated(tiny_model_dir, parts) == expected
    num_decodes = sum(len(token_ids) - 1 for token_ids in expected)
    assert len(asked) >= num_decodes


def test_only_the_methods_of_the_three_modules_are_shipped() -> None:
    homes: dict[str, Any] = {"__name__": "nanovllm.engine.mine"}
    exec("def can_append(self, seq): return True", homes)
    shipped = (BlockManager(1, 4).append, BlockManager.append, Scheduler.plan, Sequence.max_tokens)
    assert are_shipped(*shipped)
    for foreign in (homes["can_append"], partial(BlockManager.append), lambda: 0, 3, None, Mock()):
        assert not are_shipped(*shipped, foreign)
