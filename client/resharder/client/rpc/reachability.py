"""The cause of a call that did not reach the daemon, from the words of gRPC's core."""

import re
from typing import NamedTuple

from resharder.converters.wire.endpoint import PROXY


class Cause(NamedTuple):
    """Cause of a failed connection, and what to change."""

    what: str
    hint: str


_CAUSES = (
    ("Connection refused", "connection refused", "start resharderd there"),
    (
        "No route to host|Network is unreachable|[Tt]imed out|Timeout occurred|FD Shutdown",
        "no answer from that address",
        "check the address, the network and firewalls",
    ),
    ("DNS resolution failed|[Dd]omain name not found", "the name does not resolve", "correct the endpoint"),
    (
        "CERTIFICATE_VERIFY_FAILED",
        "its certificate is not from the authority in RESHARDER_TLS_CA",
        "pass the daemon's authority",
    ),
    (
        "Hostname Verification|[Pp]eer name|No match found for server name",
        "its certificate has another name",
        "use a name in the certificate, or set RESHARDER_TLS_NAME",
    ),
    ("WRONG_VERSION_NUMBER", "it does not speak TLS, this client does", "unset RESHARDER_TLS_CA, or secure the daemon"),
    (
        "CERTIFICATE_REQUIRED|BAD_CERTIFICATE|UNKNOWN_CA|CERTIFICATE_UNKNOWN|CERTIFICATE_EXPIRED",
        "it refuses this client's certificate",
        "set RESHARDER_TLS_CERT and RESHARDER_TLS_KEY to a pair of its client authority",
    ),
    (
        "HTTP/1|Expected SETTINGS",
        "it answers by HTTP/1",
        "is it the status page's port? Use the port of `listen`, 7677 by default",
    ),
    (
        "Socket closed|Connection reset|[Hh]andshake|recvmsg",
        "it closes the connection at once",
        "does it expect TLS, or a client's certificate (RESHARDER_TLS_CA, _CERT, _KEY)?",
    ),
)


def cause_of(details: str, proxy: str = "") -> Cause:
    """Return the cause of a failed call, which goes through `proxy` if there is one."""
    if proxy and (answered := re.search(r"HTTP proxy returned response code (\d+)", details)):
        return Cause(f"the proxy answered {answered[1]}", f"correct {PROXY}, or unset it to connect directly")
    if proxy and re.search(rf"{re.escape(proxy)}.*Connection refused|DNS resolution failed", details):
        return Cause("the proxy cannot be reached", f"correct {PROXY}, or unset it to connect directly")
    for pattern, what, hint in _CAUSES:
        if re.search(pattern, details):
            return Cause(what, hint)
    short = " ".join(details.split())[:120]
    return Cause(
        f"no answer{f' ({short})' if short else ''}", "is it running, and does it expect TLS (RESHARDER_TLS_CA, _CERT, _KEY)?"
    )
