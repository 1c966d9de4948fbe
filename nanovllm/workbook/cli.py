"""The workbook on the command line: `nanovllm check 4`, `nanovllm hint 4.2`, `nanovllm grade --class folder` …"""

import argparse
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path

from nanovllm.cli import positive
from nanovllm.workbook.checking import check
from nanovllm.workbook.classroom import (
    ClassOptions,
    grade,
    grade_class,
    misnamed,
    read_rows,
    totals,
    without_answers,
)  # fmt: skip
from nanovllm.workbook.helping import hint, progress, reset, reveal, solve
from nanovllm.workbook.quizzes import answer, quiz
from nanovllm.workbook.updating import update


def check_command(argv: list[str]) -> int:
    """Grade exercises: all, a chapter ("4") or one ("4.2"). Exit 1 while anything asked for is not passed."""
    parser = argparse.ArgumentParser(prog="nanovllm check", description=check_command.__doc__)
    parser.add_argument("exercises", nargs="*", metavar="4 or 4.2", help="default: everything")
    parser.add_argument("--target", choices=("exercises", "solutions", "engine"), default="exercises")
    parser.add_argument("--chain", action="store_true", help="build on your own earlier answers")
    args = parser.parse_args(argv)
    result = check(*args.exercises, target=args.target, chain=args.chain)
    print(result)
    return 0 if result.passed else 1


def hint_command(argv: list[str]) -> int:
    """The next hint of an exercise; the first one answers the test that failed in your last check."""
    parser = argparse.ArgumentParser(prog="nanovllm hint", description=hint_command.__doc__)
    parser.add_argument("exercise", metavar="4.2")
    parser.add_argument("--level", type=int, choices=(1, 2, 3, 4))
    args = parser.parse_args(argv)
    print(hint(args.exercise, args.level))
    return 0


def reveal_command(argv: list[str]) -> int:
    """The answer of an exercise as a diff with your file."""
    parser = argparse.ArgumentParser(prog="nanovllm reveal", description=reveal_command.__doc__)
    parser.add_argument("exercise", metavar="4.2")
    parser.add_argument("--sure", action="store_true", help="do not ask, even if the exercise is not solved")
    args = parser.parse_args(argv)
    print(reveal(args.exercise, sure=args.sure))
    return 0


def reset_command(argv: list[str]) -> int:
    """Put stubs back; a copy of your file is kept."""
    parser = argparse.ArgumentParser(prog="nanovllm reset", description=reset_command.__doc__)
    parser.add_argument("exercises", nargs="+", metavar="4 or 4.2")
    print(reset(*parser.parse_args(argv).exercises))
    return 0


def solve_command(argv: list[str]) -> int:
    """Put the authored answers into your file; a copy of your file is kept."""
    parser = argparse.ArgumentParser(prog="nanovllm solve", description=solve_command.__doc__)
    parser.add_argument("exercises", nargs="+", metavar="4 or 4.2")
    print(solve(*parser.parse_args(argv).exercises))
    return 0


def progress_command(argv: list[str]) -> int:
    """Every exercise with its last result."""
    argparse.ArgumentParser(prog="nanovllm progress", description=progress_command.__doc__).parse_args(argv)
    print(progress())
    return 0


def quiz_command(argv: list[str]) -> int:
    """The quiz of a chapter; with a number and an answer, whether the answer is right."""
    parser = argparse.ArgumentParser(prog="nanovllm quiz", description=quiz_command.__doc__)
    parser.add_argument("chapter", help="its number: 4, say")
    parser.add_argument("number", nargs="?", type=int, help="of the question")
    parser.add_argument("answer", nargs="*", default=[], help="b, say, or what the question asks for")
    args = parser.parse_args(argv)
    print(answer(args.chapter, args.number, " ".join(args.answer)) if args.number else quiz(args.chapter))
    return 0


def update_command(argv: list[str]) -> int:
    """Take over the newest version of the workbook (git pull), and keep your answers, committed or not."""
    argparse.ArgumentParser(prog="nanovllm update", description=update_command.__doc__).parse_args(argv)
    print(update())
    return 0


def grade_command(argv: list[str]) -> int:
    """For teachers. One tree: points as text or JSON, JUnit beside it. A class: one folder a student, a CSV out.

    Students' code runs with your rights: this is no sandbox, so grade in a container or under an account of its own.
    """
    parser = argparse.ArgumentParser(prog="nanovllm grade", description=grade_command.__doc__)
    parser.add_argument("exercises", nargs="*", metavar="4 or 4.2", help="default: everything")
    parser.add_argument("--answers", metavar="DIR", help="folder with the chNN_*.py files (default: exercises/)")
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    parser.add_argument("--junit", metavar="FILE", help="write a JUnit file as well")
    parser.add_argument("--chain", action="store_true", help="exercises build on the student's own earlier answers")
    parser.add_argument("--seed", type=int, default=0, help="of the random cases")
    parser.add_argument("--class", dest="students", metavar="DIR", help="class mode: one folder per student in DIR")
    parser.add_argument("--csv", metavar="FILE", help="class mode: where the rows go (default: grades.csv)")
    parser.add_argument("--jobs", type=positive, metavar="N", default=max(1, (os.cpu_count() or 2) // 2),
                        help="class mode: at a time (default: half the processors)")  # fmt: skip
    parser.add_argument("--resume", action="store_true", help="class mode: keep the rows that the CSV holds already")
    parser.add_argument("--seconds", type=positive, metavar="N", default=60,
                        help="class mode: limit per student and exercise (default: 60)")  # fmt: skip
    parser.add_argument("--memory-mb", type=positive, metavar="N", default=4096,
                        help="class mode: the same, beyond what the libraries take (default: 4096)")  # fmt: skip
    args = parser.parse_args(argv)
    if args.students and (args.json or args.junit or args.answers):
        parser.error("--json, --junit and --answers are for one tree; a class (--class) gives a CSV")
    if not args.students and (args.csv or args.resume):
        parser.error("--csv and --resume are for a class: name its folder with --class")
    if args.students:
        options = ClassOptions(args.chain, args.seed, args.jobs, args.seconds, args.memory_mb)
        output = Path(args.csv or "grades.csv")
        try:
            count = grade_class(Path(args.students), output, tuple(args.exercises), options, args.resume)
        except KeyboardInterrupt:
            print(f"What is finished is in {output}; the same command with --resume goes on.", file=sys.stderr)
            raise
        if missing := without_answers(Path(args.students), tuple(args.exercises)):
            names = ", ".join(missing[:20]) + (", …" if len(missing) > 20 else "")
            told = f"No chNN_*.py file of these exercises directly in {len(missing)} of the folders: {names}"
            print(told, file=sys.stderr)
        near = misnamed(Path(args.students), tuple(args.exercises))
        for told in near[:20] + ([f"… and {len(near) - 20} more of this kind"] if len(near) > 20 else []):
            print(told, file=sys.stderr)
        print(f"{count} rows graded into {output} (seed {args.seed})\n\n{totals(read_rows(output))}")
        return 0
    result = grade(*args.exercises, answers=args.answers, seed=args.seed, chain=args.chain, junit=args.junit)
    table = result.pop("table")
    for told in result["missing"]:
        print(f"{told} Its exercises count as TODO.", file=sys.stderr)
    print(json.dumps(result, indent=1) if args.json else table)
    return 0


COMMANDS: dict[str, Callable[[list[str]], int]] = {
    "check": check_command,
    "hint": hint_command,
    "reveal": reveal_command,
    "reset": reset_command,
    "solve": solve_command,
    "progress": progress_command,
    "quiz": quiz_command,
    "grade": grade_command,
    "update": update_command,
}


def main(argv: list[str] | None = None) -> int:
    """`nanovllm check …`. The other commands: ``main(["hint", "4.2"])``; `check` may be left out."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    command = COMMANDS.get(arguments[0]) if arguments else None
    return command(arguments[1:]) if command else check_command(arguments)
