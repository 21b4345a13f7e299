"""Commands on fleets and their servers. The daemon stores the effect of each before it answers; each may be repeated."""

import time
import uuid
from collections.abc import Callable, Sequence
from typing import Any, Literal

from resharder.client.errors import NotFound, UsageError, WaitTimeout
from resharder.client.operator import waiting
from resharder.client.operator.answers import (
    FleetStatus,
    ServerStatus,
    UpdateStrategy,
    VersionTarget,
)
from resharder.client.operator.connection import one_of, server_name
from resharder.client.operator.convert import answer, keywords
from resharder.client.operator.queries import RESTART, OperatorQueries
from resharder.client.operator.states import RequestHandling, ServeAhead, ServerPower, TargetKind
from resharder.v1 import operator_pb2, resources_pb2

_POLL = 0.2
_SLEEP = {1: ServerPower.ASLEEP_1, 2: ServerPower.ASLEEP_2}


def _ignore(fleet: FleetStatus, servers: Sequence[ServerStatus]) -> None: ...


class FleetCommands(OperatorQueries):
    """Commands named as in `resharder`. Each `wait_` method waits for the end of one of them."""

    def set_fleet(
        self,
        name: str,
        *,
        target: VersionTarget | None = None,
        strategy: UpdateStrategy | None = None,
        pause_mode: RequestHandling | None = None,
        max_skew: int | None = None,
        serve_ahead: bool | ServeAhead | None = None,
        model: str = "",
        accept_refused: bool = False,
    ) -> FleetStatus:
        """Change the given settings of a fleet; with `model`, create it if it does not exist.

        Args:
            name: Name of the fleet.
            model: Model of a new fleet.
            target: Version to serve.
            strategy: Order in which an update reaches the servers.
            pause_mode: Treatment of requests in flight.
            max_skew: Bound on the difference between versions served at the same time; 0 is no bound.
            serve_ahead: Whether servers take versions before READY, over the direct path; `ServeAhead.AUTO` returns to the
                default, which is to take them in a fleet that moves all at once without a skew bound.
            accept_refused: Permit versions again that a failed move or a rollback has refused.

        Returns:
            The fleet after the change.
        """
        fleet = resources_pb2.Fleet(
            name=name,
            model=model,
            target=resources_pb2.VersionTarget(**keywords(target)) if target else None,
            strategy=resources_pb2.UpdateStrategy(**keywords(strategy)) if strategy else None,
            pause_mode=pause_mode.value if pause_mode else None,
            max_skew=max_skew or 0,
            serve_ahead=serve_ahead is True or serve_ahead == ServeAhead.ON,
            serve_ahead_setting=serve_ahead.value if isinstance(serve_ahead, ServeAhead) else None,
        )
        request = operator_pb2.UpdateFleetRequest(fleet=fleet, accept_refused=accept_refused)
        given = {
            "target": target,
            "strategy": strategy,
            "pause_mode": pause_mode,
            "max_skew": max_skew,
            "serve_ahead_setting" if serve_ahead == ServeAhead.AUTO else "serve_ahead": serve_ahead,
        }
        request.update_mask.paths.extend(field for field, value in given.items() if value is not None)
        return self._fleet(self._stub.UpdateFleet, request)

    def update(self, fleet: str = "", version: int | None = None, *, accept_refused: bool = False) -> FleetStatus:
        """Set a fleet's target to one version, or to the latest version, now and in future.

        Args:
            fleet: Name of the fleet; may be omitted if the daemon has one.
            version: Number of the version; None follows the latest.
            accept_refused: Permit refused versions again.

        Returns:
            The fleet after the change, for `wait_moved`.
        """
        found = self.fleet(fleet)
        if version is not None:
            target = VersionTarget(TargetKind.NUMBER, version)
        else:
            every = found.target.every_seconds if found.target.kind == TargetKind.LATEST else 0.0
            target = VersionTarget(TargetKind.LATEST, every_seconds=every)
        return self.set_fleet(found.name, target=target, accept_refused=accept_refused)

    def pin(self, fleet: str = "", version: int | None = None) -> FleetStatus:
        """Pin a fleet to a version until `update`.

        Args:
            fleet: Name of the fleet; may be omitted if the daemon has one.
            version: Number of the version; None is the one served now.

        Returns:
            The fleet after the change.

        Raises:
            UsageError: The fleet serves no version.
        """
        found = self.fleet(fleet)
        number = version or found.settled_version
        if not number:
            raise UsageError(f"expected a version's number: fleet {found.name} serves none yet")
        return self.set_fleet(found.name, target=VersionTarget(TargetKind.NUMBER, number))

    def rollback(self, fleet: str = "", version: int | None = None, *, reason: str = "", request_id: str = "") -> FleetStatus:
        """Return a fleet to an earlier version, and refuse the later ones.

        Args:
            fleet: Name of the fleet; may be omitted if the daemon has one.
            version: Number of the version; None is the newest READY one before the one served now.
            reason: Reason for the journal.
            request_id: Id of the request; a repetition with the same id changes nothing. By default a new one.

        Returns:
            The fleet after the change, for `wait_moved`.
        """
        request = operator_pb2.RollBackFleetRequest(
            fleet=self.fleet(fleet).name, version=version or 0, reason=reason, request_id=request_id or uuid.uuid4().hex
        )
        return self._fleet(self._stub.RollBackFleet, request)

    def approve(self, fleet: str = "", *, reason: str = "", move: int | None = None) -> FleetStatus:
        """Continue a move that waits or has stopped.

        Args:
            fleet: Name of the fleet; may be omitted if the daemon has one.
            reason: Reason for the journal.
            move: Id of the move; None is the current one.

        Returns:
            The fleet after the change, for `wait_moved`.

        Raises:
            NotFound: The fleet has never moved.
            Refused: The fleet is at another move, or its move has ended.
        """
        return self._decide(fleet, True, reason, move)

    def back(self, fleet: str = "", *, reason: str = "", move: int | None = None) -> FleetStatus:
        """End a move by returning to the previous version, and refuse the new one.

        Args:
            fleet: Name of the fleet; may be omitted if the daemon has one.
            reason: Reason for the journal.
            move: Id of the move; None is the current one.

        Returns:
            The fleet after the change, for `wait_moved`.

        Raises:
            NotFound: The fleet has never moved.
            Refused: The fleet is at another move, or its move has ended.
        """
        return self._decide(fleet, False, reason, move)

    def sleep(self, fleet: str, server: str = "", *, level: int = 1) -> FleetStatus:
        """Free the GPUs of one server, or of all in the fleet, including later ones.

        Args:
            fleet: Name of the fleet.
            server: Id of the server; empty for all.
            level: Sleep level of vLLM: 1 moves weights to host memory, 2 drops them.

        Returns:
            The fleet after the change, for `wait_power`.

        Raises:
            UsageError: `level` is neither 1 nor 2.
        """
        if level not in _SLEEP:
            raise UsageError(f"expected sleep level 1 or 2, got {level}")
        return self._set_power(fleet, server, _SLEEP[level])

    def wake(self, fleet: str, server: str = "", *, tag: Literal["weights"] | None = None) -> FleetStatus:
        """Wake one server or the whole fleet.

        Args:
            fleet: Name of the fleet.
            server: Id of the server; empty for all.
            tag: `weights` restores the weights only; a second `wake` restores the KV cache.

        Returns:
            The fleet after the change, for `wait_power`.
        """
        return self._set_power(fleet, server, ServerPower.WEIGHTS_AWAKE if tag else ServerPower.AWAKE)

    def drain(self, fleet: str, server: str = "") -> FleetStatus:
        """Close one server, or all present servers of the fleet, to new requests.

        Args:
            fleet: Name of the fleet.
            server: Id of the server; empty for all.

        Returns:
            The fleet after the change, for `wait_drained`.
        """
        return self._set_drained(fleet, server, True)

    def resume(self, fleet: str, server: str = "") -> FleetStatus:
        """Open drained servers to requests again.

        Args:
            fleet: Name of the fleet.
            server: Id of the server; empty for all.

        Returns:
            The fleet after the change, for `wait_serving`.
        """
        return self._set_drained(fleet, server, False)

    def wait_moved(
        self, asked: FleetStatus, listener: waiting.FleetListener = _ignore, *, timeout: float | None = None
    ) -> FleetStatus:
        """Wait until the move of a command has ended and the servers have reached the target.

        Servers that are lost, asleep or drained are not awaited. A move that loses servers ends STOPPED or FAILED, with their
        names. `went_well` judges the result.

        Args:
            asked: The command's answer.
            listener: Called with the fleet and its servers at every poll.
            timeout: Bound in seconds; None is no bound.

        Returns:
            The fleet at the end.

        Raises:
            WaitTimeout: `timeout` seconds have passed.
        """
        return self._until(waiting.moved(asked), asked.name, "the move's end", listener, timeout)

    def wait_power(
        self,
        fleet: str,
        power: ServerPower,
        server: str = "",
        listener: waiting.FleetListener = _ignore,
        *,
        timeout: float | None = None,
    ) -> FleetStatus:
        """Wait until servers are in a power state; with AWAKE, until they serve.

        Args:
            fleet: Name of the fleet.
            power: Power state.
            server: Id of the server; empty for all.
            listener: Called with the fleet and its servers at every poll.
            timeout: Bound in seconds; None is no bound.

        Returns:
            The fleet.

        Raises:
            WaitTimeout: `timeout` seconds have passed.
        """
        return self._until(waiting.powered(power, server_name(server)), fleet, power.value, listener, timeout)

    def wait_drained(
        self, fleet: str, server: str = "", listener: waiting.FleetListener = _ignore, *, timeout: float | None = None
    ) -> FleetStatus:
        """Wait until drained servers have answered their last request.

        Args:
            fleet: Name of the fleet.
            server: Id of the server; empty for all.
            listener: Called with the fleet and its servers at every poll.
            timeout: Bound in seconds; None is no bound.

        Returns:
            The fleet.

        Raises:
            WaitTimeout: `timeout` seconds have passed.
        """
        return self._until(waiting.drained(server_name(server)), fleet, "the last answers", listener, timeout)

    def wait_serving(
        self, fleet: str, server: str = "", listener: waiting.FleetListener = _ignore, *, timeout: float | None = None
    ) -> FleetStatus:
        """Wait until servers serve or sleep.

        Args:
            fleet: Name of the fleet.
            server: Id of the server; empty for all.
            listener: Called with the fleet and its servers at every poll.
            timeout: Bound in seconds; None is no bound.

        Returns:
            The fleet.

        Raises:
            WaitTimeout: `timeout` seconds have passed.
        """
        return self._until(waiting.serving(server_name(server)), fleet, "SERVING", listener, timeout)

    def delete_fleet(self, fleet: str) -> None:
        """Delete a fleet without servers. A model's default fleet has default settings from then on.

        Args:
            fleet: Name of the fleet.

        Raises:
            Refused: The fleet has servers.
            NotFound: No such fleet.
        """
        self._call(self._stub.DeleteFleet, operator_pb2.DeleteFleetRequest(fleet=fleet))

    def _decide(self, fleet: str, go_on: bool, reason: str, move: int | None) -> FleetStatus:
        found = self.fleet(fleet)
        if move is None and found.move is None:
            raise NotFound(f"expected a move to decide, fleet {found.name} has made none")
        id = move if move is not None else found.move.id if found.move else 0
        request = operator_pb2.DecideMoveRequest(fleet=found.name, move=id, go_on=go_on, reason=reason)
        return self._fleet(self._stub.DecideMove, request)

    def _set_power(self, fleet: str, server: str, power: ServerPower) -> FleetStatus:
        request = operator_pb2.SetPowerRequest(fleet=fleet, server=server_name(server), power=power.value)
        return self._fleet(self._stub.SetPower, request)

    def _set_drained(self, fleet: str, server: str, drained: bool) -> FleetStatus:
        request = operator_pb2.SetDrainedRequest(fleet=fleet, server=server_name(server), drained=drained)
        return self._fleet(self._stub.SetDrained, request)

    def _fleet(self, method: Callable[..., Any], request: Any) -> FleetStatus:
        return answer(FleetStatus, self._call(method, request))

    def _until(
        self, done: waiting.Condition, name: str, what: str, listener: waiting.FleetListener, timeout: float | None
    ) -> FleetStatus:
        end = None if timeout is None else time.monotonic() + timeout
        while True:
            fleet = one_of({fleet.name: fleet for fleet in self._fleets(RESTART)}, name, "fleet")
            servers = self._servers(name, RESTART)
            listener(fleet, servers)
            if done(fleet, servers):
                return fleet
            if end is not None and time.monotonic() > end:
                raise WaitTimeout(f"fleet {name}: expected {what} within {timeout:g} s; {waiting.why(fleet, servers)}")
            time.sleep(_POLL)
