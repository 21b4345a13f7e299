"""Preparation of the files of the next version, before that version exists.

Registering 16 GB with CUDA takes one to two seconds beside a server that serves. The daemon lays the files of a version out ahead
of need, so a worker registers them while nothing is to be installed. Staging then finds by their inodes that these are the
version's files, and has nothing to register.
"""

import contextlib
import logging
import threading
from collections.abc import Callable
from pathlib import Path

import torch
from resharder.client.errors import ResharderError
from resharder.client.gpu.pinned_pages import Busy, register
from resharder.client.inference.worker.source_files import Boxes, Register, SourceFiles
from resharder.client.rpc.channel import Channel
from resharder.client.versions.remote import VersionManifest
from resharder.converters.storage.files import FileLayout
from resharder.v1 import server_pb2, server_pb2_grpc

logger = logging.getLogger("vllm.resharder.worker")


class NextFiles:
    """Files of the next version, at most one set of them. Not thread-safe.

    Args:
        channel: Channel to the daemon.
        busy: Whether the server serves, so that half of the time is left to its kernels.
        register: Function that registers arrays.
        ask_seconds: Interval of queries for the files.
        check_seconds: Interval of checks whether the daemon has removed them.
    """

    def __init__(
        self,
        channel: Channel,
        busy: Busy,
        register: Register = register,
        *,
        ask_seconds: float = 1.0,
        check_seconds: float = 5.0,
    ) -> None:
        self._channel, self._busy, self._register = channel, busy, register
        self._ask_seconds, self._check_seconds = ask_seconds, check_seconds
        self._preparation: _Preparation | None = None

    def prepare(self, manifest: VersionManifest, boxes: Boxes, device: torch.device) -> None:
        """Begin to prepare the files for the version after `manifest`'s, in place of any others. Return at once."""
        former = self._preparation

        def ask() -> Path:
            stub = server_pb2_grpc.ServerServiceStub(self._channel.grpc)
            request = server_pb2.GetNextFilesRequest(version=manifest.name)
            return Path(self._channel.call(stub.GetNextFiles, request, timeout=10, patience=0).folder)

        def files(folder: Path) -> SourceFiles:
            found = SourceFiles(folder, manifest.files)
            found.register(boxes, device, self._busy, self._register)
            return found

        self._preparation = preparation = _Preparation(ask, files, self._ask_seconds, self._check_seconds)
        threading.Thread(target=preparation.run, args=[former], name="resharder-next-files", daemon=True).start()

    def take(self, folder: Path, files: tuple[FileLayout, ...]) -> SourceFiles:
        """Return the files of a version, which the caller closes: the prepared ones if the daemon took these for the version.

        Waits for a registration in progress.

        Raises:
            OSError: A file is missing.
            ValueError: A file has another size.
        """
        found = self._end()
        if found is not None:
            with contextlib.suppress(OSError):
                if found.are_of(folder, files):
                    return found
            found.close()
        return SourceFiles(folder, files)

    def close(self) -> None:
        """Let go of the files."""
        found = self._end()
        if found is not None:
            found.close()

    def _end(self) -> SourceFiles | None:
        preparation, self._preparation = self._preparation, None
        return preparation.end() if preparation is not None else None


class _Preparation:
    """One attempt to prepare files. `run` runs on a thread of its own; `end` may be called once, on another one."""

    def __init__(
        self, ask: Callable[[], Path], files: Callable[[Path], SourceFiles], ask_seconds: float, check_seconds: float
    ) -> None:
        self._ask, self._make, self._ask_seconds, self._check_seconds = ask, files, ask_seconds, check_seconds
        self._ended, self._done = threading.Event(), threading.Event()
        self._files: SourceFiles | None = None

    def run(self, former: "_Preparation | None") -> None:
        """Prepare the files, in place of those of a former preparation, and close them if the daemon removes them."""
        try:
            if former is not None and (left := former.end()) is not None:
                left.close()
            while self._files is None and not self._ended.wait(self._ask_seconds):
                with contextlib.suppress(FileNotFoundError):  # they were taken for a version in the meantime
                    folder = self._ask()
                    self._files = self._make(folder) if folder.name else None
            while self._files is not None and not self._ended.wait(self._check_seconds):
                if self._files.removed:
                    files, self._files = self._files, None
                    files.close()
        except (ResharderError, OSError, ValueError, RuntimeError) as error:  # also of a daemon without this call
            logger.info("the files of the next version are not prepared: %s", error)
        finally:
            self._done.set()

    def end(self) -> SourceFiles | None:
        """End the preparation, and return the files, which the caller closes."""
        self._ended.set()
        self._done.wait()
        files, self._files = self._files, None
        return files
