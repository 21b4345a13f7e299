"""The bytes that each trainer rank sends to each worker of a server, as text and as an SVG. Pure functions without dependencies.

    ranks (rows) to workers (columns), darkest 12.0 MiB
             0 1
    rank  0  ██    12.0 MiB
    rank  1  ▒▒▒▒  12.0 MiB

With many processes, rows and columns stand for several each, as the title states.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

ROWS, COLUMNS = 32, 24
_SHADES = "·░▒▓█"
_CELL, _LEFT, _TOP, _SIDE = 22, 84, 64, 150


@dataclass(frozen=True)
class Traffic:
    """Bytes from ranks to workers: `sizes[i][j]` from the `i`-th of `ranks` to worker `j`."""

    ranks: tuple[int, ...]
    sizes: tuple[tuple[int, ...], ...]

    @property
    def sent(self) -> tuple[int, ...]:
        """Bytes that each rank sends."""
        return tuple(map(sum, self.sizes))

    @property
    def received(self) -> tuple[int, ...]:
        """Bytes that each worker receives."""
        return tuple(map(sum, zip(*self.sizes, strict=True)))


def largest_over_mean(sizes: Sequence[int]) -> float:
    """Return the largest size divided by the mean; 1.0 if all are 0."""
    return max(sizes) * len(sizes) / sum(sizes) if any(sizes) else 1.0


def text_map(traffic: Traffic) -> list[str]:
    """Return the lines of a heat map in at most 80 columns. A cell without bytes is blank."""
    cells = _binned(traffic)
    darkest = max(map(max, cells.sizes))
    labels = [f"rank{'s' if cells.rows > 1 else ' '} {_label(row, cells.rows, traffic.ranks)}" for row in range(len(cells.sizes))]
    width = max(map(len, labels))
    lines = [f"{_title(cells)}, darkest {_size(darkest)}", f"{'':{width}}  {_ruler(len(cells.sizes[0]), cells.columns)}"]
    for label, row in zip(labels, cells.sizes, strict=True):
        lines.append(f"{label:{width}}  {''.join(2 * _shade(size, darkest) for size in row)}  {_size(sum(row))}")
    return [line.rstrip() for line in [*lines, *_imbalances(traffic)]]


def svg(traffic: Traffic, title: str) -> str:
    """Return the heat map as an SVG document: a cell for each pair, and the bytes of each row and column at the sides."""
    cells = _binned(traffic)
    rows, columns = len(cells.sizes), len(cells.sizes[0])
    darkest, most = max(map(max, cells.sizes)), max(map(sum, cells.sizes))
    totals = [sum(column) for column in zip(*cells.sizes, strict=True)]
    right, bottom = _LEFT + columns * _CELL, _TOP + rows * _CELL
    width, height = max(right + _SIDE, 520), bottom + 112
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        'font-family="sans-serif" font-size="11" fill="#222">',
        f'<rect width="{width}" height="{height}" fill="#fff"/>',
        f'<text x="12" y="22" font-size="14" font-weight="bold">{escape(title)}</text>',
        f'<text x="12" y="40">{escape(_title(cells))}, darkest {_size(darkest)}</text>',
    ]
    for column in range(columns):
        if column % max(1, columns // 12) == 0:
            parts.append(_text(_LEFT + column * _CELL + _CELL // 2, _TOP - 6, _label(column, cells.columns), "middle"))
        length = round(40 * totals[column] / max(1, *totals))
        parts.append(_bar(_LEFT + column * _CELL + 3, bottom + 6, _CELL - 6, length))
    for row, sizes in enumerate(cells.sizes):
        y = _TOP + row * _CELL
        parts.append(_text(_LEFT - 8, y + 15, f"rank {_label(row, cells.rows, traffic.ranks)}", "end"))
        for column, size in enumerate(sizes):
            parts.append(_cell(_LEFT + column * _CELL, y, size / max(1, darkest), _size(size)))
        parts.append(_bar(right + 6, y + 3, round(60 * sum(sizes) / max(1, most)), _CELL - 6))
        parts.append(_text(right + 72, y + 15, _size(sum(sizes)), "start"))
    for number, line in enumerate(_imbalances(traffic)):
        parts.append(_text(12, bottom + 70 + 18 * number, line, "start"))
    return "\n".join([*parts, "</svg>", ""])


@dataclass(frozen=True)
class _Binned:
    """Sizes of groups of `rows` ranks and `columns` workers each."""

    sizes: tuple[tuple[int, ...], ...]
    rows: int
    columns: int


def _binned(traffic: Traffic) -> _Binned:
    rows, columns = -(-len(traffic.sizes) // ROWS), -(-len(traffic.sizes[0]) // COLUMNS)
    found = []
    for start in range(0, len(traffic.sizes), rows):
        sums = [sum(column) for column in zip(*traffic.sizes[start : start + rows], strict=True)]
        found.append(tuple(sum(sums[first : first + columns]) for first in range(0, len(sums), columns)))
    return _Binned(tuple(found), rows, columns)


def _title(cells: _Binned) -> str:
    def of(count: int, what: str) -> str:
        return what if count == 1 else f"{what} by {count}"

    return f"{of(cells.rows, 'ranks')} (rows) to {of(cells.columns, 'workers')} (columns)"


def _imbalances(traffic: Traffic) -> list[str]:
    sides = (("sent by a rank", traffic.sent), ("received by a worker", traffic.received))
    return [
        f"{what}: {_size(sum(sizes) // len(sizes))} on average, {_size(max(sizes))} at most, ratio {largest_over_mean(sizes):.3f}"
        for what, sizes in sides
    ]


def _label(position: int, group: int, names: Sequence[int] | None = None) -> str:
    first, last = position * group, position * group + group - 1
    if names is not None:
        first, last = names[first], names[min(last, len(names) - 1)]
    return str(first) if first == last or group == 1 else f"{first}-{last}"


def _ruler(columns: int, group: int) -> str:
    """Return the numbers of columns, as many as fit above cells of two characters."""
    line = ""
    for column in range(columns):
        if len(line) <= 2 * column:
            line = f"{line:<{2 * column}}{column * group} "
    return line


def _shade(size: int, darkest: int) -> str:
    return " " if not size else _SHADES[min(len(_SHADES) - 1, size * len(_SHADES) // (darkest + 1))]


def _cell(x: int, y: int, share: float, what: str) -> str:
    return (
        f'<rect x="{x}" y="{y}" width="{_CELL}" height="{_CELL}" stroke="#ddd" fill="#1a4f8b" fill-opacity="{share:.3f}">'
        f"<title>{what}</title></rect>"
    )


def _bar(x: int, y: int, width: int, height: int) -> str:
    return f'<rect x="{x}" y="{y}" width="{width}" height="{height}" fill="#c98a2b"/>'


def _text(x: int, y: int, what: str, anchor: str) -> str:
    return f'<text x="{x}" y="{y}" text-anchor="{anchor}">{escape(what)}</text>'


def _size(count: int) -> str:
    """Format bytes in the largest binary unit that gives at least 1."""
    for unit, bits in (("GiB", 30), ("MiB", 20), ("KiB", 10)):
        if count >= 1 << bits:
            return f"{count / (1 << bits):.1f} {unit}"
    return f"{count} B"
