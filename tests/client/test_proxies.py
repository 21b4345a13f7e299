"""Proxies in the environment and addresses that are none: calls go straight to the daemon, or through RESHARDER_PROXY."""

import re
import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack, closing, suppress
from dataclasses import replace
from pathlib import Path

import grpc
import pytest
from resharder.client.errors import DaemonUnreachable, UsageError
from resharder.client.inference.settings import PluginSettings
from resharder.client.operator import Operator
from resharder.client.rpc.channel import Channel
from resharder.client.versions import port_reader
from resharder.client.versions.source import read_boxes
from resharder.server.config import ConfigError
from resharder.server.node.daemon_client import DaemonClient
from resharder.server.node.main import load
from resharder.v1 import node_pb2, resources_pb2

from tests.client.port_reading import SMALL, all_boxes, manifest_of, publish
from tests.support.command import resharder
from tests.support.daemon import Daemon
from tests.support.fake_operator import FakeOperator
from tests.support.secure import Authority

PROXIES = ("http_proxy", "https_proxy", "grpc_proxy", "HTTP_PROXY", "HTTPS_PROXY", "all_proxy", "ALL_PROXY")


BEHIND = "127.0.0.2"
"""Address of which nothing listens, for a host that only the proxy reaches."""


class Proxy:
    """An HTTP proxy that answers CONNECT with a status; with 200 it passes bytes on."""

    def __init__(self, status: int) -> None:
        self.status, self.asked = status, list[str]()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://user:secret@127.0.0.1:{self._listener.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                connection, _ = self._listener.accept()
                threading.Thread(target=self._answer, args=(connection,), daemon=True).start()

    def _answer(self, connection: socket.socket) -> None:
        with suppress(OSError), connection:
            head = b""
            while b"\r\n\r\n" not in head and (found := connection.recv(1)):
                head += found
            self.asked.append(head.split(b"\r\n")[0].decode())
            connection.sendall(f"HTTP/1.1 {self.status} said\r\n\r\n".encode())
            if self.status == 200:
                host, port = self.asked[-1].split()[1].rsplit(":", 1)
                with socket.create_connection((host.replace(BEHIND, "127.0.0.1"), int(port))) as target:
                    back = threading.Thread(target=_copy, args=(target, connection), daemon=True)
                    back.start()
                    _copy(connection, target)

    def close(self) -> None:
        self._listener.close()


def _copy(source: socket.socket, target: socket.socket) -> None:
    with suppress(OSError):
        while found := source.recv(1 << 16):
            target.sendall(found)
        target.shutdown(socket.SHUT_WR)


@pytest.fixture
def fake() -> Iterator[FakeOperator]:
    with FakeOperator(resources_pb2.Fleet(name="rl", model="policy")) as fake:
        yield fake


@pytest.fixture
def environment(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    for name in (*PROXIES, "no_proxy", "NO_PROXY", "no_grpc_proxy", "RESHARDER_PROXY"):
        monkeypatch.delenv(name, raising=False)
    return monkeypatch


@pytest.fixture
def refusing(environment: pytest.MonkeyPatch) -> Iterator[Proxy]:
    with closing(Proxy(503)) as proxy:
        for name in PROXIES:
            environment.setenv(name, proxy.url)
        yield proxy


def test_a_proxy_of_the_environment_is_passed_by(fake: FakeOperator, refusing: Proxy) -> None:
    with Operator(fake.endpoint) as operator:
        assert operator.daemon().release == "fake"
    assert resharder("fleets", "--endpoint", fake.endpoint.replace("127.0.0.1", "localhost")).code == 0
    with closing(DaemonClient(fake.endpoint)) as client, pytest.raises(grpc.RpcError) as reached:
        client.sync(node_pb2.SyncNodeRequest())
    assert reached.value.code() is grpc.StatusCode.UNIMPLEMENTED, "the fake daemon has no such method"
    assert refusing.asked == []


def test_a_proxy_of_the_environment_is_passed_by_over_tls(refusing: Proxy, tmp_path: Path) -> None:
    authority = Authority(tmp_path / "authority")
    authority.issue("operator", "operator.test")
    with ExitStack() as stack, pytest.raises(DaemonUnreachable, match="connection refused"):
        stack.enter_context(Operator("127.0.0.1:1", connect_timeout=0, tls=authority.tls("operator"))).daemon()
    assert refusing.asked == []


def test_calls_go_through_the_proxy_that_is_named(fake: FakeOperator, environment: pytest.MonkeyPatch) -> None:
    with closing(Proxy(200)) as proxy:
        environment.setenv("RESHARDER_PROXY", proxy.url)
        with Operator(fake.endpoint) as operator:
            assert operator.daemon().release == "fake"
        with closing(DaemonClient(fake.endpoint)) as client, pytest.raises(grpc.RpcError) as reached:
            client.sync(node_pb2.SyncNodeRequest())
        assert reached.value.code() is grpc.StatusCode.UNIMPLEMENTED
        assert proxy.asked == [f"CONNECT {fake.endpoint} HTTP/1.1"] * 2


def test_a_proxy_that_refuses_is_named_with_its_variable(fake: FakeOperator, environment: pytest.MonkeyPatch) -> None:
    with closing(Proxy(503)) as proxy:
        environment.setenv("RESHARDER_PROXY", proxy.url)
        with Operator(fake.endpoint, connect_timeout=0) as operator, pytest.raises(DaemonUnreachable) as refused:
            operator.daemon()
    message = str(refused.value)
    assert "RESHARDER_PROXY" in message
    assert "503" in message
    assert "TLS" not in message
    assert "secret" not in message


def test_a_proxy_that_is_away_is_named_with_its_variable(fake: FakeOperator, environment: pytest.MonkeyPatch) -> None:
    environment.setenv("RESHARDER_PROXY", "http://127.0.0.1:1")
    with Operator(fake.endpoint, connect_timeout=0) as operator, pytest.raises(DaemonUnreachable) as refused:
        operator.daemon()
    assert "through the proxy 127.0.0.1:1 (RESHARDER_PROXY)" in str(refused.value)
    assert "start resharderd" not in str(refused.value)


def test_versions_are_read_through_the_proxy_where_the_data_port_cannot_be_reached(environment: pytest.MonkeyPatch) -> None:
    environment.setattr(port_reader, "PATIENCE", 0.1)
    with closing(Proxy(200)) as proxy, Daemon() as daemon:
        publish(daemon, 1, SMALL)
        environment.setenv("RESHARDER_PROXY", proxy.url)
        with Channel(daemon.endpoint) as channel:
            manifest = manifest_of(channel)
            port = int(manifest.data_address.rpartition(":")[2])
            away, wanted = replace(manifest, data_address=f"{BEHIND}:{port}"), all_boxes(manifest)
            assert list(map(str, read_boxes(channel, away, wanted))) == list(map(str, read_boxes(channel, manifest, wanted)))
            assert f"CONNECT {BEHIND}:{port} HTTP/1.1" in proxy.asked
            assert f"CONNECT 127.0.0.1:{port} HTTP/1.1" not in proxy.asked
            proxy.status = 503
            with pytest.raises(DaemonUnreachable, match=r"the proxy 127\.0\.0\.1:\d+ \(RESHARDER_PROXY\) answered 503"):
                list(read_boxes(channel, replace(manifest, data_address=f"{BEHIND}:1"), wanted))


@pytest.mark.parametrize("proxy", ["proxy:3128", "https://proxy:3128", "http://proxy", "http://", "on"])
def test_what_is_no_proxy_is_refused_at_once(proxy: str, environment: pytest.MonkeyPatch) -> None:
    environment.setenv("RESHARDER_PROXY", proxy)
    with pytest.raises(UsageError, match="expected http://host:port in RESHARDER_PROXY"):
        Channel("127.0.0.1:1")
    with pytest.raises(ConfigError, match="expected http://host:port in RESHARDER_PROXY"):
        load({})


WRONG = {
    "http://daemon:7677": "without http://, as daemon:7677",
    "https://daemon:7677": "without https://, as daemon:7677",
    "grpc://daemon:7677/": "without grpc://, as daemon:7677",
    "daemon:7677/": "expected host:port",
    "user@daemon:7677": "expected host:port",
    "::1:7677": "with the address in brackets",
    "fe80::1": "with the address in brackets",
    "unix:/run/resharder.sock": "expected host:port",
    "unix:/run/resharder:7677": "expected host:port",
    "dns:///daemon:7677": "expected host:port",
    "daemon": "expected host:port",
    ":7677": "expected host:port",
    "daemon:": "expected host:port",
    "daemon:0": "expected host:port",
    "daemon:70000": "expected host:port",
    "daemon: 7677": "expected host:port",
    "dae mon:7677": "expected host:port",
    "[daemon]:7677": "expected host:port",
    "daemon:７６７７": "expected host:port",
}


@pytest.mark.parametrize("endpoint", WRONG)
def test_what_is_no_endpoint_is_refused_at_once(endpoint: str) -> None:
    pattern = re.escape(WRONG[endpoint])
    with pytest.raises(UsageError, match=pattern):
        Channel(endpoint)
    with pytest.raises(UsageError, match=f"RESHARDER_ENDPOINT.*{pattern}|{pattern}.*RESHARDER_ENDPOINT"):
        PluginSettings.from_environment({"RESHARDER_ENDPOINT": endpoint, "RESHARDER_SERVER_ID": "a"})
    with pytest.raises(ConfigError, match=f"--endpoint: .*{pattern}"):
        load({"endpoint": endpoint})


@pytest.mark.parametrize("endpoint", ["daemon:7677", "10.0.0.1:1", "[::1]:7677", "[fe80::1%eth0]:7677", "a-b.c_d.local.:65535"])
def test_an_endpoint_is_a_name_or_an_address_with_a_port(endpoint: str) -> None:
    Channel(endpoint).close()
    assert PluginSettings.from_environment({"RESHARDER_ENDPOINT": endpoint, "RESHARDER_SERVER_ID": "a"}).endpoint == endpoint
