"""Several addresses in one endpoint: those of a daemon and its standbys."""

import signal
import socket
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from resharder.client.errors import UsageError
from resharder.client.operator import Operator
from resharder.client.rpc.channel import Channel
from resharder.client.rpc.tls import Tls
from resharder.converters.wire.endpoint import addresses_of, answering_address, check_endpoint, route_options, target_of

from tests.client.models import connected, equal, exported, publish_all, weights
from tests.support.command import resharder
from tests.support.daemon import Daemon
from tests.support.node import Node, nodes, wait_live
from tests.support.observing import wait_until
from tests.support.ports import free_port

LEASE_SECONDS = 5.0


def test_an_endpoint_may_have_several_addresses() -> None:
    assert check_endpoint("a:7677, b:7677") == "a:7677, b:7677"
    assert addresses_of("a:7677, [::1]:1") == ["a:7677", "[::1]:1"]
    for wrong in ("a:7677,", ",a:7677", "a:7677,b", "a:7677 b:7677"):
        with pytest.raises(ValueError, match="expected host:port"):
            check_endpoint(wrong)


def test_several_addresses_are_one_list_for_grpc() -> None:
    assert target_of("daemon:7677") == "daemon:7677"
    assert target_of("127.0.0.1:1,127.0.0.2:2") == "ipv4:127.0.0.1:1,127.0.0.2:2"
    assert [target_of("127.0.0.1:1,127.0.0.2:2", first) for first in (1, 2)] == [
        "ipv4:127.0.0.2:2,127.0.0.1:1",
        "ipv4:127.0.0.1:1,127.0.0.2:2",
    ]
    assert target_of("127.0.0.1:1,[::1]:2") == "ipv6:[::ffff:127.0.0.1]:1,[::1]:2"
    assert target_of("no-such-host.invalid:1,127.0.0.1:2") == "ipv4:127.0.0.1:2"
    with pytest.raises(ValueError, match=r"none of the names in a.invalid:1,b.invalid:1 resolves"):
        target_of("a.invalid:1,b.invalid:1")


def test_the_address_that_answers_is_the_daemons() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        here = f"127.0.0.1:{listener.getsockname()[1]}"
        gone = f"127.0.0.1:{free_port()}"
        assert answering_address(f"{gone},{here}") == here
    assert answering_address(f"{gone},{here}") == gone
    assert answering_address("nobody.invalid:1") == "nobody.invalid:1"


def test_several_addresses_need_one_name_in_their_certificates_and_no_proxy(tmp_path: Path) -> None:
    (tmp_path / "ca.pem").touch()
    with pytest.raises(UsageError, match="Set RESHARDER_TLS_NAME to a name that all of them have"):
        Channel("127.0.0.1:1,127.0.0.1:2", tls=Tls(tmp_path / "ca.pem", token="t"))
    with pytest.raises(ValueError, match="expected one address with RESHARDER_PROXY"):
        route_options({"RESHARDER_PROXY": "http://proxy:1"}, "a:1,b:2")


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[tuple[Daemon, Daemon, str]]:
    """A daemon that holds the lease, a standby, and the endpoint of both."""
    options = {"store": tmp_path / "store", "lease_file": tmp_path / "lease", "daemon_lease_seconds": LEASE_SECONDS}
    with closing(Daemon(**options)) as first, closing(Daemon(**options)) as second:  # type: ignore[arg-type]
        first.start()
        second.launch()
        wait_until(lambda: "holds the lease" in second.log.read_text(), timeout=60)
        yield first, second, f"{second.endpoint},{first.endpoint}"


def test_ranks_nodes_and_commands_go_on_with_the_standby(pair: tuple[Daemon, Daemon, str], tmp_path: Path) -> None:
    first, second, endpoint = pair
    publishers = connected(endpoint, 2, "standby")
    with Node(endpoint, "one") as node, Operator(endpoint) as operator:
        publish_all(publishers, 1, weights(1))[0].wait_ready(60)
        wait_live(first, "one")
        died = time.monotonic()
        first.kill()
        handle = publish_all(publishers, 2, weights(2))[0]
        handle.wait_ready(60)
        took = time.monotonic() - died
        print(f"from the death of the daemon until the next step is READY: {took:.2f} s, with a lease of {LEASE_SECONDS:g} s")

        assert LEASE_SECONDS / 2 < took < 2 * LEASE_SECONDS + 2
        assert [version.number for version in operator.versions("policy")] == [handle.version, 1]
        wait_live(second, "one")
        assert node.process is not None
        assert node.process.poll() is None
        assert list(nodes(second)) == ["nodes/one"]
    shown = resharder("versions", "--endpoint", endpoint)
    assert shown.code == 0, shown.err
    assert equal(exported(endpoint, "1", tmp_path / "one"), weights(1))
    assert equal(exported(endpoint, str(handle.version), tmp_path / "two"), weights(2))


def test_ranks_leave_a_daemon_that_hangs(pair: tuple[Daemon, Daemon, str], tmp_path: Path) -> None:
    first, second, endpoint = pair
    publishers = connected(endpoint, 1, "hang")
    publish_all(publishers, 1, weights(1))[0].wait_ready(60)
    assert first.process is not None
    first.process.send_signal(signal.SIGSTOP)
    began = time.monotonic()
    handle = publish_all(publishers, 2, weights(2))[0]
    handle.wait_ready(120)
    print(f"from the stop of the daemon until the next step is READY: {time.monotonic() - began:.2f} s")
    first.process.send_signal(signal.SIGCONT)
    assert first.wait(60) == 3
    publish_all(publishers, 3, weights(3))[0].wait_ready(60)
    assert equal(exported(second.endpoint, str(handle.version), tmp_path / "two"), weights(2))
