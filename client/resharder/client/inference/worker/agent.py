"""What one of vLLM's workers knows of its model and its drafter, and how versions get into them."""

import logging
import threading
import time
from dataclasses import replace
from typing import Any

from resharder.client.errors import ResharderError
from resharder.client.inference.engine import Host
from resharder.client.inference.power import WEIGHTS, SleepState
from resharder.client.inference.settings import PluginSettings
from resharder.client.inference.version_page import page
from resharder.client.inference.worker import install, sleep_backup
from resharder.client.inference.worker.boot_lease import Renewal
from resharder.client.inference.worker.direct_receiver import EarlyVersion, Open, Receiver, compare_with_store, open_memory
from resharder.client.inference.worker.errors import InstallError
from resharder.client.inference.worker.install import Installed
from resharder.client.inference.worker.model_part import ModelParts, Models
from resharder.client.inference.worker.reporter import PROCESS, Reporter, claim
from resharder.client.inference.worker.routing import Route, first_route
from resharder.client.inference.worker.sleep_backup import SleepBackup
from resharder.client.inference.worker.source import VersionManifest, VersionSource, get_manifest
from resharder.client.inference.worker.staging import StagedInstall, Staging
from resharder.client.inference.worker.verify import Verifier
from resharder.client.rpc.channel import Channel
from resharder.client.runtime.driver_lock import DRIVER_LOCK
from resharder.client.runtime.gc_pauses import collect_and_freeze, gc_paused
from resharder.client.runtime.switch_interval import short_switch_interval
from resharder.client.tracing import Timings, timed
from resharder.converters.errors import ConversionError
from resharder.v1 import resources_pb2

logger = logging.getLogger("vllm.resharder.worker")
_RPC_PATIENCE = 5.0  # inside an RPC the engine waits


class Agent:
    """One worker's model and its drafter, what is known of them, and what is staged for them. Called from vLLM's thread, but for
    `_stage`."""

    def __init__(self, host: Host, settings: PluginSettings) -> None:
        self.host, self.settings = host, settings
        self.channel = Channel(settings.endpoint)
        self.reporter = Reporter(self.channel, settings)
        self.parts = ModelParts(host)
        self.renewal: Renewal | None = None  # of the server's claim, while it boots
        self.boot: VersionManifest | None = None  # what the model was booted from, for its drafter
        self._version = 0
        page().write(host.rank, 0)
        self.fingerprint = ""  # of that version
        self.installed: Installed | None = None
        self.slumber = SleepState()
        self.dropped = False  # a sleep took the weights, and no version came since
        self._sleep_backup: SleepBackup | None = None
        self._receiver = Receiver(self.channel, settings.server, host.rank, PROCESS, host.device)
        self._memory: Open | None = None  # what ranks may write to
        self._routes: list[Route | None] = []  # that it was made of
        self._applied = ""
        self.staging = Staging(host, self.channel, settings, self.parts, self._receiver)
        self.verifier = Verifier(
            self.parts.by_name,
            host.device,
            host.rank,
            lambda: self.version,
            self._unverifiable,
            self._altered,
            self.reporter.verified,
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

    # What collective_rpc reaches

    def describe(self) -> dict[str, Any]:
        if not self.reporter.started:
            self._report(resources_pb2.Worker.EMPTY, holds=True)
        with self.staging.lock:
            current = self.staging.current
            staged = current.install if current is not None and current.source is not None else ""
        return {
            "version": self.version,
            "staged": staged,
            "transport": self.staging.transport,
            "recorded": bool(self.parts.needed_bytes),
            "power": int(self.slumber.power),
            "asleep": sorted(self.slumber.tags),
            "dropped": self.dropped,
            "needed_bytes": self.parts.needed_bytes,
            "boxed_bytes": self.installed.boxed_bytes if self.installed else 0,
            "proven": self.installed.proven if self.installed else 0,
            "apply_seconds": self.installed.seconds if self.installed else 0.0,
            "loaded": sorted(self.parts.loaded),
            "impure": {
                name: why for part in self.parts.by_name.values() if part.recording for name, why in part.recording.impure.items()
            },
        }

    def stage(self, models: Models, install_id: str, version: str, fallback: str = "") -> dict[str, Any]:
        """Returns when the work has begun; what was not recorded yet is recorded first, which needs it to stand still."""
        staged = self.staging.begin(install_id, version, fallback)
        if staged is None:
            return {}
        if problem := self.host.refusal():
            raise InstallError(problem)
        if self.staging.stager is None:
            self.staging.open(claim(self.channel, self.settings, boot=False, patience=_RPC_PATIENCE).store)

        def get() -> VersionManifest:
            self.need_weights("record how versions get into them")
            return get_manifest(self.channel, fallback or version)

        manifest = self.parts.record_running(models, get)
        self.learned()
        threading.Thread(target=self._stage, args=(models, staged, manifest), name="resharder-stage", daemon=True).start()
        return {}

    def unstage(self, install_id: str) -> dict[str, Any]:
        with self.staging.lock:
            if self.staging.current is not None and self.staging.current.install == install_id:
                self.staging.drop()
                self.reporter.report_installed()
        return {}

    def _stage(self, models: Models, staged: StagedInstall, manifest: VersionManifest | None) -> None:
        started = time.perf_counter()
        try:
            with timed(staged.timings, "stage"), gc_paused(), short_switch_interval():
                source = self.staging.bring(models, staged, self._memory, manifest)
        except (ResharderError, ConversionError, InstallError, OSError, ValueError) as error:
            with self.staging.lock:
                if self.staging.current is staged:
                    self.staging.current = None
            error_text = f"{type(error).__name__}: {error}"
            self._report(resources_pb2.Worker.FAILED, install=staged.install, error=error_text, staged=staged)
            return
        staged.seconds = time.perf_counter() - started
        with self.staging.lock:
            if self.staging.current is not staged:  # another install came meanwhile
                source.close()
                return
            staged.source = source
            number = staged.early.number if staged.early else source.manifest.number
            self._report(resources_pb2.Worker.STAGED, install=staged.install, version=number, staged=staged)

    def apply(self, models: Models, install_id: str) -> dict[str, Any]:
        if self._applied == install_id:
            return {"version": self.version}
        self.need_weights(f"apply install {install_id}")
        with self.staging.lock:
            staged = self.staging.current
        if staged is None or staged.install != install_id or staged.source is None:
            raise InstallError(f"install {install_id} is not staged here")
        with self.verifier.undisturbed():
            return self._apply(models, staged, staged.source)

    def _apply(self, models: Models, staged: StagedInstall, source: VersionSource) -> dict[str, Any]:
        install_id = staged.install
        self.version, self.fingerprint, self._applied = 0, "", ""
        manifest, early = source.manifest, staged.early
        number, fingerprint = (early.number, early.fingerprint) if early else (manifest.number, manifest.fingerprint)
        try:
            with timed(staged.timings, "apply"), DRIVER_LOCK.priority():  # pages of an earlier version may still be let go
                self._install(models, staged, source)
        finally:
            self.staging.finish(staged)
        self.version, self.fingerprint, self._applied = number, fingerprint, install_id
        self.dropped = False
        self._report(resources_pb2.Worker.APPLIED, install=install_id, version=self.version, staged=staged, holds=True)
        if staged.early is not None:
            args = (staged.early, install_id)
            threading.Thread(target=self._compare, args=args, name="resharder-compare", daemon=True).start()
        return {"version": self.version}

    def _compare(self, early: EarlyVersion, install_id: str) -> None:
        """Once the version is READY, with the store's copy."""
        with short_switch_interval():
            found = compare_with_store(self.channel, early, lambda: self._applied == install_id)
        if found is None:
            return
        manifest, difference = found
        if difference:
            logger.error("%s was served ahead of READY with other weights than the store's: %s", early.version, difference)
        with self.staging.lock:
            if self._applied != install_id or not self.version:
                return
            if difference:
                self.version = 0
            else:
                self.fingerprint = manifest.fingerprint
            at_hand = self.staging.take_fallback()
        if at_hand is not None:
            at_hand.close()
        self.reporter.correct(install_id, self.fingerprint, difference)

    def _install(self, models: Models, staged: StagedInstall, source: VersionSource) -> None:
        began, done, arrived = time.perf_counter(), Installed(0, 0, 0.0), False
        if staged.direct is not None and staged.direct is self._memory:
            arrived = self._receiver.receive(staged.direct, models, staged.install, staged.timings)
        if not arrived and staged.early is not None:
            raise InstallError(f"the direct transfer failed, and {staged.early.version} is not READY")
        if not arrived and not source.whole:
            raise InstallError("the direct transfer failed, and what it was to bring is not staged here")
        for name, model in models.items():
            part = self.parts.part(name)
            route = part.route or first_route(part.known, model, part.shared)
            prepared = staged.prepared.get(name)
            done += install.install(self.host, model, part.config, part.known, route, source, arrived, prepared, staged.timings)
            if part.route is None:
                part.learn(model, source)
            self.verifier.expect(part, None if staged.early is not None else source.expected)
        self.verifier.installed(models)
        self.installed = replace(done, seconds=time.perf_counter() - began)  # what came directly has taken its time too
        self.learned()

    def learned(self) -> None:
        """Looks anew which memory ranks may write to, where routes have changed."""
        parts = list(self.parts.by_name.values())
        if self.settings.direct and self._routes != (routes := [part.route for part in parts]):
            self._memory, self._routes = open_memory(parts, self.host.rank), routes

    def failed(self, install_id: str, error: str) -> None:
        """An apply that failed is said until one succeeds: what lies in memory may be a mix, unless nothing was begun."""
        staged = self.staging.dropped(install_id)
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
        self._sleep_backup = sleep_backup.back_up(self.host.device, models, self.parts.by_name)
        collect_and_freeze()
        logger.info("kept %d bytes on the host that no version brings back", self._sleep_backup.size_bytes)

    def woke(self, tags: list[str] | None) -> None:
        """After vLLM gave memory back."""
        self.slumber.end(tags)
        if WEIGHTS not in self.slumber.tags and self._sleep_backup is not None:
            self._sleep_backup.restore()
            self._sleep_backup = None

    def booted(
        self, manifest: VersionManifest, installed: Installed, stage_seconds: float, timings: Timings | None = None
    ) -> None:
        """Said of the model, and again of its drafter."""
        self.version, self.fingerprint = manifest.number, manifest.fingerprint
        self.learned()
        collect_and_freeze()
        self.installed = self.installed + installed if self.installed else installed
        staged = StagedInstall("", seconds=stage_seconds, timings=timings or [])
        self._report(resources_pb2.Worker.BOOTED, version=manifest.number, staged=staged, holds=True)

    def _report(
        self,
        state: int,
        *,
        version: int = 0,
        install: str = "",
        error: str = "",
        staged: StagedInstall | None = None,
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
            needed_bytes=self.parts.needed_bytes,
            transport=self.staging.transport,
            stage_seconds=staged.seconds if staged else 0.0,
            apply_seconds=done.seconds if done else 0.0,
            verified_tensors=done.proven if done else 0,
            boxed_bytes=done.boxed_bytes if done else 0,
            process=PROCESS,
            fingerprint=self.fingerprint,
            memory=self._memory.fingerprint if self._memory else "",
            direct=self._memory is not None and not self.parts.loaded,
            joined=staged is not None and staged.direct is not None,
            timings=staged.timings if staged else (),
            altered=altered is not None,
        )
        self.reporter.report(worker, holds=holds, verification=altered)
