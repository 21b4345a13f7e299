"""Complete versions at a URL: written and read back, found, fetched, removed.

    <url>/<model>/<number>/archived.json    what there is of the version
    <url>/<model>/<number>/<folder>/        a full version: every file of it, resharder.json included
                                            a delta: <file>.delta, the differences from the files of its base
                                            pieces.json: how each 16 MiB of a file is stored, and their checksums

No object is changed after it was written: each attempt to write a version has a folder of its own. The version is there
once archived.json is, which is written last, after everything was read back, and by one writer: the write fails if another
one was first. Every version between a delta and its full version names the next by number and fingerprint.
"""

import os
import secrets
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import NamedTuple, TypeVar

import structlog
import xxhash
from resharder.converters.failpoints import failpoint
from resharder.converters.storage.delta import PIECE, BadPiece, StoredPiece, checksum, decode, encode
from resharder.server.archive import archived as markers
from resharder.server.archive.archived import DELTA, MARKER, PIECES_FILE, Archived, BaseVersion, File, Pieces, place_of
from resharder.server.archive.remote import Remote
from resharder.server.infra.filesystem import touching, write_at
from resharder.server.infra.medium import medium_error, medium_errors
from resharder.server.state.errors import AlreadyExists, DaemonError, DataLoss, ResourceNotFound, Unavailable
from resharder.server.state.version import MODEL_NAME, VersionRecord
from resharder.server.store.manifest import MANIFEST_FILE

_AT_ONCE = 2  # concurrent files
_CODERS = min(4, os.cpu_count() or 1)  # concurrent pieces; with those that wait, some 0.5 GB of memory
_INVALID = (ValueError, KeyError, TypeError, AttributeError)
_log = structlog.get_logger("resharder.archive")
Found = TypeVar("Found")
ReadFile = Callable[[str, int, int], AbstractContextManager[None]]


class BaseDiffers(DataLoss):
    """Version of the store that is not, byte for byte, the one in the archive: no delta can be made of it."""


@dataclass(frozen=True)
class Source:
    """Files of a version in the store."""

    record: VersionRecord
    folder: Path
    names: Sequence[str]
    reading: ReadFile
    """Function of a file, first byte and end that has these bytes in the folder meanwhile. May raise a DaemonError."""
    contents: Mapping[str, bytes]
    """Contents of files that are not to be read from the folder."""

    @contextmanager
    def open(self, name: str) -> Iterator["_SourceFile"]:
        """Open a file. Its bytes remain while it is open, even if the version retires. Raises ResourceNotFound (VERSION_GONE)."""
        if name in self.contents:
            yield _SourceFile(self, name, -1, len(self.contents[name]))
            return
        path = self.folder / name
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            raise ResourceNotFound(
                "VERSION_GONE", f"{path}: the version was retired, because the store needed its capacity"
            ) from None
        except OSError as error:
            raise medium_error(error) from error
        try:
            yield _SourceFile(self, name, descriptor, os.fstat(descriptor).st_size)
        finally:
            os.close(descriptor)


class _SourceFile(NamedTuple):
    source: Source
    name: str
    descriptor: int
    size: int

    def read(self, start: int, end: int) -> bytes:
        if self.descriptor < 0:
            return self.source.contents[self.name][start:end]
        path = self.source.folder / self.name
        with self.source.reading(self.name, start, end), medium_errors(), touching(path, "reading"):
            failpoint("archive.read")
            found = os.pread(self.descriptor, end - start, start)
        if len(found) != end - start:
            raise Unavailable("STORE_FAILED", f"{path}: expected {self.size} bytes, read {start + len(found)}; try again")
        return found


class Base(NamedTuple):
    """Base of a delta: what the archive has of it, and its files in the store."""

    archived: Archived
    pieces: Pieces
    source: Source


class _Sent(NamedTuple):
    file: File
    object: File
    pieces: tuple[StoredPiece, ...]


class Checkpoints:
    """Checkpoints on `remote`. All methods raise Unavailable: ARCHIVE_FAILED, and DRAINING after `closed` is set."""

    def __init__(self, remote: Remote, closed: threading.Event, wall: Callable[[], float] = time.time) -> None:
        self._remote, self._closed, self._wall = remote, closed, wall

    @property
    def url(self) -> str:
        """URL of the folder of all models."""
        return self._remote.url

    def models(self) -> list[str]:
        """Return the names of models with at least one folder, complete or not."""
        return [name for name in self._remote.names() if MODEL_NAME.fullmatch(name) and self.numbers(name)]

    def numbers(self, model: str) -> list[int]:
        """Return the numbers of a model's folders, newest first, complete or not."""
        names = self._remote.names(model)
        return sorted((int(name) for name in names if name.isascii() and name.isdigit() and len(name) >= 8), reverse=True)

    def find(self, model: str, number: int) -> Archived | None:
        """Return an archived version, or None if there is no complete folder. A damaged archived.json is logged."""
        place = place_of(model, number)
        content = self._remote.content(f"{place}/{MARKER}")
        return None if content is None else self._parsed(content.bytes, model, number)

    def pieces(self, archived: Archived) -> Pieces:
        """Return how a version's pieces are stored. Raises DataLoss (CHECKSUM), also for format 1, which has none."""
        path = f"{archived.place}/{PIECES_FILE}"
        content, expected = self._remote.content(path), archived.objects.get(PIECES_FILE)
        if content is None or expected is None or _file(content.bytes) != expected:
            raise DataLoss("CHECKSUM", f"{self.url}/{path}: expected {expected}, found {content and _file(content.bytes)}")
        try:
            return markers.decode_pieces(content.bytes, archived.files)
        except _INVALID as error:
            raise DataLoss("CHECKSUM", f"{self.url}/{path}: {error!r}") from error

    def chain(self, archived: Archived) -> list[Archived]:
        """Return the versions that a version is restored from: a full one, and the deltas up to it.

        Raises DataLoss (CHECKSUM) that names the base which is missing or another version.
        """
        found = [archived]
        while (base := found[0].base) is not None:
            there = self.find(archived.model, base.number)
            if there is None or there.fingerprint != base.fingerprint or there.depth >= found[0].depth:
                has = "that is missing" if there is None else f"found fingerprint {there.fingerprint} and depth {there.depth}"
                raise DataLoss(
                    "CHECKSUM",
                    f"{found[0].url} is a delta of {place_of(archived.model, base.number)} with fingerprint "
                    f"{base.fingerprint}, {has}: restore another version",
                )
            found.insert(0, there)
        return found

    def write(self, source: Source, base: Base | None = None) -> Archived:
        """Write a version, read it back, then write archived.json; or return the same version of a writer that was faster.

        Args:
            source: The version.
            base: Version to write a delta of; None for a full version.

        Raises ResourceNotFound (VERSION_GONE) if the version or its base retires meanwhile, DataLoss (CHECKSUM; as BaseDiffers
        if the base is not the archived one), AlreadyExists (VERSION_DIFFERS).
        """
        record, folder = source.record, secrets.token_hex(4)
        place = place_of(record.model, record.number)
        marker, objects = f"{place}/{MARKER}", f"{place}/{folder}"
        seen = self._remote.content(marker)
        try:
            archived = self._write_objects(source, base, folder)
            failpoint("archive.before-marker")
            content = markers.encode(archived)
            won = self._remote.create(marker, content) if seen is None else self._remote.replace(marker, content, seen.tag)
        except BaseException:
            with suppress(DaemonError):
                self._remote.clear(objects)
            raise
        if not won:
            self._remote.clear(objects)
            return self._others(record)
        there = self._remote.content(marker)
        if there is None or there.bytes != content:
            raise DataLoss("CHECKSUM", f"{self.url}/{marker}: read back differently than written")
        if seen is not None and (before := self._parsed(seen.bytes, record.model, record.number)) and before.folder:
            self._remote.clear(before.place)
        self._check_base(archived)
        return archived

    def damaged(self, archived: Archived) -> list[str]:
        """Read every object of a version, and return the names of those that are missing or differ from the written ones."""
        names = list(archived.objects)
        found = self._each(lambda name: self._read_back(f"{archived.place}/{name}"), names)
        return [name for name, file in zip(names, found, strict=True) if file != archived.objects[name]]

    def fetch(self, archived: Archived, folder: Path) -> None:
        """Write every file into `folder`. Raises DataLoss (CHECKSUM), which names the object, and OSError."""
        chain = self.chain(archived)
        if len(chain) == 1:
            self._each(lambda name: self._fetch(archived, name, folder / name), list(archived.files))
            return
        links = [(link, self.pieces(link)) for link in chain]
        with ThreadPoolExecutor(_CODERS, "archive-pieces") as coders:
            self._each(lambda name: self._rebuild(links, name, folder / name, coders), list(archived.files))

    def remove(self, model: str, number: int) -> None:
        """Remove a version: first archived.json, then its objects."""
        place = place_of(model, number)
        self._remote.remove(f"{place}/{MARKER}")
        self._remote.clear(place)

    def retain(self, model: str, keep: int) -> list[Archived]:
        """Remove all but the newest `keep` complete versions of a model and the bases that these need; return the removed ones.

        What an interrupted write has left of older versions is removed too.
        """
        numbers = self.numbers(model)
        complete = {number: found for number in numbers if (found := self.find(model, number)) is not None}
        needed: set[int] = set()
        for number in list(complete)[:keep]:
            step: Archived | None = complete[number]
            while step is not None:
                needed.add(step.number)
                step = None if step.base is None else complete.get(step.base.number)
        oldest = min(needed, default=0)
        removed = []
        for number in numbers:  # newest first: a delta goes before its base
            if number not in needed and (number in complete or number < oldest):
                self.remove(model, number)
                removed += [complete[number]] if number in complete else []
        return removed

    # Writing

    def _write_objects(self, source: Source, base: Base | None, folder: str) -> Archived:
        record, suffix = source.record, "" if base is None else DELTA
        place = place_of(record.model, record.number)
        with ThreadPoolExecutor(_CODERS, "archive-coders", initializer=_give_way) as coders:

            def send(name: str) -> _Sent:
                return self._send(source, base, name, f"{place}/{folder}/{name}{suffix}", coders)

            sent = dict(zip(source.names, self._each(send, source.names), strict=True))
        pieces = markers.encode_pieces({name: each.pieces for name, each in sent.items()})
        self._remote.write(f"{place}/{folder}/{PIECES_FILE}", [pieces], len(pieces))
        archived = Archived(
            record.model,
            record.number,
            f"{self.url}/{place}/{folder}",
            record.size_bytes,
            record.fingerprint,
            round(self._wall(), 3),
            record.epoch,
            {name: each.file for name, each in sent.items()},
            folder,
            {f"{name}{suffix}": each.object for name, each in sent.items()} | {PIECES_FILE: _file(pieces)},
            None if base is None else BaseVersion(base.archived.number, base.archived.fingerprint),
            0 if base is None else base.archived.depth + 1,
        )
        if damaged := self.damaged(archived):
            raise DataLoss("CHECKSUM", f"{archived.url}: read back differently than written: {', '.join(damaged[:8])}")
        return archived

    def _send(self, source: Source, base: Base | None, name: str, path: str, coders: ThreadPoolExecutor) -> _Sent:
        with source.open(name) as file, _open_base(base, name, file.size) as before:
            whole, pieces = _Counted(), list[StoredPiece]()

            def coded(start: int) -> tuple[bytes, StoredPiece, bytes | memoryview]:
                self._check_open()
                end = min(start + PIECE, file.size)
                content, old = file.read(start, end), None
                if base is not None and before is not None:
                    old = before.read(start, end)
                    if checksum(old) != base.pieces[name][start // PIECE].checksum:
                        raise BaseDiffers(
                            "CHECKSUM", f"{before.source.folder / name} differs from {base.archived.url} at byte {start} or later"
                        )
                return content, *encode(content, old)

            def stored() -> Iterator[bytes | memoryview]:
                for content, piece, packed in _in_order(coders, coded, range(0, file.size, PIECE)):
                    whole.add(content)
                    pieces.append(piece)
                    yield packed

            counted = _Counted()
            self._remote.write(path, counted.passing(stored()), file.size)
            return _Sent(whole.file(), counted.file(), tuple(pieces))

    def _others(self, record: VersionRecord) -> Archived:
        """Return the version that another writer has archived meanwhile, if it is the same."""
        there = self.find(record.model, record.number)
        if there is None:
            raise Unavailable(
                "ARCHIVE_FAILED", f"{record.name}: another daemon writes it to {self.url} at the same time; try again"
            )
        check_same(there, record)
        return there

    def _check_base(self, archived: Archived) -> None:
        """Remove a delta whose base another daemon has removed meanwhile."""
        try:
            self.chain(archived)
        except DataLoss as error:
            self.remove(archived.model, archived.number)
            raise Unavailable("ARCHIVE_FAILED", f"{error}; it is written again") from error

    # Reading

    def _parsed(self, content: bytes, model: str, number: int) -> Archived | None:
        url = f"{self.url}/{place_of(model, number)}"
        try:
            archived = markers.decode(content, url)
        except _INVALID as error:
            _log.error("archived_json_damaged", url=url, reason=repr(error))
            return None
        return archived if (archived.model, archived.number) == (model, number) else None

    def _read_back(self, path: str) -> File | None:
        if self._remote.size(path) is None:
            return None
        counted = _Counted()
        for _ in counted.passing(self._remote.chunks(path)):
            self._check_open()
        return counted.file()

    def _fetch(self, archived: Archived, name: str, target: Path) -> None:
        path, expected = archived.object_of(name), archived.files[name]
        if (found := self._remote.size(path)) != expected.size:
            raise DataLoss("CHECKSUM", f"{self.url}/{path}: expected {expected.size} bytes, found {found}")
        self._write_verified(target, self._remote.chunks(path), expected, path)

    def _rebuild(self, links: Sequence[tuple[Archived, Pieces]], name: str, target: Path, coders: ThreadPoolExecutor) -> None:
        """Write a file from a full version and deltas, each piece from the last link that has it whole."""
        newest = links[-1][0]
        expected = newest.files[name]
        starts = [list(accumulate((piece.size for piece in pieces.get(name, ())), initial=0)) for _, pieces in links]

        def rebuilt(start: int) -> bytes | memoryview:
            at, size = start // PIECE, min(PIECE, expected.size - start)
            first = len(links) - 1
            while first and links[first][1][name][at].how == "xor":
                first -= 1
                if (there := links[first][0].files.get(name)) is None or there.size != expected.size:
                    raise DataLoss(
                        "CHECKSUM", f"{links[first][0].url}: expected {name} with {expected.size} bytes, found {there}"
                    )
            content: bytes | memoryview | None = None
            for (link, pieces), offsets in zip(links[first:], starts[first:], strict=True):
                self._check_open()
                path, piece = link.object_of(name), pieces[name][at]
                stored = self._remote.read(path, offsets[at], offsets[at] + piece.size)
                try:
                    content = decode(piece, stored, content, size)
                except BadPiece as error:
                    raise DataLoss("CHECKSUM", f"{self.url}/{path}: piece {at}: {error}") from error
            assert content is not None
            return content

        pieces = _in_order(coders, rebuilt, range(0, expected.size, PIECE))
        self._write_verified(target, pieces, expected, newest.object_of(name))

    def _write_verified(self, target: Path, chunks: Iterable[bytes | memoryview], expected: File, path: str) -> None:
        counted = _Counted()
        _write_new(target, expected.size, self._while_open(counted.passing(chunks)))
        if counted.file() != expected:
            raise DataLoss("CHECKSUM", f"{self.url}/{path}: expected hash {expected.xxh3}, read {counted.file().xxh3}")

    def _while_open(self, chunks: Iterable[bytes | memoryview]) -> Iterator[bytes | memoryview]:
        for chunk in chunks:
            self._check_open()
            yield chunk

    def _check_open(self) -> None:
        if self._closed.is_set():
            raise Unavailable("DRAINING", "the daemon is shutting down")

    def _each(self, act: Callable[[str], Found], names: Sequence[str]) -> list[Found]:
        with ThreadPoolExecutor(_AT_ONCE, thread_name_prefix="archive-files") as threads:
            coming = [threads.submit(act, name) for name in names]
            try:
                return [future.result() for future in coming]
            except BaseException:
                threads.shutdown(cancel_futures=True)
                raise


def check_same(there: Archived, record: VersionRecord) -> None:
    """Raise AlreadyExists (VERSION_DIFFERS) if the archive has another version of this number."""
    if there.fingerprint != record.fingerprint:
        raise AlreadyExists(
            "VERSION_DIFFERS",
            f"{there.url} is another {record.name}, with fingerprint {there.fingerprint}: "
            "give this store an archive_url of its own",
        )


class _Counted:
    """Size and hash of chunks that are added, or pass by."""

    def __init__(self) -> None:
        self._hash, self._size = xxhash.xxh3_128(), 0

    def add(self, chunk: bytes | memoryview) -> None:
        self._hash.update(chunk)
        self._size += len(chunk)

    def passing(self, chunks: Iterable[bytes | memoryview]) -> Iterator[bytes | memoryview]:
        for chunk in chunks:
            self.add(chunk)
            yield chunk

    def file(self) -> File:
        return File(self._size, self._hash.hexdigest())


def _file(content: bytes) -> File:
    counted = _Counted()
    counted.add(content)
    return counted.file()


def _give_way() -> None:
    """Let this thread run when no other process wants the core, a trainer's least of all."""
    with suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 19)


@contextmanager
def _open_base(base: Base | None, name: str, size: int) -> Iterator[_SourceFile | None]:
    """Open the base's file; None if it has none of this size. A manifest is that of its version alone, and may be rewritten."""
    there = None if base is None or name == MANIFEST_FILE else base.archived.files.get(name)
    if base is None or there is None or there.size != size:
        yield None
        return
    with base.source.open(name) as file:
        yield file if file.size == size else None


def _in_order(coders: ThreadPoolExecutor, act: Callable[[int], Found], starts: Sequence[int]) -> Iterator[Found]:
    """Yield `act` of each start in order, a few at a time. None is at work when the generator has ended."""
    coming: deque[Future[Found]] = deque()
    try:
        for start in starts:
            coming.append(coders.submit(act, start))
            if len(coming) > _CODERS:
                yield coming.popleft().result()
        while coming:
            yield coming.popleft().result()
    finally:
        for future in coming:
            future.cancel()
        wait(coming)


def _write_new(path: Path, size: int, chunks: Iterable[bytes | memoryview]) -> None:
    with touching(path, "writing", size):
        failpoint("restore.write")
        descriptor, at = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600), 0
        try:
            if size:
                os.posix_fallocate(descriptor, 0, size)  # fail before any copy on a full medium
            for chunk in chunks:
                write_at(descriptor, chunk, at)
                at += len(chunk)
        finally:
            os.close(descriptor)
