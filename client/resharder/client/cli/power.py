"""Commands for sleep and wake, drain and resume, of a fleet or one server."""

from enum import Enum
from typing import Annotated

import typer
from resharder.client.cli import completion
from resharder.client.cli.app import AsJson, Endpoint, FleetName, Section, Timeout, Wait, command
from resharder.client.cli.output import print_json
from resharder.client.cli.terminal import say
from resharder.client.cli.wait import Until, maintain
from resharder.client.errors import UsageError
from resharder.client.operator import Operator
from resharder.client.operator.answers import ServerPower

ServerName = Annotated[
    str, typer.Option("--server", metavar="ID", help="This one alone, by its id.", autocompletion=completion.servers)
]


class Tag(str, Enum):
    """Values of --tag: vLLM's tag of the memory to wake."""

    WEIGHTS = "weights"


@command(Section.MAINTAIN)
def sleep(
    fleet: FleetName = "",
    server: ServerName = "",
    level: Annotated[
        int,
        typer.Option("--level", min=1, max=2, help="Weights come back from 1: host memory; 2: the daemon."),
    ] = 1,
    wait: Wait = False,
    timeout: Timeout = 0,
    endpoint: Endpoint = None,
    as_json: AsJson = False,
) -> None:
    """Free the GPUs of servers: they answer 503 until `wake`. For a fleet, later servers sleep too."""
    _require_name(fleet, server)
    power = ServerPower.ASLEEP_1 if level == 1 else ServerPower.ASLEEP_2
    maintain(
        lambda operator, name, one: operator.sleep(name, one, level=level),
        _at(power),
        fleet, server, wait, timeout, endpoint, as_json,
    )  # fmt: skip


@command(Section.MAINTAIN)
def forget(
    server: Annotated[str, typer.Argument(metavar="ID", help="A lost server.", autocompletion=completion.servers)],
    endpoint: Endpoint = None,
    as_json: AsJson = False,
) -> None:
    """Forget a lost server now, instead of `forget_seconds` after its loss. If it returns, it is registered again."""
    with Operator(endpoint) as operator:
        operator.forget(server)
    print_json({"forgotten": server}) if as_json else say(f"{server}: forgotten")


@command(Section.MAINTAIN)
def wake(
    fleet: FleetName = "",
    server: ServerName = "",
    tag: Annotated[Tag | None, typer.Option("--tag", help="Only these; `wake` without it brings the rest.")] = None,
    wait: Wait = False,
    timeout: Timeout = 0,
    endpoint: Endpoint = None,
    as_json: AsJson = False,
) -> None:
    """Wake servers. They serve after their fleet's current version is installed and verified."""
    maintain(
        lambda operator, name, one: operator.wake(name, one, tag="weights" if tag else None),
        _at(ServerPower.WEIGHTS_AWAKE if tag else ServerPower.AWAKE),
        fleet, server, wait, timeout, endpoint, as_json,
    )  # fmt: skip


@command(Section.MAINTAIN)
def drain(
    fleet: FleetName = "",
    server: ServerName = "",
    wait: Wait = False,
    timeout: Timeout = 0,
    endpoint: Endpoint = None,
    as_json: AsJson = False,
) -> None:
    """Before maintenance: accept no new requests; those in flight complete. --wait until the last one has."""
    _require_name(fleet, server)
    maintain(
        Operator.drain,
        lambda operator, name, one, listener, seconds: operator.wait_drained(name, one, listener, timeout=seconds),
        fleet, server, wait, timeout, endpoint, as_json,
    )  # fmt: skip


@command(Section.MAINTAIN)
def resume(
    fleet: FleetName = "",
    server: ServerName = "",
    wait: Wait = False,
    timeout: Timeout = 0,
    endpoint: Endpoint = None,
    as_json: AsJson = False,
) -> None:
    """After `drain`: accept requests again."""
    maintain(
        Operator.resume,
        lambda operator, name, one, listener, seconds: operator.wait_serving(name, one, listener, timeout=seconds),
        fleet, server, wait, timeout, endpoint, as_json,
    )  # fmt: skip


def _at(power: ServerPower) -> Until:
    return lambda operator, name, one, listener, seconds: operator.wait_power(name, power, one, listener, timeout=seconds)


def _require_name(fleet: str, server: str) -> None:
    """Guard against taking all servers out of service by omission. Raises UsageError."""
    if not fleet and not server:
        raise UsageError("expected --server ID, or --fleet NAME for all of its servers: they stop answering")
