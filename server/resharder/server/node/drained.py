"""Durable ids of drained nodes: a JSON file in the store, written before a change takes effect.

A node stays drained while it is away, and over restarts of the node and of the daemon.
"""

import json
from pathlib import Path

import structlog
from resharder.converters.json_input import parse_json
from resharder.server.infra.filesystem import touching, write_file

_log = structlog.get_logger("resharder.node")


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
        if file is None:
            return
        with touching(file, "reading"):
            content = file.read_bytes() if file.exists() else b"[]"
        try:
            ids = parse_json(content)
            if not isinstance(ids, list) or not all(isinstance(id, str) for id in ids):
                raise ValueError(f"expected a list of ids, found {content[:64]!r}")
        except ValueError as error:
            _log.error("drained_nodes_unreadable", file=str(file), error=str(error))
        else:
            self._ids = frozenset(ids)

    def __contains__(self, id: str) -> bool:
        return id in self._ids

    def change(self, id: str, drained: bool) -> None:
        """Add or remove an id. Raises MediumRefused, and then nothing has changed."""
        ids = self._ids | {id} if drained else self._ids - {id}
        if ids != self._ids and self._file is not None:
            write_file(self._file, json.dumps(sorted(ids)).encode())
        self._ids = ids
