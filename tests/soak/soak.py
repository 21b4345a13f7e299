"""A soak: versions are published and installed at the pace of an RL run while everything is sampled, without faults.

A round publishes one version, on the direct path in even rounds and over the store in odd ones, and waits until the server serves
it. Every few rounds the server sleeps while a version is published, old versions are collected, or the fleet changes whether it
serves ahead of READY. Clients ask the server all the time, and every token is compared; a scraper reads the status page and both
expositions of metrics.
"""

import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path

from resharder.client.operator.answers import Server
from resharder.server.infra.event_log import Events
from resharder.server.state.version import RETIRED, VersionRecord
from resharder.server.store.history import History

from tests.chaos.peace import behind, left
from tests.chaos.run import Run
from tests.chaos.schedule import Setting
from tests.chaos.scraper import PAGES, got
from tests.chaos.system import wait_for
from tests.chaos.violations import Violation
from tests.soak.sampler import sample
from tests.soak.verdict import Sample

LEASE = 30.0
SLEEP, COLLECT, AHEAD = 20, 15, 25
"""Rounds between two sleeps, collections, and changes of serving ahead."""
SERVED = 90.0
"""Seconds in which a published version is served."""
_EVENTS, _HISTORY = 9_500, 2 << 20
"""Lines of events, and bytes of history, at the begin of a run: both files are rotated in its first hundreds of versions."""


@dataclass
class Result:
    """Outcome of a run."""

    samples: list[Sample] = field(default_factory=list)
    violations: list[Violation] = field(default_factory=list)
    versions: int = 0
    seconds: float = 0.0
    compared: int = 0
    tokens: int = 0
    scrapes: int = 0
    installs: dict[str, float] = field(default_factory=dict)


class Soak:
    """One run in a folder of its own.

    Args:
        folder: For the history and logs.
        server: The server that takes part, `left` or `right`.
        every: Seconds from the begin of one round to that of the next, at least.
        period: Seconds between two samples.
    """

    def __init__(self, folder: Path, server: str = "left", every: float = 3.0, period: float = 10.0) -> None:
        self.result, self._server, self._every, self._period = Result(), server, every, period
        self._run = Run(folder, (server,), Setting(("node",) if server == "right" else ()))
        self._run.system.daemon.options["lease_seconds"] = LEASE
        self._ended = threading.Event()
        beside = (("sampler", period, self._sample), ("scraper", 5.0, self._scrape))
        self._threads = [threading.Thread(target=self._repeat, args=one, daemon=True) for one in beside]

    def run(self, seconds: float) -> Result:
        """Run rounds until `seconds` have passed since the server was ready."""
        began = time.monotonic()
        try:
            fill_journals(self._run.system.daemon.store)
            self._run.boot()
            began = time.monotonic()
            for thread in self._threads:
                thread.start()
            while time.monotonic() < began + seconds:
                before = time.monotonic()
                self._round(self.result.versions)
                self._ended.wait(max(0.0, before + self._every - time.monotonic()))
            self._look_back()
        except Exception as error:
            self._trouble("soak", error)
        finally:
            self._ended.set()
            for thread in self._threads:
                if thread.ident is not None:
                    thread.join(60)
            self.result.seconds = time.monotonic() - began
            self._run.close()
        self.result.compared, self.result.tokens = self._run.traffic.compared, self._run.traffic.tokens
        self.result.violations = self._run.violations()
        return self.result

    # Rounds

    def _round(self, number: int) -> None:
        if number % AHEAD == AHEAD - 1:
            self._operate("ahead", on=None if number // AHEAD % 2 else False)
        if number % COLLECT == COLLECT - 1:
            self._operate("gc", keep=2, pick=None)
        sleeps = number % SLEEP == SLEEP - 1
        if sleeps:
            self._operate("sleep", server="", level=1 + number // SLEEP % 2)
            self._wait("sleep", lambda servers: [server.power.value for server in servers if server.state != Server.State.ASLEEP])
        self._operate("publish", direct=number % 2 == 0)
        if sleeps:
            self._operate("wake", server="")
        newest = max(self._run.system.steps)
        self._wait(f"serve version {newest}", lambda servers: behind(servers, newest))
        self.result.versions += 1

    def _operate(self, name: str, **given: object) -> None:
        outcome = self._run.operations.run(name, given)
        if outcome != "ok":
            raise RuntimeError(f"expected {name} {given} to succeed, got {outcome}")

    def _wait(self, what: str, problems: Callable[[list[Server]], Iterable[str]]) -> None:
        found: list[str] = ["the daemon does not answer"]

        def holds() -> bool:
            servers = self._run.system.observer.servers()
            found[:] = [*problems(servers), *([] if servers else ["no server is listed"])]
            return not found

        if not wait_for(holds, SERVED, 0.1):
            raise TimeoutError(f"expected the server to {what} within {SERVED:g} s: {found}")

    def _look_back(self) -> None:
        """Record what is left behind while everything runs, faults in the daemon's log, and the installs by their path."""
        self._run.history.record("peace", phase="left", problems=left(self._run.system))
        self._run.look_at_logs()
        for line in read(self._run.system.web, "/metrics").splitlines():
            if line.startswith(
                ("resharder_installs_total", "resharder_fallbacks_total", "resharder_direct_transfer_seconds_count")
            ):
                name, _, value = line.rpartition(" ")
                self.result.installs[name] = float(value)

    # Beside them

    def _repeat(self, name: str, period: float, act: Callable[[], None]) -> None:
        while not self._ended.wait(period):
            try:
                act()
            except Exception as error:
                self._trouble(name, error)

    def _sample(self) -> None:
        found = list(sample(self._run.system, self.result.versions))
        self.result.samples += found
        for one in found:
            self._run.history.record("sample", **asdict(one))

    def _scrape(self) -> None:
        for path in PAGES:
            read(self._run.system.web, path)
        server = self._run.system.servers[self._server].server
        read(f"127.0.0.1:{server.port}", "/metrics")
        self.result.scrapes += 1

    def _trouble(self, name: str, error: Exception) -> None:
        self._run.history.record("trouble", text=f"{name}: {type(error).__name__}: {error}")


def read(address: str, path: str) -> str:
    """Return the body of a page. Raises RuntimeError without an answer, and for any status but 200."""
    status, body = got(address, path, None, 30)
    if status != 200:
        raise RuntimeError(f"expected 200 for {path}, got {status}: {body[:300]}")
    return body


def fill_journals(store: Path) -> None:
    """Write journals into a new store that are nearly full, so that a run sees their rotation and the daemon's memory of them."""
    store.mkdir(parents=True, mode=0o700)
    events = Events(store)
    for number in range(_EVENTS):
        events.add("version", f"models/filler/versions/{number}", "ready", "written before the run")
    events.close()
    history, number = History(store), 0
    while not (store / "history.jsonl").exists() or (store / "history.jsonl").stat().st_size < _HISTORY - 65536:
        number += 1
        record = VersionRecord("filler", number, RETIRED, 1, number, "filler", 1 << 20, 40, 1.0, 2.0, "0" * 64, "older than kept")
        history.add(record)
    history.close()


def sample_of(event: dict[str, object]) -> Sample:
    """Return the sample that a line of a history holds."""
    return Sample(str(event["process"]), int(str(event["versions"])), dict(event["measures"]))  # type: ignore[call-overload]
