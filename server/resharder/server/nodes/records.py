"""Durable records of nodes in the store: ids of drained nodes, and nonces of nodes that are known to be gone.

A node stays drained while it is away, and over restarts of the node and of the daemon: the file is written before a change takes
effect. Ranks wait for no node that is gone after a restart of the daemon. A node's nonce file outlives its process, and names
it: the next process of the node writes another one. A write that fails is logged: ranks wait some seconds at worst.
"""

import hashlib
import json
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import TypeVar

import structlog
from resharder.converters.json_input import parse_json
from resharder.server.infra.filesystem import touching, write_file

T = TypeVar("T", list[str], dict[str, str])
_MOST_NODES = 4096  # that are gone
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


def nonce_id(nonce: bytes) -> str:
    """Return the SHA-256 of a nonce, which does not reveal it, in hexadecimal digits."""
    return hashlib.sha256(nonce).hexdigest()


class LostNodes:
    """Last nonces of nodes that are lost or have left, by id. Not thread-safe; callers hold a lock.

    Args:
        file: The file; None keeps them in memory alone. An unreadable one is logged and counts as empty.

    Raises:
        MediumRefused: The file cannot be read.
    """

    def __init__(self, file: Path | None = None) -> None:
        self._file, self._nonces = file, dict[str, str]()
        if file is not None:
            self._nonces = read_stored(file, self._nonces, lambda found: all(isinstance(each, str) for each in found.values()))

    def nonces(self) -> Collection[str]:
        """Return the `nonce_id` of each node that is gone."""
        return self._nonces.values()

    def add(self, nonces: Mapping[str, bytes]) -> None:
        """Add nodes that are gone, with their nonces; the oldest ones beyond 4,096 are forgotten."""
        if not nonces:
            return
        for id, nonce in nonces.items():
            self._nonces.pop(id, None)
            self._nonces[id] = nonce_id(nonce)
        for id in list(self._nonces)[:-_MOST_NODES]:
            del self._nonces[id]
        self._write()

    def remove(self, id: str, nonce: bytes) -> None:
        """Remove a node that reports again. A no-op for one that is not gone."""
        former = self._nonces.pop(id, None)
        if former == nonce_id(nonce):  # the same process; by another nonce, no rank waits for the former one
            self._write()

    def _write(self) -> None:
        if self._file is None:
            return
        try:
            write_file(self._file, json.dumps(self._nonces).encode())
        except OSError as error:
            _log.warning("lost_nodes_not_written", file=str(self._file), reason=str(error))
