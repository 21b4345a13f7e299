"""Gauges of the daemon's state, computed from a snapshot at each scrape."""

from collections import Counter
from collections.abc import Callable, Iterator

from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from resharder.server.ingest.publisher import current
from resharder.server.observability.snapshot import Snapshot
from resharder.server.state.version import ABORTED, READY, RETIRED, UPLOADING
from resharder.v1 import resources_pb2

NOTHING = Snapshot(0.0, 0, 0, {}, {}, (), (), {})


class States(Collector):
    """Collector of gauges. `look` is called at each scrape."""

    def __init__(self, look: Callable[[], Snapshot]) -> None:
        self._look = look

    def describe(self) -> list[Metric]:
        """Return the families without samples, so that registration does not take a snapshot."""
        return list(families(NOTHING))

    def collect(self) -> Iterator[Metric]:
        """Take a snapshot, and yield its families."""
        yield from families(self._look())


def families(now: Snapshot) -> Iterator[Metric]:
    """Yield every metric family, those without samples included."""
    yield GaugeMetricFamily("resharder_store_used_bytes", "Bytes of versions and reserves", value=now.store_used)
    yield GaugeMetricFamily("resharder_store_limit_bytes", "Bound on the bytes of versions and reserves", value=now.store_limit)
    yield from _models(now)
    yield from _following(now)
    yield from _publishers(now)
    yield from _fleets(now)
    yield from _nodes(now)


def _models(now: Snapshot) -> Iterator[Metric]:
    states = GaugeMetricFamily(
        "resharder_versions",
        "Versions by state; RETIRED and ABORTED count the newest 1000",
        labels=["model", "state"],
    )
    newest = GaugeMetricFamily("resharder_newest_version", "Number of the newest READY version; 0: none", labels=["model"])
    ready = GaugeMetricFamily(
        "resharder_newest_version_ready_timestamp_seconds",
        "Time at which it became READY, in seconds since 1970",
        labels=["model"],
    )
    sizes = GaugeMetricFamily("resharder_newest_version_bytes", "Size of the newest READY version", labels=["model"])
    available = GaugeMetricFamily(
        "resharder_available_bytes",
        "Bytes for versions after the READY ones: uploads, files laid out, and what the limit and the medium leave to the model",
        labels=["model"],
    )
    for model, size in now.available.items():
        available.add_metric([model], size)
    stuck = GaugeMetricFamily(
        "resharder_versions_not_retired", "READY versions beyond retention whose files cannot be moved", labels=["model"]
    )
    for model, records in now.versions.items():
        stuck.add_metric([model], len(now.not_retired(model)))
        counts = Counter(record.state for record in records)
        for state in (UPLOADING, READY, RETIRED, ABORTED):
            states.add_metric([model, state], counts[state])
        last = now.newest(model)
        newest.add_metric([model], last.number if last else 0)
        if last:
            ready.add_metric([model], last.ready_time)
            sizes.add_metric([model], last.size_bytes)
    yield from (states, newest, ready, sizes, available, stuck)


def _following(now: Snapshot) -> Iterator[Metric]:
    wanted = GaugeMetricFamily(
        "resharder_followed_version", "Newest version in the archive that the daemon follows; 0: unknown", labels=["model"]
    )
    lag = GaugeMetricFamily(
        "resharder_follow_lag_seconds", "Seconds since that version was archived, until it is READY here", labels=["model"]
    )
    failing = GaugeMetricFamily(
        "resharder_follow_failing", "1 while a version, or with an empty model the archive, cannot be fetched", labels=["model"]
    )
    for each in now.following:
        failing.add_metric([each.model], bool(each.problem))
        if each.model:
            wanted.add_metric([each.model], each.wanted)
            lag.add_metric([each.model], 0.0 if each.has or not each.wanted else max(0.0, now.time - each.archive_time))
    yield from (wanted, lag, failing)


def _publishers(now: Snapshot) -> Iterator[Metric]:
    ranks = GaugeMetricFamily("resharder_publisher_ranks", "Ranks of the model's publisher", labels=["model"])
    live = GaugeMetricFamily(
        "resharder_publisher_live_ranks", "Ranks of the model's publisher within their lease", labels=["model"]
    )
    shown = current(publisher for publisher, _ in now.publishers)
    for publisher, alive in now.publishers:
        if publisher is shown[publisher.model]:
            ranks.add_metric([publisher.model], publisher.world_size)
            live.add_metric([publisher.model], alive)
    yield from (ranks, live)


def _fleets(now: Snapshot) -> Iterator[Metric]:
    def family(name: str, help: str, *more: str) -> GaugeMetricFamily:
        return GaugeMetricFamily(f"resharder_{name}", help, labels=["fleet", "model", *more])

    servers = family("servers", "Servers by state (docs/operator.md)", "state")
    in_flight = family("requests_in_flight", "Requests in flight, as last reported")
    wanted = family("fleet_wanted_version", "Version that the fleet's target selects; 0: none")
    served = family("fleet_served_version", "Lowest version that a server of the fleet serves; 0: none")
    behind = family("fleet_lag_versions", "Versions between the target and the slowest server")
    since = family("fleet_lag_seconds", "Seconds since the first version that the slowest server lacks became READY")
    refused = family("fleet_refused_versions", "Versions that the fleet refuses")
    moves = family("fleet_move", "1 for the state of the current move", "state")
    going = family("fleet_move_age_seconds", "Seconds since the current move began; 0: none")
    verified = family(
        "verified_bytes",
        "Bytes of versions that workers need, by what their last verifications compared them with: digest (the store's), "
        "fingerprint (of what the install left), nothing (see `resharder verify`)",
        "compared_with",
    )
    for view in now.fleets:
        fleet = view.fleet
        names = [fleet.name, fleet.model]
        group = now.servers.get(fleet.name, ())
        counts = Counter(resources_pb2.Server.State.Name(server.state) for server in group)
        for state in resources_pb2.Server.State.keys()[1:]:
            servers.add_metric([*names, state], counts[state])
        in_flight.add_metric(names, sum(control.in_flight for server in group for control in server.server.controls))
        lag = now.lag(view)
        wanted.add_metric(names, view.wanted_version)
        served.add_metric(names, min((server.server.serving for server in group if server.server.serving), default=0))
        behind.add_metric(names, lag.versions)
        since.add_metric(names, max(0.0, now.time - lag.since) if lag.since else 0.0)
        refused.add_metric(names, len(fleet.refused))
        for name, state in resources_pb2.Move.State.items():
            if state not in (resources_pb2.Move.STATE_UNSPECIFIED, resources_pb2.Move.DONE, resources_pb2.Move.FAILED):
                moves.add_metric([*names, name], float(fleet.moving is not None and fleet.moving.state == state))
        going.add_metric(names, view.moving_for)
        found = [one for server in group for one in server.server.verifications]
        verified.add_metric([*names, "digest"], sum(one.digested_bytes for one in found))
        verified.add_metric([*names, "fingerprint"], sum(one.covered_bytes - one.digested_bytes for one in found))
        verified.add_metric([*names, "nothing"], sum(one.total_bytes - one.covered_bytes for one in found))
    yield from (servers, in_flight, wanted, served, behind, since, refused, moves, going, verified)


def _nodes(now: Snapshot) -> Iterator[Metric]:
    states = GaugeMetricFamily("resharder_nodes", "Nodes by state", labels=["state"])
    counts = Counter(node.state for node in now.nodes)
    for name, state in resources_pb2.Node.State.items():
        if state:
            states.add_metric([name], counts[state])
    live = [node for node in now.nodes if node.state != resources_pb2.Node.LOST]
    memory = GaugeMetricFamily(
        "resharder_node_used_bytes", "Bytes of versions on nodes", value=sum(node.used_bytes for node in live)
    )
    limit = GaugeMetricFamily(
        "resharder_node_limit_bytes", "Bound on the bytes of versions on nodes", value=sum(node.capacity_bytes for node in live)
    )
    received = GaugeMetricFamily(
        "resharder_node_received_bytes",
        "Bytes that the present processes of nodes have received, by source: origin (the daemon) or peer (other nodes)",
        labels=["source"],
    )
    received.add_metric(["origin"], sum(node.received_daemon_bytes for node in live))
    received.add_metric(["peer"], sum(node.received_peer_bytes for node in live))
    engine = GaugeMetricFamily(
        "resharder_node_engine_received_bytes",
        "Bytes from other nodes that the present processes of nodes have received by a transfer engine",
        value=sum(node.received_engine_bytes for node in live),
    )
    own = GaugeMetricFamily(
        "resharder_store_missing_pieces",
        "Pieces of READY versions that the daemon has yet to copy from nodes",
        value=now.missing_pieces,
    )
    short = GaugeMetricFamily(
        "resharder_store_short_pieces",
        "Pieces of versions that fewer than `replicas` hosts hold, READY or withheld for it; only with `replicas` above 1",
        value=sum(each.short_pieces for each in now.shortages),
    )
    copies = GaugeMetricFamily(
        "resharder_registry_copies",
        "Nodes that keep the newest snapshot of the registry of a model",
        labels=["model"],
    )
    for model, count in now.registry_copies.items():
        copies.add_metric([model], count)
    wanted = [copy for node in live for copy in node.copies if copy.wanted and not copy.uploading]
    missing = GaugeMetricFamily(
        "resharder_node_missing_pieces",
        "Pieces that nodes should hold and do not yet",
        value=sum(copy.wanted_pieces - copy.held_pieces for copy in wanted),
    )
    stuck = GaugeMetricFamily(
        "resharder_node_stuck_copies", "Versions that do not arrive on a node", value=sum(bool(copy.problem) for copy in wanted)
    )
    yield from (states, memory, limit, received, engine, own, short, copies, missing, stuck)
