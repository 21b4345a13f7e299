"""Durable ids of drained nodes: a JSON file in the store, written before a change takes effect.

A node stays drained while it is away, and over restarts of the node and of the daemon.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import structlog
from resharder.converters.json_input import parse_json
from resharder.server.infra.filesystem import touching, write_file

T = TypeVar("T", list[str], dict[str, str])
_log = structlog.get_logger("resharder.node")


def read_stored(file: Path, empty: T, valid: Callable[[T], bool]) -> T:
    """Return the value in a JSON file. It has the type of `empty`, which is returned if the file is missing or unreadable.

    Raises MediumRefused.
    """
    with touching(file, "reading"):
        content = file.read_bytes() if file.exists() else None
    if content is None:
        return empty
    try:
        found = parse_json(content)
        if not isinstance(found, type(empty)) or not valid(found):
            raise ValueError(f"expected a {type(empty).__name__} of strings, found {content[:64]!r}")
    except ValueError as error:
        _log.error("nodes_unreadable", file=str(file), error=str(error))
        return empty
    return found


class DrainedNodes:
    """Ids of drained nodes. Not thread-safe; callers hold the register's lock.

    An unreadable file is logged and counts as empty.

    Args:
        file: The file; None keeps the ids in memory alone.

    Raises:
        MediumRefused: The file cannot be read.
    """

    def __init__(self, file: Path | None = None) -> None:
        self._file, self._ids = file, frozenset[str]()
        if file is not None:
            self._ids = frozenset(read_stored(file, list[str](), lambda ids: all(isinstance(id, str) for id in ids)))

    def __contains__(self, id: str) -> bool:
        return id in self._ids

    def change(self, id: str, drained: bool) -> None:
        """Add or remove an id. Raises MediumRefused, and then nothing has changed."""
        ids = self._ids | {id} if drained else self._ids - {id}
        if ids != self._ids and self._file is not None:
            write_file(self._file, json.dumps(sorted(ids)).encode())
        self._ids = ids
