"""What one of vLLM's workers knows of its model and its drafter, and how versions get into them."""

import logging
import threading
import time
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from resharder.client.errors import ResharderError
from resharder.client.inference.engine import Host
from resharder.client.inference.power import WEIGHTS, Slumber
from resharder.client.inference.recording import recorder
from resharder.client.inference.settings import Settings
from resharder.client.inference.version_page import page
from resharder.client.inference.worker import install, sleep_backup
from resharder.client.inference.worker.ahead import Ahead, compare
from resharder.client.inference.worker.boot_lease import Renewal
from resharder.client.inference.worker.direct_receiver import Open, Receiver, open_memory
from resharder.client.inference.worker.errors import InstallError
from resharder.client.inference.worker.install import Installed, Prepared
from resharder.client.inference.worker.model_part import DRAFTER, Models, Part, needs, shared_modules
from resharder.client.inference.worker.profile import profiled
from resharder.client.inference.worker.reporter import PROCESS, Reporter, claim
from resharder.client.inference.worker.routing import Route, first_route
from resharder.client.inference.worker.sleep_backup import Kept
from resharder.client.inference.worker.source import Manifest, Source, Stager, get_manifest
from resharder.client.inference.worker.verify import Verifier
from resharder.client.rpc.channel import Channel
from resharder.client.runtime.driver_lock import DRIVER
from resharder.client.runtime.gc_pauses import sweep, unswept
from resharder.client.runtime.switch_interval import quick_turns
from resharder.client.tracing import Timings, timed
from resharder.converters.errors import ConversionError
from resharder.converters.geometry.layout import ITEM_SIZES, box_size
from resharder.v1 import resources_pb2

logger = logging.getLogger("vllm.resharder.worker")
_RPC_PATIENCE = 5.0  # inside an RPC the engine waits


@dataclass
class _Staged:
    install: str
    version: str = ""
    fallback: str = ""  # the READY version to keep at hand, where `version` is not READY
    source: Source | None = None
    seconds: float = 0.0
    timings: Timings = field(default_factory=list)
    direct: Open | None = None  # what comes from trainers' memory
    prepared: dict[str, Prepared] = field(default_factory=dict)  # by part, where the source is registered
    ahead: Ahead | None = None  # its version is not READY: `source` is the one to fall back on


class Agent:
    """One worker's model and its drafter, what is known of them, and what is staged for them. Called from vLLM's thread, but for
    `_stage`."""

    def __init__(self, host: Host, settings: Settings) -> None:
        self.host, self.settings = host, settings
        self.channel = Channel(settings.endpoint)
        self.reporter = Reporter(self.channel, settings)
        self.parts: dict[str, Part] = {}
        self.needed_bytes = 0
        self.renewal: Renewal | None = None  # of the server's claim, while it boots
        self.boot: Manifest | None = None  # what the model was booted from, for its drafter
        self.stager: Stager | None = None
        self._version = 0
        page().write(host.rank, 0)
        self.fingerprint = ""  # of that version
        self.installed: Installed | None = None
        self.slumber = Slumber()
        self.dropped = False  # a sleep took the weights, and no version came since
        self._kept: Kept | None = None
        self._receiver = Receiver(self.channel, settings.server, host.rank, PROCESS, host.device)
        self._memory: Open | None = None  # what ranks may write to
        self._routes: list[Route | None] = []  # that it was made of
        self._applied = ""
        self._staged: _Staged | None = None
        self._fallback: Source | None = None  # kept at hand while what it holds is not in the store
        self._past: _Staged | None = None  # what was staged before
        self._lock = threading.Lock()
        self.verifier = Verifier(
            self.parts, host.device, host.rank, lambda: self.version, self._unverifiable, self._altered, self.reporter.verified
        )
        self.reporter.asked = self.verifier.ask

    def _unverifiable(self) -> str:
        """Why what is in memory cannot be compared now; empty where it can."""
        if WEIGHTS in self.slumber.tags:
            return f"not verifiable while asleep (level {self.slumber.level})"
        if self.dropped:
            return "a sleep dropped the weights, and no version was installed since"
        return "" if self.version else "it holds no version"

    def _altered(self, found: resources_pb2.Verification) -> None:
        """Reported as a failed install is, until one succeeds. `_applied` stays: an order that comes again is not one."""
        names = ", ".join(found.different) + (", …" if found.different_tensors > len(found.different) else "")
        error = (
            f"{found.different_tensors} tensors in memory differ from version {found.version}, changed by another hand: {names}"
        )
        logger.error("%s", error)
        install_id, self.version, self.fingerprint = self._applied, 0, ""
        self._report(resources_pb2.Worker.FAILED, install=install_id, error=error, holds=True, altered=found)

    @property
    def version(self) -> int:
        """The version that the model and its drafter hold, whole and confirmed; 0 for none."""
        return self._version

    @version.setter
    def version(self, version: int) -> None:
        self._version = version
        page().write(self.host.rank, version)

    def stage_with(self, access: resources_pb2.StoreAccess) -> Stager:
        if self.stager is None:
            self.stager = Stager(self.channel, access, self.settings)
        return self.stager

    # What collective_rpc reaches

    def describe(self) -> dict[str, Any]:
        if not self.reporter.started:
            self._report(resources_pb2.Worker.EMPTY, holds=True)
        with self._lock:
            staged = self._staged.install if self._staged is not None and self._staged.source is not None else ""
        return {
            "version": self.version,
            "staged": staged,
            "transport": self.stager.transport if self.stager else "",
            "recorded": bool(self.needed_bytes),
            "power": int(self.slumber.power),
            "asleep": sorted(self.slumber.tags),
            "dropped": self.dropped,
            "needed_bytes": self.needed_bytes,
            "boxed_bytes": self.installed.boxed_bytes if self.installed else 0,
            "proven": self.installed.proven if self.installed else 0,
            "apply_seconds": self.installed.seconds if self.installed else 0.0,
            "loaded": sorted(self._loaded),
            "impure": {
                name: why for part in self.parts.values() if part.recording for name, why in part.recording.impure.items()
            },
        }

    def stage(self, models: Models, install_id: str, version: str, fallback: str = "") -> dict[str, Any]:
        """Returns when the work has begun; what was not recorded yet is recorded first, which needs it to stand still."""
        with self._lock:
            if self._staged is not None and self._staged.install == install_id:
                return {}
            self._drop()
            staged = self._staged = _Staged(install_id, version, fallback)
        if problem := self.host.refusal():
            raise InstallError(problem)
        if self.stager is None:
            self.stage_with(claim(self.channel, self.settings, boot=False, patience=_RPC_PATIENCE).store)
        manifest = self.record_running(models, fallback or version)
        self.learned()
        threading.Thread(target=self._stage, args=(models, staged, manifest), name="resharder-stage", daemon=True).start()
        return {}

    def unstage(self, install_id: str) -> dict[str, Any]:
        with self._lock:
            if self._staged is not None and self._staged.install == install_id:
                self._drop()
                self.reporter.say_what_it_holds()
        return {}

    def part(self, name: str) -> Part:
        return self.parts.setdefault(name, Part(name, self.host.model_config(drafter=name == DRAFTER)))

    def record_running(self, models: Models, version: str) -> Manifest | None:
        """Records what was not recorded while it was loaded; the manifest of `version` if that took one."""
        manifest = None
        for name, model in models.items():
            part = self.part(name)
            part.share(shared_modules(models, name))
            if part.recording is None:
                self.need_weights("record how versions get into them")
                manifest = manifest or get_manifest(self.channel, version)
                with self.host.calling(), self.host.recordable(model):
                    recording = recorder.record(model, manifest.specs, self.host.original_loader)
                part.record(recording, manifest)
        self.recorded()
        return manifest

    def recorded(self) -> None:
        """Counts anew what a version is needed of."""
        specs = {name: spec for part in self.parts.values() for name, spec in part.known.layout.tensors.items()}
        self.needed_bytes = sum(
            box_size(box) * ITEM_SIZES[specs[name].dtype] for name, boxes in needs(self.parts.values()).items() for box in boxes
        )

    def _stage(self, models: Models, staged: _Staged, manifest: Manifest | None) -> None:
        started = time.perf_counter()
        try:
            with timed(staged.timings, "stage"), unswept(), quick_turns():
                source = self._at_hand(staged.version) or self._fetch(models, staged, manifest)
                self._register(models, staged, source)
        except (ResharderError, ConversionError, InstallError, OSError, ValueError) as error:
            with self._lock:
                if self._staged is staged:
                    self._staged = None
            error_text = f"{type(error).__name__}: {error}"
            self._report(resources_pb2.Worker.FAILED, install=staged.install, error=error_text, staged=staged)
            return
        staged.seconds = time.perf_counter() - started
        with self._lock:
            if self._staged is not staged:  # another install came meanwhile
                source.close()
                return
            staged.source = source
            number = staged.ahead.number if staged.ahead else source.manifest.number
            self._report(resources_pb2.Worker.STAGED, install=staged.install, version=number, staged=staged)

    def _fetch(self, models: Models, staged: _Staged, manifest: Manifest | None) -> Source:
        assert self.stager is not None
        manifest = manifest or get_manifest(self.channel, staged.fallback or staged.version)
        self._check(manifest)
        needed = needs(self.parts.values())
        if staged.fallback:
            self._join_ahead(models, staged)
            return self.stager.stage(manifest, needed)
        memory = self._memory
        if memory is None or not self._receiver.join(memory, models, staged.version, staged.install):
            return self.stager.stage(manifest, needed)
        staged.direct = memory
        source = self.stager.stage(manifest, needed, frozenset(memory.layout.tensors) - self._loaded)
        self._receiver.expect(memory, source.expected)
        return source

    def _join_ahead(self, models: Models, staged: _Staged) -> None:
        memory, version = self._memory, staged.version
        if memory is None or self._loaded:
            raise InstallError(f"{version} is not READY, and not all of it can come over the direct path here")
        if not self._receiver.join(memory, models, version, staged.install):
            raise InstallError(f"{version} is not READY, and its ranks cannot be reached over the direct path")
        staged.direct, staged.ahead = memory, self._receiver.expect_said(memory, version)

    def _at_hand(self, version: str) -> Source | None:
        """The source of `version`, where it was kept at hand; what else was is let go."""
        with self._lock:
            found, self._fallback = self._fallback, None
        if found is not None and found.manifest.name != version:
            found.close()
            return None
        return found

    def _register(self, models: Models, staged: _Staged, source: Source) -> None:
        """For a GPU: what can be done before the pause, so that the link is all that it waits for."""
        boxed = [(piece.tensor, piece.box) for part in self.parts.values() if part.route for piece in part.route.boxed]
        if self.host.device.type != "cuda" or staged.direct is not None or not boxed:
            return
        try:
            stream = torch.cuda.Stream(self.host.device)  # type: ignore[no-untyped-call]
            with torch.cuda.device(self.host.device), torch.cuda.stream(stream):
                if source.register(boxed, self.host.device):
                    made = {name: self.part(name).prepare(source, model, self.host.device) for name, model in models.items()}
                    staged.prepared = {name: copy for name, copy in made.items() if copy is not None}
                    stream.synchronize()
        except RuntimeError as error:  # no memory left for the tables
            logger.warning("the store's pages are copied by way of CUDA's own buffers: %s", error)

    def _check(self, manifest: Manifest) -> None:
        for part in self.parts.values():
            known = part.known.layout.tensors
            if manifest.specs != known:
                wrong = sorted(set(manifest.specs.items()) ^ set(known.items()))[:3]
                raise InstallError(f"{manifest.name} has other tensors than the versions before it: {wrong}; restart the server")

    def apply(self, models: Models, install_id: str) -> dict[str, Any]:
        if self._applied == install_id:
            return {"version": self.version}
        self.need_weights(f"apply install {install_id}")
        with self._lock:
            staged = self._staged
        if staged is None or staged.install != install_id or staged.source is None:
            raise InstallError(f"install {install_id} is not staged here")
        with self.verifier.undisturbed():
            return self._apply(models, staged, staged.source)

    def _apply(self, models: Models, staged: _Staged, source: Source) -> dict[str, Any]:
        install_id = staged.install
        self.version, self.fingerprint, self._applied = 0, "", ""
        manifest, ahead = source.manifest, staged.ahead
        number, fingerprint = (ahead.number, ahead.fingerprint) if ahead else (manifest.number, manifest.fingerprint)
        try:
            with timed(staged.timings, "apply"), DRIVER.undisturbed():  # pages of an earlier version may still be let go
                self._install(models, staged, source)
        finally:
            with self._lock:
                if staged.ahead is not None:
                    self._fallback, staged.source = staged.source, None
                self._drop()
        self.version, self.fingerprint, self._applied = number, fingerprint, install_id
        self.dropped = False
        self._report(resources_pb2.Worker.APPLIED, install=install_id, version=self.version, staged=staged, holds=True)
        if staged.ahead is not None:
            args = (staged.ahead, install_id)
            threading.Thread(target=self._compare, args=args, name="resharder-compare", daemon=True).start()
        return {"version": self.version}

    def _compare(self, ahead: Ahead, install_id: str) -> None:
        """Once the version is READY, with the store's copy."""
        with quick_turns():
            found = compare(self.channel, ahead, lambda: self._applied == install_id)
        if found is None:
            return
        manifest, difference = found
        if difference:
            logger.error("%s was served ahead of READY with other weights than the store's: %s", ahead.version, difference)
        with self._lock:
            if self._applied != install_id or not self.version:
                return
            if difference:
                self.version = 0
            else:
                self.fingerprint = manifest.fingerprint
            at_hand, self._fallback = self._fallback, None
        if at_hand is not None:
            at_hand.close()
        self.reporter.correct(install_id, self.fingerprint, difference)

    def profiled(self, install_id: str) -> AbstractContextManager[None]:
        return profiled(self.channel, self.settings.server, self.host.rank, install_id, self.host.device)

    def _install(self, models: Models, staged: _Staged, source: Source) -> None:
        began, done, arrived = time.perf_counter(), Installed(0, 0, 0.0), False
        if staged.direct is not None and staged.direct is self._memory:
            arrived = self._receiver.receive(staged.direct, models, staged.install, staged.timings)
        if not arrived and staged.ahead is not None:
            raise InstallError(f"the direct transfer failed, and {staged.ahead.version} is not READY")
        if not arrived and not source.whole:
            raise InstallError("the direct transfer failed, and what it was to bring is not staged here")
        for name, model in models.items():
            part = self.part(name)
            route = part.route or first_route(part.known, model, part.shared)
            prepared = staged.prepared.get(name)
            done += install.install(self.host, model, part.config, part.known, route, source, arrived, prepared, staged.timings)
            if part.route is None:
                part.learn(model, source)
            self.verifier.expect(part, None if staged.ahead is not None else source.expected)
        self.verifier.installed(models)
        self.installed = replace(done, seconds=time.perf_counter() - began)  # what came directly has taken its time too
        self.learned()

    def learned(self) -> None:
        """Looks anew which memory ranks may write to, where routes have changed."""
        parts = list(self.parts.values())
        if self.settings.direct and self._routes != (routes := [part.route for part in parts]):
            self._memory, self._routes = open_memory(parts, self.host.rank), routes

    @property
    def _loaded(self) -> frozenset[str]:
        """HF tensors that go through `load_weights` each time."""
        return frozenset(name for part in self.parts.values() for name in part.loaded)

    def _drop(self) -> None:
        if self._staged is not None and self._staged.source is not None:
            # Unmapping millions of pages takes its time, and clients may be waiting.
            threading.Thread(target=self._staged.source.close, name="resharder-unmap").start()
            self._staged.prepared = {}
        self._staged, self._past = None, self._staged

    def failed(self, install_id: str, error: str) -> None:
        """An apply that failed is said until one succeeds: what lies in memory may be a mix, unless nothing was begun."""
        staged = self._past if self._past is not None and self._past.install == install_id else None
        self._report(resources_pb2.Worker.FAILED, install=install_id, error=error, staged=staged, holds=self.version == 0)

    # Sleep and wake

    def need_weights(self, what: str) -> None:
        """Raises InstallError while they sleep: on a GPU, to touch them ends the process (vLLM issue 57853)."""
        if WEIGHTS in self.slumber.tags:
            raise InstallError(f"expected the weights to be awake to {what}, they sleep at level {self.slumber.level}")

    def fall_asleep(self, models: Models, level: int) -> None:
        """Before vLLM drops anything: who asks hears that this worker holds nothing."""
        if level != 2 or WEIGHTS in self.slumber.tags:
            return
        self.version, self.fingerprint, self._applied, self.installed = 0, "", "", None
        self.dropped = True
        self._report(resources_pb2.Worker.EMPTY, holds=True)
        self._receiver.close()
        self._kept = sleep_backup.keep(self.host.device, models, self.parts)
        sweep()
        logger.info("kept %d bytes on the host that no version brings back", self._kept.size_bytes)

    def woke(self, tags: list[str] | None) -> None:
        """After vLLM gave memory back."""
        self.slumber.end(tags)
        if WEIGHTS not in self.slumber.tags and self._kept is not None:
            self._kept.put_back()
            self._kept = None

    def booted(self, manifest: Manifest, installed: Installed, stage_seconds: float, timings: Timings | None = None) -> None:
        """Said of the model, and again of its drafter."""
        self.version, self.fingerprint = manifest.number, manifest.fingerprint
        self.learned()
        sweep()
        self.installed = self.installed + installed if self.installed else installed
        staged = _Staged("", seconds=stage_seconds, timings=timings or [])
        self._report(resources_pb2.Worker.BOOTED, version=manifest.number, staged=staged, holds=True)

    def _report(
        self,
        state: int,
        *,
        version: int = 0,
        install: str = "",
        error: str = "",
        staged: _Staged | None = None,
        holds: bool = False,
        altered: resources_pb2.Verification | None = None,
    ) -> None:
        done = self.installed if holds and state != resources_pb2.Worker.FAILED else None
        worker = resources_pb2.Worker(
            rank=self.host.rank,
            state=state,  # type: ignore[arg-type]
            version=version,
            install=install,
            error=error,
            needed_bytes=self.needed_bytes,
            transport=self.stager.transport if self.stager else "",
            stage_seconds=staged.seconds if staged else 0.0,
            apply_seconds=done.seconds if done else 0.0,
            proven_tensors=done.proven if done else 0,
            boxed_bytes=done.boxed_bytes if done else 0,
            process=PROCESS,
            fingerprint=self.fingerprint,
            memory=self._memory.fingerprint if self._memory else "",
            direct=self._memory is not None and not self._loaded,
            joined=staged is not None and staged.direct is not None,
            timings=staged.timings if staged else (),
            altered=altered is not None,
        )
        self.reporter.report(worker, holds=holds, verification=altered)
