"""Listen addresses, written as host:port or unix:PATH."""

from ipaddress import ip_address


def parse_listen(listen: str) -> tuple[str, int]:
    """Split host:port into host, without brackets, and port. Raises ValueError for any other form."""
    host, _, port = listen.rpartition(":")
    if not host or not port.isdecimal() or int(port) > 65535:
        raise ValueError(f"expected host:port, got {listen!r}")
    return host.strip("[]"), int(port)


def is_loopback(listen: str) -> bool:
    """Return whether only processes on this host can reach the address."""
    host = listen.rpartition(":")[0].strip("[]")
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost" or listen.startswith(("unix:", "unix-abstract:"))
