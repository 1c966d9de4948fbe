"""llama.cpp beside the engine: the same weights in a GGUF file, and one stream's seconds. Needs llama-cpp-python."""

import os
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from time import perf_counter
from typing import Any

from gguf import GGMLQuantizationType, GGUFReader, GGUFValueType, GGUFWriter, dequantize, quantize

from nanovllm.hub import find_gguf
from nanovllm.paths import cache_home


def gguf_file(kind: GGMLQuantizationType) -> Path:
    """The default model with every matrix as `kind` (BF16 or Q8_0), made once in the cache folder.

    Its matrices are bfloat16 numbers first, as in the engine's folder, so that Q8_0 starts from the same weights.
    """
    target = cache_home() / "bench" / f"SmolLM2-135M-Instruct-{kind.name}.gguf"
    if not target.is_file():
        target.parent.mkdir(parents=True, exist_ok=True)
        with TemporaryDirectory(dir=target.parent) as place:
            made = Path(place) / target.name
            write_gguf(find_gguf(Path(place), None, False), made, kind)
            os.replace(made, target)
    return target


def write_gguf(source: Path, target: Path, kind: GGMLQuantizationType) -> None:
    """Copy a GGUF file with other matrices; vectors are float32, as llama.cpp wants its norms."""
    reader = GGUFReader(source)
    writer = GGUFWriter(target, "llama")
    for name, field in reader.fields.items():
        if not name.startswith("GGUF.") and name not in ("general.architecture", "general.file_type"):
            items = field.types[-1] if field.types[0] is GGUFValueType.ARRAY else None
            writer.add_key_value(name, field.contents(), field.types[0], items)
    for tensor in reader.tensors:
        values = dequantize(tensor.data, tensor.tensor_type).reshape(tuple(reversed(tensor.shape.tolist())))
        if values.ndim == 1:
            writer.add_tensor(tensor.name, values)
        else:
            rounded = quantize(values, GGMLQuantizationType.BF16)
            data = quantize(dequantize(rounded, GGMLQuantizationType.BF16), kind)
            writer.add_tensor(tensor.name, data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


class LlamaCpp:
    """One stream through llama.cpp on `threads` threads. Raises `ImportError` where llama-cpp-python is missing, and
    `RuntimeError` where it dies on this machine, which a process of its own tries first."""

    def __init__(self, kind: GGMLQuantizationType, threads: int, context: int, tried: bool = False) -> None:
        from llama_cpp import Llama  # optional: nothing but this bench wants it

        if not tried:
            code = (
                f"from {__name__} import *; LlamaCpp(GGMLQuantizationType.{kind.name}, 1, 64, True).seconds([1, 2], 2)"
            )
            result = subprocess.run([sys.executable, "-c", code], capture_output=True)
            if result.returncode:
                raise RuntimeError(f"llama.cpp dies on {kind.name} here (exit code {result.returncode})")

        self.model: Any = Llama(
            str(gguf_file(kind)), n_ctx=context, n_threads=threads, n_threads_batch=threads, verbose=False
        )

    def seconds(self, prompt: list[int], count: int) -> float:
        """Of a prompt and `count` tokens behind it, each the most probable one."""
        self.model.reset()
        started = perf_counter()
        generated = self.model.generate(prompt, temp=0.0, repeat_penalty=1.0, reset=True)
        for _ in range(count):
            next(generated)
        return perf_counter() - started
