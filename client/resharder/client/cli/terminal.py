"""Output of the command: lines, tables, JSON and progress, for a terminal of any width and for pipes.

Texts of other parties are escaped, and glyphs that the terminal lacks are replaced, before anything is laid out, so that columns
are measured with what is shown. A table uses the width of the terminal: a narrow one has fewer columns, and each row's texts
beneath it instead of beside it, wrapped between words. Names that do not fit are shortened in their middle.
"""

import json
import os
import re
import select
import sys
import textwrap
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from resharder.converters.badges import Badge, Severity
from resharder.converters.printable import CLOSED, GLYPHS, printable, unescaped
from resharder.converters.units import size_text
from rich.console import Console, Group, RenderableType
from rich.progress import BarColumn, Progress, ProgressColumn, Task, TextColumn, TimeRemainingColumn
from rich.style import Style
from rich.table import Table
from rich.text import Text

Cell = str | Text
Row = Sequence[Cell]

_GAP, _INDENT, _SHORTEST = 2, 4, 8
_BESIDE = 30  # columns that a text needs to stand beside the others
_PATIENCE = 1.0  # seconds after which a wait is announced
_STYLES: dict[Severity, str] = {"good": "green", "busy": "cyan", "idle": "", "warn": "yellow", "bad": "red"}


def shown(text: str, stream: Any = None) -> str:
    """Return `text` as `stream` shows it, by default standard output: on one line, without characters that act."""
    encoding = getattr(stream or sys.stdout, "encoding", None) or "utf-8"
    return printable(text).encode(encoding, GLYPHS).decode(encoding)


def styled(text: str, style: str | Style = "") -> Text:
    """Return `text` as it is shown, in a style."""
    return Text(shown(text), style=style)


def print_line(line: str = "") -> None:
    """Print a line on standard output, at once."""
    print(shown(line), flush=True)


def print_stderr(line: str) -> None:
    """Print a line on standard error, at once."""
    print(shown(line, sys.stderr), file=sys.stderr, flush=True)


def rewrite(line: str, end: str = "") -> None:
    """Print a line over the present one on standard error, and leave the cursor at its end."""
    stream = unescaped(sys.stderr)
    stream.write(f"\r{shown(line, stream)}{end}")
    stream.flush()


def end_with_reader() -> None:
    """End this process once the reader of standard output has gone; a command that waits for a change would not notice."""
    try:
        output = sys.stdout.fileno()
    except (OSError, ValueError):  # not a file
        return

    def wait() -> None:
        closing = select.poll()
        closing.register(output, 0)  # nothing but errors: POLLERR of a pipe without a reader
        closing.poll()
        os._exit(CLOSED)

    threading.Thread(target=wait, name="reader", daemon=True).start()


def console(wide: bool = False) -> Console:
    """Return a console on standard output. Rows of piped and of wide output are not folded to fit a terminal."""
    width = 1000 if wide or not sys.stdout.isatty() else None
    return _Console(file=unescaped(sys.stdout), width=width, markup=False, highlight=False, soft_wrap=wide)


def error_console() -> Console:
    """Return a console on standard error."""
    return _Console(file=unescaped(sys.stderr), markup=False, highlight=False)


class _Console(Console):
    def render_str(self, text: str, **options: Any) -> Text:
        """Return a string as it is shown, also where it is a part of another renderable."""
        return super().render_str(shown(text, self.file), **options)


@dataclass(frozen=True)
class Columns:
    """Columns of a table: all titles, those of a narrow terminal (empty for all), how many of the last ones are texts, and what
    the rows are called if that is not the first title."""

    titles: tuple[str, ...]
    narrow: tuple[str, ...] = ()
    texts: int = 1
    noun: str = ""

    @property
    def nothing(self) -> str:
        """The sentence in place of a table without rows."""
        return f"no {self.noun or self.titles[0] + 's'}"


def paint(badge: Badge, text: str = "") -> Text:
    """Return a badge, or `text` in its place, in the colour of its severity."""
    return styled(text or badge.text, _STYLES[badge.severity])


def alarm(text: str) -> Text:
    """Return a text about a problem, in red."""
    return styled(text, "bold red")


def short(name: str, width: int) -> str:
    """Return a name of at most `width` characters: the middle of a longer one is replaced by `…`."""
    if len(name) <= width:
        return name
    tail = (width - 1) // 2
    return f"{name[: width - 1 - tail]}{shown('…')}{name[len(name) - tail :]}"


def grid(columns: Columns, rows: Iterable[Row]) -> Table:
    """Return a table with all columns side by side, for output of unbounded width."""
    made = Table(box=None, pad_edge=False, header_style="bold")
    for title in columns.titles:
        made.add_column(title, overflow="fold")
    for row in rows:
        made.add_row(*row)
    return made


def lines(columns: Columns, rows: Iterable[Row], width: int) -> Iterator[Text]:
    """Yield the lines of a table for a terminal of `width` columns: all columns where they fit.

    Texts are beside the other columns where there is room for them, else beneath.
    """
    body = [[_brief(cell) for cell in row] for row in rows]
    titles, texts = columns.titles, len(columns.titles) - columns.texts
    widths = _natural(titles[:texts], body)
    if columns.narrow and _left(widths, width) < (_BESIDE if columns.texts else -_GAP):
        places = [titles.index(title) for title in columns.narrow]
        titles, body = columns.narrow, [[row[place] for place in places] for row in body]
        texts = len(titles) - columns.texts
        widths = _natural(titles[:texts], body)
    widths = _fitted(widths, titles, width)
    left = _left(widths, width)
    longest = max((len(word) for row in body for text in row[texts:] for word in text.plain.split()), default=0)
    beside = columns.texts > 0 and left >= max(_BESIDE, longest)
    head = [Text(title, style="bold") for title in titles[: texts + beside]]
    yield _line(head, [*widths, left])
    for row in body:
        wrapped = [
            Text(line, style=text.style) for text in row[texts:] for line in _wrap(text, left if beside else width - _INDENT)
        ]
        yield _line(row[:texts] + wrapped[:beside], [*widths, left])
        for line in wrapped[beside:]:
            indent = width - left if beside else _INDENT
            yield Text(" " * indent + line.plain, style=line.style or ("" if beside else "dim"))


def _wrap(text: Text, width: int) -> list[str]:
    return textwrap.wrap(text.plain, max(20, width), break_long_words=False, break_on_hyphens=False)


def _natural(titles: Sequence[str], body: Sequence[Row]) -> list[int]:
    """Return the widths that columns have where there is room for all."""
    return [max(len(title), *(len(row[at]) for row in body)) for at, title in enumerate(titles)]


def _left(widths: Sequence[int], width: int) -> int:
    """Return the columns that are left beside these."""
    return width - sum(widths) - _GAP * len(widths)


def _brief(cell: Cell) -> Text:
    """Return a cell without the collection of a server's name, and without the year of a time."""
    if isinstance(cell, Text):
        return cell
    return styled(re.sub(r"^servers/|^\d{4}-(?=\d\d-\d\d \d\d:\d\d:\d\dZ$)", "", cell))


def _fitted(widths: list[int], titles: Sequence[str], width: int) -> list[int]:
    """Return widths of columns that fit: the widest ones give way, but no column below its title."""
    while sum(widths) + _GAP * (len(widths) - 1) > width:
        at = max(range(len(widths)), key=lambda at: widths[at])
        if widths[at] <= max(_SHORTEST, len(titles[at])):
            break
        widths[at] -= 1
    return widths


def _line(cells: Sequence[Text], widths: Sequence[int]) -> Text:
    line = Text()
    for at, (cell, width) in enumerate(zip(cells, widths, strict=False)):
        cell = cell if len(cell) <= width else Text(short(cell.plain, width), style=cell.style)
        line.append_text(cell)
        if at + 1 < len(cells):
            line.append(" " * (width - len(cell) + _GAP))
    return line


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


def count_up(what: str, done: int, total: int) -> None:
    """Rewrite a line of progress on standard error; end it when `done` reaches `total`."""
    rewrite(f"{what}: {done} of {total}", end="\n" if done == total else "")


@contextmanager
def waiting(what: str, silent: bool = False) -> Iterator[Callable[[], None]]:
    """Name what the block waits for, on standard error, if it takes longer than a second; on a terminal alone.

    Yields a function that ends the wait before the block does.
    """
    if silent or not sys.stderr.isatty():
        yield lambda: None
        return
    announced = threading.Event()

    def announce() -> None:
        announced.set()
        rewrite(f"{what} …")

    timer = threading.Timer(_PATIENCE, announce)
    timer.daemon = True
    timer.start()

    def end() -> None:
        timer.cancel()
        timer.join()
        if announced.is_set():
            announced.clear()
            rewrite(" " * len(shown(f"{what} …", sys.stderr)), end="\r")

    try:
        yield end
    finally:
        end()


class Bar:
    """Progress bar on standard error from the first bytes on; none for JSON, and none without a terminal."""

    def __init__(self, silent: bool, title: str, total: int | None) -> None:
        columns = (BarColumn(), _BarSizes(), TimeRemainingColumn())
        silent = silent or not sys.stderr.isatty()
        title_column = TextColumn("{task.description}", markup=False)
        self._progress = Progress(title_column, *columns, console=error_console(), disable=silent)
        self._title, self._total = shown(title, sys.stderr), total
        self._started = False

    def update(self, done: int, total: int) -> None:
        """Show `done` of `total` bytes."""
        if not self._started:
            self._started = True
            self._task = self._progress.add_task(self._title, total=self._total)
            self._progress.start()
        self._progress.update(self._task, completed=done, total=total)

    def __enter__(self) -> "Bar":
        return self

    def __exit__(self, *error: object) -> None:
        if self._started:
            self._progress.stop()


class _BarSizes(ProgressColumn):
    """Bytes so far, of all, and per second."""

    def render(self, task: Task) -> Text:
        """Return the text of a task."""
        rate = f", {size_text(int(task.speed))}/s" if task.speed else ""
        return Text(f"{size_text(int(task.completed))} of {size_text(int(task.total or 0))}{rate}")
