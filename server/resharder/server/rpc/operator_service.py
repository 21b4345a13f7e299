"""OperatorService: calls of operators."""

from collections.abc import Iterator

import xxhash
from google.protobuf.message import Message
from resharder.converters.wire.pieces import PieceSpan
from resharder.server.archive.archive import Archive, needed
from resharder.server.archive.archived import Archived
from resharder.server.fleets.commands import Operations
from resharder.server.fleets.worker_requests import Profiles, Verifications
from resharder.server.infra.change_signal import Pause, Waiting
from resharder.server.infra.event_log import Events, event_to_proto
from resharder.server.nodes.registry import NodeRegistry
from resharder.server.rpc.convert import (
    Views,
    fleet_to_proto,
    node_id,
    page_of,
    seconds,
    server_to_proto,
    store_access,
    timestamp,
)
from resharder.server.rpc.dispatch import Call
from resharder.server.state.version import parse_name
from resharder.server.store.manifest import MANIFEST_FILE
from resharder.server.store.reader import VersionReader
from resharder.v1 import operator_pb2

_PART_BYTES = 1 << 20


class OperatorService:
    """Methods of `OperatorService`. Errors are those of the parts that each method calls."""

    def __init__(
        self,
        views: Views,
        operations: Operations,
        nodes: NodeRegistry,
        events: Events,
        archive: Archive | None,
        profiles: Profiles,
        verifications: Verifications,
        daemon: operator_pb2.Daemon,
    ) -> None:
        self._intake, self._store, self._views, self._fleets = views.intake, views.store, views, views.fleets
        self._operations, self._nodes, self._events, self._archive, self._daemon = operations, nodes, events, archive, daemon
        self._profiles, self._verifications = profiles, verifications

    def GetDaemon(self, request: operator_pb2.GetDaemonRequest, call: Call) -> Message:
        """Describe the daemon: release, store, models and publishers."""
        answer = operator_pb2.Daemon()
        answer.CopyFrom(self._daemon)
        answer.time.GetCurrentTime()
        if (access := store_access(self._store.folder)) is not None:
            answer.store.CopyFrom(access)
        answer.store_used_bytes = self._store.catalogue.used_bytes()
        answer.models.extend(self._store.catalogue.models())
        answer.publishers.extend(self._views.publisher(publisher) for publisher in self._intake.publishers())
        return answer

    def ListVersions(self, request: operator_pb2.ListVersionsRequest, call: Call) -> Message:
        """List the versions of one model or of all, newest first, in pages. Raises InvalidArgument (PAGE_SIZE, PAGE_TOKEN)."""
        models = [request.model] if request.model else self._store.catalogue.models()
        # newest first: the most common request, and stable while versions arrive
        records = [record for model in models for record in reversed(self._store.catalogue.versions(model))]
        page, token = page_of([(r.name, r) for r in records], request.page_size, request.page_token)
        return operator_pb2.ListVersionsResponse(versions=[self._views.version(r) for r in page], next_page_token=token)

    def GetVersion(self, request: operator_pb2.GetVersionRequest, call: Call) -> Message:
        """Return a version. Raises InvalidArgument (RESOURCE_NAME), ResourceNotFound (MODEL_UNKNOWN, VERSION_UNKNOWN)."""
        return self._views.version(self._store.catalogue.get(*parse_name(request.version, "versions")))

    def ListServers(self, request: operator_pb2.ListServersRequest, call: Call) -> Message:
        """List the servers of one fleet or of all by id, in pages. Raises InvalidArgument (PAGE_SIZE, PAGE_TOKEN)."""
        views = [(view.server.id, view) for view in self._fleets.servers(request.fleet)]
        page, token = page_of(views, request.page_size, request.page_token)
        return operator_pb2.ListServersResponse(servers=[server_to_proto(view) for view in page], next_page_token=token)

    def ListFleets(self, request: operator_pb2.ListFleetsRequest, call: Call) -> Message:
        """List fleets by name, in pages. Raises InvalidArgument (PAGE_SIZE, PAGE_TOKEN)."""
        page, token = page_of([(view.fleet.name, view) for view in self._fleets.fleets()], request.page_size, request.page_token)
        return operator_pb2.ListFleetsResponse(fleets=[fleet_to_proto(view) for view in page], next_page_token=token)

    def UpdateFleet(self, request: operator_pb2.UpdateFleetRequest, call: Call) -> Message:
        """Set the fields of a fleet that the mask names; a new fleet is created."""
        return fleet_to_proto(self._operations.update(request))

    def RollBackFleet(self, request: operator_pb2.RollBackFleetRequest, call: Call) -> Message:
        """Return a fleet to an earlier version. Idempotent for a repeated request id."""
        return fleet_to_proto(self._operations.roll_back(request))

    def DecideMove(self, request: operator_pb2.DecideMoveRequest, call: Call) -> Message:
        """Approve or reverse the current move of a fleet."""
        return fleet_to_proto(self._operations.decide(request))

    def SetPower(self, request: operator_pb2.SetPowerRequest, call: Call) -> Message:
        """Put servers to sleep or wake them. Returns before the engines have changed."""
        return fleet_to_proto(self._operations.set_power(request))

    def SetDrained(self, request: operator_pb2.SetDrainedRequest, call: Call) -> Message:
        """Drain servers or resume them. Returns before requests in flight have ended."""
        return fleet_to_proto(self._operations.set_drained(request))

    def DeleteFleet(self, request: operator_pb2.DeleteFleetRequest, call: Call) -> Message:
        """Delete a fleet without servers."""
        self._fleets.delete(request.fleet.removeprefix("fleets/"))
        return operator_pb2.DeleteFleetResponse()

    def ForgetServer(self, request: operator_pb2.ForgetServerRequest, call: Call) -> Message:
        """Forget a LOST server."""
        self._fleets.forget(request.server.removeprefix("servers/"))
        return operator_pb2.ForgetServerResponse()

    def ListNodes(self, request: operator_pb2.ListNodesRequest, call: Call) -> Message:
        """List nodes by id, in pages. Raises InvalidArgument (PAGE_SIZE, PAGE_TOKEN)."""
        nodes = [(node.name, node) for node in self._nodes.views()]
        page, token = page_of(nodes, request.page_size, request.page_token)
        shortages = () if request.page_token else self._nodes.shortages()
        return operator_pb2.ListNodesResponse(nodes=page, next_page_token=token, shortages=shortages)

    def SetNodeDrained(self, request: operator_pb2.SetNodeDrainedRequest, call: Call) -> Message:
        """Drain a node, or resume it. Raises InvalidArgument (NODE), ResourceNotFound (NODE_UNKNOWN)."""
        node = self._nodes.set_drained(node_id(request.node), request.drained)
        self._events.add("operator", request.node, "drain" if request.drained else "resume")
        return node

    def ExportVersion(self, request: operator_pb2.ExportVersionRequest, call: Call) -> Iterator[Message]:
        """Stream the files of a READY version, which is pinned until the call ends."""
        yield from _export(self._store.reader, *parse_name(request.version, "versions"))

    def ProfileInstall(self, request: operator_pb2.ProfileInstallRequest, call: Call) -> Iterator[Message | Pause]:
        """Repeat a server's install under a profiler, and stream its workers' profiles."""
        yield from self._profiles.take(request.server.removeprefix("servers/"), seconds(request.wait_seconds))

    def VerifyServer(self, request: operator_pb2.VerifyServerRequest, call: Call) -> Waiting[Message]:
        """Verify the memory of all workers of a server, and return their results."""
        server, wait = request.server.removeprefix("servers/"), seconds(request.wait_seconds)
        verifications = yield from self._verifications.take(server, wait)
        return operator_pb2.VerifyServerResponse(verifications=verifications)

    def RetireVersions(self, request: operator_pb2.RetireVersionsRequest, call: Call) -> Message:
        """Retire unused versions of a model; with `dry_run`, only report which."""
        done = self._store.lifecycle.retire(
            request.model.removeprefix("models/"), request.versions, request.keep, request.dry_run
        )
        if done.retired and not request.dry_run:
            names = ", ".join(record.name for record in done.retired)
            self._events.add("operator", f"models/{done.retired[0].model}", "retire", versions=names[:1000])
        return operator_pb2.RetireVersionsResponse(
            retired=[self._views.version(record) for record in done.retired],
            kept=[self._views.version(record) for record in done.kept],
            freed_bytes=done.freed_bytes,
        )

    def ListEvents(self, request: operator_pb2.ListEventsRequest, call: Call) -> Iterator[Message | Pause]:
        """Stream events, oldest first; with `follow`, until the daemon stops."""
        for found in self._events.listed(request):
            yield found if isinstance(found, Pause) else event_to_proto(found)

    def ArchiveVersion(self, request: operator_pb2.ArchiveVersionRequest, call: Call) -> Message:
        """Archive a version, and return once its copy is verified. Raises FailedPrecondition (NO_ARCHIVE)."""
        return _archived(needed(self._archive).archive_now(*parse_name(request.version, "versions")))

    def ListArchive(self, request: operator_pb2.ListArchiveRequest, call: Call) -> Message:
        """List the archived versions, newest first. Raises FailedPrecondition (NO_ARCHIVE)."""
        found = needed(self._archive).archived(request.model.removeprefix("models/"))
        return operator_pb2.ListArchiveResponse(versions=map(_archived, found))

    def RestoreVersion(self, request: operator_pb2.RestoreVersionRequest, call: Call) -> Message:
        """Restore an archived version, and return once it is READY. Raises FailedPrecondition (NO_ARCHIVE)."""
        return self._views.version(needed(self._archive).restore(*parse_name(request.version, "versions")))


def _archived(archived: Archived) -> operator_pb2.ArchivedVersion:
    return operator_pb2.ArchivedVersion(
        version=archived.name,
        url=archived.url,
        size_bytes=archived.size_bytes,
        fingerprint=archived.fingerprint,
        archive_time=timestamp(archived.archive_time),
    )


def _export(reader: VersionReader, model: str, number: int) -> Iterator[Message]:
    """Yield files in the order of their names, the manifest last; an empty file is one empty part."""
    with reader.folder(model, number) as (manifest, folder):
        reader.await_whole(model, number)
        names = sorted([*manifest.other_files, *(file.path for file in manifest.files)])
        for name in names:
            path = folder / name
            size = path.stat().st_size
            with path.open("rb", buffering=0) as file:
                for offset in range(0, max(size, 1), _PART_BYTES):
                    span = PieceSpan(name, offset, min(offset + _PART_BYTES, size))
                    with reader.reading(model, number, [span] if name not in manifest.other_files else []):
                        data = file.read(_PART_BYTES)
                    checksum = xxhash.xxh3_64_intdigest(data)
                    yield operator_pb2.FilePart(path=name, offset=offset, size_bytes=size, data=data, checksum=checksum)
        data = reader.manifest_content(model, number)
    checksum = xxhash.xxh3_64_intdigest(data)
    yield operator_pb2.FilePart(path=MANIFEST_FILE, size_bytes=len(data), data=data, checksum=checksum)
