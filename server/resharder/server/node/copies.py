"""Versions in the shared memory of a node's host: their files, which pieces of them are wanted, and which are held.

    <root>/nonce                             identifies the folder to workers on this host
           versions/<model>/<number>-<nonce>/    the safetensors files of a version, with the store's names
                                       held    bitmap of the pieces that are held

A file is as long as the version's from the start, and its pages come with the pieces. A worker maps the files once the pieces
that it needs are held; others may stay holes. A version that is dropped is unlinked, so that a worker which has mapped it keeps
it. Only files into which ranks have written (`file_sets.py`) are used again, once no process has them open or mapped.
"""

import os
import secrets
import shutil
import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import structlog
from resharder.converters.failpoints import failpoint
from resharder.converters.storage.files import FileLayout
from resharder.converters.wire.pieces import Bitmap, PieceSpan, number_pieces
from resharder.converters.wire.ranges import HELD_FILE
from resharder.server.data.versions import ServedVersion
from resharder.server.holding.held_files import HeldFiles, pieces_of
from resharder.server.holding.memory import EngineFailed, MemoryEngine, VersionMemory
from resharder.server.infra.filesystem import make_folder, matching, move, unused_elsewhere, write_at
from resharder.server.node.daemon_client import RemoteVersion
from resharder.server.state.errors import ResourceExhausted, ResourceNotFound

_STUCK_SECONDS = 5.0  # without a piece, after which the reason of the last failure is reported
_RETRY_SECONDS = 2.0  # until a version that could not be created is tried again
_log = structlog.get_logger("resharder.node")


class HeldVersion(HeldFiles):
    """A version on this host. The bitmap of its held pieces is in a file that workers read."""

    def __init__(self, name: str, fingerprint: str, folder: Path, files: Sequence[FileLayout], reservation: str = "") -> None:
        sizes = {file.path: file.size for file in files}
        super().__init__(name, fingerprint, folder, sizes, number_pieces(files), point="node.write")
        self.reservation = reservation
        """Reservation under which ranks have written files of it here; empty for none."""
        self.daemon_address = ""
        """Address of the daemon's data port."""
        self._memory: VersionMemory | None = None

    def hold(self, pieces: Bitmap) -> None:
        """Want and hold pieces, which are in the files already."""
        with self._changed:
            self._wanted, self._held = self._wanted | pieces, self._held | pieces

    def _record(self, held: Bitmap) -> None:
        with suppress(FileNotFoundError):  # dropped in the meantime
            descriptor = os.open(self.folder / HELD_FILE, os.O_WRONLY | os.O_CLOEXEC)
            try:
                write_at(descriptor, held.bits.data, 0)
            finally:
                os.close(descriptor)

    @property
    def memory(self) -> VersionMemory | None:
        """The files in the memory of a transfer engine; None without one, and after `release`."""
        with self._changed:
            return self._memory

    def addresses(self) -> tuple[int, ...]:
        """Return the addresses of the files in the memory of the transfer engine; none if they are not there."""
        memory = self.memory
        return memory.addresses if memory is not None else ()

    def offer(self, memory: VersionMemory | None) -> None:
        """Offer the version's files in the memory of a transfer engine."""
        with self._changed:
            self._memory = memory

    def release(self) -> bool:
        """Offer the files to the transfer engine no longer. Returns False while it writes to them."""
        if not self.claims.close():
            return False
        with self._changed:
            memory, self._memory = self._memory, None
        if memory is not None:
            memory.close()
        return True

    @contextmanager
    def reading(self, spans: Collection[PieceSpan]) -> Iterator[None]:
        """Check that bytes of files are there. Raises ResourceNotFound (VERSION_UNKNOWN)."""
        held = self.held()
        missing = [piece for span in spans for piece in self.numbering.touched(*span) if piece not in held]
        if missing:
            raise ResourceNotFound("VERSION_UNKNOWN", f"this node does not hold piece {missing[0]} of {self.name} yet")
        yield


class NodeCopies:
    """All versions of a node. Thread-safe. The constructor removes what an earlier process has left.

    Args:
        root: Folder of the node, locked by the caller.
        limit_bytes: Bound on the bytes of versions.
        engine: Transfer engine to which the versions' files are offered, if any.
    """

    def __init__(self, root: Path, limit_bytes: int, engine: MemoryEngine | None = None) -> None:
        self._root, self.limit_bytes, self._engine = make_folder(root / "versions"), limit_bytes, engine
        self._lock = threading.Lock()
        self._by_name: dict[str, HeldVersion] = {}
        self.reserved_bytes = 0
        """Bytes of files into which ranks write, beside the versions."""
        self._recycle: Callable[[str, Path], bool] = lambda reservation, folder: False
        for left in matching(self._root, "*"):
            shutil.rmtree(left)

    def all(self) -> list[HeldVersion]:
        with self._lock:
            return list(self._by_name.values())

    def get(self, name: str) -> HeldVersion | None:
        """Return a version, or None."""
        with self._lock:
            return self._by_name.get(name)

    def used_bytes(self) -> int:
        """Return the bytes of all wanted pieces, whether they have arrived or not, and of files into which ranks write."""
        return sum(version.numbering.size_of(version.wanted()) for version in self.all()) + self.reserved_bytes

    def recycle_by(self, recycle: Callable[[str, Path], bool]) -> None:
        """Give folders of dropped versions, with the id of their reservation, to a function; it returns False to unlink one."""
        self._recycle = recycle

    def check_room(self, needed: int) -> None:
        """Raise ResourceExhausted (STORE_FULL) without memory for `needed` further bytes."""
        found = os.statvfs(self._root)
        promised = sum(other.numbering.size_of(other.missing()) for other in self.all())
        free = min(self.limit_bytes - self.used_bytes(), found.f_bavail * found.f_frsize - promised)
        if needed > free:
            raise ResourceExhausted(
                "STORE_FULL", f"memory full: it needs {needed} bytes, {max(0, free)} of {self.limit_bytes} are free"
            )

    def add(self, name: str, fingerprint: str, files: Sequence[FileLayout], wanted: Bitmap | None = None) -> HeldVersion:
        """Create the files of a version.

        Args:
            name: Resource name.
            fingerprint: Its fingerprint.
            files: Its files.
            wanted: Pieces that are needed here; None for all.

        Raises:
            ResourceExhausted: STORE_FULL.
            ValueError: Pieces of another version.
            OSError: The files cannot be created.
        """
        folder = self._path(name)
        version = HeldVersion(name, fingerprint, folder, files)
        self.want(version, wanted or Bitmap.full(version.numbering.count))
        failpoint("node.layout")
        make_folder(folder)
        for path, size in {HELD_FILE: len(version.held().bits), **version.sizes}.items():
            _make_file(folder / path, size)
        self._add(version)
        return version

    def adopt(self, remote: RemoteVersion, folder: Path, files: Sequence[FileLayout], reservation: str) -> HeldVersion:
        """Hold a READY version in the folder into which ranks have written some of its files, verified since.

        Args:
            remote: The version.
            folder: The folder.
            files: The files in it.
            reservation: Id under which they may be used again.

        Raises:
            ValueError: Files that the version does not have.
            OSError: Its other files cannot be created.
        """
        if not {*files} <= {*remote.files}:
            raise ValueError(f"{remote.name} has other files than the ones that ranks have written here")
        target = self._path(remote.name)
        version = HeldVersion(remote.name, remote.fingerprint, target, remote.files, reservation)
        version.daemon_address = remote.data_address
        version.hold(pieces_of(version.numbering, files))
        for path in version.sizes.keys() - {file.path for file in files}:
            _make_file(folder / path, version.sizes[path])
        _make_file(folder / HELD_FILE, len(version.held().bits), version.held().to_bytes())
        make_folder(target.parent)
        move(folder, target)
        self._add(version)
        return version

    def _path(self, name: str) -> Path:
        model, number = name.split("/")[1::2]
        # Never an earlier path: a worker with the path of an earlier copy must not map one that is not whole.
        return self._root / model / f"{int(number):08}-{secrets.token_hex(4)}"

    def _add(self, version: HeldVersion) -> None:
        if self._engine is not None:
            version.offer(VersionMemory(self._engine, version.folder, version.sizes))
            _register(version, version.wanted())
        with self._lock:
            self._by_name[version.name] = version

    def want(self, version: HeldVersion, pieces: Bitmap) -> None:
        """Add to the wanted pieces of a version. Raises ResourceExhausted (STORE_FULL), ValueError for another version's."""
        if pieces.count != version.numbering.count:
            raise ValueError(f"expected a bitmap of the {version.numbering.count} pieces of {version.name}, got {pieces.count}")
        self.check_room(version.numbering.size_of(pieces - version.wanted()))
        further = pieces - version.wanted()
        version.want(pieces)
        _register(version, further)

    def drop(self, name: str) -> bool:
        """Drop a version, unless a process has a file of it open or mapped. Returns whether it is gone. Raises OSError.

        Its files are unlinked, or used again under the reservation of which they are.
        """
        version = self.get(name)
        if version is None:
            return True
        failpoint("node.drop")
        if not version.release() or not all(unused_elsewhere(version.folder / path) for path in version.sizes):
            return False
        with self._lock:
            del self._by_name[name]
        if not version.reservation or not self._recycle(version.reservation, version.folder):
            shutil.rmtree(version.folder)
        return True

    @contextmanager
    def pinned(self, model: str, number: int) -> Iterator[ServedVersion]:
        """Yield a version for the data port, which keeps its files open. Raises ResourceNotFound (VERSION_UNKNOWN)."""
        version = self.get(f"models/{model}/versions/{number}")
        if version is None:
            raise ResourceNotFound("VERSION_UNKNOWN", f"this node does not hold models/{model}/versions/{number}")
        yield ServedVersion(version.name, version.fingerprint, version.sizes, version.folder, version.reading)


def _make_file(path: Path, size: int, content: bytes = b"") -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        os.ftruncate(descriptor, size)
        write_at(descriptor, content, 0)
    finally:
        os.close(descriptor)


def _register(version: HeldVersion, pieces: Bitmap) -> None:
    """Register pieces of a version with the transfer engine, if it is offered to one; if that fails, it is offered no longer."""
    memory = version.memory
    if memory is None:
        return
    try:
        memory.register(version.numbering.span(piece) for piece in pieces)
    except EngineFailed as error:
        _log.warning("not_registered", version=version.name, reason=str(error))
        version.release()


class CopyProblems:
    """Problems with creating or enlarging versions, and the time of the next attempt; progress of the others. Thread-safe."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock, self._lock = clock, threading.Lock()
        self._found: dict[str, tuple[str, float]] = {}
        self._progress: dict[str, tuple[int, float]] = {}  # pieces, and since when

    def all(self) -> dict[str, str]:
        """Return the problem of each version that has one."""
        with self._lock:
            return {name: problem for name, (problem, _) in self._found.items()}

    def waits(self, name: str) -> bool:
        """Return whether the next attempt is not due yet."""
        with self._lock:
            return self._found.get(name, ("", 0.0))[1] > self._clock()

    def add(self, name: str, problem: str) -> bool:
        """Record a problem, and return whether it is another one than before."""
        with self._lock:
            former, _ = self._found.get(name, ("", 0.0))
            self._found[name] = problem, self._clock() + _RETRY_SECONDS
            return former != problem

    def solved(self, name: str) -> None:
        """Forget the problem of a version."""
        with self._lock:
            self._found.pop(name, None)

    def forget(self, name: str) -> None:
        """Forget a version that was dropped."""
        self.solved(name)
        with self._lock:
            self._progress.pop(name, None)

    def stuck(self, version: HeldVersion, reason: str) -> str:
        """Return why no piece of a version has arrived for some seconds; empty while pieces arrive.

        `reason`: that of the last failed request; empty if it did not fail.
        """
        held, now = len(version.held()), self._clock()
        with self._lock:
            pieces, since = self._progress.get(version.name, (-1, now))
            if held != pieces:
                self._progress[version.name] = held, now
                return ""
        stuck = len(version.missing()) and now - since > _STUCK_SECONDS and reason
        return f"no piece for {now - since:.0f} s: {reason}" if stuck else ""
