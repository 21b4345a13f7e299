"""Profiles of installs on a production server."""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer
from resharder.client.cli import completion
from resharder.client.cli.app import AsJson, Endpoint, Section, app
from resharder.client.cli.output import print_json
from resharder.client.cli.terminal import console, say
from resharder.client.errors import NotFound
from resharder.client.operator import Operator
from resharder.client.operator.answers import ServerState, ServerStatus, WorkerProfile

profile = typer.Typer(help="Where the time goes: an install under torch.profiler.", no_args_is_help=True)
app.add_typer(profile, name="profile", rich_help_panel=Section.CHECK)


@profile.callback()
def _group() -> None: ...


@profile.command("install")
def install(
    name: Annotated[
        str,
        typer.Argument(metavar="SERVER", help="Its id, or a fleet: its servers in turn.", autocompletion=completion.servers),
    ],
    out: Annotated[Path, typer.Option("--out", metavar="DIR", help="Where the files go.")] = Path("."),
    timeout: Annotated[float, typer.Option("--timeout", metavar="SECONDS", min=1, max=3600, help="For each server.")] = 600,
    endpoint: Endpoint = None,
    as_json: AsJson = False,
) -> None:
    """Repeat a server's install, with every worker under torch.profiler.

    Like any install, it pauses the server and is verified. Writes SERVER-rankN.json.gz, a trace for Perfetto or
    chrome://tracing, and SERVER-rankN.txt, a table, for each worker; prints the table of the slowest.
    """
    out.mkdir(parents=True, exist_ok=True)
    found: list[dict[str, object]] = []
    with Operator(endpoint) as operator:
        for server in _servers(operator, name):
            profiles = sorted(operator.profile_install(server, timeout=timeout), key=lambda one: one.rank)
            found += [_written(out, server, one) for one in profiles]
            if not as_json:
                _show(operator.server(server), profiles)
    if as_json:
        print_json({"profiles": found})
    else:
        for one in found:
            say(str(one["error"] or one["trace"]))
    if any(one["error"] for one in found):
        raise typer.Exit(4)


def _servers(operator: Operator, name: str) -> list[str]:
    """Return the ids of servers. Raises NotFound."""
    servers = operator.servers()
    ids = {server.name.partition("/")[2] for server in servers}
    if (id := name.removeprefix("servers/")) in ids:
        return [id]
    fleet = name.removeprefix("fleets/")
    chosen = [server.name.partition("/")[2] for server in servers if server.fleet == fleet and server.state != ServerState.LOST]
    if not chosen:
        raise NotFound(f"expected a server or a fleet with servers, got {name!r}; servers are {', '.join(sorted(ids)) or 'none'}")
    return chosen


def _written(out: Path, server: str, one: WorkerProfile) -> dict[str, object]:
    trace, table = (out / f"{server}-rank{one.rank}.{kind}" for kind in ("json.gz", "txt"))
    if one.trace:
        trace.write_bytes(one.trace)
    if one.table:
        table.write_text(one.table)
    return {
        "server": server,
        "rank": one.rank,
        "install": one.install,
        "trace": str(trace) if one.trace else "",
        "table": str(table) if one.table else "",
        "error": f"worker {one.rank} of {server}: {one.error}" if one.error else "",
    }


def _show(server: ServerStatus, profiles: Sequence[WorkerProfile]) -> None:
    took = {worker.rank: worker.apply_seconds for worker in server.workers}
    slowest = max(profiles, key=lambda one: took.get(one.rank, 0.0))
    seconds = took.get(slowest.rank, 0.0)
    console().print(
        f"{server.name}, worker {slowest.rank} of {len(profiles)}: version {server.version} applied in {seconds:.3f} s"
    )
    for line in slowest.table.split("\n"):
        say(line)
