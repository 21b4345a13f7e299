"""Complete versions as checkpoint folders at a URL: written and read back, found, fetched.

    <url>/<model>/<number>/    every file of the version, resharder.json included
                               archived.json: their sizes and hashes

Object stores have no rename: a folder is complete once it has archived.json, which is written after every file was read back
and compared. Nothing is deleted except the archived.json of a folder that is written again.
"""

import json
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from io import RawIOBase
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple, TypeVar

import structlog
import xxhash
from blake3 import blake3
from resharder.converters.failpoints import failpoint
from resharder.converters.json_input import is_count, is_number, is_text, parse_json
from resharder.server.archive.remote import CHUNK, Remote
from resharder.server.infra.filesystem import touching, write_at
from resharder.server.infra.medium import medium_error, medium_errors
from resharder.server.state.errors import DataLoss, ResourceNotFound, Unavailable
from resharder.server.state.version import MODEL_NAME, VersionRecord

MARKER = "archived.json"
_FORMAT = 1
_AT_ONCE = 2  # concurrent files; each takes a few chunks of memory
_log = structlog.get_logger("resharder.archive")
Found = TypeVar("Found")
ReadFile = Callable[[str, int, int], AbstractContextManager[None]]


class File(NamedTuple):
    """Size in bytes and hash of an archived file."""

    size: int
    xxh3: str  # xxh3_128, hexadecimal


class Archived(NamedTuple):
    """Version in the archive. `size_bytes` counts its safetensors files; `archive_time` is in seconds since 1970."""

    model: str
    number: int
    url: str
    size_bytes: int
    fingerprint: str
    archive_time: float
    epoch: int
    files: dict[str, File]

    @property
    def name(self) -> str:
        """Resource name, `models/{model}/versions/{number}`."""
        return f"models/{self.model}/versions/{self.number}"


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
        place = _place(model, number)
        content = self._remote.content(f"{place}/{MARKER}")
        if content is None:
            return None
        try:
            archived = _decode(content.bytes, f"{self.url}/{place}")
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            _log.error("archived_json_damaged", url=f"{self.url}/{place}", reason=repr(error))
            return None
        return archived if (archived.model, archived.number) == (model, number) else None

    def write(
        self,
        record: VersionRecord,
        folder: Path,
        names: Sequence[str],
        reading: ReadFile = lambda name, start, end: nullcontext(),
        contents: Mapping[str, bytes] = MappingProxyType({}),
    ) -> Archived:
        """Write all files, read them back, then write archived.json.

        Args:
            record: The version.
            folder: Its folder.
            names: Its files.
            reading: Function of a file, first byte and end that has these bytes in the folder meanwhile. May raise a DaemonError.
            contents: Contents of files that are not to be read from the folder.

        Raises ResourceNotFound (VERSION_GONE) if the version retires meanwhile, DataLoss (CHECKSUM).
        """
        place = _place(record.model, record.number)
        url, marker = f"{self.url}/{place}", f"{place}/{MARKER}"
        self._remote.remove(marker)

        def chunks(name: str) -> Iterator[bytes]:
            return iter([contents[name]]) if name in contents else self._read(folder / name, reading)

        def send(name: str) -> File:
            return self._send(chunks(name), f"{place}/{name}", _size(folder / name))

        sent = self._each(send, names)
        files = dict(zip(names, sent, strict=True))
        now = round(self._wall(), 3)
        archived = Archived(record.model, record.number, url, record.size_bytes, record.fingerprint, now, record.epoch, files)
        if damaged := self.damaged(archived):
            raise DataLoss("CHECKSUM", f"{url}: read back differently than written: {', '.join(damaged[:8])}")
        failpoint("archive.before-marker")
        content = _encode(archived)
        self._remote.write(marker, [content], len(content))
        there = self._remote.content(marker)
        if there is None or there.bytes != content:
            raise DataLoss("CHECKSUM", f"{url}/{MARKER}: read back differently than written")
        return archived

    def damaged(self, archived: Archived) -> list[str]:
        """Read every file, and return the names of files that are missing or differ from the written ones."""
        place, names = _place(archived.model, archived.number), list(archived.files)
        found = self._each(lambda name: self._read_back(f"{place}/{name}"), names)
        return [name for name, file in zip(names, found, strict=True) if file != archived.files[name]]

    def fetch(self, archived: Archived, folder: Path) -> None:
        """Write every file into `folder`. Raises DataLoss (CHECKSUM), OSError."""
        place = _place(archived.model, archived.number)
        self._each(lambda name: self._fetch(f"{place}/{name}", archived.files[name], folder / name), list(archived.files))

    def _send(self, chunks: Iterator[bytes], path: str, size: int) -> File:
        counted = _Counted(chunks)
        self._remote.write(path, counted, size)
        return counted.file()

    def _read(self, source: Path, reading: ReadFile) -> Iterator[bytes]:
        """Yield the chunks of a version's file. Its bytes remain while it is open, even if the version retires."""
        try:
            file = source.open("rb", buffering=0)
        except FileNotFoundError:
            raise ResourceNotFound(
                "VERSION_GONE", f"{source}: the version was retired, because the store needed its capacity"
            ) from None
        except OSError as error:
            raise medium_error(error) from error
        with file:
            while True:
                with reading(source.name, file.tell(), file.tell() + CHUNK):
                    chunk = _read(source, file)
                if not chunk:
                    return
                self._check_open()
                yield chunk

    def _read_back(self, path: str) -> File | None:
        if self._remote.size(path) is None:
            return None
        counted = _Counted(self._remote.chunks(path))
        for _ in counted:
            self._check_open()
        return counted.file()

    def _fetch(self, path: str, expected: File, target: Path) -> None:
        if self._remote.size(path) != expected.size:
            raise DataLoss("CHECKSUM", f"{self.url}/{path}: expected {expected.size} bytes, found {self._remote.size(path)}")
        counted = _Counted(self._remote.chunks(path))
        _write_new(target, expected.size, self._while_open(counted))
        if counted.file() != expected:
            raise DataLoss("CHECKSUM", f"{self.url}/{path}: expected hash {expected.xxh3}, read {counted.file().xxh3}")

    def _while_open(self, chunks: "_Counted") -> Iterator[bytes]:
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


class _Counted:
    """Iterator over chunks that counts their size and hashes them."""

    def __init__(self, chunks: Iterator[bytes]) -> None:
        self._chunks, self._hash, self._size = chunks, xxhash.xxh3_128(), 0

    def __iter__(self) -> Iterator[bytes]:
        for chunk in self._chunks:
            self._hash.update(chunk)
            self._size += len(chunk)
            yield chunk

    def file(self) -> File:
        return File(self._size, self._hash.hexdigest())


def _size(source: Path) -> int:
    """Return the size of a version's file; 0 if it is gone."""
    try:
        return source.stat().st_size
    except OSError:
        return 0


def _read(source: Path, file: RawIOBase) -> bytes:
    with medium_errors(), touching(source, "reading"):
        failpoint("archive.read")
        return file.read(CHUNK) or b""


def _write_new(path: Path, size: int, chunks: Iterator[bytes]) -> None:
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


def _place(model: str, number: int) -> str:
    return f"{model}/{number:08}"


def _encode(archived: Archived) -> bytes:
    content: dict[str, Any] = {
        "format": _FORMAT,
        "model": archived.model,
        "version": archived.number,
        "epoch": archived.epoch,
        "fingerprint": archived.fingerprint,
        "archive_time": archived.archive_time,
        "files": {name: {"size": file.size, "xxh3_128": file.xxh3} for name, file in sorted(archived.files.items())},
    }
    return json.dumps(content | {"blake3": _blake3(content)}, indent=1).encode()


def _decode(content: bytes, url: str) -> Archived:
    """Decode archived.json. Raises ValueError, KeyError, TypeError or AttributeError for other content."""
    fields = parse_json(content)
    if fields.pop("blake3") != _blake3(fields) or fields["format"] != _FORMAT:
        raise ValueError(f"expected format {_FORMAT} and the hash of the rest, found format {fields.get('format')!r}")
    files = {name: File(file["size"], file["xxh3_128"]) for name, file in fields["files"].items()}
    if not all(is_count(file.size) and is_text(file.xxh3) for file in files.values()):
        raise ValueError("expected the sizes and hashes of files")
    if strange := [name for name in files if name != Path(name).name or name.startswith(".")]:
        raise ValueError(f"expected plain file names, found {strange[:4]}")
    size = sum(file.size for name, file in files.items() if name.endswith(".safetensors"))
    archived = Archived(
        fields["model"], fields["version"], url, size, fields["fingerprint"], fields["archive_time"], fields["epoch"], files
    )
    numbers = is_count(archived.number) and is_count(archived.epoch) and is_number(archived.archive_time)
    if not (numbers and is_text(archived.model) and is_text(archived.fingerprint)):
        raise ValueError("expected a name, numbers and a fingerprint")
    return archived


def _blake3(content: Mapping[str, Any]) -> str:
    return str(blake3(json.dumps(content, sort_keys=True).encode()).hexdigest())
