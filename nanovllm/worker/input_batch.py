"""From scheduled sequences to the tensors of one step, in two halves.

`InputBatchBuilder` (rank 0, plain numbers) reads the sequences once and writes down everything that the step needs as
arrays: `BatchArrays`. Those travel to the other ranks as they are. `InputBatch.from_arrays` (every rank) puts them on
the device. Behind that line nobody sees a live sequence, so nobody can read a length that has changed meanwhile.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from nanovllm.attention.base import AttentionMetadata
from nanovllm.engine.sequence import Sequence
from nanovllm.layers.sampler import COLD


class BatchArrays(NamedTuple):
    """One step in numbers: the fields of `InputBatch` and `AttentionMetadata`, which say what they mean.

    A row is a sequence, its *queries* are the tokens that this step computes; rows that decode come first.
    """

    input_ids: NDArray[np.int64]  # [T]
    positions: NDArray[np.int64]  # [T]
    slot_mapping: NDArray[np.int64]  # [T]
    block_tables: NDArray[np.int32]  # [B, max_blocks], 0 behind a row's last block
    context_lens: NDArray[np.int32]  # [B]
    cu_seqlens_q: NDArray[np.int32]  # [B + 1]
    logits_indices: NDArray[np.int64]  # [S]
    temperatures: NDArray[np.float32]  # [S]
    max_query_len: int
    max_context_len: int
    num_decodes: int
    needs_noise: bool


class InputBatchBuilder:
    """Turns rows of sequences into `BatchArrays`."""

    def __init__(self) -> None:
        self.built: tuple[list[Sequence], BatchArrays] | None = None  # the last step
        self.expected: Expectation | None = None  # the next one, if `look_ahead` has prepared it

    def build(self, seqs: list[Sequence]) -> BatchArrays:
        """The arrays of a step of any kind: pure decodes take a shorter way to the same numbers."""
        arrays = self.continue_decode(seqs)
        if arrays is None:
            only_decodes = all(seq.num_scheduled_tokens == 1 for seq in seqs)
            arrays = self.prepare_decode(seqs) if only_decodes else self.prepare_prefill(seqs)
        self.built, self.expected = (list(seqs), arrays), None  # a scheduler may fill the same list anew
        return arrays

    def look_ahead(self) -> None:
        """Prepare for the same rows to decode once more. Called while a GPU works, so that there it costs nothing.

        With block size 4, a row that has just written slot 30 (block 7, offset 2) will write slot 31; one that has
        written slot 31 enters a block that is not known yet. If the longest context was 8 in tables of 2 blocks, the
        next token is at position 8: the tables get 8 // 4 + 1 - 2 = 1 column more.
        """
        if self.built is None or type(self).prepare_decode is not InputBatchBuilder.prepare_decode:
            return  # a learner's `prepare_decode` shall run in every decode step
        seqs, last = self.built
        if last.num_decodes == len(seqs) == len(last.logits_indices):  # every row decoded and got a token
            positions, block_size = last.positions + 1, seqs[0].block_size
            entering = np.flatnonzero(positions % block_size == 0).tolist()
            wider = max(last.max_context_len // block_size + 1 - last.block_tables.shape[1], 0)
            # A copy, because `continue_decode` writes the new blocks into it.
            block_tables = np.pad(last.block_tables, ((0, 0), (0, wider))) if entering else last.block_tables
            arrays = last._replace(
                positions=positions, slot_mapping=last.slot_mapping + 1, context_lens=last.context_lens + 1,
                block_tables=block_tables, max_context_len=last.max_context_len + 1,
            )  # fmt: skip
            tables = [seq.block_table for seq in seqs]
            self.expected = Expectation(seqs, positions.tolist(), (positions + 1).tolist(), tables, arrays, entering)

    def continue_decode(self, seqs: list[Sequence]) -> BatchArrays | None:
        """The expected step with its tokens filled in; None where anything is not as expected."""
        if self.expected is None or seqs != self.expected.seqs:
            return None
        _, starts, ends, tables, arrays, entering = self.expected
        tokens = [seq.token_ids for seq in seqs]
        if [seq.num_computed_tokens for seq in seqs] != starts or list(map(len, tokens)) != ends:
            return None
        for row in entering:
            column = starts[row] // seqs[row].block_size  # not the last one: a pool may have given blocks ahead
            table = seqs[row].block_table
            if table[:column] == tables[row][:column]:
                tables[row] = table
            arrays.block_tables[row, column] = table[column]
            arrays.slot_mapping[row] = table[column] * seqs[row].block_size
        if [seq.block_table for seq in seqs] != tables:  # a pool may have moved a row's blocks
            return None
        return arrays._replace(input_ids=np.array([known[-1] for known in tokens], np.int64))

    def prepare_prefill(self, seqs: list[Sequence]) -> BatchArrays:
        """Rows with any number of queries, packed one behind the other.

        Two rows that compute token 9 of 10 and tokens 4, 5, 6 of 7: positions [9, 4, 5, 6], cu_seqlens_q [0, 1, 4],
        context_lens [10, 7].
        """
        starts = [seq.num_computed_tokens for seq in seqs]
        ends = [seq.num_computed_tokens + seq.num_scheduled_tokens for seq in seqs]
        input_ids: list[int] = []
        slots: list[int] = []
        for seq, start, end in zip(seqs, starts, ends, strict=True):
            input_ids += seq.token_ids[start:end]
            slots += seq.slot_mapping(start, end)
        query_lens = [end - start for start, end in zip(starts, ends, strict=True)]
        cu_seqlens_q = np.cumsum([0, *query_lens], dtype=np.int32)
        num_decodes = next((row for row, length in enumerate(query_lens) if length > 1), len(seqs))
        return BatchArrays(
            input_ids=np.array(input_ids, np.int64),
            positions=np.concatenate([np.arange(*span, dtype=np.int64) for span in zip(starts, ends, strict=True)]),
            slot_mapping=np.array(slots, np.int64),
            block_tables=pad_tables(seqs),
            context_lens=np.array(ends, np.int32),
            cu_seqlens_q=cu_seqlens_q,
            logits_indices=np.array(self.logits_indices(seqs), np.int64),
            max_query_len=max(query_lens),
            max_context_len=max(ends),
            num_decodes=num_decodes,
            **sampling_arrays([seq for seq, end in zip(seqs, ends, strict=True) if end == len(seq.token_ids)]),
        )

    def logits_indices(self, seqs: list[Sequence]) -> list[int]:
        """Which of the T tokens give logits: the last query of each sequence that catches up in this step.

        Three rows of 3, 2 and 4 queries, of which the second is a chunk with more to come: [2, 8].
        """
        indices, end = [], 0
        for seq in seqs:
            end += seq.num_scheduled_tokens
            if seq.num_computed_tokens + seq.num_scheduled_tokens == seq.num_tokens:
                indices.append(end - 1)
        return indices

    def prepare_decode(self, seqs: list[Sequence]) -> BatchArrays:
        """Rows with one query each: `prepare_prefill` for all rows at once, in numpy.

        The query is the token at position num_computed_tokens. With block size 4, position 9 lies in logical block
        9 // 4 = 2 at offset 9 % 4 = 1, so its slot is block_tables[b, 2] * 4 + 1.
        """
        size, block_size = len(seqs), seqs[0].block_size
        starts = [seq.num_computed_tokens for seq in seqs]
        tokens = [seq.token_ids for seq in seqs]
        positions = np.array(starts, np.int64)
        block_tables = pad_tables(seqs)
        last_blocks = block_tables[np.arange(size), positions // block_size]
        context_lens = (positions + 1).astype(np.int32)
        sampled = np.flatnonzero(np.fromiter(map(len, tokens), np.int32, size) == context_lens)
        return BatchArrays(
            input_ids=np.fromiter(map(list.__getitem__, tokens, starts), np.int64, size),
            positions=positions,
            slot_mapping=last_blocks.astype(np.int64) * block_size + positions % block_size,
            block_tables=block_tables,
            context_lens=context_lens,
            cu_seqlens_q=np.arange(size + 1, dtype=np.int32),
            logits_indices=sampled,
            max_query_len=1,
            max_context_len=int(context_lens.max()),
            num_decodes=size,
            **sampling_arrays(seqs if len(sampled) == size else [seqs[row] for row in sampled]),
        )


class Expectation(NamedTuple):
    """What the next step looks like if the same rows decode once more."""

    seqs: list[Sequence]
    starts: list[int]  # each row's num_computed_tokens then ...
    ends: list[int]  # ... and its number of tokens
    tables: list[tuple[int, ...]]  # each row's block table now
    arrays: BatchArrays  # all but the tokens, and the new blocks of rows that enter one
    entering: list[int]  # those rows


def sampling_arrays(seqs: list[Sequence]) -> dict[str, Any]:
    """The temperatures of the sampled rows, and whether any of them is warm enough to draw noise."""
    exact = np.array([seq.sampling_params.temperature for seq in seqs])
    temperatures = np.minimum(exact, np.finfo(np.float32).max).astype(np.float32)
    return {"temperatures": temperatures, "needs_noise": bool((temperatures > COLD).any())}


def pad_tables(seqs: list[Sequence]) -> NDArray[np.int32]:
    """The block tables as one array [B, max_blocks]; (7, 2) beside (5,) gives [[7, 2], [5, 0]]."""
    width = max(len(seq.block_table) for seq in seqs)
    padding = (0,) * width
    rows = [seq.block_table + padding[len(seq.block_table) :] for seq in seqs]
    return np.array(rows, np.int32)


def check_arrays(arrays: BatchArrays, vocab_size: int, max_position: int, num_blocks: int, block_size: int) -> None:
    """Raise `IndexError` or `ValueError` where a number points outside what it counts, or an array has another form.

    For engines with replaced parts. A kernel does not look where it reads and writes: a slot behind the pool's end
    would overwrite something else, or end the process.
    """
    tokens, (rows, width) = len(arrays.input_ids), arrays.block_tables.shape
    longest = min(width * block_size, arrays.max_context_len)
    forms: dict[str, tuple[Any, tuple[int, ...], int, int]] = {  # dtype, shape, smallest and largest value
        "input_ids": (np.int64, (tokens,), 0, vocab_size - 1),
        "positions": (np.int64, (tokens,), 0, max_position - 1),
        "slot_mapping": (np.int64, (tokens,), -1, num_blocks * block_size - 1),
        "context_lens": (np.int32, (rows,), 0, longest),
        "block_tables": (np.int32, (rows, width), 0, num_blocks - 1),
        "cu_seqlens_q": (np.int32, (rows + 1,), 0, tokens),
        "logits_indices": (np.int64, (len(arrays.temperatures),), 0, tokens - 1),
    }
    for name, (dtype, shape, smallest, largest) in forms.items():
        values = getattr(arrays, name)
        if values.dtype != dtype or values.shape != shape:
            want = f"{np.dtype(dtype)} of shape {list(shape)}"
            raise ValueError(f"{name} is {values.dtype} of shape {list(values.shape)}; this step needs {want}")
        outside = (values < smallest) | (values > largest)
        if name == "block_tables":  # behind a row's last block nothing is read
            outside &= np.arange(width) * block_size < arrays.context_lens[:, None]
        if outside.any():
            at = np.argwhere(outside)[0].tolist()
            raise IndexError(f"{name}{at} is {values[tuple(at)]}; it must be {smallest} to {largest}")
    if not 0 <= arrays.num_decodes <= min(rows, tokens):
        raise IndexError(f"num_decodes is {arrays.num_decodes}; the step has {rows} rows and {tokens} tokens")


def check_token_ids(token_ids: Any, size: int, vocab_size: int) -> None:
    """Raise `TypeError`, `ValueError` or `IndexError` unless these are `size` sampled ids: see `check_arrays`."""
    if not isinstance(token_ids, Tensor) or token_ids.is_floating_point() or token_ids.dtype == torch.bool:
        kind = token_ids.dtype if isinstance(token_ids, Tensor) else type(token_ids).__name__
        raise TypeError(f"the sampler must return a tensor of integers, got {kind}")
    if tuple(token_ids.shape) != (size,):
        raise ValueError(f"the sampler returned ids of shape {list(token_ids.shape)}; these logits need [{size}]")
    outside = token_ids[(token_ids < 0) | (token_ids >= vocab_size)].tolist()
    if outside:
        raise IndexError(f"the sampler returned {outside[0]}; token ids are 0 to {vocab_size - 1}")


@dataclass(frozen=True, eq=False, slots=True)
class InputBatch:
    """The tensors of one step on the device; the argument of everything that follows. Nothing changes it.

    input_ids [T]: the tokens to compute; positions [T]: where each stands in its sequence. attn_metadata: where keys go
    and who sees them. logits_indices [S]: of the T tokens those whose next token is wanted. temperatures [S]: one for
    each of them. needs_noise: False if all temperatures are at most 1e-5.
    """

    input_ids: Tensor
    positions: Tensor
    attn_metadata: AttentionMetadata
    logits_indices: Tensor
    temperatures: Tensor
    needs_noise: bool

    @classmethod
    def from_arrays(cls, arrays: BatchArrays, device: torch.device) -> "InputBatch":
        """Copy a step to `device`; on a CPU the tensors share the arrays' memory."""

        def put(array: NDArray[np.generic]) -> Tensor:
            return torch.from_numpy(np.ascontiguousarray(array)).to(device, non_blocking=True)

        return cls(
            input_ids=put(arrays.input_ids),
            positions=put(arrays.positions),
            attn_metadata=AttentionMetadata(
                slot_mapping=put(arrays.slot_mapping),
                block_tables=put(arrays.block_tables),
                context_lens=put(arrays.context_lens),
                cu_seqlens_q=put(arrays.cu_seqlens_q),
                max_query_len=arrays.max_query_len,
                max_context_len=arrays.max_context_len,
                num_decodes=arrays.num_decodes,
            ),
            logits_indices=put(arrays.logits_indices),
            temperatures=put(arrays.temperatures),
            needs_noise=arrays.needs_noise,
        )
