"""Objects at a URL: in a folder, or in a bucket of S3, Google Cloud Storage or Azure. An object is seen whole or not at all."""

import fcntl
import os
import re
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, TypeVar
from urllib.parse import unquote, urlsplit

from resharder.converters.extras import install_line
from resharder.server.infra.backoff import backoff
from resharder.server.infra.filesystem import sync
from resharder.server.state.errors import DaemonError, FailedPrecondition, Unavailable

if TYPE_CHECKING:
    from obstore.store import ObjectStore

CHUNK = 4 << 20
_RANGE = 16 << 20  # of one read; a request has 30 s in all
_PART, _PARTS = 8 << 20, 9000  # of an upload: S3 allows 10,000 parts
_AT_ONCE = 4  # parts of an upload
_TRIES, _PAUSE = 5, 0.1  # of a request whose answer was cut, and seconds before the second one, doubling
Found = TypeVar("Found")
_SCHEMES = ("file", "s3", "s3a", "gs", "az", "abfs", "abfss", "adl", "azure")
_SECRET = re.compile(r"(?<=[\w/])\?[^\s)\"']+|(?<=://)[^\s/@:]*:[^\s/@]*@")  # a signed query, or a user with a password


class Content(NamedTuple):
    """Content of a small object, and the tag of this state of it."""

    bytes: bytes
    tag: str


class Remote:
    """Objects under `url`; paths are relative to it. All methods raise Unavailable (ARCHIVE_FAILED).

    Credentials and endpoints of buckets come from the environment (`AWS_…`, `GOOGLE_…`, `AZURE_…`). The constructor touches
    nothing. It raises FailedPrecondition (NO_ARCHIVE) without obstore, for an invalid URL, or where settings are missing.
    """

    def __init__(self, url: str) -> None:
        try:
            import obstore.store
            from obstore.exceptions import BaseError
        except ImportError as error:
            raise FailedPrecondition(
                "NO_ARCHIVE", f"cannot use {_shown(url)}, because {error.name} is not installed; {install_line('archive')}"
            ) from error
        scheme, _, _ = url.rpartition("://")
        if scheme not in ("", *_SCHEMES):
            raise FailedPrecondition("NO_ARCHIVE", f"expected a folder, or a URL of s3, gs, az or file, got {_shown(url)!r}")
        self._objects: ObjectStore
        self._folder: Path | None = None
        if scheme in ("", "file"):
            path = unquote(urlsplit(url).path) if scheme else url
            self._folder = Path(os.path.abspath(Path(path).expanduser()))
            self._objects = obstore.store.LocalStore(automatic_cleanup=True)
            self.url = f"file://{self._folder}"
            return
        retries: obstore.store.RetryConfig = {"max_retries": 4, "retry_timeout": timedelta(seconds=60)}
        try:
            self._objects = obstore.store.from_url(url, retry_config=retries)
        except (BaseError, ValueError) as error:
            raise FailedPrecondition("NO_ARCHIVE", f"cannot use {_shown(url)}: {_reason(error)}") from error
        self.url = _shown(url.rstrip("/"))

    def names(self, folder: str = "") -> list[str]:
        """Return the names in a folder, sorted; an empty list if it does not exist."""
        with self._failures(folder):
            found = self._tried(lambda: self._objects.list_with_delimiter(self._at(folder)))
            paths = [*found["common_prefixes"], *(each["path"] for each in found["objects"])]
            return sorted(path.rstrip("/").rsplit("/", 1)[-1] for path in paths)

    def content(self, path: str, seen: Content | None = None) -> Content | None:
        """Return the content of a small object; None if it does not exist.

        `seen`: returned as it is if the object is still in that state, whose content is not transferred again.
        """
        from obstore.exceptions import NotModifiedError

        def get() -> Content:
            found = self._objects.get(self._at(path), options={"if_none_match": seen.tag} if seen and seen.tag else None)
            return Content(bytes(found.bytes()), found.meta["e_tag"] or "")

        with self._failures(path):
            try:
                return self._tried(get)
            except FileNotFoundError:
                return None
            except NotModifiedError:
                return seen

    def size(self, path: str) -> int | None:
        """Return the size of an object in bytes; None if it does not exist."""
        with self._failures(path):
            try:
                return self._tried(lambda: self._objects.head(self._at(path)))["size"]
            except FileNotFoundError:
                return None

    def read(self, path: str, start: int, end: int) -> bytes:
        """Return the bytes of an object from `start` to `end`; none if it does not exist or ends before `end`."""
        if start == end:
            return b""
        with self._failures(path):
            try:
                return self._tried(lambda: bytes(self._objects.get_range(self._at(path), start=start, end=end)))
            except Exception:
                if (self.size(path) or 0) < end:
                    return b""
                raise

    def chunks(self, path: str, size: int) -> Iterator[bytes]:
        """Yield the content of an object of `size` bytes in chunks of 4 MiB; nothing if it has another size or does not exist."""
        with self._failures(path):
            first = self._start(path, size) if size else b""
        for start in range(0, size if first else 0, _RANGE):
            content = first if not start else self.read(path, start, min(start + _RANGE, size))
            for at in range(0, len(content), CHUNK):
                yield content[at : at + CHUNK]

    def _start(self, path: str, size: int) -> bytes:
        """Return the first range of an object; nothing unless it has `size` bytes. The one request of a small object."""

        def get() -> bytes:
            found = self._objects.get(self._at(path), options={"range": (0, min(_RANGE, size))})
            return bytes(found.bytes()) if found.meta["size"] == size else b""

        try:
            return self._tried(get)
        except Exception:
            if self.size(path) != size:  # an empty object has no range
                return b""
            raise

    def write(self, path: str, chunks: Iterable[bytes | memoryview], size: int) -> None:
        """Write a whole object of at most `size` bytes. In a folder, the file and its folders are synced."""
        with self._failures(path):
            if size <= _PART:  # in one request, where parts need three
                content = b"".join(chunks)
                self._tried(lambda: self._objects.put(self._at(path), content, use_multipart=False))
            else:
                part = max(_PART, -(-size // _PARTS))
                self._objects.put(self._at(path), iter(chunks), chunk_size=part, max_concurrency=_AT_ONCE)
            self._sync(path)

    def create(self, path: str, content: bytes) -> bool:
        """Write an object that does not exist, and return whether this call did. Of several writers, one does."""
        from obstore.exceptions import AlreadyExistsError

        with self._failures(path):
            try:
                self._tried(lambda: self._objects.put(self._at(path), content, mode="create"))
            except AlreadyExistsError:
                # A request that is repeated after its answer was lost finds its own object.
                there = self.content(path)
                return there is not None and there.bytes == content
            self._sync(path)
            return True

    def replace(self, path: str, content: bytes, tag: str) -> bool:
        """Write an object whose state has this tag, and return whether this call did. Of several writers, one does."""
        from obstore.exceptions import PreconditionError

        with self._failures(path):
            try:
                with self._alone(path):
                    if self._folder is None:
                        self._tried(lambda: self._objects.put(self._at(path), content, mode={"e_tag": tag}))
                    elif (there := self.content(path)) is not None and there.tag == tag:
                        self._objects.put(self._at(path), content)
                    else:
                        return False
            except (PreconditionError, FileNotFoundError):
                there = self.content(path)
                return there is not None and there.bytes == content
            self._sync(path)
            return True

    def remove(self, path: str) -> None:
        """Remove an object, or find that it does not exist."""
        with self._failures(path):
            try:
                self._objects.delete(self._at(path))
            except FileNotFoundError:
                return

    def clear(self, folder: str) -> None:
        """Remove all objects in a folder and its folders."""
        with self._failures(folder):
            for found in self._objects.list(self._at(folder)):
                for each in found:
                    with suppress(FileNotFoundError):
                        self._objects.delete(each["path"])

    def _at(self, path: str) -> str:
        folder = "" if self._folder is None else str(self._folder).lstrip("/")
        return f"{folder}/{path}".strip("/")

    def _sync(self, path: str) -> None:
        if self._folder is not None:
            file = self._folder / path
            for made in (file, *file.parents[: path.count("/") + 2]):
                sync(made)

    @contextmanager
    def _alone(self, path: str) -> Iterator[None]:
        """Hold a lock on an object's folder, where files have no conditional write."""
        if self._folder is None:
            yield
            return
        descriptor = os.open((self._folder / path).parent, os.O_RDONLY | os.O_CLOEXEC)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            yield
        finally:
            os.close(descriptor)

    def _tried(self, act: Callable[[], Found]) -> Found:
        """Return the result of a request, which is repeated if its answer was cut: obstore repeats the other failures itself."""
        from obstore.exceptions import GenericError

        for number in range(1, _TRIES):
            try:
                return act()
            except GenericError as error:
                if "body error" not in str(error):
                    raise
            time.sleep(backoff(number, _PAUSE))
        return act()

    @contextmanager
    def _failures(self, path: str) -> Iterator[None]:
        """Convert exceptions to ARCHIVE_FAILED. A DaemonError, as from the source of a write, passes."""
        try:
            yield
        except DaemonError:
            raise
        except Exception as error:
            raise Unavailable("ARCHIVE_FAILED", f"{self.url}/{path}: {_reason(error)}") from error


def _reason(error: Exception) -> str:
    """Return the first line of an error, with its kind, and without what a URL in it may have of credentials."""
    return _shown(f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}")


def _shown(text: str) -> str:
    return _SECRET.sub("", text)
