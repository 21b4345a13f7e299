"""The source of a version for a worker: a folder of safetensors files, either the store's or a mirror of the needed boxes.

On the daemon's host, the store's files are mapped, and on a host with a node, the node's. On other hosts, and on the daemon's
while its store lacks pieces of the version, a helper process fills a sparse copy of the same files in shared memory, from the
data port or by the gRPC stream.
"""

import json
import logging
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import torch
from numpy.lib.array_utils import byte_bounds
from resharder.client.errors import ResharderError
from resharder.client.gpu.pinned_pages import Busy
from resharder.client.inference.settings import HTTP, PluginSettings
from resharder.client.inference.worker.host_node import HostNode
from resharder.client.inference.worker.next_files import NextFiles
from resharder.client.inference.worker.source_files import Boxes, SourceFiles
from resharder.client.rpc.channel import Channel
from resharder.client.transport.shared_memory import shares_memory
from resharder.client.versions.needed_pieces import needed_pieces
from resharder.client.versions.remote import Needs as Needs
from resharder.client.versions.remote import VersionManifest as VersionManifest
from resharder.client.versions.remote import expected_digests
from resharder.client.versions.remote import get_manifest as get_manifest
from resharder.converters.failpoints import failpoint
from resharder.converters.geometry.layout import Box, TensorSpec
from resharder.converters.geometry.rows import box_rows
from resharder.converters.storage.digest import Array
from resharder.converters.storage.files import FileLayout
from resharder.converters.storage.pages import map_pages
from resharder.converters.wire.ranges import PIECE_BYTES
from resharder.converters.wire.windows import boxes_request
from resharder.v1 import resources_pb2

SHARED, NODE = "shared-memory", "node"
logger = logging.getLogger("vllm.resharder.worker")
DESCRIPTORS = Path("/proc/self/fd")


class StagingFailed(ResharderError):
    """The helper process could not fetch the needed boxes."""

    reason = "STAGING_FAILED"


class VersionSource:
    """A version's tensors, mapped into this process, and the store's digests of the needed boxes.

    Args:
        manifest: The version's manifest.
        files: Its files: the store's, a node's, or a mirror's.
        transport: `SHARED`, `NODE`, `http` or `grpc`.
        expected: The store's digest of each needed box, by HF tensor and box.
        whole: Whether all needed boxes are filled. In a mirror, other boxes are always empty, and may be in a node's files.
    """

    def __init__(
        self,
        manifest: VersionManifest,
        files: SourceFiles,
        transport: str,
        expected: dict[tuple[str, Box], int],
        whole: bool = True,
    ) -> None:
        self.manifest, self.transport, self.expected, self.whole = manifest, transport, expected, whole
        self.registered = False  # whether kernels of a GPU can read the pages of the boxes
        self._files = files

    @property
    def arrays(self) -> Mapping[str, Array]:
        """The HF tensors as arrays of unsigned integers, by name."""
        return self._files.arrays

    @property
    def specs(self) -> dict[str, TensorSpec]:
        """The specs of the HF tensors, by name."""
        return self.manifest.specs

    def populate(self, needs: Needs) -> None:
        """Map the pages of these boxes now, without Python's lock, so that the copies cause no page faults."""
        for name, boxes in needs.items():
            first, _ = byte_bounds(self.arrays[name])
            for rows in (rows for box in boxes for rows in box_rows(box, self.specs[name])):
                for start, end in rows.spans(PIECE_BYTES):  # no pages of holes, which would take memory
                    map_pages((first + start, first + end))

    def register(self, boxes: Boxes, device: torch.device, serves: Busy) -> bool:
        """Register the pages of these boxes, so that kernels on `device` can read them: see `SourceFiles.register`."""
        self.registered = self._files.register(boxes, device, serves)
        return self.registered

    def copyable(self, array: Array) -> Array:
        """Return an array in memory that CUDA copies from: itself, or a copy if only some of its pages are registered."""
        return self._files.copyable(array)

    def close(self) -> None:
        """Unregister and unmap the pages. A reference to an array, e.g. in a traceback, delays the unmapping."""
        self._files.close()


class Stager:
    """Stages versions for one worker process, one at a time.

    Args:
        channel: Channel to the daemon.
        access: The store's folder and nonce.
        settings: The plugin's settings.
        serves: Whether the server may serve requests now, so that the preparation of files must leave time to its kernels.
    """

    def __init__(
        self, channel: Channel, access: resources_pb2.StoreAccess, settings: PluginSettings, serves: Busy = lambda: False
    ) -> None:
        self._channel, self.shared = channel, not settings.transport and shares_memory(access)
        self._next = NextFiles(channel, serves)
        self._mirror = Mirror(settings.staging_dir)
        self._lock, self._node_reason = threading.Lock(), ""
        self._remote = settings.transport or HTTP
        self.transport = SHARED if self.shared else self._remote
        """`SHARED` if the store's files can be mapped; else `NODE`, `http` or `grpc`, as the last version, or the one to try."""
        self.transport_reason = ""
        """Reason for `grpc` in place of `http`, or for either in place of `NODE`; empty if there is none."""
        self._node = HostNode(channel, settings.server) if not self.shared and not settings.transport else None

    def stage(self, manifest: VersionManifest, needs: Needs, without: frozenset[str] = frozenset()) -> VersionSource:
        """Make a version's boxes readable in this process.

        Args:
            manifest: The version's manifest.
            needs: The needed boxes of each HF tensor.
            without: HF tensors that need not be fetched, because they arrive on the direct path.

        Raises:
            ResharderError: The boxes cannot be fetched, or their digests differ.
        """
        with self._lock:
            self._node_reason = ""
            expected = expected_digests(self._channel, manifest, needs)
            fetched = {name: boxes for name, boxes in needs.items() if name not in without}
            failpoint("worker.stage.map")
            if self.shared and manifest.folder:
                self.transport, self.transport_reason = SHARED, ""
                files = self._next.take(Path(manifest.folder), manifest.files)
                source = VersionSource(manifest, files, SHARED, expected)
            elif not without and (found := self._from_node(manifest, needs, expected)) is not None:
                source = found  # with ranks' help, what remains is little of each piece, and the node would fetch them all
            else:
                mirror = self._mirror.prepare(manifest.files)
                self._fetch(manifest, fetched, expected, [file.path for file in mirror])
                files = SourceFiles(DESCRIPTORS, mirror)
                source = VersionSource(manifest, files, self.transport, expected, whole=not without)
            source.populate(fetched)
            return source

    def prepare_next(self, manifest: VersionManifest, boxes: Boxes, device: torch.device) -> None:
        """Register the pages of these boxes in the files of the version after `manifest`'s, in the background."""
        if self.shared:
            with self._lock:
                self._next.prepare(manifest, boxes, device)

    def _from_node(self, manifest: VersionManifest, needs: Needs, expected: dict[tuple[str, Box], int]) -> VersionSource | None:
        """Map the version of the node on this host; None if there is no node, or it does not have the boxes."""
        if self._node is None:
            return None
        folder, self._node_reason = self._node.files(manifest.name, needed_pieces(manifest.files, needs))
        if folder is not None:
            try:
                source = VersionSource(manifest, SourceFiles(folder, manifest.files), NODE, expected)
            except (OSError, ValueError) as error:  # dropped in the meantime, or in a folder that this process cannot read
                self._node_reason = str(error)
            else:
                self.transport, self.transport_reason = NODE, ""
                return source
        if self._node_reason and self._node_reason != self.transport_reason:
            logger.warning("%s does not come from a node on this host: %s", manifest.name, self._node_reason)
        return None

    def _fetch(self, manifest: VersionManifest, needs: Needs, expected: dict[tuple[str, Box], int], files: list[str]) -> None:
        boxes = [(name, box) for name, found in needs.items() for box in found]
        command = [
            sys.executable,
            "-m",
            "resharder.client.inference.worker.fetch",
            str(os.getpid()),
            self._channel.endpoint,
            self._remote,
            *files,
        ]
        helper = subprocess.run(
            command,
            input=boxes_request(manifest.name, boxes).SerializeToString(),
            capture_output=True,
            check=False,
            pass_fds=[int(file) for file in files],
        )
        lines = helper.stdout.decode(errors="replace").strip().splitlines()
        try:
            answer = json.loads(lines[-1])
        except (IndexError, ValueError):
            cause = helper.stderr.decode(errors="replace")[-500:]
            if helper.returncode == -signal.SIGBUS:
                cause = "RESHARDER_STAGING_DIR has no space left for the boxes"
            raise StagingFailed(
                f"{manifest.name}: the helper that fetches boxes ended with {helper.returncode}: {cause}"
            ) from None
        if "error" in answer:
            raise StagingFailed(f"{manifest.name}: {answer['error']}")
        if answer["reason"] and answer["reason"] != self.transport_reason:
            logger.warning("%s arrived by gRPC, not HTTP: %s", manifest.name, answer["reason"])
        self.transport = answer["transport"]
        self.transport_reason = "; ".join(reason for reason in (self._node_reason, answer["reason"]) if reason)
        wrong = [key for key, found in zip(boxes, answer["digests"], strict=True) if expected[key] != found]
        if wrong:
            raise StagingFailed(
                f"{manifest.name}: expected the digests of the store, {len(wrong)} fetched boxes differ, e.g. {wrong[0]}"
            )

    def close(self) -> None:
        """Close the files of the mirror, and the prepared files of the next version."""
        self._mirror.close()
        self._next.close()


class Mirror:
    """Unnamed files in shared memory, reused for each version so that their pages stay warm.

    The kernel removes them when this process ends.

    Args:
        root: Folder of a file system with `O_TMPFILE`.
    """

    def __init__(self, root: str) -> None:
        self._root = root
        self._files: list[tuple[int, int]] = []  # (descriptor, size)

    def prepare(self, layouts: tuple[FileLayout, ...]) -> tuple[FileLayout, ...]:
        """Create or reuse sparse files with these sizes and write their headers.

        Returns:
            The layouts with names in `/proc/self/fd` as paths, valid here and in processes that inherit the descriptors.
        """
        failpoint("worker.stage.mirror")
        if [size for _, size in self._files] != [file.size for file in layouts]:
            self.close()
            for file in layouts:
                descriptor = os.open(self._root, os.O_TMPFILE | os.O_RDWR, 0o600)
                self._files.append((descriptor, file.size))
                os.ftruncate(descriptor, file.size)
        for (descriptor, _), file in zip(self._files, layouts, strict=True):
            os.pwrite(descriptor, file.header, 0)
        return tuple(replace(file, path=str(fd)) for (fd, _), file in zip(self._files, layouts, strict=True))

    def close(self) -> None:
        """Close the files."""
        while self._files:
            os.close(self._files.pop()[0])
