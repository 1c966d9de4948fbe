"""ModelRunner: everything of one rank that touches the device: model, KV cache, sampler.

Rank 0 lives in the caller's process and is called by the engine; the runners of other ranks live in processes of their
own and repeat what rank 0 does (`call`). A runner keeps nothing about sequences from one step to the next.
"""

import gc
import inspect
from typing import Any

import torch
from torch import Tensor

from nanovllm.attention import select_backend
from nanovllm.config import Config
from nanovllm.engine.parts import Parts
from nanovllm.engine.sequence import Sequence
from nanovllm.layers.sampler import Sampler
from nanovllm.models import build_model, load_model, prepare_for_device
from nanovllm.worker.device import select_device, select_dtype
from nanovllm.worker.input_batch import BatchArrays, InputBatch, InputBatchBuilder
from nanovllm.worker.kv_cache import allocate_kv_cache, block_bytes, num_blocks_on_cpu, num_blocks_on_gpu
from nanovllm.worker.link import RankLink

CPU_PREFILL_CHUNK = 1024  # prompt tokens in one step on a CPU, where a step should stay short


class ModelRunner:
    """One rank's share of the model on its device.

    rank: 0 to tensor_parallel_size - 1. link: how this rank reaches the others. Fills in `config.num_kvcache_blocks`
    and, on a CPU, `config.prefill_chunk`.
    """

    def __init__(self, config: Config, rank: int, link: RankLink, parts: Parts) -> None:
        self.config, self.rank, self.link = config, rank, link
        self.device = select_device(config.device, rank)
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
        model_dtype = getattr(config.hf_config, "dtype", None) or getattr(config.hf_config, "torch_dtype", None)
        self.dtype = select_dtype(config.dtype, self.device, model_dtype)
        self.tp = link.tensor_parallel_group(self.device)
        self.attention_name, self.model = self._build_model(parts)
        self.vocab_size: int = self.model.vocab_size
        self.sampler = parts.resolve(Sampler)()
        self._sampler_wants_params = "params" in inspect.signature(self.sampler.forward).parameters
        self.builder: InputBatchBuilder = parts.resolve(InputBatchBuilder)()
        self.generator = torch.Generator(self.device)
        self.generator.seed() if config.seed is None else self.generator.manual_seed(config.seed)
        if config.prefill_chunk is None and self.device.type == "cpu":
            config.prefill_chunk = CPU_PREFILL_CHUNK
        self.kv_cache = self._allocate_kv_cache()

    def _build_model(self, parts: Parts) -> tuple[str, Any]:
        config = self.config
        heads = config.hf_config.num_attention_heads
        head_dim = getattr(config.hf_config, "head_dim", None) or config.hf_config.hidden_size // heads
        backend, _reason = select_backend(
            config.attention_backend, self.device, self.dtype, head_dim, config.kvcache_block_size
        )
        attention = parts.resolve(backend)(
            self.tp.share(heads, "attention heads"),
            self.tp.share(getattr(config.hf_config, "num_key_value_heads", None) or heads, "kv heads"),
            head_dim, head_dim**-0.5, config.kvcache_block_size,
        )  # fmt: skip
        model = build_model(config.hf_config, self.tp, attention, parts.resolve, self.dtype, self.device)
        load_model(model, config)
        prepare_for_device(model, self.device, self.dtype, config.quantization)
        return backend.name, model.eval()

    def _allocate_kv_cache(self) -> Tensor:
        """Size the pool (the smallest that any rank can hold), unless the user gave one, and allocate it."""
        config, model = self.config, self.model
        shape = (model.num_kv_heads, model.head_dim)
        if config.num_kvcache_blocks == -1:
            size = block_bytes(model.num_layers, *shape, config.kvcache_block_size, self.dtype)
            if self.device.type == "cuda":
                self.warmup()
                num_blocks = num_blocks_on_gpu(config, size, self.device)
            else:
                num_blocks = num_blocks_on_cpu(config, size)
            config.num_kvcache_blocks = self.link.smallest(num_blocks)
        return allocate_kv_cache(
            model.num_layers, config.num_kvcache_blocks, config.kvcache_block_size, *shape, self.dtype, self.device
        )

    @torch.inference_mode()
    def warmup(self) -> None:
        """Run the largest step once, so that the peak of memory is known before the rest becomes KV cache."""
        config = self.config
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(self.device)
        length = min(config.max_num_batched_tokens, config.max_model_len)
        num_seqs = max(1, min(config.max_num_batched_tokens // length, config.max_num_seqs))
        num_blocks = -(-length // config.kvcache_block_size)
        seqs = []
        for _ in range(num_seqs):
            seq = Sequence([0] * length, block_size=config.kvcache_block_size)
            seq.block_table = tuple(range(num_blocks))  # all write to the same blocks: only sizes matter here
            seq.num_scheduled_tokens = length
            seqs.append(seq)
        cache = allocate_kv_cache(
            self.model.num_layers, num_blocks, config.kvcache_block_size, self.model.num_kv_heads,
            self.model.head_dim, self.dtype, self.device,
        )  # fmt: skip
        batch = InputBatch.from_arrays(self.builder.build(seqs), self.device)
        self.sampler(*self._logits(batch, cache)) if self.rank == 0 else self._logits(batch, cache)
        torch.cuda.synchronize(self.device)

    # ---- a step --------------------------------------------------------------------------------------------------

    def call(self, method: str, *args: Any) -> Any:
        """Run a method on every rank and return rank 0's result.

        Live sequences stay in this process: they become rows of numbers before anything is sent.
        """
        if method == "run":
            seqs, _is_prefill = args
            self._sampled_params = self._params_of(seqs)
            args = (self.builder.build(seqs),)
        self.link.send(method, args)
        result = getattr(self, method)(*args)
        if method == "run":
            return spread(result, seqs)
        return result

    def _params_of(self, seqs: list[Sequence]) -> list[Any] | None:
        if not self._sampler_wants_params:
            return None
        return [
            seq.sampling_params for seq in seqs if seq.num_computed_tokens + seq.num_scheduled_tokens == seq.num_tokens
        ]

    @torch.inference_mode()
    def run(self, arrays: BatchArrays) -> list[int]:
        """One step of the model: the sampled token ids [S] on rank 0, nothing on the others."""
        batch = InputBatch.from_arrays(arrays, self.device)
        logits = self._logits(batch, self.kv_cache)
        if logits is None or not len(arrays.logits_indices):
            return []
        return self.sample(logits, batch).tolist()  # the step's only wait for the device

    def _logits(self, batch: InputBatch, kv_cache: Tensor) -> Tensor | None:
        hidden = self.model(batch.input_ids, batch.positions, kv_cache, batch.attn_metadata)  # [T, D]
        return self.model.compute_logits(hidden[batch.logits_indices])  # [S, V] on rank 0

    def sample(self, logits: Tensor, batch: InputBatch) -> Tensor:
        """Token ids [S]. A sampler whose forward names `params` also gets the rows' SamplingParams."""
        options = {"params": self._sampled_params} if self._sampler_wants_params else {}
        token_ids: Tensor = self.sampler(logits, batch.temperatures, self.generator, batch.needs_noise, **options)
        return token_ids

    def exit(self) -> None:
        """Let go of model, cache and link. Safe to call again."""
        self.model = self.kv_cache = self.sampler = None
        self.link.close()
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()


def spread(token_ids: list[int], seqs: list[Sequence]) -> list[int | None]:
    """Give the sampled tokens back to their rows; a row that has not caught up yet has None."""
    tokens = iter(token_ids)
    return [
        next(tokens) if seq.num_computed_tokens + seq.num_scheduled_tokens == seq.num_tokens else None for seq in seqs
    ]
