"""Trainer ranks on the generated stubs, for tests of the daemon."""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import grpc
import numpy as np
import xxhash
from google.rpc import error_details_pb2, status_pb2
from resharder.converters.geometry.chunking import cut_chunks
from resharder.converters.geometry.layout import ITEM_SIZES, Box, TensorSpec, box_index, full_box
from resharder.converters.storage.digest import digest
from resharder.converters.storage.files import BITS, MappedFiles, read_layout
from resharder.converters.wire.boxes import boxes_to_proto, spec_to_proto
from resharder.converters.wire.chunk_frame import ChunkHeader, frame
from resharder.v1 import operator_pb2_grpc, publisher_pb2, publisher_pb2_grpc, resources_pb2

Weights = Mapping[str, np.ndarray]  # raw bits
Held = tuple[str, Box, bool]  # tensor, box, replica


def reason_of(error: grpc.RpcError) -> str:
    """Return the ErrorInfo's reason, after checking that the status repeats code and message."""
    details = dict(error.trailing_metadata() or ()).get("grpc-status-details-bin")
    status = status_pb2.Status.FromString(details)
    assert (status.code, status.message) == (error.code().value[0], error.details())
    info = error_details_pb2.ErrorInfo()
    status.details[0].Unpack(info)
    assert info.domain == "resharder"
    return info.reason


def random_weights(specs: Iterable[TensorSpec], seed: int) -> dict[str, np.ndarray]:
    random = np.random.default_rng(seed)
    made = {}
    for spec in specs:
        kind = BITS[ITEM_SIZES[spec.dtype]]
        made[spec.name] = random.integers(0, np.iinfo(kind).max, spec.shape, kind)
    return made


class Job:
    """Ranks of one job. `holdings[rank]` has the boxes of each."""

    def __init__(
        self,
        channel: grpc.Channel,
        specs: Sequence[TensorSpec],
        holdings: Sequence[Sequence[Held]],
        *,
        job: str = "job",
        model: str = "policy",
        files: Mapping[str, bytes] | None = None,
        world_size: int | None = None,
        together: Sequence[str] = (),
    ) -> None:
        self.stub = publisher_pb2_grpc.PublisherServiceStub(channel)
        self.operator = operator_pb2_grpc.OperatorServiceStub(channel)
        self.upload_raw = channel.stream_unary("/resharder.v1.PublisherService/UploadChunks", request_serializer=None)
        self.specs, self.holdings, self.job, self.model = specs, holdings, job, model
        self.files = {"config.json": b'{"architectures": ["None"]}'} if files is None else files
        self.world_size, self.together = world_size or len(holdings), together
        self.name, self.epoch, self.chunk_bytes = "", 0, 0
        self.sends: dict[int, list[Held]] = {}

    def create(self) -> resources_pb2.Publisher:
        files = [resources_pb2.ModelFile(path=path, content=content) for path, content in self.files.items()]
        model = resources_pb2.Model(name=self.model, files=files)
        publisher = self.stub.CreatePublisher(
            publisher_pb2.CreatePublisherRequest(model=model, job=self.job, world_size=self.world_size, together=self.together)
        )
        self.name, self.epoch = publisher.name, publisher.epoch
        return publisher

    def register(self, rank: int) -> resources_pb2.Publisher:
        numbers = {spec.name: i for i, spec in enumerate(self.specs)}
        return self.stub.RegisterSlot(
            publisher_pb2.RegisterSlotRequest(
                publisher=self.name,
                rank=rank,
                tensors=[spec_to_proto(spec) for spec in self.specs],
                boxes=boxes_to_proto((numbers[name], box, replica) for name, box, replica in self.holdings[rank]),
            )
        )

    def assigned(self, rank: int) -> list[Held]:
        answer = self.stub.GetAssignment(publisher_pb2.GetAssignmentRequest(publisher=self.name, rank=rank, wait_seconds=60))
        self.chunk_bytes = answer.chunk_bytes
        self.sends[rank] = [self.holdings[rank][i] for i in answer.boxes]
        return self.sends[rank]

    def connect(self) -> "Job":
        self.create()
        for rank in range(len(self.holdings)):
            self.register(rank)
        for rank in range(len(self.holdings)):
            self.assigned(rank)
        return self

    def begin(self, step: int, rank: int = 0) -> resources_pb2.Version:
        return self.stub.CreateVersion(publisher_pb2.CreateVersionRequest(publisher=self.name, rank=rank, step=step))

    def chunks(self, number: int, rank: int, weights: Weights, only: Iterable[int] | None = None) -> list[bytes]:
        """Yield framed chunks, the first with the model's name."""
        sizes = {spec.name: ITEM_SIZES[spec.dtype] for spec in self.specs}
        boxes = self.sends[rank]
        cut = cut_chunks([box for _, box, _ in boxes], [sizes[name] for name, _, _ in boxes], self.chunk_bytes)
        framed = []
        for index in range(len(cut)) if only is None else only:
            data = b"".join(weights[boxes[p.position][0]][box_index(p.box)].tobytes() for p in cut[index])
            header = ChunkHeader(number, self.epoch, rank, index, xxhash.xxh3_64_intdigest(data))
            framed.append(frame(header, data, "" if framed else self.model))
        return framed

    def upload(self, number: int, rank: int, weights: Weights, only: Iterable[int] | None = None) -> publisher_pb2.UploadSummary:
        return publisher_pb2.UploadSummary.FromString(self.upload_raw(iter(self.chunks(number, rank, weights, only))))

    def missing(self, version: str, rank: int) -> list[int]:
        return list(self.stub.ListMissingChunks(publisher_pb2.SlotRequest(version=version, epoch=self.epoch, rank=rank)).indices)

    def seal(self, version: str, rank: int, weights: Weights, mapped: bool = False) -> resources_pb2.Version:
        digests = [digest(weights[name][box_index(box)], box, weights[name].shape) for name, box, _ in self.sends[rank]]
        return self.stub.SealSlot(
            publisher_pb2.SealSlotRequest(version=version, epoch=self.epoch, rank=rank, digests=digests, mapped=mapped)
        )

    def wait(self, version: str, seconds: float = 120) -> resources_pb2.Version:
        return self.stub.WaitVersion(publisher_pb2.WaitVersionRequest(version=version, wait_seconds=seconds))

    def publish(self, step: int, weights: Weights) -> resources_pb2.Version:
        """Upload the missing chunks, seal, and return the version once it is settled."""
        version = self.begin(step)
        for rank in range(len(self.holdings)):
            self.upload(version.number, rank, weights, only=self.missing(version.name, rank))
        for rank in range(len(self.holdings)):
            self.seal(version.name, rank, weights)
        return self.wait(version.name)


def whole(specs: Iterable[TensorSpec]) -> list[Held]:
    """Return the boxes of one rank that holds all tensors."""
    return [(spec.name, full_box(spec.shape), False) for spec in specs]


def read_folder(folder: str) -> dict[str, np.ndarray]:
    """Return copies of a checkpoint folder's tensors, as raw bits."""
    path = Path(folder)
    with MappedFiles(path, read_layout(path)) as files:
        return {name: array.copy() for name, array in files.arrays.items()}
