"""Grader of exercise 2.5: a text in pieces, none of which holds half a character."""

from collections.abc import Sequence
from typing import Any

from nanovllm.text_pieces import TextPieces
from nanovllm.workbook.grading import Answer

SPECIAL = 256  # a token without text, unless special tokens are asked for
BROKEN = "\ufffd"


class Bytes:
    """Every byte is a token."""

    def __init__(self) -> None:
        self.num_decoded = 0

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = False) -> str:
        self.num_decoded += len(token_ids)
        special = b"" if skip_special_tokens else b"<special>"
        parts = [special if token == SPECIAL else bytes([token]) for token in token_ids]
        return b"".join(parts).decode("utf-8", errors="replace")


class Words:
    """Every word is a token that brings its space; the very first space of a text is not written, whatever tokens
    without text stand in front of it."""

    words = (" the", " cat", " sat", "!", " é", " ")

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = False) -> str:
        special = "" if skip_special_tokens else "<special>"
        text = "".join(special if token == SPECIAL else self.words[token] for token in token_ids)
        return text.removeprefix(" ")


def start(answer: Answer, tokenizer: Any) -> Any:
    answer.story.clear()
    answer.note(f"pieces = TextPieces(tokenizer), one token a {'byte' if isinstance(tokenizer, Bytes) else 'word'}")
    return answer.parts.resolve(TextPieces)(tokenizer)


def push(answer: Answer, pieces: Any, token_ids: list[int], is_last: bool = False) -> str:
    """One call, in the story; the list stays as it is."""
    given = list(token_ids)
    got = pieces.push(given, is_last)
    shown = token_ids if len(token_ids) <= 8 else [..., *token_ids[-6:]]
    answer.note(f"pieces.push({shown}, {is_last}) -> {got!r}")
    answer.require(isinstance(got, str), got, "a str")
    answer.equal(given, token_ids, "It may not change its inputs.")
    return str(got)


def streamed(answer: Answer, tokenizer: Any, token_ids: list[int]) -> list[str]:
    """The pieces of a stream that gets one token at a time."""
    pieces = start(answer, tokenizer)
    got = [push(answer, pieces, token_ids[:end]) for end in range(1, len(token_ids) + 1)]
    return [*got, push(answer, pieces, token_ids, True)]


def test_contract__pieces_of_text(answer: Answer) -> None:
    """push returns a str, and two streams know nothing of each other."""
    one, two = start(answer, Bytes()), answer.parts.resolve(TextPieces)(Bytes())
    got = [push(answer, one, [97]), push(answer, two, [120]), push(answer, one, [97, 98])]
    answer.equal(got, ["a", "x", "b"], "Each call hands out what is new in its own stream, as soon as it is complete.")
    got = [push(answer, one, [97, 98], True), push(answer, two, [120, 121], True)]
    answer.equal(got, ["", "y"], "The last call hands out what its own stream has left, and nothing twice.")


def test_example__cafe(answer: Answer) -> None:
    """Of "é", the first byte gives nothing yet and the second the whole character."""
    answer.equal(streamed(answer, Bytes(), list("café".encode())), ["c", "a", "f", "", "é", ""])


def test_boundary__four_bytes(answer: Answer) -> None:
    """A character may need four tokens: three times nothing, then all of it."""
    answer.equal(streamed(answer, Bytes(), list("a😀b".encode())), ["a", "", "", "", "😀", "b", ""])


def test_boundary__spaces_between_words(answer: Answer) -> None:
    """A token decoded alone loses its space: it has to be decoded behind the tokens in front of it."""
    answer.equal(streamed(answer, Words(), [0, 1, 2, 3]), ["the", " cat", " sat", "!", ""])
    answer.equal(streamed(answer, Words(), [0, 5, 5, 4, 1]), ["the", " ", " ", " é", " cat", ""])


def test_boundary__cut_in_the_middle_of_a_character(answer: Answer) -> None:
    """At the end everything is handed out as it is, a broken character too; after that nothing is left."""
    pieces = start(answer, Bytes())
    tokens = list("aé".encode())[:2]
    answer.equal([push(answer, pieces, tokens[:1]), push(answer, pieces, tokens)], ["a", ""])
    answer.equal([push(answer, pieces, tokens, True), push(answer, pieces, tokens, True)], [BROKEN, ""])


def test_boundary__only_the_last_call(answer: Answer) -> None:
    """A request that ends in its first step gives its whole text in one call, with tokens that were never pushed."""
    pieces = start(answer, Bytes())
    answer.equal(push(answer, pieces, list("é!".encode()), True), "é!")
    pieces = start(answer, Bytes())
    answer.equal([push(answer, pieces, [104]), push(answer, pieces, [104, 105, 33], True)], ["h", "i!"])
    pieces = start(answer, Words())
    answer.equal([push(answer, pieces, [0]), push(answer, pieces, [0, 1, 2], True)], ["the", " cat sat"])
    pieces = start(answer, Bytes())
    answer.equal(push(answer, pieces, [104, SPECIAL], True), "h")


def test_boundary__tokens_without_text(answer: Answer) -> None:
    """A special token adds no text, and loses none of what follows."""
    tokens = [SPECIAL, 97, SPECIAL, SPECIAL, 195, SPECIAL, 169, 98]
    answer.equal("".join(streamed(answer, Bytes(), tokens)), "aéb")
    answer.equal(streamed(answer, Bytes(), [SPECIAL, 97, SPECIAL]), ["", "a", "", ""])
    answer.equal(streamed(answer, Words(), [0, SPECIAL, 1]), ["the", "", " cat", ""])
    answer.equal(streamed(answer, Words(), [SPECIAL, 0, SPECIAL, SPECIAL, 2, 3]), ["", "the", "", "", " sat", "!", ""])
    pieces = start(answer, Words())
    got = [push(answer, pieces, [0, 1, SPECIAL]), push(answer, pieces, [0, 1, SPECIAL, 2])]
    answer.equal(got, ["the cat", " sat"])


def test_boundary__one_list_that_grows(answer: Answer) -> None:
    """The list may be the same one each time, longer than before: what counts is what is in it."""
    pieces, tokens, got = start(answer, Bytes()), list[int](), []
    answer.note('tokens = []; then tokens.append(...) and pieces.push(tokens, False) in turns, of "aéb"')
    for byte in "aéb".encode():
        tokens.append(byte)
        got.append(pieces.push(tokens, False))
    answer.equal(got, ["a", "", "é", "b"])
    answer.equal(pieces.push(tokens, True), "")


def test_boundary__bytes_that_are_no_character(answer: Answer) -> None:
    """A stray byte holds the stream up only until the next character shows that it will never be whole."""
    answer.equal(streamed(answer, Bytes(), [97, 0xFF, 98, 99]), ["a", "", BROKEN + "b", "c", ""])
    got = streamed(answer, Bytes(), [0xFF, 0xC3, 0xA9, 98])
    answer.equal(got, ["", "", BROKEN + "é", "b", ""], "A broken character in front of an unfinished one waits too.")


def test_oracle__any_text_in_any_steps(answer: Answer) -> None:
    """The pieces join to the text of all tokens, and each call hands out every character that is whole by then."""
    rng = answer.rng
    for _ in range(120):
        text = "".join(rng.choice("ab é€ü漢😀\n") for _ in range(rng.randint(1, 12)))
        tokens = list(text.encode())
        for _ in range(rng.randint(0, 2)):
            tokens.insert(0 if rng.random() < 0.5 else len(tokens), SPECIAL)
        if rng.random() < 0.3:  # cut off anywhere, within a character as well
            tokens = tokens[: rng.randint(1, len(tokens))]
            text = Bytes().decode(tokens, skip_special_tokens=True)
        last_pushed = rng.choice([len(tokens), rng.randint(0, len(tokens))])  # the rest comes with the last call
        tokenizer = Bytes()
        pieces = start(answer, tokenizer)
        end, handed_out = 0, ""
        while end < last_pushed:
            end = min(last_pushed, end + rng.choice([1, 1, 1, 2, 5]))
            handed_out += push(answer, pieces, tokens[:end])
            answer.equal(handed_out, whole_characters(tokens[:end], handed_out), "What is whole, and nothing else.")
        handed_out += push(answer, pieces, tokens, True)
        answer.equal(handed_out, text)
        answer.equal(push(answer, pieces, tokens, True), "", "After the last call there is nothing to add.")


def whole_characters(tokens: list[int], handed_out: str) -> str:
    """The text if its last character is whole; otherwise nothing new."""
    text = Bytes().decode(tokens, skip_special_tokens=True)
    return handed_out if text.endswith(BROKEN) else text


def test_invariant__cost_grows_with_the_text(answer: Answer) -> None:
    """A call decodes a few tokens, however long the list is: ten times the text costs ten times as much."""
    for unit in ("word ", "日本 "):
        tokenizer = Bytes()
        pieces = start(answer, tokenizer)
        tokens = list((unit * 60).encode())
        costs = []
        for end in range(1, len(tokens) + 1):
            before = tokenizer.num_decoded
            pieces.push(tokens[:end], False)
            costs.append(tokenizer.num_decoded - before)
        cost, most = sum(costs) / len(costs), max(costs)
        answer.note(f"{len(tokens)} times pieces.push, one token more each time")
        answer.require(cost <= 40, f"{cost:.0f} decoded tokens a call", "at most 40 decoded tokens a call")
        answer.require(most <= 150, f"{most} decoded tokens in one call", "a few of them, in every call")
