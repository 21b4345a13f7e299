"""`fleet show --watch`: the picture of a fleet's move, as it goes."""

from resharder.client.cli import format
from resharder.client.cli.move_picture import move_lines
from resharder.client.cli.watch import follow
from resharder.client.operator import Operator
from rich.console import Group


def watch_move(fleet: str, endpoint: str | None) -> None:
    """Draw a fleet's last move until Ctrl-C; in a pipe, once for every change."""
    with Operator(endpoint) as operator:

        def look() -> Group:
            found = operator.fleet(fleet)
            return Group(format.outcome(found), *(move_lines(found, operator.servers(found.name)) or ["no move yet"]))

        follow(look, every=1.0)
