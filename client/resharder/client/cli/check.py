"""Checks of this host, of layouts in advance, and of one server: `doctor`, `check`, `probe`, `verify`, `profile`."""

import sys
import urllib.error
import urllib.request
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NamedTuple

import typer
from resharder.client import settings
from resharder.client.cli import complete
from resharder.client.cli.app import AsJson, Endpoint, Section, app, command
from resharder.client.cli.terminal import Columns, Row, console, count_up, paint, print_json, print_line, print_table, waiting
from resharder.client.errors import DaemonUnreachable, NotFound, UsageError, WaitTimeout
from resharder.client.operator import Operator
from resharder.client.operator.answers import Fleet, Profile, Server, Verification, Version
from resharder.client.operator.convert import plain
from resharder.client.operator.operator import server_name
from resharder.converters.badges import badge
from resharder.converters.units import size_text as size

if TYPE_CHECKING:
    from resharder.client.tools.links import HostLink


_DIFFERS, _SKIPPED = 1, 4
_PROBE_SECONDS = 3.0  # bound on each answer: probes have little time
_REGISTERING_SECONDS = 30.0
_NOT_READY = 1


@command(Section.CHECK)
def doctor(
    links: Annotated[bool, typer.Option("--links", help="Measure the links to the daemon and to all nodes instead.")] = False,
    node_tls_name: Annotated[
        str,
        typer.Option(
            metavar="NAME",
            envvar=settings.NODE_TLS_PEER_NAME.name,
            help="Name in the certificates of nodes, if not their address.",
        ),
    ] = "",
    endpoint: Endpoint = None,
    as_json: AsJson = False,
) -> None:
    """Check this host, and the daemon from it, and print what to change. Exits 1 for problems."""
    from resharder.client.tools.doctor import examine

    if links:
        return _doctor_links(endpoint, node_tls_name, as_json)
    with waiting("measuring memory, connecting to the daemon", as_json):
        checks = list(examine(endpoint))
    if as_json:
        print_json({"checks": [check._asdict() for check in checks]})
    else:
        rows = ((paint(badge("check", each.verdict)), each.name, each.found, each.hint) for each in checks)
        print_table(Columns(("", "check", "found", "hint"), texts=2, noun="checks"), rows)
    raise typer.Exit(1 if any(check.verdict == "fail" for check in checks) else 0)


def _doctor_links(endpoint: str | None, node_tls_name: str, as_json: bool) -> None:
    from resharder.client.tools.links import measure_links

    with waiting("measuring links", as_json):
        found = measure_links(endpoint, node_tls_name)
    _show_links(found, as_json)


def _show_links(found: "list[HostLink]", as_json: bool) -> None:
    from resharder.client.tools.links import rate_text

    def row(link: "HostLink") -> Row:
        trip = "–" if link.round_trip is None else f"{1000 * link.round_trip:.2f} ms"
        rates = [rate_text(rate.rate) for rate in link.rates] + ["–", "–"]
        target = f"{link.target} ({link.port})" if link.source == "here" else link.target
        verdict = paint(badge("check", link.verdict))
        return verdict, link.source, target, link.address or "–", trip, *rates[:2], link.found, link.hint

    if as_json:
        print_json({"links": [asdict(link) for link in found]})
    else:
        titles = ("", "from", "to", "address", "round trip", "1 stream", "4 streams", "found", "hint")
        print_table(Columns(titles, texts=2, noun="links"), map(row, found))
    raise typer.Exit(1 if any(link.verdict == "fail" for link in found) else 0)


@command(Section.CHECK)
def check(
    config: Annotated[Path, typer.Argument(help="A config.json, or a folder that has one.")],
    world: Annotated[int, typer.Option(help="Trainer ranks; 0: no trainer.")] = 0,
    tp: Annotated[int, typer.Option(help="The trainer's tensor parallel size.")] = 1,
    pp: Annotated[int, typer.Option(help="Pipeline parallel size.")] = 1,
    vpp: Annotated[int, typer.Option(help="Virtual pipeline stages of a rank; 0: none.")] = 0,
    cp: Annotated[int, typer.Option(help="Context parallel size.")] = 1,
    ep: Annotated[int, typer.Option(help="Expert parallel size.")] = 1,
    etp: Annotated[int, typer.Option(help="Expert tensor parallel size; 0: Megatron's default.")] = 0,
    spec: Annotated[str, typer.Option(help="Megatron's layers: local or te (needs TransformerEngine).")] = "local",
    vocab_multiple: Annotated[int, typer.Option(help="The vocabulary is padded to a multiple of this times tp.")] = 128,
    set_: Annotated[list[str] | None, typer.Option("--set", metavar="KEY=JSON", help="For TransformerConfig.")] = None,
    dtype: Annotated[str, typer.Option(help="bfloat16, float16 or float32.")] = "bfloat16",
    server_tp: Annotated[int, typer.Option(help="The server's tensor parallel size; 0: no server.")] = 0,
    server_pp: Annotated[int, typer.Option(help="Its pipeline parallel size.")] = 1,
    server_dp: Annotated[int, typer.Option(help="Its data parallel size.")] = 1,
    server_ep: Annotated[bool, typer.Option("--server-ep", help="Experts are spread over its tp x dp workers.")] = False,
    svg_file: Annotated[
        Path | None, typer.Option("--svg", metavar="FILE", help="Also draw which rank sends what to which worker.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Check in advance whether a trainer and a server fit a model.

    Also shows what each process sends and receives. Reads the config alone: no weights, no GPU. Exits 4 with the
    reason if something does not fit.
    """
    with waiting("importing torch", as_json):
        from resharder.client.tools import check as checking

    if svg_file is not None and not (world and server_tp):
        raise UsageError("--svg draws the bytes from ranks to workers: pass --world and --server-tp too")
    warnings.filterwarnings("ignore", module="megatron")
    settings.VLLM_LOGGING_LEVEL.set_default("ERROR")
    report = checking.check(
        checking.read_config(config),
        checking.parallel(world, tp, pp, vpp, cp, ep, etp) if world else None,
        checking.server(server_tp, server_pp, server_dp, server_ep) if server_tp else None,
        dtype=dtype,
        options={"spec": spec, "vocab_multiple": vocab_multiple} | checking.settings(set_ or []),
        progress=count_up if sys.stderr.isatty() and not as_json else lambda what, done, total: None,
    )
    if svg_file is not None and report.traffic is not None:
        svg_file.write_text(
            checking.svg(report.traffic, f"{report.architecture}, {world} ranks to {len(report.traffic.received)} workers")
        )
    if as_json:
        return print_json(asdict(report))
    print_line(f"{report.architecture}: {report.tensors} tensors, {size(report.size)}: every element is sent exactly once")
    sides = (("rank to daemon", report.sends), ("daemon to worker", report.receives), ("rank to workers", report.direct))
    print_table(
        Columns(("bytes", "processes", "each, mean", "largest", "largest / mean"), texts=0, noun="bytes to send"),
        (
            (title, str(len(s.bytes_each)), size(s.total // len(s.bytes_each)), size(max(s.bytes_each)), f"{s.imbalance:.3f}")
            for title, s in sides
            if s is not None
        ),
    )
    if report.traffic is not None:
        print_line(f"the direct path: {report.copies} copies")
        for line in checking.text_map(report.traffic):
            print_line(line)
    if report.through_load_weights:
        names = ", ".join(report.through_load_weights[:4])
        print_line(f"{len(report.through_load_weights)} tensors are passed whole to load_weights: {names}")


@command(Section.CHECK)
def architectures(as_json: AsJson = False) -> None:
    """List the model families that a Megatron trainer can attach, with their tests."""
    from resharder.converters.architectures import ARCHITECTURES, NOT_BUILT

    if as_json:
        found = [{"model_type": a.model_type, "architecture": a.name, "proof": a.proof} for a in ARCHITECTURES]
        return print_json({"architectures": found, "not_built": NOT_BUILT})
    columns = Columns(("model_type", "architecture", "proof"), noun="model families")
    print_table(columns, ((a.model_type, a.name, a.proof) for a in ARCHITECTURES))
    for name, why in NOT_BUILT.items():
        print_line(f"not supported: {name}: {why}")


class ServerLag(NamedTuple):
    """Lag of a server. `versions`: READY ones between its version and its target. `seconds`: since the
    first of those became READY; for a move back, since the fleet's move began.
    """

    versions: int = 0
    seconds: float = 0.0

    def beyond(self, versions: int, seconds: float) -> bool:
        """Return whether the lag exceeds bounds; 0: no bound."""
        return bool(self.versions) and (0 < versions < self.versions or 0 < seconds < self.seconds)


@command(Section.CHECK)
def probe(
    url: Annotated[
        str, typer.Option("--url", metavar="URL", help="Also require that this URL answers 200, as vLLM's /health.")
    ] = "",
    max_lag_versions: Annotated[int, typer.Option(metavar="N", min=0, help="Versions it may be behind; 0: any number.")] = 0,
    max_lag_seconds: Annotated[float, typer.Option(metavar="S", min=0, help="Seconds it may be behind; 0: any time.")] = 0,
    server: Annotated[
        str, typer.Option("--server", metavar="ID", help="RESHARDER_SERVER_ID, if not given.", autocompletion=complete.servers)
    ] = "",
    endpoint: Endpoint = None,
    as_json: AsJson = False,
) -> None:
    """Check whether a server should receive requests. Exits 1 if not.

    It should not while its gate is closed (--url), or while it lags behind its target by more than the bounds
    and others of its fleet are closer. A server that waits for its turn in a move does not lag. If the daemon cannot be
    reached, only the gate decides. A server that is unknown to the daemon is not ready.
    """
    if not url and not (server or settings.SERVER_ID.text()):
        raise UsageError("no server was named: pass --server or --url, or set RESHARDER_SERVER_ID")
    ready, reason = _gate(url) if url else (True, "")
    found: ServerLag | None = ServerLag()
    if ready and (max_lag_versions or max_lag_seconds or not url):
        found, reason = _lag_of(server or settings.SERVER_ID.text(), endpoint, gated=bool(url))
        ready = found is not None and not found.beyond(max_lag_versions, max_lag_seconds)
    lag = found or ServerLag()
    if as_json:
        print_json({"ready": ready, "reason": reason, "lag_versions": lag.versions, "lag_seconds": lag.seconds})
    else:
        print_line(f"{'ready' if ready else 'not ready'}{': ' if reason else ''}{reason}")
    raise typer.Exit(0 if ready else _NOT_READY)


def _gate(url: str) -> tuple[bool, str]:
    """Return whether the URL answers 200, and the answer if not. Raises UsageError for an invalid URL."""
    if not url.startswith(("http://", "https://")):
        raise UsageError(f"expected an http or https address in --url, got {url!r}")
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(url, timeout=_PROBE_SECONDS):
            return True, ""
    except urllib.error.HTTPError as error:
        with error:
            return False, f"{url} answers {error.code}: {error.read(300).decode(errors='replace').strip()}"
    except OSError as error:
        return False, f"{url} does not answer: {error}"


def _lag_of(server: str, endpoint: str | None, *, gated: bool) -> tuple[ServerLag | None, str]:
    """Return a server's lag, and a sentence. Raises UsageError, and Refused if the daemon refuses the query.

    The lag is None for a server that is unknown to the daemon, and, unless `gated`, if the daemon cannot be reached.
    """
    if not server:
        raise UsageError("no server was named: pass --server or set RESHARDER_SERVER_ID")
    try:
        with Operator(endpoint, timeout=_PROBE_SECONDS, connect_timeout=0) as operator:
            try:
                found = operator.server(server)
            except NotFound:
                if gated and _has_just_started(operator):
                    return ServerLag(), "the gate alone decides: the daemon has just started"
                return None, f"{server_name(server)} is unknown to the daemon"
            if found.version == found.wanted_version:
                return ServerLag(), f"{found.name} serves version {found.version}, its target"
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
    return behind, f"{found.name} serves version {found.version}, its target is {found.wanted_version}: {far}; {found.reason}"


def _has_just_started(operator: Operator) -> bool:
    """Return whether servers may not have registered yet with a daemon that has restarted."""
    daemon = operator.daemon()
    if daemon.time is None or daemon.start_time is None:
        return False
    return (daemon.time - daemon.start_time).total_seconds() < _REGISTERING_SECONDS


def server_lag(
    server: Server,
    fleet: Fleet,
    others: Iterable[Server],
    versions: Sequence[Version],
    now: datetime | None,
) -> ServerLag:
    """Return a server's lag behind its own target; that of a fleet is the daemon's metric (docs/metrics.md).

    A server that waits for its turn in a move does not lag, nor does one while no server of its fleet serves a version closer to
    the target: without it, clients would get nothing newer.

    Args:
        server: The server.
        others: Servers of its fleet, with or without itself.
        versions: Versions of its model, including all that are closer to the target than its own.
        now: Time by the daemon's clock.
    """
    served, wanted = server.version, server.wanted_version
    if not served or served == wanted or not _anyone_nearer(server, others):
        return ServerLag()
    low, high = sorted((served, wanted))
    passed = [version for version in versions if low < version.number <= high and version.ready_time]
    if wanted < served:
        return ServerLag(max(1, len(passed)), _seconds(fleet.move.start_time if fleet.move else None, now))
    since = min((version.ready_time for version in passed if version.ready_time), default=now)
    return ServerLag(max(1, len(passed)), _seconds(since, now))


def _seconds(since: datetime | None, now: datetime | None) -> float:
    return (now - since).total_seconds() if now and since else 0.0


def _anyone_nearer(server: Server, others: Iterable[Server]) -> bool:
    wanted, distance = server.wanted_version, abs(server.wanted_version - server.version)
    return any(one.state == Server.State.SERVING and abs(one.version - wanted) < distance for one in others)


@command(Section.CHECK)
def verify(
    server: Annotated[str, typer.Argument(metavar="SERVER", help="Its id.", autocompletion=complete.servers)],
    timeout: Annotated[
        float, typer.Option("--timeout", metavar="SECONDS", min=1, max=3600, help="Bound on the wait for all workers.")
    ] = 600,
    endpoint: Endpoint = None,
    as_json: AsJson = False,
) -> None:
    """Compare a server's memory with its version, while it serves.

    Exit 1: a worker's memory differs; the server leaves service and its version is installed again. Exit 4: a worker cannot be
    verified now (it sleeps, or has no version).
    """
    with Operator(endpoint) as operator:
        found = operator.verify(server, timeout=timeout)
    if as_json:
        print_json({"verifications": [*map(plain, found)]})
    else:
        for one in found:
            print_line(_verify_line(one))
    if code := _verify_code(found):
        raise typer.Exit(code)


def _verify_code(found: Sequence[Verification]) -> int:
    if any(one.different_tensors for one in found):
        return _DIFFERS
    return _SKIPPED if any(one.skipped or _compared_nothing(one) for one in found) else 0


def _compared_nothing(one: Verification) -> bool:
    return one.total_bytes > 0 and not one.covered_bytes


def _verify_line(one: Verification) -> str:
    if one.skipped:
        return f"worker {one.rank}: not verified: {one.skipped}"
    covered = f"{size(one.covered_bytes)} of {size(one.total_bytes)} compared, {one.tensors} tensors, {one.seconds:.2f} s"
    if one.different_tensors:
        names = ", ".join(one.different) + (", …" if one.different_tensors > len(one.different) else "")
        result = f"{one.different_tensors} tensors differ from version {one.version}: {names}"
    elif _compared_nothing(one):
        result = f"not verified: nothing of version {one.version} could be compared"
    elif one.covered_bytes < one.total_bytes:
        result = f"the part of version {one.version} that could be compared is correct"
    else:
        result = f"holds version {one.version}"
    return "\n".join([f"worker {one.rank}: {result} ({covered})", *_left_out(one)])


def _left_out(one: Verification) -> list[str]:
    """Return what was compared with the memory that the install left, and what was not compared, with the reasons."""
    weaker = one.covered_bytes - one.digested_bytes
    lines = (
        [f"  {size(weaker)} compared with their state after the install, because the engine has changed their format"]
        if weaker
        else []
    )
    for left in one.uncompared:
        names = ", ".join(left.names[:3]) + (", …" if left.tensors > 3 else "")
        lines.append(f"  {size(left.bytes)} not compared ({left.tensors} tensors: {names}): {left.reason}")
    return lines


profile = typer.Typer(help="Profile an install with torch.profiler.", no_args_is_help=True)
app.add_typer(profile, name="profile", rich_help_panel=Section.CHECK)


@profile.callback()
def _group() -> None: ...


@profile.command("install")
def install(
    name: Annotated[
        str,
        typer.Argument(
            metavar="SERVER", help="A server's id, or a fleet for all its servers in turn.", autocompletion=complete.servers
        ),
    ],
    out: Annotated[Path, typer.Option("--out", metavar="DIR", help="Folder for the files.")] = Path("."),
    timeout: Annotated[
        float, typer.Option("--timeout", metavar="SECONDS", min=1, max=3600, help="Bound on the wait for each server.")
    ] = 600,
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
        for server in _servers_of(operator, name):
            profiles = sorted(operator.profile_install(server, timeout=timeout), key=lambda one: one.rank)
            found += [_written(out, server, one) for one in profiles]
            if not as_json:
                _show_profiles(operator.server(server), profiles)
    if as_json:
        print_json({"profiles": found})
    else:
        for one in found:
            print_line(str(one["error"] or one["trace"]))
    if any(one["error"] for one in found):
        raise typer.Exit(4)


def _servers_of(operator: Operator, name: str) -> list[str]:
    """Return the ids of servers. Raises NotFound."""
    servers = operator.servers()
    ids = {server.name.partition("/")[2] for server in servers}
    if (id := name.removeprefix("servers/")) in ids:
        return [id]
    fleet = name.removeprefix("fleets/")
    chosen = [server.name.partition("/")[2] for server in servers if server.fleet == fleet and server.state != Server.State.LOST]
    if not chosen:
        raise NotFound(f"expected a server or a fleet with servers, got {name!r}; servers are {', '.join(sorted(ids)) or 'none'}")
    return chosen


def _written(out: Path, server: str, one: Profile) -> dict[str, object]:
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


def _show_profiles(server: Server, profiles: Sequence[Profile]) -> None:
    took = {worker.rank: worker.apply_seconds for worker in server.workers}
    slowest = max(profiles, key=lambda one: took.get(one.rank, 0.0))
    seconds = took.get(slowest.rank, 0.0)
    console().print(
        f"{server.name}, worker {slowest.rank} of {len(profiles)}: version {server.version} applied in {seconds:.3f} s"
    )
    for line in slowest.table.split("\n"):
        print_line(line)
