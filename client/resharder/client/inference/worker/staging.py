"""Staging of an install in a worker: fetch a version and prepare its copies while the server serves."""

import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from resharder.client.errors import ResharderError
from resharder.client.gpu.streams import on_stream, use_gpu
from resharder.client.inference.engine import Host, InstallError
from resharder.client.inference.settings import PluginSettings
from resharder.client.inference.worker.install import Prepared
from resharder.client.inference.worker.model_part import ModelParts, Models
from resharder.client.inference.worker.receiver import EarlyVersion, OpenMemory, Receiver
from resharder.client.inference.worker.source import Sources, VersionSource
from resharder.client.rpc.channel import Channel
from resharder.client.tracing import Timings
from resharder.client.versions.manifest import BoxDigests, VersionManifest, get_manifest
from resharder.converters.geometry.layout import Box
from resharder.v1 import resources_pb2

logger = logging.getLogger("resharder.inference.worker")


@dataclass
class StagedInstall:
    """An install from the order to stage it until it is applied or given up."""

    install: str
    """Id of the install."""
    version: str = ""
    """Full name of the version."""
    fallback: str = ""
    """Full name of the READY version to fall back on, if `version` is not READY."""
    source: VersionSource | None = None
    """Set when staging is complete. The fallback if `early` is set."""
    seconds: float = 0.0
    """Duration of the staging."""
    timings: Timings = field(default_factory=list)
    direct: OpenMemory | None = None
    """The memory that ranks write to, if the install uses the direct path."""
    prepared: dict[str, Prepared] = field(default_factory=dict)
    """Prepared copies by part, if the source is registered."""
    early: EarlyVersion | None = None
    """Set if `version` is not READY."""


class Staging:
    """The staging of one worker, at most one install at a time.

    Args:
        host: The worker process.
        channel: Channel to the daemon.
        settings: The plugin's settings.
        parts: The worker's models.
        receiver: The worker's side of the direct path.
        serves: Whether the server may serve requests now, so that staging must leave time to its kernels.
    """

    def __init__(
        self,
        host: Host,
        channel: Channel,
        settings: PluginSettings,
        parts: ModelParts,
        receiver: Receiver,
        serves: Callable[[], bool],
    ) -> None:
        self._serves = serves
        self._host, self._channel, self._settings, self._parts, self._receiver = host, channel, settings, parts, receiver
        self.lock = threading.Lock()
        """Guards the state that the engine's thread and the staging thread share."""
        self.sources: Sources | None = None
        """The sources of versions, once `connect` was called."""
        self.current: StagedInstall | None = None
        """The install that is staged or being staged."""
        self._previous: StagedInstall | None = None
        self._fallback: VersionSource | None = None  # a READY version, for an install ahead of READY or its failure
        self._opening: _Opening | None = None  # the next fallback

    def connect(self, access: resources_pb2.StoreAccess) -> Sources:
        """Choose the transport to the store; later calls return the same sources."""
        if self.sources is None:
            self.sources = Sources(self._channel, access, self._settings, self._serves)
        return self.sources

    @property
    def transport(self) -> str:
        """The transport to the store; empty before `connect`."""
        return self.sources.transport if self.sources else ""

    @property
    def transport_reason(self) -> str:
        """Reason for gRPC in place of HTTP; empty if there is none."""
        return self.sources.transport_reason if self.sources else ""

    def begin(self, install_id: str, version: str, fallback: str) -> StagedInstall | None:
        """Replace what is staged; `None` if this install is staged already."""
        with self.lock:
            if self.current is not None and self.current.install == install_id:
                return None
            self.drop()
            self.current = StagedInstall(install_id, version, fallback)
            return self.current

    def drop(self) -> None:
        """Discard what is staged. Callers must hold `lock`."""
        if self.current is not None and self.current.source is not None:
            _let_go(self.current.source.close)
            self.current.prepared = {}
        self.current, self._previous = None, self.current

    def dropped(self, install_id: str) -> StagedInstall | None:
        """Return the last dropped install if it is `install_id`."""
        return self._previous if self._previous is not None and self._previous.install == install_id else None

    def finish(self, staged: StagedInstall, keep: bool = False) -> None:
        """Drop an install that was applied or failed. Keep its fallback while its version is not READY.

        Args:
            staged: The install.
            keep: Whether to keep its version, which was applied, as the fallback of an install ahead of READY.
        """
        source = staged.source
        if source is not None and self.sources is not None:
            if staged.early is None and source.registered:
                self.sources.prepare_next(source.manifest, self._boxed, self._host.device)
            if staged.early is not None or (keep and self.sources.shared):  # a mirror has one version at a time
                if source.registered:  # the prepared copies end with the install, and so does the need of them
                    source.unregister()
                self._keep(source)
                staged.source, staged.prepared = None, {}
        with self.lock:
            self.drop()

    def prepare_fallback(self, manifest: VersionManifest) -> BoxDigests:
        """Open a version that was installed ahead and is READY now, as the fallback of the next install ahead of READY.

        Only from mapped files: a mirror has one version at a time. An install that needs this version waits for it, and no other.

        Returns:
            The store's digests of the needed boxes.

        Raises:
            ResharderError: The version's digests cannot be fetched.
        """
        assert self.sources is not None
        needs, source = self._parts.needs(), None
        if not self.sources.shared:
            self._keep(None)
            return self.sources.expected(manifest, needs)
        opening = _Opening(manifest.name)
        with self.lock:
            self._opening = opening
        try:
            source = self.sources.open(manifest, needs)
        except (OSError, ValueError) as error:  # as when the version is retired meanwhile
            logger.info("%s is not prepared as the version to fall back on: %s", manifest.name, error)
        except BaseException:
            self._end(opening, None, replace=False)
            raise
        expected = source.expected if source is not None else None
        _close(self._end(opening, source, replace=True))
        return expected if expected is not None else self.sources.expected(manifest, needs)

    def _end(self, opening: "_Opening", source: VersionSource | None, *, replace: bool) -> VersionSource | None:
        """End an opening; with `replace`, its source is the fallback if it is still wanted. Return what is to be closed."""
        with self.lock:
            opening.source = source if opening.awaited else None
            opening.done.set()
            if self._opening is not opening:
                return None if opening.awaited else source
            self._opening = None
            if not replace:
                return None
            former, self._fallback = self._fallback, source
            return former

    def _keep(self, source: VersionSource | None) -> None:
        """Replace the fallback, and close the former one."""
        with self.lock:
            former, self._fallback = self._fallback, source
        if former is not source:
            _close(former)

    def stage(
        self, models: Models, staged: StagedInstall, memory: OpenMemory | None, manifest: VersionManifest | None
    ) -> VersionSource:
        """Fetch the version of `staged` and prepare its copies.

        Args:
            models: The worker's models.
            staged: The install; its fields are filled.
            memory: The memory that ranks may write to; `None` excludes the direct path.
            manifest: The manifest of the fallback or else of the version, if the caller has it.

        Raises:
            ResharderError: The version cannot be fetched.
            InstallError: The version does not fit the worker, or it is not READY and cannot arrive on the direct path.
        """
        use_gpu(self._host.device)  # the thread of an install is new, and begins with GPU 0
        source = self._fallback_of(staged.fallback or staged.version) or self._fetch(models, staged, memory, manifest)
        if staged.fallback:  # after the fallback is there: the ranks wait from READY on, and for so long only
            source = self._join_early(models, staged, memory, source)
        self._register(models, staged, source)
        return source

    def _fetch(
        self, models: Models, staged: StagedInstall, memory: OpenMemory | None, manifest: VersionManifest | None
    ) -> VersionSource:
        assert self.sources is not None
        manifest = manifest or get_manifest(self._channel, staged.fallback or staged.version)
        self._parts.check(manifest)
        needed = self._parts.needs()
        if staged.fallback:
            return self.sources.open(manifest, needed)
        if memory is None or not self._receiver.join(memory, models, staged.version, staged.install):
            source = self.sources.open(manifest, needed)
            source.populate(needed)  # not on the direct path, where pages are needed after a failure only
            return source
        staged.direct = memory
        source = self.sources.open(manifest, needed, frozenset(memory.layout.tensors) - self._parts.loaded)
        self._receiver.expect(memory, source.expected)
        return source

    def _join_early(
        self, models: Models, staged: StagedInstall, memory: OpenMemory | None, fallback: VersionSource
    ) -> VersionSource:
        """Join the transfer of an early version; if its ranks are gone and it is READY by now, stage it from the store.

        Returns:
            The fallback, or the version's source.

        Raises:
            ResharderError: The version is not READY, and the ranks' digests cannot be fetched. The fallback is kept.
            InstallError: The version is not READY, and cannot arrive on the direct path. The fallback is kept.
        """
        try:
            staged.early = self._early(models, staged, memory)
            staged.direct = memory
            return fallback
        except (InstallError, ResharderError) as error:
            try:
                manifest = get_manifest(self._channel, staged.version)
            except ResharderError:
                self._keep(fallback)
                raise error from None
            logger.info("%s is READY, and installed from the store: %s", staged.version, error)
        _close(fallback)
        staged.fallback = ""
        return self._fetch(models, staged, None, manifest)

    def _early(self, models: Models, staged: StagedInstall, memory: OpenMemory | None) -> EarlyVersion:
        version = staged.version
        if memory is None or self._parts.loaded:
            raise InstallError(f"{version} is not READY, and this worker cannot receive all of it on the direct path")
        if not self._receiver.join(memory, models, version, staged.install):
            raise InstallError(f"{version} is not READY, and this worker has no link to its ranks: {self._receiver.problem}")
        early = self._receiver.expect_early(memory, version)
        self._parts.check_early(version, early.config, early.tensors)
        return early

    def _fallback_of(self, version: str) -> VersionSource | None:
        """Return the fallback if it is `version`, also one that is being opened; give up any other."""
        with self.lock:
            found, self._fallback = self._fallback, None
            opening, self._opening = self._opening, None
            if opening is not None and opening.version == version:
                opening.awaited = True
        if found is not None and found.manifest.name == version:
            return found
        _close(found)
        if opening is not None and opening.awaited:
            opening.done.wait()
            return opening.source
        return None

    def _boxed(self) -> list[tuple[str, Box]]:
        """Return the HF tensors and boxes that are copied straight into memory."""
        return [(piece.tensor, piece.box) for part in self._parts.by_name.values() if part.route for piece in part.route.boxed]

    def _register(self, models: Models, staged: StagedInstall, source: VersionSource) -> None:
        """Register pages and prepare copies before the pause, so that the pause takes only the time of the transfer."""
        boxed = self._boxed()
        if self._host.device.type != "cuda" or staged.direct is not None or not boxed:
            return
        try:
            stream = torch.cuda.Stream(self._host.device)  # type: ignore[no-untyped-call]
            with on_stream(stream):
                if source.register(boxed, self._host.device, self._serves):
                    made = {
                        name: self._parts.part(name).prepare(source, model, self._host.device) for name, model in models.items()
                    }
                    staged.prepared = {name: copy for name, copy in made.items() if copy is not None}
                    stream.synchronize()
        except RuntimeError as error:  # no GPU memory left for the tables
            logger.warning("cannot register host pages, so CUDA copies through its own buffers: %s", error)


class _Opening:
    """A version that a thread opens as the next fallback. The lock of `Staging` guards it.

    Args:
        version: Full name of the version.
    """

    def __init__(self, version: str) -> None:
        self.version, self.awaited = version, False  # awaited: by an install, which takes `source`
        self.done = threading.Event()
        self.source: VersionSource | None = None


def _let_go(work: Callable[[], None]) -> None:
    """Run work on a thread that nothing waits for. Changes of page tables take long, and requests may be waiting."""
    threading.Thread(target=work, name="resharder-pages").start()


def _close(source: VersionSource | None) -> None:
    if source is not None:
        _let_go(source.close)
