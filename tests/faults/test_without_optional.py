"""The package works where optional dependencies are missing: triton, flash-attn, ipywidgets, anywidget, matplotlib."""

import subprocess
import sys
from pathlib import Path

BLOCK = """
import sys
class Without:
    def __init__(self, finder):
        self.finder = finder
    def find_spec(self, name, path=None, target=None):
        return None if name.split(".")[0] in {missing!r} else self.finder.find_spec(name, path, target)
    def __getattr__(self, name):
        return getattr(self.finder, name)
sys.meta_path[:] = map(Without, sys.meta_path)
"""
OPTIONAL = ("triton", "flash_attn", "ipywidgets", "anywidget", "matplotlib", "IPython", "jupyterlab")


def run(missing: tuple[str, ...], code: str) -> str:
    script = BLOCK.format(missing=set(missing)) + code
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=250)
    assert result.returncode == 0, result.stderr[-3000:]
    return result.stdout


def test_the_block_works() -> None:
    code = "try: import matplotlib\nexcept ImportError: print('missing')"
    assert run(("matplotlib",), code).split() == ["missing"]


def test_everything_on_a_cpu_without_any_of_them(tiny_model_dir: Path) -> None:
    code = f"""
import nanovllm, importlib, pkgutil
for name in nanovllm.__all__:
    getattr(nanovllm, name)
from nanovllm import LLM, SamplingParams, doctor
llm = LLM({str(tiny_model_dir)!r}, dtype="float32", device="cpu")
params = SamplingParams(temperature=1e-6, max_tokens=3)
print(len(llm.generate(["the quick"], params, use_tqdm=True)))
print(len(llm.chat([{{"role": "user", "content": "hi"}}], params)["token_ids"]))
with llm.observe(lambda record: record._repr_html_()):
    list(llm.stream("the", params))
print("triton" in repr(doctor()))
assert not set(sys.modules) & {set(OPTIONAL)!r}
for backend in ("triton", "flash"):
    try:
        LLM({str(tiny_model_dir)!r}, dtype="float32", device="cpu", attention_backend=backend)
    except nanovllm.ConfigError as error:
        print(backend in str(error))
"""
    assert run(OPTIONAL, code).split() == ["1", "3", "True", "True", "True"]
