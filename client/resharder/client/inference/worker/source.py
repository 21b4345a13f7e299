"""Where a worker reads a version from: a folder of safetensors files, the store's own or a mirror of the boxes it needs.

On the daemon's host the store's files are mapped. Elsewhere a helper process fills a sparse copy of the same files in shared
memory. What follows is the same for both.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import warnings
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import torch
from numpy.lib.array_utils import byte_bounds
from resharder.client.errors import ResharderError
from resharder.client.gpu.pinned_pages import Registered, box_of, register
from resharder.client.inference.settings import GRPC, PluginSettings
from resharder.client.rpc.channel import Channel
from resharder.client.versions.remote import Needs as Needs
from resharder.client.versions.remote import VersionManifest as VersionManifest
from resharder.client.versions.remote import boxes_request, expected_digests
from resharder.client.versions.remote import get_manifest as get_manifest
from resharder.converters.geometry.layout import Box, TensorSpec
from resharder.converters.storage.digest import Array
from resharder.converters.storage.files import FileLayout, MappedFiles
from resharder.converters.storage.pages import map_pages
from resharder.v1 import resources_pb2

SHARED, REMOTE = "shared-memory", GRPC
DESCRIPTORS = Path("/proc/self/fd")


class StagingFailed(ResharderError):
    reason = "STAGING_FAILED"


def shares_memory(access: resources_pb2.StoreAccess, settings: PluginSettings) -> bool:
    """Whether this process sees the daemon's store: it finds the daemon's nonce where the daemon put it."""
    if not access.nonce_file or settings.transport == GRPC:
        return False
    with contextlib.suppress(OSError):
        return Path(access.nonce_file).read_bytes() == access.nonce
    return False


class VersionSource:
    """A version's tensors where this process can read them, and what the digests of the needed boxes must be.

    In a mirror only the needed boxes have bytes, and not all of those where it is not `whole`.
    """

    def __init__(
        self,
        manifest: VersionManifest,
        folder: Path,
        files: tuple[FileLayout, ...],
        transport: str,
        expected: dict[tuple[str, Box], int],
        whole: bool = True,
    ) -> None:
        self.manifest, self.transport, self.expected, self.whole = manifest, transport, expected, whole
        self._files = MappedFiles(folder, files)
        self._registered: Registered | None = None

    @property
    def arrays(self) -> dict[str, Array]:
        return self._files.arrays

    @property
    def specs(self) -> dict[str, TensorSpec]:
        return self.manifest.specs

    def populate(self, names: Iterable[str]) -> None:
        """Maps the pages of these tensors now, outside of Python's lock, so that the copies meet no page fault."""
        for name in names:
            map_pages(byte_bounds(self.arrays[name]))

    def register(self, boxes: Iterable[tuple[str, Box]], device: torch.device) -> bool:
        """Whether kernels on `device` reach the pages of these boxes from now on."""
        self._registered = register((box_of(self.arrays[name], box) for name, box in boxes), device, gently=True)
        return self._registered is not None

    def close(self) -> None:
        if self._registered is not None:
            self._registered.close()
            self._registered = None
        # Whoever still holds an array (a traceback, say) keeps the mapping alive until it lets go.
        with contextlib.suppress(BufferError):
            self._files.close()


def as_torch(array: Array, dtype: str) -> torch.Tensor:
    """The same memory as a tensor of safetensors' `dtype`. It is never written to."""
    from resharder.client.inference.recording.recorder import DTYPES

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # "not writable"
        return torch.from_numpy(array).view(DTYPES[dtype])


class Stager:
    """Makes versions readable for one worker process, one at a time."""

    def __init__(self, channel: Channel, access: resources_pb2.StoreAccess, settings: PluginSettings) -> None:
        self._channel, self.shared = channel, shares_memory(access, settings)
        self._mirror = Mirror(settings.staging_dir)
        self._lock = threading.Lock()

    @property
    def transport(self) -> str:
        return SHARED if self.shared else REMOTE

    def stage(self, manifest: VersionManifest, needs: Needs, without: frozenset[str] = frozenset()) -> VersionSource:
        """`without`: tensors that need not be fetched, since they come another way. Raises ResharderError."""
        with self._lock:
            expected = expected_digests(self._channel, manifest, needs)
            wanted = {name: boxes for name, boxes in needs.items() if name not in without}
            if self.shared:
                folder, files = Path(manifest.folder), manifest.files
            else:
                folder, files = DESCRIPTORS, self._mirror.prepare(manifest.files)
                self._fetch(manifest, wanted, expected, [file.path for file in files])
            source = VersionSource(manifest, folder, files, self.transport, expected, whole=self.shared or not without)
            source.populate(wanted)
            return source

    def _fetch(self, manifest: VersionManifest, needs: Needs, expected: dict[tuple[str, Box], int], files: list[str]) -> None:
        boxes = [(name, box) for name, found in needs.items() for box in found]
        command = [
            sys.executable,
            "-m",
            "resharder.client.inference.worker.fetch",
            str(os.getpid()),
            self._channel.endpoint,
            *files,
        ]
        helper = subprocess.run(
            command,
            input=boxes_request(manifest, boxes).SerializeToString(),
            capture_output=True,
            check=False,
            pass_fds=[int(file) for file in files],
        )
        lines = helper.stdout.decode(errors="replace").strip().splitlines()
        try:
            answer = json.loads(lines[-1])
        except (IndexError, ValueError):
            said = helper.stderr.decode(errors="replace")[-500:]
            if helper.returncode == -signal.SIGBUS:
                said = "there is no room for the boxes in RESHARDER_STAGING_DIR"
            raise StagingFailed(f"{manifest.name}: the fetching process ended with {helper.returncode}: {said}") from None
        if "error" in answer:
            raise StagingFailed(f"{manifest.name}: {answer['error']}")
        wrong = [key for key, found in zip(boxes, answer["digests"], strict=True) if expected[key] != found]
        if wrong:
            raise StagingFailed(f"{manifest.name}: {len(wrong)} boxes arrived with other digests than the store's: {wrong[0]}")

    def close(self) -> None:
        self._mirror.close()


class Mirror:
    """Files in shared memory for one version after another, so that their pages stay warm. They have no names: nothing is left of
    them when this process ends, however it ends."""

    def __init__(self, root: str) -> None:
        self._root = root
        self._files: list[tuple[int, int]] = []  # descriptor, size

    def prepare(self, wanted: tuple[FileLayout, ...]) -> tuple[FileLayout, ...]:
        """Sparse files with these headers; their paths are names in /proc/self/fd, here and in a process that inherits them."""
        if [size for _, size in self._files] != [file.size for file in wanted]:
            self.close()
            for file in wanted:
                descriptor = os.open(self._root, os.O_TMPFILE | os.O_RDWR, 0o600)
                self._files.append((descriptor, file.size))
                os.ftruncate(descriptor, file.size)
        for (descriptor, _), file in zip(self._files, wanted, strict=True):
            os.pwrite(descriptor, file.header, 0)
        return tuple(replace(file, path=str(fd)) for (fd, _), file in zip(self._files, wanted, strict=True))

    def close(self) -> None:
        while self._files:
            os.close(self._files.pop()[0])
