"""Grader of exercise 6.1: from bytes to a number of KV blocks."""

from numbers import Integral

from nanovllm.workbook.grading import Answer, type_of


def ask(answer: Answer, **sizes: float) -> int:
    answer.story.clear()
    result: int = answer.call("num_blocks", **sizes)
    return result


def test_contract__whole_numbers(answer: Answer) -> None:
    """Both return ints, and answer the same when asked again."""
    for _ in range(2):
        answer.story.clear()
        got = answer.call("block_bytes", num_layers=3, num_kv_heads=2, head_dim=5, block_size=7, itemsize=4)
        answer.require(isinstance(got, Integral), f"{got!r}, {type_of(got)}", "an int")
        answer.equal(got, 1680, "Keys and values, in 3 layers, of 7 tokens, with 2 heads of 5 numbers, 4 bytes each.")
        got = ask(answer, total=1000, used=100, peak=60, current=20, utilization=0.5, bytes_per_block=30)
        answer.require(isinstance(got, Integral), f"{got!r}, {type_of(got)}", "an int")
        answer.equal(got, 12, "Of 500 usable ones 100 are in use, and a step needs 40 more: 360 in blocks of 30.")


def test_example__qwen3_and_a_card_of_24(answer: Answer) -> None:
    """28 layers of 8 kv heads of 128 in bfloat16 make 28 MiB a block of 256; 14.6 of 24 GB are left for blocks."""
    got = answer.call("block_bytes", num_layers=28, num_kv_heads=8, head_dim=128, block_size=256, itemsize=2)
    answer.equal(got, 28 << 20)
    got = ask(answer, total=24_000, used=5_000, peak=6_000, current=4_000, utilization=0.9, bytes_per_block=1_000)
    answer.equal(got, 14)


def test_oracle__bytes_counted_one_by_one(answer: Answer) -> None:
    """A block holds a key and a value for every token, kv head and layer."""
    for _ in range(40):
        layers, heads, dim, size = (answer.rng.randint(1, 7) for _ in range(4))
        itemsize = answer.rng.choice([1, 2, 4])
        counted = sum(2 * dim * itemsize for _ in range(layers) for _ in range(size) for _ in range(heads))
        answer.story.clear()
        got = answer.call(
            "block_bytes", num_layers=layers, num_kv_heads=heads, head_dim=dim, block_size=size, itemsize=itemsize
        )
        answer.equal(got, counted)


def test_oracle__blocks_taken_one_by_one(answer: Answer) -> None:
    """Blocks are taken while one more, what is in use, and what a step needs on top stay within the allowed share."""
    for _ in range(300):
        total = answer.rng.randint(100, 5_000)
        current = answer.rng.randint(0, total // 3)
        used = current + answer.rng.randint(0, total // 3)
        peak = current + answer.rng.randint(0, total // 3)
        share, size = answer.rng.choice([0.25, 0.5, 0.75, 1.0]), answer.rng.randint(1, 60)
        taken = 0
        while used + (peak - current) + (taken + 1) * size <= int(total * share):
            taken += 1
        got = ask(answer, total=total, used=used, peak=peak, current=current, utilization=share, bytes_per_block=size)
        answer.equal(got, taken)


def test_boundary__weights_count_once(answer: Answer) -> None:
    """What lies there between steps is in `used`, `peak` and `current`, and is subtracted once."""
    got = ask(answer, total=1_000, used=400, peak=400, current=400, utilization=1.0, bytes_per_block=100)
    answer.equal(got, 6)


def test_boundary__other_programs(answer: Answer) -> None:
    """Memory that another program holds is gone as well, though torch does not know of it."""
    got = ask(answer, total=1_000, used=700, peak=150, current=100, utilization=1.0, bytes_per_block=50)
    answer.equal(got, 5)


def test_boundary__the_share_is_of_the_total(answer: Answer) -> None:
    """The share is taken of the whole card, not of what is free."""
    got = ask(answer, total=1_000, used=600, peak=100, current=100, utilization=0.5, bytes_per_block=10)
    answer.equal(got, 0)


def test_boundary__nothing_left(answer: Answer) -> None:
    """Where nothing is left, or less than a block, there are 0 blocks, not a negative number."""
    answer.equal(ask(answer, total=100, used=99, peak=90, current=10, utilization=0.9, bytes_per_block=7), 0)
    answer.equal(ask(answer, total=100, used=0, peak=0, current=0, utilization=0.5, bytes_per_block=51), 0)


def test_boundary__exactly_whole_blocks(answer: Answer) -> None:
    """Memory for exactly three blocks gives three; a byte less gives two."""
    answer.equal(ask(answer, total=300, used=0, peak=0, current=0, utilization=1.0, bytes_per_block=100), 3)
    answer.equal(ask(answer, total=299, used=0, peak=0, current=0, utilization=1.0, bytes_per_block=100), 2)


def test_boundary__many_blocks(answer: Answer) -> None:
    """As many blocks as fit, be they millions."""
    got = ask(answer, total=10**9, used=0, peak=0, current=0, utilization=1.0, bytes_per_block=64)
    answer.equal(got, 15_625_000)


def test_boundary__large_sizes_stay_exact(answer: Answer) -> None:
    """Sizes of hundreds of gigabytes are counted to the byte."""
    size = 29_360_128
    got = ask(answer, total=size * 5_000, used=0, peak=0, current=0, utilization=1.0, bytes_per_block=size)
    answer.equal(got, 5_000)
    got = ask(answer, total=size * 5_000 - 1, used=0, peak=0, current=0, utilization=1.0, bytes_per_block=size)
    answer.equal(got, 4_999)
