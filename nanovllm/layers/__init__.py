"""Building blocks of the models. They know shapes and tensor-parallel ranks, and nothing of sequences or steps."""

from typing import Protocol, TypeVar

T = TypeVar("T")


class Resolve(Protocol):
    """Gives the class to build where the engine would build `cls`: a learner's replacement, or `cls` itself."""

    def __call__(self, cls: type[T], /) -> type[T]: ...


def shipped(cls: type[T], /) -> type[T]:
    """The `Resolve` without replacements."""
    return cls
