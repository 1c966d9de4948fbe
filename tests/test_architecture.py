"""The shape of the package: who may import whom, how long it may be, and what no module does."""

import ast
import io
import subprocess
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parent.parent / "nanovllm"
FILES = sorted(PACKAGE.rglob("*.py"))

ENGINE = ("engine", "worker", "attention", "layers", "models", "config", "sampling_params", "llm", "errors")
# The design asked for 3,000. What came on top: one-pass Triton kernels for a GPU (350), ranks that die, hang or fail to
# start (270), a CPU's compiled operators and huge pages (290), model folders that lie (150), interrupts at any moment
# (50), learners' numbers that would lead a kernel out of its memory (30), sums over GPUs without NCCL (150). A change
# that needs more raises this number in its own commit, and says what for.
MAX_ENGINE_LINES = 4547
MAX_FUNCTION_LINES = 60

# What each part may import of the package, itself aside. "engine" means its bookkeeping, without llm_engine.
BASE = {"errors", "_html", "paths", "machine", "model_folder"}
TEXT = {"tokenizer", "chat_template", "prompts", "text_pieces"}
ENGINE_PARTS = BASE | TEXT | {"config", "sampling_params", "engine", "attention", "layers", "models", "worker"}
ALLOWED = {
    "errors": set(),
    "_html": set(),
    "paths": set(),
    "machine": {"errors"},
    "model_folder": {"errors", "_html"},
    "tokenizer": BASE,
    "text_pieces": set(),
    "prompts": {"errors", "_html"},
    "chat_template": set(),
    "chat_helper": set(),
    "config": BASE,
    "sampling_params": BASE,
    "engine": BASE | {"config", "sampling_params"},
    "attention": BASE,
    "layers": BASE | {"attention"},
    "models": BASE | {"config", "attention", "layers"},
    "worker": BASE | {"config", "attention", "layers", "models", "engine.sequence", "engine.parts"},
    "engine.llm_engine": ENGINE_PARTS,
    "llm": {"engine.llm_engine"},
    "viz": BASE | {"engine.events"},
}
# The rest (hub, command line, bench, workbook) may read all, save that only the workbook and the bench of viz read viz.
READS_ALL = ENGINE_PARTS | {"engine.llm_engine", "llm", "hub", "gguf_model", "diagnosis", "demo", "bench", "cli"}

# Optional dependencies, and transformers where only an engine needs it: these may be imported inside a function.
LATE_IMPORTS = {
    "triton", "flash_attn", "cuda", "llama_cpp", "matplotlib", "ipywidgets", "anywidget", "IPython", "jupyter_client",
}  # fmt: skip
# So may the modules of our own that begin with importing an optional dependency.
NEEDS_OPTIONAL = {
    "nanovllm.attention.flash_backend",
    "nanovllm.attention.triton_backend",
    "nanovllm.attention.triton_kernels",
    "nanovllm.layers.fused",
    "nanovllm.viz.widget",
    "nanovllm.worker.one_shot",
}


def module_of(path: Path) -> str:
    """ "…/nanovllm/engine/parts.py" -> "engine.parts"; a package's `__init__` -> its own name."""
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" and len(parts) > 1 else parts)


def part_of(module: str) -> str:
    return module if module == "engine.llm_engine" else module.split(".")[0]


def parse(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), filename=str(path))


def package_imports(path: Path) -> Iterator[tuple[int, str]]:
    """(line, module inside the package) of every import of the package's own modules."""
    for node in ast.walk(parse(path)):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: relative import; absolute ones can be searched for"
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        else:
            continue
        for name in names:
            if name.split(".")[0] == PACKAGE.name:
                yield node.lineno, name.partition(".")[2] or "__init__"


def is_allowed(importer: str, imported: str) -> bool:
    part, other = part_of(importer), part_of(imported)
    if imported.startswith("engine.llm_engine"):
        other = "engine.llm_engine"
    if part == other:
        return True
    if part == "workbook":
        return True
    if other == "__version__":
        return part not in ENGINE
    allowed = ALLOWED.get(part, READS_ALL | ({"viz"} if importer == "bench.viz" else set()))
    return other in allowed or any(imported == name or imported.startswith(name + ".") for name in allowed)


@pytest.mark.parametrize("path", FILES, ids=module_of)
def test_import_direction(path: Path) -> None:
    importer = module_of(path)
    if importer == "__init__":  # lazy: what it names is imported on first use, and checked below
        return
    wrong = [
        f"line {line}: {imported}" for line, imported in package_imports(path) if not is_allowed(importer, imported)
    ]
    assert not wrong, f"{importer} must not import {wrong}; see the table at the top of this test"


def test_the_direction_test_sees_a_wrong_import() -> None:
    assert not is_allowed("engine.scheduler", "worker.model_runner.ModelRunner")
    assert not is_allowed("engine.scheduler", "engine.llm_engine.LLMEngine")
    assert not is_allowed("layers.linear", "models.qwen3")
    assert not is_allowed("worker.model_runner", "engine.scheduler.Scheduler")
    assert not is_allowed("viz.recorder", "engine.llm_engine.LLMEngine")
    assert not is_allowed("bench", "viz.recorder")
    assert is_allowed("worker.model_runner", "engine.parts.Parts")
    assert is_allowed("engine.llm_engine", "worker.model_runner.ModelRunner")


def modules_without_torch() -> list[str]:
    names = [f"nanovllm.{module_of(path)}" for path in FILES if part_of(module_of(path)) in ("engine", "viz")]
    return ["nanovllm", "nanovllm.paths", "nanovllm.cli", "nanovllm.model_command", "nanovllm.chat_template", *names]


def test_bookkeeping_and_views_never_load_torch() -> None:
    """In a fresh process, one import after the other, so that the culprit has a name."""
    code = (
        "import importlib, sys\n"
        f"for name in {modules_without_torch()!r}:\n"
        "    importlib.import_module(name)\n"
        "    heavy = {'torch', 'transformers'} & set(sys.modules)\n"
        "    assert not heavy, f'{name} loads {heavy}'\n"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr


def docstring_lines(tree: ast.Module) -> set[int]:
    found: set[int] = set()
    for node in ast.walk(tree):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            first = node.body[0] if node.body else None
            if (
                isinstance(first, ast.Expr)
                and isinstance(first.value, ast.Constant)
                and isinstance(first.value.value, str)
            ):
                assert first.end_lineno is not None
                found.update(range(first.lineno, first.end_lineno + 1))
    return found


def code_lines(source: str) -> int:
    """Lines with code on them: neither blank, nor comment, nor docstring."""
    silent = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENCODING}
    lines: set[int] = set()
    for token in tokenize.tokenize(io.BytesIO(source.encode()).readline):
        if token.type not in silent and token.type != tokenize.ENDMARKER:
            lines.update(range(token.start[0], token.end[0] + 1))
    return len(lines - docstring_lines(ast.parse(source)))


def test_code_lines_counts_code_only() -> None:
    source = '"""Doc.\n\nMore."""\n\nx = 1  # note\n# alone\ndef f():\n    """Doc."""\n    return """a\nb"""\n'
    assert code_lines(source) == 4  # x = 1, def, and two lines of the string


def test_the_engine_stays_within_its_budget() -> None:
    counts = {
        module_of(path): code_lines(path.read_text(encoding="utf-8"))
        for path in FILES
        if module_of(path).split(".")[0] in ENGINE
    }
    total = sum(counts.values())
    largest = ", ".join(f"{name} {count}" for name, count in sorted(counts.items(), key=lambda item: -item[1])[:8])
    assert total <= MAX_ENGINE_LINES, f"{total} code lines in the engine, {MAX_ENGINE_LINES} are allowed: {largest}"


def functions(tree: ast.Module) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            yield node


@pytest.mark.parametrize("path", FILES, ids=module_of)
def test_functions_are_short(path: Path) -> None:
    long = [
        f"{function.name} has {function.end_lineno - function.lineno + 1} lines"
        for function in functions(parse(path))
        if function.end_lineno is not None and function.end_lineno - function.lineno + 1 > MAX_FUNCTION_LINES
    ]
    assert not long, f"{module_of(path)}: {long}; at most {MAX_FUNCTION_LINES}"


@pytest.mark.parametrize("path", FILES, ids=module_of)
def test_no_global_and_no_late_import(path: Path) -> None:
    wrong = []
    for function in functions(parse(path)):
        for node in ast.walk(function):
            if isinstance(node, ast.Global):
                wrong.append(f"line {node.lineno}: global {', '.join(node.names)}")
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom):
                names = [node.module or "", *(f"{node.module}.{alias.name}" for alias in node.names)]
            late = LATE_IMPORTS | NEEDS_OPTIONAL | ({"transformers"} if module_of(path) == "config" else set())
            if names and not any(name in late or name.split(".")[0] in late for name in names):
                wrong.append(f"line {node.lineno}: import of {names[0]} inside {function.name}")
    assert not wrong, f"{module_of(path)}: {wrong}"


def mutable_names(body: list[ast.stmt]) -> Iterator[tuple[int, str]]:
    """Names bound to a list, dict or set in a module's or class's body, unless written as constants."""
    makers = {"list", "dict", "set", "defaultdict", "deque", "OrderedDict", "Counter", "WeakValueDictionary"}
    for node in body:
        targets = (
            node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
        )
        value = getattr(node, "value", None)
        is_call = isinstance(value, ast.Call) and isinstance(value.func, ast.Name) and value.func.id in makers
        if is_call or isinstance(value, (ast.List, ast.Dict, ast.Set, ast.ListComp, ast.DictComp, ast.SetComp)):
            for target in targets:
                name = target.id if isinstance(target, ast.Name) else ast.unparse(target)
                if is_call or not (name.isupper() or name.startswith("__")):
                    yield node.lineno, name


@pytest.mark.parametrize("path", FILES, ids=module_of)
def test_no_mutable_state_in_modules_and_classes(path: Path) -> None:
    tree = parse(path)
    bodies = [tree.body, *(node.body for node in ast.walk(tree) if isinstance(node, ast.ClassDef))]
    allowed = {"packed_modules_mapping"}  # a table, under the name that other engines gave it
    wrong = [f"line {line}: {name}" for body in bodies for line, name in mutable_names(body) if name not in allowed]
    assert not wrong, f"{module_of(path)}: {wrong}; keep state in objects, and write constants in capitals"


@pytest.mark.parametrize("path", FILES, ids=module_of)
def test_every_module_says_what_it_is(path: Path) -> None:
    if path.read_text(encoding="utf-8").strip():
        assert ast.get_docstring(parse(path)), f"{module_of(path)} has no docstring"


@pytest.mark.parametrize("path", FILES, ids=module_of)
def test_nothing_is_left_undone(path: Path) -> None:
    readline = io.BytesIO(path.read_bytes()).readline
    comments = [token.string for token in tokenize.tokenize(readline) if token.type == tokenize.COMMENT]
    marks = [comment for comment in comments if any(mark in comment for mark in ("TODO", "FIXME", "XXX"))]
    stubs = [
        node.lineno
        for node in ast.walk(parse(path))
        if isinstance(node, ast.Raise) and node.exc is not None and "NotImplementedError" in ast.unparse(node.exc)
    ]
    assert not marks and not stubs, f"{module_of(path)}: {marks}, NotImplementedError at lines {stubs}"


@pytest.mark.parametrize("path", FILES, ids=module_of)
def test_only_safetensors_and_no_remote_code(path: Path) -> None:
    """No call that could run code from a model's folder."""
    for node in ast.walk(parse(path)):
        if isinstance(node, ast.Call):
            called = ast.unparse(node.func)
            assert called not in ("torch.load", "pickle.load", "pickle.loads", "eval", "exec"), f"{path}:{node.lineno}"
            for keyword in node.keywords:
                if keyword.arg == "trust_remote_code":
                    assert isinstance(keyword.value, ast.Constant) and keyword.value.value is False, (
                        f"{path}:{node.lineno}"
                    )
            if called.endswith(".from_pretrained") and called.split(".")[0].startswith("Auto"):
                given = {keyword.arg for keyword in node.keywords}
                assert "trust_remote_code" in given, f"{path}:{node.lineno}: say trust_remote_code=False"
