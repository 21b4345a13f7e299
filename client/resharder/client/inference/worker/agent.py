"""The agent of one worker: stages, applies and verifies versions, and reports its state to the daemon."""

import logging
import threading
import time
from dataclasses import replace
from typing import Any

from resharder.client.errors import ResharderError
from resharder.client.inference.engine import WEIGHTS, Host, InstallError, SleepState
from resharder.client.inference.settings import PluginSettings
from resharder.client.inference.version_page import page
from resharder.client.inference.worker import install, sleep_backup
from resharder.client.inference.worker.claim import Renewal, claim
from resharder.client.inference.worker.install import Installed
from resharder.client.inference.worker.model_part import ModelParts, Models
from resharder.client.inference.worker.receiver import EarlyVersion, OpenMemory, Receiver, compare_with_store, open_memory
from resharder.client.inference.worker.reporter import PROCESS, Reporter
from resharder.client.inference.worker.routing import Route, first_route
from resharder.client.inference.worker.sleep_backup import SleepBackup
from resharder.client.inference.worker.source import VersionSource
from resharder.client.inference.worker.staging import StagedInstall, Staging
from resharder.client.inference.worker.verify import Verifier
from resharder.client.rpc.channel import Channel
from resharder.client.runtime.driver_lock import DRIVER_LOCK
from resharder.client.runtime.gc_pauses import collect_and_freeze, collect_before_sleep, gc_paused
from resharder.client.runtime.host import host_identity
from resharder.client.runtime.switch_interval import short_switch_interval
from resharder.client.tracing import Timings, timed
from resharder.client.versions.manifest import Digests, VersionManifest, get_manifest
from resharder.converters.failpoints import failpoint
from resharder.v1 import resources_pb2

logger = logging.getLogger("resharder.inference.worker")
_MEET_SECONDS = 2.0  # between two questions for a link to ranks on other hosts
_RPC_PATIENCE = 5.0  # seconds; the engine waits during an RPC to its workers


class Agent:
    """The state of one worker's models, and the operations on them.

    vLLM's thread calls all public methods. Staging, the comparison with the store, verification and reports
    run on threads of their own.

    Args:
        host: The worker process.
        settings: The plugin's settings.
        channel: Channel to the daemon, by default a new one.
        boot: The version to boot; `None` if the server boots on vLLM's own weights.
        renewal: The renewal of the server's claim.
    """

    def __init__(
        self,
        host: Host,
        settings: PluginSettings,
        channel: Channel | None = None,
        boot: VersionManifest | None = None,
        renewal: Renewal | None = None,
    ) -> None:
        self.host, self.settings = host, settings
        self.channel = channel or Channel(settings.endpoint)
        self.reporter = Reporter(self.channel, settings, lambda request: self.verifier.request(request))
        self.parts = ModelParts(host)
        self.boot = boot
        """The version that the model booted, which its drafter boots too."""
        self._renewal = renewal  # its helper process ends with this object
        self._version = 0
        page().write(host.rank, 0)
        self.fingerprint = ""
        """Fingerprint of the installed version."""
        self.installed: Installed | None = None
        """Result of the last install."""
        self.sleep_state = SleepState()
        self.dropped = False
        """Whether a sleep dropped the weights and no version was installed since."""
        self._sleep_backup: SleepBackup | None = None
        self._receiver = Receiver(self.channel, settings.server, host.rank, PROCESS, host.device)
        self._memory: OpenMemory | None = None  # the memory that ranks may write to
        self._routes: list[Route | None] = []  # the routes from which `_memory` was computed
        self._meeting: threading.Thread | None = None  # tries links to ranks on other hosts
        self._applied = ""  # id of the installed version's install
        self.staging = Staging(
            host, self.channel, settings, self.parts, self._receiver, lambda: bool(self._version and not self.sleep_state.tags)
        )
        self.verifier = Verifier(
            self.parts.by_name,
            host.device,
            host.rank,
            lambda: self.version,
            self._unverifiable,
            self._altered,
            self.reporter.verified,
        )

    def _unverifiable(self) -> str:
        """Return why memory cannot be verified now; empty if it can."""
        if WEIGHTS in self.sleep_state.tags:
            return f"not verifiable while asleep (level {self.sleep_state.level})"
        if self.dropped:
            return "a sleep dropped the weights, and no version has been installed since"
        return "" if self.version else "the worker has no version"

    def _altered(self, found: resources_pb2.Verification) -> None:
        """Report a difference as a failed install, until an install succeeds.

        `_applied` does not change, so a repeated order for the same install is not executed again.
        """
        names = ", ".join(found.different) + (", …" if found.different_tensors > len(found.different) else "")
        error = (
            f"{found.different_tensors} tensors in memory differ from version {found.version}, "
            f"something other than Resharder changed them: {names}"
        )
        logger.error("%s", error)
        install_id, self.version, self.fingerprint = self._applied, 0, ""
        self._report(resources_pb2.Worker.FAILED, install=install_id, error=error, installed=True, altered=found)

    @property
    def version(self) -> int:
        """The version that the model and its drafter have, complete and verified; 0 for none."""
        return self._version

    @version.setter
    def version(self, version: int) -> None:
        """Set the version, and record it on the server's page."""
        self._version = version
        page().write(self.host.rank, version)

    # Called through collective_rpc

    def describe(self) -> dict[str, Any]:
        """Return the worker's state, and begin to report it to the daemon."""
        if not self.reporter.started:
            self._report(resources_pb2.Worker.EMPTY, installed=True)
        with self.staging.lock:
            current = self.staging.current
            staged = current.install if current is not None and current.source is not None else ""
        return {
            "version": self.version,
            "staged": staged,
            "transport": self.staging.transport,
            "recorded": bool(self.parts.needed_bytes),
            "power": int(self.sleep_state.power),
            "asleep": sorted(self.sleep_state.tags),
            "dropped": self.dropped,
            "needed_bytes": self.parts.needed_bytes,
            "boxed_bytes": self.installed.boxed_bytes if self.installed else 0,
            "kept_bytes": self.installed.kept_bytes if self.installed else 0,
            "proven": self.installed.verified if self.installed else 0,
            "apply_seconds": self.installed.seconds if self.installed else 0.0,
            "loaded": sorted(self.parts.loaded),
            "impure": {
                name: why for part in self.parts.by_name.values() if part.recording for name, why in part.recording.impure.items()
            },
        }

    def stage(self, models: Models, install_id: str, version: str, fallback: str = "") -> dict[str, Any]:
        """Start to stage an install on a thread.

        A model without a recording is recorded before this returns, while the engine waits for the RPC.

        Args:
            models: The worker's models.
            install_id: Id of the install.
            version: Full name of the version.
            fallback: Full name of the READY version to fall back on, if `version` is not READY.

        A failure is reported to the daemon, at once or from the thread.

        Raises:
            InstallError: The worker cannot install versions.
            ResharderError: The daemon is away.
        """
        failpoint("worker.stage.begin")
        staged = self.staging.begin(install_id, version, fallback)
        if staged is None:
            return {}
        try:
            manifest = self._prepare_staging(models, fallback or version)
        except Exception as error:
            self._stage_failed(staged, error)
            raise
        threading.Thread(target=self._stage, args=(models, staged, manifest), name="resharder-stage", daemon=True).start()
        return {}

    def _prepare_staging(self, models: Models, version: str) -> VersionManifest | None:
        if problem := self.host.refusal():
            raise InstallError(problem)
        if self.staging.sources is None:
            self.staging.connect(claim(self.channel, self.settings, boot=False, patience=_RPC_PATIENCE).store)

        def get() -> VersionManifest:
            self.require_weights("record the model's loader")
            return get_manifest(self.channel, version)

        manifest = self.parts.record_running(models, get)
        self.update_open_memory()
        return manifest

    def unstage(self, install_id: str) -> dict[str, Any]:
        """Drop the install if it is staged or being staged."""
        with self.staging.lock:
            if self.staging.current is not None and self.staging.current.install == install_id:
                self.staging.drop()
                self.reporter.report_installed()
        return {}

    def _stage(self, models: Models, staged: StagedInstall, manifest: VersionManifest | None) -> None:
        started = time.perf_counter()
        try:
            # A version ahead of READY is awaited; what it leaves is collected when it is compared with the store.
            collects = gc_paused(collect=not staged.fallback)
            with timed(staged.timings, "stage"), collects, short_switch_interval():
                source = self.staging.stage(models, staged, self._memory, manifest)
        except Exception as error:
            self._stage_failed(staged, error)
            return
        failpoint("worker.stage.staged")
        staged.seconds = time.perf_counter() - started
        with self.staging.lock:
            if self.staging.current is not staged:  # replaced or dropped in the meantime
                source.close()
                return
            staged.source = source
            number = staged.early.number if staged.early else source.manifest.number
            self._report(resources_pb2.Worker.STAGED, install=staged.install, version=number, staged=staged)

    def _stage_failed(self, staged: StagedInstall, error: Exception) -> None:
        with self.staging.lock:
            if self.staging.current is staged:
                self.staging.current = None
        text = f"{type(error).__name__}: {error}"
        self._report(resources_pb2.Worker.FAILED, install=staged.install, error=text, staged=staged)

    def apply(self, models: Models, install_id: str) -> dict[str, Any]:
        """Install a staged version and verify it. The engine must be paused.

        Raises:
            InstallError: The install is not staged, or a digest differs.
        """
        if self._applied == install_id:
            return {"version": self.version}
        self.require_weights(f"apply install {install_id}")
        with self.staging.lock:
            staged = self.staging.current
        if staged is None or staged.install != install_id or staged.source is None:
            raise InstallError(f"install {install_id} is not staged in this worker")
        with self.verifier.exclusive():
            return self._apply(models, staged, staged.source)

    def _apply(self, models: Models, staged: StagedInstall, source: VersionSource) -> dict[str, Any]:
        failpoint("worker.apply.begin")
        install_id = staged.install
        self.version, self.fingerprint, self._applied = 0, "", ""
        manifest, early = source.manifest, staged.early
        number, fingerprint = (early.number, early.fingerprint) if early else (manifest.number, manifest.fingerprint)
        try:
            with timed(staged.timings, "apply"), DRIVER_LOCK.priority():  # an earlier version's pages may still be unregistered
                self._install(models, staged, source)
        except BaseException:
            self.staging.finish(staged)
            raise
        self.staging.finish(staged, keep=self._memory is not None and not self.parts.loaded)
        self.version, self.fingerprint, self._applied = number, fingerprint, install_id
        self.dropped = False
        self._report(resources_pb2.Worker.APPLIED, install=install_id, version=self.version, staged=staged, installed=True)
        if staged.early is not None:
            args = (staged.early, self._receiver.compared, install_id)
            threading.Thread(target=self._compare, args=args, name="resharder-compare", daemon=True).start()
        return {"version": self.version}

    def _compare(self, early: EarlyVersion, digests: Digests, install_id: str) -> None:
        """Compare an early version with the store's, once it is READY, from 0.25 s after its install on."""
        time.sleep(0.25)  # most pauses have ended by then; a collection, which stops all threads, would prolong them
        with short_switch_interval(), gc_paused():
            stored = self.staging.prepare_fallback
            found = compare_with_store(self.channel, early, digests, stored, lambda: self._applied == install_id)
        if found is None:
            return
        manifest, difference = found
        if difference:
            logger.error("%s was served ahead of READY and differs from the store's version: %s", early.version, difference)
        with self.staging.lock:
            if self._applied != install_id or not self.version:
                return
            if difference:
                self.version = 0
            else:
                self.fingerprint = manifest.fingerprint
        self.reporter.correct(install_id, self.fingerprint, difference)

    def _install(self, models: Models, staged: StagedInstall, source: VersionSource) -> None:
        began, done, arrived = time.perf_counter(), Installed(0, 0, 0.0), False
        if staged.direct is not None and staged.direct is self._memory:
            arrived = self._receiver.receive(staged.direct, models, staged.install, staged.timings)
        if not arrived and staged.early is not None:
            raise InstallError(f"the direct transfer failed, and {staged.early.version} was not READY: {self._receiver.problem}")
        if not arrived and not source.whole:
            raise InstallError(f"the direct transfer failed, and this worker has not staged its boxes: {self._receiver.problem}")
        for name, model in models.items():
            part = self.parts.part(name)
            route = part.route or first_route(part.known, model, part.shared)
            prepared = staged.prepared.get(name)
            before, part.digests = part.digests, None
            given = part.config, part.known, route, source, arrived, prepared, staged.timings, before
            done += install.install(self.host, model, *given)
            part.digests = None if staged.early is not None else source.expected
            part.decide_route(model, source)
            failpoint("worker.apply.written")
            self.verifier.expect(part, None if staged.early is not None else source.expected)
        failpoint("worker.apply.verified")
        self.verifier.installed(models)
        if arrived:
            done = replace(done, path=self._receiver.path, kept_bytes=self._receiver.kept_bytes)
        self.installed = replace(done, seconds=time.perf_counter() - began)  # includes the direct transfer
        self.update_open_memory()

    def update_open_memory(self) -> None:
        """Update the memory that ranks may write to, if routes have changed."""
        parts = list(self.parts.by_name.values())
        if self.settings.direct and self._routes != (routes := [part.route for part in parts]):
            self._memory, self._routes = open_memory(parts, self.host.rank), routes
        if self._memory is not None and self._meeting is None:
            self._meeting = threading.Thread(target=self._meet, name="resharder-meet", daemon=True)
            self._meeting.start()

    def _meet(self) -> None:
        """Try links to ranks on other hosts while the server is awake. Waits for ranks are the daemon's."""
        while True:
            memory, tried = self._memory, False
            if memory is not None and self.version and not self.sleep_state.tags:
                try:
                    tried = self._receiver.meet(memory)
                except ResharderError:
                    pass  # asked again
                except Exception:
                    logger.exception("cannot try a link to ranks on other hosts, trying again")
            if not tried:
                time.sleep(_MEET_SECONDS)

    def failed(self, install_id: str, error: str) -> None:
        """Report a failed apply.

        If it began to write, memory may contain a mix of versions, and the report is repeated until an
        install succeeds.

        Args:
            install_id: Id of the install.
            error: The error's message.
        """
        staged = self.staging.dropped(install_id)
        self._report(resources_pb2.Worker.FAILED, install=install_id, error=error, staged=staged, installed=self.version == 0)

    # Sleep and wake

    def require_weights(self, action: str) -> None:
        """Raise `InstallError` while the weights sleep: on a GPU, access to them ends the process (vLLM issue 57853)."""
        if WEIGHTS in self.sleep_state.tags:
            raise InstallError(f"cannot {action}: the weights sleep at level {self.sleep_state.level}")

    def fall_asleep(self, models: Models, level: int) -> None:
        """Prepare for a sleep, before vLLM drops any memory.

        For level 2, report that the worker has no version, and back up the memory that no install restores.
        """
        if WEIGHTS in self.sleep_state.tags:
            return
        if level != 2:
            self._receiver.let_go()
            return
        self.version, self.fingerprint, self._applied, self.installed = 0, "", "", None
        self.dropped = True
        failpoint("worker.sleep")
        self._report(resources_pb2.Worker.EMPTY, installed=True)
        self._receiver.close()
        self._sleep_backup = sleep_backup.back_up(self.host.device, models, self.parts.by_name)
        collect_before_sleep()
        logger.info("backed up %d bytes on the host that no install restores", self._sleep_backup.size_bytes)

    def woke(self, tags: list[str] | None) -> None:
        """Update the sleep state after vLLM restored the memory of `tags` (all for `None`), and restore the backup."""
        failpoint("worker.wake")
        self.sleep_state.end(tags)
        self.reporter.slept(None)
        if WEIGHTS not in self.sleep_state.tags and self._sleep_backup is not None:
            self._sleep_backup.restore()
            self._sleep_backup = None

    def booted(
        self, manifest: VersionManifest, installed: Installed, stage_seconds: float, timings: Timings | None = None
    ) -> None:
        """Record and report a boot from the daemon. Called for the model, and again for its drafter.

        Args:
            manifest: The version.
            installed: The result for this model.
            stage_seconds: Duration of the staging.
            timings: Phases of the boot.
        """
        self.version, self.fingerprint = manifest.number, manifest.fingerprint
        self.update_open_memory()
        collect_and_freeze()
        self.installed = self.installed + installed if self.installed else installed
        staged = StagedInstall("", seconds=stage_seconds, timings=timings or [])
        self._report(resources_pb2.Worker.BOOTED, version=manifest.number, staged=staged, installed=True)

    def _report(
        self,
        state: int,
        *,
        version: int = 0,
        install: str = "",
        error: str = "",
        staged: StagedInstall | None = None,
        installed: bool = False,
        altered: resources_pb2.Verification | None = None,
    ) -> None:
        done = self.installed if installed and state != resources_pb2.Worker.FAILED else None
        worker = resources_pb2.Worker(
            rank=self.host.rank,
            state=state,  # type: ignore[arg-type]
            version=version,
            install=install,
            error=error,
            needed_bytes=self.parts.needed_bytes,
            transport=self.staging.transport,
            transport_reason=self.staging.transport_reason,
            path=done.path if done else "",
            stage_seconds=staged.seconds if staged else 0.0,
            apply_seconds=done.seconds if done else 0.0,
            verified_tensors=done.verified if done else 0,
            boxed_bytes=done.boxed_bytes if done else 0,
            process=PROCESS,
            fingerprint=self.fingerprint,
            memory=self._memory.fingerprint if self._memory else "",
            direct=self._memory is not None and not self.parts.loaded,
            joined=staged is not None and staged.direct is not None,
            timings=staged.timings if staged else (),
            warnings=self.parts.warnings,
            host=host_identity(),
            altered=altered is not None,
        )
        self.reporter.report(worker, installed=installed, verification=altered)
