"""`history.jsonl` of a store: versions that became READY, RETIRED or ABORTED, for lists after a restart.

A full file becomes `history.1.jsonl`, so a store keeps at least the newest `_MAX_BYTES` of lines, and at most twice as much.
"""

import json
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import structlog
from resharder.server.infra.journal import JournalFile, read_records
from resharder.server.state.version import VersionRecord

_FILE = "history.jsonl"
_CHECKSUM = "crc32"
_MAX_BYTES = 2 << 20  # 3,000 lines and more
_MAX_LATE = 1000  # lines that the medium refused
_log = structlog.get_logger("resharder.store")


class History:
    """Writer of the history. A line that the medium refuses is logged, and written before the next one. Not thread-safe."""

    def __init__(self, root: Path, max_bytes: int = _MAX_BYTES) -> None:
        self._journal = JournalFile(root / _FILE, max_late=_MAX_LATE, max_bytes=max_bytes)

    def add(self, record: VersionRecord) -> None:
        """Append a record. A failure is logged rather than raised."""
        try:
            fields = {name: value for name, value in asdict(record).items() if name != "slots"}
            self._journal.append(fields | {_CHECKSUM: _checksum(fields)})
        except OSError as error:
            _log.error("history_not_written", lines=self._journal.late, error=str(error))

    def close(self) -> None:
        """Write the lines that were refused, and close the file."""
        try:
            self._journal.flush()
        except OSError as error:
            _log.error("history_not_written", lines=self._journal.late, error=str(error))
        self._journal.close()


def read_history(root: Path) -> Iterator[VersionRecord]:
    """Yield the records of a store's history, oldest first. Raises OSError."""
    journal = JournalFile(root / _FILE, max_late=0)
    for path in (journal.older, journal.path):
        yield from read_records(path, _record)


def _record(fields: Mapping[str, Any]) -> VersionRecord:
    """Return the record of a line. Raises ValueError for parts of several lines that a power cut has put together."""
    if not isinstance(fields, Mapping):
        raise TypeError(f"expected the fields of a version, got a {type(fields).__name__}")
    others = {name: value for name, value in fields.items() if name != _CHECKSUM}
    if fields.get(_CHECKSUM, expected := _checksum(others)) != expected:  # earlier releases wrote none
        raise ValueError(f"expected a line with checksum {fields[_CHECKSUM]}, computed {expected}")
    return VersionRecord.of(others)


def _checksum(fields: Mapping[str, Any]) -> int:
    return zlib.crc32(json.dumps(fields, sort_keys=True).encode())
