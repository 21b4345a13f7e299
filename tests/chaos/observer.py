"""An observer that asks the daemon, not through the proxy, and records what has changed."""

import re
from contextlib import suppress
from typing import Any

from resharder.client.errors import ResharderError
from resharder.client.operator.answers import Fleet, Node, Server, Version

from tests.chaos.adapter import ADAPTER
from tests.chaos.history import History
from tests.chaos.operations import FLEET
from tests.chaos.periodic import Periodic
from tests.chaos.system import System

_POLL = 0.4


class Observer(Periodic):
    """Thread that polls versions, fleet and servers."""

    def __init__(self, system: System, history: History) -> None:
        super().__init__(_POLL)
        self._system, self._history = system, history
        self._seen: dict[str, dict[str, Any]] = {}
        self._before = 0.0  # time at which the poll before this one began

    def act(self) -> None:
        """Poll once."""
        began = self._history.now
        try:
            versions = self._system.observer.versions(FLEET)
            fleets = [fleet for fleet in self._system.observer.fleets() if fleet.name == FLEET]
            servers = self._system.observer.servers(FLEET)
            nodes = self._system.observer.nodes()
        except ResharderError:
            return
        self.versions(versions, round(began, 3))
        self._adapters()
        for fleet in fleets:
            self._changed("fleet", "fleet", shown_fleet(fleet))
        for server in servers:
            self._changed("server", server.name, shown_server(server))
        for node in nodes:
            self._changed("node", node.name, shown_node(node))
        self._before = began

    def _adapters(self) -> None:
        """Note the steps of the adapter's versions."""
        if self._system.adapter is not None:
            with suppress(ResharderError):
                for version in self._system.observer.versions(ADAPTER):
                    self._system.adapter.steps.setdefault(version.number, version.step)

    def versions(self, versions: list[Version], asked: float) -> None:
        """Record versions that are new, changed, or no longer listed, in the answer to a question at time `asked`."""
        listed = set()
        for version in sorted(versions, key=lambda version: version.number):
            self._system.steps.setdefault(version.number, version.step)
            name = f"version {version.number}"
            listed.add(name)
            fields = {"number": version.number, "state": version.state.value, "step": version.step, "epoch": version.epoch}
            fields["fingerprint"] = version.fingerprint
            fields |= {"whole": bool(version.folder), "homes": [home.node for home in version.homes]}
            self._changed("version", name, fields, why=version.reason, asked=asked)
        for name, last in list(self._seen.items()):
            if name.startswith("version ") and name not in listed and last["state"] != "ABSENT":
                self._changed("version", name, {**last, "state": "ABSENT"}, asked=asked)

    def _changed(self, kind: str, name: str, fields: dict[str, Any], **more: Any) -> None:
        if self._seen.get(name) != fields:
            self._seen[name] = fields
            self._history.record(kind, **fields, **more, before=round(self._before, 3))


def shown_fleet(fleet: Fleet) -> dict[str, Any]:
    """Return the fields of a fleet that the history has."""
    move = fleet.move
    return {
        "target": f"{fleet.target.kind.value} {fleet.target.version}",
        "strategy": fleet.strategy.kind.value,
        "wanted": fleet.wanted_version,
        "settled": fleet.settled_version,
        "refused": [one.version for one in fleet.refused],
        "move": [move.id, move.state.value, move.from_version, move.to_version, move.strategy.kind.value] if move else None,
        "skew": fleet.max_skew,
        "ahead": fleet.serve_ahead,
        "reason": fleet.reason,
    }


def shown_node(node: Node) -> dict[str, Any]:
    """Return the fields of a node that the history has."""
    problems = {copy.version: re.sub(r"\d+", "…", copy.problem) for copy in node.copies if copy.problem}
    of_model = [copy for copy in node.copies if copy.version.startswith(f"models/{FLEET}/")]
    whole = [copy.version for copy in of_model if copy.held_pieces == copy.pieces > 0]
    holds = sorted(int(version.rpartition("/")[2]) for version in whole)
    return {"name": node.name, "state": node.state.value, "problems": problems, "holds": holds}


def shown_server(server: Server) -> dict[str, Any]:
    """Return the fields of a server that the history has."""
    return {
        "name": server.name.removeprefix("servers/"),
        "state": server.state.value,
        "version": server.version,
        "wanted": server.wanted_version,
        "power": server.power.value,
        "drained": server.drained,
        "sides": server.control_sides,
        "ahead": server.ahead,
        "reason": re.sub(r"\d+ s\b", "… s", server.reason),
        "transports": [worker.transport for worker in server.workers],
    }
