"""A guess before a cell runs: what counts as right, and what is no answer at all."""

from typing import Any

import pytest

from nanovllm.workbook.page import predict

CHOICE = {"a": "s0", "b": "s1", "c": "both of them"}


@pytest.mark.parametrize(
    ("guess", "actual", "verdict"),
    [("16", 16, "Spot on."), (" 4,096 ", 4096, "Spot on."), ("1e-6", 1e-6, "Spot on."), ("2.5", 2.5, "Spot on."),
     ("15.5", 16, "Close."), ("12", 16, "Not this time"), ("1,5", 15, "The answer is a number"),
     ("many", 16, "The answer is a number"), (True, 1, "The answer is a number"), (16, "16", "Spot on."),
     ("a  loop", "A loop", "Right."), (16.0, 16, "Spot on.")],
)  # fmt: skip
def test_a_number_is_a_number_however_it_is_written(guess: Any, actual: Any, verdict: str) -> None:
    assert predict("How many?", guess).verdict(actual).startswith(verdict)


@pytest.mark.parametrize("guess", ["b", " B ", "b)", "s1", "S 1", "b) s1"])
def test_an_option_may_be_named_by_its_text(guess: str, capsys: pytest.CaptureFixture[str]) -> None:
    prediction = predict("Which?", guess, **CHOICE)
    assert "Noted. Now run on." in capsys.readouterr().out
    shown = repr(prediction.compare("b"))
    assert "you said: b) s1" in shown and "it is: b) s1" in shown and "Right." in shown
    assert "Not this time" in repr(prediction.compare("a"))


@pytest.mark.parametrize("guess", ["z", 2, "", "s", "neither"])
def test_what_is_no_option_is_told_at_once(guess: Any, capsys: pytest.CaptureFixture[str]) -> None:
    prediction = predict("Which?", guess, **CHOICE)
    said = f"{str(guess)!r} is none of the options: a, b or c."
    shown = capsys.readouterr().out
    assert said in shown and "Noted" not in shown
    assert said in repr(prediction.compare("b"))
    assert "Right." not in repr(prediction.compare("neither")), "a cell may find out that no option is right"


def test_options_that_are_numbers_may_be_given_as_numbers() -> None:
    assert predict("What is it?", 1, a="0.731", b="1.0").verdict("b") == "Right."
