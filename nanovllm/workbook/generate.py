"""Write the learner's files from the authored ones: ``python -m nanovllm.workbook.generate [--check]``.

The same input gives the same bytes. `--check` writes nothing and exits 1 where a committed stub differs; that check is
for the repository alone: in a learner's tree the files differ because they were solved.
"""

import argparse
import sys
from pathlib import Path

from nanovllm.workbook.catalogue import Workbook
from nanovllm.workbook.sources import stub_text
from nanovllm.workbook.state import keep_copy, write_text


def stubs(workbook: Workbook) -> dict[Path, str]:
    """Path of each learner's file -> its text with nothing solved."""
    return {
        workbook.answers / chapter.file: stub_text((workbook.solutions / chapter.file).read_text(encoding="utf-8"))
        for chapter in workbook.chapters
    }


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m nanovllm.workbook.generate", description=__doc__)
    parser.add_argument("--check", action="store_true", help="compare only; exit 1 on a difference")
    parser.add_argument("--only", metavar="CHAPTER", action="append", help="this chapter only (may be repeated)")
    args = parser.parse_args(argv)
    workbook = Workbook.find()
    wanted = {workbook.chapter(number).file for number in args.only or ()}
    status = 0
    for path, text in stubs(workbook).items():
        if wanted and path.name not in wanted:
            continue
        current = path.read_bytes().decode("utf-8", errors="replace") if path.exists() else None
        if current == text:
            continue
        if args.check:
            print(f"{path.name}: differs from what solutions/{path.name} generates")
            status = 1
        else:
            if current is not None:
                print(f"{path.name}: the file that stood here is kept as {keep_copy(workbook, path)}")
            write_text(path, text)
            print(f"{path.name}: written")
    return status


if __name__ == "__main__":
    sys.exit(main())
