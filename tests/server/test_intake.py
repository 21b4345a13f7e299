"""Calls of publishers to a real daemon, permitted and refused; leases on a clock of the test."""

import itertools
import json
import os
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import numpy as np
import pytest
import xxhash
from resharder.converters.architectures.checkpoint import expected_shapes
from resharder.converters.geometry.chunking import cut_chunks
from resharder.converters.geometry.layout import Range, TensorSpec, full_box
from resharder.converters.storage.files import MappedFiles, read_layout
from resharder.converters.wire.chunk_frame import frame, unframe
from resharder.server.config import Config
from resharder.server.fleets.fleets import Fleets
from resharder.server.ingest.boxes import cut_slot, pack
from resharder.server.ingest.intake import Intake
from resharder.server.main import Daemon as DaemonInProcess
from resharder.server.state.server import Worker
from resharder.server.state.server_events import Attached, Reported
from resharder.server.store.store import Store
from resharder.v1 import operator_pb2, publisher_pb2, resources_pb2, server_pb2

from tests.support.daemon import Daemon
from tests.support.observing import wait_until
from tests.support.publishing import Held, Job, random_weights, read_folder, reason_of, whole
from tests.support.store_versions import ready_version
from tests.support.waits import completed

SPECS = [TensorSpec("a", "BF16", (16, 64)), TensorSpec("b", "F32", (8,))]
TOP, BOTTOM, B = (Range(0, 8), Range(0, 64)), (Range(8, 8), Range(0, 64)), full_box((8,))
_MODELS = itertools.count()
TWO: list[list[Held]] = [[("a", TOP, False), ("b", B, False)], [("a", BOTTOM, False)]]


@pytest.fixture(scope="module")
def daemon() -> Iterator[Daemon]:
    with Daemon(chunk_bytes=1024, max_message_bytes=2 << 20) as running:
        yield running


@pytest.fixture
def job(daemon: Daemon) -> Job:
    """Two ranks that have registered, a model for every test."""
    return fresh(daemon).connect()


def fresh(daemon: Daemon, holdings=TWO, specs=SPECS, **options) -> Job:
    return Job(daemon.channel, specs, holdings, model=f"model-{next(_MODELS)}", **options)


def refused(call, code: str, reason: str) -> str:
    with pytest.raises(grpc.RpcError) as caught:
        call()
    assert (caught.value.code().name, reason_of(caught.value)) == (code, reason), caught.value.details()
    return str(caught.value.details())


def bytes_in(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.glob("*.safetensors"))}


# Registration


@pytest.mark.parametrize(
    ("holdings", "expected"),
    [
        ([[("a", TOP, False), ("b", B, False)], []], ["a [16, 64]", "element [8, 0] is held by no rank; so are 512 of its 1024"]),
        ([TWO[0], [("a", full_box((16, 64)), False)]], ["element [0, 0] is held by more than one rank: [0, 1]"]),
        ([TWO[0], [*TWO[1], ("a", (Range(0, 4), Range(0, 64)), True)]], ["replica [0:4, 0:64] that is no owner's box"]),
    ],
)
def test_slots_that_do_not_tile_are_refused_with_the_exact_difference(daemon: Daemon, holdings, expected) -> None:
    job = fresh(daemon, holdings, job=str(expected))
    job.create()
    job.register(0)
    message = refused(lambda: job.register(1), "FAILED_PRECONDITION", "LAYOUT_MISMATCH")
    assert all(part in message for part in expected), message
    assert refused(lambda: job.assigned(0), "FAILED_PRECONDITION", "LAYOUT_MISMATCH") == message
    assert not list((daemon.store / "models" / job.model).glob("pool/*")), "a rejected publisher has room"


def test_ranks_that_disagree_on_a_tensor_are_refused_with_both_sides(daemon: Daemon) -> None:
    job = fresh(daemon)
    job.create()
    job.register(0)
    job.specs = [TensorSpec("a", "F16", (16, 64)), SPECS[1]]
    message = refused(lambda: job.register(1), "FAILED_PRECONDITION", "TENSOR_MISMATCH")
    assert "a: rank 1 has F16 [16, 64], another rank has BF16 [16, 64]" in message


def test_a_box_outside_of_its_tensor_is_refused_and_the_rank_may_register_again(daemon: Daemon) -> None:
    job = fresh(daemon, [[("a", (Range(0, 17), Range(0, 64)), False)], TWO[1]])
    job.create()
    assert "outside of [16, 64]" in refused(lambda: job.register(0), "INVALID_ARGUMENT", "LAYOUT_MISMATCH")
    job.holdings = TWO
    assert job.connect().sends[1] == TWO[1]


LLAMA = (
    b'{"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 32, "intermediate_size": 64, '
    b'"num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 48, "tie_word_embeddings": true}'
)


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (lambda s: {**s, "model.norm.weight": (31,)}, "model.norm.weight: expected [32], found [31]"),
        (
            lambda s: {k: v for k, v in s.items() if k != "model.norm.weight"},
            "model.norm.weight [32] is held by no rank",
        ),
        (lambda s: {**s, "model.extra": (2,)}, "model.extra: not a tensor of this model"),
    ],
)
def test_tensors_that_the_config_does_not_expect_are_refused_by_name(daemon: Daemon, change, expected) -> None:
    right = expected_shapes(json.loads(LLAMA))
    specs = [TensorSpec(name, "BF16", shape) for name, shape in change(right).items()]
    job = fresh(daemon, [whole(specs)], specs, files={"config.json": LLAMA}, job=expected)
    job.create()
    assert refused(lambda: job.register(0), "FAILED_PRECONDITION", "LAYOUT_MISMATCH").startswith(expected)
    good = [TensorSpec(name, "BF16", shape) for name, shape in right.items()]
    assert fresh(daemon, [whole(good)], good, files={"config.json": LLAMA}).connect().sends[0]


def test_registering_the_same_again_is_no_change_and_other_boxes_are_refused(job: Job) -> None:
    assert job.register(0).state == resources_pb2.Publisher.ACTIVE
    job.holdings = [TWO[1], TWO[0]]
    refused(lambda: job.register(0), "ALREADY_EXISTS", "SLOT_DIFFERS")


@pytest.mark.parametrize("name", ["../etc", "a/b", "", ".hidden", "x" * 65, "a\n"])
def test_a_model_name_that_is_a_path_is_refused(daemon: Daemon, name: str) -> None:
    refused(Job(daemon.channel, SPECS, TWO, model=name).create, "INVALID_ARGUMENT", "MODEL_NAME")


@pytest.mark.parametrize("path", ["../x", "a/b", "resharder.json", "model.safetensors", "model.safetensors.index.json", ""])
def test_a_model_file_that_is_a_path_or_the_stores_own_is_refused(daemon: Daemon, path: str) -> None:
    refused(Job(daemon.channel, SPECS, TWO, model="files", files={path: b""}).create, "INVALID_ARGUMENT", "MODEL_FILE")


def test_an_oversized_message_is_refused_and_the_daemon_lives(daemon: Daemon, job: Job) -> None:
    with pytest.raises(grpc.RpcError) as caught:
        Job(daemon.channel, SPECS, TWO, model="large", files={"config.json": bytes(3 << 20)}).create()
    assert caught.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
    assert job.publish(1, random_weights(SPECS, 1)).state == resources_pb2.Version.READY


def test_replicas_are_sent_once_and_a_rank_with_nothing_to_send_needs_not_seal(daemon: Daemon) -> None:
    everything = whole(SPECS)
    copies = [(name, box, True) for name, box, _ in everything]
    job = fresh(daemon, [everything, copies, copies]).connect()
    sent = sorted(name for rank in range(3) for name, _, _ in job.sends[rank])
    assert sent == ["a", "b"]
    weights, version = random_weights(SPECS, 3), job.begin(0)
    for rank in (rank for rank in range(3) if job.sends[rank]):
        job.upload(version.number, rank, weights)
        job.seal(version.name, rank, weights)
    assert job.wait(version.name).state == resources_pb2.Version.READY


# Chunks


def test_lost_chunks_are_named_and_only_they_are_sent_again(job: Job) -> None:
    weights, version = random_weights(SPECS, 5), job.begin(7)
    job.upload(version.number, 0, weights, only=[1])
    assert job.missing(version.name, 0) == [0]
    message = refused(lambda: job.seal(version.name, 0, weights), "FAILED_PRECONDITION", "MISSING_CHUNKS")
    assert "1 of 2 chunks" in message
    job.upload(version.number, 0, weights, only=[0, 1])
    assert job.missing(version.name, 0) == []
    job.seal(version.name, 0, weights)
    job.upload(version.number, 1, weights)
    job.seal(version.name, 1, weights)
    ready = job.wait(version.name)
    assert np.array_equal(read_folder(ready.folder)["a"], weights["a"])


@pytest.mark.parametrize(
    ("damage", "code", "reason"),
    [
        (lambda header, data: frame(header, bytes([data[0] ^ 1]) + data[1:], "{model}"), "DATA_LOSS", "CHECKSUM"),
        (lambda header, data: frame(header, data[:-1], "{model}"), "INVALID_ARGUMENT", "CHUNK_LENGTH"),
        (lambda header, data: frame(header._replace(index=9), data, "{model}"), "INVALID_ARGUMENT", "CHUNK_INDEX"),
        (lambda header, data: frame(header._replace(rank=9), data, "{model}"), "INVALID_ARGUMENT", "RANK"),
        (lambda header, data: frame(header._replace(version=999), data, "{model}"), "NOT_FOUND", "VERSION_UNKNOWN"),
        (lambda header, data: frame(header, data), "INVALID_ARGUMENT", "CHUNK"),
        (lambda header, data: b"\xff\xff" + frame(header, data, "{model}"), "INVALID_ARGUMENT", "CHUNK"),
    ],
)
def test_a_damaged_chunk_is_refused_and_changes_no_byte(job: Job, damage, code, reason) -> None:
    version = job.begin(1)
    before = bytes_in(Path(version.folder))
    header, data, _ = unframe(job.chunks(version.number, 0, random_weights(SPECS, 8))[0])
    damaged = damage(header, bytes(data)).replace(b"\x3a\x07{model}", b"\x3a" + bytes([len(job.model)]) + job.model.encode())
    refused(lambda: job.upload_raw(iter([damaged])), code, reason)
    assert bytes_in(Path(version.folder)) == before
    assert job.missing(version.name, 0) == [0, 1]
    job.upload(version.number, 0, random_weights(SPECS, 8))
    assert bytes_in(Path(version.folder)) != before, "a good chunk does change them"


def test_bytes_that_are_not_what_the_rank_digested_never_become_ready(job: Job) -> None:
    """Nor is a later version written into these files, in whatever way bytes were lost on their way."""
    weights, version = random_weights(SPECS, 1), job.begin(1)
    files = [os.open(path, os.O_PATH) for path in Path(version.folder).glob("*.safetensors")]  # not in use for the store
    moved = {**weights, "a": weights["a"].copy()}
    moved["a"][8:] = np.roll(moved["a"][8:], 1, axis=0)
    job.upload(version.number, 0, weights)
    job.upload(version.number, 1, moved)
    job.seal(version.name, 0, weights)
    job.seal(version.name, 1, weights)
    ended = job.wait(version.name)
    assert ended.state == resources_pb2.Version.ABORTED
    assert "1 of 2 tensors are not what was sent: a" in ended.reason
    assert files
    wait_until(lambda: not any(os.fstat(file).st_nlink for file in files), "its files are deleted", 30)
    for file in files:
        os.close(file)


def test_slots_cut_chunks_exactly_as_senders_do() -> None:
    specs = [TensorSpec("x", "BF16", (5, 3, 700)), TensorSpec("y", "F32", ()), TensorSpec("z", "U8", (1, 9, 300))]
    boxes = [full_box(spec.shape) for spec in specs] + [(Range(1, 2, 3), Range(0, 3), Range(5, 100, 2))]
    numbers = [0, 1, 2, 0]
    for limit in (128, 1000, 4096, 1 << 20):
        slot = cut_slot(pack((n, box, False) for n, box in zip(numbers, boxes, strict=True)), specs, limit)
        expected = cut_chunks(boxes, [2, 4, 1, 2], limit)
        assert [slot.parts(i) for i in range(slot.chunks)] == expected


# Epochs, versions


def test_the_same_job_gets_the_same_publisher_and_a_new_one_fences_it(daemon: Daemon, job: Job) -> None:
    assert job.create().epoch == job.epoch
    weights, version = random_weights(SPECS, 1), job.begin(1)
    job.upload(version.number, 0, weights)
    later = Job(daemon.channel, SPECS, TWO, model=job.model, job="later").connect()
    assert later.epoch > job.epoch
    assert job.wait(version.name, 0).state == resources_pb2.Version.ABORTED
    current = later.begin(1)
    before = bytes_in(Path(current.folder))
    for call in (
        lambda: job.upload(version.number, 0, weights),
        lambda: job.upload(current.number, 0, weights),
        lambda: job.begin(2),
        lambda: job.seal(version.name, 0, weights),
        lambda: job.stub.RenewLease(publisher_pb2.RenewLeaseRequest(publisher=job.name, rank=0)),
        job.create,
    ):
        refused(call, "FAILED_PRECONDITION", "STALE_EPOCH")
    assert bytes_in(Path(current.folder)) == before
    assert later.publish(1, weights).state == resources_pb2.Version.READY


def test_the_same_step_is_the_same_version_and_other_bytes_are_refused(job: Job) -> None:
    weights = random_weights(SPECS, 1)
    first = job.publish(4, weights)
    assert job.begin(4, rank=1).name == first.name
    assert job.seal(first.name, 0, weights).state == resources_pb2.Version.READY
    refused(lambda: job.seal(first.name, 0, random_weights(SPECS, 2)), "ALREADY_EXISTS", "SLOT_DIFFERS")


def test_a_third_staging_version_is_refused_until_one_ends(job: Job) -> None:
    weights = random_weights(SPECS, 1)
    first = job.begin(1)
    job.upload(first.number, 0, weights)
    job.seal(first.name, 0, weights)
    second = job.begin(2)
    job.upload(second.number, 0, weights)
    job.seal(second.name, 0, weights)
    assert first.name in refused(lambda: job.begin(3), "RESOURCE_EXHAUSTED", "TOO_MANY_UPLOADING")
    ended = job.stub.AbortVersion(publisher_pb2.AbortVersionRequest(version=second.name, epoch=job.epoch, reason="enough"))
    assert (ended.state, ended.reason) == (resources_pb2.Version.ABORTED, "enough")
    assert job.begin(2).number > second.number, "an aborted version's step gets a new number"


def test_a_rank_that_writes_into_the_folder_itself_is_proven_alike(job: Job) -> None:
    weights, version = random_weights(SPECS, 6), job.begin(1)
    folder = Path(version.folder)
    with MappedFiles(folder, read_layout(folder), writable=True) as files:
        for name, array in files.arrays.items():
            array[...] = weights[name]
        del array
    for rank in (0, 1):
        job.seal(version.name, rank, weights, mapped=True)
    assert job.wait(version.name).state == resources_pb2.Version.READY


def test_an_exported_version_is_its_folder_with_good_checksums(job: Job) -> None:
    version = job.publish(1, random_weights(SPECS, 6))
    got: dict[str, bytes] = {}
    for part in job.operator.ExportVersion(operator_pb2.ExportVersionRequest(version=version.name)):
        assert xxhash.xxh3_64_intdigest(part.data) == part.checksum
        assert part.offset == len(got.setdefault(part.path, b""))
        got[part.path] += part.data
    assert got == {path.name: path.read_bytes() for path in Path(version.folder).iterdir()}
    assert "config.json" in got


def test_lists_come_in_pages_newest_first(job: Job) -> None:
    made = [job.publish(step, random_weights(SPECS, step)).name for step in range(5)]
    seen, token = [], ""
    while True:
        page = job.operator.ListVersions(operator_pb2.ListVersionsRequest(model=job.model, page_size=2, page_token=token))
        seen += page.versions
        if not (token := page.next_page_token):
            break
    assert [version.name for version in seen] == made[::-1]
    states = [resources_pb2.Version.State.Name(version.state) for version in seen]
    assert states == ["READY"] * 3 + ["RETIRED"] * 2


# Leases


def test_a_silent_rank_aborts_its_version_and_frees_the_room(tmp_path: Path) -> None:
    now = [100.0]
    store = Store(tmp_path / "store")
    intake = Intake(store, lease_seconds=10, clock=lambda: now[0])
    publisher = intake.create_publisher("policy", "job", 2, {"config.json": b"{}"})
    for rank in (0, 1):
        boxes = pack((["a", "b"].index(name), box, False) for name, box, _ in TWO[rank])
        intake.register_slot(publisher.name, rank, str(rank), SPECS, boxes)
    record = completed(intake.create_version, publisher.name, 0, 1)
    now[0] += 8
    intake.publisher(publisher.name, 0)
    intake.publisher(publisher.name, 1)
    now[0] += 8
    intake.publisher(publisher.name, 0)
    assert intake.live_ranks(publisher) == 2
    intake.expire()
    assert store.catalogue.get("policy", record.number).state == "UPLOADING"
    now[0] += 3
    assert intake.live_ranks(publisher) == 1
    intake.expire()
    ended = store.catalogue.get("policy", record.number)
    assert ended.state == "ABORTED"
    assert "rank 1 was silent for 11.0 s" in ended.reason
    assert completed(intake.create_version, publisher.name, 0, 1).number == record.number + 1
    intake.drain(0)
    store.close()


# Waiting


def test_whoever_waits_for_serving_is_woken_by_the_last_server_and_asks_nobody_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("resharder.server.ingest.intake._LOOK", 60.0)
    config = Config(listen="127.0.0.1:0", store=tmp_path / "store", shared_memory=False, lease_seconds=300)
    asked: list[tuple[int, int]] = []
    serving = Fleets.serving
    monkeypatch.setattr(Fleets, "serving", lambda *arguments: asked.append(serving(*arguments)) or asked[-1])
    daemon = DaemonInProcess(config)
    record = ready_version(daemon.store)
    completed(daemon.fleets.claim, "s", "policy", "", wait_seconds=0, boot=True)
    control = daemon.fleets.attach("s", Attached("control", 1, "10.0.0.1:8000"))
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(completed, daemon.intake.wait_version, "policy", record.number, 60, True)
        wait_until(lambda: bool(asked), "it looks")
        time.sleep(1.2)
        assert not waiting.done()
        assert asked == [(0, 1)], "nothing has changed, and it looked again"
        daemon.fleets.report_worker(
            "s", Worker(0, resources_pb2.Worker.BOOTED, record.number, process="p", fingerprint=record.fingerprint)
        )
        resume = next(order for order in iter(control.orders.get, None) if order.kind == server_pb2.Order.RESUME)
        control.report(Reported("control", resume.install, server_pb2.Order.RESUME, True))
        assert waiting.result(60) == record
    assert asked == [(0, 1), (1, 1)]
    daemon.server.start()
    daemon.stop()
