"""The daemon's endpoint, and the way to it: straight, or through the proxy in RESHARDER_PROXY.

An endpoint is `host:port`, or several with commas between them: those of a daemon and its standbys. Only the one that is the
daemon listens, so a connection is made with the first that answers. A host's name may also resolve to the addresses of several.

Proxies in `http_proxy` and its like are for the web. gRPC's core would send calls to the daemon there, even those to this host.
"""

import re
import socket
from collections.abc import Mapping
from ipaddress import AddressValueError, IPv6Address
from urllib.parse import urlsplit

from resharder.converters import environment as variables

PROXY = variables.PROXY.name
DEFAULT_ENDPOINT = "127.0.0.1:7677"
"""Address on which a daemon listens by default."""


_TRY_SECONDS = 2.0
_FEW_SECONDS: tuple[tuple[str, str | int], ...] = (  # for a host that is gone without a word, of which TCP knows nothing
    ("grpc.keepalive_time_ms", 6_000),
    ("grpc.keepalive_timeout_ms", 4_000),
    ("grpc.http2.ping_timeout_ms", 4_000),  # else gRPC (1.85) waits a minute for the answer to a keepalive's ping
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
)


def check_endpoint(endpoint: str) -> str:
    """Return an endpoint. Raises ValueError unless it is host:port, or several, with IPv6 addresses in brackets."""
    for address in addresses_of(endpoint):
        _check_address(address)
    return endpoint


def addresses_of(endpoint: str) -> list[str]:
    """Return the `host:port` of each daemon in an endpoint, in the order in which they are tried."""
    return [address.strip() for address in endpoint.split(",")]


def target_of(endpoint: str, first: int = 0) -> str:
    """Return an endpoint as gRPC takes it: several addresses as one list, with names looked up now.

    `first` is the number, from 0 and modulo their count, of the one to be tried first. Names that nobody knows are left out.
    Raises ValueError if no other one is left.
    """
    if len(addresses := addresses_of(endpoint)) == 1:
        return addresses[0]
    found = list(dict.fromkeys(each for address in addresses for each in _looked_up(address)))
    if not found:
        raise ValueError(f"none of the names in {endpoint} resolves")
    found = found[first % len(found) :] + found[: first % len(found)]
    if all(family == socket.AF_INET for family, _, _ in found):
        return "ipv4:" + ",".join(f"{host}:{port}" for _, host, port in found)
    return "ipv6:" + ",".join(
        f"[::ffff:{host}]:{port}" if family == socket.AF_INET else f"[{host}]:{port}" for family, host, port in found
    )


def _looked_up(address: str) -> list[tuple[int, str, int]]:
    host, _, port = address.rpartition(":")
    try:
        found = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_STREAM)
    except OSError:
        return []
    return [(int(family), str(at[0]), int(port)) for family, _, _, _, at in found]


def answering_address(endpoint: str) -> str:
    """Return the `host:port` of the daemon among several addresses: the first that accepts connections, or the first of all."""
    addresses = addresses_of(endpoint)
    for address in addresses if len(addresses) > 1 else ():
        host, _, port = address.rpartition(":")
        try:
            socket.create_connection((host.strip("[]"), int(port)), _TRY_SECONDS).close()
        except OSError:
            continue
        return address
    return addresses[0]


def _check_address(endpoint: str) -> str:
    host, _, port = endpoint.rpartition(":")
    if re.fullmatch(r"[0-9]{1,5}", port) and 0 < int(port) < 1 << 16 and (_is_name(host) or _is_bracketed(host)):
        return endpoint
    raise ValueError(f"expected host:port, got {endpoint!r}{_advice(endpoint)}")


def _is_name(host: str) -> bool:
    return re.fullmatch(r"[A-Za-z0-9._-]+", host) is not None


def _is_bracketed(host: str) -> bool:
    return host[:1] == "[" and host[-1:] == "]" and _is_ipv6(host[1:-1])


def _is_ipv6(address: str) -> bool:
    try:
        IPv6Address(address)
    except AddressValueError:
        return False
    return True


def _advice(endpoint: str) -> str:
    if found := re.match(r"(?:https?|grpcs?|tcp)://", endpoint):
        return f": write it without {found[0]}, as {endpoint.removeprefix(found[0]).rstrip('/')}"
    if _is_ipv6(endpoint) or _is_ipv6(endpoint.rpartition(":")[0]):
        return ": write an IPv6 address with the address in brackets, as [::1]:7677"
    return ""


def proxy_address(environment: Mapping[str, str] | None = None) -> str:
    """Return host:port of the proxy in RESHARDER_PROXY; empty without one. Raises ValueError."""
    if not (given := variables.PROXY.text(environment)):
        return ""
    try:
        found = urlsplit(given)
        if found.scheme == "http" and found.hostname and found.port and found.path in ("", "/"):
            return f"[{found.hostname}]:{found.port}" if ":" in found.hostname else f"{found.hostname}:{found.port}"
    except ValueError:  # a port that is none
        pass
    shown = given.rpartition("@")[2]  # without a password
    raise ValueError(f"expected http://host:port in {PROXY}, got {shown!r}")


def route_options(
    environment: Mapping[str, str] | None = None, endpoint: str = DEFAULT_ENDPOINT
) -> tuple[tuple[str, str | int], ...]:
    """Return gRPC's options for a channel to the daemon: straight, or through the proxy.

    Raises ValueError, also for several addresses and a proxy.
    """
    several = len(addresses_of(endpoint)) > 1
    if not proxy_address(environment):
        return (("grpc.enable_http_proxy", 0), *(_FEW_SECONDS if several else ()))
    if several:
        raise ValueError(f"expected one address with {PROXY}, got {endpoint}: set a name that resolves to all of them")
    return (("grpc.http_proxy", variables.PROXY.text(environment)),)
