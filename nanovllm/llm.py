"""LLM: the name that users import. Everything it does is in `LLMEngine`."""

from nanovllm.engine.llm_engine import LLMEngine


class LLM(LLMEngine):
    """A language model ready to generate: `LLM("/path/to/model").generate(["Hello"])`. See `LLMEngine`."""

    def __repr__(self) -> str:
        if not hasattr(self, "scheduler"):  # still under construction
            return super().__repr__()
        config, runner = self.config, self.model_runner
        pool = f"{config.num_kvcache_blocks} blocks of {config.kvcache_block_size} tokens"
        ranks = f", {config.tensor_parallel_size} ranks" if config.tensor_parallel_size > 1 else ""
        state = f"{len(self.scheduler.running)} running, {len(self.scheduler.waiting)} waiting"
        return f"LLM({config.model!r}: {runner.device}{ranks}, {pool}, {state if self._finalizer.alive else 'closed'})"
