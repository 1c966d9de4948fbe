"""A slow pool of KV blocks for the graders of chapter 4: lists of names and whole prefixes, no counts, no hashes."""

from collections import Counter
from typing import Any

from nanovllm.engine.block_manager import BlockManager
from nanovllm.engine.sequence import Sequence
from nanovllm.workbook.grading import Answer


class SlowPool:
    """What a pool must do, kept in the plainest way.

    queue: free blocks, next one first. holders: names of the sequences that hold a block. content: the block's own
    tokens with everything in front of them, where it is findable. tables: name -> its blocks. told: name -> how many of
    them the cache was told of, each once, whether or not it kept them. events: what the live views hear, as (kind,
    block, name).
    """

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.block_size = block_size
        self.queue = list(range(num_blocks))
        self.holders: list[list[str]] = [[] for _ in range(num_blocks)]
        self.content: list[tuple[int, ...] | None] = [None] * num_blocks
        self.tables: dict[str, list[int]] = {}
        self.told: dict[str, int] = {}
        self.events: list[tuple[str, int, str]] = []

    def hits(self, tokens: list[int]) -> list[int]:
        """The longest run of findable blocks that leaves a token to compute."""
        found: list[int] = []
        end = self.block_size
        while end < len(tokens) and tuple(tokens[:end]) in self.content:
            found.append(self.content.index(tuple(tokens[:end])))
            end += self.block_size
        return found

    def needed(self, tokens: list[int]) -> int:
        count = 0
        while count * self.block_size < len(tokens):
            count += 1
        return count

    def can_allocate(self, tokens: list[int]) -> bool:
        hits = self.hits(tokens)
        queue = [block for block in self.queue if block not in hits]
        return len(queue) >= self.needed(tokens) - len(hits)

    def allocate(self, name: str, tokens: list[int]) -> None:
        self.tables[name] = self.hits(tokens)
        self.told[name] = len(self.tables[name])
        for block in self.tables[name]:
            self.holders[block].append(name)
            if block in self.queue:
                self.queue.remove(block)
            self.events.append(("reuse", block, name))
        while len(self.tables[name]) < self.needed(tokens):
            self.take(name)

    def take(self, name: str) -> None:
        block = self.queue.pop(0)
        self.content[block] = None
        self.holders[block].append(name)
        self.tables[name].append(block)
        self.events.append(("allocate", block, name))

    def cache(self, name: str, tokens: list[int], num_tokens: int) -> None:
        """Make the full blocks among the first `num_tokens` tokens findable; the first with a content stays it."""
        while (end := (self.told[name] + 1) * self.block_size) <= num_tokens:
            block = self.tables[name][self.told[name]]
            if tuple(tokens[:end]) not in self.content and self.content[block] is None:
                self.content[block] = tuple(tokens[:end])
                self.events.append(("cache", block, name))
            self.told[name] += 1

    def release(self, name: str, block: int) -> None:
        self.holders[block].remove(name)
        if not self.holders[block]:
            place = len(self.queue) if self.content[block] is not None else 0
            self.queue.insert(place, block)
        self.events.append(("release", block, name))

    def free(self, name: str) -> None:
        for block in reversed(self.tables.pop(name)):
            self.release(name, block)


def make_sequence(answer: Answer, label: str, tokens: list[int], block_size: int, seq_id: int = 0) -> Any:
    """A sequence whose tokens stand in the story, under its label."""
    answer.note(f"{label} = Sequence({tokens}), blocks of {block_size}")
    return answer.watch(Sequence(tokens, seq_id=seq_id, block_size=block_size), label)


def compare(answer: Answer, pool: Any, slow: SlowPool, seqs: dict[str, Any]) -> None:
    """Reject the answer where the pool differs from the slow one."""
    for name, seq in seqs.items():
        rule = f"{name}'s block table: found blocks first, then free ones from the front of the queue."
        answer.equal(seq.block_table, tuple(slow.tables[name]), rule)
    counts = [block.ref_count for block in pool.blocks]
    answer.equal(counts, [len(names) for names in slow.holders], "ref_count of a block = the tables that hold it.")
    rule = (
        "The free queue: every block that nobody holds; findable ones join at the end, others at the front, a "
        "sequence's tail before its beginning."
    )
    answer.equal(list(pool.free_block_ids), slow.queue, rule)
    findable = [block.block_id for block in pool.blocks if block.hash is not None]
    expected = [block for block, content in enumerate(slow.content) if content is not None]
    rule = "Findable is what is full, was announced, and was not given away since; the same content only once."
    answer.equal(findable, expected, rule)


def faults(pool: BlockManager, seqs: list[Sequence]) -> str | None:
    """The first invariant of the pool that does not hold, in words; None if all do."""
    held = Counter(block_id for seq in seqs for block_id in seq.block_table)
    for block in pool.blocks:
        name, count = f"block {block.block_id}", held[block.block_id]
        if block.ref_count != count:
            return f"{name} has ref_count {block.ref_count}, and {count} tables hold it"
        if (block.block_id in pool.free_block_ids) != (count == 0):
            return f"{name} is {'held' if count else 'not held'} and {'in' if count else 'not in'} the free queue"
        if block.hash is not None and pool.hash_to_block_id.get(block.hash) != block.block_id:
            return f"{name} has a hash by which it cannot be found"
        if (block.hash is None) != (block.token_ids == ()):
            return f"{name} has hash {block.hash} and tokens {block.token_ids}"
    for key, block_id in pool.hash_to_block_id.items():
        if pool.blocks[block_id].hash != key:
            return f"the cache finds block {block_id} by a hash that is not its own"
    for seq in seqs:
        if len(set(seq.block_table)) != len(seq.block_table):
            return f"a block stands twice in the table {seq.block_table}"
    return None


def whole(answer: Answer, pool: Any, seqs: dict[str, Any]) -> None:
    """Reject the answer where an invariant of the pool is broken."""
    found = faults(pool.raw, [seq.raw for seq in seqs.values()])
    answer.require(found is None, found or "", "a pool in which every count is right")


def compare_events(answer: Answer, pool: Any, slow: SlowPool, heard: tuple[str, ...], ids: dict[str, int]) -> None:
    """Reject the answer where the live views hear something else of its last step, as far as `heard` kinds go."""
    rule = f"The live views are told of each {' and '.join(heard)} once: its kind, the block, the sequence's seq_id."
    got = sorted((str(event.kind), event.block_id, event.seq_id) for event in pool.journal if event.kind in heard)
    expected = sorted((kind, block, ids[name]) for kind, block, name in slow.events if kind in heard)
    answer.equal(got, expected, rule)
    pool.journal.clear()
    slow.events.clear()


def random_workload(answer: Answer, num_steps: int = 25, heard: tuple[str, ...] = ()) -> None:
    """Admit, grow, announce and free sequences at random on the answer's pool and the slow one, comparing after each.

    Few token values and few prefixes, so that sequences often begin alike; sizes that do not divide each other.
    heard: kinds of events (`BlockEventKind`) that must be reported, too.
    """
    rng = answer.rng
    block_size, num_blocks = rng.choice([1, 2, 3, 4, 5]), rng.randint(3, 12)
    answer.story.clear()
    pool = answer.build(BlockManager, num_blocks, block_size, label="pool")
    pool.journal = []
    slow, seqs, ids, serial = SlowPool(num_blocks, block_size), dict[str, Any](), dict[str, int](), 0
    stems = [[rng.randint(1, 3) for _ in range(3 * block_size)] for _ in range(2)]
    for _ in range(num_steps):
        act = rng.choice(["admit", "admit", "grow", "announce", "free"])
        if act == "admit":
            stem = rng.choice(stems)
            tail = [rng.randint(1, 3) for _ in range(rng.randint(0, block_size + 1))]
            tokens = stem[: rng.randint(1, len(stem))] + tail
            name, serial = f"s{serial}", serial + 1
            seq = make_sequence(answer, name, tokens, block_size, serial)
            fits = slow.can_allocate(tokens)
            answer.equal(pool.can_allocate(seq), fits, "A sequence fits if blocks to take + free hits <= free blocks.")
            if fits:
                num_hits = len(slow.hits(tokens))
                got = pool.allocate(seq)
                answer.equal(got, num_hits * block_size, "allocate returns the number of tokens that the hits hold.")
                slow.allocate(name, tokens)
                seqs[name], ids[name] = seq, serial
        elif seqs:
            _act_on_one(answer, act, pool, slow, seqs)
        compare(answer, pool, slow, seqs)
        whole(answer, pool, seqs)
        compare_events(answer, pool, slow, heard, ids)


def _act_on_one(answer: Answer, act: str, pool: Any, slow: SlowPool, seqs: dict[str, Any]) -> None:
    rng = answer.rng
    name = rng.choice(sorted(seqs))
    seq = seqs[name]
    tokens = seq.raw.token_ids
    if act == "grow":
        seq.append_token(rng.randint(1, 3))
        fits = len(tokens) <= len(slow.tables[name]) * slow.block_size or bool(slow.queue)
        answer.equal(pool.can_append(seq), fits, "A token needs a slot in a held block, or a free block.")
        if not fits:
            tokens.pop()
            return
        pool.append(seq)
        if len(tokens) > len(slow.tables[name]) * slow.block_size:
            slow.take(name)
    elif act == "announce":
        num_tokens = rng.randint(0, len(tokens))
        pool.cache_full_blocks(seq, num_tokens)
        slow.cache(name, tokens, num_tokens)
    else:
        pool.free(seq)
        slow.free(name)
        answer.equal(seq.block_table, (), "A freed sequence holds nothing.")
        del seqs[name]
