"""Snapshots of the daemon's state, for metrics and the status page."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from resharder.server.archive.follower import Followed
from resharder.server.fleets.explain import FleetView, ServerView
from resharder.server.fleets.fleets import Fleets
from resharder.server.ingest.intake import Intake
from resharder.server.ingest.publisher import PublisherRecord
from resharder.server.nodes.registry import NodeRegistry
from resharder.server.state.errors import ResourceNotFound
from resharder.server.state.version import READY, RETIRED, UPLOADING, VersionRecord
from resharder.v1 import operator_pb2, resources_pb2


class Lag(NamedTuple):
    """Lag of a fleet behind its target. `since`: time at which it began, in seconds since 1970; 0: no lag."""

    versions: int
    since: float


class Slots(NamedTuple):
    """Progress of an UPLOADING version: slots sealed and in all, bytes received and in all."""

    sealed: int
    slots: int
    received: int
    size: int


@dataclass(frozen=True)
class Snapshot:
    """State of the daemon. Each part is consistent in itself, not with the others.

    `versions` has those of each model, oldest first. `time` is in seconds since 1970.
    """

    time: float
    store_used: int
    store_limit: int
    versions: Mapping[str, Sequence[VersionRecord]]
    arriving: Mapping[str, Slots]  # by the version's name
    publishers: Sequence[tuple[PublisherRecord, int]]  # with its ranks within their lease
    fleets: Sequence[FleetView]
    servers: Mapping[str, Sequence[ServerView]]  # by fleet
    nodes: Sequence[resources_pb2.Node] = ()
    missing_pieces: int = 0  # of READY versions in the store
    shortages: Sequence[operator_pb2.ReplicaShortage] = ()
    registry_copies: Mapping[str, int] = field(default_factory=dict)  # nodes that keep the newest snapshot of each model
    available: Mapping[str, int] = field(default_factory=dict)  # bytes for versions after the READY ones, by model
    store_problem: str = ""  # why the daemon can no longer use its store
    stuck: Mapping[str, int] = field(default_factory=dict)  # bytes of folders that could not be removed, by path
    following: Sequence[Followed] = ()  # models whose versions come from another daemon's archive

    def not_retired(self, model: str) -> list[VersionRecord]:
        """Return the READY versions beyond retention whose files cannot be moved."""
        return [record for record in self.versions.get(model, ()) if record.state == READY and record.reason]

    def newest(self, model: str) -> VersionRecord | None:
        """Return the READY version with the highest number."""
        ready = [record for record in self.versions.get(model, ()) if record.state == READY]
        return max(ready, key=lambda record: record.number, default=None)

    def without_room(self) -> list[str]:
        """Return the models with a trainer for whose next version, as large as the newest one, there is no room.

        What the store uses says nothing of that: it is at its limit as a rule, as files are laid out ahead.
        """
        trained = {publisher.model for publisher, live in self.publishers if live}
        newest = {model: self.newest(model) for model in sorted(trained & self.available.keys())}
        return [model for model, last in newest.items() if last and last.size_bytes > self.available[model]]

    def lag(self, view: FleetView) -> Lag:
        return lag(view, self.servers.get(view.fleet.name, ()), self.versions.get(view.fleet.model, ()))

    def serving(self, model: str, number: int) -> int:
        """Return the number of servers that serve this version."""
        views = [view for group in self.servers.values() for view in group if view.server.model == model]
        return sum(view.server.serving == number for view in views)


def take(
    intake: Intake,
    fleets: Fleets,
    nodes: NodeRegistry,
    following: Sequence[Followed] = (),
    wall: Callable[[], float] = time.time,
) -> Snapshot:
    """Take a snapshot. Each part is read on its own, without a common lock; models that vanish meanwhile are left out."""
    store = intake.store
    versions: dict[str, list[VersionRecord]] = {}
    for model in store.catalogue.models():
        try:
            versions[model] = store.catalogue.versions(model)
        except ResourceNotFound:
            continue
    staging = [record for records in versions.values() for record in records if record.state == UPLOADING]
    servers: dict[str, list[ServerView]] = {}
    for server in fleets.servers():
        servers.setdefault(server.server.fleet, []).append(server)
    return Snapshot(
        wall(),
        store.catalogue.used_bytes(),
        store.capacity.limit_bytes,
        versions,
        {record.name: _slots(intake.progress(record)) for record in staging},
        [(publisher, intake.live_ranks(publisher)) for publisher in intake.publishers()],
        fleets.fleets(),
        servers,
        nodes.views(),
        nodes.missing(),
        nodes.shortages(),
        nodes.registry_copies(),
        store.capacity.available_bytes(),
        store.folder.problem(),
        {str(path): size for model in store.catalogue.stored() for path, size in list(model.stuck.items())},
        following,
    )


def _slots(progress: Sequence[tuple[int, bool, int, int]]) -> Slots:
    return Slots(
        sum(sealed for _, sealed, _, _ in progress),
        len(progress),
        sum(received for *_, received in progress),
        sum(size for _, _, size, _ in progress),
    )


def lag(view: FleetView, servers: Sequence[ServerView], versions: Sequence[VersionRecord]) -> Lag:
    """Return the lag of the server that is furthest from the target.

    Only servers that should be in service and have served a version count.

    A fleet that moves forward lags since the first version that it lacks became READY; one that goes back lags since
    that became its target.
    """
    live = [view.server for view in servers if view.server.lost_at is None and view.server.goal.in_service]
    held = [server.serving or server.confirmed for server in live if server.serving or server.confirmed]
    wanted = view.wanted_version
    behind = min((version for version in held if version < wanted), default=wanted)
    ahead = max((version for version in held if version > wanted), default=wanted)
    if not wanted or behind == ahead:
        return Lag(0, 0.0)
    missed = [v for v in versions if v.state in (READY, RETIRED) and (behind < v.number <= wanted or wanted < v.number <= ahead)]
    moving = view.fleet.move.started if view.fleet.move is not None else 0.0
    since = min((v.ready_time for v in missed if behind < v.number <= wanted and v.ready_time), default=moving)
    return Lag(max(1, len(missed)), since)
