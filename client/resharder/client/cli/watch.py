"""The daemon's state, printed once or at every change: `status`, `fleets`, `servers`, `versions`, `events`, `watch`."""

import re
import sys
import time
from collections.abc import Callable, Iterable
from datetime import UTC, datetime
from typing import Annotated

import typer
from resharder.client.cli import complete, format
from resharder.client.cli.app import AsJson, Endpoint, ModelName, Section, Wide, command
from resharder.client.cli.format import event_line, move_lines, time_of
from resharder.client.cli.terminal import alarm, console, end_with_reader, one_line, print_json, print_line, print_table, table
from resharder.client.errors import DaemonUnreachable
from resharder.client.operator import Operator
from resharder.client.operator.answers import Daemon, Fleet, Server
from resharder.client.operator.convert import plain
from resharder.converters.units import size_text as size
from rich.console import Group
from rich.live import Live

OfFleet = Annotated[
    str, typer.Option("--fleet", metavar="NAME", help="Only servers of this fleet.", autocompletion=complete.fleets)
]


def picture(operator: Operator, daemon: Daemon, fleets: list[Fleet], servers: list[Server], wide: bool = False) -> Group:
    """Return the whole state of a daemon, for display: fleets in trouble first."""
    used, limit = size(daemon.store_used_bytes), size(daemon.store_limit_bytes)
    return Group(
        *format.problems(servers, fleets),
        f"daemon {daemon.release} at {operator.endpoint}, started {time_of(daemon.start_time)}",
        f"store {daemon.store_folder}: {used} of {limit} used",
        "",
        table(*format.publisher_table(daemon.publishers), wide),
        "",
        table(format.FLEETS, format.fleet_rows(fleets, servers), wide),
        "",
        table(format.SERVERS, format.server_rows(servers), wide),
    )


def state(daemon: Daemon, fleets: list[Fleet], servers: list[Server]) -> dict[str, object]:
    """Return the whole state of a daemon, for JSON."""
    return {"daemon": plain(daemon), "fleets": [*map(plain, fleets)], "servers": [*map(plain, servers)]}


def print_problems(servers: Iterable[Server], fleets: Iterable[Fleet] = ()) -> None:
    """Print a line for each fleet that has lost or failed servers, or a move that has stopped."""
    for line in format.problems(servers, fleets):
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
    """Show every fleet, those in trouble first: health, target, version, move."""
    with Operator(endpoint) as operator:
        found, servers = operator.fleets(), operator.servers()
    if as_json:
        return print_json({"fleets": [*map(plain, found)]})
    print_problems(servers, found)
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
    print_table(*format.version_table(found, servers), wide)


@command(Section.LOOK)
def events(
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Follow until Ctrl-C, across restarts of the daemon.")] = False,
    last: Annotated[int, typer.Option("--last", metavar="N", min=1, help="Number of past events to print first.")] = 20,
    subject: Annotated[
        str, typer.Option("--subject", metavar="NAME", help="Only events of this resource: servers/ID, fleets/NAME, …")
    ] = "",
    endpoint: Endpoint = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object a line.")] = False,
) -> None:
    """Show events, oldest first: of versions, servers and fleets, and operators' requests."""
    with Operator(endpoint) as operator:
        operator.daemon()  # an unreachable daemon is an error at once
        if follow:
            end_with_reader()
        try:
            for event in operator.events(last=last, subject=subject, follow=follow):
                if as_json:
                    print_line(one_line(plain(event)))
                else:
                    console(wide=True).print(event_line(event))
                    sys.stdout.flush()
        except KeyboardInterrupt:
            if not follow:
                raise


@command(Section.LOOK)
def watch(
    every: Annotated[float, typer.Option("--every", metavar="SECONDS", min=0.1, help="Time between two updates.")] = 1.0,
    wide: Wide = False,
    endpoint: Endpoint = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object a line, for every change.")] = False,
) -> None:
    """Show `status`, updated until Ctrl-C; in a pipe, once for every change."""
    with Operator(endpoint) as operator:

        def facts() -> dict[str, object]:
            return state(operator.daemon(), operator.fleets(), operator.servers())

        def look() -> Group:
            return picture(operator, operator.daemon(), operator.fleets(), operator.servers(), wide)

        if as_json:
            facts()  # an unreachable daemon is an error here, and a line of the output later
            return _until_interrupted(lambda: _json_lines(facts, every))
        follow(look, every)


def follow(look: Callable[[], Group], every: float) -> None:
    """Draw `look` until Ctrl-C: live on a terminal, else once for every change. Raises DaemonUnreachable only at first."""
    lasting = Lasting(look)
    _until_interrupted(lambda: (_live if sys.stdout.isatty() else _changes)(lasting, every))


class Lasting:
    """The last picture, with a line above it since when the daemon is away. The constructor raises DaemonUnreachable."""

    def __init__(self, look: Callable[[], Group]) -> None:
        self._look, self._picture, self._seen = look, look(), datetime.now(UTC)

    def __call__(self) -> Group:
        try:
            self._picture, self._seen = self._look(), datetime.now(UTC)
        except DaemonUnreachable as error:
            away = alarm(f"the daemon last answered at {time_of(self._seen)}; below is what was known then: {error}")
            return Group(away, "", self._picture)
        return self._picture


def _until_interrupted(work: Callable[[], None]) -> None:
    end_with_reader()
    try:
        work()
    except KeyboardInterrupt:
        return


def _live(look: Callable[[], Group], every: float) -> None:
    with Live(look(), console=console(), screen=True, auto_refresh=False) as live:
        while True:
            time.sleep(every)
            live.update(look(), refresh=True)


def _changes(look: Callable[[], Group], every: float) -> None:
    before = ""
    while True:
        with (to := console()).capture() as captured:
            to.print(look())
        if (now := captured.get()) != before:
            print_line(f"{datetime.now(UTC):%Y-%m-%d %H:%M:%SZ}")
            to.file.write(f"{now}\n")
            to.file.flush()
            before = now
        time.sleep(every)


def _json_lines(look: Callable[[], dict[str, object]], every: float) -> None:
    """Print the state for every change; the daemon's clock and explanations that count seconds are no change."""
    before = ""
    while True:
        try:
            now = look()
        except DaemonUnreachable as error:
            now = {"error": str(error)}
        found = re.sub(r'"(reason|time|lease_expire_time)":"[^"]*"', "", one_line(now))
        if found != before:
            print_line(one_line({"watched": f"{datetime.now(UTC):%Y-%m-%dT%H:%M:%SZ}", **now}))
            before = found
        time.sleep(every)


def watch_move(fleet: str, endpoint: str | None) -> None:
    """Draw a fleet's last move until Ctrl-C; in a pipe, once for every change."""
    with Operator(endpoint) as operator:

        def look() -> Group:
            found = operator.fleet(fleet)
            return Group(
                format.outcome(found), *(move_lines(found, operator.servers(found.name), console().width) or ["no move yet"])
            )

        follow(look, every=1.0)
