"""PublisherService: calls of trainer ranks."""

from collections.abc import Callable, Iterator, Sequence

import numpy as np
from blake3 import blake3
from google.protobuf.message import Message
from resharder.converters.wire.boxes import spec_from_proto
from resharder.converters.wire.chunk_frame import unframe
from resharder.server.infra.change_signal import Waiting
from resharder.server.ingest.boxes import read_boxes
from resharder.server.ingest.intake import Intake
from resharder.server.ingest.maxima import RankBlocks, read_shared
from resharder.server.ingest.publisher import frozen_boxes, home_boxes
from resharder.server.observability.tracing.ids import traceparent_of
from resharder.server.rpc.convert import Views, seconds
from resharder.server.rpc.dispatch import Call
from resharder.server.state.errors import InvalidArgument
from resharder.server.state.timing import timings_from_proto
from resharder.server.state.version import parse_name
from resharder.v1 import publisher_pb2, resources_pb2


class PublisherService:
    """Methods of `PublisherService`. Errors are those of the parts that each method calls."""

    def __init__(self, intake: Intake, views: Views, withhold: Callable[[str, int], None]) -> None:
        """Create the service.

        `withhold` is called with the model and number of each version that no rank offers for the direct path.
        """
        self._intake, self._views, self._withhold = intake, views, withhold

    def CreatePublisher(self, request: publisher_pb2.CreatePublisherRequest, call: Call) -> Message:
        """Claim a model for a job. Idempotent for every rank of the job."""
        files = {file.path: file.content for file in request.model.files}
        create = self._intake.create_publisher
        claim = request.model.name, request.job, request.world_size, files, request.together, request.base
        made = self._views.publisher(create(*claim))
        nonces = self._intake.nodes.nonces()
        made.nonce_files.extend(nonces.files)
        made.settled_nonces.extend(nonces.settled)
        return made

    def RegisterSlot(self, request: publisher_pb2.RegisterSlotRequest, call: Call) -> Message:
        """Register a rank's tensors and boxes.

        The last rank's call checks that the slots tile the model, and reserves capacity. The job's claim then takes effect and
        fences earlier jobs.
        """
        specs = [spec_from_proto(spec) for spec in request.tensors]
        if len({spec.name for spec in specs}) < len(specs):
            raise InvalidArgument("TENSORS", "a tensor is given twice")
        boxes, process = read_boxes(request.boxes, specs), request.process[:128]
        shared = RankBlocks(read_shared(request.contributed, specs), read_shared(request.received, specs))
        readable = _readable(request.readable)
        request.ClearField("process")  # the same tensors and boxes are the same registration
        request.ClearField("readable")
        gathers, warnings = request.gathers, list(request.warnings)
        request.ClearField("gathers")
        request.ClearField("warnings")
        frozen = frozenset(request.frozen)
        request.ClearField("frozen")  # a hint, of which the first one counts
        fingerprint = str(blake3(request.SerializeToString(deterministic=True)).hexdigest())
        return self._views.publisher(
            self._intake.register_slot(
                request.publisher,
                request.rank,
                fingerprint,
                specs,
                boxes,
                process,
                shared,
                readable,
                gathers=gathers,
                warnings=warnings,
                frozen=frozen,
            )
        )

    def GetAssignment(self, request: publisher_pb2.GetAssignmentRequest, call: Call) -> Waiting[Message]:
        """Return the boxes that a rank sends, once all ranks have registered."""
        wait = seconds(request.wait_seconds)
        publisher, boxes = yield from self._intake.assignment(request.publisher, request.rank, wait)
        answer = publisher_pb2.Assignment(
            publisher=self._views.publisher(publisher), boxes=boxes, chunk_bytes=self._intake.chunk_bytes
        )
        answer.node_boxes.extend(home_boxes(publisher, request.rank, gathered=False).tolist())
        answer.gathered_boxes.extend(home_boxes(publisher, request.rank, gathered=True).tolist())
        answer.frozen_boxes.extend(frozen_boxes(publisher, request.rank).tolist())
        if answer.node_boxes or answer.gathered_boxes:
            answer.node = f"nodes/{publisher.hosts[request.rank]}"
        return answer

    def RenewLease(self, request: publisher_pb2.RenewLeaseRequest, call: Call) -> Message:
        """Renew a rank's lease, and return its publisher."""
        publisher = self._intake.publisher(request.publisher, request.rank)
        self._intake.report_readable(publisher, request.rank, _readable(request.readable))
        return self._views.publisher(publisher)

    def CreateVersion(self, request: publisher_pb2.CreateVersionRequest, call: Call) -> Waiting[Message]:
        """Return the version of a rank's step, and begin it if there is none."""
        after = request.after if request.HasField("after") else None
        record = yield from self._intake.create_version(
            request.publisher,
            request.rank,
            request.step,
            after,
            skipped=request.skipped,
            base_version=request.base_version,
        )
        if request.withheld:
            self._withhold(record.model, record.number)
        return self._views.version(record)

    def ExchangeMaxima(self, request: publisher_pb2.ExchangeMaximaRequest, call: Call) -> Waiting[Message]:
        """Return the maxima of blocks that a rank shares with others, once those have brought theirs."""
        model, number = parse_name(request.version, "versions")
        values, wait = np.array(request.maxima, np.float32), seconds(request.wait_seconds)
        found = yield from self._intake.exchange_maxima(model, number, request.epoch, request.rank, values, wait)
        return publisher_pb2.Maxima(maxima=found.tolist())

    def UploadChunks(self, call: Call) -> "ChunkStream":
        """Receive chunks, each of which renews its rank's lease."""
        return ChunkStream(self._intake)

    def ListMissingChunks(self, request: publisher_pb2.SlotRequest, call: Call) -> Message:
        """List the chunks of a slot that have not arrived, so that a rank can continue after an interruption."""
        model, number = parse_name(request.version, "versions")
        return publisher_pb2.MissingChunks(indices=self._intake.missing_chunks(model, number, request.epoch, request.rank))

    def ReleaseFiles(self, request: publisher_pb2.ReleaseFilesRequest, call: Call) -> Message:
        """Begin to digest files that all of their writers have closed."""
        model, number = parse_name(request.version, "versions")
        files, unchanged = request.files, request.unchanged
        self._intake.release_files(model, number, request.epoch, request.rank, files, unchanged=unchanged)
        return publisher_pb2.ReleaseFilesResponse()

    def ThawFiles(self, request: publisher_pb2.SlotRequest, call: Call) -> Message:
        """Give a version files of its own for a rank's frozen boxes, which have changed."""
        model, number = parse_name(request.version, "versions")
        self._intake.thaw_files(model, number, request.epoch, request.rank)
        return publisher_pb2.ThawFilesResponse()

    def SealSlot(self, request: publisher_pb2.SealSlotRequest, call: Call) -> Message:
        """Declare a slot complete. The last seal starts verification and commit, which this call does not wait for."""
        model, number = parse_name(request.version, "versions")
        timings, trace = timings_from_proto(request.timings), traceparent_of(call.metadata)
        seal = (request.rank, request.digests, request.mapped, timings, trace)
        return self._views.version(self._intake.seal_slot(model, number, request.epoch, *seal, unchanged=request.unchanged))

    def AbortVersion(self, request: publisher_pb2.AbortVersionRequest, call: Call) -> Message:
        """Abort a version that is UPLOADING; a no-op for any other."""
        model, number = parse_name(request.version, "versions")
        return self._views.version(self._intake.abort_version(model, number, request.epoch, request.reason[:1000]))

    def WaitVersion(self, request: publisher_pb2.WaitVersionRequest, call: Call) -> Waiting[Message]:
        """Return a version once it is no longer UPLOADING or, with `serving`, once its servers serve it."""
        model, number = parse_name(request.version, "versions")
        record = yield from self._intake.wait_version(model, number, seconds(request.wait_seconds), request.serving)
        return self._views.version(record)


def _readable(found: Sequence[resources_pb2.StoreAccess]) -> dict[str, bytes]:
    return {access.nonce_file: access.nonce for access in found}


class ChunkStream:
    """Session of one stream of chunks, which are raw frames rather than messages."""

    def __init__(self, intake: Intake) -> None:
        self._intake = intake
        self._model, self._chunks, self._size = "", 0, 0

    def receive(self, message: bytes) -> None:
        """Store a chunk. Raises InvalidArgument (CHUNK), and the errors of `Uploads.land`."""
        try:
            header, data, named = unframe(message)
        except ValueError as error:
            raise InvalidArgument("CHUNK", str(error)) from error
        self._model = self._model or named
        if not self._model or (named and named != self._model):
            raise InvalidArgument("CHUNK", f"expected one model's name in the first chunk of a stream, got {named!r}")
        self._intake.land(self._model, header, data)
        self._chunks, self._size = self._chunks + 1, self._size + len(data)

    def end(self) -> Message:
        """Return the number of chunks and bytes received, repeated ones included."""
        return publisher_pb2.UploadSummary(received_chunks=self._chunks, received_bytes=self._size)

    def responses(self) -> Iterator[Message]:
        """Return nothing: the call has one answer."""
        return iter(())

    def close(self) -> None:
        """Do nothing: chunks are stored as they arrive."""
