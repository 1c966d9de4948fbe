"""What the workbook holds: chapters, exercises and where their files are. Reads only the data files beside it.

A `Workbook` is a root folder with `exercises/`, `solutions/` and `tests/` in it; the metadata of the chapters travels
with the package, in `data/chNN.toml`. Knows nothing about pytest, notebooks or torch.
"""

import os
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass, field
from difflib import get_close_matches
from functools import cached_property
from pathlib import Path
from typing import Any

from nanovllm.errors import NanoVLLMError

DATA = Path(__file__).parent / "data"
LAYERS = ("contract", "example", "oracle", "boundary", "invariant")
TARGETS = ("exercises", "solutions", "engine")


class WorkbookError(NanoVLLMError, ValueError):
    """An exercise, chapter or target that does not exist, or a workbook that cannot be found."""


class ExerciseTodo(NanoVLLMError, NotImplementedError):
    """Raised by an exercise that nobody has solved yet: ``raise ExerciseTodo("4.2")``."""

    def __init__(self, exercise_id: str) -> None:
        super().__init__(f"exercise {exercise_id} is still to be written")
        self.exercise_id = exercise_id


@dataclass(frozen=True)
class Exercise:
    """One exercise.

    objects: name in the learner's file -> the shipped object, as ``"package.module::Class.method"``; what stands
    behind ``::`` is the name of the engine's seam. An empty string: the engine has no counterpart (the exercise adds
    one), and ``seam=Name`` names the seam that it takes.
    points: per layer of its tests. replies: test name -> what `hint` says when this test failed.
    """

    id: str
    chapter: str
    file: str
    name: str
    title: str
    minutes: int
    difficulty: int
    points: dict[str, int]
    objects: dict[str, str]
    hints: tuple[str, ...]
    needs: tuple[str, ...] = ()
    replies: dict[str, str] = field(default_factory=dict)
    gpu: bool = False
    timeout: float = 5.0

    @property
    def total_points(self) -> int:
        return sum(self.points.values())

    @property
    def test_file(self) -> str:
        """Path of its grader below the root."""
        return f"tests/ch{int(self.chapter):02d}/test_ex{self.id.replace('.', '_')}_{self.name}.py"

    @property
    def seams(self) -> dict[str, str]:
        """Name in the learner's file -> name of the engine's seam."""
        return {
            name: where.removeprefix("seam=") if where.startswith("seam=") else where.partition("::")[2]
            for name, where in self.objects.items()
        }

    @property
    def in_engine(self) -> bool:
        """Whether the shipped engine has every object of this exercise."""
        return all("::" in where for where in self.objects.values())


@dataclass(frozen=True)
class Chapter:
    """One chapter: its exercises and its quiz, as the data file has them."""

    number: str
    title: str
    file: str
    exercises: tuple[Exercise, ...]
    quiz: tuple[dict[str, Any], ...]
    environment: dict[str, str] = field(default_factory=dict)

    @property
    def total_points(self) -> int:
        return sum(exercise.total_points for exercise in self.exercises)


def read_chapter(path: Path) -> Chapter:
    """One data file (and the quiz file beside it, if there is one)."""
    data = tomllib.loads(path.read_text(encoding="utf-8"))
    number, file = data["chapter"], data["file"]
    exercises = tuple(
        Exercise(
            chapter=number,
            file=file,
            hints=tuple(hint.strip() for hint in entry.pop("hints")),
            needs=tuple(entry.pop("needs", ())),
            **entry,
        )
        for entry in data["exercise"]
    )
    quiz_path = path.with_name(path.name.replace("ch", "quiz", 1))
    quiz = tomllib.loads(quiz_path.read_text(encoding="utf-8"))["question"] if quiz_path.exists() else []
    return Chapter(number, data["title"], file, exercises, tuple(quiz), data.get("environment", {}))


def working_folders() -> tuple[Path, ...]:
    """The current folder and those above it; none if it has been deleted."""
    try:
        return tuple((Path.cwd() / "x").parents)
    except OSError:
        return ()


@dataclass(frozen=True)
class Workbook:
    """A root folder and the catalogue. `answers`: the folder of the learner's files, `exercises/` unless given."""

    root: Path
    answers: Path
    data: Path = DATA

    @classmethod
    def find(cls, root: Path | str | None = None, answers: Path | str | None = None) -> "Workbook":
        """The workbook at `root`; else the one that NANOVLLM_WORKBOOK names; else the one this package stands in.

        Raises WorkbookError where there is none (the package was installed without its repository).
        """
        given = root or os.environ.get("NANOVLLM_WORKBOOK")
        candidates = [Path(given)] if given else [DATA.parents[2], *working_folders()]
        for candidate in candidates:
            if (candidate / "solutions").is_dir() and (candidate / "tests").is_dir():
                resolved = candidate.resolve()
                return cls(resolved, Path(answers).resolve() if answers else resolved / "exercises")
        raise WorkbookError(
            f"no workbook (a folder with exercises/, solutions/ and tests/) at {candidates[0]}; work in a clone of the "
            "repository, or name it with the environment variable NANOVLLM_WORKBOOK"
        )

    @cached_property
    def chapters(self) -> tuple[Chapter, ...]:
        found = [read_chapter(path) for path in self.data.glob("ch*.toml")]
        return tuple(sorted(found, key=lambda chapter: int(chapter.number)))

    @property
    def exercises(self) -> Iterator[Exercise]:
        return (exercise for chapter in self.chapters for exercise in chapter.exercises)

    @property
    def solutions(self) -> Path:
        return self.root / "solutions"

    @property
    def state(self) -> Path:
        """What the workbook remembers about the learner; git ignores it."""
        return self.answers / ".state"

    def environment(self) -> dict[str, str]:
        """What must be in the environment before answers are graded, on a CPU as ever: Triton's interpreter."""
        return {name: value for chapter in self.chapters for name, value in chapter.environment.items()}

    def chapter(self, number: str | int | float) -> Chapter:
        """The chapter "4" (also 4, "04" or "ch4")."""
        wanted = str(number).lower().removeprefix("ch").lstrip("0")
        for chapter in self.chapters:
            if chapter.number == wanted:
                return chapter
        raise WorkbookError(f"there is no chapter {number!r}; chapters with exercises: {self._list_chapters()}")

    def exercise(self, exercise_id: str | float) -> Exercise:
        """The exercise "4.2" (also 4.2, "ex4.2" or its name)."""
        wanted = str(exercise_id).strip().lower().removeprefix("ex").strip()
        for exercise in self.exercises:
            if wanted in (exercise.id, exercise.name.lower()):
                return exercise
        ids = [exercise.id for exercise in self.exercises]
        close = get_close_matches(wanted, ids, n=3)
        meant = f"did you mean {' or '.join(close)}?" if close else f"there are {', '.join(ids)}"
        raise WorkbookError(f"there is no exercise {exercise_id!r}; {meant}")

    def select(self, *wanted: str | int | float) -> list[Exercise]:
        """Exercises by id ("4.2") or whole chapters ("4"), in the order of the workbook; nothing: all of them."""
        if not wanted:
            return list(self.exercises)
        ids: set[str] = set()
        for item in wanted:
            text = str(item).lower().removeprefix("ch").lstrip("0")
            if text.isdecimal():
                ids.update(exercise.id for exercise in self.chapter(text).exercises)
            else:
                ids.add(self.exercise(item).id)
        return [exercise for exercise in self.exercises if exercise.id in ids]

    def source(self, exercise: Exercise, target: str) -> Path:
        """The file that holds the answer on a target (the engine has none: see `Exercise.objects`)."""
        if target not in ("exercises", "solutions"):
            raise WorkbookError(f"target must be one of {', '.join(TARGETS)}; got {target!r}")
        return (self.answers if target == "exercises" else self.solutions) / exercise.file

    def specs(self, exercise: Exercise, target: str) -> dict[str, str]:
        """Object name -> what `load_object` or the import system loads it from."""
        if target == "engine":
            return {name: where for name, where in exercise.objects.items() if "::" in where}
        path = self.source(exercise, target)
        return {name: f"{path}::{name}" for name in exercise.objects}

    def prerequisites(self, exercise: Exercise) -> list[Exercise]:
        """Everything that the exercise stands on, however far, in the order of the workbook."""
        found: dict[str, Exercise] = {}
        queue = list(exercise.needs)
        while queue:
            needed = self.exercise(queue.pop())
            if needed.id not in found:
                found[needed.id] = needed
                queue.extend(needed.needs)
        return [other for other in self.exercises if other.id in found]

    def _list_chapters(self) -> str:
        return ", ".join(f"{chapter.number} ({chapter.title})" for chapter in self.chapters)
