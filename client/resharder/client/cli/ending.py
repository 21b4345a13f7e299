"""How a command on a fleet ends: at once, or with `--wait` when what it asked for has come."""

import sys
from collections.abc import Callable, Sequence

import typer
from resharder.client.cli import words
from resharder.client.cli.app import WENT_WRONG
from resharder.client.cli.printing import plain, print_json
from resharder.client.operator import Operator
from resharder.client.waiting import Progress, went_well
from resharder.v1 import resources_pb2

Fleet = resources_pb2.Fleet
Waiting = Callable[[Progress], resources_pb2.Fleet]


def end_move(
    operator: Operator, asked: resources_pb2.Fleet, wait: bool, timeout: float, as_json: bool, back: bool = False
) -> None:
    """Exits WENT_WRONG if the move ended FAILED or STOPPED; `back`: that it ends FAILED was asked for."""
    fleet = operator.wait_moved(asked, told(as_json), timeout) if wait else asked
    show(fleet, as_json)
    as_asked = fleet.move.state == resources_pb2.Move.FAILED if back else went_well(asked, fleet)
    if wait and not as_asked:
        raise typer.Exit(WENT_WRONG)


def end(asked: resources_pb2.Fleet, wait: Waiting | None, as_json: bool) -> None:
    show(wait(told(as_json)) if wait else asked, as_json)


def show(fleet: resources_pb2.Fleet, as_json: bool) -> None:
    if as_json:
        return print_json(plain(fleet))
    print(words.outcome(fleet))


def told(silent: bool) -> Progress:
    """Says on standard error where the fleet is, one line for every change."""
    before = ""

    def tell(fleet: resources_pb2.Fleet, servers: Sequence[resources_pb2.Server]) -> None:
        nonlocal before
        line = words.progress(fleet, servers)
        if line != before and not silent:
            print(line, file=sys.stderr, flush=True)
        before = line

    return tell
