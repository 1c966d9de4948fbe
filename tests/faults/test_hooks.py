"""Step hooks that misbehave: reported once, by name, and removed; the run goes on."""

import gc
import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from nanovllm import LLM, ConfigError, EngineBusyError
from nanovllm.engine.events import StepRecord
from nanovllm.viz import Recorder
from tests.faults.engines import PROMPTS, assert_whole, build, cold, token_ids


@pytest.fixture
def llm(tiny_model_dir: Path) -> Iterator[LLM]:
    with build(tiny_model_dir) as engine:
        yield engine


def generate(llm: LLM) -> list[list[int]]:
    return token_ids(llm.generate(PROMPTS, cold(6), use_tqdm=False))


class Nameless:
    """A hook whose own repr fails."""

    def __call__(self, record: StepRecord) -> None:
        raise ValueError("from a nameless hook")

    def __repr__(self) -> str:
        raise ZeroDivisionError("no name")


class BadError(Exception):
    def __repr__(self) -> str:
        raise ZeroDivisionError("no repr")

    __str__ = __repr__


def raises_bad_error(record: StepRecord) -> None:
    raise BadError


def raises(record: StepRecord) -> None:
    raise ZeroDivisionError("oops")


@pytest.mark.parametrize(
    ("hook", "name"), [(raises, "raises"), (Nameless(), "<Nameless>"), (raises_bad_error, "raises_bad_error")]
)
def test_it_is_reported_once_and_removed(llm: LLM, hook: Any, name: str) -> None:
    expected = generate(llm)
    seen: list[int] = []
    llm.add_step_hook(hook)
    llm.add_step_hook(lambda record: seen.append(record.step))
    before = llm.step_count
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert generate(llm) == expected
    assert len(caught) == 1 and name in str(caught[0].message)
    assert len(seen) == llm.step_count - before, "the others see every step"
    assert_whole(llm)


def test_where_warnings_are_errors_it_is_printed(llm: LLM, capsys: pytest.CaptureFixture[str]) -> None:
    llm.add_step_hook(raises)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert len(generate(llm)) == 3
    assert capsys.readouterr().err.count("raises raised") == 1


def test_a_hook_that_replaces_itself_and_fails_keeps_the_new_one(llm: LLM) -> None:
    seen: list[int] = []

    def old(record: StepRecord) -> None:
        llm.add_step_hook(lambda record: seen.append(record.step), key="cell")
        raise ValueError("the old one fails")

    llm.add_step_hook(old, key="cell")
    with pytest.warns(UserWarning, match="old"):
        generate(llm)
    assert seen, "the new hook was removed in place of the old one"


def test_a_hook_that_another_one_removes_is_not_called_any_more(llm: LLM) -> None:
    seen: list[str] = []
    handles: list[Any] = []

    def first(record: StepRecord) -> None:
        seen.append("first")
        handles[0].remove()

    llm.add_step_hook(first)
    handles.append(llm.add_step_hook(lambda record: seen.append("second")))
    generate(llm)
    assert "second" not in seen


def test_an_old_handle_does_not_take_off_the_hook_that_replaced_its_own(llm: LLM) -> None:
    seen: list[int] = []
    old = llm.add_step_hook(lambda record: None, key="cell")
    new = llm.add_step_hook(lambda record: seen.append(record.step), key="cell")
    old.remove()
    generate(llm)
    assert seen
    new.remove()
    assert not llm._hooks


def test_a_handle_names_its_hook_and_says_whether_it_is_still_attached(tiny_model_dir: Path) -> None:
    on, off = "is told of every step, until .remove()", "is not attached any more"
    with build(tiny_model_dir) as llm:
        first, second = llm.add_step_hook(print, key="cell"), llm.observe(Recorder())
        assert repr(first) == f"HookHandle(print {on})"
        assert repr(second) == f"HookHandle(Recorder(no steps yet) {on})"
        assert repr(llm.add_step_hook(Nameless())) == f"HookHandle(<Nameless> {on})"
        third = llm.add_step_hook(repr, key="cell")  # replaces the first
        second.remove()
        assert repr(first) == f"HookHandle(print {off})"
        assert repr(second) == f"HookHandle(Recorder(no steps yet) {off})"
        assert repr(third) == f"HookHandle(repr {on})"
    assert repr(third) == f"HookHandle(repr {off})"  # the engine has been closed
    del llm
    gc.collect()
    assert repr(third) == f"HookHandle(repr {off})"


@pytest.mark.parametrize("hook", [None, 5, "print", [print]])
def test_what_cannot_be_called_is_refused(llm: LLM, hook: Any) -> None:
    with pytest.raises(ConfigError, match="callable"):
        llm.add_step_hook(hook)
    assert not llm._hooks


def test_a_hook_and_a_key_that_cannot_be_hashed(llm: LLM) -> None:
    class Unhashable(list[int]):
        def __call__(self, record: StepRecord) -> None:
            self.append(record.step)

    hook, key = Unhashable(), ["a", "list"]
    handle = llm.add_step_hook(hook)
    other = llm.add_step_hook(lambda record: None, key=key)
    generate(llm)
    assert hook
    handle.remove()
    other.remove()
    llm.remove_step_hook({"never": "attached"})
    assert not llm._hooks


def test_closing_the_engine_from_a_hook_is_refused(llm: LLM) -> None:
    llm.add_step_hook(lambda record: llm.exit())
    with pytest.warns(UserWarning, match="EngineBusyError"):
        assert len(generate(llm)) == 3
    assert len(generate(llm)) == 3


def test_the_engine_told_the_truth_about_itself_in_a_hook(llm: LLM) -> None:
    def nosy(record: StepRecord) -> None:
        snapshot = llm.snapshot()
        assert snapshot.step == record.step and len(snapshot.running) == record.num_running
        for call in (lambda: llm.stream("the").__next__(), lambda: llm.chat([{"role": "user", "content": "x"}])):
            with pytest.raises(EngineBusyError):
                call()

    with warnings.catch_warnings(), llm.observe(nosy):
        warnings.simplefilter("error")
        generate(llm)
        assert llm._hooks, "it did not fail"


def test_a_hook_that_removes_every_hook_and_adds_more(llm: LLM) -> None:
    def wild(record: StepRecord) -> None:
        for key in list(llm._hooks):
            llm.remove_step_hook(key)
        for _ in range(3):
            llm.add_step_hook(lambda record: None, key=object())

    llm.add_step_hook(wild)
    assert len(generate(llm)) == 3
    assert len(llm._hooks) == 3


def test_a_hook_hears_nothing_of_what_came_before_it(llm: LLM) -> None:
    """What an earlier one had not been told yet is forgotten with it."""
    with llm.observe(lambda record: None):
        llm.abort(llm.add_request(PROMPTS[0], cold(3)))
    records: list[StepRecord] = []
    with llm.observe(records.append):
        generate(llm)
    assert [len(prompt) for prompt in PROMPTS] == [length for _, length in records[0].queued]
    assert not records[0].finished


def test_a_broken_stderr_does_not_end_a_run(tiny_model_dir: Path) -> None:
    """pythonw and some services have none. (transformers puts one in place when it is imported.)"""
    code = (
        "import sys; sys.stderr = None\n"
        "from tests.faults.engines import *\n"
        f"llm = build({str(tiny_model_dir)!r})\n"
        "sys.stderr = None\n"
        "print(len(llm.generate(PROMPTS, cold(3), use_tqdm=True)))\n"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.stdout.strip() == "3", result.stderr
