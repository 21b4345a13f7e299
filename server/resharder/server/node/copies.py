"""Versions in the shared memory of a node's host: their files, which pieces of them are wanted, and which are held.

    <root>/nonce                             identifies the folder to workers on this host
           versions/<model>/<number>-<nonce>/    the safetensors files of a version, with the store's names
                                       held    bitmap of the pieces that are held

A file is as long as the version's from the start, and its pages come with the pieces. A worker maps the files once the pieces
that it needs are held; others may stay holes. A version that is dropped is unlinked, so that a worker which has mapped it keeps
it. Only files into which ranks have written (`file_sets.py`) are used again, once no process has them open or mapped.

A file whose tensors all have the digests that they have in another version here is not fetched: both versions have it, by a hard
link. Nobody writes to it from then on. If further pieces of it are wanted, the version that wants them gets a copy first.
"""

import os
import secrets
import shutil
import threading
from collections import Counter
from collections.abc import Callable, Collection, Hashable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import numpy as np
import structlog
from resharder.converters.failpoints import failpoint
from resharder.converters.storage.digest import Array
from resharder.converters.storage.files import FileLayout
from resharder.converters.wire.pieces import Bitmap, PieceSpan, number_pieces
from resharder.converters.wire.ranges import HELD_FILE
from resharder.server.data.versions import ServedVersion
from resharder.server.holding.held_files import HeldFiles, pieces_of
from resharder.server.holding.memory import EngineFailed, MemoryEngine, VersionMemory
from resharder.server.infra.filesystem import link, make_folder, matching, move, unused_elsewhere, unwritten_elsewhere, write_at
from resharder.server.node.daemon_client import RemoteVersion
from resharder.server.state.errors import ResourceExhausted, ResourceNotFound

_STUCK_SECONDS = 5.0  # without a piece, after which the reason of the last failure is reported
_RETRY_SECONDS = 2.0  # until a version that could not be created is tried again
_log = structlog.get_logger("resharder.node")


class HeldVersion(HeldFiles):
    """A version on this host. The bitmap of its held pieces is in a file that workers read."""

    def __init__(self, remote: RemoteVersion, folder: Path, reservation: str = "") -> None:
        sizes = {file.path: file.size for file in remote.files}
        super().__init__(remote.name, remote.fingerprint, folder, sizes, number_pieces(remote.files), point="node.write")
        self.contents = {file.path: _content(file, remote) for file in remote.files}
        """Header and tensor digests of each file, by path, equal for files with the same bytes; None without digests."""
        self.reservation = reservation
        """Reservation under which ranks have written files of it here; empty for none."""
        self.daemon_address = remote.data_address
        """Address of the daemon's data port."""
        self._memory: VersionMemory | None = None
        self._writing = Counter[str]()  # writes in progress, by file
        self._shared: dict[str, int] = {}  # inode of each file that another version has too, or had: nobody writes to it

    def hold(self, pieces: Bitmap) -> None:
        """Want and hold pieces, which are in the files already."""
        with self._changed:
            self._wanted, self._held = self._wanted | pieces, self._held | pieces

    def pieces_in(self, file: str) -> Bitmap:
        """Return all pieces of a file."""
        return Bitmap.of(self.numbering.count, self.numbering.touched(file, 0, self.sizes[file]))

    @property
    def shared(self) -> dict[str, int]:
        """Inode of each file that another version has too, or had. No wanted piece of it is missing."""
        with self._changed:
            return dict(self._shared)

    def has(self, pieces: Bitmap, file: str) -> bool:
        """Return whether some pieces of a file, by their positions in it, are held here, and nobody writes to the file."""
        own = self.pieces_in(file)
        with self._changed:
            whole = self._writing[file] == 0 and not len(own & (self._wanted - self._held))
            return whole and not (pieces.flags() & ~self._held.flags()[own.flags()]).any()

    def share(self, file: str, target: Path) -> int:
        """Give another version a file of which `has` is true, at `target`, and return its inode. Raises OSError."""
        with self._changed:
            source = self.folder / file
            mapped = self._memory is not None  # here, for reads of peers
            if not (self.has(Bitmap(len(self.pieces_in(file))), file) and (mapped or unwritten_elsewhere(source))):
                raise OSError(f"{source} is being written")
            link(source, target)
            return self._shared.setdefault(file, target.stat().st_ino)

    def take(self, file: str, inode: int, pieces: Bitmap) -> None:
        """Hold pieces of a file that another version shares with this one."""
        self.hold(pieces)
        with self._changed:
            self._shared[file] = inode

    def own(self, file: str) -> None:
        """Replace a shared file by a copy of its held pieces, so that further ones can be written. Raises OSError."""
        path, part = self.folder / file, self.folder / f"{file}.part"
        try:
            _make_file(part, self.sizes[file])
            with path.open("rb") as source, part.open("r+b") as target:
                for piece in self.pieces_in(file) & self.held():
                    for span in self.numbering.parts(piece):
                        source.seek(span.start)
                        target.seek(span.start)
                        if target.write(source.read(span.end - span.start)) != span.end - span.start:
                            raise OSError(f"{path} ends before {span.end} bytes")
            move(part, path)
        except OSError:
            part.unlink(missing_ok=True)
            raise
        with self._changed:
            del self._shared[file]

    def write(self, part: PieceSpan, content: Array) -> None:
        """Write checked bytes of a piece; a no-op in a shared file, which has them. Raises OSError."""
        with self._changed:
            if part.file in self._shared:
                return
            self._writing[part.file] += 1
        try:
            super().write(part, content)
        finally:
            with self._changed:
                self._writing[part.file] -= 1

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
        self.has_engine = engine is not None
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
        """Return the bytes of all wanted pieces, whether they have arrived or not, and of files into which ranks write.

        Files of several versions count once.
        """
        used, counted = self.reserved_bytes, set[int]()
        for version in self.all():
            pieces = version.wanted()
            for file, inode in version.shared.items():
                if inode in counted:
                    pieces -= version.pieces_in(file)
                counted.add(inode)
            used += version.numbering.size_of(pieces)
        return used

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

    def add(self, remote: RemoteVersion, wanted: Bitmap | None = None) -> HeldVersion:
        """Create the files of a version. Those that other versions here have too are theirs.

        Args:
            remote: The version.
            wanted: Pieces that are needed here; None for all.

        Raises:
            ResourceExhausted: STORE_FULL.
            ValueError: Pieces of another version.
            OSError: The files cannot be created.
        """
        folder = self._path(remote.name)
        version = HeldVersion(remote, folder)
        wanted = wanted or Bitmap.full(version.numbering.count)
        _check_count(version, wanted)
        failpoint("node.layout")
        make_folder(folder)
        try:
            for path in version.sizes:
                self._share(version, path, wanted & version.pieces_in(path))
            self.want(version, wanted)
            for path in version.sizes.keys() - version.shared.keys():
                _make_file(folder / path, version.sizes[path])
            _make_file(folder / HELD_FILE, len(version.held().bits), version.held().to_bytes())
        except BaseException:
            shutil.rmtree(folder, ignore_errors=True)
            raise
        self._add(version)
        return version

    def _share(self, version: HeldVersion, file: str, wanted: Bitmap) -> None:
        """Let a version have a file of another one which has the same tensors, and the pieces that are wanted of it."""
        content = version.contents[file]
        if content is None or not len(wanted):
            return
        at = Bitmap.of(len(version.pieces_in(file)), np.flatnonzero(wanted.flags()[version.pieces_in(file).flags()]).tolist())
        for other in self.all():
            for path in (path for path, each in other.contents.items() if each == content):
                if other.numbering.piece_bytes != version.numbering.piece_bytes or not other.has(at, path):
                    continue
                try:
                    inode = other.share(path, version.folder / file)
                except OSError as error:  # such as a filesystem without hard links
                    _log.warning("not_shared", version=other.name, file=path, reason=str(error))
                    continue
                version.take(file, inode, wanted)
                _log.info("file_shared", version=version.name, file=file, of=other.name)
                return

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
        version = HeldVersion(remote, target, reservation)
        version.hold(pieces_of(version.numbering, files))
        for file in files:
            if (found := (folder / file.path).stat()).st_nlink > 1:  # ranks have left it as it was
                version.take(file.path, found.st_ino, Bitmap(version.numbering.count))
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
        """Add to the wanted pieces of a version. Shared files of which there are further ones become its own.

        A no-op while a transfer engine writes to a version that has shared files. Raises ResourceExhausted (STORE_FULL),
        ValueError for another version's pieces, OSError.
        """
        _check_count(version, pieces)
        further = pieces - version.wanted()
        shared = [file for file in version.shared if len(further & version.pieces_in(file))]
        copied = sum(version.numbering.size_of(version.pieces_in(file) & version.wanted()) for file in shared)
        self.check_room(version.numbering.size_of(further) + copied)
        if shared and not version.release():  # the engine has mapped the files that are replaced
            return
        for file in shared:
            version.own(file)
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
        paths = [version.folder / path for path in version.sizes]
        if not version.release() or not all(path.stat().st_nlink > 1 or unused_elsewhere(path) for path in paths):
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


def _content(file: FileLayout, version: RemoteVersion) -> Hashable | None:
    """Return what is equal for two files with the same bytes; None without digests of all tensors."""
    digests = tuple(version.digests.get(name) for name in file.by_name)
    return (file.header, file.size, digests) if digests and None not in digests else None


def _check_count(version: HeldVersion, pieces: Bitmap) -> None:
    if pieces.count != version.numbering.count:
        raise ValueError(f"expected a bitmap of the {version.numbering.count} pieces of {version.name}, got {pieces.count}")


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
