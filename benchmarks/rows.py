"""Results of benchmarks, one row for each workload."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table


@dataclass(frozen=True)
class Row:
    """Medians of one run. `peer`: the same work by other means; `limit`: the bound of the machine; None: not measured."""

    work: str
    ours: float
    peer: float | None
    limit: float | None
    unit: str = "s"


def show(rows: Sequence[Row]) -> None:
    table = Table("work", "ours", "peer", "limit", "peer / ours", "limit / ours")
    for row in rows:
        times = ("-" if t is None else f"{t:.3f} {row.unit}" for t in (row.ours, row.peer, row.limit))
        ratios = ("-" if t is None else f"{t / row.ours:.2f}" for t in (row.peer, row.limit))
        table.add_row(row.work, *times, *ratios)
    Console(width=150).print(table)


def read(path: Path) -> dict[str, Row]:
    """Return the rows of a file by workload; empty if there is no file."""
    return {row["work"]: Row(**row) for row in json.loads(path.read_text())} if path.exists() else {}


def write(rows: Sequence[Row], path: Path) -> None:
    path.write_text(json.dumps([asdict(row) for row in rows], indent=2) + "\n")


def add(rows: Sequence[Row], path: Path) -> None:
    """Add rows to a file, in place of those of the same workloads."""
    write([*(read(path) | {row.work: row for row in rows}).values()], path)
