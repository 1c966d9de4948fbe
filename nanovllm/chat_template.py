"""Chat templates: from a conversation to the text of a prompt, in a process of its own.

A template is a small Jinja program that comes with a model, so it is as trustworthy as whoever made the model. Jinja's
sandbox keeps it away from Python's objects but stops no loop and no string of a billion characters. So a helper process
(`chat_helper.py`) compiles and renders it, with little processor time, memory and rights. The first conversation starts
the helper, which then answers in a fraction of a millisecond; it leaves with its owner, or after a minute without work.

Knows neither models nor tokens.
"""

import importlib.util
import json
import os
import signal
import subprocess
import sys
import weakref
from contextlib import suppress
from pathlib import Path
from typing import Any

CPU_SECONDS = 1.0  # a rendering
MEMORY = 512 << 20  # bytes of address space
HELPER = Path(__file__).with_name("chat_helper.py")
# Isolated (-I) and without site (-S): no start-up files, and only what lies beside jinja2 of all that is installed.
START = "import sys, runpy; sys.path.append(sys.argv[2]); runpy.run_path(sys.argv[1], run_name='__main__')"
ENVIRONMENT = ("PATH", "LD_LIBRARY_PATH", "DYLD_LIBRARY_PATH", "LANG", "LC_ALL", "TZ")


class TemplateFailure(Exception):
    """The template could not render a conversation; the message says why."""


class ChatTemplate:
    """A template and its helper process, started when first needed.

    variables: what the template sees beside the messages: the tokenizer's special tokens.
    """

    def __init__(self, text: str, variables: dict[str, Any]) -> None:
        self.text, self.variables = text, variables
        self._helper: subprocess.Popen[bytes] | None = None
        self._owner = 0  # the process that started it
        self._finalizer: Any = None

    def render(self, messages: list[Any]) -> str:
        """The prompt of one conversation, open for the assistant's turn. Raises `TemplateFailure`."""
        try:
            request = json.dumps(messages, ensure_ascii=False).encode()
        except (TypeError, ValueError, RecursionError) as error:
            raise TemplateFailure(f"messages may hold text, numbers, lists and tables only: {error}") from error
        try:
            reply = self._ask(request)
            if reply == -signal.SIGALRM:  # it had just left for want of work
                reply = self._ask(request)
        except BaseException:
            self.close()  # an answer may still be on its way
            raise
        if reply == -signal.SIGPROF:
            raise TemplateFailure(f"it was stopped after {CPU_SECONDS:g} s of processor time; it may never end")
        if isinstance(reply, int):
            raise TemplateFailure(f"its process (of at most {MEMORY >> 20} MiB of memory) ended with status {reply}")
        if "error" in reply:
            raise TemplateFailure(reply["error"])
        return str(reply["text"])

    def _ask(self, request: bytes) -> dict[str, Any] | int:
        """What the helper answers; its exit status (-n: killed by signal n) if it ended instead."""
        if self._owner != os.getpid():  # a forked copy of the owner: two that talk to one helper mix up its answers
            self._helper = None
        if self._helper is None:
            request = json.dumps({"template": self.text, "variables": self.variables}).encode() + b"\n" + request
            self._start()
        helper = self._helper
        assert helper is not None and helper.stdin is not None and helper.stdout is not None
        with suppress(BrokenPipeError):
            helper.stdin.write(request + b"\n")
            helper.stdin.flush()
            line = helper.stdout.readline()
            if line.endswith(b"\n"):
                reply: dict[str, Any] = json.loads(line)
                return reply
        self.close()
        return int(helper.returncode)

    def _start(self) -> None:
        spec = importlib.util.find_spec("jinja2")
        places = spec.submodule_search_locations if spec else None
        if not places:
            raise TemplateFailure("it needs the package jinja2; install it with: pip install jinja2")
        options = [str(HELPER), str(Path(places[0]).parent), str(CPU_SECONDS), str(MEMORY)]
        self._helper = subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", START, *options],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
            env={name: os.environ[name] for name in ENVIRONMENT if name in os.environ},
            start_new_session=True,  # Ctrl-C in a terminal goes to all processes of a session
        )  # fmt: skip
        self._owner = os.getpid()
        self._finalizer = weakref.finalize(self, end, self._helper, self._owner)

    def close(self) -> None:
        """End the helper, if there is one. Safe to call again; `render` starts another."""
        self._helper = None
        if self._finalizer is not None:
            self._finalizer()


def end(helper: "subprocess.Popen[bytes]", owner: int) -> None:
    """In the process that started it: end a helper process and give its pipes back."""
    if os.getpid() != owner:
        return
    helper.kill()
    for pipe in (helper.stdin, helper.stdout):
        with suppress(OSError):
            if pipe is not None:
                pipe.close()
    helper.wait()
