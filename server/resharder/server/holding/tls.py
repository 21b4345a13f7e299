"""Certificates with which a node or the daemon fetches pieces from data ports, and a node calls the daemon."""

import hashlib
import ssl
from dataclasses import dataclass
from pathlib import Path

import structlog

_log = structlog.get_logger("resharder.node")


def certificate_id(der: bytes) -> str:
    """Return `sha256:HEX` of a certificate."""
    return f"sha256:{hashlib.sha256(der).hexdigest()}"


def fingerprint_of(path: Path) -> str:
    """Return `sha256:HEX` of the first certificate of a PEM file. Raises OSError, and ValueError for a file without one."""
    begin, end = "-----BEGIN CERTIFICATE-----", "-----END CERTIFICATE-----"
    text = path.read_text()
    if begin not in text or end not in text:
        raise ValueError(f"{path} has no certificate")
    return certificate_id(ssl.PEM_cert_to_DER_cert(text[text.index(begin) : text.index(end) + len(end)]))


@dataclass(frozen=True)
class NodeTls:
    """Certificates of a node, as PEM files, which are read again when they change.

    Args:
        ca: Authority of the certificates of the daemon and of other nodes.
        certificate: The node's certificate, with which it calls and answers.
        key: Its key.
        daemon_name: Name in the daemon's certificate, if it differs from the endpoint's host.
        peer_name: Name in the certificates of other nodes, if it differs from their addresses.
        token_file: File with the token of calls of the daemon. No other node receives it.
    """

    ca: Path
    certificate: Path
    key: Path
    daemon_name: str = ""
    peer_name: str = ""
    token_file: Path | None = None

    def stamp(self) -> tuple[object, ...]:
        """Return a value that changes with the files. Raises OSError if one is missing."""
        found = [path.stat() for path in (self.ca, self.certificate, self.key)]
        return tuple((stat.st_mtime_ns, stat.st_ino, stat.st_size) for stat in found)

    def headers(self) -> dict[str, str]:
        """Return the headers of requests to the daemon: the token. Raises OSError if there is none in its file."""
        if self.token_file is None:
            return {}
        token = self.token_file.read_text(encoding="latin-1").strip()
        if not token or not token.isascii() or not token.isprintable() or " " in token:
            raise OSError(f"{self.token_file} has no token of printable letters and digits")
        return {"authorization": f"Bearer {token}"}

    def fingerprint(self) -> str:
        """Return `sha256:HEX` of the certificate. Raises OSError, and ValueError for a file without one."""
        return fingerprint_of(self.certificate)

    def context(self) -> ssl.SSLContext:
        """Return the context of a connection to a data port. Raises OSError (ssl.SSLError)."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.load_verify_locations(self.ca)
        context.load_cert_chain(self.certificate, self.key, password="")  # never prompt on a terminal
        return context


@dataclass(frozen=True)
class DaemonTls(NodeTls):
    """Certificates with which the daemon calls nodes.

    Names are not compared: what arrives is checked by checksums that nodes have reported by calls of their own, and no secret is
    sent. `verified`: whether `ca` is the authority of nodes, as `client_ca` is; without, they call by tokens.
    """

    verified: bool = True

    def context(self) -> ssl.SSLContext:
        """Return the context of a connection to a node's data port. Raises OSError (ssl.SSLError)."""
        context = super().context()
        context.check_hostname = False
        if not self.verified:
            context.verify_mode = ssl.CERT_NONE
        return context


def certificate_of(tls: NodeTls | None) -> str:
    """Return `sha256:HEX` of the daemon's certificate; empty if there is none, or it cannot be read now."""
    try:
        return tls.fingerprint() if tls is not None else ""
    except (OSError, ValueError) as error:
        _log.warning("certificate_not_read", reason=str(error))
        return ""
