"""Append-only files of JSON lines, with one rotation: a full `x.jsonl` replaces `x.1.jsonl`."""

import json
import os
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from math import inf
from pathlib import Path
from typing import Any, TypeVar

from resharder.converters.failpoints import failpoint
from resharder.converters.json_input import parse_json

T = TypeVar("T")


class JournalFile:
    """Append-only file of JSON lines. Not thread-safe.

    Lines that the medium refuses are kept in memory, the newest `max_late` of them, and are written before the next one. An
    incomplete last line is dropped when the file is opened. The file is rotated at `max_lines` or beyond `max_bytes`.
    """

    def __init__(self, path: Path, *, max_late: int, max_lines: float = inf, max_bytes: float = inf) -> None:
        self.path, self.older = path, path.with_suffix(f".1{path.suffix}")
        self._max_lines, self._max_bytes = max_lines, max_bytes
        self._late: deque[bytes] = deque(maxlen=max_late)
        self._file = -1
        self._lines = self._bytes = 0
        self._torn = False

    def open(self) -> None:
        """Open the file now rather than at the first `append`. Raises OSError."""
        content = self.path.read_bytes() if self.path.exists() else b""
        whole = content.rfind(b"\n") + 1
        if whole < len(content):
            os.truncate(self.path, whole)
        self._file = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
        self._lines, self._bytes = content.count(b"\n"), whole

    def append(self, record: Mapping[str, Any]) -> None:
        """Append a line. Raises OSError if it, or a line before it, is kept in memory instead."""
        self._late.append(json.dumps(record).encode() + b"\n")
        self.flush()

    def flush(self) -> None:
        """Write the lines that are kept in memory. Raises OSError if lines are left."""
        if not self._late:
            return
        if self._file < 0:
            self.open()
        if self._lines >= self._max_lines or self._bytes > self._max_bytes:
            self._rotate()
        while self._late:
            failpoint("journal.write")
            line = (b"\n" if self._torn else b"") + self._late[0]
            done = os.write(self._file, line)
            self._bytes += done
            self._torn = 0 < done < len(line) or (self._torn and not done)
            if done < len(line):
                raise OSError(f"{done} of {len(line)} bytes were written")
            self._late.popleft()
            self._lines += 1

    @property
    def late(self) -> int:
        """Number of lines kept in memory."""
        return len(self._late)

    def duplicate(self) -> int:
        """Duplicate the descriptor of the open file, for a sync without a lock. Raises OSError."""
        return os.dup(self._file)

    def close(self) -> None:
        """Close the file. A later `append` opens it again."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def _rotate(self) -> None:
        with suppress(FileNotFoundError):  # renamed by an earlier call that could not open the new file
            os.replace(self.path, self.older)
        full = self._file
        self.open()
        os.close(full)


def read_records(path: Path, parse: Callable[[Mapping[str, Any]], T]) -> Iterator[T]:
    """Parse the lines of a journal file, oldest first.

    Skips lines that are not JSON, and those for which `parse` raises ValueError, TypeError or KeyError. Raises OSError.
    """
    for line in path.read_bytes().splitlines() if path.exists() else []:
        with suppress(ValueError, TypeError, KeyError):
            yield parse(parse_json(line))
