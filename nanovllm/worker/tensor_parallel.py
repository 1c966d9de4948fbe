"""Starts the ranks of an engine."""

from nanovllm.config import Config
from nanovllm.engine.parts import Parts
from nanovllm.worker.link import RankLink, SoloLink


def start_ranks(config: Config, parts: Parts) -> RankLink:
    """The link to the ranks above 0, each started in a process of its own; a `SoloLink` if there are none."""
    assert config.tensor_parallel_size == 1, "ranks above 0 are started by the tensor-parallel module"
    return SoloLink()
