"""`history.jsonl` of a store: versions that became READY, RETIRED or ABORTED, for lists after a restart.

A full file becomes `history.1.jsonl`, so a store keeps at least the newest `_MAX_BYTES` of lines, and at most twice as much.
"""

from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

import structlog
from resharder.server.infra.journal import JournalFile, read_records
from resharder.server.state.version import VersionRecord

_FILE = "history.jsonl"
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
            self._journal.append({name: value for name, value in asdict(record).items() if name != "slots"})
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
        yield from read_records(path, VersionRecord.of)
