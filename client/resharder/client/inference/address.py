"""The address that a server reports to the daemon: one that operators, trainers and checks of canaries can reach."""

import ipaddress
import socket

_ELSEWHERE = "192.0.2.1", "2001:db8::1"  # addresses of documentation: only the route to them is looked up


def server_address(given: str, host: str | None, port: int, endpoint: str) -> str:
    """Return the address of a server.

    Args:
        given: RESHARDER_ADDRESS, as host or host:port; empty if unset.
        host: Host that the server listens on; None for all.
        port: Port that the server listens on.
        endpoint: The daemon's `host:port`.

    Returns:
        `host:port`. In place of the unspecified address (`0.0.0.0`, `::`), the address of this host on the route to the daemon;
        if that is the loopback, on the default route.
    """
    if given:
        named = given.rpartition("]")[2] if given.startswith("[") else given
        return given if named.count(":") == 1 else f"{_bracketed(given)}:{port}"
    return f"{_bracketed(_routable(endpoint) if _is_unspecified(host) else str(host))}:{port}"


def _is_unspecified(host: str | None) -> bool:
    try:
        return not host or ipaddress.ip_address(host.strip("[]")).is_unspecified
    except ValueError:
        return False


def _routable(endpoint: str) -> str:
    daemon, _, port = endpoint.rpartition(":")
    found = [_source(host.strip("[]"), int(port)) for host in (daemon, *_ELSEWHERE)]
    usable = [address for address in found if address and not ipaddress.ip_address(address).is_loopback]
    return usable[0] if usable else "127.0.0.1"


def _source(host: str, port: int) -> str:
    """Return this host's address on the route to another; empty without a route. Sends nothing."""
    try:
        family, kind, protocol, _, target = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind, protocol) as trial:
            trial.connect(target)
            return str(trial.getsockname()[0]).partition("%")[0]
    except OSError:
        return ""


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host and not host.startswith("[") else host
