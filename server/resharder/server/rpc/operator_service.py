"""PublisherService and OperatorService: read the request, call intake, store or fleets, write the answer."""

import secrets
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import grpc
import xxhash
from blake3 import blake3
from google.protobuf.message import Message
from resharder.converters.wire.boxes import spec_from_proto
from resharder.converters.wire.chunk_frame import unframe
from resharder.server.archive.archive import Archive, needed
from resharder.server.archive.checkpoints import Archived
from resharder.server.fleets.commands import Operations
from resharder.server.fleets.fleets import Fleets
from resharder.server.fleets.profiles import Profiles
from resharder.server.fleets.verifications import Verifications
from resharder.server.infra.event_log import Events, event_to_proto
from resharder.server.ingest.coordinator import Intake, parse_name
from resharder.server.ingest.packed_boxes import read_boxes
from resharder.server.ingest.publisher import Publisher
from resharder.server.observability.tracing.ids import Tracing, traceparent_of
from resharder.server.rpc.convert import fleet_to_proto, server_to_proto, store_access, timestamp, version_to_proto
from resharder.server.state.errors import InvalidArgument
from resharder.server.state.timing import timings_from_proto
from resharder.server.store.manifest import MANIFEST_FILE, STAGING, VersionRecord
from resharder.server.store.store import Store
from resharder.v1 import operator_pb2, publisher_pb2, resources_pb2

_MAX_WAIT = 3600.0
_PART_BYTES = 1 << 20


class Views:
    """Publishers and versions as messages."""

    def __init__(self, intake: Intake, fleets: Fleets, tracing: Tracing) -> None:
        self.intake, self.store, self.fleets, self._tracing = intake, intake.store, fleets, tracing

    def publisher(self, publisher: Publisher) -> resources_pb2.Publisher:
        return resources_pb2.Publisher(
            name=publisher.name,
            model=publisher.model,
            job=publisher.job,
            epoch=publisher.epoch,
            world_size=publisher.world_size,
            state=resources_pb2.Publisher.State.Value(publisher.state),
            reason=f"{publisher.error.reason}: {publisher.error}" if publisher.error else "",
            registered_slots=len(publisher.registered),
            store=store_access(self.store),
            lease_seconds=self.intake.lease_seconds,
            live_ranks=self.intake.live_ranks(publisher),
            newest_version=self.store.newest_number(publisher.model),
        )

    def version(self, record: VersionRecord, slots: bool = True) -> resources_pb2.Version:
        message = version_to_proto(self.store, record, self.fleets.serving(record.model, record.number))
        message.trace = self._tracing.traceparent(record)
        if record.state == STAGING and self.store.shared:
            message.folder = str(self.store.folder(record))
        if slots and record.state == STAGING:
            for rank, sealed, size, received in self.intake.progress(record):
                state = resources_pb2.Slot.SEALED if sealed else resources_pb2.Slot.OPEN
                message.slots.add(rank=rank, state=state, size_bytes=size, received_bytes=received)
        return message


class PublisherService:
    def __init__(self, intake: Intake, views: Views, withhold: Callable[[str, int], None]) -> None:
        """`withhold` is told the model and number of versions that no rank offers for the direct path."""
        self._intake, self._views, self._withhold = intake, views, withhold

    def CreatePublisher(self, request: publisher_pb2.CreatePublisherRequest, context: grpc.ServicerContext) -> Message:
        files = {file.path: file.content for file in request.model.files}
        return self._views.publisher(self._intake.create_publisher(request.model.name, request.job, request.world_size, files))

    def RegisterSlot(self, request: publisher_pb2.RegisterSlotRequest, context: grpc.ServicerContext) -> Message:
        specs = [spec_from_proto(spec) for spec in request.tensors]
        if len({spec.name for spec in specs}) < len(specs):
            raise InvalidArgument("TENSORS", "expected every tensor once")
        boxes, process = read_boxes(request.boxes, specs), request.process[:128]
        request.ClearField("process")  # the same tensors and boxes are the same registration
        fingerprint = str(blake3(request.SerializeToString(deterministic=True)).hexdigest())
        return self._views.publisher(self._intake.register(request.publisher, request.rank, fingerprint, specs, boxes, process))

    def GetAssignment(self, request: publisher_pb2.GetAssignmentRequest, context: grpc.ServicerContext) -> Message:
        publisher, boxes = self._intake.assignment(
            request.publisher, request.rank, seconds(request.wait_seconds), context.is_active
        )
        return publisher_pb2.Assignment(
            publisher=self._views.publisher(publisher), boxes=boxes, chunk_bytes=self._intake.chunk_bytes
        )

    def RenewLease(self, request: publisher_pb2.RenewLeaseRequest, context: grpc.ServicerContext) -> Message:
        return self._views.publisher(self._intake.publisher(request.publisher, request.rank))

    def CreateVersion(self, request: publisher_pb2.CreateVersionRequest, context: grpc.ServicerContext) -> Message:
        after = request.after if request.HasField("after") else None
        record = self._intake.create_version(request.publisher, request.rank, request.step, after)
        if request.withheld:
            self._withhold(record.model, record.number)
        return self._views.version(record)

    def UploadChunks(self, messages: Iterator[bytes], context: grpc.ServicerContext) -> Message:
        model, chunks, size = "", 0, 0
        for message in messages:
            try:
                header, data, named = unframe(message)
            except ValueError as error:
                raise InvalidArgument("CHUNK", str(error)) from error
            model = model or named
            if not model or (named and named != model):
                raise InvalidArgument("CHUNK", f"expected one model's name in the first chunk of a stream, got {named!r}")
            self._intake.land(model, header, data)
            chunks, size = chunks + 1, size + len(data)
        return publisher_pb2.UploadSummary(received_chunks=chunks, received_bytes=size)

    def ListMissingChunks(self, request: publisher_pb2.SlotRequest, context: grpc.ServicerContext) -> Message:
        model, number = parse_name(request.version, "versions")
        return publisher_pb2.MissingChunks(indices=self._intake.missing(model, number, request.epoch, request.rank))

    def SealSlot(self, request: publisher_pb2.SealSlotRequest, context: grpc.ServicerContext) -> Message:
        model, number = parse_name(request.version, "versions")
        timings, trace = timings_from_proto(request.timings), traceparent_of(context.invocation_metadata())
        said = (request.rank, request.digests, request.mapped, timings, trace)
        return self._views.version(self._intake.seal(model, number, request.epoch, *said))

    def AbortVersion(self, request: publisher_pb2.AbortVersionRequest, context: grpc.ServicerContext) -> Message:
        model, number = parse_name(request.version, "versions")
        return self._views.version(self._intake.abort(model, number, request.epoch, request.reason[:1000]))

    def WaitVersion(self, request: publisher_pb2.WaitVersionRequest, context: grpc.ServicerContext) -> Message:
        model, number = parse_name(request.version, "versions")
        return self._views.version(
            self._intake.wait(model, number, seconds(request.wait_seconds), request.serving, context.is_active)
        )


class OperatorService:
    def __init__(
        self,
        views: Views,
        operations: Operations,
        events: Events,
        archive: Archive | None,
        profiles: Profiles,
        verifications: Verifications,
        daemon: operator_pb2.Daemon,
    ) -> None:
        self._intake, self._store, self._views, self._fleets = views.intake, views.store, views, views.fleets
        self._operations, self._events, self._archive, self._daemon = operations, events, archive, daemon
        self._profiles, self._verifications = profiles, verifications

    def GetDaemon(self, request: operator_pb2.GetDaemonRequest, context: grpc.ServicerContext) -> Message:
        answer = operator_pb2.Daemon()
        answer.CopyFrom(self._daemon)
        answer.time.GetCurrentTime()
        if (access := store_access(self._store)) is not None:
            answer.store.CopyFrom(access)
        answer.store_used_bytes = self._store.used_bytes()
        answer.models.extend(self._store.models())
        answer.publishers.extend(self._views.publisher(publisher) for publisher in self._intake.publishers())
        return answer

    def ListVersions(self, request: operator_pb2.ListVersionsRequest, context: grpc.ServicerContext) -> Message:
        models = [request.model] if request.model else self._store.models()
        # The newest first: what is asked for most, and stable while versions come.
        records = [record for model in models for record in reversed(self._store.versions(model))]
        page, token = _page([(r.name, r) for r in records], request.page_size, request.page_token)
        return operator_pb2.ListVersionsResponse(versions=[self._views.version(r) for r in page], next_page_token=token)

    def GetVersion(self, request: operator_pb2.GetVersionRequest, context: grpc.ServicerContext) -> Message:
        return self._views.version(self._store.get(*parse_name(request.version, "versions")))

    def ListServers(self, request: operator_pb2.ListServersRequest, context: grpc.ServicerContext) -> Message:
        views = [(view.server.id, view) for view in self._fleets.servers(request.fleet)]
        page, token = _page(views, request.page_size, request.page_token)
        return operator_pb2.ListServersResponse(servers=[server_to_proto(view) for view in page], next_page_token=token)

    def ListFleets(self, request: operator_pb2.ListFleetsRequest, context: grpc.ServicerContext) -> Message:
        page, token = _page([(view.fleet.name, view) for view in self._fleets.fleets()], request.page_size, request.page_token)
        return operator_pb2.ListFleetsResponse(fleets=[fleet_to_proto(view) for view in page], next_page_token=token)

    def ExportVersion(self, request: operator_pb2.ExportVersionRequest, context: grpc.ServicerContext) -> Iterator[Message]:
        model, number = parse_name(request.version, "versions")
        holder = f"export-{secrets.token_hex(4)}"
        record = self._store.hold(model, number, holder)
        try:
            yield from _export(self._store, record)
        finally:
            self._store.release(model, number, holder)

    def UpdateFleet(self, request: operator_pb2.UpdateFleetRequest, context: grpc.ServicerContext) -> Message:
        return fleet_to_proto(self._operations.update(request))

    def RollBackFleet(self, request: operator_pb2.RollBackFleetRequest, context: grpc.ServicerContext) -> Message:
        return fleet_to_proto(self._operations.roll_back(request))

    def DecideMove(self, request: operator_pb2.DecideMoveRequest, context: grpc.ServicerContext) -> Message:
        return fleet_to_proto(self._operations.decide(request))

    def SetPower(self, request: operator_pb2.SetPowerRequest, context: grpc.ServicerContext) -> Message:
        return fleet_to_proto(self._operations.set_power(request))

    def SetDrained(self, request: operator_pb2.SetDrainedRequest, context: grpc.ServicerContext) -> Message:
        return fleet_to_proto(self._operations.set_drained(request))

    def ProfileInstall(self, request: operator_pb2.ProfileInstallRequest, context: grpc.ServicerContext) -> Iterator[Message]:
        yield from self._profiles.take(request.server.removeprefix("servers/"), seconds(request.wait_seconds), context.is_active)

    def VerifyServer(self, request: operator_pb2.VerifyServerRequest, context: grpc.ServicerContext) -> Message:
        server, wait = request.server.removeprefix("servers/"), seconds(request.wait_seconds)
        return operator_pb2.VerifyServerResponse(verifications=self._verifications.take(server, wait, context.is_active))

    def RetireVersions(self, request: operator_pb2.RetireVersionsRequest, context: grpc.ServicerContext) -> Message:
        done = self._store.retire(request.model.removeprefix("models/"), request.versions, request.keep, request.dry_run)
        if done.retired and not request.dry_run:
            names = ", ".join(record.name for record in done.retired)
            self._events.add("operator", f"models/{done.retired[0].model}", "retire", versions=names[:1000])
        return operator_pb2.RetireVersionsResponse(
            retired=[self._views.version(record) for record in done.retired],
            kept=[self._views.version(record) for record in done.kept],
            freed_bytes=done.freed_bytes,
        )

    def ListEvents(self, request: operator_pb2.ListEventsRequest, context: grpc.ServicerContext) -> Iterator[Message]:
        yield from map(event_to_proto, self._events.listed(request, context.is_active))

    def ArchiveVersion(self, request: operator_pb2.ArchiveVersionRequest, context: grpc.ServicerContext) -> Message:
        return _archived(needed(self._archive).archive_now(*parse_name(request.version, "versions")))

    def ListArchive(self, request: operator_pb2.ListArchiveRequest, context: grpc.ServicerContext) -> Message:
        found = needed(self._archive).archived(request.model.removeprefix("models/"))
        return operator_pb2.ListArchiveResponse(versions=map(_archived, found))

    def RestoreVersion(self, request: operator_pb2.RestoreVersionRequest, context: grpc.ServicerContext) -> Message:
        return self._views.version(needed(self._archive).restore(*parse_name(request.version, "versions")))


def _archived(archived: Archived) -> operator_pb2.ArchivedVersion:
    return operator_pb2.ArchivedVersion(
        version=archived.name,
        url=archived.url,
        size_bytes=archived.size_bytes,
        fingerprint=archived.fingerprint,
        archive_time=timestamp(archived.archive_time),
    )


def _export(store: Store, record: VersionRecord) -> Iterator[Message]:
    """Files in the order of their names, the manifest last; an empty file is one empty part."""
    manifest = store.manifest(record.model, record.number)
    names = sorted([*manifest.other_files, *(file.path for file in manifest.files)])
    for name in [*names, MANIFEST_FILE]:
        path = store.folder(record) / name
        size = path.stat().st_size
        with path.open("rb", buffering=0) as file:
            for offset in range(0, max(size, 1), _PART_BYTES):
                data = file.read(_PART_BYTES)
                checksum = xxhash.xxh3_64_intdigest(data)
                yield operator_pb2.FilePart(path=name, offset=offset, size_bytes=size, data=data, checksum=checksum)


def seconds(wanted: float) -> float:
    """Raises InvalidArgument (WAIT_SECONDS); NaN too."""
    if not 0 <= wanted <= _MAX_WAIT:
        raise InvalidArgument("WAIT_SECONDS", f"expected wait_seconds of 0 to {_MAX_WAIT:.0f}, got {wanted}")
    return wanted


def _page(items: Sequence[tuple[str, Any]], size: int, token: str) -> tuple[list[Any], str]:
    """The items that follow the one named `token`, and the next token. Raises InvalidArgument (PAGE_TOKEN)."""
    if size < 0:
        raise InvalidArgument("PAGE_SIZE", f"expected a page size of 0 or more, got {size}")
    size = min(size or 100, 1000)
    names = [name for name, _ in items]
    if token and token not in names:
        raise InvalidArgument("PAGE_TOKEN", f"page token {token[:200]!r} is none of this list any more: start again")
    first = names.index(token) + 1 if token else 0
    chosen = items[first : first + size]
    return [item for _, item in chosen], chosen[-1][0] if first + size < len(items) else ""


def add_publisher_service(service: PublisherService, server: grpc.Server) -> None:
    """As the generated function does, but chunks come as they are."""
    requests: dict[str, Any] = {
        "CreatePublisher": publisher_pb2.CreatePublisherRequest,
        "RegisterSlot": publisher_pb2.RegisterSlotRequest,
        "GetAssignment": publisher_pb2.GetAssignmentRequest,
        "RenewLease": publisher_pb2.RenewLeaseRequest,
        "CreateVersion": publisher_pb2.CreateVersionRequest,
        "ListMissingChunks": publisher_pb2.SlotRequest,
        "SealSlot": publisher_pb2.SealSlotRequest,
        "AbortVersion": publisher_pb2.AbortVersionRequest,
        "WaitVersion": publisher_pb2.WaitVersionRequest,
    }
    serialize: Callable[[Message], bytes] = lambda message: message.SerializeToString()  # noqa: E731
    handlers = {
        name: grpc.unary_unary_rpc_method_handler(getattr(service, name), request.FromString, serialize)
        for name, request in requests.items()
    }
    handlers["UploadChunks"] = grpc.stream_unary_rpc_method_handler(service.UploadChunks, None, serialize)
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("resharder.v1.PublisherService", handlers),))
    server.add_registered_method_handlers("resharder.v1.PublisherService", handlers)
