"""The source of a version for a worker: the store's files, a node's, or a mirror of the needed boxes.

On the daemon's host, the store's files are mapped, and on a host with a node, the node's. On other hosts, and on the daemon's
while its store lacks pieces of the version, a helper process (`fetch.py`) fills a sparse copy of the same files in shared memory,
from the data port or by the gRPC stream. The files of the next version are mapped and registered with CUDA before it exists.
"""

import contextlib
import json
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import torch
from numpy.lib.array_utils import byte_bounds
from resharder.client.errors import ResharderError
from resharder.client.gpu.pinned_pages import Busy, Registered, Stop, box_of, never, register
from resharder.client.inference.settings import PluginSettings
from resharder.client.inference.worker.fetch import DESCRIPTORS
from resharder.client.rpc.channel import Channel
from resharder.client.runtime.driver_lock import DRIVER_LOCK
from resharder.client.settings import HTTP
from resharder.client.transport.shared_memory import read_nonces, shares_memory
from resharder.client.versions.manifest import BoxDigests, NeededDigests, Needs, VersionManifest
from resharder.client.versions.read_plan import needed_pieces
from resharder.converters.failpoints import failpoint
from resharder.converters.geometry.layout import Box, TensorSpec
from resharder.converters.geometry.rows import box_rows
from resharder.converters.storage.digest import Array
from resharder.converters.storage.files import FileLayout, MappedFiles
from resharder.converters.storage.pages import Span, map_pages
from resharder.converters.wire.pieces import Bitmap
from resharder.converters.wire.ranges import HELD_FILE, PIECE_BYTES
from resharder.converters.wire.windows import boxes_request
from resharder.v1 import node_pb2, node_pb2_grpc, resources_pb2, server_pb2, server_pb2_grpc

SHARED, NODE = "shared-memory", "node"
_ASK_SECONDS = 5.0  # between questions to the daemon for a node's files, apart from the first ones
_LOOK_SECONDS = 0.05  # between looks at the node's folder
_PATIENCE = 15.0  # seconds without a piece until the worker fetches the version itself

_AT_ONCE = 64 << 20  # bytes mapped by a call, for which an install waits at most

Boxes = Sequence[tuple[str, Box]]
Register = Callable[..., Registered | None]
logger = logging.getLogger("resharder.inference.worker")


class StagingFailed(ResharderError):
    """The helper process could not fetch the needed boxes."""

    reason = "STAGING_FAILED"


class SourceFiles:
    """Files of one version and their tensors in `arrays`.

    One thread may go on with a registration that another one has begun. `register`, `unregister` and `close` wait for its step,
    one call into the driver.

    Args:
        folder: Folder of the files.
        files: The files; their paths are relative to `folder`.

    Raises:
        OSError: A file is missing.
        ValueError: A file has another size.
    """

    def __init__(self, folder: Path, files: tuple[FileLayout, ...]) -> None:
        self._files, self._mapped = files, MappedFiles(folder, files)
        self.arrays = self._mapped.arrays
        self._lock, self._closing = threading.Lock(), threading.Event()
        self._registered: Registered | None = None
        self._boxes: Boxes = ()  # whose pages are registered
        try:
            self._inodes = _inodes(folder, files)
            self._first = os.open(folder / files[0].path, os.O_RDONLY | os.O_CLOEXEC)
        except BaseException:
            self._unmap()
            raise

    def register(self, boxes: Boxes, device: torch.device, busy: Busy, register: Register = register, stop: Stop = never) -> bool:
        """Map the pages of boxes, and register them with CUDA for kernels on `device`; go on where an earlier call has stopped.

        Args:
            boxes: HF tensors and boxes.
            device: The GPU.
            busy: Whether the server serves, here and while the pages are released. Half of the time is left to its kernels then.
            register: Function that registers the arrays.
            stop: Asked before each step; once it returns true, this returns, and another thread may go on.

        Returns:
            Whether all pages are registered.
        """
        with self._lock:
            if self._stopped(stop):
                return False
            if self._registered is None or boxes != self._boxes:
                self._unregister()
                arrays = [box_of(self.arrays[name], box) for name, box in boxes]
                if not self._map([byte_bounds(array) for array in arrays], stop):
                    return False
                self._registered, self._boxes = register(arrays, device, busy, stop), boxes
            elif not self._registered.whole and not self._registered.go_on(stop):
                self._registered = None
            return self._registered is not None and self._registered.whole

    def populate(self, spans: Iterable[Span]) -> None:
        """Map the pages of spans now, without Python's lock, so that copies cause no page faults. Must end before `close`."""
        self._map(spans, never)

    def _map(self, spans: Iterable[Span], stop: Stop) -> bool:
        for first, end in spans:
            for at in range(first, end, _AT_ONCE):
                if self._stopped(stop):
                    return False
                with DRIVER_LOCK.background():
                    map_pages((at, min(at + _AT_ONCE, end)))
        return not self._stopped(stop)

    def _stopped(self, stop: Stop) -> bool:
        return self._closing.is_set() or stop()

    def copyable(self, array: Array) -> Array:
        """Return an array in memory that CUDA copies from: itself, or a copy if only some of its pages are registered.

        Waits for no other thread: an apply may call this, and the other one's calls into the driver wait for the apply.
        """
        registered = self._registered
        in_part = self._lock.locked() or (registered is not None and registered.splits(array))
        return array.copy() if in_part else array

    def are_of(self, folder: Path, files: tuple[FileLayout, ...]) -> bool:
        """Return whether the files in a folder are these, with the same layout. Raises OSError if one is missing."""
        return files == self._files and _inodes(folder, files) == self._inodes

    @property
    def removed(self) -> bool:
        """Whether the files have been removed from all folders."""
        return not os.fstat(self._first).st_nlink

    def unregister(self) -> None:
        """Begin to release what is registered, on a thread, which leaves half of the time to a server that serves."""
        held = self._lock.acquire(blocking=False)  # here, so that no later step comes before

        def run() -> None:
            if not held:
                self._lock.acquire()
            try:
                self._unregister()
            finally:
                self._lock.release()

        threading.Thread(target=run, name="resharder-unregister").start()

    def close(self) -> None:
        """Unregister and unmap the pages. A reference to an array, e.g. in a traceback, delays the unmapping."""
        self._closing.set()
        with self._lock:
            self._unregister()
            os.close(self._first)
            self._unmap()

    def _unregister(self) -> None:
        if self._registered is not None:
            self._registered.close()
            self._registered, self._boxes = None, ()

    def _unmap(self) -> None:
        with contextlib.suppress(BufferError):
            self._mapped.close()


def _inodes(folder: Path, files: tuple[FileLayout, ...]) -> list[tuple[int, int]]:
    """Return device and inode of each file."""
    found = [os.stat(folder / file.path) for file in files]
    return [(each.st_dev, each.st_ino) for each in found]


class VersionSource:
    """A version's tensors, mapped into this process, and the store's digests of the needed boxes.

    Args:
        manifest: The version's manifest.
        files: Its files: the store's, a node's, or a mirror's.
        transport: `SHARED`, `NODE` or `http`.
        expected: The store's digest of each needed box, by HF tensor and box.
        whole: Whether all needed boxes are filled. In a mirror, other boxes are always empty, and may be in a node's files.
    """

    def __init__(
        self,
        manifest: VersionManifest,
        files: SourceFiles,
        transport: str,
        expected: BoxDigests,
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
    def contents(self) -> list[Array]:
        """Bytes of each of the manifest's files."""
        return self._files.arrays.contents

    @property
    def specs(self) -> dict[str, TensorSpec]:
        """The specs of the HF tensors, by name."""
        return self.manifest.specs

    def populate(self, needs: Needs) -> None:
        """Map the pages of these boxes now, without Python's lock, so that the copies cause no page faults."""
        spans = []
        for name, boxes in needs.items():
            first, _ = byte_bounds(self.arrays[name])
            for rows in (rows for box in boxes for rows in box_rows(box, self.specs[name])):
                spans += [(first + start, first + end) for start, end in rows.spans(PIECE_BYTES)]
        self._files.populate(_joined(spans))

    def register(self, boxes: Boxes, device: torch.device, serves: Busy) -> bool:
        """Register the pages of these boxes, so that kernels on `device` can read them: see `SourceFiles.register`."""
        self.registered = self._files.register(boxes, device, serves)
        return self.registered

    def unregister(self) -> None:
        """Begin to release the registered pages, which stay mapped."""
        self.registered = False
        self._files.unregister()

    def copyable(self, array: Array) -> Array:
        """Return an array in memory that CUDA copies from: itself, or a copy if only some of its pages are registered."""
        return self._files.copyable(array)

    def close(self) -> None:
        """Unregister and unmap the pages. A reference to an array, e.g. in a traceback, delays the unmapping."""
        self._files.close()


def _joined(spans: Iterable[Span]) -> list[Span]:
    """Return spans of memory, joined where they touch: a call for each tensor takes longer than its pages. Holes stay holes,
    whose pages would take memory.
    """
    found: list[Span] = []
    for first, end in sorted(spans):
        if found and first <= found[-1][1]:
            found[-1] = found[-1][0], max(found[-1][1], end)
        else:
            found.append((first, end))
    return found


class Sources:
    """Opens the sources of versions for one worker process, one at a time.

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
        self._needed: NeededDigests | None = None
        self._lock, self._node_reason = threading.Lock(), ""
        self.transport = SHARED if self.shared else HTTP
        """`SHARED` if the store's files can be mapped; else `NODE` or `http`, as the last version, or the one to try."""
        self.transport_reason = ""
        """Reason for `http` in place of `NODE`; empty if there is none."""
        self._node = HostNode(channel, settings.server) if not self.shared and not settings.transport else None

    def open(self, manifest: VersionManifest, needs: Needs, without: frozenset[str] = frozenset()) -> VersionSource:
        """Make a version's boxes readable in this process.

        Args:
            manifest: The version's manifest.
            needs: The needed boxes of each HF tensor.
            without: HF tensors that need not be fetched, because they arrive on the direct path.

        Raises:
            ResharderError: The boxes cannot be fetched, or their digests differ.
        """
        expected = self.expected(manifest, needs)
        fetched = {name: boxes for name, boxes in needs.items() if name not in without}
        with self._lock:
            self._node_reason = ""
            failpoint("worker.stage.map")
            if self.shared and manifest.folder:
                self.transport, self.transport_reason = SHARED, ""
                files = self._next.take(Path(manifest.folder), manifest.files)
                return VersionSource(manifest, files, SHARED, expected)
            if not without and (found := self._from_node(manifest, needs, expected)) is not None:
                return found  # with ranks' help, what remains is little of each piece, and the node would fetch them all
            mirror = self._mirror.prepare(manifest.files)
            self._fetch(manifest, fetched, expected, [file.path for file in mirror])
            files = SourceFiles(DESCRIPTORS, mirror)
            return VersionSource(manifest, files, self.transport, expected, whole=not without)

    def expected(self, manifest: VersionManifest, needs: Needs) -> BoxDigests:
        """Return the digests of a version's needed boxes as the store has them. Raises ResharderError."""
        needed = self._needed
        if needed is None or not needed.are_of(manifest.specs, needs):
            self._needed = needed = NeededDigests(manifest.specs, needs)
        return needed.of(self._channel, manifest)

    def prepare_next(self, manifest: VersionManifest, boxes: Callable[[], Boxes], device: torch.device) -> None:
        """Register the pages of these boxes in the files of the version after `manifest`'s, in the background."""
        if self.shared:
            self._next.prepare(manifest, boxes, device)

    def _from_node(self, manifest: VersionManifest, needs: Needs, expected: BoxDigests) -> VersionSource | None:
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

    def _fetch(self, manifest: VersionManifest, needs: Needs, expected: BoxDigests, files: list[str]) -> None:
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
        self.transport, self.transport_reason = HTTP, self._node_reason
        wrong = [key for key, found in zip(boxes, answer["digests"], strict=True) if expected[key] != found]
        if wrong:
            raise StagingFailed(f"{manifest.name}: {len(wrong)} fetched boxes differ from the store's digests, e.g. {wrong[0]}")

    def close(self) -> None:
        """Close the files of the mirror, and the prepared files of the next version."""
        self._mirror.close()
        self._next.close()


class NextFiles:
    """Files of the next version, prepared before that version exists, at most one set of them.

    Registering 16 GB with CUDA takes one to two seconds beside a server that serves. The daemon lays the files of a version out
    ahead of need, so a worker registers them while nothing is to be installed. Staging then finds by their inodes that these are
    the version's files, and registers what is left. Nothing waits for a preparation: it stops where it is.

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
        self._lock = threading.Lock()
        self._preparation: _Preparation | None = None

    def prepare(self, manifest: VersionManifest, boxes: Callable[[], Boxes], device: torch.device) -> None:
        """Begin to prepare the files for the version after `manifest`'s, in place of any others. Return at once.

        Args:
            manifest: The manifest of a READY version.
            boxes: Returns the HF tensors and boxes to register; called on the preparation's thread.
            device: The GPU.
        """

        def ask() -> Path:
            stub = server_pb2_grpc.ServerServiceStub(self._channel.grpc)
            request = server_pb2.GetNextFilesRequest(version=manifest.name)
            return Path(self._channel.call(stub.GetNextFiles, request, timeout=10, patience=0).folder)

        def register(files: SourceFiles, stop: Stop) -> None:
            files.register(boxes(), device, self._busy, self._register, stop)

        def layout(folder: Path) -> SourceFiles:
            return SourceFiles(folder, manifest.files)

        with self._lock:
            former = self._preparation
            self._preparation = _Preparation(ask, layout, register, self._ask_seconds, self._check_seconds, former)

    def take(self, folder: Path, files: tuple[FileLayout, ...]) -> SourceFiles:
        """Return the files of a version, which the caller closes: the prepared ones if the daemon took these for the version.

        Others stay prepared.

        Raises:
            OSError: A file is missing.
            ValueError: A file has another size.
        """
        with self._lock:
            found = self._preparation.take(folder, files) if self._preparation is not None else None
        return found or SourceFiles(folder, files)

    def close(self) -> None:
        """Let go of the files."""
        with self._lock:
            preparation, self._preparation = self._preparation, None
        if preparation is not None:
            preparation.end()


class _Preparation:
    """One attempt to prepare files, on a thread of its own, which closes them unless they are taken.

    Args:
        ask: Returns the folder of the files, `Path()` if there is none yet. Raises ResharderError.
        files: Maps the files of a folder. Raises OSError and ValueError.
        register: Registers the files' pages until it is told to stop.
        ask_seconds: Interval of `ask`.
        check_seconds: Interval of checks whether the files have been removed.
        former: A preparation that this one ends and replaces.
    """

    def __init__(
        self,
        ask: Callable[[], Path],
        files: Callable[[Path], SourceFiles],
        register: Callable[[SourceFiles, Stop], None],
        ask_seconds: float,
        check_seconds: float,
        former: "_Preparation | None",
    ) -> None:
        self._ask, self._make, self._register = ask, files, register
        self._ask_seconds, self._check_seconds = ask_seconds, check_seconds
        self._lock, self._ended = threading.Lock(), threading.Event()  # the lock guards `_files`
        self._files: SourceFiles | None = None
        self._thread = threading.Thread(target=self._run, args=[former], name="resharder-next-files", daemon=True)
        self._thread.start()

    def take(self, folder: Path, files: tuple[FileLayout, ...]) -> SourceFiles | None:
        """End the preparation and return its files, which the caller closes, if they are those of `folder`; else None."""
        with self._lock:
            try:
                if self._files is None or not self._files.are_of(folder, files):
                    return None
            except OSError:
                return None
            found, self._files = self._files, None
            self._ended.set()
            return found

    def end(self) -> None:
        """End the preparation, and return once its files are closed, unless they were taken."""
        self._ended.set()
        self._thread.join()

    def _run(self, former: "_Preparation | None") -> None:
        try:
            if former is not None:
                former.end()
            while not self._ended.wait(self._ask_seconds):
                with contextlib.suppress(FileNotFoundError):  # they were taken for a version in the meantime
                    folder = self._ask()
                    if folder.name:
                        self._prepare(self._make(folder))
                        break
            while not self._ended.wait(self._check_seconds) and not self._removed:
                pass
        except (ResharderError, OSError, ValueError, RuntimeError) as error:  # also of a daemon without this call
            logger.info("cannot prepare the files of the next version: %s", error)
        finally:
            with self._lock:
                left, self._files = self._files, None
            if left is not None:
                left.close()

    def _prepare(self, files: SourceFiles) -> None:
        with self._lock:
            self._files = files
        self._register(files, self._ended.is_set)

    @property
    def _removed(self) -> bool:
        with self._lock:
            return self._files is None or self._files.removed


class NodeFiles(NamedTuple):
    """Folder of a version's files on the host's node, or the reason for having none; both are empty without nodes."""

    folder: Path | None
    reason: str = ""


class HostNode:
    """The node on this host, if there is one. A worker maps a version in its memory as it maps the store on the daemon's host.

    A worker recognises its node by a nonce in a file that both can read, as it does the daemon. It asks for the version through
    the daemon, and then looks at the node's folder while pieces arrive there, so that many waiting workers cost it little.

    Args:
        channel: Channel to the daemon.
        server: Id of the server.
        clock: Seconds of a monotonic clock.
    """

    def __init__(self, channel: Channel, server: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._channel, self._server, self._clock = channel, server, clock
        self._paths: tuple[str, ...] = ()

    def files(self, version: str, needed: Bitmap) -> NodeFiles:
        """Return a version's files once the node holds some pieces of it. Others may be holes in the files.

        Args:
            version: Full name of the READY version.
            needed: The pieces.
        """
        try:
            return self._files(version, needed)
        except ResharderError as error:
            return NodeFiles(None, "" if error.reason == "UNIMPLEMENTED" else f"{type(error).__name__}: {error}")

    def _files(self, version: str, needed: Bitmap) -> NodeFiles:
        readable = read_nonces(self._paths)
        answer = self._ask(version, needed, readable)
        if not answer.node:
            self._paths = tuple(answer.nonce_files)
            if not (readable := read_nonces(self._paths)):
                return NodeFiles(None, "no node on this host" if self._paths else "")
            answer = self._ask(version, needed, readable)
        held, since, pause = -1, self._clock(), _LOOK_SECONDS
        while answer.node and not answer.problem:
            if self._appears(answer.folder, needed, pause):
                return NodeFiles(Path(answer.folder))
            if answer.held_bytes != held:
                held, since = answer.held_bytes, self._clock()
            elif self._clock() - since > _PATIENCE:
                missing = f"{answer.folder} cannot be read here" if answer.whole else "no piece has arrived"
                return NodeFiles(None, f"{answer.node}: {missing} for {_PATIENCE:.0f} s")
            pause = min(2 * pause, _ASK_SECONDS)
            answer = self._ask(version, needed, readable)
        return NodeFiles(None, answer.problem or "no node on this host")

    def _appears(self, folder: str, needed: Bitmap, seconds: float) -> bool:
        """Return whether a node's version has all needed pieces, as soon as it has, or after some seconds.

        The folder decides: the node's last report to the daemon may concern an earlier copy.
        """
        until = self._clock() + seconds
        while not (there := bool(folder) and not len(needed - _held(folder, needed.count))) and self._clock() < until:
            time.sleep(_LOOK_SECONDS)
        return there

    def _ask(self, version: str, needed: Bitmap, readable: list[resources_pb2.StoreAccess]) -> node_pb2.HostVersion:
        stub = node_pb2_grpc.NodeServiceStub(self._channel.grpc)
        request = node_pb2.GetHostVersionRequest(
            version=version, server=f"servers/{self._server}", readable=readable, needed=needed.to_bytes()
        )
        answer: node_pb2.HostVersion = self._channel.call(stub.GetHostVersion, request)
        return answer


def _held(folder: str, count: int) -> Bitmap:
    """Return the pieces that a node holds in a version's folder; none if it cannot be read."""
    try:
        with open(os.path.join(folder, HELD_FILE), "rb") as file:
            return Bitmap.from_bytes(count, file.read())
    except (OSError, ValueError):
        return Bitmap(count)


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
        while self._files:
            os.close(self._files.pop()[0])
