"""State of a daemon under test as an operator sees it, and waits for it."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from resharder.client.operator import Operator
from resharder.client.operator.answers import Server
from resharder.v1 import operator_pb2, operator_pb2_grpc, resources_pb2

from tests.support.daemon import Daemon

SERVING = resources_pb2.Server.SERVING


def servers(daemon: Daemon) -> list[resources_pb2.Server]:
    return list(operator_pb2_grpc.OperatorServiceStub(daemon.channel).ListServers(operator_pb2.ListServersRequest()).servers)


def versions(daemon: Daemon) -> dict[int, str]:
    """Return the state of each version by number."""
    listed = operator_pb2_grpc.OperatorServiceStub(daemon.channel).ListVersions(operator_pb2.ListVersionsRequest()).versions
    return {version.number: resources_pb2.Version.State.Name(version.state) for version in listed}


def wait_until(holds: Callable[[], bool], what: str = "what the test waits for", timeout: float = 300) -> None:
    end = time.monotonic() + timeout
    while not holds():
        if time.monotonic() > end:
            raise TimeoutError(f"expected within {timeout} s: {what}")
        time.sleep(0.05)


def wait_serving(daemon: Daemon, version: int, timeout: float = 300) -> resources_pb2.Server:
    """Wait until every live server serves `version`, and return one of them."""
    live: list[resources_pb2.Server] = []

    def serving() -> bool:
        live[:] = [server for server in servers(daemon) if server.state != resources_pb2.Server.LOST]
        return bool(live) and all(server.state == SERVING and server.version == version for server in live)

    try:
        wait_until(serving, f"every server serves version {version}", timeout)
    except TimeoutError as error:
        raise TimeoutError(f"{error}; they are: {servers(daemon)}") from None
    return live[0]


@contextmanager
def expect_leaving(daemon: Daemon) -> Iterator[None]:
    """Expect the only server to serve before the block, and to have left after it, without ever having been LOST."""
    with Operator(daemon.endpoint) as operator:
        wait_until(lambda: [server.state for server in operator.servers()] == [Server.State.SERVING], "it serves")
        (before,) = list(operator.events(last=1))
        yield
        try:
            wait_until(lambda: operator.servers() == [], "it has left", 60)
        except TimeoutError as error:
            raise TimeoutError(f"{error}; there is: {operator.servers()}, after: {[*operator.events(last=5)]}") from None
        changes = [event.what for event in operator.events(last=100) if event.kind == "server" and event.id > before.id]
    assert changes[-1] == "left"
    assert "lost" not in changes


def export(daemon: Daemon, version: str, folder: Path) -> None:
    """Export a version, by its resource name, as a folder."""
    with Operator(daemon.endpoint) as operator:
        _, model, _, number = version.split("/")
        operator.export(int(number), folder, model=model)
