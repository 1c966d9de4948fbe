"""Builds `cpu_kernels.c` with the machine's C compiler, once, loads it, and calls it. Knows nothing of models.

The library is kept in the cache folder under a name made of what it depends on: source, options, the compiler's path
and the processor. It shares PyTorch's OpenMP threads, whose symbols are loaded already, so `torch.set_num_threads`
holds.
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

from nanovllm.attention.base import AttentionBackend
from nanovllm.errors import ConfigError
from nanovllm.paths import cache_home

MAX_ROWS = 64  # as in cpu_kernels.c
SOURCE = Path(__file__).with_name("cpu_kernels.c")
OPTIONS = ("-O3", "-march=native", "-fopenmp", "-fno-math-errno", "-w", "-shared", "-fPIC")


class LinearStruct(ctypes.Structure):
    """`Linear` in cpu_kernels.c."""

    _fields_ = (("w", c_void_p), ("scale", c_void_p), ("bias", c_void_p), ("inputs", c_int64), ("outputs", c_int64))


class LayerStruct(ctypes.Structure):
    """`Layer` in cpu_kernels.c."""

    _fields_ = (
        *((name, LinearStruct) for name in ("qkv", "o", "gate_up", "down")),
        *((name, c_void_p) for name in ("input_norm", "post_norm", "q_norm", "k_norm")),
    )


class ModelStruct(ctypes.Structure):
    """`Model` in cpu_kernels.c."""

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
    library = cache_home() / "compiled" / f"cpu_kernels-{key}.so"
    try:
        if not library.is_file():
            library.parent.mkdir(parents=True, exist_ok=True)
            with TemporaryDirectory(dir=library.parent) as folder:
                made = Path(folder) / library.name
                command += [str(SOURCE), "-o", str(made), "-lm"]
                subprocess.run(command, check=True, capture_output=True, text=True, timeout=120)
                os.replace(made, library)
        loaded = ctypes.CDLL(str(library))
    except (OSError, subprocess.SubprocessError) as error:  # also a folder from which nothing may be run
        words = getattr(error, "stderr", None) or str(error)
        raise ConfigError(f"{compiler} cannot build the kernels for this CPU: {words.strip()[:500]}") from error
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
    equal logits are rarer than in bfloat16. int8 weights always go through the library.
    """

    def __init__(
        self,
        kernels: ctypes.CDLL,
        weight: Tensor,
        bias: Tensor | None,
        scale: Tensor | None = None,
        logits: bool = False,
    ) -> None:
        self.kernels, self.weight, self.bias, self.logits = kernels, weight, bias, logits
        self.tiles = kernels.use_tiles()
        self.exact = [None if tensor is None else tensor.float() for tensor in (scale, bias)]
        pointers = (None if tensor is None else tensor.data_ptr() for tensor in self.exact)
        self.struct = LinearStruct(weight.data_ptr(), *pointers, weight.shape[1], weight.shape[0])

    def __call__(self, x: Tensor) -> Tensor:
        if self.logits:
            parts = [self.multiply(part) for part in x.split(MAX_ROWS)]
            return parts[0] if len(parts) == 1 else torch.cat(parts)
        return self.multiply(x) if len(x) <= MAX_ROWS else F.linear(x, self.weight, self.bias)

    def multiply(self, x: Tensor) -> Tensor:
        """x [T <= 64, in] -> [T, out]. T may be 0: a step of nothing but chunks samples no token."""
        x, rows = x.contiguous(), len(x)
        y = torch.empty(rows, self.weight.shape[0], dtype=torch.float32 if self.logits else x.dtype)
        if not rows:
            return y
        memory = torch.empty(-(-rows // 16) * 16 * x.shape[1], dtype=torch.float32)
        self.kernels.linear(
            ctypes.byref(self.struct), pointer(x), pointer(y), int(not self.logits), rows, pointer(memory), self.tiles,
        )  # fmt: skip
        return y


class CompiledNorm:
    """RMSNorm, and the addition before it, in one pass; called as `RMSNorm.kernel`."""

    def __init__(self, kernels: ctypes.CDLL, weight: Tensor) -> None:
        self.kernels, self.gain = kernels, weight.float()

    def __call__(
        self, x: Tensor, weight: Tensor, eps: float, residual: Tensor | None = None
    ) -> Tensor | tuple[Tensor, Tensor]:
        x, size = x.contiguous(), x.shape[-1]
        out, residual = torch.empty_like(x), None if residual is None else residual.contiguous()
        total = None if residual is None else torch.empty_like(x)
        pointers = map(pointer, (x, residual, total, self.gain, out))
        self.kernels.add_norm(*pointers, c_int64(x.numel() // size), c_int64(size), c_float(eps))
        return out if total is None else (out, total)


class CompiledSiluAndMul:
    """The MLP's gate in one pass; called as `SiluAndMul.kernel`."""

    def __init__(self, kernels: ctypes.CDLL) -> None:
        self.kernels = kernels

    def __call__(self, x: Tensor) -> Tensor:
        x, size = x.contiguous(), x.shape[-1] // 2
        out = x.new_empty(*x.shape[:-1], size)
        self.kernels.silu_and_mul(pointer(x), pointer(out), c_int64(out.numel() // size), c_int64(size))
        return out


class CompiledRotateAndStore:
    """Norms and rotation of queries and keys, and the store, in one pass; called as `Attention.rotate_and_store`.

    cos_sin: [positions, H], H / 2 cosines and then H / 2 sines. norms: the weights of the query and key norm and their
    eps, or None.
    """

    def __init__(
        self,
        kernels: ctypes.CDLL,
        backend: AttentionBackend,
        cos_sin: Tensor,
        norms: tuple[Tensor, Tensor, float] | None,
    ) -> None:
        self.kernels, self.cos_sin = kernels, cos_sin.float().contiguous()
        self.sizes = (backend.num_heads, backend.num_kv_heads, backend.head_dim)
        q_norm, k_norm, self.eps = norms or (None, None, 0.0)
        self.norms = [None if norm is None else norm.float() for norm in (q_norm, k_norm)]

    def __call__(
        self, qkv: Tensor, positions: Tensor, k_cache: Tensor, v_cache: Tensor, slot_mapping: Tensor
    ) -> Tensor:
        """qkv [T, (N + 2 K) H] -> the turned queries [T, N, H]."""
        qkv, (num_heads, _, head_dim) = qkv.contiguous(), self.sizes
        queries = qkv.new_empty(len(qkv), num_heads, head_dim)
        tensors = (qkv, positions, slot_mapping, self.cos_sin, *self.norms, k_cache, v_cache, queries)
        self.kernels.rotate_and_store(*map(pointer, tensors), *map(c_int64, (len(qkv), *self.sizes)), c_float(self.eps))
        return queries


def pointer(tensor: Tensor | None) -> c_void_p:
    """Where a tensor lies, for the library; None is its NULL."""
    return c_void_p(None if tensor is None else tensor.data_ptr())
