"""`history.jsonl` of a store: every version that became READY, RETIRED or ABORTED, for lists after a restart."""

from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

import structlog
from resharder.server.infra.journal import JournalFile, read_records
from resharder.server.state.version import VersionRecord

_FILE = "history.jsonl"
_MAX_BYTES = 8 << 20
_MAX_LATE = 1000  # lines that the medium refused
_log = structlog.get_logger("resharder.store")


class History:
    """Writer of the history. A line that the medium refuses is logged, and written before the next one. Not thread-safe."""

    def __init__(self, root: Path) -> None:
        self._journal = JournalFile(root / _FILE, max_late=_MAX_LATE, max_bytes=_MAX_BYTES)

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
    return read_records(root / _FILE, VersionRecord.of)
