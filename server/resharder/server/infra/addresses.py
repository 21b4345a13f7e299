"""Listen addresses, written as host:port or unix:PATH, and names of hosts in requests."""

import re
from contextlib import suppress
from ipaddress import ip_address
from typing import Annotated

from pydantic import AfterValidator


def parse_listen(listen: str) -> tuple[str, int]:
    """Split host:port into host, without brackets, and port. Raises ValueError for any other form."""
    host, _, port = listen.rpartition(":")
    if not host or not port.isdecimal() or int(port) > 65535:
        raise ValueError(f"expected host:port, got {listen!r}")
    return host.strip("[]"), int(port)


def _checked(address: str | None) -> str | None:
    if address:
        parse_listen(address)
    return address


TcpAddress = Annotated[str, AfterValidator(_checked)]
"""Option with host:port, or empty."""
DerivedTcpAddress = Annotated[str | None, AfterValidator(_checked)]
"""Option with host:port, or empty; None: derived from another option."""


def is_loopback(listen: str) -> bool:
    """Return whether only processes on this host can reach the address."""
    host = listen.rpartition(":")[0].strip("[]")
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost" or listen.startswith(("unix:", "unix-abstract:"))


def above(listen: str, ports: int) -> str:
    """Return the address whose port is so many above that of `listen`; a free port where there is none such.

    For a socket of the file system it is on the loopback interface.
    """
    if listen.startswith(("unix:", "unix-abstract:")):
        return "127.0.0.1:0"
    host, _, port = listen.rpartition(":")
    wanted = int(port) + ports if int(port) else 0
    return f"{host}:{wanted if wanted <= 65535 else 0}"


def names_address(host: str) -> bool:
    """Return whether an HTTP `Host` header is an IP address or `localhost`, with or without a port."""
    name = re.sub(r":\d+$", "", host)
    if name == "localhost":
        return True
    try:
        ip_address(name.strip("[]"))
    except ValueError:
        return False
    return True


def reachable_at(listen: str, port: int) -> str:
    """Return host:port at which clients reach a listener on `port`; without a host if `listen` is for every address."""
    host, _ = parse_listen(listen)
    with suppress(ValueError):  # a name
        host = "" if ip_address(host).is_unspecified else host
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
