"""Grader of exercise 6.5: a recorded and replayed step."""

from collections.abc import Callable
from typing import Any

import torch

from nanovllm.workbook.grading import Answer, type_of
from nanovllm.worker.cuda_graphs import DecodeGraphs, StepInputs


class Machine:
    """Graphs on the answer's code over a stand-in for a model, whose every run is counted."""

    def __init__(self, answer: Answer, max_num_seqs: int = 4, has_logits: bool = True) -> None:
        answer.story.clear()
        answer.note(f"graphs for up to {max_num_seqs} rows; forward(batch) gives numbers made of all its fields")
        self.runs: list[int] = []
        self.has_logits = has_logits
        self.is_broken = False
        rows = DecodeGraphs.graph_sizes(max_num_seqs)[-1]
        self.inputs = StepInputs(rows, 2, torch.device("cpu"))
        self.graphs = answer.parts.resolve(DecodeGraphs)(self.forward, max_num_seqs, self.inputs)

    def forward(self, batch: Any) -> torch.Tensor | None:
        self.runs.append(len(batch.input_ids))
        if self.is_broken:
            raise RuntimeError("out of memory in the middle of a step")
        if not self.has_logits:
            return None
        metadata = batch.attn_metadata
        read = metadata.context_lens / 4 + metadata.slot_mapping / 8 + metadata.block_tables[:, 0] / 16
        return (batch.input_ids * 10 + batch.positions + read)[:, None] + torch.arange(3.0)

    def record(self, size: int) -> tuple[Callable[[], None], Any]:
        result: tuple[Callable[[], None], Any] = self.graphs.record(self.forward, self.graphs.batch(size))
        return result

    def put(self, ids: list[int], positions: list[int]) -> None:
        """Write into the buffers, as the engine does before a replay. The other fields follow from these two."""
        device, rows = self.inputs.device, len(ids)
        device["input_ids"][:rows] = torch.tensor(ids)
        device["positions"][:rows] = torch.tensor(positions)
        device["context_lens"][:rows] = torch.tensor(positions) + 1
        device["block_tables"][:rows, 0] = torch.tensor(ids) + 5
        device["slot_mapping"][:rows] = torch.tensor(ids) * 4 + 20


def logits_of(ids: list[int], positions: list[int], contexts: list[int], slots: list[int],
              blocks: list[int]) -> torch.Tensor:  # fmt: skip
    """What the stand-in for a model says, row by row."""
    fields = zip(ids, positions, contexts, slots, blocks, strict=True)
    return torch.tensor([[10 * i + p + c / 4 + s / 8 + b / 16 + n for n in range(3)] for i, p, c, s, b in fields])


def expected(ids: list[int], positions: list[int]) -> torch.Tensor:
    """The logits of what `Machine.put` wrote."""
    return logits_of(ids, positions, [p + 1 for p in positions], [4 * i + 20 for i in ids], [i + 5 for i in ids])


def test_contract__what_comes_back(answer: Answer) -> None:
    """It returns (replay, logits); replay takes nothing and returns nothing."""
    machine = Machine(answer)
    result = machine.record(2)
    answer.require(isinstance(result, tuple) and len(result) == 2, type_of(result), "(replay, logits)")
    replay, logits = result
    answer.require(callable(replay), type_of(replay), "a function")
    answer.require(isinstance(logits, torch.Tensor), type_of(logits), "a tensor")
    answer.equal(list(logits.shape), [2, 3])
    answer.equal(replay(), None, "replay() returns nothing: its result is in logits.")


def test_example__seven(answer: Answer) -> None:
    """After the buffers were written and the step replayed, logits holds the new result."""
    machine = Machine(answer)
    replay, logits = machine.record(1)
    machine.put([7], [5])
    answer.note("input_ids = 7, positions = 5, replay()")
    replay()
    answer.equal(logits, expected([7], [5]))


def test_oracle__many_replays(answer: Answer) -> None:
    """Every replay computes what a fresh run on the same numbers computes."""
    machine = Machine(answer)
    recorded = {size: machine.record(size) for size in (1, 2, 4)}
    for _ in range(40):
        size = answer.rng.choice([1, 2, 4])
        ids = [answer.rng.randrange(100) for _ in range(size)]
        positions = [answer.rng.randrange(50) for _ in range(size)]
        machine.put(ids, positions)
        del answer.story[1:]
        answer.note(f"input_ids = {ids}, positions = {positions}, replay()")
        recorded[size][0]()
        answer.equal(recorded[size][1], expected(ids, positions))


def test_oracle__through_the_graphs(answer: Answer) -> None:
    """Plugged into the engine's graphs, padded steps of any size give their own rows."""
    from nanovllm.workbook.oracles.batches import make_sequence
    from nanovllm.worker.input_batch import InputBatchBuilder

    machine, builder = Machine(answer, max_num_seqs=6), InputBatchBuilder()
    for _ in range(20):
        used: list[int] = []
        seqs = []
        for _ in range(answer.rng.randint(1, 6)):
            computed = answer.rng.randint(0, 6)
            seqs.append(make_sequence(answer, computed + 1, computed, 1, 4, used))
        arrays = builder.build(seqs)
        del answer.story[1:]
        answer.note(f"a step of {len(seqs)} rows: input_ids {arrays.input_ids.tolist()}")
        logits, _ = machine.graphs.run(arrays)
        first_blocks = arrays.block_tables[:, 0]
        fields = (arrays.input_ids, arrays.positions, arrays.context_lens, arrays.slot_mapping, first_blocks)
        answer.equal(logits, logits_of(*(field.tolist() for field in fields)))


def test_boundary__the_same_tensor_each_time(answer: Answer) -> None:
    """The result is always in the tensor that was handed out, at the same address."""
    machine = Machine(answer)
    replay, logits = machine.record(2)
    address = logits.data_ptr()
    for ids in ([1, 2], [3, 4]):
        machine.put(ids, [0, 0])
        replay()
        answer.require(logits.data_ptr() == address, "another address", "the same address")
        answer.equal(logits, expected(ids, [0, 0]))


def test_boundary__inputs_are_read_anew(answer: Answer) -> None:
    """A replay reads what is in the buffers then, not what was there when it was recorded."""
    machine = Machine(answer)
    machine.put([9, 9], [9, 9])
    replay, logits = machine.record(2)
    machine.put([1, 2], [3, 4])
    replay()
    answer.equal(logits, expected([1, 2], [3, 4]))


def test_boundary__a_replay_runs_the_step_once(answer: Answer) -> None:
    """Each replay runs the step once, on the rows that it was recorded with."""
    machine = Machine(answer)
    replay, _ = machine.record(2)
    machine.runs.clear()
    replay()
    replay()
    answer.equal(machine.runs, [2, 2])


def test_boundary__nothing_runs_on_its_own(answer: Answer) -> None:
    """Without a replay the result stays, whatever is written into the buffers."""
    machine = Machine(answer)
    replay, logits = machine.record(1)
    machine.put([4], [2])
    replay()
    machine.put([8], [8])
    answer.equal(logits, expected([4], [2]))


def test_boundary__recordings_do_not_share(answer: Answer) -> None:
    """Two recordings keep their results apart."""
    machine = Machine(answer)
    one, two = machine.record(1), machine.record(2)
    machine.put([5, 6], [0, 0])
    one[0]()
    machine.put([1, 2], [0, 0])
    two[0]()
    answer.equal((one[1], two[1]), (expected([5], [0]), expected([1, 2], [0, 0])))


def test_boundary__everything_is_read_anew(answer: Answer) -> None:
    """Slots, contexts and block tables are read at each replay, too, not only ids and positions."""
    machine = Machine(answer)
    machine.put([9, 9], [9, 9])
    replay, logits = machine.record(2)
    for name in ("slot_mapping", "context_lens", "block_tables"):
        before = logits.clone()
        machine.inputs.device[name].add_(3)
        answer.note(f"every number in {name} grows by 3, replay()")
        replay()
        answer.require(bool((logits > before).all()), "the old logits", "larger logits")


def test_boundary__an_error_is_told(answer: Answer) -> None:
    """Where the step fails, the replay fails: stale logits must not pass for new ones."""
    machine = Machine(answer)
    replay, _ = machine.record(2)
    machine.is_broken = True
    answer.note("forward(batch) raises a RuntimeError from now on")
    answer.raises(RuntimeError, replay)


def test_boundary__a_rank_without_logits(answer: Answer) -> None:
    """A rank above 0 has no logits, but its replays must run all the same."""
    machine = Machine(answer, has_logits=False)
    replay, logits = machine.record(2)
    answer.equal(logits, None)
    machine.runs.clear()
    answer.equal(replay(), None)
    answer.equal(machine.runs, [2])
