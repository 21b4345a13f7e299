"""Options of a node: a wrong one is one line with its name, what was expected and what came."""

import pytest
from resharder.server import config
from resharder.server.config import ConfigError
from resharder.server.node import main as node_main
from resharder.server.node.main import NodeConfig, load
from typer.testing import CliRunner

TLS = {"tls_ca": "/tls/ca.crt", "tls_cert": "/tls/tls.crt", "tls_key": "/tls/tls.key"}


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"name": "a/b"}, "--name: .*got 'a/b'"),
        ({"limit_bytes": -5}, "--limit-bytes: expected .*greater than or equal to 0, got -5"),
        ({"listen": "nonsense"}, "--listen: expected host:port, got 'nonsense'"),
        ({"endpoint": "daemon"}, "--endpoint: expected host:port, got 'daemon'"),
        ({"log_level": "loud"}, "--log-level: expected .*got 'loud'"),
        ({"tls_ca": "/tls/ca.crt"}, "tls_ca, tls_cert and tls_key are needed together"),
        ({"transfer": "carrier pigeon"}, "--transfer: expected .*'http' or 'nixl', got 'carrier pigeon'"),
        ({"transfer": "nixl"}, "transfer nixl needs insecure, and no certificates"),
        ({"transfer": "nixl", "insecure": True, **TLS}, "transfer nixl needs insecure, and no certificates"),
        ({"token_file": "/token"}, "token_file needs tls_ca, tls_cert and tls_key: a token is sent over TLS alone"),
        ({"listen": "0.0.0.0:7679"}, "expected a loopback address without certificates, got 0.0.0.0:7679"),
    ],
)
def test_a_wrong_option_is_named(flags: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load(flags)


def test_every_option_is_a_flag(monkeypatch: pytest.MonkeyPatch) -> None:
    given = {
        "endpoint": "daemon:1", "name": "n", "listen": "0.0.0.0:2", "address": "host:3", "folder": "/elsewhere", "limit_bytes": 4,
        **TLS, "tls_name": "d", "tls_peer_name": "p", "token_file": "/token", "insecure": True, "drain_seconds": 5.5,
        "transfer": "http", "log_format": "json", "log_level": "debug",
    }  # fmt: skip
    assert given.keys() == NodeConfig.model_fields.keys()
    started: list[NodeConfig] = []
    monkeypatch.setattr(node_main, "serve", started.append)
    flags = [(f"--{name.replace('_', '-')}", *([] if value is True else [str(value)])) for name, value in given.items()]
    ended = CliRunner().invoke(node_main.app, [argument for flag in flags for argument in flag])
    assert ended.exit_code == 0, ended.output
    assert [config.model_dump(mode="json") for config in started] == [given]


def test_flags_precede_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RESHARDER_NODE_ENDPOINT", "other:7677")
    monkeypatch.setenv("RESHARDER_NODE_LIMIT_BYTES", "1000")
    found = load({"endpoint": "daemon:7677", "listen": "0.0.0.0:7679", **TLS})
    assert (found.endpoint, found.limit_bytes) == ("daemon:7677", 1000)
    assert found.tls is not None


@pytest.mark.parametrize(
    ("flags", "route", "address"),
    [
        ({}, "127.0.0.1", "127.0.0.1:1"),
        ({"listen": "0.0.0.0:7679", **TLS}, "10.0.0.5", "10.0.0.5:1"),
        ({"listen": "[::]:7679", **TLS}, "fd00::5", "[fd00::5]:1"),
        ({"address": "gateway:17679"}, "10.0.0.5", "gateway:17679"),
    ],
)
def test_the_offered_address_is_one_that_other_hosts_reach(
    monkeypatch: pytest.MonkeyPatch, flags: dict[str, object], route: str, address: str
) -> None:
    monkeypatch.setattr(node_main, "_route", lambda endpoint: route)
    assert node_main._address(load({"endpoint": "daemon:7677"} | flags), 1) == address


@pytest.mark.parametrize("flags", [{}, {"listen": "0.0.0.0:7679", "address": "localhost:7679", **TLS}])
def test_a_loopback_address_is_refused_if_the_daemon_is_on_another_host(
    monkeypatch: pytest.MonkeyPatch, flags: dict[str, object]
) -> None:
    monkeypatch.setattr(node_main, "_route", lambda endpoint: "10.0.0.5")
    with pytest.raises(
        ConfigError, match=r"--listen: other hosts cannot reach (127|localhost).* the daemon at daemon:7677 is on another host"
    ):
        node_main._address(load({"endpoint": "daemon:7677"} | flags), 1)


def test_a_variable_without_a_value_names_no_file(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RESHARDERD_LEASE_FILE", "RESHARDERD_REGISTRY_KEY", "RESHARDER_NODE_TLS_CA", "RESHARDER_NODE_TOKEN_FILE"):
        monkeypatch.setenv(name, "")
    daemon, node = config.load(None, {}), load({"endpoint": "daemon:7677"})
    assert (daemon.lease_file, daemon.registry_key, node.tls_ca, node.token_file) == (None, None, None, None)
