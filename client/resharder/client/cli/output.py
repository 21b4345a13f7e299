"""Tables, JSON and progress."""

import json
import sys
from base64 import b64encode
from collections.abc import Iterable, Sequence
from dataclasses import fields, is_dataclass
from datetime import UTC, datetime
from typing import Any

from resharder.client.operator.convert import wire_name
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TimeRemainingColumn, TransferSpeedColumn
from rich.table import Table

Row = Sequence[str]


def console() -> Console:
    """Return a console. Piped output is for programs: rows are not folded to fit a terminal."""
    return Console(width=None if sys.stdout.isatty() else 1000, markup=False, highlight=False)


def table(titles: Sequence[str], rows: Iterable[Row]) -> Table | str:
    """Print a table, or a sentence if it has no row."""
    rows = list(rows)
    if not rows:
        return f"no {titles[0] or titles[1]}s"
    made = Table(box=None, pad_edge=False, header_style="bold")
    for title in titles:
        made.add_column(title, overflow="fold")
    for row in rows:
        made.add_row(*row)
    return made


def print_table(titles: Sequence[str], rows: Iterable[Row]) -> None:
    """Print a table on standard output, or a sentence if it has no rows."""
    console().print(table(titles, rows))


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


def size(count: int) -> str:
    """Format bytes in MiB, or in GiB from 256 MiB on."""
    return f"{count / 2**30:.2f} GiB" if count >= 1 << 28 else f"{count / 2**20:.1f} MiB"


def several(count: int, what: str) -> str:
    """Format a count with its noun, in the plural unless the count is 1."""
    return f"{count} {what}{'' if count == 1 else 's'}"


def count_up(what: str, done: int, total: int) -> None:
    """Rewrite a line of progress on standard error; end it when `done` reaches `total`."""
    print(f"\r{what}: {done} of {total}", end="\n" if done == total else "", file=sys.stderr, flush=True)


class Bar:
    """Progress bar on standard error; none for JSON."""

    def __init__(self, silent: bool, title: str, total: int | None) -> None:
        columns = (BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
        self._progress = Progress("{task.description}", *columns, console=Console(stderr=True), disable=silent)
        self._task = self._progress.add_task(title, total=total)

    def update(self, done: int, total: int) -> None:
        """Show `done` of `total` bytes."""
        self._progress.update(self._task, completed=done, total=total)

    def __enter__(self) -> "Bar":
        self._progress.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._progress.stop()
