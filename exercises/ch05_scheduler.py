"""Chapter 5: who computes what in the next step. Five pieces of the scheduler, each a part of the real engine.

All functions are methods of the engine's own `Scheduler`, and whatever they call on `self` is there:

    self.waiting              deque of sequences without a seat: who lost one in front, then in order of arrival
    self.running              list of sequences with a seat, in the order in which they got it; they hold blocks
    self.max_num_seqs         seats
    self.token_budget         tokens that a step may compute, all rows together
    self.prefill_chunk        of these, prompt tokens at most
    self.block_manager        the pool: .can_allocate(seq), .can_append(seq), .append(seq), .free(seq) (chapter 4)
    self.admit(seq)           gives a seat: blocks, and a place at the end of `running`; finds cached tokens on the way
    self.plan(seq, n)         lets seq compute n tokens in this step (sets seq.num_scheduled_tokens)
    self.stop_reason(seq)     why it ends after its newest token, or None (chapter 2)
    self.finish(seq, why)     ends it and gives its blocks back; its seat is the caller's business
    seq.num_tokens            all tokens known: prompt and generated
    seq.num_computed_tokens   how many of them have their keys and values in the cache
    seq.is_prefilling         whether it has to catch up before it decodes (a prompt, or everything after a preemption)
    seq.status                SequenceStatus.WAITING, RUNNING, PREEMPTED or FINISHED

In the examples a step is written as the rows that it plans: A: 6 means that sequence A computes 6 tokens.
"""

from nanovllm.engine.scheduler import Scheduler
from nanovllm.engine.sequence import Sequence, SequenceStatus
from nanovllm.workbook import ExerciseTodo


def admit_waiting(self: Scheduler, budget: int) -> list[Sequence]:
    """Exercise 5.1. Give waiting sequences a seat, and their first tokens to compute, while there is something left.

    Three things can run out: the `budget` of tokens, the seats (`self.max_num_seqs`, of which everybody in
    `self.running` has one, half-prefilled or decoding), and the blocks. `self.next_waiting()` says whose turn it is.
    If the pool has no room for that one (`self.block_manager.can_allocate(seq)`), nobody else gets in either: small
    requests must not push past a large one for ever.

    Whoever gets in leaves `self.waiting`, wherever it stands there; then `self.admit(seq)`; then
    `self.plan_chunk(seq, budget)` lets it compute as much as the budget allows, and returns how many tokens that are.
    Only these count against the budget: tokens that were found in the cache cost nothing.

    With a budget of 10, prompts of 6, 7 and 5 tokens, and room enough: A: 6, B: 4, and C waits. B has its seat, and
    computes its other 3 tokens in the next step. Returns a list of those that got in, in that order.
    """
    # --- your code (5.1) ---
    raise ExerciseTodo("5.1")
    # --- end ---


def plan_chunk(self: Scheduler, seq: Sequence, budget: int) -> int:
    """Exercise 5.2, part one. Let a prefilling sequence compute its next tokens, at most `budget` (1 or more) of them.

    What it has to compute is what is not computed yet: of a prompt of 10 tokens, 4 of them computed (or found in the
    cache), 6 with a budget of 8, and 5 with a budget of 5. Use `self.plan`; returns the number of tokens.
    """
    # --- your code (5.2) ---
    raise ExerciseTodo("5.2")
    # --- end ---


def continue_prefills(self: Scheduler, budget: int) -> list[Sequence]:
    """Exercise 5.2, part two. Let those who have a seat and are still prefilling compute their next chunk.

    In the order of their seats, at most `budget` tokens in all; whoever gets nothing more is not in the list. With a
    budget of 8, A at 4 of 10 tokens, B decoding, and C at 1 of 5: A: 6, C: 2. Nobody's seat changes. Use
    `self.plan_chunk`.
    """
    # --- your code (5.2) ---
    raise ExerciseTodo("5.2")
    # --- end ---


def postprocess(self: Scheduler, seqs: list[Sequence], token_ids: list[int | None], is_prefill: bool) -> None:
    """Exercise 5.2, part three. Book the results of a step, which has been scheduled and run.

    `seqs` are the rows of the step; each has computed `seq.num_scheduled_tokens` tokens. `token_ids` holds a new token
    for each row that has caught up with all of its tokens, and None for a chunk that is not the last of its prompt.

    * Every row has that many more computed tokens. (Leave `num_scheduled_tokens` as it is: others read it.)
    * A row that has caught up gets its token (a sequence has the method `append_token`). Its key is not computed yet,
      the next step does that.
    * Then it may be at its end: `self.stop_reason(seq)` says why, or None. Then `self.finish` ends it for that reason,
      and it leaves `self.running`; the others keep their order.

    A, at 4 of 10 tokens, computed 6, B, at 0 of 20, computed 2: token_ids is [7, None]. Afterwards A has 11 tokens, 10
    of them computed, and B has 20, 2 of them computed. Returns nothing.
    """
    # --- your code (5.2) ---
    raise ExerciseTodo("5.2")
    # --- end ---


def schedule_decodes(self: Scheduler) -> list[Sequence]:
    """Exercise 5.3, part one. One token for every running sequence that is not prefilling, in the order of the seats.

    Each needs a slot for its last token: the pool's `can_append(seq)` tells whether there is one or a free block for
    it, its `append(seq)` provides the slot, and `self.plan` plans the row.

    Where there is none, somebody has to give blocks back: the one who got a seat last, `self.running[-1]`, whatever it
    is doing. `self.preempt(...)` takes its seat and its blocks. The sequence that needs the slot may be the last
    itself; then it loses its own seat. Those who are planned already are safe: they sit in front of the victim.

    The pool is full, A, B and C decode, and A needs a block: C is preempted, A gets one of C's blocks, and the
    rows are A: 1, B: 1. Sequences that are prefilling are passed over: they have all their blocks.
    """
    # --- your code (5.3) ---
    raise ExerciseTodo("5.3")
    # --- end ---


def preempt(self: Scheduler, seq: Sequence) -> None:
    """Exercise 5.3, part two. Take the seat and the blocks of the sequence that was seated last.

    It keeps all of its tokens, the generated ones too, and will be computed again: its status becomes PREEMPTED, the
    pool frees its blocks (`free(seq)`, which also sets its progress back to 0), and it waits again.
    It was here before everybody who waits, so its place is in front of them; a second victim of the same step was
    seated before the first, and comes to stand in front of it.
    """
    assert self.running[-1] is seq, "victims are taken from the tail"
    # --- your code (5.3) ---
    raise ExerciseTodo("5.3")
    # --- end ---
    seq.num_preemptions += 1
    self.num_preemptions += 1
    if self.journal is not None:
        self.journal.preempted.append(seq.seq_id)


def schedule_prefills(self: Scheduler, budget: int, admit: bool = True) -> list[Sequence]:
    """Exercise 5.4, part one. The prompt chunks of a step: first those under way, then newcomers.

    All of them together compute at most `budget` tokens, and at most `self.prefill_chunk`. `self.continue_prefills` and
    `self.admit_waiting` each take a budget and return who got something, with `num_scheduled_tokens` set. What the
    first has used up is gone for the second. `admit` False: no newcomers.

    With a budget of 10 and a chunk of 8, A at 5 of 10 tokens, and B waiting with 9: A: 5, B: 3.
    """
    # --- your code (5.4) ---
    raise ExerciseTodo("5.4")
    # --- end ---


def schedule_prefill_first(self: Scheduler) -> list[Sequence]:
    """Exercise 5.4, part two. The policy "prefill_first", as in the course: a step is all prefill or all decode.

    As long as any prompt can be computed, the step is made of prompts (`self.schedule_prefills`, the whole budget);
    only a step without any lets the others decode (`self.schedule_decodes`).
    """
    # --- your code (5.4) ---
    raise ExerciseTodo("5.4")
    # --- end ---


def schedule_mixed(self: Scheduler) -> list[Sequence]:
    """Exercise 5.4, part three. The policy "mixed": everybody decodes in every step, and prompts fill what is left.

    Decoding rows come first in the list, and each of them uses one token of the budget. With a budget of 10, A and B
    decoding, and C waiting with 20 tokens: A: 1, B: 1, C: 8.

    If somebody lost a seat in this very step (`self.num_preemptions` counts all that ever did), nobody new gets one:
    blocks are so short that a newcomer would be the next to lose its seat. Prompts under way go on.
    """
    # --- your code (5.4) ---
    raise ExerciseTodo("5.4")
    # --- end ---


def next_waiting(self: Scheduler) -> Sequence:
    """Exercise 5.5. A fair policy of your own: which of those in `self.waiting` (at least one) gets the next seat?

    The shipped engine takes the first. That is fair, and hard on short requests: behind one prompt of 5,000 tokens,
    twenty of 10 tokens wait. Serving the shortest first is hard on the long one, which may wait for ever. Find
    something in between, with these properties (two moments count: *arrival*, and getting the first seat):

    1. Who lost a seat (status PREEMPTED) comes before all newcomers; of several, the first in the queue.
    2. Short before long: if some newcomer is at most half as long (`num_tokens`) as the one that arrived first, then
       the one that arrived first is not next; unless it has been overtaken 4 times or more already.
    3. Nobody starves: a sequence is overtaken at most 8 times, however many short ones keep arriving. To be overtaken
       means that a sequence which arrived later gets its first seat before you.

    It only answers: the caller takes the sequence out of the queue. And it may ask without seating anybody, because
    the pool has no room; asking alone must not count as an overtaking, and asked again the answer is the same.

    With newcomers A (40 tokens), B (9), C (15), in the order of arrival: B or C, not A. Useful: `seq.seq_id` grows with
    each arrival, `self.next_seq_id` is the number that the next one will get. You may keep notes on `self` or on
    sequences (`getattr(seq, "my_note", 0)`); two schedulers must not share them.
    """
    # --- your code (5.5) ---
    raise ExerciseTodo("5.5")
    # --- end ---
