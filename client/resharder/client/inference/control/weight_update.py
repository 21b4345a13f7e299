"""Weight updates that a trainer drives through the engine's own API, on a server that follows the daemon.

The trainer publishes a version to the daemon, which installs it on all servers as usual. The calls that
other transports use to move weights only name the version and wait:

    init     the trainer's model is the one that this server follows
    update   the daemon has the version READY, with the trainer's fingerprint
    finish   this server serves the version, or the error that prevents it

No call depends on an earlier one in the same process, so the calls may reach different API servers.
"""

import asyncio
import time
from collections.abc import Callable, Mapping
from typing import Any

from resharder.client.errors import DaemonUnreachable, NotFound, NotServed, UsageError, WaitTimeout
from resharder.client.inference.control.gate import Gate
from resharder.client.operator import Operator
from resharder.client.operator.answers import Fleet, Move, Server, Version, VersionTarget
from resharder.client.operator.waiting import why

_QUERY_SECONDS = 0.5
_CLAIM_SECONDS = 30.0  # for the daemon to name the model that this server follows


class WeightUpdates:
    """The trainer's calls on one API server or embedded engine. Not thread-safe; use it on the event loop only.

    Args:
        gate: The gate in front of the engine.
        server: The server's id.
        model: Returns the model that the server follows; empty before the daemon has named it.
        connect: Opens a connection to the daemon.
        timeout: Bound in seconds on the wait for a version.
    """

    def __init__(
        self, gate: Gate, server: str, model: Callable[[], str], connect: Callable[[], Operator], *, timeout: float
    ) -> None:
        self._gate, self._server, self._model = gate, f"servers/{server}", model
        self._connect, self._timeout = connect, timeout
        self._announced = 0

    async def init(self, info: Mapping[str, Any]) -> None:
        """Check that a trainer publishes the model that this server follows.

        Args:
            info: `model`, the name of the trainer's model.

        Raises:
            UsageError: It publishes another model, or `info` is that of another backend.
            NotServed: The daemon has not named this server's model within 30 s.
        """
        model = _fields(info, "init_info", model=str)["model"]
        deadline = time.monotonic() + _CLAIM_SECONDS
        while not (followed := self._model()):
            if time.monotonic() >= deadline:
                raise NotServed(f"the daemon did not name this server's model within {_CLAIM_SECONDS:g} s")
            await asyncio.sleep(0.1)
        if model != followed:
            raise UsageError(f"this server follows model {followed!r}, and the trainer publishes model {model!r}")

    async def update(self, info: Any) -> None:
        """Check that the daemon of this server has a version.

        Args:
            info: `version`, its number, and `fingerprint`, as the trainer's daemon reports it.

        Raises:
            UsageError: `info` is that of another backend.
            NotServed: The daemon does not have the version READY, or has other weights under its number.
            ResharderError: The daemon does not answer.
        """
        fields = _fields(info, "update_info", version=int, fingerprint=str)
        number, fingerprint = fields["version"], fields["fingerprint"]
        found = await asyncio.to_thread(self._query, lambda operator: operator.version(number, model=self._model()))
        _require(found, fingerprint)
        self._announced = number

    async def finish(self, label: str | None) -> int:
        """Wait until this server serves a version, or a newer one.

        Args:
            label: Number of the version as text; by default that of the last `update` in this process.

        Returns:
            The version in service.

        Raises:
            UsageError: There is no version to wait for, or `label` is no number.
            NotServed: The fleet refuses the version or follows another one, its install failed, or it is not
                served in time.
            ResharderError: The daemon refuses the query.
        """
        version = self._announced if label is None else _number(label)
        if not version:
            raise UsageError("finish_weight_update was called before update_weights, which names the version")
        deadline = time.monotonic() + self._timeout
        while (self._gate.open_on or 0) < version:
            problem, reason = await asyncio.to_thread(self._query, lambda operator: self._outlook(operator, version))
            if (self._gate.open_on or 0) >= version:
                break
            if problem:
                raise NotServed(f"expected version {version} to be served, got {_served(self._gate)}: {problem}")
            left = deadline - time.monotonic()
            if left <= 0:
                expected = f"expected version {version} to be served within {self._timeout:g} s"
                raise NotServed(f"{expected}, got {_served(self._gate)}: {reason}")
            await self._gate.changed(min(left, _QUERY_SECONDS))
        return self._gate.version

    def _query(self, ask: "Callable[[Operator], Any]") -> Any:
        with self._connect() as operator:
            return ask(operator)

    def _outlook(self, operator: Operator, version: int) -> tuple[str, str]:
        """Return why this server will not serve a version, empty if it may yet, and the reason of its present state."""
        try:
            server = operator.server(self._server)
            fleet = operator.fleet(server.fleet)
        except (DaemonUnreachable, NotFound, WaitTimeout) as error:  # restarts, or waits for this server's next claim
            return "", str(error)
        return obstacle(version, fleet, server), why(fleet, [server])


def obstacle(version: int, fleet: Fleet, server: Server) -> str:
    """Return why a server will not serve a version without a command or another version; empty if it may yet."""
    for refused in fleet.refused:
        if refused.version == version:
            return f"fleet {fleet.name} refuses it: {refused.reason}"
    move = fleet.move
    if move is not None and move.to_version == version:
        if error := move.failed.get(server.name.removeprefix("servers/")):
            return f"its install failed: {error}"
        if move.state in (Move.State.FAILED, Move.State.STOPPED):
            return f"the update of fleet {fleet.name} is {move.state}: {move.reason}"
    match fleet.target.kind:
        case VersionTarget.Kind.NUMBER if fleet.target.version != version:
            return f"fleet {fleet.name} is pinned to version {fleet.target.version}"
        case VersionTarget.Kind.NONE:
            return f"fleet {fleet.name} has no target"
    if server.drained:
        return f"{server.name} is drained"
    return ""


def _require(found: Version, fingerprint: str) -> None:
    if found.state != Version.State.READY:
        reason = f": {found.reason}" if found.reason else ""
        raise NotServed(f"{found.name} is not READY: it is {found.state}{reason}")
    if found.fingerprint != fingerprint:
        raise NotServed(
            f"expected {found.name} with fingerprint {fingerprint}, got {found.fingerprint}: "
            "trainer and server use different daemons"
        )


def _served(gate: Gate) -> str:
    return "none" if gate.open_on is None else f"version {gate.open_on}" if gate.open_on else "the engine's own weights"


def _number(label: str) -> int:
    if not (label.isascii() and label.isdecimal()):
        raise UsageError(f"expected the number of a version as weight version, got {label!r}")
    return int(label)


def _fields(given: Any, name: str, **kinds: type) -> dict[str, Any]:
    """Return the fields of a request. Raises UsageError unless they are exactly `kinds`."""
    if not isinstance(given, Mapping) or given.keys() != kinds.keys():
        got = ", ".join(map(str, given)) if isinstance(given, Mapping) else type(given).__name__
        raise UsageError(f"expected {name} of backend resharder ({', '.join(kinds)}), got {got or 'nothing'}")
    for field, kind in kinds.items():
        if type(given[field]) is not kind:
            raise UsageError(f"expected {field} in {name} to be {kind.__name__}, got {given[field]!r}")
    return dict(given)
