"""Commands that show state: status, servers, versions, events."""

import sys
from collections.abc import Iterable
from typing import Annotated

import typer
from resharder.client.cli import completion, format
from resharder.client.cli.app import AsJson, Endpoint, ModelName, Section, Wide, command
from resharder.client.cli.output import one_line, plain, print_json, print_table, size, table, time_of
from resharder.client.cli.sentences import event_line
from resharder.client.cli.terminal import console, end_with_reader, say
from resharder.client.operator import Operator
from resharder.client.operator.answers import DaemonStatus, FleetStatus, ServerStatus
from rich.console import Group

OfFleet = Annotated[str, typer.Option("--fleet", metavar="NAME", help="Only of this fleet.", autocompletion=completion.fleets)]


def picture(
    operator: Operator, daemon: DaemonStatus, fleets: list[FleetStatus], servers: list[ServerStatus], wide: bool = False
) -> Group:
    """Return the whole state of a daemon, for display: fleets with lost servers first."""
    used, limit = size(daemon.store_used_bytes), size(daemon.store_limit_bytes)
    return Group(
        *format.problems(servers),
        f"daemon {daemon.release} at {operator.endpoint}, started {time_of(daemon.start_time)}",
        f"store {daemon.store_folder}: {used} of {limit} used",
        "",
        table(format.PUBLISHERS, format.publisher_rows(daemon.publishers), wide),
        "",
        table(format.FLEETS, format.fleet_rows(fleets, servers), wide),
        "",
        table(format.SERVERS, format.server_rows(servers), wide),
    )


def state(daemon: DaemonStatus, fleets: list[FleetStatus], servers: list[ServerStatus]) -> dict[str, object]:
    """Return the whole state of a daemon, for JSON."""
    return {"daemon": plain(daemon), "fleets": [*map(plain, fleets)], "servers": [*map(plain, servers)]}


def print_problems(servers: Iterable[ServerStatus]) -> None:
    """Print a line for each fleet that has lost servers."""
    for line in format.problems(servers):
        console().print(line)


@command(Section.LOOK)
def status(wide: Wide = False, endpoint: Endpoint = None, as_json: AsJson = False) -> None:
    """Show the daemon, store, publishers, fleets, and each server with the reason of its state."""
    with Operator(endpoint) as operator:
        daemon, fleets, servers = operator.daemon(), operator.fleets(), operator.servers()
        if as_json:
            return print_json(state(daemon, fleets, servers))
        console(wide).print(picture(operator, daemon, fleets, servers, wide))


@command(Section.LOOK)
def fleets(wide: Wide = False, endpoint: Endpoint = None, as_json: AsJson = False) -> None:
    """Show every fleet, those with lost servers first: target, version, move, servers."""
    with Operator(endpoint) as operator:
        found, servers = operator.fleets(), operator.servers()
    if as_json:
        return print_json({"fleets": [*map(plain, found)]})
    print_problems(servers)
    print_table(format.FLEETS, format.fleet_rows(found, servers), wide)


@command(Section.LOOK)
def servers(fleet: OfFleet = "", wide: Wide = False, endpoint: Endpoint = None, as_json: AsJson = False) -> None:
    """Show every vLLM server: version, target, and the reason of its state."""
    with Operator(endpoint) as operator:
        found = operator.servers(operator.fleet(fleet).name if fleet else "")
    if as_json:
        return print_json({"servers": [*map(plain, found)]})
    print_problems(found)
    print_table(format.SERVERS, format.server_rows(found), wide)


@command(Section.LOOK)
def versions(model: ModelName = "", wide: Wide = False, endpoint: Endpoint = None, as_json: AsJson = False) -> None:
    """Show every version, newest first: state, step, size, servers."""
    with Operator(endpoint) as operator:
        found = sorted(operator.versions(model), key=lambda v: (v.model, -v.number))
        servers = [] if as_json else operator.servers()
    if as_json:
        return print_json({"versions": [*map(plain, found)]})
    print_table(format.VERSIONS, format.version_rows(found, servers), wide)


@command(Section.LOOK)
def events(
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on until Ctrl-C, over restarts of the daemon too.")] = False,
    last: Annotated[int, typer.Option("--last", metavar="N", min=1, help="How many of the newest to begin with.")] = 20,
    subject: Annotated[
        str, typer.Option("--subject", metavar="NAME", help="Only about this: servers/ID, fleets/NAME, models/M/versions/N, …")
    ] = "",
    endpoint: Endpoint = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object a line.")] = False,
) -> None:
    """Show events, oldest first: of versions, servers and fleets, and operators' requests."""
    with Operator(endpoint) as operator:
        operator.daemon()  # an unreachable daemon is an error at once
        if follow:
            end_with_reader()
        try:
            for event in operator.events(last=last, subject=subject, follow=follow):
                if as_json:
                    say(one_line(plain(event)))
                else:
                    console(wide=True).print(event_line(event))
                    sys.stdout.flush()
        except KeyboardInterrupt:
            if not follow:
                raise
