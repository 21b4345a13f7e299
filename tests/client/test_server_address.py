"""Servers report an address that others can reach, never the unspecified one."""

import ipaddress

import pytest
from resharder.client.inference import settings
from resharder.client.inference.settings import server_address


@pytest.mark.parametrize("host", [None, "", "0.0.0.0", "::", "[::]"])
@pytest.mark.parametrize("daemon", ["127.0.0.1:7677", "[::1]:7677", "192.0.2.7:7677", "no-such-host.invalid:1"])
def test_a_server_on_all_addresses_reports_a_routable_one(host: str | None, daemon: str) -> None:
    found, _, port = server_address("", host, 8000, daemon).rpartition(":")
    assert port == "8000"
    assert not ipaddress.ip_address(found.strip("[]")).is_unspecified


@pytest.mark.parametrize(
    ("routes", "expected"),
    [
        ({"daemon": "10.0.0.7", "192.0.2.1": "203.0.113.9"}, "10.0.0.7:8000"),
        ({"daemon": "127.0.0.1", "192.0.2.1": "203.0.113.9"}, "203.0.113.9:8000"),
        ({"daemon": "::1", "2001:db8::1": "2001:db8::7"}, "[2001:db8::7]:8000"),
        ({}, "127.0.0.1:8000"),
    ],
)
def test_the_route_to_the_daemon_comes_first_and_the_loopback_last(
    routes: dict[str, str], expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(settings, "_source", lambda host, port: routes.get(host, ""))
    assert server_address("", None, 8000, "daemon:7677") == expected


@pytest.mark.parametrize(
    ("given", "host", "expected"),
    [
        ("", "gpu-7", "gpu-7:8000"),
        ("", "2001:db8::7", "[2001:db8::7]:8000"),
        ("front", "0.0.0.0", "front:8000"),
        ("front:443", "0.0.0.0", "front:443"),
        ("[2001:db8::7]:443", None, "[2001:db8::7]:443"),
        ("[2001:db8::7]", None, "[2001:db8::7]:8000"),
        ("2001:db8::7", None, "[2001:db8::7]:8000"),
    ],
)
def test_an_address_that_is_given_is_reported(given: str, host: str | None, expected: str) -> None:
    assert server_address(given, host, 8000, "d:1") == expected
