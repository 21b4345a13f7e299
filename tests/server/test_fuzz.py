"""Requests that no client would send, to every method, through the daemon's own interceptors: no call may fail inside, change a
byte of a READY version, leave behind what cannot be shown or found again, or take memory that does not come back.

`make fuzz` does the same for as long as one likes; benchmarks/results/fuzz.md says what it has done.
"""

from collections.abc import Iterator
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory

import grpc
import hypothesis.strategies as st
import numpy as np
import pytest
import xxhash
from google.protobuf.timestamp_pb2 import Timestamp
from hypothesis import HealthCheck, given, settings
from resharder.converters.geometry.chunking import cut_chunks
from resharder.converters.geometry.layout import ITEM_SIZES, Layout, Piece, Range, TensorSpec, box_index, full_box
from resharder.converters.geometry.piece_arrays import Pieces, pack
from resharder.converters.wire.boxes import boxes_to_proto
from resharder.converters.wire.chunk_frame import frame, unframe
from resharder.server.direct.direct import Direct
from resharder.server.direct.plans import Member
from resharder.server.infra.filesystem import anonymous_bytes
from resharder.server.state.errors import FailedPrecondition, ResourceExhausted
from resharder.server.state.timing import timings_from_proto
from resharder.v1 import direct_pb2, direct_pb2_grpc, operator_pb2, operator_pb2_grpc, publisher_pb2, resources_pb2, server_pb2

from tests.support.fuzz_daemon import MODELS, SPECS, World, fuzzed_daemon, started
from tests.support.fuzzing import METHODS, UPLOAD, Bytes, chunk, requests
from tests.support.publishing import Job, random_weights, read_folder, reason_of, whole
from tests.support.waits import completed

pytestmark = pytest.mark.slow

SETTINGS = settings(max_examples=100, derandomize=True, deadline=None, database=None, suppress_health_check=list(HealthCheck))
GROWTH = 128 << 20  # bytes


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    with TemporaryDirectory(prefix="resharder-test-", dir="/dev/shm") as folder, fuzzed_daemon(Path(folder)) as made:
        yield made


@SETTINGS
@given(data=st.binary(min_size=600, max_size=600))
def test_whatever_is_sent_no_call_fails_inside_and_no_byte_of_a_version_changes(world: World, data: bytes) -> None:
    random = Bytes(data)
    for _ in range(10):
        world.call(random)
    world.check()


@pytest.mark.parametrize("path", METHODS)
def test_a_method_refuses_bytes_that_are_no_message_and_takes_any_that_are_for_what_they_are(world: World, path: str) -> None:
    assert world.send(path, [b"\xff"]) == "INVALID_ARGUMENT"
    random = Random(path)
    for _ in range(40):
        world.send(path, requests(random, path, world.names))
    world.check()


class Frames:
    """One rank's version, as what was accepted so far makes it."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.job = Job(world.door, SPECS, [whole(SPECS)], model="frames").connect()  # type: ignore[arg-type]
        self.version = self.job.begin(1)
        chunks = [unframe(framed) for framed in self.job.chunks(self.version.number, 0, random_weights(SPECS, 5))]
        self.good = [frame(header, data, self.job.model) for header, data, _ in chunks]
        self.expected = read_folder(self.version.folder)
        held = self.job.sends[0]
        sizes = {spec.name: ITEM_SIZES[spec.dtype] for spec in SPECS}
        self._parts = cut_chunks([box for _, box, _ in held], [sizes[name] for name, _, _ in held], self.job.chunk_bytes)

    def upload(self, framed: bytes) -> None:
        before = self._files()
        if self.world.send(UPLOAD, [framed]) != "OK":
            assert self._files() == before, "refused, and bytes have changed"
            return
        chunk = publisher_pb2.Chunk.FromString(framed)
        assert (chunk.version, chunk.epoch, chunk.rank) == (self.version.number, self.job.epoch, 0)
        assert chunk.checksum == xxhash.xxh3_64_intdigest(chunk.data)
        self._land(chunk.index, chunk.data)
        found = read_folder(self.version.folder)
        assert all(found[name].tobytes() == self.expected[name].tobytes() for name in self.expected)

    def _land(self, index: int, data: bytes) -> None:
        at = 0
        for part in self._parts[index]:
            target = self.expected[self.job.sends[0][part.position][0]]
            piece = target[box_index(part.box)]
            size = piece.size * piece.itemsize
            target[box_index(part.box)] = np.frombuffer(data[at : at + size], piece.dtype).reshape(piece.shape)
            at += size
        assert at == len(data)

    def _files(self) -> dict[str, bytes]:
        return {path.name: path.read_bytes() for path in Path(self.version.folder).iterdir()}


@pytest.fixture(scope="module")
def frames(world: World) -> Frames:
    return Frames(world)


@SETTINGS
@given(data=st.binary(min_size=200, max_size=200), at=st.integers(0, 2))
def test_a_frame_that_is_refused_changes_no_byte_and_one_that_is_taken_those_that_it_names(
    frames: Frames, data: bytes, at: int
) -> None:
    random, good = Bytes(data), frames.good[at]
    for _ in range(5):
        frames.upload(chunk(random, good, frames.world.names))


def test_every_good_frame_is_taken_after_all_that(frames: Frames) -> None:
    for framed in frames.good:
        assert frames.world.send(UPLOAD, [framed]) == "OK"
    weights = random_weights(SPECS, 5)
    found = read_folder(frames.version.folder)
    assert all(found[name].tobytes() == weights[name].tobytes() for name in weights)


@pytest.mark.full
def test_many_requests_take_no_memory_that_does_not_come_back(world: World) -> None:
    random = Random("memory")
    for _ in range(800):
        world.call(random)
    before = anonymous_bytes()
    for _ in range(1600):
        world.call(random)
    assert anonymous_bytes() < before + GROWTH
    world.check()


@pytest.mark.full
def test_what_was_sent_keeps_no_daemon_from_starting_again_with_every_version(root: Path) -> None:
    with fuzzed_daemon(root) as world:
        random = Random("restart")
        for _ in range(600):
            world.call(random)
        world.publish(MODELS[0])
    before = {record.name: record.fingerprint for record in world.ready()}
    assert before
    with started(root) as (_, door):
        operator = operator_pb2_grpc.OperatorServiceStub(door)
        for name, fingerprint in before.items():
            version = operator.GetVersion(operator_pb2.GetVersionRequest(version=name))
            assert (version.state, version.fingerprint) == (resources_pb2.Version.READY, fingerprint)
            assert read_folder(version.folder)
        job = Job(door, SPECS, [whole(SPECS)], model=MODELS[0], job="after the restart").connect()  # type: ignore[arg-type]
        assert job.publish(1, random_weights(SPECS, 9)).state == resources_pb2.Version.READY


# What was found, each as it was found


def test_a_fleet_that_is_updated_with_a_time_that_is_none_is_updated(world: World) -> None:
    request = operator_pb2.UpdateFleetRequest(fleet=resources_pb2.Fleet(name=MODELS[0], max_skew=0))
    request.fleet.move.end_time.CopyFrom(Timestamp(seconds=(1 << 63) - 1))
    request.update_mask.paths.append("max_skew")
    assert world.send("/resharder.v1.OperatorService/UpdateFleet", [request.SerializeToString()]) == "OK"


@pytest.mark.parametrize("seconds", [float("nan"), float("inf"), float("-inf"), -1.0])
def test_times_that_no_clock_measures_are_not_shown(world: World, seconds: float) -> None:
    claim = server_pb2.ClaimServerRequest(server="timed", model=MODELS[0])
    assert world.send("/resharder.v1.ServerService/ClaimServer", [claim.SerializeToString()]) == "OK"
    worker = resources_pb2.Worker(
        state=resources_pb2.Worker.EMPTY, process="p", stage_seconds=seconds, apply_seconds=seconds, transport="grpc"
    )
    report = server_pb2.ReportWorkerRequest(server="servers/timed", worker=worker)
    (answer,) = world.door.call("/resharder.v1.ServerService/ReportWorker", [report.SerializeToString()])
    (found,) = resources_pb2.Server.FromString(answer).workers
    assert (found.stage_seconds, found.apply_seconds) == (0, 0)


@pytest.mark.parametrize("start", [1.0, 1.7e9, 2.0**33 - 1, 2.0**33, 2.0**62, -1.0])
@pytest.mark.parametrize("seconds", [0.0, 2.0**33 - 1, 2.0**33, 2.0**62])
def test_spans_are_made_of_times_alone_whose_nanoseconds_a_span_can_say(start: float, seconds: float) -> None:
    message = resources_pb2.Timing(phase="stage", start_time=Timestamp(seconds=int(start)), seconds=seconds)
    timings = timings_from_proto([message])
    assert bool(timings) == (0 < start < 2.0**33 and seconds < 2.0**33), "until the year 2242"
    for timing in timings:
        assert int(timing.end * 1e9).bit_length() <= 64


@pytest.mark.parametrize("method", ["DigestBoxes", "DownloadChunks"])
def test_boxes_of_more_than_the_version_are_refused_at_the_first_that_is_too_much(world: World, method: str) -> None:
    version = world.publish(MODELS[0])
    spec, nothing = max(SPECS, key=lambda spec: spec.size), (9, (), False)  # of the one tensor that the request names
    boxes = [(0, full_box(spec.shape), False)] * (2 * version.size_bytes // spec.size)

    def reason(more: int) -> str:
        request = server_pb2.BoxesRequest(version=version.name, tensors=[spec.name])
        request.boxes.extend(boxes_to_proto([*boxes, *boxes[:1] * more, nothing]))
        with pytest.raises(grpc.RpcError) as caught:
            list(world.door.call(f"/resharder.v1.ServerService/{method}", [request.SerializeToString()]))
        return reason_of(caught.value)

    assert reason(0) == "BOX"
    assert reason(1) == "TOO_MANY_BOXES", "what comes after it is not read"


@pytest.mark.parametrize(
    "owner", ["nobody", "servers/nobody", "models/policy/publishers/999", "servers/models/policy/publishers/1"]
)
def test_memory_of_nobody_that_is_known_is_not_kept(world: World, owner: str) -> None:
    member = direct_pb2.Member(owner=owner, rank=0, process="p")
    kept = world.daemon.direct._plans.owners()
    request = direct_pb2.DeclareMemoryRequest(member=member, fingerprint="f", layout=direct_pb2.MemoryLayout(dimensions=1))
    with pytest.raises(grpc.RpcError) as caught:
        direct_pb2_grpc.DirectServiceStub(world.door).DeclareMemory(request)
    assert reason_of(caught.value) in ("WORKER", "SERVER_UNKNOWN", "PUBLISHER_UNKNOWN", "STALE_EPOCH", "RESOURCE_NAME")
    assert world.daemon.direct._plans.owners() == kept


def _whole(process: int) -> Pieces[int]:
    piece = Piece("w", (Range(0, 8),), "w", 0, (1,))
    return pack({process: Layout({"w": TensorSpec("w", "BF16", (8,))}, (piece,))})


def _joined() -> tuple[Direct, Member]:
    direct, rank = Direct(lambda *_: frozenset(), lambda server: {0: "worker"}), Member("models/policy/publishers/1", 0, "rank")
    worker = Member("servers/a", 0, "worker")
    direct.declare(rank, "memory", _whole(0))
    direct.declare(worker, "memory", _whole(0))
    direct.offer(rank, "memory", "policy", 1, 1, 60)
    return direct, worker


def test_an_offer_whose_memory_a_later_publisher_has_replaced_is_planned_for_nobody() -> None:
    direct, worker = _joined()
    direct.declare(Member("models/policy/publishers/2", 0, "rank"), "memory", _whole(0))
    with pytest.raises(FailedPrecondition) as caught:
        completed(direct.join, worker, "memory", "policy", 1, "i-1")
    assert caught.value.reason == "MEMORY_UNKNOWN"


def test_the_keys_of_a_group_are_bounded_all_together() -> None:
    direct, worker = _joined()
    group = completed(direct.join, worker, "memory", "policy", 1, "i-1").group
    for key in range(256):
        direct.set_key(group, str(key), bytes(1 << 16))
    with pytest.raises(ResourceExhausted):
        direct.set_key(group, "one more", b"x")
    direct.set_key(group, "0", b"")
    direct.set_key(group, "one more", b"x")


HUGE = (
    b'{"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 32, "intermediate_size": 64, '
    b'"num_hidden_layers": 1000000000, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 48}'
)


@pytest.mark.parametrize(
    ("spec", "files"),
    [
        (TensorSpec("__metadata__", "U8", (4,)), {}),
        (TensorSpec("x", "U8", (1,) * 33), {}),
        (TensorSpec("x", "U8", (4,)), {"config.json": HUGE}),
    ],
    ids=["a name that safetensors has taken", "more dimensions than numpy has", "a billion layers"],
)
def test_a_model_that_could_not_be_held_is_refused_at_registration(
    world: World, spec: TensorSpec, files: dict[str, bytes]
) -> None:
    job = Job(world.door, [spec], [whole([spec])], model="odd", job=f"{spec}{len(files)}", files=files)  # type: ignore[arg-type]
    with pytest.raises(grpc.RpcError) as caught:
        job.connect()
    assert reason_of(caught.value) == "LAYOUT_MISMATCH"
    world.check()


def test_a_shape_of_as_many_dimensions_as_there_may_be_is_published(world: World) -> None:
    specs = [TensorSpec("x", "U8", (1,) * 31 + (4,))]
    job = Job(world.door, specs, [whole(specs)], model="odd", job="deep").connect()  # type: ignore[arg-type]
    assert job.publish(1, random_weights(specs, 1)).state == resources_pb2.Version.READY
