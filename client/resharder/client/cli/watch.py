"""`watch`: the output of `status`, live on a terminal, else a snapshot for each change."""

import re
import sys
import time
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Annotated

import typer
from resharder.client.cli.app import Endpoint, Section, Wide, command
from resharder.client.cli.output import one_line
from resharder.client.cli.show import picture, state
from resharder.client.cli.terminal import console, end_with_reader, say
from resharder.client.errors import DaemonUnreachable
from resharder.client.operator import Operator
from rich.console import Group
from rich.live import Live


@command(Section.LOOK)
def watch(
    every: Annotated[float, typer.Option("--every", metavar="SECONDS", min=0.1, help="Between two looks.")] = 1.0,
    wide: Wide = False,
    endpoint: Endpoint = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object a line, for every change.")] = False,
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
    look()
    _until_interrupted(lambda: (_live if sys.stdout.isatty() else _changes)(lambda: _or_gone(look), every))


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
            say(f"{datetime.now(UTC):%Y-%m-%d %H:%M:%SZ}")
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
            say(one_line({"watched": f"{datetime.now(UTC):%Y-%m-%dT%H:%M:%SZ}", **now}))
            before = found
        time.sleep(every)


def _or_gone(look: Callable[[], Group]) -> Group:
    try:
        return look()
    except DaemonUnreachable as error:
        return Group(str(error))
