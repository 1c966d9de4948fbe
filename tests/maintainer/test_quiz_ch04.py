"""The keys of chapter 4's quiz, recomputed from the engine."""

from nanovllm.engine.block_manager import BlockManager
from nanovllm.engine.sequence import Sequence
from nanovllm.workbook.quizzes import answer


def accepts(number: int, value: object) -> bool:
    return answer("4", number, value).text.startswith("✓")


def admitted(pool: BlockManager, tokens: list[int]) -> Sequence:
    """A sequence that got its blocks and computed its prompt."""
    seq = Sequence(tokens, block_size=pool.block_size)
    assert pool.can_allocate(seq)
    pool.allocate(seq)
    pool.cache_full_blocks(seq, len(tokens))
    return seq


def test_question_1_blocks_after_one_token() -> None:
    pool = BlockManager(10, 16)
    seq = admitted(pool, list(range(96)))
    seq.append_token(7)
    pool.append(seq)
    assert accepts(1, len(seq.block_table))
    assert not accepts(1, len(seq.block_table) - 1)


def test_question_2_slots() -> None:
    seq = Sequence(list(range(12)), block_size=4)
    seq.block_table = (9, 2, 5)
    assert accepts(2, seq.slot_mapping(6, 10))
    assert not accepts(2, [6, 7, 8, 9])


def test_question_3_same_tokens_behind_others() -> None:
    pool = BlockManager(10, 4)
    one = admitted(pool, [1, 1, 1, 1, 5, 6, 7, 8, 9])
    two = admitted(pool, [2, 2, 2, 2, 5, 6, 7, 8, 9])
    assert one.block_table[1] != two.block_table[1], "the second blocks are not shared"
    assert accepts(3, "b")
    assert not accepts(3, "a")


def test_question_4_full_hit() -> None:
    pool = BlockManager(10, 4)
    admitted(pool, list(range(12)))
    assert accepts(4, admitted(pool, list(range(12))).num_computed_tokens)
    assert not accepts(4, 12)


def test_question_5_next_block_table() -> None:
    pool = BlockManager(4, 4)
    pool.free(admitted(pool, list(range(10))))
    assert accepts(5, admitted(pool, list(range(50, 55))).block_table)
    assert not accepts(5, [3, 0])


def test_question_6_order_of_an_admission() -> None:
    calls: list[str] = []

    class Spy(BlockManager):
        """Writes down the letter of the quiz for every step."""

        def match_prefix(self, seq: Sequence) -> list[int]:
            calls.append("b") if "b" not in calls else None
            return super().match_prefix(seq)

        def can_allocate(self, seq: Sequence) -> bool:
            fits = super().can_allocate(seq)
            calls.append("c")
            return fits

        def touch(self, block_id: int, seq_id: int) -> None:
            calls.append("d")
            super().touch(block_id, seq_id)

        def take_free_block(self, seq_id: int) -> int:
            calls.append("a")
            return super().take_free_block(seq_id)

        def evict(self, block: object) -> None:
            calls.append("e")

    pool = Spy(10, 4)
    pool.free(admitted(pool, list(range(5))))
    calls.clear()
    admitted(pool, list(range(8)))
    assert accepts(6, calls), calls
    assert not accepts(6, "b c a d e".split())
