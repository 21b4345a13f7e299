"""Shell completion of the daemon's names, within a second. Names that would act on the terminal are left out."""

from collections.abc import Callable, Iterable

import typer
from resharder.client.errors import ResharderError
from resharder.client.operator import Operator
from resharder.client.operator.answers import Version

SECONDS = 1.0
Question = Callable[[Operator], Iterable[str]]


def fleets(context: typer.Context, incomplete: str) -> list[str]:
    """Return the names of the daemon's fleets, as suggestions of the shell."""
    return _known(context, incomplete, lambda operator: (fleet.name for fleet in operator.fleets()))


def models(context: typer.Context, incomplete: str) -> list[str]:
    """Return the names of the daemon's models, as suggestions of the shell."""
    return _known(context, incomplete, lambda operator: operator.daemon().models)


def servers(context: typer.Context, incomplete: str) -> list[str]:
    """Return ids of servers: shells break words at other characters."""
    return _known(context, incomplete, lambda operator: (server.name.partition("/")[2] for server in operator.servers()))


def nodes(context: typer.Context, incomplete: str) -> list[str]:
    """Return the ids of the daemon's nodes, as suggestions of the shell."""
    return _known(context, incomplete, lambda operator: (node.name.partition("/")[2] for node in operator.nodes()))


def versions(context: typer.Context, incomplete: str) -> list[str]:
    """Return `latest` and the numbers of READY versions."""
    return [*(["latest"] if "latest".startswith(incomplete) else []), *numbers(context, incomplete)]


def numbers(context: typer.Context, incomplete: str) -> list[str]:
    """Return the numbers of READY versions."""
    ready, model = Version.State.READY, context.params.get("model") or ""
    return _known(context, incomplete, lambda operator: (str(v.number) for v in operator.versions(model) if v.state == ready))


def archived(context: typer.Context, incomplete: str) -> list[str]:
    """Return the numbers of archived versions."""
    model = context.params.get("model") or ""
    return _known(context, incomplete, lambda operator: (str(one.number) for one in operator.archived(model)))


def _known(context: typer.Context, incomplete: str, question: Question) -> list[str]:
    try:
        with Operator(context.params.get("endpoint"), timeout=SECONDS, connect_timeout=0) as operator:
            return sorted({name for name in question(operator) if name.startswith(incomplete) and name.isprintable()})
    except ResharderError:
        return []
