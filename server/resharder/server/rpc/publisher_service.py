"""PublisherService: calls of trainer ranks."""

from collections.abc import Callable, Iterator

from blake3 import blake3
from google.protobuf.message import Message
from resharder.converters.wire.boxes import spec_from_proto
from resharder.converters.wire.chunk_frame import unframe
from resharder.server.infra.change_signal import Waiting
from resharder.server.ingest.coordinator import Intake
from resharder.server.ingest.packed_boxes import read_boxes
from resharder.server.ingest.shared import parse_name
from resharder.server.observability.tracing.ids import traceparent_of
from resharder.server.rpc.dispatch import Call
from resharder.server.rpc.views import Views, seconds
from resharder.server.state.errors import InvalidArgument
from resharder.server.state.timing import timings_from_proto
from resharder.v1 import publisher_pb2


class PublisherService:
    def __init__(self, intake: Intake, views: Views, withhold: Callable[[str, int], None]) -> None:
        """Create the service. `withhold` is called with the model and number of versions that no rank
        offers for the direct path.
        """
        self._intake, self._views, self._withhold = intake, views, withhold

    def CreatePublisher(self, request: publisher_pb2.CreatePublisherRequest, call: Call) -> Message:
        files = {file.path: file.content for file in request.model.files}
        return self._views.publisher(self._intake.publishers.create(request.model.name, request.job, request.world_size, files))

    def RegisterSlot(self, request: publisher_pb2.RegisterSlotRequest, call: Call) -> Message:
        specs = [spec_from_proto(spec) for spec in request.tensors]
        if len({spec.name for spec in specs}) < len(specs):
            raise InvalidArgument("TENSORS", "expected every tensor once")
        boxes, process = read_boxes(request.boxes, specs), request.process[:128]
        request.ClearField("process")  # the same tensors and boxes are the same registration
        fingerprint = str(blake3(request.SerializeToString(deterministic=True)).hexdigest())
        return self._views.publisher(
            self._intake.publishers.register(request.publisher, request.rank, fingerprint, specs, boxes, process)
        )

    def GetAssignment(self, request: publisher_pb2.GetAssignmentRequest, call: Call) -> Waiting[Message]:
        wait = seconds(request.wait_seconds)
        publisher, boxes = yield from self._intake.publishers.assignment(request.publisher, request.rank, wait)
        return publisher_pb2.Assignment(
            publisher=self._views.publisher(publisher), boxes=boxes, chunk_bytes=self._intake.steps.chunk_bytes
        )

    def RenewLease(self, request: publisher_pb2.RenewLeaseRequest, call: Call) -> Message:
        return self._views.publisher(self._intake.publishers.get(request.publisher, request.rank))

    def CreateVersion(self, request: publisher_pb2.CreateVersionRequest, call: Call) -> Waiting[Message]:
        after = request.after if request.HasField("after") else None
        record = yield from self._intake.steps.create(request.publisher, request.rank, request.step, after)
        if request.withheld:
            self._withhold(record.model, record.number)
        return self._views.version(record)

    def UploadChunks(self, call: Call) -> "ChunkStream":
        return ChunkStream(self._intake)

    def ListMissingChunks(self, request: publisher_pb2.SlotRequest, call: Call) -> Message:
        model, number = parse_name(request.version, "versions")
        return publisher_pb2.MissingChunks(indices=self._intake.uploads.missing(model, number, request.epoch, request.rank))

    def SealSlot(self, request: publisher_pb2.SealSlotRequest, call: Call) -> Message:
        model, number = parse_name(request.version, "versions")
        timings, trace = timings_from_proto(request.timings), traceparent_of(call.metadata)
        said = (request.rank, request.digests, request.mapped, timings, trace)
        return self._views.version(self._intake.uploads.seal(model, number, request.epoch, *said))

    def AbortVersion(self, request: publisher_pb2.AbortVersionRequest, call: Call) -> Message:
        model, number = parse_name(request.version, "versions")
        return self._views.version(self._intake.uploads.abort(model, number, request.epoch, request.reason[:1000]))

    def WaitVersion(self, request: publisher_pb2.WaitVersionRequest, call: Call) -> Waiting[Message]:
        model, number = parse_name(request.version, "versions")
        record = yield from self._intake.waits.wait(model, number, seconds(request.wait_seconds), request.serving)
        return self._views.version(record)


class ChunkStream:
    """One stream of chunks, which arrive as bytes without a message around them."""

    def __init__(self, intake: Intake) -> None:
        self._intake = intake
        self._model, self._chunks, self._size = "", 0, 0

    def receive(self, message: bytes) -> None:
        try:
            header, data, named = unframe(message)
        except ValueError as error:
            raise InvalidArgument("CHUNK", str(error)) from error
        self._model = self._model or named
        if not self._model or (named and named != self._model):
            raise InvalidArgument("CHUNK", f"expected one model's name in the first chunk of a stream, got {named!r}")
        self._intake.uploads.land(self._model, header, data)
        self._chunks, self._size = self._chunks + 1, self._size + len(data)

    def end(self) -> Message:
        return publisher_pb2.UploadSummary(received_chunks=self._chunks, received_bytes=self._size)

    def responses(self) -> Iterator[Message]:
        return iter(())

    def close(self) -> None:
        pass
