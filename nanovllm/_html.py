"""What a notebook shows for the package's small classes: a table of fields, with the usual repr as its text twin.

Below everything else and without dependencies, so that no class has to know about notebooks or widgets.
"""

from enum import Enum
from html import escape
from itertools import islice
from typing import Any

CELL = "text-align:left;vertical-align:top;padding:2px 10px 2px 0"  # no colours: the page's own, light or dark
MAX_ENTRIES = 12


def table(title: str, rows: list[tuple[str, Any]], limit: int = 200) -> str:
    """A two-column HTML table in the colours of the page around it (light or dark)."""
    cells = "".join(
        f'<tr><th scope="row" style="{CELL}">{escape(name)}</th><td style="{CELL}">{cell(value, limit)}</td></tr>'
        for name, value in rows
    )
    caption = f'<caption style="text-align:left;font-weight:700;color:inherit">{escape(title)}</caption>'
    return f"<table>{caption}{cells}</table>"


def cell(value: Any, limit: int) -> str:
    """A value in its cell: a table of its own for records that have named fields, else as `plain` has it."""
    entries = list(islice(value, MAX_ENTRIES)) if isinstance(value, (list, tuple)) else []
    if not entries or not all(hasattr(entry, "_fields") for entry in entries):
        return f"<code>{escape(plain(value, limit))}</code>"
    head = "".join(f'<th scope="col" style="{CELL}">{escape(name)}</th>' for name in entries[0]._fields)
    lines = "".join(
        "<tr>" + "".join(f'<td style="{CELL}"><code>{escape(plain(item, 60))}</code></td>' for item in entry) + "</tr>"
        for entry in entries
    )
    more = f"<div>… {len(value):,} in all</div>" if len(value) > len(entries) else ""
    return f'<table style="margin:0"><tr>{head}</tr>{lines}</table>{more}'


def plain(value: Any, limit: int) -> str:
    """Texts without quotes and enum members by their values, as a reader says them; of everything else the repr."""
    if isinstance(value, Enum):
        value = value.value
    if isinstance(value, str) and value.isprintable() and value:
        return value if len(value) <= limit else value[: limit - 1] + "…"
    return shorten(value, limit)


def shorten(value: Any, limit: int = 200) -> str:
    """The repr of `value`, cut in the middle of long containers so that a table or a message stays small.

    Where the repr itself fails (an integer of 5,000 digits, a class with a broken `__repr__`), the type alone.
    """
    try:
        if isinstance(value, (list, tuple)) and len(value) > 16 and not hasattr(value, "_fields"):
            head = ", ".join(repr(item) for item in islice(value, 12))
            text = f"[{head}, … {len(value):,} in all]"
        else:
            text = repr(value)
    except Exception:
        text = f"<{type(value).__name__}>"
    return text if len(text) <= limit else text[: limit - 1] + "…"


def shown(value: Any) -> str:
    """How an error message shows a value that it was given."""
    return shorten(value, 100)


class ReprHTML:
    """Mixin: `_repr_html_` from `_repr_rows`, by default the dataclass fields in their order."""

    __slots__ = ()

    def _repr_rows(self) -> list[tuple[str, Any]]:
        fields = getattr(self, "__dataclass_fields__", {})
        return [(name, getattr(self, name)) for name in fields]

    def _repr_html_(self) -> str:
        return table(type(self).__name__, self._repr_rows())
