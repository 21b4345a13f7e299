"""Where the daemon's data port listens: by default two above the gRPC port, and where a port that nobody asked for is taken."""

import re
import socket

import pytest
from resharder.server.config import Config, load

from tests.support.daemon import Daemon
from tests.support.ports import free_port


@pytest.mark.parametrize(
    ("listen", "derived"),
    [
        ("127.0.0.1:7677", "127.0.0.1:7679"),
        ("0.0.0.0:7677", "0.0.0.0:7679"),
        ("[::1]:100", "[::1]:102"),
        ("127.0.0.1:0", "127.0.0.1:0"),
        ("127.0.0.1:65534", "127.0.0.1:0"),
        ("unix:/run/resharder.sock", "127.0.0.1:0"),
        ("unix-abstract:resharder", "127.0.0.1:0"),
    ],
)
def test_the_data_port_listens_two_above_the_grpc_port(listen: str, derived: str) -> None:
    found = load(None, {"listen": listen, "insecure": True})
    assert (found.data_listen, found.data_port) == (None, derived)


@pytest.mark.parametrize("given", ["127.0.0.1:7000", ""])
def test_a_data_port_that_was_given_is_not_derived(given: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RESHARDERD_DATA_LISTEN", given)
    assert Config().data_port == given


def test_a_derived_data_port_that_is_taken_becomes_a_free_one_with_a_line_in_the_log() -> None:
    port = free_port()
    with socket.create_server(("127.0.0.1", port)) as _, Daemon(port=port - 2, data_listen=None) as daemon:
        text = daemon.log.read_text()
    (line,) = re.findall(r".*data_port_taken.*", text)
    assert f"wanted=127.0.0.1:{port}" in line
    assert "why='Address already in use'" in line
    (free,) = re.findall(r"data_port_taken .*listen=127\.0\.0\.1:(\d+)", line)
    assert re.search(rf"listening .*data=127\.0\.0\.1:{free}\b", text)
