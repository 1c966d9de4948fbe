"""Models: read a configuration, build, load, prepare. They know attention only by its interface."""

from nanovllm.models.loader import load_model
from nanovllm.models.model_config import ModelConfig
from nanovllm.models.prepare import prepare_for_device
from nanovllm.models.registry import build_model, supported_models

__all__ = ["ModelConfig", "build_model", "load_model", "prepare_for_device", "supported_models"]
