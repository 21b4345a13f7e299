"""Links between hosts, for `resharder doctor --links`: measured from here or by nodes, and as nodes report their transfers."""

import statistics
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from resharder.client.errors import ResharderError
from resharder.client.operator import Operator
from resharder.client.operator.answers import Node, Version
from resharder.client.rpc.channel import Channel
from resharder.client.rpc.data_port import NO_DATA_PORT, data_port
from resharder.client.versions.manifest import VersionManifest, get_manifest
from resharder.converters.units import size_text
from resharder.converters.wire.port_probe import LIMIT_SECONDS, PortMeasurement, StreamRate, measure_port, parts_of
from resharder.converters.wire.range_client import PartRequest

HERE = "here"
DAEMON = "daemon"
_SLOW = 4.0  # times slower than the median link
_FEWEST = 3  # links of which a median is taken
_ROUNDS = 5
_MOST_VERSIONS = 4  # of a node, whose pieces are tried


@dataclass(frozen=True)
class HostLink:
    """HostLink between two hosts.

    Attributes:
        source: `here`, or `nodes/{id}` of the node that has measured it.
        target: `daemon` or `nodes/{id}`.
        port: `calls` of the daemon's RPCs, `data` of a data port.
        address: `host:port`; empty if another host has measured it.
        verdict: Whether there is a problem.
        round_trip: Seconds; None if it is not measured.
        rates: Rates by the number of streams. Those of nodes are of one request among several.
        found: Summary or problem.
        hint: Advice, if `verdict` is not ok.
    """

    source: str
    target: str
    port: Literal["calls", "data"]
    address: str
    verdict: Literal["ok", "warn", "fail"] = "ok"
    round_trip: float | None = None
    rates: tuple[StreamRate, ...] = ()
    found: str = ""
    hint: str = ""


def measure_links(endpoint: str | None, node_tls_name: str = "", limit_seconds: float = LIMIT_SECONDS) -> list[HostLink]:
    """Measure the links from this host to the daemon and to every node, and return them with the links that nodes report.

    Args:
        endpoint: The daemon's; by default RESHARDER_ENDPOINT.
        node_tls_name: Name in the certificates of nodes, if not their address.
        limit_seconds: Bound on the measurement of one rate; there are two for each link.

    Raises:
        ResharderError: The daemon cannot be reached, or refuses.
    """
    with Operator(endpoint) as operator, Channel(operator.endpoint) as channel:
        nodes, manifests = operator.nodes(), _Manifests(channel)
        links = [_calls(operator), _daemon_port(operator, channel, manifests, limit_seconds)]
        links += [_node_port(node, channel, manifests, node_tls_name, limit_seconds) for node in nodes]
    return judged([*links, *reported(nodes)])


class _Manifests:
    """Manifests of versions, each fetched once."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._known: dict[str, VersionManifest] = {}

    def of(self, version: str) -> VersionManifest:
        """Return a manifest. Raises ResharderError."""
        if version not in self._known:
            self._known[version] = get_manifest(self._channel, version)
        return self._known[version]


def _calls(operator: Operator) -> HostLink:
    operator.daemon()  # connects
    took = []
    for _ in range(_ROUNDS):
        began = time.monotonic()
        operator.daemon()
        took.append(time.monotonic() - began)
    return HostLink(HERE, DAEMON, "calls", operator.endpoint, round_trip=statistics.median(took))


def _daemon_port(operator: Operator, channel: Channel, manifests: _Manifests, limit_seconds: float) -> HostLink:
    link = HostLink(HERE, DAEMON, "data", "")
    ready = [version for version in operator.versions() if version.state is Version.State.READY]
    if not ready:
        return replace(link, found="not measured: no version is READY")
    try:
        manifest = manifests.of(max(ready, key=lambda version: version.number).name)
    except ResharderError as error:
        return replace(link, found=f"not measured: {error}")
    address = data_port(channel, manifest.data_address)
    if address is None:
        return replace(
            link, verdict="warn", found=NO_DATA_PORT, hint="start it without an empty data_listen: other hosts need it"
        )
    link = replace(link, address=f"{address.host}:{address.port}")
    return _measured(link, measure_port(address, _parts(manifest), limit_seconds=limit_seconds))


def _node_port(node: Node, channel: Channel, manifests: _Manifests, tls_name: str, limit_seconds: float) -> HostLink:
    link = HostLink(HERE, node.name, "data", node.data_address)
    address = data_port(channel, node.data_address)
    if address is None:
        return replace(link, verdict="fail", found=f"expected an address as host:port, got {node.data_address!r}")
    parts = list[PartRequest]()
    for copy in sorted(node.copies, key=lambda copy: -copy.held_pieces)[:_MOST_VERSIONS]:
        if copy.held_pieces:
            try:
                parts += _parts(manifests.of(copy.version))
            except ResharderError:  # retired in the meantime, or of a model that this caller may not read
                continue
    # No token is sent: nodes admit by certificates alone.
    address = replace(address, server_name=tls_name, headers=dict)
    found = _measured(link, measure_port(address, parts, limit_seconds=limit_seconds))
    if node.state is Node.State.LOST:
        lost = f"lost: no report since {node.report_time:%H:%M:%SZ}" if node.report_time else "lost"
        hint = found.hint or "it answers here: look in its log for why it does not reach the daemon"
        return replace(found, verdict="fail", found=f"{lost}; {found.found}" if found.found else lost, hint=hint)
    return found


def _parts(manifest: VersionManifest) -> list[PartRequest]:
    return parts_of(manifest.name, manifest.fingerprint, manifest.files)


def _measured(link: HostLink, measurement: PortMeasurement) -> HostLink:
    link = replace(link, round_trip=measurement.round_trip, rates=measurement.rates)
    if measurement.problem is not None:
        return replace(link, verdict="fail", found=measurement.problem.found, hint=measurement.problem.hint)
    if measurement.unread:
        return replace(link, found=f"reached; rate not measured: {measurement.unread}")
    return replace(link, found=f"{size_text(sum(rate.bytes for rate in link.rates))} read")


def reported(nodes: Iterable[Node]) -> Iterator[HostLink]:
    """Yield the links that live nodes report, from their transfers."""
    present = {DAEMON} | {node.name for node in nodes if node.state is not Node.State.LOST}
    for node in nodes:
        for seen in node.links if node.state is not Node.State.LOST else ():
            if seen.peer not in present:
                continue
            rates = (StreamRate(1, seen.received_bytes, seen.seconds),) if seen.received_bytes else ()
            text = f"{size_text(seen.received_bytes)} received"
            if seen.delta_part_bytes:  # which tell nothing of the link
                rates = (StreamRate(1, round(seen.whole_rate), 1.0),)
                text += f", {size_text(seen.delta_part_bytes)} of it as {size_text(seen.delta_bytes)} of deltas"
            if seen.failures:
                text += f", {seen.failures} requests failed"
            link = HostLink(node.name, seen.peer, "data", "", rates=rates, found=text)
            if seen.problem:
                hint = f"look at {seen.peer}, and at the network between the two"
                link = replace(link, verdict="warn", found=f"{text}, the last one with: {seen.problem}", hint=hint)
            yield link


def judged(links: Sequence[HostLink]) -> list[HostLink]:
    """Return the links with a warning at each whose fastest rate is less than a quarter of the median one.

    Links measured from here and links that nodes report are compared among themselves.
    """
    medians = {}
    for here in (True, False):
        rates = [_fastest(link) for link in links if link.rates and (link.source == HERE) is here]
        if len(rates) >= _FEWEST:
            medians[here] = statistics.median(rates)
    return [_judged(link, medians.get(link.source == HERE, 0.0)) for link in links]


def _judged(link: HostLink, median: float) -> HostLink:
    if link.verdict != "ok" or not link.rates or _fastest(link) * _SLOW >= median:
        return link
    found = f"{link.found}: {rate_text(_fastest(link))}, the median link has {rate_text(median)}"
    return replace(link, verdict="warn", found=found, hint="look for a slow network card, a detour, or a busy host")


def _fastest(link: HostLink) -> float:
    return max(rate.rate for rate in link.rates)


def rate_text(rate: float) -> str:
    """Format bytes a second."""
    return f"{rate / 1e9:.2f} GB/s" if rate >= 1e8 else f"{rate / 1e6:.1f} MB/s"
