"""Grader of exercise 2.2: one SamplingParams for each prompt."""

from collections import deque
from dataclasses import dataclass
from typing import Any, NamedTuple

from nanovllm.errors import RequestError
from nanovllm.sampling_params import SamplingParams
from nanovllm.workbook.grading import Answer, type_of


@dataclass
class Labelled(SamplingParams):
    """Sampling options of somebody's own."""

    label: str = ""


class Rows(list[Any]):
    """A list of somebody's own."""


class Pair(NamedTuple):
    first: Any
    second: Any


def params(*max_tokens: int) -> list[SamplingParams]:
    return [SamplingParams(max_tokens=number) for number in max_tokens]


def lengths(got: Any) -> list[int]:
    return [each.max_tokens for each in got]


def test_contract__a_new_list(answer: Answer) -> None:
    """It returns a list, a new one each time, and leaves the given one as it is."""
    given = params(3, 5)
    got = answer.call("broadcast", given, 2)
    answer.require(isinstance(got, list), type_of(got), "a list")
    answer.require(got is not given, "the very list that was given", "a new list")
    got.append(SamplingParams())
    answer.equal(len(given), 2, "Whoever changes the result must not change the caller's list.")
    answer.equal(lengths(answer.call("broadcast", params(9)[0], 1)), [9], "A second call knows nothing of the first.")
    with answer.about("A tuple of them counts as a list, and a list comes back."):
        answer.require(isinstance(answer.call("broadcast", tuple(given), 2), list), "no list", "a list")


def test_example__one_for_two_prompts(answer: Answer) -> None:
    """One SamplingParams counts for every prompt."""
    got = answer.call("broadcast", SamplingParams(max_tokens=5), 2)
    answer.equal(lengths(got), [5, 5])


def test_boundary__none_is_the_default(answer: Answer) -> None:
    """Without sampling_params, SamplingParams() counts for every prompt."""
    got = answer.call("broadcast", None, 3)
    answer.equal(got, [SamplingParams()] * 3)
    got[0].max_tokens = 7
    answer.note("(the first one's max_tokens is set to 7)")
    answer.equal(answer.call("broadcast", None, 1), [SamplingParams()], "Every call makes its own default.")


def test_boundary__subclasses(answer: Answer) -> None:
    """What is derived from SamplingParams, list or tuple counts as one, and every field stays what it was."""
    one = Labelled(ignore_eos=True, label="mine")
    answer.equal(answer.call("broadcast", one, 2), [one, one])
    for given in ([one, SamplingParams()], Rows([one, one]), Pair(one, SamplingParams(ignore_eos=True))):
        answer.story.clear()
        got = answer.call("broadcast", given, 2)
        answer.require(type(got) is list, type_of(got), "a plain list")
        answer.equal(got, list(given))


def test_boundary__items_are_checked_later(answer: Answer) -> None:
    """Of a list, only the length counts here: its items come out as they are, whatever they are."""
    for given in ([None, SamplingParams()], ["greedy", 0.7], (SamplingParams(), None)):
        answer.story.clear()
        answer.equal(answer.call("broadcast", given, 2), list(given))


def test_boundary__a_list_of_one_is_no_broadcast(answer: Answer) -> None:
    """A list holds one for each prompt: of length 1 it fits one prompt, and no more."""
    answer.equal(lengths(answer.call("broadcast", params(7), 1)), [7])
    answer.note("broadcast([SamplingParams(max_tokens=7)], 2)")
    refuse(answer, params(7), 2)


def test_boundary__no_prompts(answer: Answer) -> None:
    """No prompts need no params, whatever was given for all of them."""
    for given in (None, SamplingParams(), [], ()):
        answer.story.clear()
        answer.equal(answer.call("broadcast", given, 0), [])


def test_boundary__anything_else(answer: Answer) -> None:
    """What is neither a SamplingParams nor a list or tuple raises a RequestError, and no other error."""
    wrong = (0.7, "greedy", {"temperature": 0.7}, 3, SamplingParams, iter(params(1, 2)), {1, 2}, 0, False, "ab",
             {"temperature": 0.7, "max_tokens": 5}, b"ab", range(2), deque(params(1, 2)), object())  # fmt: skip
    for given in wrong:
        answer.story.clear()
        answer.note(f"broadcast({given!r}, 2)")
        refuse(answer, given, 2)
    answer.story.clear()
    answer.note("broadcast({}, 0)")
    refuse(answer, {}, 0)


def test_oracle__one_or_one_each(answer: Answer) -> None:
    """One counts for all; of a list or tuple, the i-th counts for prompt i."""
    for _ in range(60):
        answer.story.clear()
        number = answer.rng.randint(1, 6)
        if answer.rng.random() < 0.4:
            one = SamplingParams(
                temperature=answer.rng.uniform(0.1, 2),
                max_tokens=answer.rng.randint(1, 99),
                ignore_eos=answer.rng.random() < 0.5,
            )
            answer.equal(answer.call("broadcast", one, number), [one for _ in range(number)])
        else:
            each = params(*answer.rng.sample(range(1, 100), number))
            given: Any = answer.rng.choice([list, tuple])(each)
            answer.equal(answer.call("broadcast", given, number), each)


def test_oracle__other_lengths(answer: Answer) -> None:
    """A list of another length is refused, and the message names both numbers."""
    for given, number in ((2, 3), (3, 2), (1, 4), (0, 2), (5, 1), (4, 0), (12, 11)):
        answer.story.clear()
        answer.note(f"broadcast([{given} SamplingParams], {number})")
        every = params(*range(1, given + 1))
        for kind in (list, tuple):
            error = refuse(answer, kind(every), number)
            missing = [str(count) for count in (given, number) if str(count) not in str(error)]
            answer.require(not missing, f"the message {str(error)!r}", f"a message that names {given} and {number}")


def refuse(answer: Answer, given: Any, number: int) -> BaseException:
    return answer.raises(RequestError, lambda: answer.broadcast(given, number))
