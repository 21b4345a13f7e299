"""Tables: rows of cells as lines for a terminal of any width, and as columns of full width for pipes and `--wide`.

On a terminal, a table has fewer columns, and each row has its texts beneath it, wrapped between words. The other columns keep
their words whole; names that do not fit are shortened in their middle.
"""

import re
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from resharder.client.cli.terminal import shown, styled
from rich.table import Table
from rich.text import Text

Cell = str | Text
Row = Sequence[Cell]

_GAP, _INDENT, _SHORTEST = 2, 4, 8
_STYLES = {
    "green": ("SERVING", "READY", "DONE", "ACTIVE", "AWAKE", "ok"),
    "yellow": (
        "BOOTING", "STAGING", "WAITING", "APPLYING", "DRAINED", "ASLEEP", "UPLOADING", "REGISTERING", "GONE", "TRYING", "HOLDING",
        "MOVING", "BACK", "warn",
    ),
    "red": ("LOST", "FAILED", "STOPPED", "ABORTED", "REJECTED", "fail"),
}  # fmt: skip
_STYLE_OF = {state: style for style, states in _STYLES.items() for state in states}


@dataclass(frozen=True)
class Columns:
    """Columns of a table: all titles, those on a terminal (empty for all), and how many of the last ones are texts."""

    titles: tuple[str, ...]
    narrow: tuple[str, ...] = ()
    texts: int = 1

    @property
    def nothing(self) -> str:
        """The sentence in place of a table without rows."""
        return f"no {self.titles[0] or self.titles[1]}s"


def paint(text: str, state: str = "") -> Text:
    """Return a state with its colour: green, yellow or red. `state` selects the colour, by default the first word of `text`."""
    return styled(text, _STYLE_OF.get(state or text.split(",")[0].split(" ")[0], ""))


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
    """Yield the lines of a table for a terminal of `width` columns."""
    titles = columns.narrow or columns.titles
    places = [columns.titles.index(title) for title in titles]
    body = [[_brief(row[place]) for place in places] for row in rows]
    count = len(titles) - columns.texts
    widths = _fitted([max(len(titles[at]), *(len(row[at]) for row in body)) for at in range(count)], titles, width)
    yield _line([Text(title, style="bold") for title in titles[:count]], widths)
    for row in body:
        yield _line(row[:count], widths)
        for text in row[count:]:
            for line in textwrap.wrap(text.plain, max(20, width - _INDENT), break_long_words=False, break_on_hyphens=False):
                yield Text(" " * _INDENT + line, style=text.style or "dim")


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
    for at, (cell, width) in enumerate(zip(cells, widths, strict=True)):
        cell = cell if len(cell) <= width else Text(short(cell.plain, width), style=cell.style)
        line.append_text(cell)
        if at + 1 < len(cells):
            line.append(" " * (width - len(cell) + _GAP))
    return line
