"""Calls and iterators of a closed operator, publisher, channel or node client."""

import inspect
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
import torch
from resharder.client.direct.links import until_over
from resharder.client.errors import UsageError
from resharder.client.operator import Operator
from resharder.client.operator.answers import Fleet, Power
from resharder.client.rpc.channel import Channel
from resharder.client.trainer.connect import DeclaredTensor, connect
from resharder.client.transport.chunks import ChunkStreams, PackedChunk
from resharder.client.versions.manifest import VersionManifest
from resharder.client.versions.source import read_boxes
from resharder.converters.geometry.layout import TensorSpec, full_box
from resharder.converters.storage.files import FileLayout
from resharder.server.node.daemon_client import DaemonClient
from resharder.v1 import node_pb2, operator_pb2, operator_pb2_grpc, resources_pb2

CLOSED = r"the connection to 127\.0\.0\.1:\d+ was closed"
CALLS: dict[str, Callable[[Operator], Any]] = {
    "approve": lambda operator: operator.approve("rl"),
    "archive": lambda operator: operator.archive(1, model="m"),
    "archived": lambda operator: operator.archived("m"),
    "back": lambda operator: operator.back("rl"),
    "clock_difference": lambda operator: operator.clock_difference(),
    "daemon": lambda operator: operator.daemon(),
    "delete_fleet": lambda operator: operator.delete_fleet("rl"),
    "drain": lambda operator: operator.drain("rl"),
    "drain_node": lambda operator: operator.drain_node("n"),
    "events": lambda operator: list(operator.events()),
    "export": lambda operator: operator.export(1, Path("/nonexistent"), model="m"),
    "fetch_config": lambda operator: operator.fetch_config(Path("/nonexistent"), model="m"),
    "fleet": lambda operator: operator.fleet("rl"),
    "fleets": lambda operator: operator.fleets(),
    "forget": lambda operator: operator.forget("s"),
    "gc": lambda operator: operator.gc(keep=1, model="m"),
    "latest": lambda operator: operator.latest("m"),
    "nodes": lambda operator: operator.nodes(),
    "only_model": lambda operator: operator.only_model(),
    "pin": lambda operator: operator.pin("rl", 1),
    "profile_install": lambda operator: list(operator.profile_install("s")),
    "replica_shortages": lambda operator: operator.replica_shortages(),
    "restore": lambda operator: operator.restore(1, model="m"),
    "resume": lambda operator: operator.resume("rl"),
    "resume_node": lambda operator: operator.resume_node("n"),
    "rollback": lambda operator: operator.rollback("rl"),
    "server": lambda operator: operator.server("s"),
    "servers": lambda operator: operator.servers(),
    "set_fleet": lambda operator: operator.set_fleet("rl", max_skew=1),
    "sleep": lambda operator: operator.sleep("rl"),
    "update": lambda operator: operator.update("rl", 1),
    "verify": lambda operator: operator.verify("s"),
    "version": lambda operator: operator.version(1, model="m"),
    "versions": lambda operator: operator.versions("m"),
    "versions_after": lambda operator: operator.versions_after(1, model="m"),
    "wait_drained": lambda operator: operator.wait_drained("rl"),
    "wait_moved": lambda operator: operator.wait_moved(_fleet()),
    "wait_power": lambda operator: operator.wait_power("rl", Power.AWAKE),
    "wait_serving": lambda operator: operator.wait_serving("rl"),
    "wake": lambda operator: operator.wake("rl"),
}


def _fleet() -> Fleet:
    from resharder.client.operator.convert import answer

    return answer(Fleet, resources_pb2.Fleet(name="rl"))


def test_every_call_of_a_closed_operator_is_refused() -> None:
    with Operator("127.0.0.1:1", connect_timeout=None) as operator:
        pass
    public = {name for name, member in inspect.getmembers(Operator, inspect.isfunction) if not name.startswith("_")}
    assert public == {*CALLS, "close"}
    for call in CALLS.values():
        with pytest.raises(UsageError, match=CLOSED):
            call(operator)
    operator.close()


class _Answering(operator_pb2_grpc.OperatorServiceServicer):
    """Answers the beginning of each stream, then nothing until the call ends."""

    def __init__(self) -> None:
        self.waiting = threading.Semaphore(0)

    def _wait(self, context: grpc.ServicerContext) -> None:
        ended = threading.Event()
        if context.add_callback(ended.set):
            self.waiting.release()
            ended.wait(30)

    def ListEvents(self, request: operator_pb2.ListEventsRequest, context: grpc.ServicerContext) -> Iterator[operator_pb2.Event]:
        yield operator_pb2.Event(id=request.after + 1)
        self._wait(context)

    def ProfileInstall(self, request: Any, context: grpc.ServicerContext) -> Iterator[resources_pb2.Profile]:
        yield resources_pb2.Profile(rank=0)
        self._wait(context)

    def ListFleets(self, request: Any, context: grpc.ServicerContext) -> operator_pb2.ListFleetsResponse:
        if not request.page_token:
            return operator_pb2.ListFleetsResponse(fleets=[resources_pb2.Fleet(name="rl")], next_page_token="next")
        self._wait(context)
        return operator_pb2.ListFleetsResponse()


@contextmanager
def _daemon() -> Iterator[tuple[_Answering, str]]:
    answering, server = _Answering(), grpc.server(ThreadPoolExecutor(8))
    operator_pb2_grpc.add_OperatorServiceServicer_to_server(answering, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        yield answering, f"127.0.0.1:{port}"
    finally:
        server.stop(None).wait(30)


STREAMS: dict[str, Callable[[Operator], Iterator[Any]]] = {
    "events": lambda operator: operator.events(),
    "following": lambda operator: operator.events(follow=True),
    "profiles": lambda operator: operator.profile_install("s"),
}


@pytest.mark.parametrize("stream", STREAMS.values(), ids=STREAMS)
@pytest.mark.parametrize("awaited", [False, True], ids=["between-two", "awaited"])
def test_an_iterator_ends_when_its_operator_is_closed(stream: Callable[[Operator], Iterator[Any]], awaited: bool) -> None:
    """Closed between two elements, or while the next one is awaited."""
    with _daemon() as (answering, endpoint):
        operator = Operator(endpoint)
        answers = stream(operator)
        next(answers)
        assert answering.waiting.acquire(timeout=30)
        closing = threading.Timer(0.1 if awaited else 0.0, operator.close)
        closing.start()
        if not awaited:
            closing.join()
        with pytest.raises(UsageError, match=CLOSED):
            next(answers)
        closing.join()


def test_a_call_in_progress_ends_when_its_operator_is_closed() -> None:
    with _daemon() as (answering, endpoint):
        operator = Operator(endpoint)

        def close() -> None:
            assert answering.waiting.acquire(timeout=30)
            operator.close()

        closing = threading.Thread(target=close)
        closing.start()
        with pytest.raises(UsageError, match=CLOSED):
            operator.fleets()
        closing.join()


def test_a_following_iterator_ends_when_its_operator_is_closed_while_the_daemon_is_away() -> None:
    with _daemon() as (_, endpoint):
        operator = Operator(endpoint)
        answers = operator.events(follow=True)
        next(answers)
    closing = threading.Timer(0.5, operator.close)
    closing.start()
    with pytest.raises(UsageError, match=CLOSED):
        next(answers)
    closing.join()


def test_chunks_and_boxes_over_a_channel_that_was_closed_are_refused() -> None:
    spec = TensorSpec("a", "F32", (2,))
    manifest = VersionManifest("models/m/versions/1", 1, "", "", {"a": spec}, {}, (FileLayout("f", b"", 8, ()),), "127.0.0.1:1")
    version, chunk = resources_pb2.Version(name=manifest.name, epoch=1, model="m"), PackedChunk(0, memoryview(bytes(8)), 8, 0)
    with Channel("127.0.0.1:1", patience=0) as channel:
        chunks, boxes = ChunkStreams(channel, version, 0), read_boxes(channel, manifest, [("a", full_box((2,)))])
        waited = until_over(channel, "g", 1.0, lambda reason: None)
    with pytest.raises(UsageError, match=CLOSED):
        chunks.send([chunk])
    with pytest.raises(UsageError, match=CLOSED):
        next(boxes)
    with pytest.raises(UsageError, match=CLOSED), waited:
        pass


def test_a_stub_that_was_made_before_the_channel_was_closed_begins_no_stream() -> None:
    channel = Channel("127.0.0.1:1", patience=0)
    stub = operator_pb2_grpc.OperatorServiceStub(channel.grpc)
    channel.close()
    for method in (stub.ListEvents, stub.ListFleets.future):
        with pytest.raises(UsageError, match=CLOSED):
            channel.begin(method, operator_pb2.ListEventsRequest())


def test_calls_of_a_closed_publisher_that_need_the_daemon_are_refused() -> None:
    config, tensors = {"architectures": ["LlamaForCausalLM"]}, [DeclaredTensor("a", "F32", (2,))]
    publisher = connect("127.0.0.1:1", model="m", job="j", config=config, connect_timeout=0)
    publisher.close()
    for call in (
        lambda: publisher.attach(torch.nn.Linear(1, 1), config),
        lambda: publisher.attach_tensors(tensors),
        lambda: publisher.publish(1),
        lambda: publisher.publish_tensors(1, [("a", torch.zeros(2))]),
        lambda: publisher.generation(1, publish=False).__enter__(),
    ):
        with pytest.raises(UsageError, match=CLOSED):
            call()
    publisher.abort()
    publisher.release()
    publisher.bring_back()
    publisher.close()


def test_a_closed_node_client_refuses_calls() -> None:
    """grpcio makes a stub of a closed channel by a segmentation fault; it is closed while the swarm's threads may call."""
    client = DaemonClient("127.0.0.1:1")
    with pytest.raises(grpc.RpcError):
        client.version("models/m/versions/1")
    for _ in range(2):
        client.close()
    for call in (
        lambda: client.sync(node_pb2.SyncNodeRequest()),
        lambda: client.version("models/m/versions/1"),
        lambda: client.checksums("models/m/versions/1", "f", 0, 1),
    ):
        with pytest.raises(OSError, match=CLOSED):
            call()
