"""ModelRunner: everything of one rank that touches the device: model, KV cache, sampler.

Rank 0 lives in the caller's process and is called by the engine; the runners of other ranks live in processes of their
own and repeat what rank 0 does (`call`). A runner keeps nothing about sequences from one step to the next.
"""

import gc
import inspect
import sys
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from nanovllm.attention import AttentionBackend, select_backend
from nanovllm.config import Config
from nanovllm.engine.parts import Parts
from nanovllm.engine.sequence import Sequence
from nanovllm.errors import ConfigError, MemoryBudgetError
from nanovllm.layers.sampler import Sampler
from nanovllm.models import build_model, load_model, prepare_for_device
from nanovllm.models.fuse import install_fused
from nanovllm.models.model_config import ModelConfig
from nanovllm.worker.cuda_graphs import DecodeGraphs, StepInputs
from nanovllm.worker.device import select_device, select_dtype
from nanovllm.worker.input_batch import BatchArrays, InputBatch, InputBatchBuilder, check_arrays, check_token_ids
from nanovllm.worker.kv_cache import KVCacheSizer, allocate_kv_cache
from nanovllm.worker.link import RankLink

CPU_PREFILL_CHUNK = 1024  # prompt tokens in one step on a CPU, where a step should stay short
MAX_RECORDED_ON_CPU = 32  # rows of the largest decode step that a plugged-in recorder gets on a CPU


class ModelRunner:
    """One rank's share of the model on its device.

    rank: 0 to tensor_parallel_size - 1. link: how this rank reaches the others. Fills in `config.num_kvcache_blocks`
    and, on a CPU, `config.prefill_chunk`.
    """

    def __init__(self, config: Config, rank: int, link: RankLink, parts: Parts) -> None:
        self.config, self.rank, self.link, self._has_parts = config, rank, link, bool(parts)
        self.device = select_device(config.device, rank)
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
        model_dtype = getattr(config.hf_config, "dtype", None) or getattr(config.hf_config, "torch_dtype", None)
        self.dtype = select_dtype(config.dtype, self.device, model_dtype)
        self.tp = link.tensor_parallel_group(self.device)
        self.attention, self.model = self._build_model(parts)
        self.vocab_size: int = self.model.vocab_size
        self.sampler = parts.resolve(Sampler)()
        self._sampled_params: list[Any] | None = None  # of the rows of this step, for samplers that ask for them
        self._sampler_wants_params = "params" in inspect.signature(self.sampler.forward).parameters
        self.builder: InputBatchBuilder = parts.resolve(InputBatchBuilder)()
        self.generator = torch.Generator(self.device)
        self.generator.seed() if config.seed is None else self.generator.manual_seed(config.seed)
        if config.prefill_chunk is None and self.device.type == "cpu":
            config.prefill_chunk = CPU_PREFILL_CHUNK
        if self.device.type == "cuda" and config.compile is not False:
            if self.attention.capturable:
                install_fused(self.model, self.sampler)  # a backend that captures is one in Triton, so Triton is here
            elif config.compile:
                raise ConfigError(f"compile=True: the {self.attention.name} backend has no fused kernels; leave it out")
        self.kv_cache = self._allocate_kv_cache(parts)
        self.graphs = self._capture_graphs(parts)

    def _build_model(self, parts: Parts) -> tuple[AttentionBackend, Any]:
        config, facts = self.config, ModelConfig.from_hf(self.config.hf_config)
        backend, _reason = select_backend(
            config.attention_backend, self.device, self.dtype, facts.head_dim, config.kvcache_block_size
        )
        attention = parts.resolve(backend)(
            *facts.heads_on_rank(self.tp), facts.head_dim, facts.scale, config.kvcache_block_size
        )
        model = build_model(
            config.hf_config, self.tp, attention, parts.resolve, self.dtype, self.device, config.max_model_len
        )
        load_model(model, config)
        prepare_for_device(model, self.device, self.dtype, config.quantization, config.compile)
        return attention, model.eval()

    def _allocate_kv_cache(self, parts: Parts) -> Tensor:
        """Size the pool (the smallest that any rank can hold), unless the user gave one, and allocate it."""
        config, model = self.config, self.model
        if self.device.type == "cuda":
            self.warmup()
            torch.cuda.empty_cache()  # else `used` counts what the step took, which `peak - current` counts as well
        if config.num_kvcache_blocks == -1:
            sizer = parts.resolve(KVCacheSizer)()
            size = sizer.block_bytes(
                model.num_layers, model.num_kv_heads, model.head_dim, config.kvcache_block_size, self.dtype.itemsize
            )
            gpu = self.device.type == "cuda"
            num_blocks = sizer.on_gpu(config, size, self.device) if gpu else sizer.on_cpu(config, size)
            config.num_kvcache_blocks = self.link.smallest(num_blocks)
        return self._new_cache(config.num_kvcache_blocks)

    def _new_cache(self, num_blocks: int) -> Tensor:
        config, model = self.config, self.model
        return allocate_kv_cache(
            model.num_layers, num_blocks, config.kvcache_block_size, model.num_kv_heads, model.head_dim,
            self.dtype, self.device,
        )  # fmt: skip

    @torch.inference_mode()
    def warmup(self) -> None:
        """Run the largest prefill and some decodes, so that the peak of memory is known and all kernels are compiled.

        The largest prefill has as many tokens *and* as many rows as a step can have: 512 rows that share 16,384 tokens
        compute 32 each, and 512 rows of logits. All rows write to one and the same block, for only sizes matter here
        and what this cache takes would count as what a step needs.
        """
        config, block_size = self.config, self.config.kvcache_block_size
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(self.device)
        rows = min(config.max_num_seqs, config.max_num_batched_tokens)
        length = min(config.max_num_batched_tokens // rows, config.max_model_len)
        longest = min(config.max_num_batched_tokens, config.max_model_len)
        cache = self._new_cache(1)
        decodes = [1 << n for n in range(rows.bit_length())]
        # (rows, context, how much of it is new): the prefill with the most rows, the longest one, and decodes.
        for num_seqs, context, num_new in [
            (rows, length, length),
            (1, longest, longest),
            *((n, 2, 1) for n in decodes),
        ]:
            seqs = []
            for _ in range(num_seqs):
                seq = Sequence([0] * context, block_size=block_size)
                seq.block_table = (0,) * -(-context // block_size)
                seq.num_computed_tokens, seq.num_scheduled_tokens = context - num_new, num_new
                seqs.append(seq)
            batch = InputBatch.from_arrays(self.builder.build(seqs), self.device)
            logits = self._logits(batch, cache)
            self._sampled_params = self._params_of(seqs)
            if logits is not None:
                self.sample(logits, batch.temperatures, True)
                self.sample(logits, batch.temperatures, False)
        torch.cuda.synchronize(self.device)

    @torch.inference_mode()
    def _capture_graphs(self, parts: Parts) -> DecodeGraphs | None:
        """CUDA graphs of the decode steps, where there is a GPU, a backend that allows it, and nobody said eager.

        A plugged-in `record` needs no GPU: it says itself how a step is run again. Recording runs the step, which on a
        CPU takes about as long for each row more; so only small batches are recorded there.
        """
        config, graphs = self.config, parts.resolve(DecodeGraphs)
        on_gpu = self.device.type == "cuda" and self.attention.capturable
        if config.enforce_eager or not (on_gpu or graphs.record is not DecodeGraphs.record):
            return None
        max_blocks = -(-config.max_model_len // config.kvcache_block_size)
        rows = config.max_num_seqs if on_gpu else min(config.max_num_seqs, MAX_RECORDED_ON_CPU)
        try:
            inputs = parts.resolve(StepInputs)(graphs.graph_sizes(rows)[-1], max_blocks, self.device)
            return graphs(self._decode_logits, rows, inputs)
        except torch.OutOfMemoryError as error:
            raise MemoryBudgetError(
                "this GPU has too little memory left for CUDA graphs; lower gpu_memory_utilization or max_num_seqs, "
                "or do without them: enforce_eager=True"
            ) from error

    def _decode_logits(self, batch: InputBatch) -> Tensor | None:
        """Logits of all rows of a decode step, one query each."""
        metadata = batch.attn_metadata
        if not self.attention.capturable:
            # Such a backend looks once at every metadata and slot mapping that it has not seen, for all layers, and
            # sizes its memory by the longest context. A recorded batch has the same objects in every step, with other
            # numbers in them: so each replay gets new ones (`[:]` is a new view), and the longest context of today.
            slots, longest = metadata.slot_mapping[:], int(metadata.context_lens.max())
            metadata = replace(metadata, slot_mapping=slots, max_context_len=longest)
        hidden = self.model(batch.input_ids, batch.positions, self.kv_cache, metadata)
        return self.model.compute_logits(hidden)

    # ---- a step --------------------------------------------------------------------------------------------------

    def call(self, method: str, *args: Any) -> Any:
        """Run a method on every rank and return rank 0's result.

        Live sequences stay in this process: they become rows of numbers before anything is sent.
        """
        if method == "run":
            seqs, _is_prefill = args
            self._sampled_params = self._params_of(seqs)
            args = (self.builder.build(seqs),)
            if self._has_parts:
                check_arrays(*args, self.vocab_size, self.config.max_model_len, *self.kv_cache.shape[2:4])
        gpu = self.device.index if self.device.type == "cuda" else -1  # Triton launches on the *current* one
        with self.link.running(method, args), torch.cuda.device(gpu):
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
        arrays = BatchArrays(*arrays)  # it comes as a plain tuple to the ranks above 0
        if self.graphs is not None and self.graphs.fits(arrays):
            logits, temperatures = self.graphs.run(arrays)
            if logits is not None and len(arrays.logits_indices) < len(logits):
                logits = logits[torch.from_numpy(arrays.logits_indices).to(self.device)]
        else:
            if self.graphs is not None and self.tp.size > 1 and self.device.type == "cuda":
                torch.cuda.synchronize(self.device)  # no collective may start while a graph runs: see NCCL_SETTINGS
            batch = InputBatch.from_arrays(arrays, self.device)
            logits, temperatures = self._logits(batch, self.kv_cache), batch.temperatures
        self.link.settle()  # what fails from here on, in the sampler, fails on this rank alone
        if logits is None or not len(arrays.logits_indices):
            return []
        token_ids = self.sample(logits, temperatures, arrays.needs_noise)
        self.builder.look_ahead()
        return token_ids.tolist()  # the step's only wait for the device

    def _logits(self, batch: InputBatch, kv_cache: Tensor) -> Tensor | None:
        hidden = self.model(batch.input_ids, batch.positions, kv_cache, batch.attn_metadata)  # [T, D]
        return self.model.compute_logits(hidden[batch.logits_indices])  # [S, V] on rank 0

    def sample(self, logits: Tensor, temperatures: Tensor, needs_noise: bool) -> Tensor:
        """Token ids [S]. A sampler whose forward names `params` also gets the rows' SamplingParams."""
        options = {"params": self._sampled_params} if self._sampler_wants_params else {}
        token_ids: Tensor = self.sampler(logits, temperatures, self.generator, needs_noise, **options)
        if self._has_parts:
            check_token_ids(token_ids, len(logits), self.vocab_size)
        return token_ids

    def exit(self) -> None:
        """Let go of model, cache and link. Safe to call again."""
        self._give_back()  # first: NCCL gives a group back when no captured graph is left that knows it
        self.link.close()

    def _give_back(self) -> None:
        for name in ("model", "kv_cache", "sampler", "graphs"):
            setattr(self, name, None)
        if self.device.type == "cuda":  # torch keeps a GPU's memory for later unless it is told otherwise
            gc.collect()
            torch.cuda.empty_cache()

    def __del__(self) -> None:
        """Of an engine that nobody closed."""
        if hasattr(self, "device") and not sys.is_finalizing():
            self._give_back()


def spread(token_ids: list[int], seqs: list[Sequence]) -> list[int | None]:
    """Give the sampled tokens back to their rows; a row that has not caught up yet has None."""
    if len(token_ids) == len(seqs):
        return list(token_ids)
    tokens = iter(token_ids)
    return [
        next(tokens) if seq.num_computed_tokens + seq.num_scheduled_tokens == seq.num_tokens else None for seq in seqs
    ]
