"""Complete versions at a URL: written and read back, found, fetched, removed.

    <url>/<model>/latest.json               which version is the newest, written after it is there
    <url>/<model>/<number>/archived.json    what there is of the version
    <url>/<model>/<number>/<folder>/        in full: every file of it, resharder.json included, and pieces.json
                                            as a delta: <file>.delta, the differences from the files of its base
                                            pieces.json, pieces.json.delta: how each 16 MiB is stored, and checksums

A version may be there in both ways: a store that has the version before reads the deltas, another one the files. No object is
changed after it was written: each attempt to write a version has a folder of its own. The version is there once archived.json
is, which is written last, after everything was read back, and by one writer: the write fails if another one was first. Every
delta names the version that it is one of by number and fingerprint.
"""

import os
import secrets
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import NamedTuple, TypeVar

import numpy as np
import structlog
import xxhash
from resharder.converters.failpoints import failpoint
from resharder.converters.storage.delta import PIECE, BadPiece, Buffer, StoredPiece, checksum, decode, encode
from resharder.server.archive import archived as markers
from resharder.server.archive.archived import (
    DELTA,
    LATEST,
    MARKER,
    PIECES_FILE,
    Archived,
    BaseVersion,
    File,
    Latest,
    Pieces,
    place_of,
)
from resharder.server.archive.remote import Content, Remote
from resharder.server.infra.filesystem import touching, write_at
from resharder.server.infra.medium import medium_error, medium_errors
from resharder.server.state.errors import AlreadyExists, DaemonError, DataLoss, ResourceNotFound, Unavailable
from resharder.server.state.version import MODEL_NAME, VersionRecord
from resharder.server.store.manifest import MANIFEST_FILE

_AT_ONCE = 2  # concurrent files
_BLOCK, _BLOCKS_AHEAD, _READERS = 2 << 20, 3, 8  # bytes of a shared read, how many are begun ahead, and at once
_TRIES = 5  # of a conditional write
_CODERS = min(8, os.cpu_count() or 1)  # concurrent pieces; with those that wait, 1 GB of memory at most
_INVALID = (ValueError, KeyError, TypeError, AttributeError)
_log = structlog.get_logger("resharder.archive")
Found = TypeVar("Found")
Given = TypeVar("Given")
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
            raise ResourceNotFound("VERSION_GONE", f"{path}: the version was retired while it was read") from None
        except OSError as error:
            raise medium_error(error) from error
        try:
            yield _SourceFile(self, name, descriptor, os.fstat(descriptor).st_size)
        finally:
            os.close(descriptor)

    def read_into(self, name: str, start: int, buffer: Buffer) -> memoryview:
        """Fill a buffer with the bytes of a file from `start`; return those that there are. Raises as `open` does."""
        with self.open(name) as file:
            path, end = self.folder / name, start + len(buffer)
            with self.reading(name, start, end), medium_errors(), touching(path, "reading"):
                return buffer[: os.preadv(file.descriptor, [buffer.data], start)].data


class _SourceFile(NamedTuple):
    source: Source
    name: str
    descriptor: int
    size: int

    def read_into(self, buffer: Buffer, start: int) -> memoryview:
        """Fill a buffer with the bytes from `start`. Raises Unavailable (STORE_FAILED) if there are fewer."""
        end = start + len(buffer)
        if self.descriptor < 0:
            buffer[:] = np.frombuffer(self.source.contents[self.name][start:end], np.uint8)
            return buffer.data
        path = self.source.folder / self.name
        with self.source.reading(self.name, start, end), medium_errors(), touching(path, "reading"):
            failpoint("archive.read")
            found = os.preadv(self.descriptor, [buffer.data], start)
        if found != len(buffer):
            raise Unavailable("STORE_FAILED", f"{path}: expected {self.size} bytes, read {start + found}; try again")
        return buffer.data


Held = Mapping[BaseVersion, Callable[[], AbstractContextManager[Source]]]
"""Versions of a store: functions that return a context with their files, which may raise ResourceNotFound (VERSION_GONE)."""


class Link(NamedTuple):
    """One archived version on the way to another: its files in full, or its deltas."""

    archived: Archived
    delta: bool


class Way(NamedTuple):
    """A way to a version's bytes: `size` bytes of links, the first one in full or a delta of a version that the store has."""

    size: int
    base: BaseVersion | None
    links: tuple[Link, ...]


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

    def models(self, besides: Collection[str] = ()) -> list[str]:
        """Return the names of models with at least one folder, complete or not, besides those given."""
        names = [name for name in self._remote.names() if MODEL_NAME.fullmatch(name) and name not in besides]
        return [name for name in names if self.numbers(name)]

    def numbers(self, model: str) -> list[int]:
        """Return the numbers of a model's folders, newest first, complete or not."""
        names = self._remote.names(model)
        return sorted((int(name) for name in names if name.isascii() and name.isdigit() and len(name) >= 8), reverse=True)

    def find(self, model: str, number: int) -> Archived | None:
        """Return an archived version, or None if there is no complete folder. A damaged archived.json is logged."""
        place = place_of(model, number)
        content = self._remote.content(f"{place}/{MARKER}")
        return None if content is None else self._parsed(content.bytes, model, number)

    def latest(self, model: str, seen: Content | None = None) -> tuple[Latest | None, Content | None]:
        """Return what latest.json of a model says, and its content; None without one. `seen`: as of `Remote.content`.

        Raises DataLoss (CHECKSUM) if it is damaged, or another model's.
        """
        path = f"{model}/{LATEST}"
        content = self._remote.content(path, seen)
        if content is None:
            return None, None
        try:
            found = markers.decode_latest(content.bytes)
            if found.model != model:
                raise ValueError(f"it is that of model {found.model[:64]!r}")
        except _INVALID as error:
            raise DataLoss("CHECKSUM", f"{self.url}/{path} is damaged: {error}") from error
        return found, content

    def point_at(self, archived: Archived) -> None:
        """Let latest.json name a version, unless it names a newer one that is there.

        Raises Unavailable (ARCHIVE_FAILED) if others write it at the same time, again and again.
        """
        model, path = archived.model, f"{archived.model}/{LATEST}"
        for _ in range(_TRIES):
            try:
                known, seen = self.latest(model)
            except DataLoss as error:
                _log.warning("archive_damaged", reason=str(error))
                known, seen = None, self._remote.content(path)
            if known is not None and known[1:3] == (archived.number, archived.fingerprint):
                return
            if known is not None and known.number > archived.number and self.find(model, known.number) is not None:
                return
            lineage = (archived.lineage or secrets.token_hex(8)) if known is None else known.lineage
            content = markers.encode_latest(Latest(model, archived.number, archived.fingerprint, lineage, archived.archive_time))
            if self._remote.create(path, content) if seen is None else self._remote.replace(path, content, seen.tag):
                return
        raise Unavailable("ARCHIVE_FAILED", f"{self.url}/{path}: other daemons write it at the same time; try again")

    def pieces(self, archived: Archived, *, delta: bool) -> Pieces:
        """Return how the pieces of a version, or with `delta` those of its deltas, are stored.

        Raises DataLoss (CHECKSUM), also for format 1, which has none.
        """
        path = archived.object_of(PIECES_FILE, delta=delta)
        content, expected = self._remote.content(path), archived.objects.get(path.rpartition("/")[2])
        if content is None or expected is None or _file(content.bytes) != expected:
            raise DataLoss("CHECKSUM", f"{self.url}/{path}: expected {expected}, found {content and _file(content.bytes)}")
        try:
            return markers.decode_pieces(content.bytes, archived.files)
        except _INVALID as error:
            raise DataLoss("CHECKSUM", f"{self.url}/{path}: {error!r}") from error

    def chain(self, archived: Archived) -> list[Archived]:
        """Return the versions that a store without any restores a version from: a full one, and the deltas up to it.

        Raises DataLoss (CHECKSUM) that names the base which is missing or another version.
        """
        found = [archived]
        while not found[0].full:
            found.insert(0, self._base_of(found[0]))
        return found

    def ways(self, archived: Archived, held: Held) -> list[Way]:
        """Return the ways to a version's bytes, the one with the fewest bytes to read first, for a store that has `held`.

        Raises DataLoss (CHECKSUM) if there is none, which names the base that is missing or another version.
        """
        found, step, links, size = list[Way](), archived, tuple[Link, ...](), 0
        while True:
            if step.full:
                found.append(Way(size + step.stored_bytes(delta=False), None, (Link(step, delta=False), *links)))
            if step.base is None:
                break
            size += step.stored_bytes(delta=True)
            links = (Link(step, delta=True), *links)
            if step.base in held:
                found.append(Way(size, step.base, links))
                break
            if found and size >= min(way.size for way in found):
                break
            try:
                step = self._base_of(step)
            except DataLoss:
                if not found:
                    raise
                break
        return sorted(found, key=lambda way: way.size)

    def write(self, source: Source, base: Base | None = None, *, full: bool = True) -> Archived:
        """Write a version, read it back, then write archived.json; or return the same version of a writer that was faster.

        Args:
            source: The version.
            base: Version to write deltas of; None for none.
            full: Whether to write it in full, with or without deltas.

        Raises ResourceNotFound (VERSION_GONE) if the version or its base retires meanwhile, DataLoss (CHECKSUM; as BaseDiffers
        if the base is not the archived one), AlreadyExists (VERSION_DIFFERS).
        """
        record, folder = source.record, secrets.token_hex(4)
        place = place_of(record.model, record.number)
        marker, objects = f"{place}/{MARKER}", f"{place}/{folder}"
        seen, lineage = self._remote.content(marker), self._lineage(record.model)
        try:
            archived = self._write_objects(source, base, folder, lineage, full=full)
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
        whole = self._each(lambda name: self._is_whole(f"{archived.place}/{name}", archived.objects[name]), names, _READERS)
        return [name for name, is_whole in zip(names, whole, strict=True) if not is_whole]

    def fetch(self, archived: Archived, folder: Path, held: Held) -> Way:
        """Write every file into `folder` by the cheapest way, and return that.

        If the objects of one way are damaged, the next one is tried. Raises DataLoss (CHECKSUM), which names the object of the
        cheapest one, and OSError.
        """
        failed: DataLoss | None = None
        ways = self.ways(archived, held)
        while ways:
            way, ways = ways[0], ways[1:]
            try:
                self._fetch_by(way, folder, held)
                return way
            except (BaseDiffers, ResourceNotFound) as error:  # of the store, not of the archive
                _log.warning("archive_base_unused", version=archived.name, reason=str(error))
                ways = self.ways(archived, {})
            except DataLoss as error:
                _log.warning("archive_damaged", version=archived.name, reason=str(error))
                failed = failed or error
            for left in folder.iterdir():
                left.unlink()
        assert failed is not None
        raise failed

    def remove(self, model: str, number: int) -> None:
        """Remove a version: first archived.json, then its objects."""
        place = place_of(model, number)
        self._remote.remove(f"{place}/{MARKER}")
        self._remote.clear(place)

    def retain(self, model: str, keep: int) -> list[Archived]:
        """Remove all but the newest `keep` complete versions of a model, the newest one that LATEST does not skip, and the bases
        that these need; return the removed ones.

        What an interrupted write has left of older versions is removed too.
        """
        numbers = self.numbers(model)
        found = zip(numbers, self._each(lambda number: self.find(model, number), numbers, _READERS), strict=True)
        complete = {number: archived for number, archived in found if archived is not None}
        needed: set[int] = set()
        latest = [number for number, found in complete.items() if not found.skipped][:1]
        for number in [*list(complete)[:keep], *latest]:
            step: Archived | None = complete[number]
            while step is not None:
                needed.add(step.number)
                step = None if step.full or step.base is None else complete.get(step.base.number)
        oldest = min(needed, default=0)
        removed = []
        for number in numbers:  # newest first: a delta goes before its base
            if number not in needed and (number in complete or number < oldest):
                self.remove(model, number)
                removed += [complete[number]] if number in complete else []
        return removed

    # Writing

    def _lineage(self, model: str) -> str:
        """Return the lineage of a model's versions: that of latest.json, or if it is gone of the newest version."""
        with suppress(DataLoss):
            if (latest := self.latest(model)[0]) is not None:
                return latest.lineage
        found = (self.find(model, number) for number in self.numbers(model))
        known = next((archived.lineage for archived in found if archived is not None), "")
        return known or secrets.token_hex(8)

    def _write_objects(self, source: Source, base: Base | None, folder: str, lineage: str, *, full: bool) -> Archived:
        record, place = source.record, f"{place_of(source.record.model, source.record.number)}/{folder}"
        ways = ([None] if full else []) + ([base] if base is not None else [])
        objects: dict[str, File] = {}
        with ThreadPoolExecutor(_CODERS, "archive-coders", initializer=_give_way) as coders:
            for way in ways:
                suffix = "" if way is None else DELTA

                def send(name: str, way: Base | None = way, suffix: str = suffix) -> _Sent:
                    return self._send(source, way, name, f"{place}/{name}{suffix}", coders)

                sent = dict(zip(source.names, self._each(send, source.names), strict=True))
                pieces = markers.encode_pieces({name: each.pieces for name, each in sent.items()})
                self._remote.write(f"{place}/{PIECES_FILE}{suffix}", [pieces], len(pieces))
                objects |= {f"{name}{suffix}": each.object for name, each in sent.items()}
                objects[f"{PIECES_FILE}{suffix}"] = _file(pieces)
        archived = Archived(
            record.model,
            record.number,
            f"{self.url}/{place}",
            record.size_bytes,
            record.fingerprint,
            round(self._wall(), 3),
            record.epoch,
            {name: each.file for name, each in sent.items()},
            folder,
            objects,
            None if base is None else BaseVersion(base.archived.number, base.archived.fingerprint),
            full,
            0 if full or base is None else base.archived.depth + 1,
            record.skipped,
            lineage,
        )
        if damaged := self.damaged(archived):
            raise DataLoss("CHECKSUM", f"{archived.url}: read back differently than written: {', '.join(damaged[:8])}")
        return archived

    def _send(self, source: Source, base: Base | None, name: str, path: str, coders: ThreadPoolExecutor) -> _Sent:
        with source.open(name) as file, _open_base(base, name, file.size) as before:
            whole, pieces, buffers = _Counted(), list[StoredPiece](), _Buffers(min(PIECE, file.size))

            def coded(start: int) -> tuple[Buffer, memoryview, StoredPiece, bytes | memoryview]:
                self._check_open()
                size, used, old = min(PIECE, file.size - start), buffers.take(), None
                content = file.read_into(used[:size], start)
                if base is None or before is None:
                    return used, content, *encode(content, None)
                old = buffers.take()
                if checksum(before.read_into(old[:size], start)) != base.pieces[name][start // PIECE].checksum:
                    raise BaseDiffers(
                        "CHECKSUM", f"{before.source.folder / name} differs from {base.archived.url} at byte {start} or later"
                    )
                piece, packed = encode(content, old[:size].data)
                buffers.give_back(old)
                return used, content, piece, packed

            def stored() -> Iterator[bytes | memoryview]:
                for used, content, piece, packed in _in_order(coders, coded, range(0, file.size, PIECE)):
                    whole.add(content)
                    pieces.append(piece)
                    yield packed
                    if piece.how == "xor":  # else what was yielded is in the buffer, and is sent later
                        buffers.give_back(used)

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
        """Remove a delta whose base another daemon has removed meanwhile. It removes a delta before the base of that."""
        try:
            if not archived.full:
                self._base_of(archived)
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

    def _is_whole(self, path: str, expected: File) -> bool:
        """Read an object, and return whether it is there as it was written."""
        counted = _Counted()
        for _ in counted.passing(self._remote.chunks(path, expected.size)):
            self._check_open()
        return counted.file() == expected and (expected.size > 0 or self._remote.size(path) == 0)

    def _base_of(self, archived: Archived) -> Archived:
        base = archived.base
        assert base is not None
        there = self.find(archived.model, base.number)
        if there is None or there.fingerprint != base.fingerprint or (archived.depth and there.depth >= archived.depth):
            has = "that is missing" if there is None else f"found fingerprint {there.fingerprint} and depth {there.depth}"
            raise DataLoss(
                "CHECKSUM",
                f"{archived.url} is a delta of {place_of(archived.model, base.number)} with fingerprint "
                f"{base.fingerprint}, {has}: restore another version",
            )
        return there

    def _fetch_by(self, way: Way, folder: Path, held: Held) -> None:
        newest = way.links[-1].archived
        if not way.links[-1].delta:
            self._each(lambda name: self._fetch(newest, name, folder / name), list(newest.files))
            return
        with nullcontext() if way.base is None else held[way.base]() as base:
            links = [(link, self.pieces(link.archived, delta=link.delta)) for link in way.links]
            with (
                ThreadPoolExecutor(_CODERS, "archive-pieces") as coders,
                ThreadPoolExecutor(_READERS, "archive-reads") as readers,
            ):
                self._each(lambda name: self._rebuild(base, links, name, folder / name, coders, readers), list(newest.files))

    def _fetch(self, archived: Archived, name: str, target: Path) -> None:
        path, expected = archived.object_of(name, delta=False), archived.files[name]
        if (found := self._remote.size(path)) != expected.size:
            raise DataLoss("CHECKSUM", f"{self.url}/{path}: expected {expected.size} bytes, found {found}")
        self._write_verified(target, self._remote.chunks(path, expected.size), expected, path)

    def _rebuild(
        self,
        base: Source | None,
        links: Sequence[tuple[Link, Pieces]],
        name: str,
        target: Path,
        coders: ThreadPoolExecutor,
        readers: ThreadPoolExecutor,
    ) -> None:
        """Write a file from links and perhaps a base in the store, each piece from the last link that has it whole."""
        newest = links[-1][0].archived
        expected = newest.files[name]
        starts = [list(accumulate((piece.size for piece in pieces.get(name, ())), initial=0)) for _, pieces in links]
        buffers = _Buffers(min(PIECE, expected.size))
        paths = [link.archived.object_of(name, delta=link.delta) for link, _ in links]
        objects = [_Ahead(self._remote, path, offsets[-1], readers) for path, offsets in zip(paths, starts, strict=True)]

        def rebuilt(start: int) -> tuple[bytes | memoryview, Buffer | None]:
            at, size = start // PIECE, min(PIECE, expected.size - start)
            first = len(links) - 1
            while first and links[first][1][name][at].how == "xor":
                first -= 1
                there = links[first][0].archived
                if (known := there.files.get(name)) is None or known.size != expected.size:
                    raise DataLoss("CHECKSUM", f"{there.url}: expected {name} with {expected.size} bytes, found {known}")
            content: bytes | memoryview | None = None
            used: Buffer | None = None
            from_store = links[first][1][name][at].how == "xor" and base is not None
            if from_store and base is not None:
                used = buffers.take()
                content = base.read_into(name, start, used[:size])
            for number in range(first, len(links)):
                self._check_open()
                (link, stored_pieces), path, offset = links[number], paths[number], starts[number][at]
                piece = stored_pieces[name][at]
                stored = objects[number].read(offset, offset + piece.size)
                out = buffers.take() if piece.how == "xor" else None
                try:
                    content = decode(piece, stored, content, size, out)
                except BadPiece as error:
                    if from_store and self._is_whole(path, link.archived.objects[path.rpartition("/")[2]]):
                        raise BaseDiffers("CHECKSUM", f"the store's base of {link.archived.url}: {name}: {error}") from error
                    raise DataLoss("CHECKSUM", f"{self.url}/{path}: piece {at}: {error}") from error
                from_store = False
                buffers.give_back(used)
                used = out
            assert content is not None
            return content, used

        counted = _Counted()
        with _new_file(target, expected.size) as descriptor:

            def written(start: int) -> tuple[bytes | memoryview, Buffer | None]:
                content, used = rebuilt(start)
                write_at(descriptor, content, start)
                return content, used

            with closing(_in_order(coders, written, range(0, expected.size, PIECE))) as pieces:
                for content, used in pieces:
                    counted.add(content)
                    buffers.give_back(used)
        self._check_written(counted, expected, newest.object_of(name, delta=links[-1][0].delta))

    def _write_verified(self, target: Path, chunks: Iterable[bytes], expected: File, path: str) -> None:
        counted, at = _Counted(), 0
        with _new_file(target, expected.size) as descriptor:
            for chunk in counted.passing(chunks):
                self._check_open()
                write_at(descriptor, chunk, at)
                at += len(chunk)
        self._check_written(counted, expected, path)

    def _check_written(self, counted: "_Counted", expected: File, path: str) -> None:
        if counted.file() != expected:
            raise DataLoss("CHECKSUM", f"{self.url}/{path}: expected hash {expected.xxh3}, read {counted.file().xxh3}")

    def _check_open(self) -> None:
        if self._closed.is_set():
            raise Unavailable("DRAINING", "the daemon is shutting down")

    def _each(self, act: Callable[[Given], Found], names: Sequence[Given], at_once: int = _AT_ONCE) -> list[Found]:
        with ThreadPoolExecutor(at_once, thread_name_prefix="archive-files") as threads:
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


class _Ahead:
    """Reads of an object, about in order, which small pieces share: a request of each would take its time on a long way.

    Thread-safe. Missing bytes are left out, as in `Remote.read`.
    """

    def __init__(self, remote: Remote, path: str, size: int, readers: ThreadPoolExecutor) -> None:
        self._remote, self._path, self._size, self._readers = remote, path, size, readers
        self._lock, self._blocks = threading.Lock(), dict[int, Future[bytes]]()

    def read(self, start: int, end: int) -> bytes:
        if end - start > _BLOCK:
            return self._remote.read(self._path, start, end)
        if start == end:
            return b""
        first, last, final = start // _BLOCK, (end - 1) // _BLOCK, (self._size - 1) // _BLOCK
        with self._lock:
            for at in range(first, min(last + _BLOCKS_AHEAD, final) + 1):
                if at not in self._blocks:
                    span = at * _BLOCK, min((at + 1) * _BLOCK, self._size)
                    self._blocks[at] = self._readers.submit(self._remote.read, self._path, *span)
            for old in [at for at in self._blocks if at < first - 1]:
                del self._blocks[old]
            wanted = [self._blocks[at] for at in range(first, last + 1)]
        found = b"".join(block.result() for block in wanted)
        return found[start - first * _BLOCK : end - first * _BLOCK]


class _Buffers:
    """Buffers of `size` bytes for pieces, used again: fresh pages take as long as what is done with them. Thread-safe."""

    def __init__(self, size: int) -> None:
        self._size, self._free = size, deque[Buffer]()

    def take(self) -> Buffer:
        try:
            return self._free.pop()
        except IndexError:
            return np.empty(self._size, np.uint8)

    def give_back(self, buffer: Buffer | None) -> None:
        """Let a buffer be taken again. Nobody reads it any more."""
        if buffer is not None:
            self._free.append(buffer)


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


def _in_order(coders: ThreadPoolExecutor, act: Callable[[int], Found], starts: Sequence[int]) -> Generator[Found, None, None]:
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


@contextmanager
def _new_file(path: Path, size: int) -> Iterator[int]:
    """Create a file of `size` bytes, and yield its descriptor. An OSError of the block is one of the file."""
    with touching(path, "writing", size):
        failpoint("restore.write")
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            if size:
                os.posix_fallocate(descriptor, 0, size)  # fail before any copy on a full medium
            yield descriptor
        finally:
            os.close(descriptor)
