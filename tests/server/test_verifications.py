"""A verification from the operator who asks for it to the workers and back; a real daemon, simulated workers."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from resharder.client.errors import NotFound, WaitTimeout
from resharder.client.operator import Operator
from resharder.v1 import resources_pb2, server_pb2, server_pb2_grpc

from tests.support.daemon import Daemon
from tests.support.observing import servers, wait_serving, wait_until
from tests.support.populated_daemon import job, publish
from tests.support.simulated_server import SimulatedServer

Worker, Server = resources_pb2.Worker, resources_pb2.Server


@pytest.fixture
def daemon() -> Iterator[Daemon]:
    with Daemon() as running:
        publish(job(running, "policy", rows=64), 1)
        yield running


def report(daemon: Daemon, **fields: object) -> Server:
    """Report of server `a`'s worker with a verification, and the daemon's answer."""
    worker = servers(daemon)[0].workers[0]
    for name in ("verification", "altered"):
        worker.ClearField(name)
    worker.MergeFrom(Worker(**fields))
    stub = server_pb2_grpc.ServerServiceStub(daemon.channel)
    return stub.ReportWorker(server_pb2.ReportWorkerRequest(server="servers/a", worker=worker))


def verified(daemon: Daemon, **fields: object) -> list[resources_pb2.Verification]:
    """Answer to an operator while the worker reports this verification, with further `fields`."""
    with ThreadPoolExecutor(1) as pool, Operator(daemon.endpoint) as operator:
        asked = pool.submit(operator.verify, "a", timeout=30)
        request = ""

        def comes() -> bool:
            nonlocal request
            request = report(daemon).verify_request
            return bool(request) or asked.done()

        wait_until(comes, "the request in the answer to a report")
        verification = fields.pop("verification", resources_pb2.Verification(tensors=5))
        verification.request = request
        report(daemon, verification=verification, **fields)
        return asked.result(30)


def test_an_operator_gets_what_every_worker_found(daemon: Daemon) -> None:
    with SimulatedServer(daemon, "a"):
        wait_serving(daemon, 1)
        (found,) = verified(daemon)
        assert (found.rank, found.tensors, list(found.different)) == (0, 5, [])
        assert wait_serving(daemon, 1).workers[0].verification.tensors == 5


def test_how_much_was_compared_and_the_workers_warnings_arrive_with_bounds(daemon: Daemon) -> None:
    with SimulatedServer(daemon, "a"):
        wait_serving(daemon, 1)
        left = resources_pb2.Uncompared(reason="packed" * 200, tensors=9, bytes=7, names=["w"] * 9)
        partial = resources_pb2.Verification(covered_bytes=3, digested_bytes=2, total_bytes=10, uncompared=[left] * 9)
        (found,) = verified(daemon, verification=partial, warnings=["allowed by RESHARDER_ALLOW=some: w"] * 9)
        assert (found.covered_bytes, found.digested_bytes, found.total_bytes, len(found.uncompared)) == (3, 2, 10, 8)
        one = found.uncompared[0]
        assert (len(one.reason), one.tensors, one.bytes, one.names) == (500, 9, 7, ("w",) * 8)
        assert servers(daemon)[0].workers[0].warnings == ["allowed by RESHARDER_ALLOW=some: w"] * 8
        assert servers(daemon)[0].reason.endswith("; worker 0: allowed by RESHARDER_ALLOW=some: w")


def test_a_server_whose_worker_was_altered_leaves_service_with_the_reason_and_gets_its_version_again(daemon: Daemon) -> None:
    with SimulatedServer(daemon, "a") as server:
        wait_serving(daemon, 1)
        server.broken.add(1)  # it cannot stage, so that the fault can be looked at
        different = resources_pb2.Verification(tensors=5, different_tensors=1, different=["norm"])
        fault = {"state": Worker.FAILED, "error": "1 tensors in memory differ from version 1: norm", "altered": True}
        (found,) = verified(daemon, verification=different, **fault)
        assert list(found.different) == ["norm"]
        wait_until(lambda: servers(daemon)[0].state == Server.FAILED, "FAILED")
        assert "worker 0: 1 tensors in memory differ from version 1: norm" in servers(daemon)[0].reason
        server.broken.clear()
        wait_serving(daemon, 1)
        assert servers(daemon)[0].install.version == 1
        with Operator(daemon.endpoint) as operator:
            assert [event.reason for event in operator.events(last=100) if event.what == "altered"] == [fault["error"]]


def test_who_waits_in_vain_is_told_so(daemon: Daemon) -> None:
    with Operator(daemon.endpoint) as operator:
        with pytest.raises(NotFound):
            operator.verify("nobody")
        with SimulatedServer(daemon, "a"):
            wait_serving(daemon, 1)
            with pytest.raises(WaitTimeout, match="0 of 1 workers of server a have verified after"):
                operator.verify("a", timeout=0.2)
