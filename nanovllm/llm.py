"""LLM: the name that users import. Everything it does is in `LLMEngine`."""

from nanovllm.engine.llm_engine import LLMEngine


class LLM(LLMEngine):
    """A language model ready to generate: `LLM("/path/to/model").generate(["Hello"])`. See `LLMEngine`."""
