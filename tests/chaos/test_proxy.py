"""The proxy of the chaos suite survives its target and has the faults that it names."""

import contextlib
import socket
import threading
import time
from collections.abc import Iterator

import pytest

from tests.chaos.proxy import Proxies
from tests.support.ports import free_port


class Echo:
    """A server that returns what it reads."""

    def __init__(self, port: int) -> None:
        self._listener = socket.create_server(("127.0.0.1", port))
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                connection, _ = self._listener.accept()
                threading.Thread(target=self._echo, args=(connection,), daemon=True).start()

    def _echo(self, connection: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := connection.recv(1 << 16):
                connection.sendall(data)

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()


@pytest.fixture
def proxies() -> Iterator[Proxies]:
    found = Proxies()
    yield found
    found.close()


def connect(proxies: Proxies, name: str = "a", timeout: float = 10) -> socket.socket:
    host, _, port = proxies.links[name].endpoint.partition(":")
    return socket.create_connection((host, int(port)), timeout)


def echoed(connection: socket.socket, text: bytes) -> bytes:
    connection.sendall(text)
    return connection.recv(len(text))


def test_connections_work_again_after_the_target_has_ended_and_returned(proxies: Proxies) -> None:
    port = free_port()
    proxies.link("a", f"127.0.0.1:{port}")
    with pytest.raises(ConnectionResetError), connect(proxies) as early:
        early.recv(1)
    target = Echo(port)
    with connect(proxies) as connection:
        assert echoed(connection, b"one") == b"one"
    target.close()
    target = Echo(port)
    with connect(proxies) as connection:
        assert echoed(connection, b"two") == b"two"
    target.close()


def test_a_cut_resets_open_connections_and_no_later_ones(proxies: Proxies) -> None:
    target = Echo(port := free_port())
    proxies.link("a", f"127.0.0.1:{port}")
    with connect(proxies) as connection:
        assert echoed(connection, b"one") == b"one"
        proxies.cut("a")
        with pytest.raises(ConnectionResetError):
            connection.recv(1)
    with connect(proxies) as connection:
        assert echoed(connection, b"two") == b"two"
    target.close()


def test_a_silent_link_accepts_and_forwards_nothing_until_it_is_healed(proxies: Proxies) -> None:
    target = Echo(port := free_port())
    proxies.link("a", f"127.0.0.1:{port}")
    with connect(proxies) as before:
        assert echoed(before, b"one") == b"one"
        proxies.silence("a")
        time.sleep(0.1)
        with connect(proxies) as connection:
            for one in (before, connection):
                one.settimeout(0.3)
                with pytest.raises(TimeoutError):
                    echoed(one, b"two")
                one.settimeout(60)
            proxies.heal()
            assert [one.recv(3) for one in (before, connection)] == [b"two", b"two"]
    target.close()


def test_a_slow_link_delays_each_chunk(proxies: Proxies) -> None:
    target = Echo(port := free_port())
    proxies.link("a", f"127.0.0.1:{port}")
    proxies.slow("a", 0.2)
    with connect(proxies) as connection:
        began = time.monotonic()
        assert echoed(connection, b"one") == b"one"
        assert time.monotonic() - began >= 0.4, "once in each direction"
    target.close()


def test_a_connection_that_ended_is_forgotten(proxies: Proxies) -> None:
    target = Echo(port := free_port())
    link = proxies.link("a", f"127.0.0.1:{port}")
    with connect(proxies) as connection:
        assert echoed(connection, b"one") == b"one"
        assert link.connections == 2
    end = time.monotonic() + 60
    while link.connections and time.monotonic() < end:
        time.sleep(0.01)
    assert link.connections == 0
    target.close()


def test_connections_that_do_not_begin_with_a_handshake_are_counted(proxies: Proxies) -> None:
    target = Echo(port := free_port())
    link = proxies.link("a", f"127.0.0.1:{port}")
    for first, expected in ((b"\x16\x03\x01", 0), (b"PRI * HTTP/2.0", 1)):
        with connect(proxies) as connection:
            assert echoed(connection, first) == first
            assert echoed(connection, b"later") == b"later"
        assert link.plain == expected
    target.close()
