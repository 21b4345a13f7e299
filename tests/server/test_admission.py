"""Models apart from each other: one's flood of calls is refused, and another's publish and renewals go on."""

import asyncio
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager
from functools import partial
from pathlib import Path

import grpc
import grpc.aio
import pytest
from hypothesis import given
from hypothesis import strategies as st
from resharder.client import errors
from resharder.client.rpc.channel import Channel
from resharder.converters.geometry.layout import TensorSpec, full_box
from resharder.converters.storage.digest import digest_matrices
from resharder.converters.storage.files import Array
from resharder.converters.wire.boxes import boxes_to_proto
from resharder.server.infra.filesystem import write_zeros
from resharder.server.ingest.boxes import pack
from resharder.server.ingest.intake import Intake
from resharder.server.rpc.admission import FairPool, Places, model_of_request
from resharder.server.rpc.methods import METHODS
from resharder.server.state.errors import ResourceExhausted
from resharder.server.store.store import Store
from resharder.v1 import direct_pb2, operator_pb2, publisher_pb2, publisher_pb2_grpc, resources_pb2, server_pb2, server_pb2_grpc

from tests.support.daemon import Daemon
from tests.support.observing import wait_until
from tests.support.publishing import Job, random_weights, reason_of, whole
from tests.support.waits import completed

READY = resources_pb2.Version.READY
SPECS = [TensorSpec(f"layer{i}", "BF16", (2048, 1024)) for i in range(4)]  # 4 MiB each
FLOOD = 150


@given(st.lists(st.sampled_from("abcd"), max_size=60), st.integers(1, 24))
def test_who_comes_later_finds_a_place_and_one_alone_gets_half(callers: list[str], places: int) -> None:
    waits, held = Places("WaitVersion", places), Counter[str]()
    with ExitStack() as open_calls:
        for caller in callers:
            free = places - held.total()
            if held[caller] < free:
                open_calls.enter_context(waits.place(caller))
                held[caller] += 1
            else:
                with pytest.raises(ResourceExhausted, match=f"{caller} has {held[caller]} WaitVersion calls open"):
                    open_calls.enter_context(waits.place(caller))
        others = len(+held)
        assert all(count <= -(-places // 2) for count in held.values())
        if places >= 2**others:
            open_calls.enter_context(waits.place("newcomer"))
    with waits.place("a"):  # what was open has left its places
        pass


@pytest.mark.parametrize(
    ("request_", "model"),
    [
        (publisher_pb2.WaitVersionRequest(version="models/policy/versions/3"), "policy"),
        (publisher_pb2.GetAssignmentRequest(publisher="models/policy/publishers/1"), "policy"),
        (operator_pb2.ListEventsRequest(subject="models/policy"), "policy"),
        (operator_pb2.ListEventsRequest(subject="servers/a"), ""),
        (server_pb2.ClaimServerRequest(server="a", model="models/policy"), "policy"),
        (server_pb2.ClaimServerRequest(server="a", model="policy"), "policy"),
        (server_pb2.ClaimServerRequest(server="a"), ""),
        (operator_pb2.RollBackFleetRequest(fleet="policy", version=3), ""),
        (publisher_pb2.CreatePublisherRequest(model=resources_pb2.Model(name="policy", files=[{"path": "f"}])), "policy"),
    ],
)
def test_a_call_belongs_to_the_model_that_its_request_names(request_: object, model: str) -> None:
    assert model_of_request(request_) == model


def test_every_stream_and_every_call_that_may_wait_has_places() -> None:
    services = [file.DESCRIPTOR.services_by_name for file in (publisher_pb2, server_pb2, operator_pb2, direct_pb2)]
    methods = {method.name: method for found in services for service in found.values() for method in service.methods}
    long = {
        name
        for name, method in methods.items()
        if method.client_streaming or method.server_streaming or "wait_seconds" in method.input_type.fields_by_name
    }
    assert long <= {method.name for method in METHODS if method.cost.long}


@contextmanager
def connection(daemon: Daemon) -> Iterator[grpc.Channel]:
    """A daemon whose windows do not grow: a download without a reader stays open, on a slow machine too."""
    options = [("grpc.use_local_subchannel_pool", 1), ("grpc.max_receive_message_length", -1), ("grpc.http2.bdp_probe", 0)]
    with closing(grpc.insecure_channel(daemon.endpoint, options=options)) as channel:
        yield channel


class Flood:
    """Calls of one model that stay open: each of `kinds` many times."""

    def __init__(self, job: Job, channel: grpc.Channel, ready: resources_pb2.Version, staging: resources_pb2.Version) -> None:
        self._job, self._channel, self._ready, self._staging = job, channel, ready, staging
        self._servers = server_pb2_grpc.ServerServiceStub(channel)
        self._ended = threading.Event()
        self.calls: dict[str, list[grpc.Call]] = {}

    def open(self) -> None:
        first = self._job.chunks(self._staging.number, 0, random_weights(SPECS, 0), only=[0])
        kinds: dict[str, Callable[[int], grpc.Call]] = {
            "uploads": lambda i: self._job.upload_raw.future(self._idle(*first)),
            "unnamed uploads": lambda i: self._job.upload_raw.future(self._idle()),
            "downloads": self._download,
            "exports": lambda i: self._job.operator.ExportVersion(operator_pb2.ExportVersionRequest(version=self._ready.name)),
            "waits": self._wait,
            "control sides": self._attend,
        }
        self.calls = {kind: [call(i) for i in range(FLOOD)] for kind, call in kinds.items()}

    def _idle(self, *messages: object) -> Iterator[object]:
        yield from messages
        self._ended.wait()

    def _download(self, i: int) -> grpc.Call:
        names = [spec.name for spec in SPECS]
        boxes = list(boxes_to_proto((n, full_box(spec.shape), False) for n, spec in enumerate(SPECS)))
        ask = self._channel.unary_stream(
            "/resharder.v1.ServerService/DownloadChunks", request_serializer=server_pb2.BoxesRequest.SerializeToString
        )
        return ask(server_pb2.BoxesRequest(version=self._ready.name, tensors=names, boxes=boxes))

    def _wait(self, i: int) -> grpc.Call:
        request = publisher_pb2.WaitVersionRequest(version=self._staging.name, wait_seconds=600)
        return self._job.stub.WaitVersion.future(request)

    def _attend(self, i: int) -> grpc.Call:
        self._servers.ClaimServer(server_pb2.ClaimServerRequest(server=f"s{i}", model=self._job.model, boot=False))
        return self._servers.Attend(self._idle(server_pb2.ControlReport(server=f"s{i}", control=f"c{i}", world_size=1)))

    def refused(self) -> dict[str, int]:
        """How many of each kind were, so far; any other end is an error."""
        ended = {kind: [call for call in calls if call.done()] for kind, calls in self.calls.items()}
        assert {reason_of(call) for calls in ended.values() for call in calls} <= {"TOO_MANY_CALLS"}
        return {kind: len(calls) for kind, calls in ended.items()}

    def close(self) -> None:
        self._ended.set()
        for call in (call for calls in self.calls.values() for call in calls):
            call.cancel()


class Renewals:
    """Renewals of one rank, without a pause; `count` were answered."""

    def __init__(self, job: Job) -> None:
        self._job, self._ended = job, threading.Event()
        self.count = 0
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        while not self._ended.wait(0.02):
            self._job.stub.RenewLease(publisher_pb2.RenewLeaseRequest(publisher=self._job.name, rank=0), timeout=60)
            self.count += 1

    def close(self) -> None:
        self._ended.set()
        self._thread.join()


@pytest.mark.full
def test_one_models_flood_stalls_no_other_models_publish_renewals_or_servers() -> None:
    with Daemon(threads=64) as daemon, connection(daemon) as noisy, connection(daemon) as calm, ExitStack() as ended:
        weights = random_weights(SPECS, 1)
        flooding = Job(noisy, SPECS, [whole(SPECS)], model="noisy").connect()
        ready, staging = flooding.publish(1, weights), flooding.begin(2)
        keeping = ended.enter_context(closing(Renewals(flooding)))
        flood = ended.enter_context(closing(Flood(flooding, noisy, ready, staging)))
        flood.open()
        places = {"uploads": 24, "downloads": 24, "exports": 24, "waits": 64, "control sides": 64}
        enough = {kind: FLOOD - most // 2 for kind, most in places.items()}
        wait_until(lambda: all(flood.refused()[kind] >= least for kind, least in enough.items()))

        job = Job(calm, SPECS, [whole(SPECS)], model="calm").connect()
        renewals, kept = ended.enter_context(closing(Renewals(job))), keeping.count
        for step in (1, 2):
            assert job.publish(step, weights).state == READY
        assert_served(calm, job)
        wait_until(lambda: renewals.count >= 20 and keeping.count >= kept + 20)
        assert flood.refused()["waits"] < FLOOD, "the flood is still there"
        assert anonymous_bytes(daemon.pid) < 512 << 20


def assert_served(channel: grpc.Channel, job: Job) -> None:
    """A server of the job's model claims, attaches and has its reports answered."""
    servers, ended = server_pb2_grpc.ServerServiceStub(channel), threading.Event()
    servers.ClaimServer(server_pb2.ClaimServerRequest(server="calm-1", model=job.model, boot=True), timeout=60)

    def reports() -> Iterator[server_pb2.ControlReport]:
        yield server_pb2.ControlReport(server="calm-1", control="control", world_size=1)
        yield server_pb2.ControlReport(server="calm-1", control="control", world_size=1)
        ended.wait()

    orders = servers.Attend(reports(), timeout=60)
    assert any(order.kind == server_pb2.Order.RENEWED for order in orders)
    ended.set()
    orders.cancel()


def test_a_client_whose_model_has_too_many_calls_open_tries_again_and_says_so_when_its_patience_ends() -> None:
    """A daemon of 8 waiting calls, of which one model may hold 4."""
    with Daemon(threads=8) as daemon, connection(daemon) as wire, Channel(daemon.endpoint) as channel:
        job = Job(wire, SPECS, [whole(SPECS)]).connect()
        version = job.publish(1, random_weights(SPECS, 1))
        staging = publisher_pb2.WaitVersionRequest(version=job.begin(2).name, wait_seconds=600)
        held = [job.stub.WaitVersion.future(staging) for _ in range(5)]
        wait_until(lambda: any(call.done() for call in held))
        stub = publisher_pb2_grpc.PublisherServiceStub(channel.grpc)
        request = publisher_pb2.WaitVersionRequest(version=version.name)
        with pytest.raises(errors.WaitTimeout, match=r"policy has 4 WaitVersion calls open.*TOO_MANY_CALLS"):
            channel.call(stub.WaitVersion, request, patience=0.2)
        with ThreadPoolExecutor(1) as pool:
            again = pool.submit(channel.call, stub.WaitVersion, request, patience=60)
            for call in held:
                call.cancel()
            assert again.result(60).state == READY


def test_proofs_of_one_model_that_take_long_do_not_hold_up_anothers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shapes, ended = {"noisy": (64, 64), "calm": (32, 32)}, threading.Event()

    def held_up(memory: Array, matrices: Array) -> Array:
        assert tuple(matrices[0, 1:3]) != shapes["noisy"] or ended.wait(60)
        return digest_matrices(memory, matrices)

    monkeypatch.setattr("resharder.server.store.digests.digest_matrices", held_up)
    with closing(Store(tmp_path / "store", shared=False)) as store, ExitStack() as at_last:
        intake = Intake(store, threads=1)
        at_last.callback(ended.set)
        first, second = (sealed(intake, "noisy", shapes["noisy"], step) for step in (1, 2))
        calm = sealed(intake, "calm", shapes["calm"], 1)
        assert completed(intake.wait_version, "calm", calm, 30, False).state == "READY"
        assert [store.catalogue.get("noisy", number).state for number in (first, second)] == ["UPLOADING", "UPLOADING"]
        ended.set()
        assert [completed(intake.wait_version, "noisy", number, 30, False).state for number in (first, second)] == [
            "READY",
            "READY",
        ]


def test_files_of_models_that_take_long_to_lay_out_do_not_hold_up_anothers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    noisy, ended = {"noisy-1", "noisy-2"}, threading.Event()

    def held_up(path: Path, header: bytes, size: int) -> None:
        assert noisy.isdisjoint(path.parts) or ended.wait(60)
        write_zeros(path, header, size)

    monkeypatch.setattr("resharder.server.holding.set_pool.write_zeros", held_up)
    with closing(Store(tmp_path / "store", shared=False)) as store, ExitStack() as at_last:
        intake = Intake(store)
        at_last.callback(ended.set)
        for model in noisy:
            publisher, boxes = (
                intake.create_publisher(model, "job", 1, {"config.json": b"{}"}),
                pack([(0, full_box(SPECS[0].shape), False)]),
            )
            intake.register_slot(publisher.name, 0, "same", SPECS[:1], boxes)
        calm = sealed(intake, "calm", (32, 32), 1)
        assert completed(intake.wait_version, "calm", calm, 30, False).state == "READY"
        assert not list((tmp_path / "store/models").glob("noisy*/pool/*/*.safetensors"))


def sealed(intake: Intake, model: str, shape: tuple[int, ...], step: int) -> int:
    """A version of zeros, which new files hold already, as a rank in shared memory delivers it: its number."""
    publisher = intake.create_publisher(model, "job", 1, {"config.json": b"{}"})
    intake.register_slot(publisher.name, 0, "same", [TensorSpec("a", "BF16", shape)], pack([(0, full_box(shape), False)]))
    version = completed(intake.create_version, publisher.name, 0, step)
    return intake.seal_slot(model, version.number, version.epoch, 0, [0], mapped=True).number


def anonymous_bytes(pid: int) -> int:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("RssAnon:"))


@given(st.integers(1, 12), st.lists(st.sampled_from("abc"), max_size=40), st.data())
def test_lanes_of_a_pool_keep_their_order_and_one_alone_leaves_half(threads: int, lanes: list[str], data: st.DataObject) -> None:
    """Steps end in any order; none starts out of its lane's order or where its lane had as many as were free."""
    pool, held, lock = FairPool(threads, "test"), dict[int, threading.Event](), threading.Lock()
    started: dict[str, list[int]] = {lane: [] for lane in lanes}
    futures = list[Future[int]]()

    def step(number: int, lane: str) -> int:
        with lock:
            started[lane].append(number)
        assert held[number].wait(30)
        return number

    for number, lane in enumerate(lanes):
        held[number] = threading.Event()
        futures.append(pool.submit(lane, partial(step, number, lane)))
    ended = set[int]()
    while len(ended) < len(lanes):
        running = Counter(pool._running)
        assert running.total() <= threads
        assert all(count <= -(-threads // 2) for count in running.values())
        waiting = [lane for lane, queue in pool._queues.items() if queue]
        assert all(running[lane] >= threads - running.total() for lane in waiting), "a lane that may run waits"
        expected = running.total() + len(ended)
        wait_until(lambda expected=expected: sum(map(len, started.values())) >= expected)  # type: ignore[misc]
        going = sorted({number for numbers in started.values() for number in numbers} - ended)
        chosen = data.draw(st.sampled_from(going))
        held[chosen].set()
        assert futures[chosen].result(30) == chosen
        ended.add(chosen)
    # With more threads, two of a lane may note their start in either order.
    assert all(numbers == sorted(numbers) for numbers in started.values()) or threads > 2
    pool.shutdown()


def test_a_newcomer_of_a_pool_runs_at_once_and_a_pool_that_was_shut_down_runs_nothing() -> None:
    pool, ended = FairPool(4, "test"), threading.Event()
    flood = [pool.submit("noisy", lambda: ended.wait(30)) for _ in range(100)]
    assert pool.submit("calm", lambda: 7).result(30) == 7
    pool.shutdown()
    ended.set()
    assert sum(future.cancelled() for future in flood) == 98
    assert [future.result(30) for future in flood[:2]] == [True, True]
    assert pool.submit("calm", lambda: 7).cancelled()


async def attached(endpoint: str, count: int, then: Callable[[], None]) -> None:
    """Run `then` while `count` control sides, each of a server of its own, are attached and have an answer."""
    async with grpc.aio.insecure_channel(endpoint) as channel:
        stub = server_pb2_grpc.ServerServiceStub(channel)
        streams = []
        for number in range(count):
            name = f"many-{number}"
            await stub.ClaimServer(server_pb2.ClaimServerRequest(server=name, model="many", boot=False))
            streams.append(stub.Attend())
            for _ in range(2):
                await streams[-1].write(server_pb2.ControlReport(server=name, control="control", world_size=1))
        for stream in streams:
            while (await stream.read()).kind != server_pb2.Order.RENEWED:
                pass
        await asyncio.to_thread(then)
        assert not any(stream.done() for stream in streams)


@pytest.mark.full
@pytest.mark.parametrize("sides", [128, 512])
def test_many_control_sides_and_a_flood_take_at_most_128_threads_of_the_daemon(sides: int) -> None:
    with Daemon(threads=2048) as daemon, connection(daemon) as noisy, connection(daemon) as calm, ExitStack() as ended:
        weights = random_weights(SPECS, 1)
        flooding = Job(noisy, SPECS, [whole(SPECS)], model="noisy").connect()
        ready, staging = flooding.publish(1, weights), flooding.begin(2)
        ended.enter_context(closing(Renewals(flooding)))
        flood = ended.enter_context(closing(Flood(flooding, noisy, ready, staging)))

        def check() -> None:
            flood.open()
            wait_until(lambda: flood.refused()["downloads"] >= FLOOD - 12 and flood.refused()["exports"] >= FLOOD - 12)
            job = Job(calm, SPECS, [whole(SPECS)], model="calm").connect()
            renewals = ended.enter_context(closing(Renewals(job)))
            assert job.publish(1, weights).state == READY
            wait_until(lambda: renewals.count >= 20)
            assert len(list(Path(f"/proc/{daemon.pid}/task").iterdir())) <= 128

        asyncio.run(attached(daemon.endpoint, sides, check))
