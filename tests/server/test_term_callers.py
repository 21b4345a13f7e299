"""With security, a daemon ends for a term that a node or an operator names, and refuses the calls of others who name one."""

import shutil
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import pytest
from resharder.client.operator.operator import Operator
from resharder.client.rpc.channel import Channel
from resharder.client.rpc.daemon_channel import DaemonReplaced
from resharder.converters.geometry.layout import TensorSpec
from resharder.converters.wire.term import Term
from resharder.server.standby.tenure import REPLACED_STATUS, read_term
from resharder.v1 import (
    node_pb2,
    node_pb2_grpc,
    operator_pb2,
    operator_pb2_grpc,
    publisher_pb2,
    publisher_pb2_grpc,
    server_pb2,
    server_pb2_grpc,
)

from tests.support.publishing import Job, random_weights, whole
from tests.support.secure import PROBE, Authority, SecureDaemon

SPECS = [TensorSpec("norm", "F32", (40,))]
ROLES = {
    f"dns:{PROBE}": ["publisher:*", "operator"],
    "dns:trainer.test": ["publisher:*"],
    "dns:lender.test": ["publisher:*", "operator:policy"],  # lends its GPUs
    "dns:server.test": ["server:*"],
    "dns:node.test": ["node:policy"],
    "dns:alice.test": ["operator"],
}
RENEW = (
    publisher_pb2_grpc.PublisherServiceStub,
    "RenewLease",
    publisher_pb2.RenewLeaseRequest(publisher="models/m/publishers/1"),
)
CLAIM = (server_pb2_grpc.ServerServiceStub, "ClaimServer", server_pb2.ClaimServerRequest(server="servers/s", model="models/m"))
SYNC = (node_pb2_grpc.NodeServiceStub, "SyncNode", node_pb2.SyncNodeRequest(node="nodes/n", instance="i"))
DRAIN = (operator_pb2_grpc.OperatorServiceStub, "SetDrained", operator_pb2.SetDrainedRequest(server="servers/s", drained=True))
DELETE = (operator_pb2_grpc.OperatorServiceStub, "DeleteFleet", operator_pb2.DeleteFleetRequest(fleet="fleets/f"))


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[SecureDaemon]:
    with SecureDaemon(Authority(tmp_path / "pki"), ROLES, data_listen="127.0.0.1:0") as running:
        yield running


def next_term(daemon: SecureDaemon) -> Term:
    """The term of a daemon that took over from this one."""
    term = read_term(daemon.store)
    assert term is not None
    return Term(term.registry, term.number + 1)


def refused(daemon: SecureDaemon, name: str, call: tuple[Any, str, Any], term: Term) -> str:
    """The code and the message with which a call of some name that names a term is refused."""
    stub, method, request = call
    tls = daemon.authority.tls(name).credentials()
    with grpc.secure_channel(daemon.endpoint, tls) as channel, pytest.raises(grpc.RpcError) as error:
        getattr(stub(channel), method)(request, timeout=20, metadata=term.metadata())
    return f"{error.value.code().name}: {error.value.details()}"


def test_a_made_up_term_of_a_publisher_or_a_server_ends_no_daemon(daemon: SecureDaemon) -> None:
    term = next_term(daemon)
    for name, call in (
        ("trainer.test", RENEW),
        ("lender.test", RENEW),
        ("lender.test", DELETE),
        ("server.test", CLAIM),
    ):
        found = refused(daemon, name, call, term)
        assert found.startswith(f"UNAVAILABLE: the call names term {term.number} of this registry, the daemon's is 1"), found
    assert daemon.process is not None
    assert daemon.process.poll() is None
    version = Job(daemon.channel, SPECS, [whole(SPECS)]).connect().publish(1, random_weights(SPECS, 1))
    assert version.State.Name(version.state) == "READY"


@pytest.mark.parametrize(("name", "call"), [("node.test", SYNC), ("alice.test", DRAIN)])
def test_a_term_of_a_node_or_an_operator_ends_the_daemon(daemon: SecureDaemon, name: str, call: tuple[Any, str, Any]) -> None:
    refused(daemon, name, call, next_term(daemon))
    assert daemon.wait(60) == REPLACED_STATUS
    assert "another daemon has taken over: its term is 2, this one's is 1" in daemon.log.read_text()


def test_a_rank_that_is_refused_publishes_with_the_daemon_that_has_taken_over(daemon: SecureDaemon, tmp_path: Path) -> None:
    """The folder of the newer daemon is a copy, so that the older one does not learn of it."""
    store = tmp_path / "store"
    shutil.copytree(daemon.store, store, ignore=shutil.ignore_patterns("pool", "staging", "retired", "*.part"))
    with closing(SecureDaemon(daemon.authority, ROLES, store=store, take_over=True)) as newer:
        newer.start()
        tls = replace(daemon.authority.tls("trainer.test"), name="localhost")
        with Channel(f"{daemon.endpoint},{newer.endpoint}", tls=tls) as channel:
            stub = operator_pb2_grpc.OperatorServiceStub(channel.grpc)
            request = operator_pb2.GetDaemonRequest()
            assert channel.call(stub.GetDaemon, request).start_time == started(daemon)
            with Operator(newer.endpoint, tls=daemon.authority.tls("alice.test")) as operator:
                operator.versions()
            with pytest.raises(DaemonReplaced):
                Job(channel.grpc, SPECS, [whole(SPECS)]).connect()
            Job(channel.grpc, SPECS, [whole(SPECS)]).connect().publish(1, random_weights(SPECS, 1))
            assert channel.call(stub.GetDaemon, request).start_time == started(newer)
        with Operator(newer.endpoint, tls=daemon.authority.tls("alice.test")) as operator:
            assert [version.state.name for version in operator.versions("policy")] == ["READY"]
    assert daemon.process is not None
    assert daemon.process.poll() is None


def started(daemon: SecureDaemon) -> Any:
    stub = operator_pb2_grpc.OperatorServiceStub(daemon.channel)
    return stub.GetDaemon(operator_pb2.GetDaemonRequest()).start_time
