"""Builds `decode_step.c` with the machine's C compiler, once, and loads it. Knows nothing of models.

The library is kept in the cache folder under a name made of everything that it depends on: source, options, compiler
and processor. It shares PyTorch's OpenMP threads, whose symbols are loaded already, so `torch.set_num_threads` holds.
"""

import ctypes
import os
import platform
import shutil
import subprocess
from contextlib import suppress
from ctypes import POINTER, c_float, c_int64, c_void_p
from hashlib import sha256
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
import torch.nn.functional as F
from torch import Tensor

from nanovllm.errors import ConfigError
from nanovllm.paths import cache_home

MAX_ROWS = 64  # as in decode_step.c
SOURCE = Path(__file__).with_name("decode_step.c")
OPTIONS = ("-O3", "-march=native", "-fopenmp", "-fno-math-errno", "-w", "-shared", "-fPIC")


class LinearStruct(ctypes.Structure):
    """`Linear` in decode_step.c."""

    _fields_ = (("w", c_void_p), ("scale", c_void_p), ("bias", c_void_p), ("inputs", c_int64), ("outputs", c_int64))


class LayerStruct(ctypes.Structure):
    """`Layer` in decode_step.c."""

    _fields_ = (
        *((name, LinearStruct) for name in ("qkv", "o", "gate_up", "down")),
        *((name, c_void_p) for name in ("input_norm", "post_norm", "q_norm", "k_norm")),
    )


class ModelStruct(ctypes.Structure):
    """`Model` in decode_step.c."""

    _fields_ = (
        *((name, c_void_p) for name in ("embedding", "final_norm", "cos_sin")),
        ("layers", POINTER(LayerStruct)),
        *((name, c_int64) for name in ("num_layers", "D", "F", "N", "K", "H", "block_size")),
        *((name, c_float) for name in ("eps", "scale")),
    )


def find_compiler() -> str | None:
    """The C compiler: what CC names, or cc, gcc, clang."""
    names = [os.environ.get("CC", "cc"), "gcc", "clang"]
    return next((path for path in map(shutil.which, names) if path), None)


def load_library(dtype: torch.dtype, int8: bool) -> ctypes.CDLL:
    """The library for weights and cache of `dtype` (bfloat16 or float32), built if need be: about two seconds.

    Raises `ConfigError` with the compiler's words where there is no compiler, or none that can build it.
    """
    compiler = find_compiler()
    if compiler is None:
        raise ConfigError("compile=True needs a C compiler on a CPU (cc, gcc or clang), and there is none")
    command = [compiler, *OPTIONS, f"-DBFLOAT16={int(dtype == torch.bfloat16)}", f"-DINT8={int(int8)}"]
    key = sha256("\0".join([SOURCE.read_text(encoding="utf-8"), *command, processor()]).encode()).hexdigest()[:20]
    library = cache_home() / "compiled" / f"decode_step-{key}.so"
    if not library.is_file():
        try:
            library.parent.mkdir(parents=True, exist_ok=True)
            with TemporaryDirectory(dir=library.parent) as folder:
                made = Path(folder) / library.name
                command += [str(SOURCE), "-o", str(made), "-lm"]
                subprocess.run(command, check=True, capture_output=True, text=True, timeout=120)
                os.replace(made, library)
        except (OSError, subprocess.SubprocessError) as error:
            words = getattr(error, "stderr", None) or str(error)
            raise ConfigError(f"{compiler} cannot build the compiled decode step: {words.strip()[:500]}") from error
    loaded = ctypes.CDLL(str(library))
    loaded.work_bytes.restype = c_int64
    return loaded


def processor() -> str:
    """What `-march=native` looks at: a cache folder may be shared by different machines."""
    with suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
        return "\n".join(sorted({line for line in lines if line.startswith(("flags", "Features", "model name"))}))
    return f"{platform.machine()} {platform.processor()}"


class CompiledProduct:
    """x [T, in] -> x @ weight.T + bias through the library for up to 64 rows, beyond that as PyTorch does it.

    scale: of int8 weights, one an output. logits: through the library for any number of rows, and float32, so that
    equal logits are rarer than in bfloat16; int8 weights only so.
    """

    def __init__(
        self,
        library: ctypes.CDLL,
        weight: Tensor,
        bias: Tensor | None,
        scale: Tensor | None = None,
        logits: bool = False,
    ) -> None:
        self.library, self.weight, self.bias, self.logits = library, weight, bias, logits
        self.tiles = library.use_tiles()
        self.exact = [None if tensor is None else tensor.float() for tensor in (scale, bias)]
        pointers = (None if tensor is None else tensor.data_ptr() for tensor in self.exact)
        self.struct = LinearStruct(weight.data_ptr(), *pointers, weight.shape[1], weight.shape[0])

    def __call__(self, x: Tensor) -> Tensor:
        if self.logits:
            return torch.cat([self.multiply(part) for part in x.split(MAX_ROWS)])
        return self.multiply(x).to(x.dtype) if len(x) <= MAX_ROWS else F.linear(x, self.weight, self.bias)

    def multiply(self, x: Tensor) -> Tensor:
        """x [T <= 64, in] -> [T, out] float32."""
        x, rows = x.contiguous(), len(x)
        y = torch.empty(rows, self.weight.shape[0])
        memory = torch.empty(2 * -(-rows // 16) * 16 * x.shape[1])
        self.library.linear(
            ctypes.byref(self.struct), c_void_p(x.data_ptr()), c_void_p(y.data_ptr()), rows,
            c_void_p(memory.data_ptr()), self.tiles,
        )  # fmt: skip
        return y
