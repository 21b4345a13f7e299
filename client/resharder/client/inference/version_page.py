"""The page: a journal of the versions that a server's workers on this host installed, shared by all processes of the server.

A page is a file in `/dev/shm`, one for each lifetime of a server. Workers write to it. API servers map
the time at which the engine core computed a token to the version that was installed at that time. The
mapping is exact, because the engine is paused during an install. Version 0 stands for weights that are
not a confirmed version: not yet installed, torn, dropped, or vLLM's own.

Every process that uses a page holds a shared lock on it. A page that can be locked exclusively belongs
to a dead server.
"""

import atexit
import contextlib
import fcntl
import functools
import json
import os
import struct
import threading
import time
import uuid
import zlib
from collections.abc import Callable, Iterator, MutableMapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from resharder.client.settings import PAGE
from resharder.converters.json_input import is_number, parse_json

OWN = -1
"""In place of a version on a cut page: requests in progress go on with the versions that they name."""
VARIABLE = PAGE.name  # inherited by all processes of the server
_FOLDER = Path("/dev/shm")
_PREFIX = "resharder-page"
_MAX_CHANGES = 64  # a token that is older than the first change has no version
_MAX_BYTES = 1 << 16
_LOCK_SECONDS = 10.0
_READ_ATTEMPTS = 100
_HEADER = struct.Struct("<QII")  # number of the write, length of the payload, CRC-32 of number, length and payload


@dataclass(frozen=True)
class Journal:
    """The contents of a page."""

    ranks: tuple[tuple[int, int], ...] = ()
    """(rank, installed version) of each worker."""
    changes: tuple[tuple[float, int], ...] = ()
    """(monotonic time, version that all workers have installed), oldest first; 0 while workers differ."""

    @property
    def version(self) -> int:
        """The version that all workers have installed; 0 for none."""
        return self.changes[-1][1] if self.changes else 0

    @property
    def last(self) -> int:
        """The version that all workers had installed last, also while they differ; 0 for none, and once one has dropped it."""
        if any(not version for _, version in self.ranks):
            return 0
        return next((version for _, version in reversed(self.changes) if version), 0)

    def others(self, version: int) -> dict[int, int]:
        """Return the ranks on this host that have installed another version than `version`, with theirs."""
        return {rank: installed for rank, installed in self.ranks if rank >= 0 and installed != version}

    def between(self, since: float, until: float) -> tuple[int, ...]:
        """Return the versions that were installed from `since` to `until` (monotonic times), in order."""
        before = [version for at, version in self.changes if at <= since][-1:] or [0]
        return joined(before, [version for at, version in self.changes if since < at <= until])

    def changed(self, rank: int, version: int, at: float) -> "Journal":
        """Return the journal after `rank` installed `version` at monotonic time `at`."""
        ranks = {**dict(self.ranks), rank: version}
        agreed = version if set(ranks.values()) == {version} else 0
        changes = self.changes if self.changes and self.version == agreed else (*self.changes, (at, agreed))
        return Journal(tuple(sorted(ranks.items())), changes[-_MAX_CHANGES:])


_UNREADABLE = Journal(ranks=((-1, 0),))  # replaces an unreadable page; rank -1 never reports, so the version stays 0


def joined(*parts: Sequence[int]) -> tuple[int, ...]:
    """Concatenate sequences of versions, without consecutive repetitions."""
    every = [version for part in parts for version in part]
    return tuple(version for at, version in enumerate(every) if not at or version != every[at - 1])


class Page:
    """A server's page. Thread-safe.

    Raises:
        OSError: The file cannot be created, read or written.
    """

    def __init__(self, path: Path, clock: Callable[[], float] = time.monotonic) -> None:
        self.path, self._clock = path, clock
        self._file = _open(path)
        self._lock = threading.Lock()
        self._last_read: tuple[bytes, Journal] = (b"", Journal())

    def write(self, rank: int, version: int) -> None:
        """Record that worker `rank` has `version` installed from now on.

        Raises:
            TimeoutError: Another process holds the page's lock.
        """
        with self._lock, self._exclusive():
            journal = self._read(1)
            number = _HEADER.unpack(os.pread(self._file, _HEADER.size, 0).ljust(_HEADER.size, b"\0"))[0] + 1
            journal = (_UNREADABLE if journal is None else journal).changed(rank, version, self._clock())
            os.pwrite(self._file, _encode(number, journal), 0)

    def read(self) -> Journal:
        """Return the journal. Takes no lock: reads again if a write is in progress."""
        header, journal = self._last_read
        if header and os.pread(self._file, _HEADER.size, 0) == header:
            return journal
        found = self._read(_READ_ATTEMPTS)
        return _UNREADABLE if found is None else found

    @property
    def version(self) -> int:
        """The version that all workers have installed now; 0 for none."""
        return self.read().version

    def close(self) -> None:
        """Close the file and release its shared lock."""
        os.close(self._file)

    def _read(self, attempts: int) -> Journal | None:
        for _ in range(attempts):
            content = os.pread(self._file, _MAX_BYTES, 0)
            if not content:
                return Journal()
            if (journal := _decode(content)) is not None:
                self._last_read = content[: _HEADER.size], journal
                return journal
            time.sleep(0)
        return None

    @contextlib.contextmanager
    def _exclusive(self) -> Iterator[None]:
        """Exclude the writers of all other processes.

        A record lock, which does not conflict with the shared `flock`. The kernel releases it when a process ends.
        """
        deadline = time.monotonic() + _LOCK_SECONDS
        while True:
            try:
                fcntl.lockf(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except OSError:
                if time.monotonic() > deadline:
                    raise TimeoutError(f"{self.path}: another process has held its lock for {_LOCK_SECONDS:g} s") from None
                time.sleep(0.001)
        try:
            yield
        finally:
            fcntl.lockf(self._file, fcntl.LOCK_UN)


def provide(server: str, environment: MutableMapping[str, str] | None = None, folder: Path = _FOLDER) -> Path | None:
    """Name a new page for `server` in the environment, and remove the pages of dead servers.

    Returns:
        The page's path; `None` if a parent process named one.
    """
    if Path(PAGE.text(environment)).name.rpartition("-")[0] == f"{_PREFIX}-{server}":
        return None
    for path in folder.glob(f"{_PREFIX}-*"):
        remove_stale(path)
    path = folder / f"{_PREFIX}-{server}-{uuid.uuid4().hex}"
    PAGE.set(str(path), environment)
    atexit.register(_remove_at_end, path, os.getpid())
    return path


def remove_stale(path: Path) -> None:
    """Remove the page at `path` unless a process uses it."""
    with contextlib.suppress(OSError):
        file = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            path.unlink()
        finally:
            os.close(file)


def _remove_at_end(path: Path, process: int) -> None:
    if os.getpid() == process:
        for each in (path, *path.parent.glob(f"{path.name}.*")):  # and those of adapters
            each.unlink(missing_ok=True)


@functools.cache
def page(adapter: str = "") -> Page:
    """Return this server's page, or that of one of its adapters.

    Raises:
        KeyError: `provide` was not called in this process or a parent.
    """
    if not (path := PAGE.text()):
        raise KeyError(VARIABLE)
    if not adapter:
        return Page(Path(path))
    return Page(Path(f"{path}.{adapter}"))


@functools.cache
def cut_page(adapter: str) -> Page:
    """Return the page of the versions to which installs cut an adapter's requests in progress over, or OWN.

    Workers write an install to the page of the adapter first, then here. Raises as `page` does.
    """
    return Page(Path(f"{page(adapter).path}:cut"))


def _open(path: Path) -> int:
    while True:
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        fcntl.flock(file, fcntl.LOCK_SH)
        with contextlib.suppress(FileNotFoundError):
            if os.stat(path).st_ino == os.fstat(file).st_ino:
                return file
        os.close(file)  # removed as stale between the two calls


def _encode(number: int, journal: Journal) -> bytes:
    payload = json.dumps([journal.ranks, journal.changes]).encode()
    return _HEADER.pack(number, len(payload), _checksum(number, payload)) + payload


def _decode(content: bytes) -> Journal | None:
    """Return the journal; `None` if `content` is incomplete, or not a journal."""
    if len(content) < _HEADER.size:
        return None
    number, length, checksum = _HEADER.unpack_from(content)
    payload = content[_HEADER.size : _HEADER.size + length]
    if len(payload) != length or _checksum(number, payload) != checksum:
        return None
    try:
        ranks, changes = parse_json(payload)
        journal = Journal(tuple((rank, version) for rank, version in ranks), tuple((at, version) for at, version in changes))
    except (ValueError, TypeError):
        return None
    numbers = [number for pair in journal.ranks for number in pair] + [version for _, version in journal.changes]
    valid = all(type(number) is int for number in numbers) and all(is_number(at) for at, _ in journal.changes)
    return journal if valid else None


def _checksum(number: int, payload: bytes) -> int:
    return zlib.crc32(payload, zlib.crc32(struct.pack("<QI", number, len(payload))))
