"""Tables, JSON and progress."""

import json
import sys
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from typing import Any

from google.protobuf.json_format import MessageToDict
from google.protobuf.message import Message
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TimeRemainingColumn, TransferSpeedColumn
from rich.table import Table

Row = Sequence[str]


def console() -> Console:
    """Piped output is for programs: no row is folded to fit a terminal."""
    return Console(width=None if sys.stdout.isatty() else 1000, markup=False, highlight=False)


def table(titles: Sequence[str], rows: Iterable[Row]) -> Table | str:
    """Or a sentence, where there is no row."""
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
    console().print(table(titles, rows))


def print_json(value: object) -> None:
    print(json.dumps(value, indent=2))


def one_line(value: object) -> str:
    return json.dumps(value, separators=(",", ":"))


def plain(message: Message) -> dict[str, Any]:
    """64-bit integers are strings in protobuf's JSON; scripts want numbers."""
    found: dict[str, Any] = MessageToDict(message, preserving_proto_field_name=True, always_print_fields_with_no_presence=True)
    return _numbers(message, found)


def _numbers(message: Message, found: dict[str, Any]) -> dict[str, Any]:
    for field in message.DESCRIPTOR.fields:
        value = found.get(field.name)
        if field.message_type is not None and not field.message_type.GetOptions().map_entry:
            if not field.message_type.full_name.startswith("resharder."):
                continue
            inner = getattr(message, field.name)
            if isinstance(value, list):
                for one, dictionary in zip(inner, value, strict=True):
                    _numbers(one, dictionary)
            elif isinstance(value, dict):
                _numbers(inner, value)
        elif field.cpp_type in (field.CPPTYPE_INT64, field.CPPTYPE_UINT64) and value is not None:
            found[field.name] = [int(v) for v in value] if isinstance(value, list) else int(value)
    return found


def time_of(stamp: Any) -> str:
    return datetime.fromtimestamp(stamp.seconds, UTC).strftime("%Y-%m-%d %H:%M:%SZ")


def number(version: int) -> str:
    return str(version) if version else "–"


def size(count: int) -> str:
    return f"{count / 2**30:.2f} GiB" if count >= 1 << 28 else f"{count / 2**20:.1f} MiB"


def several(count: int, what: str) -> str:
    return f"{count} {what}{'' if count == 1 else 's'}"


def count_up(what: str, done: int, total: int) -> None:
    print(f"\r{what}: {done} of {total}", end="\n" if done == total else "", file=sys.stderr, flush=True)


class Bar:
    """A progress bar on standard error; none for JSON."""

    def __init__(self, silent: bool, title: str, total: int | None) -> None:
        columns = (BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
        self._progress = Progress("{task.description}", *columns, console=Console(stderr=True), disable=silent)
        self._task = self._progress.add_task(title, total=total)

    def update(self, done: int, total: int) -> None:
        self._progress.update(self._task, completed=done, total=total)

    def __enter__(self) -> "Bar":
        self._progress.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._progress.stop()
