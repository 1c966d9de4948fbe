"""The helper process of `chat_template.py`: renders one chat template, one conversation a line, under tight limits.

It runs on its own, without the package; arguments: where jinja2 lies, the seconds of processor time that a rendering
may take, the bytes of address space that all of it may take. The operating system enforces both. No file or socket can
be opened, and nothing written but the answer.
"""

import json
import resource
import signal
import sys
from contextlib import suppress
from datetime import datetime
from typing import Any

import jinja2.debug  # loaded late otherwise, when no file can be opened any more
from jinja2 import nodes
from jinja2.exceptions import TemplateError
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

IDLE_SECONDS = 60
SLACK = 1 << 20  # characters that a template may add to ten times what the messages have
WARM_UP = "{{ strftime_now('%d %B %Y') }}{% for x in [1] %}{{ [x] | tojson }}{% endfor %}"


class Generation(Extension):
    """`{% generation %}…{% endgeneration %}` marks the assistant's words for training; here it marks nothing."""

    tags = frozenset(("generation",))  # type: ignore[assignment]

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True)).set_lineno(line)


def raise_exception(message: str) -> None:
    """What a template calls when it cannot render the messages."""
    raise TemplateError(message)


def strftime_now(style: str) -> str:
    """Today's date in the template's own style."""
    return datetime.now().strftime(style)


def to_json(value: Any, ensure_ascii: bool = False, **options: Any) -> str:
    """JSON as it is; Jinja's own filter writes it for HTML pages."""
    return json.dumps(value, ensure_ascii=ensure_ascii, **options)


def compile_template(text: str) -> jinja2.Template:
    """A template in the environment that chat templates are written for, that of transformers."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, "jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = to_json
    environment.globals.update(raise_exception=raise_exception, strftime_now=strftime_now)
    return environment.from_string(text)


def give_up_rights(memory: int) -> None:
    """From here on: little memory, no new file or socket, nothing written to a disk."""
    compile_template(WARM_UP).render()
    limits = {"RLIMIT_AS": memory, "RLIMIT_NOFILE": 0, "RLIMIT_FSIZE": 0, "RLIMIT_NPROC": 0, "RLIMIT_CORE": 0}
    for name, value in limits.items():
        with suppress(AttributeError, ValueError, OSError):  # not every system has every one of them
            resource.setrlimit(getattr(resource, name), (value, value))


def serve(cpu_seconds: float) -> None:
    """Read the template, then one conversation a line, and answer each with one line; until the input ends.

    The timers have no handler, so they end the process, whatever it is doing.
    """
    first = json.loads(sys.stdin.buffer.readline())
    variables = {"tools": None, "documents": None, "add_generation_prompt": True, **first["variables"]}
    template: jinja2.Template | None = None
    while True:
        signal.alarm(IDLE_SECONDS)
        line = sys.stdin.buffer.readline()
        signal.alarm(0)
        if not line:
            return
        signal.setitimer(signal.ITIMER_PROF, cpu_seconds)
        try:
            template = template or compile_template(first["template"])
            text = template.render(messages=json.loads(line), **variables)
            if len(text) > 10 * len(line) + SLACK:
                raise TemplateError(f"it makes {len(text):,} characters of {len(line):,}")
            reply = {"text": text}
        except TemplateError as error:
            reply = {"error": str(error)}
        except Exception as error:
            reply = {"error": f"{type(error).__name__}: {error}"}
        signal.setitimer(signal.ITIMER_PROF, 0)
        sys.stdout.buffer.write(json.dumps(reply).encode() + b"\n")
        sys.stdout.buffer.flush()


if __name__ == "__main__":
    give_up_rights(int(sys.argv[4]))
    serve(float(sys.argv[3]))
