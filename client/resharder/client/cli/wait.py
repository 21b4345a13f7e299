"""End of a command on a fleet: at once, or with `--wait` after its effect."""

from collections.abc import Callable, Iterable, Sequence

import typer
from resharder.client.cli import format
from resharder.client.cli.app import WENT_WRONG
from resharder.client.cli.output import plain, print_json
from resharder.client.cli.terminal import say, tell
from resharder.client.errors import UsageError
from resharder.client.operator import Operator
from resharder.client.operator.answers import FleetStatus, MovePhase, ServerState, ServerStatus
from resharder.client.operator.waiting import FleetListener, went_well

Act = Callable[[Operator, str, str], FleetStatus]
"""Function of the fleet's name, and servers/{id} or nothing for all of them."""
Until = Callable[[Operator, str, str, FleetListener, float | None], object]
"""The same, with a listener and seconds."""


def end_move(operator: Operator, asked: FleetStatus, wait: bool, timeout: float, as_json: bool, back: bool = False) -> None:
    """Exit WENT_WRONG if the move ended FAILED or STOPPED; with `back`, unless it ended FAILED."""
    wait = wait or timeout > 0
    fleet = operator.wait_moved(asked, _on_change(format.progress, as_json), timeout=timeout or None) if wait else asked
    show(fleet, as_json)
    failed = fleet.move is not None and fleet.move.state == MovePhase.FAILED
    as_asked = failed if back else went_well(asked, fleet)
    if wait and not as_asked:
        raise typer.Exit(WENT_WRONG)


def show(fleet: FleetStatus, as_json: bool) -> None:
    """Print a fleet, as JSON or as a line about its target and version."""
    if as_json:
        return print_json(plain(fleet))
    say(format.outcome(fleet))


def maintain(
    act: Act, until: Until, fleet: str, server: str, wait: bool, timeout: float, endpoint: str | None, as_json: bool
) -> None:
    """Act on the fleet or the server, wait if requested, and print the servers concerned.

    Exits WENT_WRONG if a server was lost meanwhile, since the others alone fulfil the condition.
    """
    with Operator(endpoint) as operator:
        name, one = _target(operator, fleet, server)

        def about(servers: Iterable[ServerStatus]) -> list[ServerStatus]:
            return [server for server in servers if one in ("", server.name)]

        before = {each.name for each in about(operator.servers(name)) if each.state != ServerState.LOST}
        act(operator, name, one)
        if wait or timeout:
            until(operator, name, one, _on_change(lambda fleet, servers: format.states(about(servers)), as_json), timeout or None)
        found = about(operator.servers(name))
    if as_json:
        print_json({"servers": [*map(plain, found)]})
    for each in found if not as_json else ():
        say(f"{each.name} {format.state(each)}: {each.reason}")
    if any(each.name in before and each.state == ServerState.LOST for each in found):
        raise typer.Exit(WENT_WRONG)


def _target(operator: Operator, fleet: str, server: str) -> tuple[str, str]:
    """Return (fleet, servers/{id} or empty). Raises UsageError, NotFound."""
    if not server:
        return operator.fleet(fleet).name, ""
    found = operator.server(server)
    if fleet and fleet != found.fleet:
        raise UsageError(f"expected a server of fleet {fleet}, {found.name} is of {found.fleet}")
    return found.fleet, found.name


def _on_change(line: Callable[[FleetStatus, Sequence[ServerStatus]], str], silent: bool) -> FleetListener:
    """Return a listener that prints a line to standard error whenever it changes."""
    before = ""

    def listener(fleet: FleetStatus, servers: Sequence[ServerStatus]) -> None:
        nonlocal before
        now = line(fleet, servers)
        if now != before and not silent:
            tell(now)
        before = now

    return listener
