"""`resharder probe`: whether this server should receive requests, for readiness probes and load balancers."""

import os
import urllib.error
import urllib.request
from typing import Annotated

import typer
from resharder.client.cli import completion
from resharder.client.cli.app import AsJson, Endpoint, Section, command
from resharder.client.cli.output import print_json
from resharder.client.cli.server_lag import ServerLag, server_lag
from resharder.client.cli.terminal import say
from resharder.client.errors import DaemonUnreachable, NotFound, UsageError, WaitTimeout
from resharder.client.operator import Operator
from resharder.client.operator.operator import server_name

_SECONDS = 3.0  # bound on each answer: probes have little time
_REGISTERING_SECONDS = 30.0
_NOT_READY = 1


@command(Section.CHECK)
def probe(
    url: Annotated[str, typer.Option("--url", metavar="URL", help="Also asked: must answer 200. vLLM's own /health.")] = "",
    max_lag_versions: Annotated[int, typer.Option(metavar="N", min=0, help="Versions it may be behind; 0: any number.")] = 0,
    max_lag_seconds: Annotated[float, typer.Option(metavar="S", min=0, help="Seconds it may be behind; 0: any time.")] = 0,
    server: Annotated[
        str, typer.Option("--server", metavar="ID", help="RESHARDER_SERVER_ID, if not given.", autocompletion=completion.servers)
    ] = "",
    endpoint: Endpoint = None,
    as_json: AsJson = False,
) -> None:
    """Check whether a server should receive requests. Exits 1 if not.

    It should not while its gate is closed (--url), or while it lags behind its target by more than the bounds
    and others of its fleet are closer. A server that waits for its turn in a move does not lag. If the daemon cannot be
    reached, only the gate decides. A server that is unknown to the daemon is not ready.
    """
    if not url and not (server or os.environ.get("RESHARDER_SERVER_ID")):
        raise UsageError("expected a server or an address, got neither: pass --server or --url, or set RESHARDER_SERVER_ID")
    ready, reason = _gate(url) if url else (True, "")
    found: ServerLag | None = ServerLag()
    if ready and (max_lag_versions or max_lag_seconds or not url):
        found, reason = _look(server or os.environ.get("RESHARDER_SERVER_ID", ""), endpoint, gated=bool(url))
        ready = found is not None and not found.beyond(max_lag_versions, max_lag_seconds)
    lag = found or ServerLag()
    if as_json:
        print_json({"ready": ready, "reason": reason, "lag_versions": lag.versions, "lag_seconds": lag.seconds})
    else:
        say(f"{'ready' if ready else 'not ready'}{': ' if reason else ''}{reason}")
    raise typer.Exit(0 if ready else _NOT_READY)


def _gate(url: str) -> tuple[bool, str]:
    """Return whether the URL answers 200, and the answer if not. Raises UsageError for an invalid URL."""
    if not url.startswith(("http://", "https://")):
        raise UsageError(f"expected an http or https address in --url, got {url!r}")
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(url, timeout=_SECONDS):
            return True, ""
    except urllib.error.HTTPError as error:
        with error:
            return False, f"{url} answers {error.code}: {error.read(300).decode(errors='replace').strip()}"
    except OSError as error:
        return False, f"{url} does not answer: {error}"


def _look(server: str, endpoint: str | None, *, gated: bool) -> tuple[ServerLag | None, str]:
    """Return a server's lag, and a sentence. Raises UsageError, and Refused if the daemon refuses the query.

    The lag is None for a server that is unknown to the daemon, and, unless `gated`, if the daemon cannot be reached.
    """
    if not server:
        raise UsageError("expected a server, got none: pass --server or set RESHARDER_SERVER_ID")
    try:
        with Operator(endpoint, timeout=_SECONDS, connect_timeout=0) as operator:
            try:
                found = operator.server(server)
            except NotFound:
                if gated and _has_just_started(operator):
                    return ServerLag(), "the gate alone decides: the daemon has just started"
                return None, f"{server_name(server)} is unknown to the daemon"
            if found.version == found.wanted_version:
                return ServerLag(), f"{found.name} serves version {found.version}, as it is to"
            behind = server_lag(
                found,
                operator.fleet(found.fleet),
                operator.servers(found.fleet),
                operator.versions_after(min(found.version, found.wanted_version), model=found.model),
                operator.daemon().time,
            )
    except (DaemonUnreachable, WaitTimeout) as error:
        return (ServerLag(), f"the gate alone decides: {error}") if gated else (None, str(error))
    far = f"{behind.versions} behind for {behind.seconds:.0f} s" if behind.versions else "no server of its fleet is closer"
    return behind, f"{found.name} serves version {found.version}, is to serve {found.wanted_version}: {far}; {found.reason}"


def _has_just_started(operator: Operator) -> bool:
    """Return whether servers may not have registered yet with a daemon that has restarted."""
    daemon = operator.daemon()
    if daemon.time is None or daemon.start_time is None:
        return False
    return (daemon.time - daemon.start_time).total_seconds() < _REGISTERING_SECONDS
