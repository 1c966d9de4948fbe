"""Chapter 7: tensor parallelism. Five pieces that let several processes compute one model together.

Functions whose first argument is `self` are methods of the engine's own layers, and run inside them. Every layer has
`self.tp`, this rank's place: `self.tp.rank` (0 to size - 1), `self.tp.size`, and two collectives that *all* ranks have
to call together:

    self.tp.all_reduce(x)     the sum of every rank's x, on every rank
    self.tp.gather(x)         every rank's x side by side (last dimension) on rank 0; None on the others

A weight is [out, in], as in torch.nn.Linear. `loaded` is a whole tensor from the checkpoint, `param.data` this rank's
part of it, which is filled in place (`param.data.copy_(...)`).
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nanovllm.layers.embed_head import ParallelLMHead, VocabParallelEmbedding
from nanovllm.layers.linear import (
    ColumnParallelLinear,
    MergedColumnParallelLinear,
    QKVParallelLinear,
    RowParallelLinear,
)
from nanovllm.worker.message_channel import MessageChannel, decode, encode


def column_shard(self: ColumnParallelLinear, param: nn.Parameter, loaded: Tensor, shard_id: Any = None) -> None:
    """Exercise 7.1, part one. Load this rank's part of a column-parallel weight [out, in] or bias [out].

    Rank r of n computes the r-th of n equal shares of the *outputs*. Of 6 outputs on 3 ranks, rank 1 holds outputs 2
    and 3. `loaded` stays as it is.
    """
    # --- your code (7.1) ---
    share = loaded.shape[0] // self.tp.size
    first = self.tp.rank * share
    param.data.copy_(loaded[first : first + share])
    # --- end ---


def row_shard(self: RowParallelLinear, param: nn.Parameter, loaded: Tensor, shard_id: Any = None) -> None:
    """Exercise 7.1, part two. Load this rank's part of a row-parallel weight [out, in], or the bias [out].

    Rank r of n takes the r-th of n equal shares of the *inputs*: those that the column-parallel layer in front left on
    this rank. The bias belongs to the outputs, which no rank holds a share of: every rank keeps all of it.
    """
    # --- your code (7.1) ---
    if loaded.dim() == 1:
        param.data.copy_(loaded)
        return
    share = loaded.shape[1] // self.tp.size
    first = self.tp.rank * share
    param.data.copy_(loaded[:, first : first + share])
    # --- end ---


def merged_shard(self: MergedColumnParallelLinear, param: nn.Parameter, loaded: Tensor, shard_id: Any = None) -> None:
    """Exercise 7.2, part one. Load one of several products that are computed as one.

    `shard_id` is the number of the product (0 for gate, 1 for up), and `self.shares[i]` the number of outputs of
    product i on this rank. `param` holds this rank's share of product 0, behind it its share of product 1, and so on.

    Two products of 4 outputs on 2 ranks: rank 1 holds outputs 2 and 3 of the first, then outputs 2 and 3 of the second.
    Works for weights [out, in] and biases [out]. Other products' parts of `param` stay as they are.
    """
    # --- your code (7.2) ---
    share = self.shares[shard_id]
    there = sum(self.shares[number] for number in range(shard_id))
    here = self.tp.rank * share
    param.data[there : there + share].copy_(loaded[here : here + share])
    # --- end ---


def qkv_shard(self: QKVParallelLinear, param: nn.Parameter, loaded: Tensor, shard_id: Any = None) -> None:
    """Exercise 7.2, part two. Load the queries, keys or values of the fused product.

    `shard_id` is "q", "k" or "v". `self.placement[shard_id]` is (offset, size): where this rank's part of them begins
    in `param`, and how many outputs it has. There are fewer kv heads than heads, so the sizes differ.

    9 heads and 3 kv heads of 2 on rank 2 of 3: outputs 12 to 17 of q go to 0 to 5, outputs 4 and 5 of k to 6 and 7,
    and outputs 4 and 5 of v to 8 and 9.
    """
    # --- your code (7.2) ---
    there, share = self.placement[shard_id]
    here = self.tp.rank * share
    param.data[there : there + share].copy_(loaded[here : here + share])
    # --- end ---


def row_forward(self: RowParallelLinear, x: Tensor) -> Tensor:
    """Exercise 7.3. The product of a row-parallel layer.

    x: [..., in / n], this rank's share of the inputs. `self.weight` is [out, in / n], this rank's columns of the whole
    weight; `self.bias` is [out] or None, the same on every rank. Returns the whole product [..., out], equal on all
    ranks: what one rank with the whole weight and the whole input would compute. x stays as it is.

    With 2 ranks, weight (3 | 4), inputs (10 | 100) and bias 1 the ranks hold 30 and 400; both return 431.
    """
    # --- your code (7.3) ---
    partial = F.linear(x, self.weight)
    whole = self.tp.all_reduce(partial)
    return whole if self.bias is None else whole + self.bias
    # --- end ---


def embedding_forward(self: VocabParallelEmbedding, input_ids: Tensor) -> Tensor:
    """Exercise 7.4, part one. Look token ids up in a table that is cut over the ranks.

    Rank r holds the rows of the ids r * self.rows to (r + 1) * self.rows - 1 in `self.weight` [rows, D]. (The last
    ranks' last rows may be padding.) input_ids: [T], the same on all ranks; returns [T, D] on all ranks.

    With 3 rows a rank, rank 1 holds the ids 3, 4, 5: id 4 is its row 1, and id 7 is not its own.
    """
    # --- your code (7.4) ---
    first = self.tp.rank * self.rows
    own = (input_ids >= first) & (input_ids < first + self.rows)
    found = self.weight[torch.where(own, input_ids - first, 0)]
    found = found.masked_fill(~own[:, None], 0)
    return self.tp.all_reduce(found)
    # --- end ---


def head_forward(self: ParallelLMHead, x: Tensor) -> Tensor | None:
    """Exercise 7.4, part two. Logits from a head that is cut over the vocabulary.

    x: [S, D], the same on all ranks; `self.weight` is [rows, D], this rank's part of the vocabulary. Returns [S, V]
    with V = `self.vocab_size` on rank 0, and None on the others. Where V does not divide, the last ranks' last rows are
    padding: of V = 10 on 4 ranks each has 3 rows, and 2 logits too many come together.
    """
    # --- your code (7.4) ---
    together = self.tp.gather(F.linear(x, self.weight))
    if together is None:
        return None
    return together[:, : self.vocab_size]
    # --- end ---


def channel_write(self: MessageChannel, method: str, args: tuple[Any, ...] = ()) -> None:
    """Exercise 7.5, part one. Send a message to every reader.

    The shared memory holds one piece of `len(self.bytes)` bytes. `wait_taken` (without arguments) waits until every
    reader has taken the piece that lies there; `put` with a payload and an offset lays down the piece of `payload` that
    begins at `offset`; `self.events` has one event a reader: `event.set()` wakes that reader.

    `encode(method, args)` makes the payload. A payload longer than the memory goes piece by piece. No piece may be laid
    over one that somebody has not taken, and a sleeping reader must learn of every piece.
    """
    # --- your code (7.5) ---
    payload = encode(method, args)
    offset = 0
    while offset < len(payload):
        self.wait_taken()
        self.put(payload, offset)
        for event in self.events:
            event.set()
        offset += len(self.bytes)
    # --- end ---


def channel_read(self: MessageChannel) -> tuple[str, tuple[Any, ...]]:
    """Exercise 7.5, part two. Wait for the next message, and return (method, args).

    `self.has_piece()` says whether a piece lies there that this reader has not taken; `self.take()` copies it out and
    returns (offset, size of the whole payload, bytes). `self.events[0]` is this reader's event: `wait()` sleeps until
    it is set, `clear()` resets it. `decode(bytearray)` turns a whole payload back into (method, args).

    An event may be set although nothing new is there, and may have been set once for two pieces; what counts is
    `has_piece()`. So look first, sleep only if there is nothing, and clear the event before looking again.

    A piece with offset 0 begins a message, whatever came before: a writer that was interrupted in the middle of a
    message starts the next one anew.
    """
    # --- your code (7.5) ---
    whole = bytearray()
    size = -1
    while len(whole) != size:
        while not self.has_piece():
            self.events[0].wait()
            self.events[0].clear()
        offset, size, piece = self.take()
        if offset == 0:
            whole.clear()
        whole += piece
    return decode(whole)
    # --- end ---
