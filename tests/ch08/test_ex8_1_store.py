"""Grader of exercise 8.1: the kernel that stores keys and values, and its launch."""

import torch

from nanovllm.attention.triton_backend import TritonAttention
from nanovllm.workbook.grading import Answer

EMPTY = -7.0
PLACES = f"Each token's keys and values are written to its slot, and all other places stay as they are ({EMPTY:g})."


def run(
    answer: Answer, slots: list[int], kv_heads: int = 2, head_dim: int = 4, block_size: int = 4, num_blocks: int = 5,
    strided: bool = False,
) -> None:  # fmt: skip
    """Store random tokens and compare the whole cache, slot by slot."""
    answer.story.clear()
    said = "views that are not contiguous, " if strided else ""
    answer.note(
        f"store {len(slots)} tokens of {kv_heads} x {head_dim} numbers, {said}slots {slots}, blocks of {block_size}"
    )
    generator = torch.Generator().manual_seed(answer.rng.randrange(2**31))
    k = torch.randn(len(slots), kv_heads, head_dim, generator=generator)
    v = torch.randn(len(slots), kv_heads, head_dim, generator=generator)
    k[0, 0, 0] = v[-1, -1, -1] = 0.0
    if strided:
        both = torch.cat([torch.zeros(len(slots), 1, head_dim), k, v], 1)
        k, v = both[:, 1 : 1 + kv_heads], both[:, 1 + kv_heads :]
    # A block in front of the pool and one behind it: a slot that is wrong shows there, and does no worse.
    fenced = [torch.full((num_blocks + 2, block_size, kv_heads, head_dim), EMPTY) for _ in range(2)]
    caches = [whole[1:-1] for whole in fenced]
    expected = [cache.clone() for cache in caches]
    for token, slot in enumerate(slots):
        if slot >= 0:
            expected[0][slot // block_size, slot % block_size] = k[token]
            expected[1][slot // block_size, slot % block_size] = v[token]
    before = k.clone(), v.clone()
    mapping = torch.tensor(slots, dtype=torch.int64)
    attention = answer.parts.resolve(TritonAttention)(2 * kv_heads, kv_heads, head_dim, 1.0, block_size)
    answer.equal(attention.store(k, v, *caches, mapping), None, "It returns nothing.")
    for name, cache, right in zip(("k_cache", "v_cache"), caches, expected, strict=True):
        answer.equal(cache, right, name=name)
    outside = torch.cat([whole[[0, -1]].flatten() for whole in fenced])
    answer.require(bool((outside == EMPTY).all()), "numbers outside the cache", "nothing written outside the cache")
    answer.equal((k, v, mapping.tolist()), (*before, slots), "It may not change its inputs.")


def test_contract__in_place(answer: Answer) -> None:
    """The caches are written in place, nothing is returned, and the inputs stay."""
    with answer.about(PLACES):
        run(answer, [3, 0])


def test_contract__one_program_a_token(answer: Answer) -> None:
    """Program t of the kernel stores token t, and no other; PADDED is as large as WIDTH needs."""
    if not answer.parts:
        return  # the shipped kernel takes other arguments
    with answer.about(PLACES):
        run(answer, [5, 0, 2])
    k, caches = torch.arange(1.0, 19.0).reshape(3, 2, 3), [torch.full((2, 4, 2, 3), EMPTY) for _ in range(2)]
    slots, expected = torch.tensor([5, 0, 2]), [cache.clone() for cache in caches]
    for programs in (1, 3):
        answer.note(f"store_kernel[({programs},)] for 3 tokens of 2 x 3 numbers, slots {slots.tolist()}")
        answer.store_kernel[(programs,)](k, -k, *caches, slots, WIDTH=6, PADDED=8)
        for token in range(programs):
            expected[0].view(8, 2, 3)[slots[token]] = k[token]
            expected[1].view(8, 2, 3)[slots[token]] = -k[token]
        for name, cache, right in zip(("k_cache", "v_cache"), caches, expected, strict=True):
            answer.equal(cache, right, name=name)


def test_example__slot_9(answer: Answer) -> None:
    """Slot 9 in blocks of 4 is place 1 of block 2."""
    run(answer, [9], kv_heads=1, head_dim=2)


def test_oracle__any_slots(answer: Answer) -> None:
    """Every token lands in its slot, and no other slot changes."""
    for _ in range(8):
        count = answer.rng.randint(1, 9)
        run(answer, answer.rng.sample(range(20), count), kv_heads=answer.rng.randint(1, 3), head_dim=4)


def test_boundary__padding_writes_nothing(answer: Answer) -> None:
    """A token with slot -1 writes nowhere, neither in front of the cache nor at its end."""
    run(answer, [5, -1, 7, -1])
    run(answer, [-1, 6])
    run(answer, [-1, -1])


def test_boundary__odd_widths(answer: Answer) -> None:
    """Widths that are no powers of two do not spill into the next slot."""
    for kv_heads, head_dim in ((3, 5), (1, 3), (3, 64), (9, 160)):
        run(answer, [2, 0, 3], kv_heads=kv_heads, head_dim=head_dim)


def test_boundary__first_and_last_slot(answer: Answer) -> None:
    """Slot 0 is a slot like any other, and so is the pool's last."""
    run(answer, [0, 19])


def test_boundary__views(answer: Answer) -> None:
    """Keys and values that come as views of a larger tensor are stored as well."""
    run(answer, [4, 11, 0], strided=True)


def test_boundary__many_tokens(answer: Answer) -> None:
    """A long prompt has more tokens than a decode step has rows: as many programs as tokens."""
    run(answer, answer.rng.sample(range(400), 150), kv_heads=1, head_dim=2, num_blocks=100)


def test_boundary__slots_beyond_32_bits(answer: Answer) -> None:
    """slot * WIDTH may exceed 32 bits."""
    half = 1 << 31
    try:
        memory = torch.empty(2 * half + 4096, dtype=torch.uint8)  # taken, and touched in a few places only
    except RuntimeError:
        return  # a machine, or a limit, that has no such addresses to give
    # The caches begin in the middle: what wraps around lands in the half in front of it, and does no harm.
    caches = [memory[half + at :][: half + 2048].view(-1, 4, 2, 4) for at in (0, 32)]
    slot = (half + 128) // 8
    answer.note(f"one token of 2 x 4 numbers, a byte each, slot {slot}: it begins at element 2 ** 31 + 128")
    k = torch.arange(1, 9, dtype=torch.uint8).reshape(1, 2, 4)
    attention = answer.parts.resolve(TritonAttention)(2, 2, 4, 1.0, 4)
    attention.store(k, k + 10, *caches, torch.tensor([slot]))
    answer.equal((caches[0][slot // 4, slot % 4], caches[1][slot // 4, slot % 4]), (k[0], k[0] + 10))


def test_boundary__one_token(answer: Answer) -> None:
    """A single token is a grid of one program."""
    run(answer, [13])


def test_boundary__half_precision(answer: Answer) -> None:
    """Numbers are copied as they are, whatever their type."""
    answer.note("float16")
    k = torch.arange(8.0).reshape(1, 2, 4).half()
    caches = [torch.zeros(2, 4, 2, 4, dtype=torch.float16) for _ in range(2)]
    attention = answer.parts.resolve(TritonAttention)(2, 2, 4, 1.0, 4)
    attention.store(k, -k, *caches, torch.tensor([6]))
    answer.equal((caches[0][1, 2], caches[1][1, 2]), (k[0], -k[0]))
