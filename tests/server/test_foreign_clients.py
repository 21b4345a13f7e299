"""Clients with no TLS, another authority or no token: one clear line each for them, and only structured lines in the log."""

import json
import os
import socket
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from tests.support.daemon import Daemon
from tests.support.forked import Ended, run
from tests.support.ports import free_port
from tests.support.secure import Authority, SecureDaemon

TOKEN = "a-token-of-sixteen-letters-and-more"


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    made = Authority(tmp_path / "pki")
    made.allow(alice=TOKEN)
    return made


@pytest.fixture(params=[pytest.param(True, id="certificates"), pytest.param(False, id="tokens", marks=pytest.mark.full)])
def daemon(authority: Authority, request: pytest.FixtureRequest) -> Iterator[SecureDaemon]:
    roles = {"dns:probe.test": ["operator"], "token:alice": ["operator"]}
    with SecureDaemon(authority, roles, certificates=request.param, log_format="json") as made:
        yield made


def command(endpoint: str, *arguments: str, **settings: object) -> Ended:
    environment: Mapping[str, str] = os.environ | {"RESHARDER_ENDPOINT": endpoint} | {k: str(v) for k, v in settings.items()}
    clean = {name: value for name, value in environment.items() if name != "GRPC_VERBOSITY"}
    return run("resharder.client.cli", *arguments, environment=clean)


def test_clients_that_cannot_speak_to_it_add_no_raw_line_to_its_log(daemon: SecureDaemon, tmp_path: Path) -> None:
    other = Authority(tmp_path / "other")
    for settings in ({}, {"RESHARDER_TLS_CA": other.folder / "ca.pem"}):
        done = command(daemon.endpoint, "status", **settings)
        assert (done.returncode, done.output.count("\n")) == (3, 1)
        assert "SSL" not in done.output
        assert len(done.output) < 200
    port = int(daemon.endpoint.rpartition(":")[2])
    for text in (b"GET / HTTP/1.1\r\n\r\n", b"\x16\x03\x01\x00\x05nonsense", b""):
        with socket.create_connection(("127.0.0.1", port)) as stranger:
            stranger.sendall(text)
            time.sleep(0.2)
    assert daemon.stop() == 0
    lines = daemon.log.read_text().splitlines()
    assert lines
    assert all({"event", "level", "timestamp"} <= json.loads(line).keys() for line in lines)


@pytest.mark.full
def test_doctor_tells_a_missing_token_a_wrong_authority_and_a_firewall_apart(authority: Authority, tmp_path: Path) -> None:
    other = Authority(tmp_path / "other")

    def found(endpoint: str, **settings: object) -> tuple[str, str]:
        checks = json.loads(command(endpoint, "doctor", "--json", **settings).output)["checks"]
        (check,) = (check for check in checks if check["name"] == "daemon")
        assert "\n" not in check["found"] + check["hint"]
        return check["found"], check["hint"]

    ca = {"RESHARDER_TLS_CA": authority.folder / "ca.pem"}
    with SecureDaemon(authority, {"token:alice": ["operator"]}, certificates=False) as secured:
        assert found(secured.endpoint, **ca, RESHARDER_TOKEN=TOKEN)[0].startswith("release ")
        text, hint = found(secured.endpoint, **ca)
        assert text.startswith("reached, but access denied: ")
        assert hint.startswith("set RESHARDER_TOKEN")
        text, hint = found(secured.endpoint, **ca, RESHARDER_TOKEN="of-somebody-else-and-long-enough")
        assert "TOKEN_UNKNOWN" in text
        text, hint = found(secured.endpoint, RESHARDER_TLS_CA=other.folder / "ca.pem")
        assert text.endswith("its certificate is not from the authority in RESHARDER_TLS_CA")
        text, hint = found(secured.endpoint)
        assert text.endswith("it closes the connection at once")
        assert "does it expect TLS" in hint
    with Daemon(web_listen=f"127.0.0.1:{free_port()}") as plain:
        assert found(plain.endpoint, **ca)[0].endswith("it does not speak TLS, this client does")
        text, hint = found(plain.options["web_listen"])
        assert text.endswith("it answers by HTTP/1")
        assert "status page's port" in hint
    text, hint = found(f"127.0.0.1:{free_port()}")
    assert (text.rpartition(": ")[2], hint) == ("connection refused", "start resharderd there")
