"""Checks in advance: layouts (`check`), model families, and this host (`doctor`)."""

import os
import sys
import warnings
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from resharder.client.cli.app import AsJson, Endpoint, Section, command
from resharder.client.cli.output import print_json, print_table, size
from resharder.client.cli.progress import count_up, waiting
from resharder.client.cli.table import Columns, Row, paint
from resharder.client.cli.terminal import say
from resharder.client.errors import UsageError

if TYPE_CHECKING:
    from resharder.client.tools.links import HostLink


@command(Section.CHECK)
def doctor(
    links: Annotated[bool, typer.Option("--links", help="Measure the links to the daemon and to all nodes instead.")] = False,
    between: Annotated[
        bool, typer.Option("--between", help="With --links: let every node measure its links to all others and to the daemon.")
    ] = False,
    sources: Annotated[
        list[str] | None, typer.Option("--from", metavar="NODE", help="Let this node measure; may be repeated.")
    ] = None,
    targets: Annotated[
        list[str] | None, typer.Option("--to", metavar="NODE", help="Node that others measure, or daemon; may be repeated.")
    ] = None,
    node_tls_name: Annotated[
        str,
        typer.Option(
            metavar="NAME", envvar="RESHARDER_NODE_TLS_PEER_NAME", help="Name in the certificates of nodes, if not their address."
        ),
    ] = "",
    endpoint: Endpoint = None,
    as_json: AsJson = False,
) -> None:
    """Check this host, and the daemon from it, and print what to change. Exits 1 for problems."""
    from resharder.client.tools.doctor import examine

    if between or sources or targets:
        if not links:
            raise UsageError("--between, --from and --to are about links: expected --links")
        return _doctor_between(endpoint, sources or [], targets or [], as_json)
    if links:
        return _doctor_links(endpoint, node_tls_name, as_json)
    with waiting("measuring memory, connecting to the daemon", as_json):
        checks = list(examine(endpoint))
    if as_json:
        print_json({"checks": [check._asdict() for check in checks]})
    else:
        rows = ((paint(each.verdict), each.name, each.found, each.mend) for each in checks)
        print_table(Columns(("", "check", "found", "to mend"), texts=2), rows)
    raise typer.Exit(1 if any(check.verdict == "fail" for check in checks) else 0)


def _doctor_links(endpoint: str | None, node_tls_name: str, as_json: bool) -> None:
    from resharder.client.tools.links import measure_links

    with waiting("measuring links", as_json):
        found = measure_links(endpoint, node_tls_name)
    _show_links(found, as_json)


def _doctor_between(endpoint: str | None, sources: list[str], targets: list[str], as_json: bool) -> None:
    from resharder.client.tools.links import judged, measure_between

    with waiting("nodes measure their links", as_json):
        found = sorted(measure_between(endpoint, sources, targets), key=lambda link: (link.source, link.target))
    _show_links(judged(found), as_json)


def _show_links(found: "list[HostLink]", as_json: bool) -> None:
    from resharder.client.tools.links import rate_text

    def row(link: "HostLink") -> Row:
        trip = "–" if link.round_trip is None else f"{1000 * link.round_trip:.2f} ms"
        rates = [rate_text(rate.rate) for rate in link.rates] + ["–", "–"]
        target = f"{link.target} ({link.port})" if link.source == "here" else link.target
        return paint(link.verdict), link.source, target, link.address or "–", trip, *rates[:2], link.found, link.mend

    if as_json:
        print_json({"links": [asdict(link) for link in found]})
    else:
        titles = ("", "from", "to", "address", "round trip", "1 stream", "4 streams", "found", "to mend")
        print_table(Columns(titles, texts=2), map(row, found))
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

    And what each process sends and receives. From the config alone: no weights, no GPU, any number of ranks. Exits 4 with the
    reason if something does not fit.
    """
    with waiting("importing torch", as_json):
        from resharder.client.tools import check as checking
        from resharder.client.tools.traffic import svg, text_map

    if svg_file is not None and not (world and server_tp):
        raise UsageError("--svg draws bytes from ranks to workers: expected --world and --server-tp")
    warnings.filterwarnings("ignore", module="megatron")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
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
            svg(report.traffic, f"{report.architecture}, {world} ranks to {len(report.traffic.received)} workers")
        )
    if as_json:
        return print_json(asdict(report))
    say(f"{report.architecture}: {report.tensors} tensors, {size(report.size)}: every element has one place")
    sides = (("rank to daemon", report.sends), ("daemon to worker", report.receives), ("rank to workers", report.direct))
    print_table(
        Columns(("bytes", "processes", "each, mean", "largest", "largest / mean"), texts=0),
        (
            (title, str(len(s.bytes_each)), size(s.total // len(s.bytes_each)), size(max(s.bytes_each)), f"{s.imbalance:.3f}")
            for title, s in sides
            if s is not None
        ),
    )
    if report.traffic is not None:
        say(f"the direct path: {report.copies} copies")
        for line in text_map(report.traffic):
            say(line)
    if report.through_load_weights:
        names = ", ".join(report.through_load_weights[:4])
        say(f"{len(report.through_load_weights)} tensors go whole through load_weights: {names}")


@command(Section.CHECK)
def architectures(as_json: AsJson = False) -> None:
    """List the model families that a Megatron trainer can attach, with their tests."""
    from resharder.converters.architectures import ARCHITECTURES, NOT_BUILT

    if as_json:
        found = [{"model_type": a.model_type, "architecture": a.name, "proof": a.proof} for a in ARCHITECTURES]
        return print_json({"architectures": found, "not_built": NOT_BUILT})
    print_table(Columns(("model_type", "architecture", "proof")), ((a.model_type, a.name, a.proof) for a in ARCHITECTURES))
    for name, why in NOT_BUILT.items():
        say(f"not supported: {name}: {why}")
