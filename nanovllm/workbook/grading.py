"""What a grader works with: the answer on trial, calls that are recorded, and comparisons that explain themselves.

A grader is a file `tests/chNN/test_exN_M_name.py` of functions `test_<layer>__<what>(answer)`. Its docstring's first
sentence is the rule that a wrong answer breaks. Nothing here knows pytest, so the same functions also run in plain
processes (`run_grader`), and nothing imports torch.
"""

import ast
import copy
import linecache
import numbers
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from importlib import import_module
from random import Random
from types import TracebackType
from typing import Any, NoReturn

from nanovllm.engine.parts import Parts, load_object
from nanovllm.workbook.catalogue import Exercise, ExerciseTodo, Workbook

MAX_CALLS = 6  # lines of the story that a failure shows
WIDTH = 110


class Rejected(AssertionError):
    """An answer broke a rule. `str()` is what the learner reads, without head and foot."""

    def __init__(self, story: list[str], got: str, expected: str, rule: str) -> None:
        self.story, self.got, self.expected, self.rule = story, got, expected, rule
        super().__init__("\n".join(self.lines()))

    def lines(self) -> list[str]:
        """At most 12 lines: the calls, got, expected, rule."""
        shown = self.story
        if len(shown) > MAX_CALLS:
            shown = [shown[0], f"… {len(shown) - MAX_CALLS + 1} more calls …", *shown[-(MAX_CALLS - 2) :]]
        rows = [*(("call" if number == 0 else "", line) for number, line in enumerate(shown))]
        rows += [("got", self.got), ("expected", self.expected), ("rule", self.rule)]
        return [f"{name:<9} {clip(text, WIDTH * 2)}" for name, text in rows]


class NotRunHere(Exception):
    """This machine lacks what a grader needs (a GPU, say)."""


class TimeUp(BaseException):
    """The test's time is over. Not an Exception, so that an answer's own `except Exception` cannot hold it up."""


class NotTried(TimeUp):
    """A test that is not run, since others of its exercise have run into their time limits."""


def clip(text: str, width: int) -> str:
    """One line of at most `width` characters."""
    flat = " ".join(text.split())
    return flat if len(flat) <= width else flat[: width - 1] + "…"


def show(value: Any, width: int = 200) -> str:
    """A value as a failure shows it: small ones whole, of a tensor its shape, type and (few) numbers."""
    if isinstance(value, (list, tuple)) and holds_tensor(value):
        return clip(f"[{', '.join(show(item, width) for item in value)}]", width)
    if is_tensor(value):
        head = f"tensor {list(value.shape)} {str(value.dtype).removeprefix('torch.')}"
        return clip(f"{head} {_short(value.tolist())}" if value.numel() <= 24 else head, width)
    try:
        return clip(repr(value), width)
    except Exception as error:
        return f"<{type_of(value)} whose repr raises {type(error).__name__}>"


def _short(numbers: Any) -> Any:
    """Numbers of a tensor with six digits: more say nothing, and take the place of those behind them."""
    if isinstance(numbers, list):
        return [_short(number) for number in numbers]
    return float(f"{numbers:.6g}") if isinstance(numbers, float) else numbers


def is_tensor(value: Any) -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.Tensor)


def difference(got: Any, expected: Any, tolerance: float | None = None) -> str | None:
    """None where `got` is as good as `expected`; else what differs: "[2, 0]: got 3.5, expected 3; 1 of 12 differ".

    Numbers must be numbers (a bool is none, and an int is not a float), lists and tuples may stand for each other,
    tensors must agree in shape, dtype and, within `tolerance`, in values. "": there is nothing to say but the values.
    """
    found = _compare(got, expected, tolerance)
    return None if found is None else ": ".join(filter(None, found))


def type_of(value: Any) -> str:
    """ "an int", "a list": the type of a value with its article."""
    name = type(value).__name__
    return f"{'an' if name[0].lower() in 'aeio' else 'a'} {name}"


def holds_tensor(value: Any) -> bool:
    """Whether a value is a tensor, or a list or tuple with one in it."""
    return is_tensor(value) or (isinstance(value, (list, tuple)) and any(map(holds_tensor, value)))


def _compare(got: Any, expected: Any, tolerance: float | None) -> tuple[str, str] | None:
    """The first place that differs, as an index ("[2]", "" for the value itself), and what is wrong there."""
    if is_tensor(expected):
        return _compare_tensors(got, expected, tolerance)
    if type(expected).__name__ == "ndarray":
        if type(got) is not type(expected):
            return "", f"{type_of(got)}, not a numpy array"
        if got.shape != expected.shape or got.dtype != expected.dtype:
            return "", f"{got.dtype} {list(got.shape)}, not {expected.dtype} {list(expected.shape)}"
        return _compare(got.tolist(), expected.tolist(), tolerance)
    wrong_type = _wrong_type(got, expected)
    if wrong_type:
        return "", f"{type_of(got)}, not {wrong_type}"
    if isinstance(expected, (list, tuple)):
        return _compare_items(got, expected, range(min(len(got), len(expected))), tolerance)
    if isinstance(expected, Mapping):
        if set(got) != set(expected):
            return "", "other keys"
        return _compare_items(got, expected, expected, tolerance)
    if isinstance(expected, float) and abs(float(got) - expected) <= (tolerance or 0.0):
        return None
    same = got is expected if isinstance(expected, bool) or expected is None else got == expected
    return None if same else ("", "")


def _wrong_type(got: Any, expected: Any) -> str:
    """What `got` should have been, where its type is a wrong one; else ""."""
    if isinstance(expected, bool) or expected is None:
        return ""
    if isinstance(expected, int):
        return "" if isinstance(got, numbers.Integral) and not isinstance(got, bool) else "an int"
    if isinstance(expected, float):
        return "" if isinstance(got, numbers.Real) and not isinstance(got, bool) else "a number"
    if isinstance(expected, (list, tuple)):
        return "" if isinstance(got, (list, tuple)) else "a list"
    return "a dict" if isinstance(expected, Mapping) and not isinstance(got, Mapping) else ""


def _compare_items(got: Any, expected: Any, keys: Iterable[Any], tolerance: float | None) -> tuple[str, str] | None:
    """The same for what stands under `keys` of two lists or dicts."""
    wrong = [(key, found) for key in keys if (found := _compare(got[key], expected[key], tolerance)) is not None]
    length = "" if len(got) == len(expected) else f"{len(got)} items, not {len(expected)}"
    if not wrong:
        return ("", length) if length else None
    key, (place, what) = wrong[0]
    if not what:
        what = f"got {show(got[key], 60)}, expected {show(expected[key], 60)}"
        what += f"; {length}" if length else f"; {len(wrong)} of {len(expected)} differ"
    return f"[{key!r}]{place}", what


def _compare_tensors(got: Any, expected: Any, tolerance: float | None) -> tuple[str, str] | None:
    torch = sys.modules["torch"]
    if not is_tensor(got):
        return "", f"{type_of(got)}, not a tensor"
    if got.shape != expected.shape:
        return "", f"shape {list(got.shape)}, not {list(expected.shape)}"
    if got.dtype != expected.dtype:
        return "", f"dtype {got.dtype}, not {expected.dtype}"
    mine, right = got.detach().double(), expected.detach().double()
    wrong = torch.isclose(mine, right, rtol=0.0, atol=tolerance or 0.0, equal_nan=True).logical_not()
    if not wrong.any():
        return None
    index = tuple(wrong.nonzero()[0].tolist())
    one, other = mine[index].item(), right[index].item()
    digits = next(digits for digits in (6, 9, 17) if digits == 17 or f"{one:.{digits}g}" != f"{other:.{digits}g}")
    values = f"got {one:.{digits}g}, expected {other:.{digits}g}"
    return str(list(index)) if index else "", f"{values}; {int(wrong.sum())} of {wrong.numel()} differ"


class Answer:
    """The answer on trial. Objects of the exercise are attributes: ``answer.blocks_needed(8, 4)``.

    parts: what the engine must be built from to run on it (empty for the shipped engine).
    story: the recorded calls of the test that is running. rule: the sentence shown when it fails.
    """

    def __init__(self, exercise: Exercise, objects: Mapping[str, Any], parts: Parts, seed: int = 0) -> None:
        self.exercise, self.objects, self.parts = exercise, dict(objects), parts
        self.story: list[str] = []
        self.rule = ""
        self.rng = Random(seed)

    def __getattr__(self, name: str) -> Any:
        if name in self.__dict__.get("objects", ()):
            return self.objects[name]
        raise AttributeError(f"exercise {self.exercise.id} has no object {name!r}")

    def note(self, text: str) -> None:
        """Add a line to the story."""
        self.story.append(clip(text, WIDTH))

    @contextmanager
    def about(self, rule: str) -> Iterator[None]:
        """The rule of what is done inside, in place of the test's own (its docstring's first sentence)."""
        before, self.rule = self.rule, rule
        yield
        self.rule = before  # not after an error: it is judged by the rule that it broke

    def call(self, name: str, *args: Any, **options: Any) -> Any:
        """Call an object of the exercise. The call is recorded, and the arguments must come out unchanged."""
        shown = [show(arg, 60) for arg in args] + [f"{key}={show(value, 60)}" for key, value in options.items()]
        text = f"{name}({', '.join(shown)})"
        self.note(text)
        before = copy.deepcopy((args, options))
        result = self.objects[name](*args, **options)
        if difference([*args, *options.values()], [*before[0], *before[1].values()]) is not None:
            seen = f"afterwards the arguments are {show(args)}"
            self.reject(seen, "arguments unchanged", "It may not change its inputs.")
        return result

    def build(
        self, cls: type[Any], *args: Any, label: str | None = None, replaced: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> Any:  # fmt: skip
        """An object of the engine's class `cls` with the answer in place of its seams; its calls are recorded.

        replaced: further seams to replace, for this object alone (a hash that always collides, say).
        """
        label = label or cls.__name__.lower()
        shown = [show(arg, 60) for arg in args] + [f"{key}={show(value, 60)}" for key, value in options.items()]
        self.note(f"{label} = {cls.__name__}({', '.join(shown)})")
        parts = self.parts.merged(Parts(replaced)) if replaced else self.parts
        return Watched(self, label, parts.resolve(cls)(*args, **options))

    def watch(self, value: Any, label: str) -> Any:
        """`value` behind a proxy that records the calls of its methods."""
        return Watched(self, label, value)

    def equal(
        self, got: Any, expected: Any, rule: str | None = None, tolerance: float | None = None, name: str = ""
    ) -> None:
        """Reject the answer unless `got` is as good as `expected` (see `difference`).

        name: what the learner calls the value, shown before the place that differs ("k_cache[1, 2, 0, 0]").
        """
        found = _compare(got, expected, tolerance)
        if found is None:
            return
        place, what = found
        # Where a value is too large to be shown whole, the place where it differs says more. A type may not be seen.
        tell = what and (holds_tensor(got) or len(show(got)) > 90 or ", not a" in what)
        where = ": ".join(filter(None, (name + place, what)))
        self.reject(f"{show(got, 90)} ({where})" if tell else show(got, 180), show(expected, 180), rule)

    def require(self, holds: bool, got: Any, expected: str, rule: str | None = None) -> None:
        """Reject the answer unless `holds`; `got` is what was seen, `expected` says what would be right."""
        if not holds:
            self.reject(got if isinstance(got, str) else show(got), expected, rule)

    def raises(self, kind: type[BaseException], act: Callable[[], Any], rule: str | None = None) -> BaseException:
        """Reject the answer unless `act()` raises a `kind`; returns the error."""
        try:
            result = act()
        except ExerciseTodo:
            raise
        except kind as error:
            return error
        self.reject(show(result), f"a {kind.__name__}", rule)

    def reject(self, got: str, expected: str, rule: str | None = None) -> NoReturn:
        raise Rejected(self.story, got, expected, rule or self.rule) from None


class Watched:
    """A proxy that records method calls in the answer's story; `raw` is the object itself."""

    def __init__(self, answer: Answer, label: str, raw: Any) -> None:
        object.__setattr__(self, "_answer", answer)
        object.__setattr__(self, "_label", label)
        object.__setattr__(self, "raw", raw)

    def __getattr__(self, name: str) -> Any:
        value = getattr(self.raw, name)
        if not callable(value) or isinstance(value, type):
            return value

        def recorded(*args: Any, **options: Any) -> Any:
            plain = [unwatched(arg) for arg in args]
            shown = [name_of(arg) for arg in args] + [f"{key}={name_of(arg)}" for key, arg in options.items()]
            self._answer.note(f"{self._label}.{name}({', '.join(shown)})")
            result = value(*plain, **{key: unwatched(arg) for key, arg in options.items()})
            if result is not None:
                self._answer.story[-1] += f" -> {show(result, 60)}"
            return result

        return recorded

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self.raw, name, value)

    def __len__(self) -> int:
        return len(self.raw)

    def __repr__(self) -> str:
        return f"{self._label}"


def unwatched(value: Any) -> Any:
    """The object behind the proxy, where there is one."""
    return value.raw if type(value) is Watched else value


def name_of(value: Any) -> str:
    return repr(value) if type(value) is Watched else show(value, 60)


def learner_frame(traceback: TracebackType | None, folders: tuple[str, ...]) -> tuple[str, int, str] | None:
    """(file, line number, function) of the innermost frame in a file below one of `folders`."""
    found = None
    while traceback is not None:
        code = traceback.tb_frame.f_code
        if code.co_filename.startswith(folders):
            found = code.co_filename, traceback.tb_lineno, code.co_name
        traceback = traceback.tb_next
    return found


def in_the_kernel(error: BaseException) -> BaseException:
    """What Triton's interpreter has wrapped: the error in the kernel itself, with the kernel's own line."""
    wrapped = type(error).__name__ == "InterpreterError" and error.__cause__ is not None
    return error.__cause__ if wrapped else error  # type: ignore[return-value]


def describe_error(error: BaseException, workbook: Workbook) -> str:
    """An exception in one line, with the learner's line where it came from."""
    said = clip(f"{type(error).__name__}: {error}" if str(error) else type(error).__name__, 120)
    if isinstance(error, SyntaxError) and error.filename and error.lineno:
        return f"{type(error).__name__}: {error.msg} (line {error.lineno}: {(error.text or '').strip()})"
    frame = learner_frame(error.__traceback__, (str(workbook.answers), str(workbook.solutions)))
    if frame is None:
        return said
    file, line, function = frame
    text = clip(linecache.getline(file, line).strip(), 60)
    return f"{said}  in {function}, line {line}: {text}"


def preload(workbook: Workbook, exercise: Exercise, target: str = "exercises") -> None:
    """Import what an answer imports (the authored file tells), before any clock runs; on the engine, its parts too.

    The first import of torch takes seconds, and an import that is cut short stays broken for the whole process.
    """
    modules: list[str] = []
    for node in ast.parse((workbook.solutions / exercise.file).read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Import):
            modules += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            modules.append(node.module)
    if target == "engine":
        modules += [where.partition("::")[0] for where in exercise.objects.values() if "::" in where]
    for module in modules:
        import_module(module)


def load_answer(
    workbook: Workbook, exercise: Exercise, target: str = "exercises", chain: bool = False, seed: int = 0,
    file: str | None = None,
) -> Answer:  # fmt: skip
    """The answer to one exercise on a target; with `chain`, on top of the answers that it needs.

    file: take the objects from this file instead (how wrong answers are tried).
    Raises ExerciseTodo where the learner has no file yet, NotRunHere where the engine has no such part, and whatever
    running the learner's file raises.
    """
    if target == "engine" and not exercise.in_engine:
        raise NotRunHere("the shipped engine has no such part")
    specs = {name: f"{file}::{name}" for name in exercise.objects} if file else workbook.specs(exercise, target)
    if target == "exercises" and not file and not workbook.source(exercise, target).exists():
        raise ExerciseTodo(exercise.id)
    objects = {name: _load(spec, name) for name, spec in specs.items()}
    replaced: dict[str, Any] = {}
    if target != "engine":
        for needed in workbook.prerequisites(exercise) if chain else ():
            replaced |= {needed.seams[name]: spec for name, spec in workbook.specs(needed, target).items()}
        replaced |= {exercise.seams[name]: spec for name, spec in specs.items()}
    return Answer(exercise, objects, Parts(replaced), seed)


def _load(spec: str, name: str) -> Any:
    path, _, dotted = spec.partition("::")
    try:
        if path.endswith(".py"):
            return load_object(spec)
        value = __import__(path, fromlist=["_"])
        for part in dotted.split("."):
            value = getattr(value, part)
        return value
    except ModuleNotFoundError as error:
        if error.name != "triton":
            raise
        raise NotRunHere("the package triton is not installed here") from error
    except AttributeError as error:
        if error.name != name:
            raise
        story, rule = [f"loading {path.rpartition('/')[2]}"], "The names that the exercise gives must stay."
        raise Rejected(story, f"no {name!r} in the file", f"a definition of {name!r}", rule) from None
