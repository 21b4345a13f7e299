"""Staging of an install in a worker: a version is brought within reach while the server serves."""

import logging
import threading
from dataclasses import dataclass, field

import torch
from resharder.client.inference.engine import Host
from resharder.client.inference.settings import PluginSettings
from resharder.client.inference.worker.direct_receiver import EarlyVersion, Open, Receiver
from resharder.client.inference.worker.errors import InstallError
from resharder.client.inference.worker.install import Prepared
from resharder.client.inference.worker.model_part import ModelParts, Models
from resharder.client.inference.worker.source import Stager, VersionManifest, VersionSource, get_manifest
from resharder.client.rpc.channel import Channel
from resharder.client.tracing import Timings
from resharder.v1 import resources_pb2

logger = logging.getLogger("vllm.resharder.worker")


@dataclass
class StagedInstall:
    """An install that is staged or being staged; `source` is set when it is complete."""

    install: str
    version: str = ""
    fallback: str = ""  # the READY version to keep at hand, where `version` is not READY
    source: VersionSource | None = None
    seconds: float = 0.0
    timings: Timings = field(default_factory=list)
    direct: Open | None = None  # the memory that trainers' ranks write to
    prepared: dict[str, Prepared] = field(default_factory=dict)  # by part, where the source is registered
    early: EarlyVersion | None = None  # set where `version` is not READY: `source` is then the fallback


class Staging:
    """At most one install at a time. `lock` guards what the engine's thread and the staging thread share."""

    def __init__(self, host: Host, channel: Channel, settings: PluginSettings, parts: ModelParts, receiver: Receiver) -> None:
        self._host, self._channel, self._settings, self._parts, self._receiver = host, channel, settings, parts, receiver
        self.lock = threading.Lock()
        self.stager: Stager | None = None
        self.current: StagedInstall | None = None
        self._previous: StagedInstall | None = None
        self._fallback: VersionSource | None = None  # kept while the version that is installed is not in the store

    def open(self, access: resources_pb2.StoreAccess) -> Stager:
        """Choose the transport to the store; later calls return the same stager."""
        if self.stager is None:
            self.stager = Stager(self._channel, access, self._settings)
        return self.stager

    @property
    def transport(self) -> str:
        return self.stager.transport if self.stager else ""

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
            # Unmapping millions of pages takes its time, and clients may be waiting.
            threading.Thread(target=self.current.source.close, name="resharder-unmap").start()
            self.current.prepared = {}
        self.current, self._previous = None, self.current

    def dropped(self, install_id: str) -> StagedInstall | None:
        """Return the record of the install that was dropped last, if it is this one."""
        return self._previous if self._previous is not None and self._previous.install == install_id else None

    def finish(self, staged: StagedInstall) -> None:
        """Drop an install that was applied or failed; keep its fallback while its version is not READY."""
        with self.lock:
            if staged.early is not None:
                self._fallback, staged.source = staged.source, None
            self.drop()

    def take_fallback(self) -> VersionSource | None:
        """Hand the fallback to the caller, who closes it. Callers must hold `lock`."""
        found, self._fallback = self._fallback, None
        return found

    def bring(
        self, models: Models, staged: StagedInstall, memory: Open | None, manifest: VersionManifest | None
    ) -> VersionSource:
        """Fetch the version of `staged` and prepare its copies. `memory`: where ranks may write. Raises ResharderError and
        InstallError."""
        source = self._fallback_of(staged.version) or self._fetch(models, staged, memory, manifest)
        self._register(models, staged, source)
        return source

    def _fetch(
        self, models: Models, staged: StagedInstall, memory: Open | None, manifest: VersionManifest | None
    ) -> VersionSource:
        assert self.stager is not None
        manifest = manifest or get_manifest(self._channel, staged.fallback or staged.version)
        self._parts.check(manifest)
        needed = self._parts.needs()
        if staged.fallback:
            self._join_early(models, staged, memory)
            return self.stager.stage(manifest, needed)
        if memory is None or not self._receiver.join(memory, models, staged.version, staged.install):
            return self.stager.stage(manifest, needed)
        staged.direct = memory
        source = self.stager.stage(manifest, needed, frozenset(memory.layout.tensors) - self._parts.loaded)
        self._receiver.expect(memory, source.expected)
        return source

    def _join_early(self, models: Models, staged: StagedInstall, memory: Open | None) -> None:
        version = staged.version
        if memory is None or self._parts.loaded:
            raise InstallError(f"{version} is not READY, and not all of it can come over the direct path here")
        if not self._receiver.join(memory, models, version, staged.install):
            raise InstallError(f"{version} is not READY, and its ranks cannot be reached over the direct path")
        staged.direct, staged.early = memory, self._receiver.expect_early(memory, version)

    def _fallback_of(self, version: str) -> VersionSource | None:
        """Return the fallback if it is `version`; close any other."""
        with self.lock:
            found = self.take_fallback()
        if found is not None and found.manifest.name != version:
            found.close()
            return None
        return found

    def _register(self, models: Models, staged: StagedInstall, source: VersionSource) -> None:
        """Do before the pause what a GPU needs for its copies, so that the pause waits for the link alone."""
        boxed = [(piece.tensor, piece.box) for part in self._parts.by_name.values() if part.route for piece in part.route.boxed]
        if self._host.device.type != "cuda" or staged.direct is not None or not boxed:
            return
        try:
            stream = torch.cuda.Stream(self._host.device)  # type: ignore[no-untyped-call]
            with torch.cuda.device(self._host.device), torch.cuda.stream(stream):
                if source.register(boxed, self._host.device):
                    made = {
                        name: self._parts.part(name).prepare(source, model, self._host.device) for name, model in models.items()
                    }
                    staged.prepared = {name: copy for name, copy in made.items() if copy is not None}
                    stream.synchronize()
        except RuntimeError as error:  # no memory left for the tables
            logger.warning("the store's pages are copied by way of CUDA's own buffers: %s", error)
