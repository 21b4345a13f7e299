"""The page: which version a server's workers on this host have installed, and since when, for all processes of the server.

It is a file in /dev/shm, one per lifetime of a server. Workers write to it; API servers map the time at which the engine core
made a token to the version that was installed then. The engine stands still while a version is being installed, so the mapping is
exact. Version 0 stands for weights that are no confirmed version: not yet installed, torn, dropped, or vLLM's own.

Every process that uses a page holds a shared lock on it, so a page that can be locked exclusively is a dead server's.
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
from collections.abc import Callable, Iterator, MutableMapping
from dataclasses import dataclass
from pathlib import Path

VARIABLE = "RESHARDER_PAGE"  # inherited by all processes of the server
_FOLDER = Path("/dev/shm")
_PREFIX = "resharder-page"
_KEPT = 64  # changes; a token whose time lies before the first of them has no version
_LARGEST = 1 << 16
_LOCK_SECONDS = 10.0
_TRIES = 100
_HEADER = struct.Struct("<QII")  # number of the write, length of what follows, CRC-32 of both and what follows


@dataclass(frozen=True)
class Journal:
    """`ranks`: what each worker has installed. `changes`: (monotonic time, version of all workers together), oldest first."""

    ranks: tuple[tuple[int, int], ...] = ()
    changes: tuple[tuple[float, int], ...] = ()

    @property
    def version(self) -> int:
        return self.changes[-1][1] if self.changes else 0

    def between(self, since: float, until: float) -> tuple[int, ...]:
        """The versions that were installed from `since` to `until`, in order."""
        before = [version for at, version in self.changes if at <= since][-1:] or [0]
        return joined(before, [version for at, version in self.changes if since < at <= until])

    def changed(self, rank: int, version: int, at: float) -> "Journal":
        ranks = {**dict(self.ranks), rank: version}
        agreed = version if set(ranks.values()) == {version} else 0
        changes = self.changes if self.changes and self.version == agreed else (*self.changes, (at, agreed))
        return Journal(tuple(sorted(ranks.items())), changes[-_KEPT:])


_LOST = Journal(ranks=((-1, 0),))  # in place of a page that cannot be read: no worker's word makes it whole again


def joined(*parts: "tuple[int, ...] | list[int]") -> tuple[int, ...]:
    """One after the other, without repetitions of the one before."""
    every = [version for part in parts for version in part]
    return tuple(version for at, version in enumerate(every) if not at or version != every[at - 1])


class Page:
    """For any thread. Raises OSError where the file cannot be made, read or written."""

    def __init__(self, path: Path, clock: Callable[[], float] = time.monotonic) -> None:
        self.path, self._clock = path, clock
        self._file = _open(path)
        self._lock = threading.Lock()
        self._known: tuple[bytes, Journal] = (b"", Journal())

    def write(self, rank: int, version: int) -> None:
        """From now on this worker has `version` installed. Raises TimeoutError where another process holds the page."""
        with self._lock, self._alone():
            journal = self._read(1)
            number = _HEADER.unpack(os.pread(self._file, _HEADER.size, 0).ljust(_HEADER.size, b"\0"))[0] + 1
            journal = (_LOST if journal is None else journal).changed(rank, version, self._clock())
            os.pwrite(self._file, _encode(number, journal), 0)

    def read(self) -> Journal:
        """What was written last. Reading takes no lock: what a writer is in the middle of is read again."""
        header, journal = self._known
        if header and os.pread(self._file, _HEADER.size, 0) == header:
            return journal
        found = self._read(_TRIES)
        return _LOST if found is None else found

    @property
    def version(self) -> int:
        """What all workers have installed now."""
        return self.read().version

    def close(self) -> None:
        os.close(self._file)

    def _read(self, tries: int) -> Journal | None:
        for _ in range(tries):
            content = os.pread(self._file, _LARGEST, 0)
            if not content:
                return Journal()
            if (journal := _decode(content)) is not None:
                self._known = content[: _HEADER.size], journal
                return journal
            time.sleep(0)
        return None

    @contextlib.contextmanager
    def _alone(self) -> Iterator[None]:
        """Among writers of all processes. The lock is of another kind than the shared one; a process that ends gives it up."""
        deadline = time.monotonic() + _LOCK_SECONDS
        while True:
            try:
                fcntl.lockf(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except OSError:
                if time.monotonic() > deadline:
                    raise TimeoutError(
                        f"{self.path}: expected its lock within {_LOCK_SECONDS:g} s, another process holds it"
                    ) from None
                time.sleep(0.001)
        try:
            yield
        finally:
            fcntl.lockf(self._file, fcntl.LOCK_UN)


def provide(server: str, environment: MutableMapping[str, str] = os.environ, folder: Path = _FOLDER) -> Path | None:
    """Names a new page for `server` in the environment; None where a parent process has. Removes those of dead servers."""
    if Path(environment.get(VARIABLE, "")).name.rpartition("-")[0] == f"{_PREFIX}-{server}":
        return None
    for path in folder.glob(f"{_PREFIX}-*"):
        remove_stale(path)
    path = folder / f"{_PREFIX}-{server}-{uuid.uuid4().hex}"
    environment[VARIABLE] = str(path)
    atexit.register(_remove_at_end, path, os.getpid())
    return path


def remove_stale(path: Path) -> None:
    """Unless a process uses it."""
    with contextlib.suppress(OSError):
        file = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            path.unlink()
        finally:
            os.close(file)


def _remove_at_end(path: Path, process: int) -> None:
    if os.getpid() == process:
        path.unlink(missing_ok=True)


@functools.cache
def page() -> Page:
    """This server's. Raises KeyError where no page was provided."""
    return Page(Path(os.environ[VARIABLE]))


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
    """None where it is not whole."""
    if len(content) < _HEADER.size:
        return None
    number, length, checksum = _HEADER.unpack_from(content)
    payload = content[_HEADER.size : _HEADER.size + length]
    if len(payload) != length or _checksum(number, payload) != checksum:
        return None
    ranks, changes = json.loads(payload)
    return Journal(tuple((rank, version) for rank, version in ranks), tuple((at, version) for at, version in changes))


def _checksum(number: int, payload: bytes) -> int:
    return zlib.crc32(payload, zlib.crc32(struct.pack("<QI", number, len(payload))))
