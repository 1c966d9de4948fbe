"""Take over a newer version of the workbook and keep what the learner has written: `nanovllm update`.

It does what `git pull` does, and settles beforehand what git would ask about. Three kinds of files may have changed on
both sides since the last update:

exercises/*.py   both changes are kept, line by line; where both changed the very same lines, the learner's stay
notebooks        the new page is taken (outputs of a page are made again by running it)
anything else    the update stops before it changes anything, and names the files

Of every file that it changes and the learner had changed, a copy is kept first. Works with answers that are committed
and with answers that are not. Knows git's command line, nothing of remotes' addresses or passwords.
"""

import ast
import subprocess
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path

from nanovllm.workbook import state
from nanovllm.workbook.catalogue import Workbook, WorkbookError
from nanovllm.workbook.outcomes import Shown
from nanovllm.workbook.sources import definition, put_definition


class Clone:
    """The git clone that the workbook lies in."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def run(self, *arguments: str) -> subprocess.CompletedProcess[bytes]:
        """Any git command; the caller looks at the exit status."""
        try:
            command = ["git", "-c", "core.quotePath=false", *arguments]
            return subprocess.run(command, cwd=self.root, stdin=subprocess.DEVNULL, capture_output=True)
        except FileNotFoundError:
            raise WorkbookError("git is not installed; an update needs it") from None

    def ask(self, *arguments: str) -> str:
        """What a git command says. Raises WorkbookError with git's own words where it fails."""
        done = self.run(*arguments)
        if done.returncode:
            said = done.stderr.decode(errors="replace").strip() or done.stdout.decode(errors="replace").strip()
            raise WorkbookError(f"git {' '.join(arguments[:2])} failed: {said}")
        return done.stdout.decode(errors="replace").strip()

    def names(self, *arguments: str) -> set[str]:
        """The paths that a git command lists."""
        return set(self.ask(*arguments).splitlines()) - {""}

    def content(self, commit: str, name: str) -> bytes | None:
        """A file as it was in a commit, or None."""
        done = self.run("show", f"{commit}:{name}")
        return None if done.returncode else done.stdout


def update(workbook: Workbook | None = None) -> Shown:
    """Fetch the newest version from where the clone came from, and take it over. Tells what it did, file by file."""
    workbook = workbook or Workbook.find()
    clone = Clone(workbook.root)
    check_clone(clone)
    clone.ask("fetch", "--quiet")
    base, theirs = clone.ask("merge-base", "HEAD", "@{upstream}"), clone.ask("rev-parse", "@{upstream}")
    if base == theirs:
        return Shown("This is the newest version; nothing was changed.")
    changed = partial(clone.names, "diff", "--name-only", "--no-renames")
    both = sorted((changed(base) | changed(base, "HEAD")) & changed(base, theirs))
    settled = {name: settle(clone, name, base, theirs) for name in both}
    if unsettled := [name for name, result in settled.items() if result is None]:
        raise WorkbookError(
            f"you and the update have both changed {', '.join(unsettled)}, which is for you to settle: undo your "
            f"change (git checkout {base[:8]} -- {unsettled[0]}) or merge it yourself (git pull). Nothing was changed"
        )
    lines: list[str] = []
    for name, result in settled.items():
        path = clone.root / name
        kept = f"; what stood there is kept in {state.keep_copy(workbook, path)}" if path.exists() else ""
        lines.append(f"{name}: {result[1]}{kept}" if result else name)
    take_over(clone, base, theirs, {name: result[0] for name, result in settled.items() if result})
    head = f"Updated from {base[:8]} to {theirs[:8]}; your answers are in their places."
    return Shown("\n".join([head, *lines, "Run `make lab` (or `make test`) next: it renews what was installed."]))


def check_clone(clone: Clone) -> None:
    """Raise WorkbookError where an update cannot work, before anything is fetched."""
    top = clone.run("rev-parse", "--show-toplevel")
    if top.returncode or Path(top.stdout.decode().strip()).resolve() != clone.root.resolve():
        raise WorkbookError(
            f"{clone.root} is not a git clone. Clone the repository beside it, and copy your chNN_*.py into its "
            "exercises/"
        )
    if clone.run("rev-parse", "--quiet", "--verify", "@{upstream}").returncode:
        raise WorkbookError(
            "this branch follows no other, so there is nothing to update from; name it once with, for example: "
            "git branch --set-upstream-to=origin/main"
        )
    if not clone.run("rev-parse", "--quiet", "--verify", "MERGE_HEAD").returncode:
        raise WorkbookError("a merge is under way; end it first (git merge --continue, or git merge --abort)")


def settle(clone: Clone, name: str, base: str, theirs: str) -> tuple[bytes | None, str] | None:
    """What a file that both sides changed becomes, and why; None where that is for the learner to say.

    The content None: the file is gone.
    """
    path = clone.root / name
    mine = path.read_bytes() if path.exists() else None
    old, new = clone.content(base, name), clone.content(theirs, name)
    if mine == new or mine is None:
        return new, "the new version"
    if name.startswith("notebooks/"):
        return new, "the new page; run it to see its outputs"
    if not name.startswith("exercises/") or old is None:
        return None
    if new is None:
        return mine, "is no longer part of the workbook; yours stays"
    return merged(mine, old, new), "your answers in the new file"


def merged(mine: bytes, old: bytes, new: bytes) -> bytes:
    """Both changes in one file; the learner's where they touch the same lines, and every definition of the new file.

    If that gives no Python although the learner's file is Python, the learner's definitions are put into the new file.
    """
    with tempfile.TemporaryDirectory(prefix="nanovllm-update-") as folder:
        files = [Path(folder) / name for name in ("mine", "old", "new")]
        for file, content in zip(files, (mine, old, new), strict=True):
            file.write_bytes(content)
        result = Clone(Path(folder)).run("merge-file", "--ours", "-p", *map(str, files)).stdout
    if definitions(mine) is None or definitions(new) is None:
        return result
    if definitions(result) is None:
        return transplanted(mine, new, lambda name, source: "raise ExerciseTodo(" not in source)
    # What the update adds at the end is lost where the learner has added something at the same place.
    return transplanted(new, result, lambda name, source: name not in (definitions(result) or {}))


def definitions(content: bytes) -> dict[str, str] | None:
    """Name -> source of every top-level function and class; None where the content is no Python."""
    try:
        text = content.decode()
        body = ast.parse(text).body
    except (SyntaxError, ValueError):
        return None
    names = [node.name for node in body if isinstance(node, (ast.FunctionDef, ast.ClassDef))]
    return {name: definition(text, name) or "" for name in names}


def transplanted(origin: bytes, target: bytes, wanted: Callable[[str, str], bool]) -> bytes:
    """`target` with the wanted definitions of `origin`, in their places or at the end."""
    text = target.decode()
    for name, source in (definitions(origin) or {}).items():
        if wanted(name, source):
            text = put_definition(text, name, source)
    return text.encode()


def take_over(clone: Clone, base: str, theirs: str, settled: dict[str, bytes | None]) -> None:
    """Move the branch to the new version, with the settled files as they shall be.

    Files that both sides changed are put back for a moment, so that git finds nothing in its way; if anything fails
    they are what they were before.
    """
    before = {name: path.read_bytes() if (path := clone.root / name).exists() else None for name in settled}
    has_own_commits = clone.ask("rev-parse", "HEAD") != base
    try:
        for name in settled:
            in_head = clone.content("HEAD", name) is not None
            clone.ask("checkout", "HEAD", "--", name) if in_head else write(clone.root / name, None)
        if has_own_commits:
            clone.run("merge", "--no-commit", "--no-ff", theirs)  # its conflicts are in files that are settled
            clone.ask("rev-parse", "--verify", "MERGE_HEAD")
        else:
            clone.ask("merge", "--ff-only", theirs)
        for name, content in settled.items():
            write(clone.root / name, content)
        if has_own_commits:
            clone.ask("add", "--all", "--", *settled) if settled else None
            clone.ask("commit", "--no-edit", "--quiet")
    except BaseException:
        clone.run("merge", "--abort")
        for name, content in before.items():
            write(clone.root / name, content)
        raise


def write(path: Path, content: bytes | None) -> None:
    """The file with this content, or no file."""
    if content is None:
        path.unlink(missing_ok=True)
    else:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
