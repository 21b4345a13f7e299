"""Commands that show state: status, servers, versions, events."""

from typing import Annotated

import typer
from resharder.client.cli import completion, format
from resharder.client.cli.app import AsJson, Endpoint, ModelName, Section, command
from resharder.client.cli.output import console, one_line, plain, print_json, print_table, size, table, time_of
from resharder.client.operator import Operator
from resharder.client.operator.answers import DaemonStatus, FleetStatus, ServerStatus
from rich.console import Group

OfFleet = Annotated[str, typer.Option("--fleet", metavar="NAME", help="Only of this fleet.", autocompletion=completion.fleets)]


def picture(operator: Operator, daemon: DaemonStatus, fleets: list[FleetStatus], servers: list[ServerStatus]) -> Group:
    """Return the whole state of a daemon, for display."""
    used, limit = size(daemon.store_used_bytes), size(daemon.store_limit_bytes)
    return Group(
        f"daemon {daemon.release} at {operator.endpoint}, started {time_of(daemon.start_time)}",
        f"store {daemon.store_folder}: {used} of {limit} used",
        "",
        table(format.PUBLISHERS, format.publisher_rows(daemon.publishers)),
        "",
        table(format.FLEETS, format.fleet_rows(fleets, servers)),
        "",
        table(format.SERVERS, format.server_rows(servers)),
    )


@command(Section.LOOK)
def status(endpoint: Endpoint = None, as_json: AsJson = False) -> None:
    """Show the daemon, store, publishers, fleets, and each server with the reason of its state."""
    with Operator(endpoint) as operator:
        daemon, fleets, servers = operator.daemon(), operator.fleets(), operator.servers()
        if as_json:
            return print_json({"daemon": plain(daemon), "fleets": [*map(plain, fleets)], "servers": [*map(plain, servers)]})
        console().print(picture(operator, daemon, fleets, servers))


@command(Section.LOOK)
def servers(fleet: OfFleet = "", endpoint: Endpoint = None, as_json: AsJson = False) -> None:
    """Show every vLLM server: version, target, and the reason of its state."""
    with Operator(endpoint) as operator:
        found = operator.servers(operator.fleet(fleet).name if fleet else "")
    if as_json:
        return print_json({"servers": [*map(plain, found)]})
    print_table(format.SERVERS, format.server_rows(found))


@command(Section.LOOK)
def versions(model: ModelName = "", endpoint: Endpoint = None, as_json: AsJson = False) -> None:
    """Show every version, newest first: state, step, size, servers."""
    with Operator(endpoint) as operator:
        found = sorted(operator.versions(model), key=lambda v: (v.model, -v.number))
        servers = [] if as_json else operator.servers()
    if as_json:
        return print_json({"versions": [*map(plain, found)]})
    print_table(format.VERSIONS, format.version_rows(found, servers))


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
        try:
            for event in operator.events(last=last, subject=subject, follow=follow):
                print(one_line(plain(event)) if as_json else format.event_line(event), flush=True)
        except KeyboardInterrupt:
            if not follow:
                raise
