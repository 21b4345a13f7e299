"""Tables, JSON and progress."""

import json
import sys
from base64 import b64encode
from collections.abc import Iterable
from dataclasses import fields, is_dataclass
from datetime import UTC, datetime
from typing import Any

from resharder.client.cli.table import Columns, Row, grid, lines
from resharder.client.cli.terminal import console
from resharder.client.operator.convert import wire_name
from resharder.converters.units import size_text as size
from rich.console import Group, RenderableType

__all__ = [
    "number", "one_line", "plain", "print_json", "print_table", "several", "size", "table", "time_of",
]  # fmt: skip


def table(columns: Columns, rows: Iterable[Row], wide: bool = False) -> RenderableType:
    """Return a table, or a sentence if it has no row: for a terminal in its width, for a pipe or with `wide` in full width."""
    rows = list(rows)
    if not rows:
        return columns.nothing
    if wide or not sys.stdout.isatty():
        return grid(columns, rows)
    return Group(*lines(columns, rows, console().width))


def print_table(columns: Columns, rows: Iterable[Row], wide: bool = False) -> None:
    """Print `table` on standard output."""
    console(wide).print(table(columns, rows, wide))


def print_json(value: object) -> None:
    """Print a value as indented JSON on standard output."""
    print(json.dumps(value, indent=2))


def one_line(value: object) -> str:
    """Return a value as JSON without line breaks, for one event per line."""
    return json.dumps(value, separators=(",", ":"))


def plain(answer: Any) -> dict[str, Any]:
    """Convert an answer to protobuf's JSON, except for 64-bit integers, which are numbers."""
    found = ((wire_name(field), getattr(answer, field.name)) for field in fields(answer))
    return {name: _plain(value) for name, value in found if value is not None}


def _plain(value: Any) -> Any:
    if is_dataclass(value):
        return plain(value)
    if isinstance(value, tuple):
        return [*map(_plain, value)]
    if isinstance(value, datetime):
        return _stamp(value)
    return b64encode(value).decode() if isinstance(value, bytes) else value


def _stamp(moment: datetime) -> str:
    """Format a time as protobuf does: no fraction, three digits or six."""
    digits = "seconds" if not moment.microsecond else "microseconds" if moment.microsecond % 1000 else "milliseconds"
    return moment.replace(tzinfo=None).isoformat(timespec=digits) + "Z"


def time_of(moment: datetime | None) -> str:
    """Format a time in UTC, to the second; None is the epoch."""
    return (moment or datetime.fromtimestamp(0, UTC)).strftime("%Y-%m-%d %H:%M:%SZ")


def number(version: int) -> str:
    """Format a version's number; a dash for 0, no version."""
    return str(version) if version else "–"


def several(count: int, what: str) -> str:
    """Format a count with its noun, in the plural unless the count is 1."""
    return f"{count} {what}{'' if count == 1 else 's'}"
