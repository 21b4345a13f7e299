"""The daemon's endpoint, `host:port`, and the way to it: straight, or through the proxy in RESHARDER_PROXY.

Proxies in `http_proxy` and its like are for the web. gRPC's core would send calls to the daemon there, even those to this host.
"""

import re
from collections.abc import Mapping
from ipaddress import AddressValueError, IPv6Address
from urllib.parse import urlsplit

from resharder.converters import environment as variables

PROXY = variables.PROXY.name
DEFAULT_ENDPOINT = "127.0.0.1:7677"
"""Address on which a daemon listens by default."""


def check_endpoint(endpoint: str) -> str:
    """Return an endpoint. Raises ValueError unless it is host:port, with an IPv6 address in brackets."""
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


def route_options(environment: Mapping[str, str] | None = None) -> tuple[tuple[str, str | int], ...]:
    """Return gRPC's options for a channel to the daemon: straight, or through the proxy. Raises ValueError."""
    if not proxy_address(environment):
        return (("grpc.enable_http_proxy", 0),)
    return (("grpc.http_proxy", variables.PROXY.text(environment)),)
