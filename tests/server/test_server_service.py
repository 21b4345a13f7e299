"""ServerService over a real gRPC server and a real store in shared memory."""

import queue
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import grpc
import numpy as np
import pytest
import xxhash
from google.rpc import error_details_pb2, status_pb2
from resharder.converters.geometry.chunking import cut_chunks
from resharder.converters.geometry.layout import Box, Range, TensorSpec, box_index, full_box
from resharder.converters.storage.digest import digest
from resharder.converters.storage.files import MappedFiles, lay_out
from resharder.converters.wire.boxes import boxes_to_proto
from resharder.converters.wire.chunk_frame import unframe
from resharder.server.fleets.fleets import Fleets
from resharder.server.fleets.worker_requests import Profiles, Verifications
from resharder.server.rpc.server_service import ServerService
from resharder.server.state.server import Settings
from resharder.server.store.epochs import NewEpoch
from resharder.server.store.store import Store
from resharder.v1 import resources_pb2, server_pb2, server_pb2_grpc

from tests.support.serving import serving

LEASE = 60.0  # of the site's clock; a busy machine does not cost it
SPECS = (
    TensorSpec("wide", "BF16", (300, 1024)),
    TensorSpec("norm", "F32", (17,)),
    TensorSpec("experts", "BF16", (3, 20, 32)),
    TensorSpec("scale", "F32", ()),
)


@dataclass
class Site:
    """A daemon's server side in this process, and a client of it."""

    store: Store
    fleets: Fleets
    stub: server_pb2_grpc.ServerServiceStub
    channel: grpc.Channel
    epoch: int
    ahead: list[float]  # seconds by which the site's clock is ahead of the machine's

    def publish(self) -> tuple[int, dict[str, np.ndarray]]:
        """A READY version of random bits: its number and its tensors."""
        record = self.store.lifecycle.begin("policy", self.epoch, step=1, job="job")
        bits = np.random.default_rng(record.number)
        with MappedFiles(self.store.folder.path(record), self.store.lifecycle.layouts(record), writable=True) as files:
            for array in files.arrays.values():
                array[...] = bits.integers(0, 1 << 16, array.shape).astype(array.dtype)
            tensors = {name: array.copy() for name, array in files.arrays.items()}
            del array
        digests = {spec.name: digest(tensors[spec.name], full_box(spec.shape), spec.shape) for spec in SPECS}
        return self.store.lifecycle.commit(record, digests, ()).number, tensors

    def claim(self, **fields: object) -> server_pb2.Claim:
        return self.stub.ClaimServer(server_pb2.ClaimServerRequest(**{"server": "s", "boot": True, **fields}))

    def report(self, rank: int, state: int, version: int, install: str = "", **fields: str) -> resources_pb2.Server:
        """As a worker that holds this store's version of that number; `fields` override."""
        known = {record.number: record.fingerprint for record in self.store.catalogue.versions("policy")}
        values = {"fingerprint": known.get(version, ""), "process": f"process-{rank}"} | fields
        worker = resources_pb2.Worker(rank=rank, state=state, version=version, install=install, **values)
        return self.stub.ReportWorker(server_pb2.ReportWorkerRequest(server="servers/s", worker=worker))

    def state(self) -> resources_pb2.Server.State:
        from resharder.server.rpc.convert import server_to_proto

        return server_to_proto(self.fleets.servers()[0]).state

    def until(self, true: Callable[[], bool]) -> None:
        deadline = time.monotonic() + 60
        while not true():
            assert time.monotonic() < deadline, [view.reason for view in self.fleets.servers()]
            time.sleep(0.02)


class Control:
    """A control side's stream."""

    def __init__(self, site: Site, nonce: str = "control", world_size: int = 2) -> None:
        self._reports: queue.SimpleQueue[server_pb2.ControlReport | None] = queue.SimpleQueue()
        self.nonce = nonce
        self.report(server="s", world_size=world_size, address="10.0.0.1:8000")
        self.call = site.stub.Attend(iter(self._reports.get, None))
        self._orders: queue.SimpleQueue[server_pb2.Order] = queue.SimpleQueue()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        try:
            for order in self.call:
                self._orders.put(order)
        except grpc.RpcError:
            return  # `refused` reads it from the call

    def refused(self) -> None:
        """Waits for the end of the stream and raises what it ended with."""
        if self.call.code() is not grpc.StatusCode.OK:
            raise self.call

    def report(self, **fields: object) -> None:
        self._reports.put(server_pb2.ControlReport(control=self.nonce, **fields))

    def done(self, order: server_pb2.Order, ok: bool = True) -> None:
        self.report(install=order.install, done=order.kind, ok=ok, pause_seconds=0.25)

    def next(self, kind: int) -> server_pb2.Order:
        """The next order of this kind, renewals skipped; any other kind is an error."""
        while True:
            order = self._orders.get(timeout=60)
            if order.kind == kind:
                return order
            assert order.kind == server_pb2.Order.RENEWED, order

    def vanish(self) -> None:
        self.call.cancel()


@pytest.fixture
def site() -> Iterator[Site]:
    with tempfile.TemporaryDirectory(prefix="resharder-test-", dir="/dev/shm") as folder:
        store = Store(Path(folder) / "store", limit_bytes=64 << 20, keep_count=2)
        epoch = store.epochs.begin("policy", "job", 1).epoch
        store.epochs.reserve(NewEpoch("policy", epoch, lay_out(SPECS), {"config.json": b"{}"}))
        settings, ahead = Settings(lease=LEASE, grace=0.5, first_retry=0.05, last_retry=0.1), [0.0]
        fleets = Fleets(store.catalogue, store.lifecycle, settings=settings, clock=lambda: time.monotonic() + sum(ahead))
        service = ServerService(fleets, store, Profiles(fleets), Verifications(fleets), 2)
        with serving({service: server_pb2_grpc.add_ServerServiceServicer_to_server}, fleets) as address:
            with grpc.insecure_channel(address) as channel:
                yield Site(store, fleets, server_pb2_grpc.ServerServiceStub(channel), channel, epoch, ahead)
            fleets.close()
        store.close()


def refusal(call: Callable[[], object]) -> tuple[grpc.StatusCode, str]:
    """(code, reason) of the error that the call ends with."""
    with pytest.raises(grpc.RpcError) as caught:
        call()
    metadata = dict(caught.value.trailing_metadata())
    status = status_pb2.Status.FromString(metadata["grpc-status-details-bin"])
    info = error_details_pb2.ErrorInfo()
    assert status.details[0].Unpack(info)
    return caught.value.code(), info.reason


def boot(site: Site, version: int) -> Control:
    """A server of two workers that serves `version`."""
    assert site.claim().boot_version == version
    for rank in range(2):
        site.report(rank, resources_pb2.Worker.BOOTED, version)
    control = Control(site)
    control.next(server_pb2.Order.LEAD)
    control.done(control.next(server_pb2.Order.RESUME))
    site.until(lambda: site.state() == resources_pb2.Server.SERVING)
    return control


def test_every_process_of_a_server_boots_the_version_that_its_first_claim_fixed(site: Site) -> None:
    first, _ = site.publish()
    assert site.claim(wait_seconds=1).boot_version == first
    site.publish()
    claim = site.claim()
    assert (claim.boot_version, claim.server, claim.model, claim.fleet) == (first, "servers/s", "policy", "policy")
    assert Path(claim.store.nonce_file).read_bytes() == claim.store.nonce
    assert site.store.lifecycle.holders("policy", first) == ["servers/s"]
    assert site.claim(server="other").boot_version == first + 1


def test_a_claim_waits_for_the_first_version_and_is_refused_without_one(site: Site) -> None:
    assert refusal(lambda: site.claim(wait_seconds=0.1)) == (grpc.StatusCode.UNAVAILABLE, "NO_VERSION")
    threading.Timer(0.3, site.publish).start()
    assert site.claim(wait_seconds=60).boot_version == 1


def test_the_gate_opens_when_every_worker_has_proved_the_boot_version(site: Site) -> None:
    version, _ = site.publish()
    site.claim()
    control = Control(site)
    control.next(server_pb2.Order.LEAD)
    site.report(0, resources_pb2.Worker.BOOTED, version)
    assert "waits for workers 1 of 2" in site.fleets.servers()[0].reason
    site.report(1, resources_pb2.Worker.BOOTED, version)
    assert control.next(server_pb2.Order.RESUME).version == version


def test_a_new_version_is_staged_applied_and_served(site: Site) -> None:
    first, _ = site.publish()
    control = boot(site, first)
    second, _ = site.publish()
    stage = control.next(server_pb2.Order.STAGE)
    assert stage.version == second
    for rank in range(2):
        site.report(rank, resources_pb2.Worker.STAGED, second, stage.install)
    order = control.next(server_pb2.Order.APPLY)
    assert (order.install, order.pause_mode) == (stage.install, resources_pb2.KEEP)
    assert "servers/s" in site.store.lifecycle.holders("policy", first)
    assert "servers/s" in site.store.lifecycle.holders("policy", second)
    control.done(order)
    site.report(0, resources_pb2.Worker.APPLIED, second, stage.install)
    assert site.fleets.serving("policy", second) == (0, 1)
    site.report(1, resources_pb2.Worker.APPLIED, second, stage.install)
    control.done(control.next(server_pb2.Order.RESUME))
    site.until(lambda: site.fleets.serving("policy", second) == (1, 1))
    assert site.store.lifecycle.holders("policy", first) == []
    message = site.report(0, resources_pb2.Worker.APPLIED, second, stage.install)
    assert (message.version, message.install.state) == (second, resources_pb2.Install.COMMITTED)
    assert message.install.pause_seconds == 0.25


def test_a_worker_that_fails_to_apply_brings_the_previous_version_back_before_anything_is_resumed(site: Site) -> None:
    first, _ = site.publish()
    control = boot(site, first)
    second, _ = site.publish()
    stage = control.next(server_pb2.Order.STAGE)
    for rank in range(2):
        site.report(rank, resources_pb2.Worker.STAGED, second, stage.install)
    control.next(server_pb2.Order.APPLY)
    site.report(0, resources_pb2.Worker.APPLIED, second, stage.install)
    site.report(1, resources_pb2.Worker.FAILED, second, stage.install, error="a digest differs")
    back = control.next(server_pb2.Order.STAGE)  # and no RESUME before it
    assert (back.version, site.state()) == (first, resources_pb2.Server.FAILED)
    assert "a digest differs" in site.fleets.servers()[0].reason
    for rank in range(2):
        site.report(rank, resources_pb2.Worker.STAGED, first, back.install)
    control.done(control.next(server_pb2.Order.APPLY))
    for rank in range(2):
        site.report(rank, resources_pb2.Worker.APPLIED, first, back.install)
    assert control.next(server_pb2.Order.RESUME).version == first
    assert control.next(server_pb2.Order.STAGE).version == second  # tried again, a while later


def test_another_control_side_leads_when_the_first_is_gone(site: Site) -> None:
    version, _ = site.publish()
    first = boot(site, version)
    second = Control(site, "second")
    assert second.next(server_pb2.Order.RESUME).version == version
    first.vanish()
    second.next(server_pb2.Order.LEAD)


def test_a_silent_server_is_lost_lets_its_version_go_and_comes_back(site: Site) -> None:
    version, _ = site.publish()
    boot(site, version).vanish()
    site.ahead.append(LEASE)
    site.until(lambda: site.state() == resources_pb2.Server.LOST)
    site.until(lambda: "servers/s" not in site.store.lifecycle.holders("policy", version))
    assert site.fleets.serving("policy", version) == (0, 0)
    control = Control(site, "later")
    control.next(server_pb2.Order.LEAD)
    assert control.next(server_pb2.Order.RESUME).version == version
    assert "servers/s" in site.store.lifecycle.holders("policy", version)


def test_after_a_restart_of_the_daemon_a_server_claims_again_and_goes_on(site: Site) -> None:
    version, _ = site.publish()
    refused = refusal(lambda: site.report(0, resources_pb2.Worker.APPLIED, version, "an-earlier-life-3"))
    assert refused == (grpc.StatusCode.NOT_FOUND, "SERVER_UNKNOWN")
    assert refusal(lambda: Control(site).refused()) == (grpc.StatusCode.NOT_FOUND, "SERVER_UNKNOWN")
    site.claim(boot=False)
    control = Control(site)
    control.next(server_pb2.Order.LEAD)
    for rank in range(2):
        site.report(rank, resources_pb2.Worker.APPLIED, version, "an-earlier-life-3")
    assert control.next(server_pb2.Order.RESUME).version == version


def test_workers_that_hold_a_version_of_a_lost_store_get_this_stores_of_the_same_number(site: Site) -> None:
    version, _ = site.publish()
    site.claim(boot=False)
    control = Control(site)
    control.next(server_pb2.Order.LEAD)
    site.report(0, resources_pb2.Worker.APPLIED, version, "an-earlier-life-3")
    site.report(1, resources_pb2.Worker.APPLIED, version, "an-earlier-life-3", fingerprint="f00d" * 16)
    stage = control.next(server_pb2.Order.STAGE)  # and no RESUME before it
    assert stage.version == version
    assert (
        f"worker 1: it holds version {version} with fingerprint f00df00df00d, and the store has"
        in site.fleets.servers()[0].reason
    )
    assert site.report(0, resources_pb2.Worker.STAGED, version, stage.install).workers[1].state == resources_pb2.Worker.EMPTY
    site.report(1, resources_pb2.Worker.STAGED, version, stage.install)
    control.done(control.next(server_pb2.Order.APPLY))
    for rank in range(2):
        site.report(rank, resources_pb2.Worker.APPLIED, version, stage.install)
    assert control.next(server_pb2.Order.RESUME).version == version


def test_the_manifest_says_where_every_tensor_is_and_what_its_digest_is(site: Site) -> None:
    number, tensors = site.publish()
    manifest = site.stub.GetManifest(server_pb2.GetManifestRequest(version=f"models/policy/versions/{number}"))
    assert {tensor.spec.name for tensor in manifest.tensors} == set(tensors)
    folder = Path(manifest.version.folder)
    for tensor in manifest.tensors:
        want, shape = tensors[tensor.spec.name], tuple(tensor.spec.shape)
        raw = (folder / tensor.file).read_bytes()[tensor.offset : tensor.offset + want.nbytes]
        assert raw == want.tobytes()
        assert tensor.digest == digest(want, full_box(shape), shape)
    for file in manifest.files:
        assert (folder / file.path).read_bytes().startswith(file.header)
    assert site.stub.GetModel(server_pb2.GetModelRequest()).files[0].content == b"{}"


def test_manifests_of_several_versions_have_the_digests_of_their_own(site: Site) -> None:
    published = {number: tensors for number, tensors in (site.publish() for _ in range(2))}
    for number in (*published, *published):
        manifest = site.stub.GetManifest(server_pb2.GetManifestRequest(version=f"models/policy/versions/{number}"))
        assert manifest.version.number == number
        assert len(manifest.tensors) == len(SPECS)
        assert [*{file.path for file in manifest.files}] == [*{tensor.file for tensor in manifest.tensors}]
        for tensor in manifest.tensors:
            want, shape = published[number][tensor.spec.name], tuple(tensor.spec.shape)
            assert tensor.digest == digest(want, full_box(shape), shape)


BOXES: tuple[tuple[int, Box], ...] = (
    (0, (Range(3, 200), Range(0, 512, 2))),
    (1, (Range(0, 17),)),
    (2, (Range(1, 1), Range(0, 10, 2), Range(5, 20))),
    (3, ()),
    (0, (Range(0, 300), Range(0, 1024))),
)


def request(number: int, boxes: tuple[tuple[int, Box], ...] = BOXES, **fields: object) -> server_pb2.BoxesRequest:
    return server_pb2.BoxesRequest(
        version=f"models/policy/versions/{number}",
        tensors=[spec.name for spec in SPECS],
        boxes=boxes_to_proto((tensor, box, False) for tensor, box in boxes),
        **fields,
    )


@pytest.mark.parametrize("chunk_bytes", [0, 64 << 10])
def test_boxes_arrive_as_chunks_bit_for_bit(site: Site, chunk_bytes: int) -> None:
    number, tensors = site.publish()
    raw = site.channel.unary_stream("/resharder.v1.ServerService/DownloadChunks", server_pb2.BoxesRequest.SerializeToString, None)
    got = {i: np.zeros_like(tensors[SPECS[t].name]) for i, (t, _) in enumerate(BOXES)}
    items = [tensors[SPECS[tensor].name].itemsize for tensor, _ in BOXES]
    parts = cut_chunks([box for _, box in BOXES], items, chunk_bytes or 1 << 20)
    messages = list(raw(request(number, chunk_bytes=chunk_bytes)))
    assert len(messages) == len(parts)
    for index, (message, chunk) in enumerate(zip(messages, parts, strict=True)):
        header, data, model = unframe(message)
        assert (header.version, header.rank, header.index) == (number, 0, index)
        assert header.checksum == xxhash.xxh3_64_intdigest(data)
        assert model == ("policy" if index == 0 else "")
        at = 0
        for position, box in chunk:
            target = got[position][box_index(box)] if box else got[position]
            size = target.nbytes
            values = np.frombuffer(data[at : at + size], target.dtype).reshape(target.shape)
            got[position][box_index(box)] = values
            at += size
        assert at == len(data)
    for i, (tensor, box) in enumerate(BOXES):
        np.testing.assert_array_equal(got[i][box_index(box)], tensors[SPECS[tensor].name][box_index(box)])


def test_digests_of_boxes_are_those_of_their_bytes(site: Site) -> None:
    number, tensors = site.publish()
    want = [digest(tensors[SPECS[t].name][box_index(box)], box, SPECS[t].shape) for t, box in BOXES]
    for _ in range(2):
        assert list(site.stub.DigestBoxes(request(number)).digests) == want


def test_a_download_that_is_broken_off_lets_its_version_go(site: Site) -> None:
    number, _ = site.publish()
    download = site.stub.DownloadChunks(request(number, chunk_bytes=64 << 10))
    next(download)
    download.cancel()
    site.until(lambda: site.store.lifecycle.holders("policy", number) == [])


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"boxes": ((0, (Range(0, 301), Range(0, 1))),)}, "BOX"),
        ({"boxes": ((0, (Range(-1, 1), Range(0, 1))),)}, "BOX"),
        ({"boxes": ((0, (Range(0, 2, 300), Range(0, 1))),)}, "BOX"),
        ({"boxes": ((0, (Range(0, 0), Range(0, 1))),)}, "BOX"),
        ({"boxes": ((0, (Range(0, 1),)),)}, "BOX"),
        ({"boxes": ((9, ()),)}, "BOX"),
        ({"boxes": BOXES * 9}, "TOO_MANY_BOXES"),
        ({"chunk_bytes": 1}, "CHUNK_BYTES"),
        ({"chunk_bytes": 1 << 40}, "CHUNK_BYTES"),
    ],
)
def test_boxes_that_make_no_sense_are_refused_with_a_reason(site: Site, changes: dict[str, object], reason: str) -> None:
    number, _ = site.publish()
    bad = request(number, **changes)  # type: ignore[arg-type]
    assert refusal(lambda: site.stub.DigestBoxes(bad)) == (grpc.StatusCode.INVALID_ARGUMENT, reason)
    assert refusal(lambda: list(site.stub.DownloadChunks(bad))) == (grpc.StatusCode.INVALID_ARGUMENT, reason)


def test_the_files_of_the_next_version_are_named_while_there_are_any(site: Site) -> None:
    number, _ = site.publish()
    asked = server_pb2.GetNextFilesRequest(version=f"models/policy/versions/{number}")
    site.until(lambda: bool(site.stub.GetNextFiles(asked).folder))
    folder = Path(site.stub.GetNextFiles(asked).folder)
    assert {file.name for file in folder.iterdir()} == {"model.safetensors", "config.json"}
    missing = server_pb2.GetNextFilesRequest(version="models/policy/versions/99")
    assert refusal(lambda: site.stub.GetNextFiles(missing)) == (grpc.StatusCode.NOT_FOUND, "VERSION_UNKNOWN")


def test_names_that_make_no_sense_are_refused_with_a_reason(site: Site) -> None:
    number, _ = site.publish()
    invalid = grpc.StatusCode.INVALID_ARGUMENT
    unknown = server_pb2.BoxesRequest(version=f"models/policy/versions/{number}", tensors=["../../etc/passwd"])
    assert refusal(lambda: site.stub.DigestBoxes(unknown)) == (invalid, "UNKNOWN_TENSOR")
    for version in ("", "policy/1", "models/../versions/1", "models/policy/versions/-1", "models/policy/versions/1/x"):
        called = refusal(lambda version=version: site.stub.GetManifest(server_pb2.GetManifestRequest(version=version)))
        assert called in ((invalid, "RESOURCE_NAME"), (invalid, "MODEL_NAME"))
    missing = server_pb2.GetManifestRequest(version="models/policy/versions/99")
    assert refusal(lambda: site.stub.GetManifest(missing)) == (grpc.StatusCode.NOT_FOUND, "VERSION_UNKNOWN")
    assert refusal(lambda: site.claim(server="../s")) == (invalid, "NAME")
    assert refusal(lambda: site.claim(server="")) == (invalid, "NAME")
    assert refusal(lambda: site.claim(wait_seconds=-1)) == (invalid, "WAIT_SECONDS")
    site.claim()
    assert refusal(lambda: site.claim(model="other", boot=False)) == (grpc.StatusCode.FAILED_PRECONDITION, "SERVER_ELSEWHERE")
    assert refusal(lambda: Control(site, world_size=0).refused()) == (invalid, "WORLD_SIZE")
    assert refusal(lambda: site.report(70000, resources_pb2.Worker.EMPTY, 0)) == (invalid, "WORKER")
    assert refusal(lambda: site.report(0, 77, 0)) == (invalid, "WORKER")


def test_a_claim_that_waits_ends_with_its_caller(site: Site) -> None:
    waiting = site.stub.ClaimServer.future(
        server_pb2.ClaimServerRequest(server="s", model="policy", boot=True, wait_seconds=3600)
    )
    site.until(lambda: site.fleets.changed.connections == 1)
    waiting.cancel()
    site.until(lambda: site.fleets.changed.connections == 0)
