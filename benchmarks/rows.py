"""What a benchmark says: one row per work."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table


@dataclass(frozen=True)
class Row:
    """Medians of one run. `peer`: what others take for the same; `limit`: what the machine allows; None: not measured."""

    work: str
    ours: float
    peer: float | None
    limit: float | None
    unit: str = "s"


def show(rows: Sequence[Row]) -> None:
    table = Table("work", "ours", "peer", "limit", "peer / ours", "limit / ours")
    for row in rows:
        times = ("-" if t is None else f"{t:.3f} s" for t in (row.ours, row.peer, row.limit))
        ratios = ("-" if t is None else f"{t / row.ours:.2f}" for t in (row.peer, row.limit))
        table.add_row(row.work, *times, *ratios)
    Console(width=150).print(table)


def read(path: Path) -> dict[str, Row]:
    """By work; none where there is no file."""
    return {row["work"]: Row(**row) for row in json.loads(path.read_text())} if path.exists() else {}


def write(rows: Sequence[Row], path: Path) -> None:
    path.write_text(json.dumps([asdict(row) for row in rows], indent=2) + "\n")


def add(rows: Sequence[Row], path: Path) -> None:
    """To those of the same run that are there, in place of those of the same works."""
    write([*(read(path) | {row.work: row for row in rows}).values()], path)
