"""The command line: `nanovllm demo | doctor | model | check | bench`. Picks a command and turns errors into one line.

Each command lives in a module of its own, which is imported when the command is called, so that `nanovllm --help` and
`nanovllm model list` need not load torch.
"""

import argparse
import errno
import os
import sys
from collections.abc import Callable
from difflib import get_close_matches
from importlib import import_module
from io import TextIOWrapper

from nanovllm import __version__
from nanovllm.errors import NanoVLLMError

# command -> (module that has `main(argv) -> int | None`, or module:function, what it does)
COMMANDS = {
    "demo": ("nanovllm.demo", "answer eight questions in one batch"),
    "doctor": ("nanovllm.diagnosis", "what this machine has, and what will and will not run on it"),
    "model": ("nanovllm.model_command", "get NAME: fetch a model; list: those that are here"),
    "check": ("nanovllm.workbook.cli:check_command", "grade exercises: all, a chapter (4) or one (4.2)"),
    "hint": ("nanovllm.workbook.cli:hint_command", "the next hint of an exercise"),
    "reveal": ("nanovllm.workbook.cli:reveal_command", "the answer of an exercise, as a diff with yours"),
    "reset": ("nanovllm.workbook.cli:reset_command", "put the stub of an exercise back"),
    "solve": ("nanovllm.workbook.cli:solve_command", "put the authored answer into your file"),
    "progress": ("nanovllm.workbook.cli:progress_command", "every exercise with its last result"),
    "quiz": ("nanovllm.workbook.cli:quiz_command", "the quiz of a chapter"),
    "grade": ("nanovllm.workbook.cli:grade_command", "for teachers: points as JSON or JUnit, a class as CSV"),
    "update": ("nanovllm.workbook.cli:update_command", "take over a newer workbook and keep your answers"),
    "bench": ("nanovllm.bench", "measure the engine"),
}


def positive(text: str) -> int:
    """An option's whole number of at least 1."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be a whole number of at least 1, got {text!r}")
    return int(text)


def usage() -> str:
    lines = [f"  {name:<8} {text}" for name, (_, text) in COMMANDS.items()]
    more = "nanovllm COMMAND --help tells more; nanovllm --version tells the version."
    return "\n".join(["usage: nanovllm COMMAND ...", "", *lines, "", more])


def main(argv: list[str] | None = None) -> int:
    """Run one command and return the process's exit status: 0 done, 1 failed, 2 misused, 130 interrupted."""
    command, *rest = (sys.argv[1:] if argv is None else argv) or [""]
    if sys.stderr is None:  # the caller has closed it, and `print` would take stdout in its place
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115
    for stream in (sys.stdout, sys.stderr):  # a terminal without the character for "passed" shows a ?
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="replace")
    try:
        status = run(command, rest)
        if sys.stdout is not None:  # it is, where the caller has closed it
            sys.stdout.flush()
        return status
    except NanoVLLMError as error:
        print(f"nanovllm {command}: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(f"nanovllm {command}: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:  # `nanovllm model list | head`
        sys.stderr.close()
        return 1
    except OSError as error:  # a read-only folder, a full disk, no such file
        if error.filename is None and error.errno != errno.ENOSPC:
            raise
        where = "" if error.filename is None else f"{error.filename}: "
        print(f"nanovllm {command}: {where}{error.strerror}", file=sys.stderr)
        return 1


def run(command: str, rest: list[str]) -> int:
    """The command's own `main`, which is imported here; `rest` are its arguments."""
    if command in ("", "-h", "--help", "help"):
        print(usage())
        return 0 if command else 2
    if command in ("-V", "--version"):
        print(__version__)
        return 0
    if command not in COMMANDS:
        close = get_close_matches(command, COMMANDS, n=1)
        meant = f"; did you mean {close[0]}?" if close else ""
        print(f"nanovllm: there is no command {command!r}{meant}\n{usage()}", file=sys.stderr)
        return 2
    module, _, function = COMMANDS[command][0].partition(":")
    call: Callable[[list[str]], int | None] = getattr(import_module(module), function or "main")
    return call(rest) or 0
