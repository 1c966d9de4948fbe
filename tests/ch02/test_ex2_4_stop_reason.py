"""Grader of exercise 2.4: why a sequence ends after its newest token."""

from typing import Any

from nanovllm.engine.events import FinishReason
from nanovllm.engine.sequence import Sequence
from nanovllm.sampling_params import SamplingParams
from nanovllm.workbook.grading import Answer
from nanovllm.workbook.oracles.scheduler import Options, make_scheduler

STOP, LENGTH = FinishReason.STOP, FinishReason.LENGTH


def reason(answer: Answer, generated: list[int], prompt: int = 3, max_tokens: int = 64, ignore_eos: bool = False,
           neighbour: int = 0, resumed_with: int = 0, **options: Any) -> Any:  # fmt: skip
    """What stop_reason says of a running sequence that has generated these tokens.

    neighbour: tokens of another running sequence, 0: it runs alone. resumed_with: so many of its tokens were generated
    before it was preempted, and computed again when it got its seat back.
    """
    answer.story.clear()
    scheduler = make_scheduler(answer, Options(**options)).raw
    if neighbour:
        answer.note(f"(another sequence of {neighbour} tokens is running)")
        seat(scheduler, Sequence([8] * neighbour, block_size=scheduler.block_manager.block_size))
    wanted = SamplingParams(max_tokens=max_tokens, ignore_eos=ignore_eos)
    seq = Sequence([9] * prompt, wanted, block_size=scheduler.block_manager.block_size)
    ignoring = ", ignore_eos" if ignore_eos else ""
    resumed = f" ({resumed_with} of them before it was preempted)" if resumed_with else ""
    answer.note(f"a prompt of {prompt} tokens, generated {generated}{resumed}, max_tokens={max_tokens}{ignoring}")
    for token in generated[:resumed_with]:
        seq.append_token(token)
    seat(scheduler, seq)
    for token in generated[resumed_with:]:
        if scheduler.block_manager.can_append(seq):
            scheduler.block_manager.append(seq)  # the slot of the last token; the newest one needs none yet
        seq.append_token(token)
    before = everything(scheduler, seq)
    got = scheduler.stop_reason(seq)
    answer.note(f"scheduler.stop_reason(seq) -> {got!r}")
    answer.equal(everything(scheduler, seq), before, "It only looks: whoever asks changes the sequence.")
    answer.equal(scheduler.stop_reason(seq), got, "Asked again, it answers the same.")
    return got


def seat(scheduler: Any, seq: Sequence) -> None:
    """Make a sequence a running one, with the blocks of its tokens."""
    scheduler.add(seq)
    scheduler.waiting.remove(seq)
    scheduler.admit(seq)


def everything(scheduler: Any, seq: Sequence) -> tuple[Any, ...]:
    """What asking may not change."""
    pool, queues = scheduler.block_manager, (list(scheduler.waiting), list(scheduler.running))
    return seq.state(), seq.finish_reason, queues, pool.state(), list(pool.free_block_ids), scheduler.stop_token_ids


def test_contract__a_finish_reason_or_none(answer: Answer) -> None:
    """It returns a FinishReason or None."""
    got, rule = reason(answer, [5]), "A token that is no end token, and more may follow: there is no reason to stop."
    answer.require(not isinstance(got, FinishReason), got, "None", rule)
    answer.equal(got, None)
    for generated, max_tokens in (([5], 1), ([0], 9)):
        got, rule = reason(answer, generated, max_tokens=max_tokens), "It ends at an end token, and at max_tokens."
        answer.require(got is not None, got, "FinishReason.STOP or FinishReason.LENGTH", rule)
        answer.require(isinstance(got, FinishReason), got, "FinishReason.STOP or FinishReason.LENGTH")


def test_example__three_tokens_at_most(answer: Answer) -> None:
    """An end token stops, a limit cuts off, and where both hold it is STOP."""
    for generated, expected in (([5, 6], None), ([5, 6, 7], LENGTH), ([5, 2], STOP), ([5, 6, 2], STOP)):
        answer.equal(reason(answer, generated, max_tokens=3, eos=2), expected)


def test_boundary__ignored_end_token(answer: Answer) -> None:
    """With ignore_eos an end token is a token like any other; the limits still hold."""
    answer.equal(reason(answer, [5, 0], ignore_eos=True), None)
    answer.equal(reason(answer, [5, 0], max_tokens=2, ignore_eos=True), LENGTH)
    answer.equal(reason(answer, [0], prompt=5, max_model_len=6, ignore_eos=True), LENGTH)


def test_boundary__any_of_several_end_tokens(answer: Answer) -> None:
    """A model may have several end tokens, and any of them stops."""
    for token in (0, 7, 8):
        answer.equal(reason(answer, [5, token], eos=0, stop_token_ids=(7, 8)), STOP)
    answer.equal(reason(answer, [5, 6], eos=0, stop_token_ids=(7, 8)), None)
    answer.equal(reason(answer, [5, 0], eos=-1, stop_token_ids=(7,)), None, "This tokenizer has no end token.")


def test_boundary__only_the_newest_token(answer: Answer) -> None:
    """What counts is the token that it just got: an end token in the prompt or further back does not stop."""
    answer.equal(reason(answer, [0, 5], ignore_eos=False), None)
    answer.equal(reason(answer, [5], eos=9), None, "The prompt is full of 9s, which was no reason to stop.")


def test_boundary__max_tokens_counts_generated_ones(answer: Answer) -> None:
    """max_tokens limits what is generated, whatever the length of the prompt; exactly that many are allowed."""
    answer.equal(reason(answer, [5], prompt=40, max_tokens=2), None)
    answer.equal(reason(answer, [5, 5], prompt=40, max_tokens=2), LENGTH)
    answer.equal(reason(answer, [5], prompt=1, max_tokens=1), LENGTH)


def test_boundary__max_model_len_counts_all(answer: Answer) -> None:
    """max_model_len limits prompt and generated tokens together; exactly that many are allowed."""
    answer.equal(reason(answer, [5], prompt=8, max_model_len=10), None)
    answer.equal(reason(answer, [5, 5], prompt=8, max_model_len=10), LENGTH)
    answer.equal(reason(answer, [5, 0], prompt=8, max_model_len=10), STOP)


def test_boundary__one_more_than_the_pool_holds(answer: Answer) -> None:
    """The last token needs no slot: with a pool of 8 slots, a sequence of 8 tokens goes on and one of 9 ends."""
    answer.equal(reason(answer, [5, 5], prompt=6, num_kvcache_blocks=2), None)
    answer.equal(reason(answer, [5, 5, 5], prompt=6, num_kvcache_blocks=2), LENGTH)
    answer.equal(reason(answer, [5], prompt=8, num_kvcache_blocks=2), LENGTH)
    answer.equal(reason(answer, [5] * 9, prompt=6, kvcache_block_size=5, num_kvcache_blocks=3), None)
    answer.equal(reason(answer, [5] * 10, prompt=6, kvcache_block_size=5, num_kvcache_blocks=3), LENGTH)


def test_boundary__the_whole_pool_counts(answer: Answer) -> None:
    """What counts is what the pool holds in all, not what is free now: others give their blocks back."""
    answer.equal(reason(answer, [5], prompt=8, neighbour=16, num_kvcache_blocks=6), None)
    answer.equal(reason(answer, [5] * 3, prompt=4, neighbour=8, num_kvcache_blocks=5, kvcache_block_size=3), None)


def test_boundary__preempted_in_between(answer: Answer) -> None:
    """A sequence that was preempted has still generated what it had generated before."""
    answer.equal(reason(answer, [5, 6], max_tokens=3, resumed_with=1), None)
    answer.equal(reason(answer, [5, 6, 7], max_tokens=3, resumed_with=2), LENGTH)


def test_boundary__two_sequences_in_turns(answer: Answer) -> None:
    """A scheduler is asked about many sequences, after each of their tokens: each answer is about now."""
    scheduler = make_scheduler(answer, Options(eos=0)).raw
    answer.note("A with max_tokens=2 generates 5, 6; B with max_tokens=4 generates 5, 6, 7, 0; asked after each token")
    seqs = {
        name: Sequence([9, 9], SamplingParams(max_tokens=most), block_size=4) for name, most in (("A", 2), ("B", 4))
    }
    for seq in seqs.values():
        seat(scheduler, seq)
    for name, token, expected in (("A", 5, None), ("B", 5, None), ("A", 6, LENGTH), ("B", 6, None), ("B", 7, None),
                                  ("B", 0, STOP)):  # fmt: skip
        seqs[name].append_token(token)
        got = scheduler.stop_reason(seqs[name])
        answer.note(f"{name} gets {token}: scheduler.stop_reason({name}) -> {got!r}")
        answer.equal(got, expected)


def test_oracle__token_by_token(answer: Answer) -> None:
    """The first token that is an end token, or fills one of the three limits, ends the sequence."""
    rng = answer.rng
    for _ in range(150):
        ends = rng.sample(range(12), rng.randint(0, 3))
        prompt, max_tokens = rng.randint(1, 12), rng.randint(1, 12)
        size = rng.choice([1, 3, 4, 8])
        fewest = -(-prompt // size)
        limit, blocks = rng.randint(prompt + 1, 24), rng.randint(fewest, fewest + 3)
        neighbour = rng.randint(0, (blocks - fewest) * size)
        ignore_eos = rng.random() < 0.3
        options = {"eos": ends[0] if ends else -1, "stop_token_ids": tuple(ends[1:]), "max_model_len": limit,
                   "kvcache_block_size": size, "num_kvcache_blocks": blocks, "neighbour": neighbour}  # fmt: skip
        generated: list[int] = []
        while True:
            generated.append(rng.randint(0, 11))
            total, expected = prompt + len(generated), None
            if len(generated) == max_tokens or total == limit or total == size * blocks + 1:
                expected = LENGTH
            if generated[-1] in ends and not ignore_eos:
                expected = STOP
            got = reason(answer, generated, prompt, max_tokens, ignore_eos, **options)
            answer.equal(got, expected)
            if expected:
                break
