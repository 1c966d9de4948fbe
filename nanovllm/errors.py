"""Every error that the package raises on purpose.

    NanoVLLMError
    ├── ConfigError            (ValueError, AssertionError)  an engine option that cannot work
    ├── SamplingParamsError    (ValueError, AssertionError)  a sampling option that cannot work
    ├── RequestError           (ValueError, AssertionError)  a prompt that this engine can never serve
    ├── ModelNotFoundError     (ConfigError, FileNotFoundError)  no such model folder
    ├── UnsupportedModelError  (ValueError)   an architecture, or a detail of one, that is not implemented
    ├── WeightError            (ValueError)   tensors missing, surplus, misshapen or unreadable
    ├── DownloadError          (OSError)      a model could not be fetched or stored
    ├── MemoryBudgetError      (RuntimeError) the model or the KV cache does not fit into memory
    ├── EngineBusyError        (RuntimeError) the engine was entered from a hook or from a second thread
    ├── RankError              (RuntimeError) a step failed on another tensor-parallel rank; the engine goes on
    └── EngineDeadError        (RuntimeError) the engine was closed, or one of its ranks died

What the course writes as ``assert`` is an ordinary exception here, so that it survives ``python -O`` and can name the
value, the limit and the remedy. It still *is* an ``AssertionError``, so code written for the course keeps catching it.
"""

MAX_INTEGER = (1 << 63) - 1  # what fits where numbers go in the end: into tensors, seeds and sizes


class NanoVLLMError(Exception):
    """Base class of all errors raised on purpose."""


class ConfigError(NanoVLLMError, ValueError, AssertionError):
    """An engine option that cannot work."""


class SamplingParamsError(NanoVLLMError, ValueError, AssertionError):
    """A sampling option that cannot work."""


class RequestError(NanoVLLMError, ValueError, AssertionError):
    """A request that this engine can never serve; it was refused before anything was queued."""


class ModelNotFoundError(ConfigError, FileNotFoundError):
    """The model folder does not exist."""


class UnsupportedModelError(NanoVLLMError, ValueError):
    """The model needs something that is not implemented here."""


class WeightError(NanoVLLMError, ValueError):
    """The weights in the folder are not the ones that the model needs."""


class DownloadError(NanoVLLMError, OSError):
    """A model could not be fetched or stored."""


class MemoryBudgetError(NanoVLLMError, RuntimeError):
    """There is too little memory for the model or the KV cache."""


class EngineBusyError(NanoVLLMError, RuntimeError):
    """The engine was entered, from a step hook or a second thread, while it was in the middle of a call."""


class RankError(NanoVLLMError, RuntimeError):
    """A step failed on another tensor-parallel rank; its traceback is in the message. The engine goes on."""


class EngineDeadError(NanoVLLMError, RuntimeError):
    """The engine was closed, or one of its worker processes died."""
