"""Files that all of their writers have closed, and what is read of them, such as digests, while ranks still write other files.

A digest counts only if no process had the file open for writing from before it was taken until after the last seal: a lease of
the kernel is held for that long. Any other file is digested after the last seal, as are all files of ranks that send chunks.
"""

import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Generic, TypeVar

from resharder.converters.storage.files import FileLayout, MappedFiles
from resharder.server.infra.filesystem import ReadLease, read_lease
from resharder.server.state.errors import InvalidArgument
from resharder.server.store.digests import digest_tensors

T = TypeVar("T")


class ReleasedFiles:
    """Files of a version and the ranks that still write into them. `writers` has these ranks by file."""

    def __init__(self, writers: Mapping[str, Collection[int]]) -> None:
        self._writers = {file: set(ranks) for file, ranks in writers.items()}

    def release(self, rank: int, files: Sequence[str]) -> list[str]:
        """Record that a rank has closed files, and return the files whose last writer it was.

        Raises InvalidArgument (MODEL_FILE) for a file that the version does not have; nothing has changed then.
        """
        if unknown := [file for file in files if file not in self._writers]:
            raise InvalidArgument("MODEL_FILE", f"expected files of the version, got {unknown[0][:200]!r}")
        complete = []
        for file in files:
            if rank in self._writers[file]:
                self._writers[file].remove(rank)
                if not self._writers[file]:
                    complete.append(file)
        return complete


class EarlyDigests(Generic[T]):
    """Digests of closed files, taken on a thread that runs while there are any: of all that wait at a time. Thread-safe.

    Args:
        folder: Folder of the UPLOADING version.
        files: Its files.
        take: Function of the folder and some of its files that returns the digests of each, by its path. It may raise OSError and
            ValueError; the files are digested after the last seal then.
    """

    def __init__(
        self, folder: Path, files: Sequence[FileLayout], take: Callable[[Path, Sequence[FileLayout]], Mapping[str, T]]
    ) -> None:
        self._folder, self._take = folder, take
        self._files = {file.path: file for file in files}
        self._changed = threading.Condition()
        self._waiting: list[FileLayout] = []
        self._running = self._ended = False
        self._leases: dict[str, ReadLease] = {}
        self._found: dict[str, T] = {}

    def begin(self, files: Sequence[str]) -> None:
        """Digest files, which no process should have open for writing. A no-op after `settle` or `drop`."""
        with self._changed:
            if self._ended or not files:
                return
            self._waiting += [self._files[file] for file in files]
            if self._running:
                return
            self._running = True
        threading.Thread(target=self._run, name="early-digests").start()

    def settle(self) -> dict[str, T]:
        """Wait for the digests of all files that were begun, and return the digests that count, by file."""
        with self._changed:
            self._changed.wait_for(lambda: not self._running)
            self._ended = True
            found = {file: self._found[file] for file, lease in self._leases.items() if file in self._found and lease.is_intact}
            self._close()
        return found

    def drop(self) -> None:
        """Discard all digests, so that the files may be written again."""
        with self._changed:
            self._ended, self._waiting = True, []
            self._found.clear()
            self._close()

    def _close(self) -> None:
        for lease in self._leases.values():
            lease.close()
        self._leases.clear()

    def _run(self) -> None:
        try:
            while files := self._next():
                found = self._take(self._folder, [file for file in files if has_header(self._folder, file)])
                with self._changed:
                    if not self._ended:
                        self._found |= found
        except BaseException as error:
            with self._changed:
                self._waiting = []
                self._stopped()
            if not isinstance(error, (OSError, ValueError)):  # those of an aborted version, or its verification reports them
                raise

    def _next(self) -> list[FileLayout]:
        """Return the waiting files that could be leased. An empty list ends the thread."""
        with self._changed:
            waiting, self._waiting = self._waiting, []
            files = []
            for file in waiting:
                lease = read_lease(self._folder / file.path)
                if lease is not None:
                    self._leases[file.path] = lease
                    files.append(file)
            if not files:
                self._stopped()
            return files

    def _stopped(self) -> None:
        self._running = False
        self._changed.notify_all()


def digests_of(folder: Path, files: Sequence[FileLayout], threads: int) -> dict[str, dict[str, int]]:
    """Return the digest of each tensor of each file, by file. Raises OSError, and ValueError for a file of another size."""
    with MappedFiles(folder, files) as maps:
        found = digest_tensors(maps, threads)
    return {file.path: {name: found[name] for name in file.by_name} for file in files}


def has_header(folder: Path, file: FileLayout) -> bool:
    """Return whether a file still begins with its header."""
    with (folder / file.path).open("rb") as opened:
        return opened.read(len(file.header)) == file.header
