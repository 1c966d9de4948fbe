"""Recorder and History: bounded, mergeable, savable, and usable where there is no engine."""

import json
import subprocess
import sys
import timeit
import tracemalloc
from collections.abc import Iterator
from dataclasses import replace
from itertools import islice
from pathlib import Path

import numpy as np
import pytest

from nanovllm.engine.events import StepRecord
from nanovllm.sampling_params import SamplingParams
from nanovllm.viz.history import DECODE, FIELDS, FINISH, HIT, PREEMPT, PREFILL, RESIDENT, WAITING, History, merge_cells
from nanovllm.viz.live import DEFAULT_PANELS, PANELS, make_dashboard
from nanovllm.viz.recorder import Recorder
from tests.viz.toy import ToyEngine, prompts_like_chats

ROOT = Path(__file__).parents[2]


def recorded_run(keep: int = 1000, count: int = 10, **options: int) -> tuple[Recorder, ToyEngine]:
    llm = ToyEngine(**{"num_kvcache_blocks": 64, **options})
    recorder = Recorder(keep=keep, decode=lambda token_id: llm.tokenizer.decode([token_id]))
    recorder.attach(llm)
    for prompt in prompts_like_chats(count):
        llm.add_request(prompt, SamplingParams(max_tokens=20))
    while not llm.is_finished():
        llm.step()
    return recorder, llm


def endless(records: list[StepRecord], count: int) -> Iterator[StepRecord]:
    """The records over and over, with their steps and sequences renumbered, as of one run that never ends."""
    ids = max(row.seq_id for record in records for row in record.rows) + 1
    for step in range(1, count + 1):
        lap, index = divmod(step - 1, len(records))
        record, lap = records[index], lap * ids
        yield replace(
            record, step=step,
            rows=tuple(
                row._replace(seq_id=row.seq_id + lap, token_ids=(*row.token_ids,), block_table=(*row.block_table,))
                for row in record.rows
            ),
            queued=tuple((seq_id + lap, length) for seq_id, length in record.queued),
            admitted=tuple(entry._replace(seq_id=entry.seq_id + lap) for entry in record.admitted),
            preempted=tuple(seq_id + lap for seq_id in record.preempted),
            finished=tuple(entry._replace(seq_id=entry.seq_id + lap) for entry in record.finished),
            block_events=tuple(
                event if event.seq_id is None else event._replace(seq_id=event.seq_id + lap)
                for event in record.block_events
            ),
        )  # fmt: skip


def test_merging_keeps_every_sum() -> None:
    records = list(recorded_run()[0].records)
    small, large = History(capacity=8), History(capacity=4096)
    for record in endless(records, 1000):
        small.fold(record)
        large.fold(record)
    assert len(small.columns) <= 8 and small.steps_per_column == 128 and len(large.columns) == 1000
    coarse, fine = small.series(), large.series()
    for name in FIELDS[1:-5]:
        assert coarse[name].sum() == pytest.approx(fine[name].sum()) == pytest.approx(small.totals[name])
    edges = np.arange(0, 1000, 128)
    for name in ("peak_tokens", "peak_used_blocks"):
        assert coarse[name].tolist() == np.maximum.reduceat(fine[name], edges).tolist()
    assert coarse["waiting"].tolist() == [fine["waiting"][min(end, 999)] for end in edges + 127]
    assert coarse["first_step"].tolist() == (edges + 1).tolist()
    assert [small.num_columns(step) for step in (1, 128, 129, 1000)] == [1, 1, 2, 8]


def test_merged_cells_keep_what_happened_and_the_later_standing() -> None:
    pairs = np.array([[PREFILL | RESIDENT, DECODE | RESIDENT], [WAITING, 0], [0, WAITING], [PREEMPT | 3, 0],
                      [HIT | PREFILL | RESIDENT, FINISH | DECODE]], np.uint8)  # fmt: skip
    assert merge_cells(pairs).tolist() == [
        PREFILL | DECODE | RESIDENT, WAITING, WAITING, PREEMPT | 3, HIT | PREFILL | DECODE | FINISH | RESIDENT,
    ]  # fmt: skip


def test_sequences_remembered_are_bounded_and_those_at_work_stay() -> None:
    records = list(recorded_run()[0].records)
    history = History(capacity=16, max_sequences=12)
    alive: set[int] = set()
    for record in endless(records, 400):
        history.fold(record)
        alive |= {seq_id for seq_id, _ in record.queued}
        alive -= {finish.seq_id for finish in record.finished}
        assert len(history.rows) <= 12
        assert {row.seq_id for row in record.rows} <= history.rows.keys()
    assert history.num_sequences == 10 * -(-400 // len(records)) and alive <= history.rows.keys()


@pytest.mark.slow
def test_memory_and_the_cost_of_a_frame_stay_the_same_from_1_000_to_100_000_steps(tmp_path: Path) -> None:
    """Stated: pool of 64 blocks, 8 sequences at a time, 256 steps kept whole: less than 3 MiB, whatever comes."""
    recorder, sizes, costs = Recorder(), [], []
    dashboard = make_dashboard(DEFAULT_PANELS, recorder, None)
    run = endless(list(recorded_run(count=16)[0].records), 100_000)
    for target in (1_000, 10_000, 100_000):
        for record in islice(run, target - recorder.last_step):
            recorder(record)
        costs.append(min(timeit.repeat(lambda: dashboard.scene().pack(), number=1, repeat=30)))
        path = recorder.save(tmp_path / "run.jsonl")
        tracemalloc.start()
        copy = Recorder.load(path)  # everything that a recorder holds, made anew under the counter
        sizes.append(tracemalloc.get_traced_memory()[0])
        tracemalloc.stop()
        assert len(copy.records) == 256
    print(f"bytes {sizes}, seconds a frame {costs}")
    assert recorder.history.totals["steps"] == 100_000
    assert sizes[2] < 1.1 * sizes[1] and sizes[2] < 3 * 2**20, sizes
    assert costs[2] < 1.5 * min(costs[:2]), costs


def test_everything_that_a_recorder_keeps_is_bounded() -> None:
    recorder = Recorder(keep=32)
    for record in endless(list(recorded_run(count=16)[0].records), 10_000):
        recorder(record)
    history, head = recorder.history, recorder.head
    assert history.totals["steps"] == 10_000 and head is not None
    assert len(recorder.records) == 32 and len(history.columns) <= 256 and len(history.rows) <= 512
    assert history.ended.keys() <= history.rows.keys()
    assert len(head.sequences) <= 16 and head.holders.keys() <= set(range(64))


def test_saved_and_loaded_it_is_the_same(tmp_path: Path) -> None:
    for keep, name in ((1000, "run.jsonl"), (15, "run.jsonl.gz")):
        recorder, _ = recorded_run(keep=keep)
        loaded = Recorder.load(recorder.save(tmp_path / name))
        for ours, theirs in zip(recorder.records, loaded.records, strict=True):
            same = {"time": 0.0, "timings": ours.timings}
            assert replace(ours, **same) == replace(theirs, **same)
            assert theirs.timings == pytest.approx(ours.timings, abs=1e-6)
            assert all(type(a) is type(b) for a, b in zip(ours.block_events, theirs.block_events, strict=True))
        views = make_dashboard(list(PANELS), recorder, None), make_dashboard(list(PANELS), loaded, None)
        for step in (None, recorder.steps[0], recorder.steps[-1] - 3):
            ours, theirs = (view.text(step) for view in views)
            assert ours == theirs and "Step log" in ours
            assert views[0].scene(step).pack() == views[1].scene(step).pack()


def test_a_gzip_name_is_compressed(tmp_path: Path) -> None:
    recorder, _ = recorded_run()
    plain, packed = recorder.save(tmp_path / "run.jsonl"), recorder.save(tmp_path / "run.jsonl.gz")
    assert packed.stat().st_size < plain.stat().st_size / 4
    assert len(plain.read_text().splitlines()) == 1 + len(recorder.records)


def test_a_recorder_that_saw_nothing(tmp_path: Path) -> None:
    recorder = Recorder()
    dashboard = make_dashboard(list(PANELS), recorder, None)
    assert "No step has been seen yet" in dashboard.text() and dashboard.png()[:4] == b"\x89PNG"
    loaded = Recorder.load(recorder.save(tmp_path / "empty.jsonl"))
    assert loaded.head is None and repr(loaded) == "Recorder(no steps yet)"


@pytest.mark.parametrize("damage", ["", "{}\n", "not json\n", '{"format": "other"}\n', "cut", "field"])
def test_what_is_not_a_run_is_refused_by_name(tmp_path: Path, damage: str) -> None:
    path = tmp_path / "broken.jsonl"
    if damage in ("cut", "field"):
        lines = recorded_run()[0].save(path).read_text().splitlines()
        lines[3] = lines[3][:-20] if damage == "cut" else json.dumps(json.loads(lines[3])[:-1])
        damage = "\n".join(lines)
    path.write_text(damage)
    with pytest.raises(ValueError, match=r"broken\.jsonl is not a recorded run \(line [14]: "):
        Recorder.load(path)


@pytest.mark.parametrize(("field", "value"), [("version", 2), ("version", "1"), ("format", "other"), ("format", None)])
def test_a_run_of_another_version_is_refused(tmp_path: Path, field: str, value: object) -> None:
    path = recorded_run()[0].save(tmp_path / "later.jsonl")
    head, _, rest = path.read_text().partition("\n")
    path.write_text(json.dumps({**json.loads(head), field: value}) + "\n" + rest)
    with pytest.raises(ValueError, match="its first line does not begin a run of version 1"):
        Recorder.load(path)


def test_steps_that_are_gone_are_refused_with_a_remedy() -> None:
    recorder, _ = recorded_run(keep=5)
    with pytest.raises(IndexError, match=r"step 1 is not kept whole; steps \d+ to \d+ are \(Recorder\(keep=…\)"):
        recorder.at(1)
    with pytest.raises(ValueError, match="keep must be at least 1"):
        Recorder(keep=0)


def test_steps_missed_in_between_begin_a_new_record() -> None:
    recorder, llm = Recorder(), ToyEngine()
    handle = recorder.attach(llm)
    llm.add_request([1] * 8, SamplingParams(max_tokens=20))
    for _ in range(3):
        llm.step()
    handle.remove()
    llm.step()
    recorder.attach(llm)
    llm.step()
    assert list(recorder.steps) == [5] and recorder.head is not None and recorder.head.is_complete


def test_a_recorder_that_was_not_told_begins_anew_by_itself() -> None:
    """A step that it missed cannot be folded, and a pool of another size is another engine's."""
    records = list(recorded_run(num_kvcache_blocks=64)[0].records)
    recorder = Recorder()
    for record in (*records[:3], *records[4:6]):
        recorder(record)
    assert list(recorder.steps) == [5, 6]
    other = next(iter(recorded_run(num_kvcache_blocks=48)[0].records))
    recorder(other)
    assert list(recorder.steps) == [1] and recorder.head is not None
    assert recorder.head.num_blocks == 48 and recorder.head.is_complete


def test_a_recorder_attached_anew_under_the_same_key_replaces_the_old_one() -> None:
    llm = ToyEngine()
    for _ in range(3):
        newest = Recorder()
        newest.attach(llm)
    assert list(llm.hooks.values()) == [newest]


def test_importing_and_replaying_needs_neither_torch_nor_a_notebook(tmp_path: Path) -> None:
    """In a process of its own: first the words alone, then a picture."""
    recorder, _ = recorded_run()
    path = recorder.save(tmp_path / "run.jsonl")
    code = f"""
import sys
HEAVY = ("torch", "transformers", "matplotlib", "ipywidgets", "anywidget", "IPython")
loaded = lambda: [name for name in HEAVY if name in sys.modules]
import nanovllm.viz as viz
assert loaded() == [], loaded()
recorder = viz.Recorder.load({str(path)!r})
view = viz.BlockPoolView(recorder)
print(view.text(step=9))
player = viz.Player(recorder, paused=True).step(8)
assert player.cursor == 9, player.cursor
assert loaded() in ([], ["IPython"]), loaded()
assert view.png(step=9)[:4] == b"\\x89PNG"
assert "matplotlib" in sys.modules and "matplotlib.pyplot" not in sys.modules
assert not {{"torch", "transformers", "ipywidgets", "anywidget"}} & set(sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("KV block pool after step 9: 64 blocks of 4 tokens")


def test_a_missing_package_is_named() -> None:
    code = """
import sys
sys.modules["matplotlib"] = sys.modules["anywidget"] = None
import nanovllm.viz as viz
from nanovllm.viz.still import need
uses = {"matplotlib": lambda: viz.BlockPoolView(viz.Recorder()).figure(), "anywidget": lambda: need("anywidget")}
for package, use in uses.items():
    try:
        use()
    except ImportError as error:
        assert f"pip install {package}" in str(error), error
    else:
        raise AssertionError(package)
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
