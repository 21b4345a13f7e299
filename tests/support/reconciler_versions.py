"""Versions of a store, servers and settings, for tests of the reconciler."""

from resharder.server.fleets.reconciler.step import step
from resharder.server.state.server import Server, Settings, Worker
from resharder.server.state.server_events import Attached, Claimed, Reported, WorkerReported
from resharder.v1 import resources_pb2, server_pb2

STORE = "a store"


def fingerprint(version: int, store: str = STORE) -> str:
    return f"{version} of {store}" if version else ""


def versions(*numbers: int, store: str = STORE) -> dict[int, str]:
    return {number: fingerprint(number, store) for number in numbers}


SETTINGS = Settings(lease=10, grace=10, boot=100, install_step=50, attempts=3, first_retry=1, last_retry=4)


def serving(version: int, *, world_size: int = 2) -> Server:
    """A server that serves `version`, led by control side `a`."""
    server = Server("s", "m", "m", "life", 0.0, versions(version))
    server, _ = step(server, Claimed(boot=True), 0, SETTINGS)
    for rank in range(world_size):
        server = report_worker(server, rank, resources_pb2.Worker.BOOTED, version, "")
    server, _ = step(server, Attached("a", world_size), 0, SETTINGS)
    server, _ = step(server, Reported("a", "life-0", server_pb2.Order.RESUME), 0, SETTINGS)
    assert server.serving == version
    return server


def report_worker(
    server: Server, rank: int, state: resources_pb2.Worker.State, version: int, install: str, process: str = ""
) -> Server:
    worker = Worker(rank, state, version, install, process=process or f"p{rank}", fingerprint=fingerprint(version))
    return step(server, WorkerReported(worker), 1, SETTINGS)[0]
