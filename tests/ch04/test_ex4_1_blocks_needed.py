"""Grader of exercise 4.1: how many blocks hold so many tokens."""

from nanovllm.workbook.grading import Answer, type_of


def test_contract__returns_an_int(answer: Answer) -> None:
    """A number of blocks is an int."""
    for num_tokens, block_size, blocks in ((7, 3, 3), (2, 8, 1), (0, 8, 0)):
        got = answer.call("blocks_needed", num_tokens, block_size)
        answer.require(type(got) is int, f"{got!r}, {type_of(got)}", "an int")
        answer.equal(got, blocks, "As many blocks as it takes until every token has a place; no tokens take none.")


def test_example__five_and_eight_in_blocks_of_four(answer: Answer) -> None:
    """5 tokens open a second block of 4, and 8 tokens fill it without opening a third."""
    answer.equal(answer.call("blocks_needed", 5, 4), 2)
    answer.equal(answer.call("blocks_needed", 8, 4), 2)


def test_oracle__counting_one_by_one(answer: Answer) -> None:
    """As many blocks as it takes, opening one after the other, until every token has a place."""
    for block_size in (1, 2, 3, 7, 16, 256):
        for num_tokens in range(3 * block_size + 2):
            blocks = 0
            while blocks * block_size < num_tokens:
                blocks += 1
            answer.story.clear()
            answer.equal(answer.call("blocks_needed", num_tokens, block_size), blocks)


def test_boundary__exact_multiple(answer: Answer) -> None:
    """A full block needs no spare block behind it."""
    for num_tokens, block_size, blocks in ((256, 256, 1), (512, 256, 2), (12, 4, 3), (1, 1, 1)):
        answer.story.clear()
        answer.equal(answer.call("blocks_needed", num_tokens, block_size), blocks)


def test_boundary__no_tokens(answer: Answer) -> None:
    """No tokens need no block."""
    answer.equal(answer.call("blocks_needed", 0, 4), 0)


def test_boundary__huge_numbers(answer: Answer) -> None:
    """The answer is exact for numbers of any size, and comes at once."""
    answer.equal(answer.call("blocks_needed", 200_001, 4), 50_001)
    answer.equal(answer.call("blocks_needed", 3 * 10**17 + 1, 3), 10**17 + 1)
    answer.equal(answer.call("blocks_needed", 3 * 10**17, 3), 10**17)
    answer.equal(answer.call("blocks_needed", 10**40 + 1, 10**30), 10**10 + 1)
    answer.equal(answer.call("blocks_needed", 10**40, 10**30), 10**10)
