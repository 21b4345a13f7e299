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

from tests.client.models import connected, publish_all, weights
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


def test_a_trainer_that_is_refused_publishes_the_next_step_with_the_daemon_that_has_taken_over(
    daemon: SecureDaemon, tmp_path: Path
) -> None:
    """The folder of the newer daemon is a copy, so that the older one does not learn of it, and stays."""
    alice, tls = daemon.authority.tls("alice.test"), replace(daemon.authority.tls("trainer.test"), name="localhost")
    with closing(SecureDaemon(daemon.authority, ROLES, store=tmp_path / "store", take_over=True)) as newer:
        publishers = connected(f"{daemon.endpoint},{newer.endpoint}", 2, "refused", tls=tls)
        publish_all(publishers, 1, weights(1))[0].wait_ready(60)
        shutil.copytree(daemon.store, newer.store, ignore=shutil.ignore_patterns("pool", "staging", "retired", "*.part"))
        newer.start()
        with Operator(newer.endpoint, tls=alice) as operator:  # which tells this process the newer term
            assert [version.number for version in operator.versions("policy")] == [1]
            handle = publish_all(publishers, 2, weights(2))[0]
            handle.wait_ready(60)
            assert [(version.number, version.step) for version in operator.versions("policy")] == [(handle.version, 2), (1, 1)]
    assert daemon.process is not None
    assert daemon.process.poll() is None
    listed = operator_pb2_grpc.OperatorServiceStub(daemon.channel).ListVersions(operator_pb2.ListVersionsRequest())
    assert [version.step for version in listed.versions] == [1]
