"""Terms on the wire: what a daemon's answers name, which calls end it, and what a client believes."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import pytest
from resharder.client.rpc.channel import Channel
from resharder.client.rpc.daemon_channel import DaemonChannel, DaemonReplaced
from resharder.converters.wire.term import NewestTerms, Term
from resharder.server.infra.change_signal import ChangeSignal, Pause
from resharder.server.rpc.dispatch import Call, Dispatcher
from resharder.server.rpc.server import RpcServer
from resharder.server.security.access import Access
from resharder.server.security.limits import Limits
from resharder.server.standby.tenure import Tenure
from resharder.server.state.errors import ResourceNotFound
from resharder.v1 import operator_pb2, operator_pb2_grpc, publisher_pb2, publisher_pb2_grpc, resources_pb2

REGISTRY = "0123456789abcdef"
GET = operator_pb2.GetDaemonRequest()
LEASE = publisher_pb2.RenewLeaseRequest(publisher="models/policy/publishers/1")


class Operators(operator_pb2_grpc.OperatorServiceServicer):
    def __init__(self, release: str) -> None:
        self._release = release

    def GetDaemon(self, request: Any, call: Call) -> operator_pb2.Daemon:
        return operator_pb2.Daemon(release=self._release)

    def GetVersion(self, request: Any, call: Call) -> resources_pb2.Version:
        raise ResourceNotFound("VERSION_UNKNOWN", "no such version")

    def ListEvents(self, request: Any, call: Call) -> Iterator[operator_pb2.Event | Pause]:
        for number in range(1, 4):
            yield operator_pb2.Event(id=number)
            if request.follow:
                quiet = ChangeSignal()
                yield quiet.pause(quiet.count, 60)


class Publishers(publisher_pb2_grpc.PublisherServiceServicer):
    def RenewLease(self, request: Any, call: Call) -> resources_pb2.Publisher:
        return resources_pb2.Publisher(name=request.publisher)


class Served:
    """A gRPC server in this process, of a term."""

    def __init__(self, number: int) -> None:
        self.ended: list[str] = []
        tenure = Tenure(None, Term(REGISTRY, number), self.ended.append)
        world: Any = object()
        access = Access(None, Limits(0, 100), 1 << 20, world)
        dispatcher = Dispatcher(access, lambda name: "", lambda reason: None, terms=tenure, waits=8, transfers=8)
        services = {
            Operators(str(number)): operator_pb2_grpc.add_OperatorServiceServicer_to_server,
            Publishers(): publisher_pb2_grpc.add_PublisherServiceServicer_to_server,
        }
        ports: list[int] = []
        self.server = RpcServer(dispatcher, services, lambda made: ports.append(made.add_insecure_port("127.0.0.1:0")) or 0, [])
        self.server.start()
        self.address = f"127.0.0.1:{ports[0]}"
        self.channel = grpc.insecure_channel(self.address)

    def stubs(self, terms: NewestTerms) -> tuple[Any, Any]:
        channel = DaemonChannel(self.address, None, [], terms)
        return operator_pb2_grpc.OperatorServiceStub(channel), publisher_pb2_grpc.PublisherServiceStub(channel)

    def close(self) -> None:
        self.channel.close()
        self.server.stop(1)


@pytest.fixture
def served() -> Iterator[tuple[Served, Served]]:
    """Daemons of term 1 and of term 2."""
    both = Served(1), Served(2)
    yield both
    for each in both:
        each.close()


def test_answers_errors_and_streams_name_the_term(served: tuple[Served, Served]) -> None:
    stub = operator_pb2_grpc.OperatorServiceStub(served[0].channel)
    _, call = stub.GetDaemon.with_call(GET)
    events = stub.ListEvents(operator_pb2.ListEventsRequest())
    with pytest.raises(grpc.RpcError) as refused:
        stub.GetVersion(operator_pb2.GetVersionRequest(version="models/policy/versions/1"))
    for each in (call, events, refused.value):
        assert dict(each.initial_metadata())["resharder-term"] == f"{REGISTRY}/1"


def test_an_answer_an_error_and_a_stream_of_an_earlier_term_are_not_believed(served: tuple[Served, Served]) -> None:
    older, newer = served
    terms = NewestTerms()
    before, renew = older.stubs(terms)
    assert before.GetDaemon(GET).release == "1"
    events = before.ListEvents(operator_pb2.ListEventsRequest())
    assert next(events).id == 1
    newer.stubs(terms)[0].GetDaemon(GET)
    unknown = operator_pb2.GetVersionRequest(version="models/policy/versions/1")
    for call in (
        lambda: before.GetDaemon(GET),
        lambda: before.GetDaemon.future(GET).result(),
        lambda: before.GetVersion(unknown),
        lambda: next(events),
        lambda: next(before.ListEvents(operator_pb2.ListEventsRequest())),
        lambda: renew.RenewLease(LEASE),
    ):
        with pytest.raises(DaemonReplaced, match="a daemon of term 2 has taken over from the one that answered, of term 1"):
            call()
    assert isinstance(before.GetDaemon.future(GET).exception(), DaemonReplaced)


def test_a_replaced_daemon_is_one_that_cannot_be_reached() -> None:
    found = Channel("127.0.0.1:9").error(DaemonReplaced(Term(REGISTRY, 1), Term(REGISTRY, 2)))
    assert (type(found).__name__, found.reason) == ("DaemonUnreachable", "DAEMON_REPLACED")


def test_a_rank_that_knows_of_a_newer_daemon_ends_the_older_one_and_a_viewer_does_not(served: tuple[Served, Served]) -> None:
    older, newer = served
    terms = NewestTerms()
    look, renew = older.stubs(terms)
    look.GetDaemon(GET)
    newer.stubs(terms)[0].GetDaemon(GET)
    with pytest.raises(DaemonReplaced):
        look.GetDaemon(GET)
    assert older.ended == []
    with pytest.raises(DaemonReplaced):
        renew.RenewLease(LEASE)
    assert [reason.partition(":")[0] for reason in older.ended] == ["another daemon has taken over"]
    assert newer.stubs(terms)[1].RenewLease(LEASE).name == LEASE.publisher
    assert newer.ended == []


def test_a_client_leaves_a_replaced_daemon_for_the_next_address(served: tuple[Served, Served]) -> None:
    older, newer = served
    terms = NewestTerms()
    with DaemonChannel(f"{older.address},{newer.address}", None, [], terms) as channel:
        stub = operator_pb2_grpc.OperatorServiceStub(channel)
        assert stub.GetDaemon(GET).release == "1"
        quiet = stub.ListEvents(operator_pb2.ListEventsRequest(follow=True))
        assert next(quiet).id == 1
        terms.see(Term(REGISTRY, 2))
        with ThreadPoolExecutor(8) as threads:
            errors = [each.exception() for each in [threads.submit(stub.GetDaemon, GET) for _ in range(8)]]
        assert any(isinstance(error, DaemonReplaced) for error in errors)
        for _ in range(3):
            assert stub.GetDaemon(GET).release == "2"
        with pytest.raises(DaemonReplaced):  # though nothing has arrived on it
            next(quiet)
        assert next(stub.ListEvents(operator_pb2.ListEventsRequest())).id == 1
        assert stub.GetDaemon.future(GET).result().release == "2"


def test_a_client_with_one_address_tries_it_again(served: tuple[Served, Served]) -> None:
    older, _ = served
    terms = NewestTerms()
    terms.see(Term(REGISTRY, 2))
    with DaemonChannel(older.address, None, [], terms) as channel:
        stub = operator_pb2_grpc.OperatorServiceStub(channel)
        for _ in range(5):
            with pytest.raises(DaemonReplaced):
                stub.GetDaemon(GET)
            with pytest.raises(DaemonReplaced):
                stub.GetDaemon.future(GET).result()
    with pytest.raises(ValueError, match="the channel was closed"):
        stub.GetDaemon(GET)
