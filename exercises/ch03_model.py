"""Chapter 3: the model and the sampler. Six pieces between token ids and the next token.

Functions whose first argument is `self` are methods of the engine's own layers, and run inside them. Letters:

    T tokens of the step, all sequences laid end to end; there is no batch dimension
    S sampled rows     V vocabulary     N query heads     K kv heads     H head dim

Everything is float32 here, so no rounding hides a mistake.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from nanovllm.attention.base import AttentionMetadata
from nanovllm.attention.torch_backend import TorchAttention
from nanovllm.engine.sequence import Sequence
from nanovllm.layers.layernorm import RMSNorm
from nanovllm.layers.rotary_embedding import RotaryEmbedding
from nanovllm.layers.sampler import Sampler
from nanovllm.sampling_params import SamplingParams
from nanovllm.workbook import ExerciseTodo
from nanovllm.worker.input_batch import InputBatchBuilder


def rms_norm(self: RMSNorm, x: Tensor, residual: Tensor | None = None) -> Tensor | tuple[Tensor, Tensor]:
    """Exercise 3.1. RMSNorm over the last dimension, with the residual addition that comes before it.

    Each vector is divided by the root of the mean of its squares (plus `self.eps`, inside the root) and multiplied,
    number by number, with `self.weight`. No mean is subtracted: that is what it saves against a LayerNorm.

    With weight (1, 2) and eps 0, the vector (3, 4) has a mean square of 12.5:

    >>> norm(torch.tensor([[3.0, 4.0]]))
    tensor([[0.8485, 2.2627]])

    x: [..., size]. Without a residual, return the normed x. With one, x and residual are added first; return the normed
    sum *and* the sum itself, which is the residual of the next layer. The arguments stay as they are.
    """
    # --- your code (3.1) ---
    raise ExerciseTodo("3.1")
    # --- end ---


def rotary(self: RotaryEmbedding, positions: Tensor, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
    """Exercise 3.2. Turn queries and keys by the position of their token *in its sequence*.

    `self.cos_sin` is a table [max_position, H]: row p holds the H/2 cosines and, behind them, the H/2 sines of
    position p. A head's vector is cut into halves, and number i of the first half forms a pair with number i of the
    second: the pair (a, b) becomes (a cos - b sin, b cos + a sin), with the i-th cosine and sine.

    positions: [T], in any order; a chunk of a prompt starts where the last one ended, and a decode has one token of
    each sequence. q: [T, N, H], k: [T, K, H]. Returns both turned; the arguments stay as they are.

    With H = 2 and a table row (0, 1) for position 5 (a quarter turn), the pair (3, 4) becomes (-4, 3).
    """
    # --- your code (3.2) ---
    raise ExerciseTodo("3.2")
    # --- end ---


def logits_indices(self: InputBatchBuilder, seqs: list[Sequence]) -> list[int]:
    """Exercise 3.3. Which rows of the packed batch give a next token.

    The sequences of a step are laid end to end: each contributes `seq.num_scheduled_tokens` rows, in the order of the
    list. Only a sequence that *catches up* in this step gets a next token, and it is read off its own last row. A
    sequence has caught up when `seq.num_computed_tokens` (before the step) and what is scheduled now make
    `seq.num_tokens`; a prompt chunk with more to come gives nothing.

    Three sequences with 3, 2 and 4 scheduled tokens, of which the second has more of its prompt to come:

    >>> builder.logits_indices(seqs)
    [2, 8]
    """
    # --- your code (3.3) ---
    raise ExerciseTodo("3.3")
    # --- end ---


def sample(
    self: Sampler,
    logits: Tensor,
    temperatures: Tensor,
    generator: torch.Generator | None = None,
    needs_noise: bool = True,
) -> Tensor:
    """Exercise 3.4. Draw one token a row from softmax(logits / temperature), without sorting and without a loop.

    The exponential race: give every token a clock that rings after E / p, where p is its probability and E is drawn
    from Exp(1) for each token anew (`tensor.exponential_(generator=generator)`). The first to ring wins, and token i
    wins with probability p_i. The smallest E / p is the largest p / E.

    logits: [S, V]. temperatures: [S], one for each row, all above 0. Returns token ids [S], int64; the arguments stay
    as they are. A row with a temperature of 1e-5 or below draws no noise: its token is the one with the largest logit,
    the lowest id where several are equal. Nothing becomes NaN for any temperature from 1e-10 to 1e30. With
    needs_noise False all rows are that cold.
    """
    # --- your code (3.4) ---
    raise ExerciseTodo("3.4")
    # --- end ---


@dataclass
class TopParams(SamplingParams):
    """Exercise 3.5, part one. Sampling options with two more fields: a subclass, so the engine takes them as they are.

    top_k: keep the k most likely tokens; 0 keeps all. top_p: keep the most likely tokens until their probabilities
    (after the temperature) reach this sum, at least one; 1.0 keeps all.

    Raise ValueError for a top_k that is negative or no int, and for a top_p outside 0 < top_p <= 1. Everything that
    SamplingParams itself checks is still checked.
    """

    top_k: int = 0
    top_p: float = 1.0

    def __post_init__(self) -> None:
        # --- your code (3.5) ---
        raise ExerciseTodo("3.5")
        # --- end ---


class TopSampler(nn.Module):
    """Exercise 3.5, part two. A sampler that knows top-k and top-p.

    Because `forward` has an argument named `params`, the engine hands it the SamplingParams of the sampled rows.
    """

    def forward(
        self,
        logits: Tensor,
        temperatures: Tensor,
        generator: torch.Generator | None = None,
        needs_noise: bool = True,
        params: list[Any] | None = None,
    ) -> Tensor:
        """logits [S, V], temperatures [S], params: one a row -> token ids [S], int64.

        Row by row: divide by the temperature; keep what top_k and then top_p allow; draw from what is left, in
        proportion to the probabilities. top_p counts probabilities after top_k: of (0.4, 0.3, 0.2, 0.1) top_k=3 leaves
        4/9, 3/9 and 2/9, and top_p=0.5 then keeps the first two, for 4/9 alone is below 0.5. Among equal logits the
        lower id is kept first.

        A row whose params have no top_k or top_p (plain SamplingParams) keeps everything. At temperatures of 1e-5 and
        below the most likely token is returned. The arguments stay as they are.
        """
        # --- your code (3.5) ---
        raise ExerciseTodo("3.5")
        # --- end ---


def attend(self: TorchAttention, q: Tensor, k_cache: Tensor, v_cache: Tensor, metadata: AttentionMetadata) -> Tensor:
    """Exercise 3.6. Causal attention over paged keys and values, for chunks, prefix hits and decodes alike.

    q: [T, N, H]. k_cache, v_cache: [num_blocks, block_size, K, H]; this step's own keys are in them already. For row b
    of the step, `metadata` has three facts:

        cu_seqlens_q[b], cu_seqlens_q[b + 1]   its queries lie there in q (from, up to but not including)
        block_tables[b]                        its tokens lie in these blocks, `self.block_size` to a block
        context_lens[b]                        so many tokens it has, this step's queries being the last of them

    A query sees the tokens up to and including itself. With 3 queries and 5 tokens, the queries stand at positions 2,
    3, 4 and see 3, 4 and 5 tokens. Scores are `self.scale * (q · k)`, then a softmax over the visible tokens, then the
    weighted sum of their values. N / K neighbouring heads share keys: of N = 6 heads and K = 2 kv heads, heads 0, 1, 2
    read kv head 0 and heads 3, 4, 5 kv head 1 (`self.num_heads`, `self.num_kv_heads`).

    Returns [T, N, H] in q's dtype. Entries of a block table behind a row's last block mean nothing and may be any
    number; slots behind a row's last token may hold anything, even NaN. A row with context_len 0 is padding: any finite
    values.
    """
    # --- your code (3.6) ---
    raise ExerciseTodo("3.6")
    # --- end ---
