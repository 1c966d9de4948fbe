"""nanovllm: a small LLM inference engine to learn from.

    from nanovllm import LLM, SamplingParams

Every name below is imported when it is first used, so `import nanovllm` is quick, and the bookkeeping in
`nanovllm.engine` and the views in `nanovllm.viz` work in a process that never loads torch.
"""

import os
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from nanovllm.config import Config as Config
    from nanovllm.diagnosis import doctor as doctor
    from nanovllm.engine.parts import Parts as Parts
    from nanovllm.errors import ConfigError as ConfigError
    from nanovllm.errors import DownloadError as DownloadError
    from nanovllm.errors import EngineBusyError as EngineBusyError
    from nanovllm.errors import EngineDeadError as EngineDeadError
    from nanovllm.errors import MemoryBudgetError as MemoryBudgetError
    from nanovllm.errors import ModelNotFoundError as ModelNotFoundError
    from nanovllm.errors import NanoVLLMError as NanoVLLMError
    from nanovllm.errors import RankError as RankError
    from nanovllm.errors import RequestError as RequestError
    from nanovllm.errors import SamplingParamsError as SamplingParamsError
    from nanovllm.errors import UnsupportedModelError as UnsupportedModelError
    from nanovllm.errors import WeightError as WeightError
    from nanovllm.llm import LLM as LLM
    from nanovllm.paths import default_model_path as default_model_path
    from nanovllm.sampling_params import SamplingParams as SamplingParams

__version__ = "0.1.0"

# Torch's OpenMP threads wait for each other by going round in a loop, up to 16 ms before they sleep. Where another
# program keeps a core busy, one of two threads often does not run, and the other spends its own share of the core on
# waiting: a decode step of 13 ms took up to 2 s. With 2,000 rounds (0.1 ms) it takes 40, and undisturbed 13 as before.
# GNU's OpenMP reads this once, when torch is loaded.
if "OMP_WAIT_POLICY" not in os.environ:
    os.environ.setdefault("GOMP_SPINCOUNT", "2000")

_HOMES = {
    "LLM": "nanovllm.llm",
    "SamplingParams": "nanovllm.sampling_params",
    "Config": "nanovllm.config",
    "Parts": "nanovllm.engine.parts",
    "default_model_path": "nanovllm.paths",
    "doctor": "nanovllm.diagnosis",
    "NanoVLLMError": "nanovllm.errors",
    "ConfigError": "nanovllm.errors",
    "SamplingParamsError": "nanovllm.errors",
    "RankError": "nanovllm.errors",
    "RequestError": "nanovllm.errors",
    "ModelNotFoundError": "nanovllm.errors",
    "UnsupportedModelError": "nanovllm.errors",
    "WeightError": "nanovllm.errors",
    "DownloadError": "nanovllm.errors",
    "MemoryBudgetError": "nanovllm.errors",
    "EngineBusyError": "nanovllm.errors",
    "EngineDeadError": "nanovllm.errors",
}

__all__ = ["__version__", *_HOMES]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
