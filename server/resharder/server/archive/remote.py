"""Files at an fsspec URL, in chunks: a folder, memory, or an object store with its plugin."""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from resharder.converters.extras import install_line
from resharder.server.infra.filesystem import sync
from resharder.server.state.errors import DaemonError, FailedPrecondition, Unavailable

CHUNK = 4 << 20
_PART = 8 << 20  # of an upload to an object store, which allows 10,000 for a file


class Remote:
    """Files under `url`; paths are relative to it. All methods raise Unavailable (ARCHIVE_FAILED).

    The constructor raises FailedPrecondition (NO_ARCHIVE) without fsspec or the URL's plugin, or for an invalid URL.
    """

    def __init__(self, url: str, options: Mapping[str, Any]) -> None:
        try:
            from fsspec.core import url_to_fs
            from fsspec.implementations.local import LocalFileSystem

            self._files, root = url_to_fs(url, **options)
        except ImportError as error:
            raise FailedPrecondition(
                "NO_ARCHIVE",
                f"cannot use {url}, because fsspec or its plugin is missing: {error}; {install_line('archive')}",
            ) from error
        except ValueError as error:
            raise FailedPrecondition("NO_ARCHIVE", f"expected a folder or an fsspec URL, got {url!r}: {error}") from error
        self._root: str = root.rstrip("/")
        self._local = isinstance(self._files, LocalFileSystem)
        self.url: str = self._files.unstrip_protocol(self._root)

    def names(self, folder: str = "") -> list[str]:
        """Return the names in a folder, sorted; an empty list if it does not exist."""
        with self._failures(folder):
            self._files.invalidate_cache()
            try:
                found = self._files.ls(self._at(folder), detail=False)
            except FileNotFoundError:
                return []
            return sorted(str(path).rstrip("/").rsplit("/", 1)[-1] for path in found)

    def content(self, path: str) -> bytes | None:
        """Return the content of a small file; None if it does not exist."""
        with self._failures(path):
            try:
                found: bytes = self._files.cat_file(self._at(path))
            except FileNotFoundError:
                return None
            return found

    def size(self, path: str) -> int | None:
        """Return the size of a file in bytes; None if it does not exist."""
        with self._failures(path):
            try:
                return int(self._files.size(self._at(path)))
            except FileNotFoundError:
                return None

    def chunks(self, path: str) -> Iterator[bytes]:
        """Yield the content of a file in chunks of 4 MiB. The file is closed when the generator ends."""
        with self._failures(path), self._files.open(self._at(path), "rb", block_size=CHUNK) as file:
            while chunk := file.read(CHUNK):
                yield chunk

    def write(self, path: str, chunks: Iterable[bytes]) -> None:
        """Write a whole file and create its folder. On a local filesystem, the file and its folders are synced."""
        with self._failures(path):
            place = self._at(path)
            folder = place.rsplit("/", 1)[0]
            self._files.makedirs(folder, exist_ok=True)
            with self._files.open(place, "wb", block_size=_PART) as file:
                for chunk in chunks:
                    file.write(chunk)
            if self._local:
                for made in (Path(place), *Path(place).parents[: path.count("/") + 1]):
                    sync(made)

    def remove(self, path: str) -> None:
        """Remove a file, which must exist."""
        with self._failures(path):
            self._files.rm_file(self._at(path))

    def _at(self, path: str) -> str:
        return f"{self._root}/{path}" if path else self._root

    @contextmanager
    def _failures(self, path: str) -> Iterator[None]:
        """Convert the exceptions of plugins to ARCHIVE_FAILED. A DaemonError, as from the source of a write, passes."""
        try:
            yield
        except DaemonError:
            raise
        except Exception as error:
            raise Unavailable("ARCHIVE_FAILED", f"{self.url}/{path}: {type(error).__name__}: {error}") from error
