"""The named seams of the engine: which class or method a learner's own code takes the place of.

A seam is named after what it replaces in the shipped engine: ``"Sampler"`` replaces the whole class, and
``"BlockManager.allocate"`` replaces one method (a plain function whose first argument is `self`). The engine builds
every component through `Parts.resolve`, at construction (a `Sequence` when its request comes); afterwards an engine
with replacements and one without run the same code, so a seam costs nothing in a step. Only with replacements each
step's numbers are checked as well (`worker.input_batch.check_arrays`), because kernels trust them.

    parts = Parts({"BlockManager.allocate": my_allocate, "Sampler": MySampler})
    LLM(path, parts=parts)          # explicitly
    with parts.active(): LLM(path)  # or for every engine built inside the block

A replacement may also be given as ``"/path/to/file.py::Name"`` (dots reach into classes). That form travels to the
processes of tensor-parallel ranks, which load the file themselves; live objects cannot.
"""

import importlib.util
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from difflib import get_close_matches
from functools import reduce
from hashlib import sha256
from inspect import getattr_static
from pathlib import Path
from typing import Any, TypeVar

from nanovllm.errors import ConfigError

T = TypeVar("T")
SHIPPED = {"nanovllm.engine.scheduler", "nanovllm.engine.block_manager", "nanovllm.engine.sequence"}


def load_object(spec: str) -> Any:
    """The object that ``"/path/to/file.py::Name.attribute"`` names. The file runs once per content and process."""
    path, _, name = spec.partition("::")
    source = Path(path).read_bytes()
    module_name = f"_nanovllm_part_{Path(path).stem}_{sha256(path.encode() + source).hexdigest()[:16]}"
    module = sys.modules.get(module_name)
    if module is None:
        module_spec = importlib.util.spec_from_file_location(module_name, path)
        assert module_spec is not None and module_spec.loader is not None, f"{path} is not a Python file"
        module = importlib.util.module_from_spec(module_spec)
        sys.modules[module_name] = module  # dataclasses look their module up while the class is being made
        try:
            module_spec.loader.exec_module(module)
        except BaseException:
            del sys.modules[module_name]
            raise
    try:
        return reduce(getattr, name.split("."), module)
    except AttributeError as error:
        raise AttributeError(f"{path} has no {name!r}", name=error.name) from error


def are_shipped(*methods: Any) -> bool:
    """Whether these methods and properties are the engine's own: nobody put others in their place, as a part or by
    hand. A loop over all rows may then do by itself what they would do for most rows."""
    # Not by `__module__`, which `functools.wraps` gives to a wrapper as well.
    functions = [method.fget if type(method) is property else method for method in methods]
    return all(getattr(each, "__globals__", {}).get("__name__") in SHIPPED for each in functions)


class Parts:
    """Replacements by seam name. Immutable; `merged` makes a new one."""

    def __init__(self, replacements: Mapping[str, Any] | None = None) -> None:
        self.replacements: dict[str, Any] = dict(replacements or {})
        for name in self.replacements:
            if not isinstance(name, str):
                raise ConfigError(f'a part is named by text, such as "Sampler" or "BlockManager.free"; got {name!r}')

    def __bool__(self) -> bool:
        return bool(self.replacements)

    def __repr__(self) -> str:
        return f"Parts({self.replacements!r})"

    def merged(self, other: "Parts") -> "Parts":
        """Both sets; `other` wins where they name the same seam."""
        return Parts({**self.replacements, **other.replacements})

    def get(self, name: str, default: T) -> T:
        """The replacement for the seam `name`, or `default`. Raises ConfigError if it cannot be called."""
        found = self.replacements.get(name, default)
        found = load_object(found) if isinstance(found, str) and "::" in found else found
        if name in self.replacements and not callable(found) and not isinstance(found, staticmethod):
            raise ConfigError(f"the part {name!r} must be a class or a function, got {found!r}")
        return found

    def resolve(self, cls: type[T]) -> type[T]:
        """The class to build where the engine would build `cls`.

        That is the replacement of the whole class if there is one, with the replaced methods put on top: a subclass
        made here, so that neither the shipped class nor the learner's is changed.
        """
        base = self.get(cls.__name__, cls)
        owners = {owner.__name__ for owner in cls.__mro__}  # "LLMEngine.generate" holds for an LLM as well
        methods: dict[str, Any] = {}
        for seam in self.replacements:
            owner, _, method = seam.partition(".")
            if method and owner in owners:
                methods[method] = self.get(seam, None)
        for method, function in methods.items():
            # A static method stays one: `plain(seq)` must not receive `self` because it was replaced.
            if isinstance(getattr_static(cls, method, None), staticmethod) and not isinstance(function, staticmethod):
                methods[method] = staticmethod(function)
        return type(base.__name__, (base,), methods) if methods else base

    def misspelt(self) -> list[str]:
        """A sentence for each seam whose name none of the loaded classes has, but one has nearly."""
        modules = [vars(module) for name, module in list(sys.modules.items()) if name.startswith("nanovllm.")]
        classes = {name: value for names in modules for name, value in names.items() if isinstance(value, type)}
        found = []
        for seam in self.replacements:
            owner, _, method = seam.partition(".")
            names = [f"{owner}.{name}" for name in dir(classes[owner])] if owner in classes and method else [*classes]
            wanted = seam if owner in classes else owner
            close = get_close_matches(wanted, names, n=1, cutoff=0.85)
            if close and wanted not in names:
                found.append(f"the part {seam!r} takes no place in this engine; did you mean {close[0]!r}?")
        return found

    def portable(self) -> dict[str, str]:
        """The replacements as text, for another process. Raises ValueError on a live object, naming it."""
        for name, value in self.replacements.items():
            if not (isinstance(value, str) and "::" in value):
                raise ValueError(
                    f"the part {name!r} is a live object ({value!r}), which cannot travel to the processes of "
                    "tensor-parallel ranks; give it as '/path/to/file.py::Name'"
                )
        return self.replacements

    @contextmanager
    def active(self) -> Iterator["Parts"]:
        """Every engine built inside the block uses these parts (on top of those of an enclosing block)."""
        merged = active_parts().merged(self)
        token = _ACTIVE.set(merged)
        try:
            yield merged
        finally:
            _ACTIVE.reset(token)


_NO_PARTS = Parts()
_ACTIVE: ContextVar[Parts] = ContextVar("nanovllm_parts", default=_NO_PARTS)


def active_parts() -> Parts:
    """The parts of the innermost `Parts.active` block, or none."""
    return _ACTIVE.get()


def activate(parts: Parts) -> Parts:
    """Make `parts` the active ones until the next call; returns those before (for `use()` in a notebook cell)."""
    before = _ACTIVE.get()
    _ACTIVE.set(parts)
    return before
