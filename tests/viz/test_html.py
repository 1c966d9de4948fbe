"""What a tinkerer sees on typing a name in a cell: a table in the page's own colours, with the repr as its twin."""

import re
from html import unescape
from html.parser import HTMLParser
from typing import Any

import pytest

from nanovllm._html import MAX_ENTRIES, plain, shorten, table
from nanovllm.engine.block_manager import BlockManager
from nanovllm.engine.sequence import Sequence
from nanovllm.sampling_params import SamplingParams
from nanovllm.viz.recorder import Recorder
from tests.viz.toy import ToyEngine, prompts_like_chats


class Tables(HTMLParser):
    """Checks that every tag is closed, and keeps the text."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.words: list[str] = []
        self.feed(html)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.words.append(data)


def engine_objects() -> dict[str, Any]:
    llm, recorder = ToyEngine(), Recorder()
    recorder.attach(llm)
    for prompt in prompts_like_chats(14):
        llm.add_request(prompt, SamplingParams(max_tokens=9))
    for _ in range(4):
        llm.step()
    return {
        "SamplingParams": SamplingParams(),
        "Sequence": llm.scheduler.running[0],
        "BlockManager": llm.scheduler.block_manager,
        "StepRecord": recorder.records[0],
        "EngineSnapshot": llm.snapshot(),
        "Recorder": recorder,
    }


NAMES = ["SamplingParams", "Sequence", "BlockManager", "StepRecord", "EngineSnapshot", "Recorder"]


@pytest.mark.parametrize("name", NAMES)
def test_each_class_shows_a_table(name: str) -> None:
    value = engine_objects()[name]
    html = value._repr_html_()
    words = Tables(html).words
    assert words[0] == name and len(html) < 30_000
    assert repr(value).startswith(("<", name))
    assert not re.search(r"(?<!-)color:(?!inherit)|background", html)  # readable on light and dark pages alike


def test_a_step_record_shows_its_rows_as_a_table_and_says_how_many_there_are() -> None:
    objects = engine_objects()
    words = Tables(objects["StepRecord"]._repr_html_()).words
    assert {"seq_id", "num_computed_tokens", "block_table"} <= set(words)
    words = Tables(objects["EngineSnapshot"]._repr_html_()).words
    assert "… 64 in all" in words and words.count("ref_count") == 1 and MAX_ENTRIES < 64


def test_texts_stand_without_quotes_and_enum_members_by_their_values() -> None:
    assert Tables(SamplingParams()._repr_html_()).words.count("'") == 0
    objects = engine_objects()
    words = Tables(objects["Sequence"]._repr_html_()).words
    assert words[words.index("status") + 1] == "running"
    words = Tables(objects["StepRecord"]._repr_html_()).words
    assert words[words.index("phase") + 1] in ("prefill", "decode", "mixed") and "allocate" in words
    assert not any(
        word.startswith(("'", "<")) for value in objects.values() for word in Tables(value._repr_html_()).words
    )
    assert plain("a\nb", 60) == repr("a\nb") and plain("", 60) == "''" and plain("x" * 80, 60) == "x" * 59 + "…"


def test_text_is_escaped_and_long_values_are_cut() -> None:
    html = table("<b>", [("a<b", "<script>"), ("long", list(range(100)))])
    assert "<script>" not in html and "<b>" not in html
    assert unescape("".join(Tables(html).words)).startswith("<b>a<b<script>long[0, 1")
    assert shorten(list(range(100))).endswith("… 100 in all]") and len(shorten("x" * 500)) == 200


def test_a_recorder_shows_what_it_has_seen_and_which_steps_it_keeps() -> None:
    llm, recorder = ToyEngine(), Recorder(keep=3)
    recorder.attach(llm)
    for prompt in prompts_like_chats(2):
        llm.add_request(prompt, SamplingParams(max_tokens=5))
    while not llm.is_finished():
        llm.step()
    words = Tables(recorder._repr_html_()).words
    shown = dict(zip(words[1::2], words[2::2], strict=True))
    assert shown["last_step"] == "6" and shown["steps"] == "range(4, 7)"
    assert shown["requests"] == shown["finished"] == "2" and shown["decode_tokens"] == "8"


def test_objects_that_are_new() -> None:
    assert "range(0, 0)" in Tables(Recorder()._repr_html_()).words
    assert "num_free_blocks" in Tables(BlockManager(4, 4)._repr_html_()).words
    assert "block_table" in Tables(Sequence([1, 2, 3])._repr_html_()).words
