"""One cycle of everything with one fault in it, from registration to retirement, the direct path and an import included.

Processes that die are started again, as a supervisor does; calls that are refused with a documented reason are repeated.
Every step has to end in its result within BOUND seconds.
"""

import re
import shutil
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
from resharder.client import errors
from resharder.v1 import operator_pb2, operator_pb2_grpc, resources_pb2

from tests.failpoints.cases import AT_HOME, AWAY, LEASE, REMOTE, RESTARTED, Case
from tests.failpoints.light_server import LightServer
from tests.failpoints.roles import Console, Trainer
from tests.support.daemon import Daemon
from tests.support.node import Node
from tests.support.remote import Gone, Refusal, Remote

BOUND = 45.0
IMPORTED = 100  # the step of an imported version; its weights are those of step 1
_PAGE = Path(__file__).parents[2] / "docs" / "errors.md"
DOCUMENTED = set(re.findall(r"`([A-Z][A-Z_]+)`", _PAGE.read_text())) - {"INTERNAL"}
DOCUMENTED |= {kind.reason for name in errors.__all__ if (kind := getattr(errors, name)).reason}
Version = resources_pb2.Version


class Failed(AssertionError):
    """The cycle did not come to peace, or something is wrong with its result."""


@dataclass
class Report:
    """Result of one cycle."""

    case: Case | None
    reached: bool = False
    seconds: float = 0.0
    problem: str = ""
    refusals: list[str] = field(default_factory=list)
    deaths: list[str] = field(default_factory=list)


class KeptDaemon(Daemon):
    """A daemon that a thread starts again whenever it has ended."""

    starts = 0

    def keep(self) -> None:
        self._closing = threading.Event()
        self._keeper = threading.Thread(target=self._keep, daemon=True)
        self._keeper.start()

    def _keep(self) -> None:
        while not self._closing.wait(0.02):
            if self.process is None or self.process.poll() is not None:
                self.starts += 1
                with suppress(RuntimeError, TimeoutError):
                    self.start()

    def let_go(self) -> None:
        self._closing.set()
        self._keeper.join()


class KeptNode(Node):
    """A node that a thread starts again whenever it has ended."""

    def __init__(self, endpoint: str, environment: dict[str, str]) -> None:
        super().__init__(endpoint, "one")
        self._armed, self.starts = environment, 0

    def keep(self) -> None:
        self._closing = threading.Event()
        self._keeper = threading.Thread(target=self._keep, daemon=True)
        self._keeper.start()

    def _keep(self) -> None:
        while not self._closing.wait(0.02):
            if self.process is None or self.process.poll() is not None:
                self.starts += 1
                self.start(environment=self._armed)

    def let_go(self) -> None:
        self._closing.set()
        self._keeper.join()


class Cycle:
    """The processes of one case, in a folder of their own.

    Args:
        case: The fault; None for a cycle without one.
    """

    server: type[LightServer] = LightServer

    def __init__(self, case: Case | None) -> None:
        self.report = Report(case)
        self.folder = Path(tempfile.mkdtemp(prefix="resharder-cycle-"))
        self.mark, self.served = self.folder / "mark", self.folder / "served"
        options: dict[str, Any] = {"lease_seconds": LEASE, "keep_count": 20, "archive_url": self.folder / "archive"}
        options["data_listen"] = "127.0.0.1:0"
        with_node = case is not None and (case.place == "node" or case.point in AT_HOME)
        if with_node:  # the server is on the node's host
            options |= {"shared_memory": False, "replicas": 2}  # which lose no READY version with a node
        self.daemon = KeptDaemon(**options)
        self.node = KeptNode(self.daemon.endpoint, self.environment_of(case, "node")) if with_node else None
        self.daemon.environment["RESHARDER_CYCLE"] = str(self.folder)
        self.region = KeptDaemon(follow=self.folder / "archive") if case is not None and case.point in AWAY else None
        self.actors: dict[str, Remote] = {}
        self.job: tuple[str, str, bool] = ("a", "auto", False)
        self.ready: dict[int, str] = {}  # fingerprints of the versions that were READY
        self.retired: set[int] = set()
        self.steps: dict[int, int] = {}

    def environment(self, place: str) -> dict[str, str]:
        return self.environment_of(self.report.case, place)

    def environment_of(self, case: Case | None, place: str) -> dict[str, str]:
        given = {"RESHARDER_CYCLE": str(self.folder)}
        if case is not None and case.place == place:
            given |= {"RESHARDER_FAILPOINT": case.spec, "RESHARDER_FAILPOINT_MARK": str(self.mark)}
        return given

    def run(self) -> Report:
        began = time.monotonic()
        try:
            self._run()
        except Exception as error:
            self.report.problem = f"{type(error).__name__}: {error}"
        finally:
            self.close()
        self.report.deaths += ["daemon"] * (self.daemon.starts - 1)
        self.report.reached = self.mark.exists()
        self.report.seconds = time.monotonic() - began
        if not self.report.problem:
            shutil.rmtree(self.folder)
        return self.report

    # Steps

    def _run(self) -> None:
        from tests.failpoints.checks import check

        point = self.report.case.point if self.report.case else ""
        if self.region is not None:
            self.region.environment |= {"RESHARDER_CYCLE": str(self.folder)} | self.environment("daemon")
            self.region.keep()
        elif point not in RESTARTED:
            self.daemon.environment |= self.environment("daemon")
        self.daemon.keep()
        if self.node is not None:
            self.node.keep()
        self.register("a", "auto")
        first = self.publish(1)
        self.follows(first)
        second = self.publish(2)
        self.follows(second)
        if point in RESTARTED:
            self.daemon.environment |= self.environment("daemon")
            assert self.daemon.process is not None
            self.daemon.process.kill()
        self.power(second)
        self.achieve(
            lambda: self.attempt("operator", "fleet", "rollback", version=first), lambda: self.serves(first), "a rollback"
        )
        self.register("b", "grpc")
        self.follows(self.publish(3))
        self.do("trainer", "give_up", 50)
        self.do("operator", "fleet", "set_fleet", serve_ahead=True)
        self.register("c", "auto", direct=True)
        for step in (4, 5):
            self.follows(self.publish(step))
        self.archived(first)
        if self.region is not None:
            for number in sorted(self.ready)[-2:]:
                self.followed(number)
        self.imported(first)
        self.register("d", "http")
        self.follows(self.publish(6))
        check(self)

    def register(self, job: str, transport: str, direct: bool = False) -> None:
        self.job = job, transport, direct
        self.do("trainer", "register", *self.job)

    def publish(self, step: int) -> int:
        number = int(self.do("trainer", "publish", step))
        self.achieve(lambda: None, lambda: number in self.look(), f"version {number} is READY")
        return number

    def follows(self, version: int) -> None:
        self.achieve(lambda: None, lambda: self.serves(version), f"version {version} is served")

    def power(self, version: int) -> None:
        def has(power: int) -> Callable[[], bool]:
            return lambda: [server.power for server in self.servers()] == [power]

        self.achieve(lambda: self.attempt("operator", "fleet", "sleep", level=2), has(resources_pb2.ASLEEP_2), "a sleep")
        self.achieve(lambda: self.attempt("operator", "fleet", "wake"), has(resources_pb2.AWAKE), "a wake")
        self.follows(version)

    def archived(self, number: int) -> None:
        """Archive, retire and restore a version."""
        self.do("operator", "version", "archive", number)
        self.retired.add(number)
        self.achieve(
            lambda: self.attempt("operator", "version", "gc", number),
            lambda: number not in self.look(),
            f"{number} is retired",
        )
        self.do("operator", "version", "restore", number)
        self.retired.remove(number)
        self.achieve(lambda: None, lambda: number in self.look(), f"version {number} is READY again")

    def followed(self, number: int) -> None:
        """Archive a version, and find it in the region."""
        self.do("operator", "version", "archive", number)

        def is_there() -> bool:
            stub = operator_pb2_grpc.OperatorServiceStub(self.region.channel)
            with suppress(grpc.RpcError):
                found = stub.GetVersion(operator_pb2.GetVersionRequest(version=f"models/policy/versions/{number}"), timeout=5)
                return found.state == Version.READY and found.fingerprint == self.ready[number]
            return False

        self.achieve(lambda: None, is_there, f"version {number} is in the region")

    def imported(self, number: int) -> None:
        """Export a version and import it under another number."""
        out = self.folder / "out"
        self.do("operator", "export", number, str(out))
        self.follows(int(self.do("operator", "bring_in", str(out), IMPORTED)))

    # Calls

    def do(self, place: str, method: str, *args: Any, **options: Any) -> Any:
        """Call a role until it succeeds."""
        deadline = time.monotonic() + BOUND
        while True:
            try:
                return self.actor(place).call(method, *args, **options)
            except Gone:
                self.bury(place)
            except Refusal as refusal:
                self.note(refusal)
                if time.monotonic() > deadline:
                    raise Failed(f"{place} {method}{args}: refused for {BOUND:g} s, at last with {refusal}") from None
                time.sleep(0.1)

    def attempt(self, place: str, method: str, *args: Any, **options: Any) -> None:
        """Call a role once, for an effect that `achieve` waits for: a repeated command may be refused because it was executed."""
        try:
            self.actor(place).call(method, *args, **options)
        except Gone:
            self.bury(place)
        except Refusal as refusal:
            self.note(refusal)

    def actor(self, place: str) -> Remote:
        """The process of a role, started if it is not alive: a trainer registers again, a server boots."""
        while True:
            actor = self.actors.get(place)
            if actor is not None and actor.alive:
                return actor
            if actor is not None:
                self.bury(place)
            self.actors[place] = self._begin(place)

    def _begin(self, place: str) -> Remote:
        endpoint, environment = self.daemon.endpoint, self.environment(place)
        if place == "operator":
            return Remote(Console, endpoint, environment=environment)
        role: type = Trainer
        argument = endpoint
        first: tuple[Any, ...] = ("register", *self.job)
        if place == "server":
            environment |= {
                "RESHARDER_ENDPOINT": endpoint,
                "RESHARDER_SERVER_ID": "s",
                "RESHARDER_MODEL": "policy",
                "RESHARDER_PAGE": str(self.folder / "page"),
                "RESHARDER_VERIFY_SECONDS": "0.3",
                "RESHARDER_BOOT_WAIT_SECONDS": "20",
            }
            if self.report.case is not None and self.report.case.point in REMOTE:
                environment["RESHARDER_TRANSPORT"] = "http"
            role, argument, first = self.server, str(self.served), ("boot",)
        deadline = time.monotonic() + BOUND
        while True:
            actor = Remote(role, argument, environment=environment)
            try:
                actor.call(*first)
                return actor
            except Gone:
                self.report.deaths.append(place)
            except Refusal as refusal:
                self.note(refusal)
            actor.close()
            if time.monotonic() > deadline:
                raise Failed(f"the {place} does not start")

    def bury(self, place: str) -> None:
        self.report.deaths.append(place)
        self.actors.pop(place).close()

    def note(self, refusal: Refusal) -> None:
        """Keep a refusal. Raises Failed if its reason is not documented."""
        self.report.refusals.append(str(refusal)[:200])
        point = self.report.case.point if self.report.case else "none"
        injected = f"failpoint {point}" in refusal.text
        if refusal.reason not in DOCUMENTED and not (injected and refusal.reason in ("OSError", "InstallError")):
            raise Failed(f"an undocumented error: {refusal}")

    def achieve(self, act: Callable[[], object], reached: Callable[[], bool], what: str) -> None:
        """Act until it has the effect."""
        deadline = time.monotonic() + BOUND
        while True:
            act()
            soon = time.monotonic() + 5
            while time.monotonic() < soon:
                self.actor("server") if "server" in self.actors or "served" in what else None
                if reached():
                    return
                time.sleep(0.03)
            if time.monotonic() > deadline:
                raise Failed(f"expected {what} within {BOUND:g} s; servers: {self.servers()}"[:1500])

    # State of the daemon

    def servers(self) -> list[resources_pb2.Server]:
        stub = operator_pb2_grpc.OperatorServiceStub(self.daemon.channel)
        with suppress(grpc.RpcError):
            return list(stub.ListServers(operator_pb2.ListServersRequest(), timeout=5).servers)
        return []

    def serves(self, version: int) -> bool:
        states = [(server.state, server.version) for server in self.servers()]
        if states != [(resources_pb2.Server.SERVING, version)]:
            return False
        with suppress(Gone, Refusal):
            return bool(self.actors["server"].call("version") == version)
        return False

    def look(self) -> set[int]:
        """The numbers of the READY versions; none may be lost."""
        stub = operator_pb2_grpc.OperatorServiceStub(self.daemon.channel)
        deadline = time.monotonic() + BOUND
        while True:
            try:
                found = list(stub.ListVersions(operator_pb2.ListVersionsRequest(page_size=500), timeout=5).versions)
                break
            except grpc.RpcError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.05)
        self.steps |= {version.number: version.step for version in found}
        now = {version.number: version.fingerprint for version in found if version.state == Version.READY}
        for number, known in self.ready.items():
            if number not in self.retired and now.get(number) != known:
                raise Failed(f"version {number} was READY with fingerprint {known}, it is now {now.get(number)}")
        self.ready |= now
        return set(now)

    def close(self) -> None:
        for actor in self.actors.values():
            actor.close()
        self.actors.clear()
        if self.node is not None:
            self.node.let_go()
            self.node.close()
            self.report.deaths += ["node"] * (self.node.starts - 1)
        if self.region is not None:
            self.region.let_go()
            with suppress(OSError):
                shutil.copy(self.region.log, self.folder / "region.log")
            self.region.close()
            self.report.deaths += ["region"] * (self.region.starts - 1)
        self.daemon.let_go()
        with suppress(OSError):
            shutil.copy(self.daemon.log, self.folder / "daemon.log")
        self.daemon.close()
