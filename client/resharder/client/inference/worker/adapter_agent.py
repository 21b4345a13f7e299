"""The agent of one adapter in one worker: stages, proves, enters and releases versions of it while the engine computes.

An adapter is a model of the daemon with a base, and its agent reports to the daemon as the worker of a server of its own, which
names the server of its base. So its versions move by the same orders as a model's: STAGE loads a version into a slot that no
request names and reads the slot back; APPLY makes the slot known to the engine, which takes microseconds; the page of the adapter
then has the new version, and all API servers of the server name it in new requests.
"""

import logging
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from resharder.client.errors import ResharderError
from resharder.client.inference.engine import WEIGHTS, AdapterSlots, InstallError, SleepState
from resharder.client.inference.settings import PluginSettings
from resharder.client.inference.version_page import OWN, Page
from resharder.client.inference.worker.adapter_writer import AdapterWriter
from resharder.client.inference.worker.claim import claim
from resharder.client.inference.worker.reporter import PROCESS, Reporter
from resharder.client.inference.worker.source import Sources, VersionSource
from resharder.client.rpc.channel import Channel
from resharder.client.runtime.gc_pauses import gc_paused
from resharder.client.runtime.switch_interval import short_switch_interval
from resharder.client.tracing import Timings, timed
from resharder.client.versions.manifest import VersionManifest, get_manifest
from resharder.converters.errors import ConversionError
from resharder.converters.failpoints import failpoint
from resharder.converters.geometry.layout import full_box
from resharder.v1 import resources_pb2
from resharder.v1.resources_pb2 import Power

logger = logging.getLogger("resharder.inference.adapter")

IDS = 1_000_000
"""Number of ids for the versions of one adapter."""
_RPC_PATIENCE = 5.0  # seconds; the engine waits during an RPC to its workers
_MAX_NAMES = 8  # of different tensors in a report
_KNOWN = 256  # numbers of versions whose fingerprints are remembered
GRACE_SECONDS = 0.25
"""Time for which a superseded version stays, for requests that are on their way from an API server to the engine."""


@dataclass
class Loaded:
    """A version of the adapter in a slot."""

    number: int
    fingerprint: str
    slot: int
    adapter: Any = None
    """The engine's own form of it, once it is written and proven."""
    entered: bool = False
    proven: int = 0
    """Number of its tensors."""
    loading: bool = False
    """Whether a thread writes the slot."""
    altered: bool = False
    """Whether a verification has found other elements in the slot."""
    superseded: float = float("-inf")
    """Monotonic time since which new requests get another version."""


@dataclass
class _Staged:
    install: str
    version: str
    loaded: Loaded | None = None
    seconds: float = 0.0
    timings: Timings = field(default_factory=list)


class AdapterAgent:
    """The state of one adapter in one worker, and the operations on it.

    vLLM's thread calls all public methods. Staging and reports run on threads of their own.

    Args:
        index: Position of the adapter among those of the server: its versions get ids of their own.
        rank: The worker's rank over the server.
        slots: The worker's slots.
        settings: The plugin's settings for the adapter's own server.
        page: The page of the adapter.
        cuts: The page of the versions to which requests in progress are cut over.
        sleep: Whether the weights, and with them the slots, sleep.
        writer: Writes versions into the slots.
    """

    def __init__(
        self,
        index: int,
        rank: int,
        slots: AdapterSlots,
        settings: PluginSettings,
        page: Page,
        cuts: Page,
        sleep: SleepState,
        writer: AdapterWriter,
    ) -> None:
        self.rank, self._index = rank, index
        self._slots, self._settings, self._page, self._sleep, self._writer = slots, settings, page, sleep, writer
        self._cuts = cuts
        self._channel = Channel(settings.endpoint)
        self._reporter = Reporter(self._channel, settings, self._verify)
        self._verified, self._verified_at = "", time.monotonic()  # the daemon's last request, and the last verification
        self._sources: Sources | None = None
        self._lock = threading.Lock()
        self._reading = threading.Lock()  # a version's files are open, of which a worker has one set at a time
        self._staged: _Staged | None = None
        self._loaded: dict[int, Loaded] = {}  # by id
        self._known: dict[int, str] = {}  # fingerprints of the numbers that were entered last, in this order
        self._highest = 0  # number that was ever entered
        self._current: Loaded | None = None
        self._applied, self._problem = "", ""  # the problem: of the last version that could not be staged
        page.write(rank, 0)
        cuts.write(rank, OWN)

    @property
    def version(self) -> int:
        """The version that new requests get, as far as this worker is concerned; 0 for none."""
        return self._current.number if self._current is not None else 0

    @property
    def loaded(self) -> list[int]:
        """Ids of the versions that requests may name."""
        return sorted(id for id, loaded in self._loaded.items() if loaded.entered)

    def id_of(self, number: int) -> int:
        """Return the id of a version in the engine: the same in all workers and API servers, and another for each version."""
        return adapter_id(self._index, number)

    def describe(self) -> dict[str, Any]:
        """Return the state of the adapter, and begin to report it to the daemon."""
        if not self._reporter.started:
            self._report(resources_pb2.Worker.EMPTY, installed=True)
        staged = self._staged
        return {
            "version": self.version,
            "staged": staged.install if staged and staged.loaded and staged.loaded.adapter and not staged.loaded.loading else "",
            "problem": self._problem,
            "power": int(Power.AWAKE),
            "asleep": [],
            "dropped": False,
        }

    def stage(self, install: str, version: str, waits: bool = False) -> dict[str, Any]:
        """Start to stage a version on a thread, in a slot that is reserved before this returns.

        Args:
            install: Id of the install.
            version: Full name of the version.
            waits: Whether the caller tries again if no slot is free.

        A failure is reported to the daemon, at once or from the thread.

        Returns:
            Whether no slot is free, so that the caller has to try again.

        Raises:
            InstallError: No slot is free, and the caller does not wait.
            ResharderError: The daemon is away.
        """
        with self._lock:
            if self._staged is not None and self._staged.install == install:
                return {"full": False}
            self._staged = staged = _Staged(install, version)
        try:
            if self._sources is None:
                store = claim(self._channel, self._settings, boot=False, patience=_RPC_PATIENCE).store
                self._sources = Sources(self._channel, store, self._settings)
            with self._lock:
                failpoint("worker.adapter.reserve")
                number = int(version.rpartition("/")[2])
                if (loaded := self._reserved(number)) is None:
                    if waits:
                        self._staged = None
                        return {"full": True}
                    raise InstallError(self._slots.full())
                staged.loaded = loaded
                begins, loaded.loading = not loaded.loading, True
        except Exception as error:
            self._stage_failed(staged, error)
            raise
        if begins:  # else the thread of an earlier order for this version goes on for this one
            threading.Thread(target=self._stage, args=(version, loaded), name="resharder-adapter", daemon=True).start()
        return {"full": False}

    def _reserved(self, number: int) -> Loaded | None:
        """Return the slot of a version, a new one if it has none; None if none is free. Callers hold the lock."""
        id = self.id_of(number)
        if id not in self._loaded:
            slot = self._slots.reserve(id)
            if slot is None:
                return None
            self._loaded[id] = Loaded(number, "", slot)
        return self._loaded[id]

    def unstage(self, install: str) -> dict[str, Any]:
        """Drop the install if it is staged or being staged."""
        with self._lock:
            if self._staged is not None and self._staged.install == install:
                self._staged = None
                self._reporter.report_installed()
            return {}

    def apply(self, install: str, cut_over: bool = False) -> dict[str, Any]:
        """Make a staged version the one of new requests.

        Args:
            install: Id of the install.
            cut_over: Whether requests in progress do not go on with the versions that they name. No step is in progress then.

        Returns:
            The version, and whether the engine's caches may have entries of another version of its number.

        Raises:
            InstallError: The install is not staged.
        """
        if self._applied == install and self._current is not None:
            return {"version": self.version, "renumbered": False}
        with self._lock:
            staged = self._staged
            loaded = staged.loaded if staged is not None else None
            if staged is None or staged.install != install or loaded is None or loaded.adapter is None or loaded.loading:
                raise InstallError(f"install {install} is not staged in this worker")
            failpoint("worker.adapter.enter")
            self._slots.enter(self.id_of(loaded.number), loaded.adapter)
            loaded.entered = True
            failpoint("worker.adapter.entered")
            renumbered = self._renumbered(loaded)
            if self._current is not None and self._current is not loaded:
                self._current.superseded = float("-inf") if cut_over else time.monotonic()
            self._current, self._applied, self._staged = loaded, install, None
            self._page.write(self.rank, loaded.number)
            self._cuts.write(self.rank, loaded.number if cut_over else OWN)
            self._report(resources_pb2.Worker.APPLIED, install=install, staged=staged, installed=True)
        return {"version": loaded.number, "renumbered": renumbered}

    def renew(self) -> dict[str, Any]:
        """Have preempted requests go on with the version of new ones."""
        self._slots.renew(self._settings.model, self.version)
        return {}

    def _renumbered(self, loaded: Loaded) -> bool:
        """Note a version, and return whether another one of its number, of another store, may have been entered before."""
        before = self._known.pop(loaded.number, "" if loaded.number <= self._highest else loaded.fingerprint)
        self._known[loaded.number], self._highest = loaded.fingerprint, max(loaded.number, self._highest)
        if len(self._known) > _KNOWN:
            del self._known[next(iter(self._known))]
        return before != loaded.fingerprint

    def failed(self, install: str, error: str) -> None:
        """Report a failed apply. What requests got before is as it was."""
        self._report(resources_pb2.Worker.FAILED, install=install, error=error)

    def release(self, used: list[int]) -> dict[str, Any]:
        """Free the slots of versions that no request uses, except the current and the staged one, and those superseded just now.

        Args:
            used: Ids of the versions that requests in the engine use.

        Returns:
            The ids of the versions that are left, beside the current and the staged one, and of those that are being loaded.
        """
        with self._lock:
            now = time.monotonic()
            staged = self._staged.loaded if self._staged is not None else None
            for id, loaded in list(self._loaded.items()):
                kept = loaded is self._current or loaded is staged or loaded.loading or id in used
                if not kept and now - loaded.superseded >= GRACE_SECONDS:
                    failpoint("worker.adapter.release")
                    self._slots.release(id)
                    del self._loaded[id]
            left = [
                id
                for id, loaded in self._loaded.items()
                if loaded.loading or (loaded is not self._current and loaded is not staged)
            ]
            return {"left": left}

    # Called on the reporter's thread

    def _verify(self, request: str) -> None:
        """Verify the current version on a thread: at the daemon's request, once, and at the settings' interval."""
        asked, interval = bool(request) and request != self._verified, self._settings.verify_seconds
        if asked or (interval and time.monotonic() - self._verified_at >= interval):
            self._verified, self._verified_at = request, time.monotonic()
            threading.Thread(target=self._compare, args=[request], name="resharder-adapter-verify", daemon=True).start()

    # Called on the thread that verifies

    def _compare(self, request: str) -> None:
        """Compare the slot of the current version with the version again, and report the result."""
        began, loaded = time.monotonic(), self._current
        found = resources_pb2.Verification(rank=self.rank, request=request, version=loaded.number if loaded else 0)
        found.time.GetCurrentTime()
        try:
            if loaded is None:
                raise InstallError("the worker has no version of the adapter")
            if WEIGHTS in self._sleep.tags:
                raise InstallError(f"not verifiable while asleep (level {self._sleep.level})")
            manifest = get_manifest(self._channel, f"models/{self._settings.model}/versions/{loaded.number}")
            if manifest.fingerprint != loaded.fingerprint:
                raise InstallError("the store has another version of this number")
            with self._opened(manifest) as source, self._sleep.awake():
                different = self._writer.differences(loaded.slot, self.id_of(loaded.number), source)
            found.tensors, found.total_bytes = len(manifest.specs), sum(spec.size for spec in manifest.specs.values())
            found.covered_bytes = found.digested_bytes = found.total_bytes
            found.different_tensors = len(different)
            found.different.extend(different[:_MAX_NAMES])
        except (ResharderError, ConversionError, InstallError, OSError, ValueError, RuntimeError) as error:
            found.skipped = str(error)
        except Exception as error:  # the next verification may succeed
            logger.exception("cannot verify the adapter")
            found.skipped = f"{type(error).__name__}: {error}"
        found.seconds = time.monotonic() - began
        with self._lock:
            if found.different_tensors and self._current is loaded and loaded is not None:
                self._altered(loaded, found)
        self._reporter.verified(found)

    def _altered(self, loaded: Loaded, found: resources_pb2.Verification) -> None:
        """Take the current version out of service until the daemon has it installed again. Callers hold the lock."""
        names = ", ".join(found.different) + (", …" if found.different_tensors > len(found.different) else "")
        error = (
            f"{found.different_tensors} tensors in memory differ from version {loaded.number}, "
            f"something other than Resharder changed them: {names}"
        )
        logger.error("%s", error)
        loaded.altered, loaded.superseded, self._current = True, time.monotonic(), None
        self._known[loaded.number] = ""  # prefix caches may have its results
        self._page.write(self.rank, 0)
        self._report(resources_pb2.Worker.FAILED, install=self._applied, error=error, installed=True, altered=True)

    # Called on the thread that stages

    def _stage(self, version: str, loaded: Loaded) -> None:
        started, timings, problem = time.perf_counter(), Timings(), None
        try:
            with timed(timings, "stage"), gc_paused(), short_switch_interval():
                manifest = get_manifest(self._channel, version)
                if loaded.adapter is None or loaded.altered or loaded.fingerprint != manifest.fingerprint:
                    self._load(manifest, loaded)
        except Exception as error:
            problem = error
        with self._lock:
            loaded.loading = False
            staged = self._staged
            if staged is None or staged.loaded is not loaded:  # replaced or dropped in the meantime
                return
            staged.seconds, staged.timings = time.perf_counter() - started, timings
            if problem is None:
                self._report(resources_pb2.Worker.STAGED, install=staged.install, staged=staged)
        if problem is not None:
            self._stage_failed(staged, problem)

    def _load(self, manifest: VersionManifest, loaded: Loaded) -> None:
        """Write a version into its slot, and prove the slot.

        Raises:
            InstallError: The engine refuses the adapter, or the slot does not contain it.
        """
        if loaded.entered and not (loaded.altered and loaded.fingerprint == manifest.fingerprint):
            raise InstallError(
                f"the engine still has another version {loaded.number} of this adapter in use, of another store: it is loaded "
                "once the requests of that one have ended"
            )
        loaded.adapter = None
        with self._opened(manifest) as source:
            failpoint("worker.adapter.write")
            with self._sleep.awake():
                loaded.adapter = self._writer.load(loaded.slot, self.id_of(loaded.number), source)
        failpoint("worker.adapter.proven")
        loaded.fingerprint, loaded.proven, loaded.altered = manifest.fingerprint, len(manifest.specs), False

    @contextmanager
    def _opened(self, manifest: VersionManifest) -> Iterator[VersionSource]:
        """Open the files of a version."""
        with self._reading:
            assert self._sources is not None
            needs = {name: (full_box(spec.shape),) for name, spec in manifest.specs.items()}
            source = self._sources.open(manifest, needs)
            try:
                source.populate(needs)
                yield source
            finally:
                source.close()

    def _stage_failed(self, staged: _Staged, error: Exception) -> None:
        text = f"{type(error).__name__}: {error}"
        with self._lock:
            self._problem = text
            if self._staged is staged:
                self._staged = None
        self._report(resources_pb2.Worker.FAILED, install=staged.install, error=text, staged=staged)

    def _report(
        self,
        state: int,
        *,
        install: str = "",
        error: str = "",
        staged: _Staged | None = None,
        installed: bool = False,
        altered: bool = False,
    ) -> None:
        loaded = staged.loaded if staged is not None else self._current
        has_version = state in (resources_pb2.Worker.STAGED, resources_pb2.Worker.APPLIED)
        version = loaded.number if loaded is not None and has_version else 0
        worker = resources_pb2.Worker(
            rank=self.rank,
            state=state,  # type: ignore[arg-type]
            version=version,
            install=install,
            error=error,
            transport=self._sources.transport if self._sources else "",
            transport_reason=self._sources.transport_reason if self._sources else "",
            stage_seconds=staged.seconds if staged else 0.0,
            verified_tensors=loaded.proven if loaded is not None else 0,
            process=PROCESS,
            altered=altered,
            fingerprint=loaded.fingerprint if loaded is not None else "",
            timings=staged.timings if staged else (),
        )
        self._reporter.report(worker, installed=installed)


def adapter_id(index: int, number: int) -> int:
    """Return vLLM's id of a version of the server's adapter at `index`: below 2**31, and above vLLM's own, which are small."""
    return (index + 1) * IDS + number % IDS
