"""Commands about nodes: `nodes`, `drain-node`, `resume-node`."""

from collections.abc import Iterable, Iterator
from typing import Annotated

import typer
from resharder.client.cli import complete
from resharder.client.cli.app import AsJson, Endpoint, Section, Wide, command
from resharder.client.cli.terminal import Columns, Row, paint, print_json, print_line, print_table
from resharder.client.operator import Operator
from resharder.client.operator.answers import Node, NodeCopy
from resharder.client.operator.convert import plain
from resharder.converters.badges import badge
from resharder.converters.units import size_text as size

NODES = Columns(("node", "state", "memory", "received", "of that from nodes", "sent", "versions"), texts=1)
NodeId = Annotated[str, typer.Argument(metavar="ID", help="A node.", autocompletion=complete.nodes)]


def node_rows(nodes: Iterable[Node]) -> Iterator[Row]:
    """Yield the rows of a table with columns `NODES`, lost nodes first."""
    for node in sorted(nodes, key=lambda node: node.state != Node.State.LOST):
        received = node.received_daemon_bytes + node.received_peer_bytes
        parts, deltas = (sum(getattr(link, name) for link in node.links) for name in ("delta_part_bytes", "delta_bytes"))
        delta = f" ({size(parts)} as {size(deltas)} of deltas)" if parts else ""
        engine = f" ({size(node.received_engine_bytes)} by transfer engine)" if node.received_engine_bytes else ""
        yield (
            node.name, paint(badge("node", node.state.value)), f"{size(node.used_bytes)} of {size(node.capacity_bytes)}",
            size(received) + delta, size(node.received_peer_bytes) + engine, size(node.sent_bytes),
            "; ".join(map(_copy, node.copies)) or "–",
        )  # fmt: skip


def _copy(copy: NodeCopy) -> str:
    """Return a version as MODEL/NUMBER, with its progress, or the reason for which it does not arrive."""
    _, model, _, number = copy.version.split("/")
    if copy.uploading:
        return f"{model}/{number} UPLOADING, {copy.wanted_pieces} of {copy.pieces} pieces"
    if copy.problem:
        return f"{model}/{number}: {copy.problem}"
    progress = f" {100 * copy.held_pieces // copy.wanted_pieces} %" if copy.held_pieces < copy.wanted_pieces else ""
    part = f" of {copy.wanted_pieces} of {copy.pieces} pieces" if 0 < copy.wanted_pieces < copy.pieces else ""
    return f"{model}/{number}{progress}{part}" + ("" if copy.wanted else " (to be dropped)")


@command(Section.LOOK)
def nodes(wide: Wide = False, endpoint: Endpoint = None, as_json: AsJson = False) -> None:
    """Show every node: memory, bytes received and sent, versions and their progress."""
    with Operator(endpoint) as operator:
        found, shortages = operator.nodes(), operator.replica_shortages()
    if as_json:
        return print_json({"nodes": [*map(plain, found)], "shortages": [*map(plain, shortages)]})
    print_table(NODES, node_rows(found), wide)
    for name, link in ((node.name, link) for node in found for link in node.links if link.delta_failures):
        print_line(f"{name}: refused deltas of {link.peer}: {link.delta_failures}; the last one: {link.delta_problem}")
    for each in shortages:
        print_line(f"{each.version}{' is not READY' if each.waits else ''}: {each.problem}")


@command(Section.MAINTAIN, "drain-node")
def drain_node(node: NodeId, endpoint: Endpoint = None, as_json: AsJson = False) -> None:
    """Prepare a node for maintenance: it takes no further version, and drops those that no worker uses."""
    with Operator(endpoint) as operator:
        found = operator.drain_node(node)
    print_json(plain(found)) if as_json else print_line(f"{found.name}: drained")


@command(Section.MAINTAIN, "resume-node")
def resume_node(node: NodeId, endpoint: Endpoint = None, as_json: AsJson = False) -> None:
    """Let a node take versions again, after `drain-node`."""
    with Operator(endpoint) as operator:
        found = operator.resume_node(node)
    print_json(plain(found)) if as_json else print_line(f"{found.name}: resumed")
