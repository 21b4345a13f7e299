"""Peace after a storm: faults end, everything has to arrive at its target within a bound, and nothing may be left behind."""

import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path

import psutil
from resharder.client.errors import Refused, ResharderError
from resharder.client.operator.answers import (
    Fleet,
    Move,
    Node,
    PauseMode,
    Power,
    PublisherStatus,
    ServeAhead,
    Server,
    UpdateStrategy,
    Version,
    VersionTarget,
)

from tests.chaos.adapter import ADAPTER
from tests.chaos.history import Event, History
from tests.chaos.kept_node import NodeUse, node_problems
from tests.chaos.kept_server import BOOT
from tests.chaos.operations import FLEET, Operations
from tests.chaos.region import Region
from tests.chaos.system import KEPT, RANKS, System, pages_of, processes_of, wait_for
from tests.support.client_traffic import PROMPTS, ClientAnswer, ask
from tests.support.forked import end_sources
from tests.support.node import stored_files

ARRIVE = 90.0
"""Seconds in which everything arrives once every process runs; three attempts of an install are up to 60 s apart."""
_HOME = 20.0
"""Seconds in which ranks write on a node again that has restarted."""
DESCRIPTORS, CONNECTIONS = 200, 40
_SIDES = {"left": 1, "right": 2}
_RESTING = (Server.State.SERVING, Server.State.ASLEEP, Server.State.DRAINED, Server.State.FAILED)
_ENDS = {"aborted", "retired", "ready"}
_BEFORE_READY = {"UPLOADING", "ABSENT"}
"""Events of a version that is UPLOADING no longer."""
_ENDED = (Move.State.DONE, Move.State.FAILED, Move.State.STOPPED, Move.State.UNSPECIFIED)


class Peace:
    """Ends a storm, and records what does not arrive or is left behind."""

    def __init__(self, system: System, operations: Operations, history: History) -> None:
        self._system, self._operations, self._history = system, operations, history

    def make(self, quiet: Callable[[], bool]) -> None:
        """Heal, wait, compare; every problem is recorded. `quiet`: whether all operations of the storm have ended."""
        self._history.record("peace", phase="begin")
        self._system.heal()
        self._phase("processes", self._processes_run)
        self._phase("operations", lambda: [] if wait_for(quiet, 260) else ["an operation of the storm has not ended"])
        self._phase("settled", self._settles)
        self._phase("arrived", self._arrives)
        if self._system.adapter is not None:
            self._phase("adapter", self._adapter_arrives)
        self._phase("nodes", self._nodes_hold)
        if self._system.region is not None:
            self._phase("region", lambda: self._region_arrives(self._system.region))
        self._phase("ended", self._ended)
        self._phase("left", lambda: left(self._system))

    def _phase(self, name: str, act: Callable[[], list[str]]) -> None:
        began = time.monotonic()
        try:
            problems = act()
        except (ResharderError, TimeoutError, OSError) as error:
            problems = [f"{type(error).__name__}: {error}"]
        self._history.record("peace", phase=name, seconds=round(time.monotonic() - began, 1), problems=problems)

    def _processes_run(self) -> list[str]:
        end, problems = time.monotonic() + BOOT, list[str]()
        for name in self._system.keepers:
            try:
                self._system.up(name, max(0.0, end - time.monotonic()))
            except TimeoutError as error:
                problems.append(str(error))
        return problems

    def _settles(self) -> list[str]:
        """With the orders of the storm, every server comes to rest, at the target if a move there has ended well."""
        problems: list[str] = ["the daemon does not answer"]

        def rests() -> bool:
            with suppress(ResharderError):
                fleet, servers = self._system.observer.fleet(FLEET), self._system.observer.servers(FLEET)
                problems[:] = restless(fleet, servers, set(self._system.servers))
            return not problems

        wait_for(rests, ARRIVE)
        return problems

    def _arrives(self) -> list[str]:
        """With plain settings, a new version is READY and served by every server, and each gives answers of it."""
        operator = self._system.operator
        plain = {"target": VersionTarget(VersionTarget.Kind.LATEST), "strategy": UpdateStrategy(UpdateStrategy.Kind.ALL_AT_ONCE)}
        operator.set_fleet(
            FLEET, **plain, max_skew=0, serve_ahead=ServeAhead.AUTO, pause_mode=PauseMode.KEEP, accept_refused=True
        )
        operator.wake(FLEET)
        operator.resume(FLEET)
        return self._publish(ARRIVE, direct=True) or self._serves_newest()

    def _publish(self, seconds: float, *, direct: bool, home: str = "") -> list[str]:
        """A version is published within some seconds, with `home` by copies into this node's files."""
        outcomes = list[str]()

        def published() -> bool:
            outcome = self._operations.publish(direct=direct)
            outcomes.append(f"{outcome} {sorted(self._operations.transports)}" if outcome == "ok" else outcome)
            return outcome == "ok" and (not home or self._operations.transports == {"node"})

        wanted = f"on {home}" if home else "in any way"
        return [] if wait_for(published, seconds, 1.0) else [f"expected a version to be published {wanted}, got {outcomes}"]

    def _publish_at_home(self) -> list[str]:
        """A version is published, on the home of the trainer if it is on the host of a node.

        Which homes a job has is fixed at its registration. If a node was away then, the next job has to be at home.
        """
        if not (home := self._system.trainer.home):
            return self._publish(ARRIVE, direct=False)
        if self._publish(_HOME + suspended_seconds(self._history.events, home), direct=False, home=home):
            self._system.restart_trainer()
            return self._publish(ARRIVE, direct=False, home=home)
        return []

    def _serves_newest(self) -> list[str]:
        """Every server serves the newest version and answers with it."""
        newest = self._newest()
        problems: list[str] = []

        def there() -> bool:
            with suppress(ResharderError):
                self._approve()
                problems[:] = behind(self._system.observer.servers(FLEET), newest)
            return not problems

        wait_for(there, ARRIVE)
        return problems or self._answers(newest)

    def _adapter_arrives(self) -> list[str]:
        """A new version of the adapter is READY and served by every server, beside the base's."""
        outcomes = list[str]()

        def published() -> bool:
            outcomes.append(self._operations.run("adapter", {}))
            return outcomes[-1] == "ok"

        if not wait_for(published, ARRIVE, 1.0) or self._operations.run("adapter_latest", {}) != "ok":
            return [f"expected a version of the adapter to be published, got {outcomes}"]
        newest = max(v.number for v in self._system.operator.versions(ADAPTER) if v.state == Version.State.READY)
        problems: list[str] = []

        def there() -> bool:
            with suppress(ResharderError):
                problems[:] = behind(self._system.observer.servers(ADAPTER), newest)
            return not problems

        wait_for(there, ARRIVE)
        for name, kept in self._system.servers.items():
            found = ask(name, kept.server, PROMPTS[0], model=ADAPTER)
            if not isinstance(found, ClientAnswer) or not found.versions[-1].endswith(f";{ADAPTER}={newest}"):
                problems.append(f"{name} serves version {newest} of {ADAPTER} and answers {found}")
        return problems

    def _region_arrives(self, region: Region) -> list[str]:
        """The region has home's newest version, and its server serves it."""
        newest, problems = self._newest(), ["the region does not answer"]

        def there() -> bool:
            with suppress(ResharderError):
                found, served = region.newest(), region.served()
                problems[:] = (
                    [] if found == served == newest else [f"expected {newest} in the region, found {found}, served {served}"]
                )
            return not problems

        wait_for(there, ARRIVE)
        return problems

    def _newest(self) -> int:
        return max(v.number for v in self._system.operator.versions(FLEET) if v.state == Version.State.READY)

    def _nodes_hold(self) -> list[str]:
        """A version that cannot take the direct path is written on the trainer's home, and read through the nodes of workers."""
        nodes, observer = self._system.nodes, self._system.observer
        for name in nodes:
            if not self._resumes(name):
                return [f"{name} cannot be resumed"]
        if problems := self._publish_at_home() or self._serves_newest():
            return problems
        newest = self._newest()

        def there() -> bool:
            with suppress(ResharderError):
                servers, found = observer.servers(FLEET), observer.nodes()
                problems[:] = [f"{short.version}: {short.problem}" for short in observer.replica_shortages()]
                ready = [v.number for v in observer.versions(FLEET) if v.state == Version.State.READY]
                for name, kept in nodes.items():
                    use = self._use_of(name, newest, servers)
                    problems.extend(node_problems(name, found, use, kept.memory(), ready))
                    problems.extend(altered(self._system, name, found))
            return not problems

        wait_for(there, ARRIVE)
        plain = {link.name: link.plain for link in self._system.proxies.links.values() if link.plain}
        self._history.record("links", plain=plain)
        for node in observer.nodes():
            self._history.record("moved", node=node.name, daemon=node.received_daemon_bytes, peers=node.received_peer_bytes)
        return problems

    def _ended(self) -> list[str]:
        """The daemon's journal has the end of every version that killed nodes alone held.

        A daemon that is killed meanwhile forgets the versions that ranks upload: these have no event at all, and nobody has seen
        them in another state.
        """
        events, problems = self._history.events, []
        restarted = max((event["t"] for event in events if event["kind"] == "start" and event["process"] == "daemon"), default=0)
        later = {event["number"] for event in events if event["kind"] == "version" and event["state"] not in _BEFORE_READY}
        alone = {number: event["t"] for event in events if event["kind"] == "alone" for number in event["versions"]}
        for number, at in sorted(alone.items()):
            subject = f"models/{FLEET}/versions/{number}"
            found = {event.what for event in self._system.operator.events(subject=subject)}
            forgotten = not found and restarted > at and number not in later
            if not found & _ENDS and not forgotten:
                problems.append(f"no event of the end of {subject}: {found}")
        return problems

    def _resumes(self, node: str) -> bool:
        return wait_for(lambda: self._operations.run("resume_node", {"node": node}) == "ok", ARRIVE, 1.0)

    def _use_of(self, node: str, newest: int, servers: list[Server]) -> NodeUse:
        names = {name for name, server in self._system.servers.items() if server.reads == node}
        readers = tuple(server for server in servers if server.name.removeprefix("servers/") in names)
        writes = self._system.trainer.home == node
        return NodeUse(newest if readers or writes else 0, writes, readers)

    def _approve(self) -> None:
        """Let a move of the storm continue that waits for an operator."""
        move = self._system.observer.fleet(FLEET).move
        if move is not None and move.state in (Move.State.HOLDING, Move.State.STOPPED):
            with suppress(Refused):
                self._system.operator.approve(FLEET, move=move.id, reason="peace")

    def _answers(self, version: int) -> list[str]:
        problems = []
        for name, kept in self._system.servers.items():
            for _ in range(6):  # each API server takes some of the connections
                found = ask(name, kept.server, PROMPTS[0])
                if not isinstance(found, ClientAnswer) or found.versions != (str(version),):
                    problems.append(f"{name} serves version {version} and answers {found}")
        return problems


def altered(system: System, name: str, nodes: Iterable[Node]) -> list[str]:
    """Return the versions that a node reports to hold and whose files there are not those of the store."""
    copies = [copy for node in nodes if node.name == f"nodes/{name}" for copy in node.copies]
    found = []
    for copy in copies:
        if copy.held_pieces == copy.pieces and not copy.uploading:
            try:
                same = system.nodes[name].node.files(copy.version) == stored_files(system.daemon, copy.version)
            except (OSError, ValueError) as error:
                found.append(f"{name} reports {copy.version}: {type(error).__name__}: {error}")
            else:
                found += [] if same else [f"{name} has other bytes of {copy.version} than the store"]
    return found


def suspended_seconds(events: Iterable[Event], node: str) -> float:
    """Return a bound on the seconds for which the daemon takes no files of a node, from which it could not copy earlier ones.

    It doubles with each such version until the node restarts.
    """
    failed = 0
    for event in events:
        if event["kind"] == "ready" and event["process"] == node:
            failed = 0
        if event["kind"] == "version" and event["state"] == "ABORTED":
            failed += f"nodes/{node}: " in event["why"] and ", bytes " in event["why"]
    return 60.0 * 2 ** (failed - 1) if failed else 0.0


def restless(fleet: Fleet, servers: list[Server], names: set[str]) -> list[str]:
    """Return why a fleet has not come to rest under its own settings; empty if it has."""
    problems = [f"{name} is not listed" for name in names - {server.name.removeprefix("servers/") for server in servers}]
    move = fleet.move
    waits = move is not None and move.state == Move.State.HOLDING and move.strategy.approval
    if move is not None and move.state not in _ENDED and not waits:
        absent = [server for server in servers if server.state in (Server.State.ASLEEP, Server.State.DRAINED)]
        if not absent:
            problems.append(f"the move to version {move.to_version} is {move.state.value}: {fleet.reason}")
    for server in servers:
        if server.state not in _RESTING and not (waits and server.state == Server.State.WAITING):
            problems.append(f"{server.name} is {server.state.value}: {server.reason}")
        arrived = server.version == fleet.wanted_version or server.state != Server.State.SERVING
        if move is not None and move.state == Move.State.DONE and not arrived:
            problems.append(
                f"{server.name} serves version {server.version}, the fleet wants {fleet.wanted_version}: {server.reason}"
            )
    return problems


def behind(servers: list[Server], version: int) -> list[str]:
    """Return the servers that do not serve a version with open gates; empty if all do."""
    return [
        f"{server.name} is {server.state.value} with version {server.version}, not SERVING {version}: {server.reason}"
        for server in servers
        if (server.state, server.version, server.power) != (Server.State.SERVING, version, Power.AWAKE) or server.ahead
    ]


def left(system: System) -> list[str]:
    """Return what is left behind while every process runs and is idle; waits a little for the end of clean-ups."""
    problems: list[str] = []

    def clean() -> bool:
        with suppress(ResharderError):
            problems[:] = [*left_in_store(system), *leases(system), *descriptors(system), *pages(system)]
        return not problems

    wait_for(clean, 40, 1.0)
    return problems


def left_in_store(system: System) -> list[str]:
    """Return folders of the store that no version explains."""
    folder = system.daemon.store / "models" / FLEET
    found = [f"left in the store: {path}" for kind in ("staging", "retired") for path in (folder / kind).glob("*")]
    ready = {version.number for version in system.observer.versions(FLEET) if version.state == Version.State.READY}
    stored = {int(path.name) for path in (folder / "versions").iterdir()}
    if stored != ready:
        found.append(f"READY are {sorted(ready)}, the store has {sorted(stored)}")
    pool = list((folder / "pool").glob("*"))
    if len(pool) > KEPT + 1:
        found.append(f"{len(pool)} folders in the pool: {sorted(path.name for path in pool)}")
    if len(ready) > KEPT + 1:
        found.append(f"{len(ready)} READY versions, {KEPT} are kept: {sorted(ready)}")
    return found


def leases(system: System) -> list[str]:
    """Return publishers and servers that should not be live, or that should."""
    daemon, servers = system.observer.daemon(), system.observer.servers(FLEET)
    live = [
        publisher
        for publisher in daemon.publishers
        if publisher.model.removeprefix("models/") == FLEET
        and publisher.state in (PublisherStatus.State.ACTIVE, PublisherStatus.State.REGISTERING)
    ]
    found = [] if [publisher.live_ranks for publisher in live] == [RANKS] else [f"live publishers: {live}"]
    sides = {server.name.removeprefix("servers/"): server.control_sides for server in servers}
    expected = {name: _SIDES[name] for name in system.servers}
    return found if sides == expected else [*found, f"expected control sides {expected}, got {sides}"]


def descriptors(system: System) -> list[str]:
    """Return processes with more descriptors than an idle one needs, links with more connections, and stale staging files."""
    found = []
    for pid, command in processes_of(system.folder).items():
        with suppress(psutil.Error):
            if (count := psutil.Process(pid).num_fds()) > DESCRIPTORS:
                found.append(f"{count} descriptors in {command[:100]}")
    for link in system.proxies.links.values():
        if link.connections > CONNECTIONS:
            found.append(f"{link.connections} connections through {link.name}")
    for name, kept in system.servers.items():
        if files := [path.name for path in kept.staging.rglob("*") if path.is_file()]:
            found.append(f"left in the staging folder of {name}: {files[:10]}")
    return found


def pages(system: System) -> list[str]:
    """Return version pages of servers that have ended: a server's start removes those of dead ones."""
    now = pages_of(system.folder)
    system.pages |= now
    return [f"the version page of a server that ended: {page}" for page in system.pages - now if page.exists()]


def left_at_the_end(folder: Path, pages: set[Path]) -> list[str]:
    """Return processes of the run that outlive it, and the version pages of its servers."""
    end_sources()
    if not wait_for(lambda: not processes_of(folder), 30):
        return [f"left running: {processes_of(folder)}"]
    return [f"left in shared memory: {page}" for page in sorted(pages) if page.exists()]
