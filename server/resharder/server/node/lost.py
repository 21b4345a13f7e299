"""Nonces of nodes that are known to be gone: ranks wait for none of them after a restart of the daemon.

A node's nonce file outlives its process, and names it: the next process of the node writes another one. A write that fails is
logged: ranks wait some seconds at worst.
"""

import hashlib
import json
from collections.abc import Collection, Mapping
from pathlib import Path

import structlog
from resharder.server.infra.filesystem import write_file
from resharder.server.node.drained import read_stored

_MOST_NODES = 4096
_log = structlog.get_logger("resharder.node")


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
