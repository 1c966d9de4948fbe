"""The pieces of a page: source shown live, predictions, exercise cards, tables, pictures, the map."""

import ast
import json
from pathlib import Path

import pytest

from nanovllm.errors import NanoVLLMError
from nanovllm.workbook.catalogue import Workbook
from nanovllm.workbook.engine_map import PARTS, engine_map
from nanovllm.workbook.page import (
    exercise_card,
    fingerprint,
    new_figure,
    picture,
    predict,
    show_source,
    source_text,
    table,
    tasks_of,
    words_as_markdown,
)
from nanovllm.workbook.sources import regions

PNG = b"\x89PNG"


def bundle(piece: object) -> dict[str, object]:
    made = piece._repr_mimebundle_()  # type: ignore[attr-defined]
    return made[0] if isinstance(made, tuple) else made


class TestSource:
    def test_a_method_is_shown_as_it_stands_in_its_file(self) -> None:
        path, source = source_text("Scheduler.schedule")
        assert path == "nanovllm/engine/scheduler.py"
        file = Path(__file__).parents[2] / path
        indented = "\n".join(f"    {line}" if line else line for line in source.splitlines())
        assert indented in file.read_text()

    @pytest.mark.parametrize("symbol", ["LLM", "token_id_list", "SamplingParams.__post_init__", "SCHEDULING_POLICIES"])
    def test_classes_functions_methods_and_constants_are_found(self, symbol: str) -> None:
        _, source = source_text(symbol)
        ast.parse(source)
        assert symbol.rpartition(".")[2] in source

    def test_decorators_belong_to_a_definition(self) -> None:
        assert source_text("LLMEngine.drive")[1].startswith("@staticmethod")

    def test_docstring_can_be_left_out(self) -> None:
        _, with_doc = source_text("Scheduler.schedule")
        _, without = source_text("Scheduler.schedule", doc=False)
        assert '"""' in with_doc and '"""' not in without
        assert without.splitlines()[0] == with_doc.splitlines()[0]
        assert without.splitlines()[-1] == with_doc.splitlines()[-1]

    def test_a_part_begins_and_ends_where_it_is_told(self) -> None:
        _, part = source_text("LLMEngine.__init__", start="# 1)", stop="# 3)")
        assert part.splitlines()[0].startswith("def __init__") and part.splitlines()[-1].strip() == "..."
        assert "# 1)" in part and "# 2)" in part and "# 3)" not in part

    @pytest.mark.parametrize("options", [{"start": "no such line"}, {"stop": "no such line"}])
    def test_a_part_that_is_not_there_is_an_error(self, options: dict[str, str]) -> None:
        with pytest.raises(NanoVLLMError, match="no such line"):
            source_text("Scheduler.schedule", **options)

    def test_unknown_and_ambiguous_names_are_errors_that_help(self) -> None:
        with pytest.raises(NanoVLLMError, match="Schedular"):
            source_text("Schedular")
        with pytest.raises(NanoVLLMError, match=r"model_command\.py:main"):
            source_text("main")
        assert source_text("model_command.py:main")[0] == "nanovllm/model_command.py"

    def test_the_output_remembers_what_it_shows(self) -> None:
        data, metadata = show_source("Scheduler.schedule", "LLM", doc=False)._repr_mimebundle_()
        assert "```python\ndef schedule" in data["text/markdown"] and "def schedule" in data["text/plain"]
        for asked, shown in metadata["nanovllm"].items():
            assert fingerprint(source_text(*json.loads(asked))[1]) == shown


class TestPredict:
    def test_nobody_answers(self, capsys: pytest.CaptureFixture[str]) -> None:
        prediction = predict("How many?")
        assert "How many?" in capsys.readouterr().out
        text = repr(prediction.compare(7))
        assert "it is: 7" in text and "no guess" in text and "Not this time" not in text

    @pytest.mark.parametrize(
        ("guess", "actual", "verdict"),
        [(7, 7, "Spot on."), (95, 100, "Close."), (50, 100, "Not this time"), (None, 7, ""), (0, 0, "Spot on.")],
    )
    def test_numbers(self, guess: int | None, actual: int, verdict: str) -> None:
        assert predict("How many?", guess).verdict(actual).startswith(verdict)
        assert bool(predict("How many?", guess).verdict(actual)) == bool(verdict)

    def test_choices_show_their_words(self, capsys: pytest.CaptureFixture[str]) -> None:
        prediction = predict("Which?", "A", a="the first", b="the second")
        assert "b) the second" in capsys.readouterr().out
        text = repr(prediction.compare("b"))
        assert "a) the first" in text and "b) the second" in text and "Not this time" in text
        assert "Right." in repr(prediction.compare("a"))

    def test_markup_in_a_question_is_text(self) -> None:
        assert "<b>" not in str(bundle(predict("Is 1 <b> 2?").compare("<i>"))["text/html"])


class TestExerciseCard:
    def test_every_exercise_has_a_card_without_its_answer(self) -> None:
        workbook = Workbook.find()
        for exercise in workbook.exercises:
            text = repr(exercise_card(exercise.id))
            assert exercise.title in text and exercise.file in text
            solution = (workbook.solutions / exercise.file).read_text().splitlines()
            shown = {line.strip() for line in text.splitlines()}
            for region in regions("\n".join(solution)):
                answer = {line.strip() for line in solution[region.start : region.stop] if len(line.strip()) > 20}
                assert not answer & shown

    def test_signature_and_words_of_a_task(self) -> None:
        workbook = Workbook.find()
        signature, words = next(iter(tasks_of(workbook, workbook.exercise("4.1"))))
        assert signature == "def blocks_needed(num_tokens: int, block_size: int) -> int:"
        assert words.startswith("The number of blocks")

    def test_every_task_has_words(self) -> None:
        workbook = Workbook.find()
        for exercise in workbook.exercises:
            for signature, words in tasks_of(workbook, exercise):
                assert words or "class " in signature, f"{exercise.id}: {signature}"

    def test_examples_lists_and_terms_become_markdown(self) -> None:
        terms = "STOP\n    the end\nLENGTH\n    too long,\n    by far"
        words = f"What it does.\n\n>>> f(1)\n2\n\n{terms}\n\n    a  table\n    of two\n\n* one\n* two"
        assert words_as_markdown(words).split("\n\n") == [
            "What it does.",
            "```python\n>>> f(1)\n2\n```",
            "* `STOP`: \n  the end\n* `LENGTH`: \n  too long,\n  by far",
            "```text\na  table\nof two\n```",
            "* one\n* two",
        ]


def test_a_table_has_numbers_to_the_right_and_a_text_twin() -> None:
    shown = table(["name", "count"], [("a<b", 1234), ("c", 5)], caption="What")
    html, text = str(bundle(shown)["text/html"]), str(bundle(shown)["text/plain"])
    assert "a&lt;b" in html and 'text-align:right">1,234' in html and 'text-align:left">c' in html
    assert text.splitlines() == ["What", "name  count", "a<b   1,234", "c         5"]


def test_a_table_takes_an_iterator_of_rows() -> None:
    assert "2.5" in repr(table(["x", "y"], zip("ab", [1.25, 2.5], strict=True)))


def test_a_picture_brings_its_words() -> None:
    figure, axes = new_figure(3, 2)
    axes.plot([1, 2], [3, 4])
    shown = bundle(picture(figure, "A line from 3 to 4."))
    assert bytes(shown["image/png"]).startswith(PNG) and shown["text/plain"] == "A line from 3 to 4."  # type: ignore[call-overload]


@pytest.mark.parametrize("chapter", range(10))
def test_the_map_lights_something_in_every_chapter(chapter: int) -> None:
    shown = engine_map(chapter)
    assert any(shown.is_lit(part) for part in PARTS)
    assert shown.png().startswith(PNG)
    assert "This chapter:" in repr(shown)


def test_parts_of_the_map_do_not_overlap() -> None:
    boxes = [part.box for part in PARTS]
    for i, (x, y, w, h) in enumerate(boxes):
        for u, v, p, q in boxes[i + 1 :]:
            assert x + w <= u or u + p <= x or y + h <= v or v + q <= y
