"""The daemon's certificate, its clients' authorities and the tokens: files that are read again when they change.

Files that cannot be read, or do not match (for example, a key that is not replaced yet), are logged once, and the previous
content remains in use.
"""

import hashlib
import re
import ssl
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Generic, NamedTuple, TypeVar

import grpc
import structlog

Value = TypeVar("Value")
_TOKEN_LINE = re.compile(r"(?P<name>[A-Za-z0-9][A-Za-z0-9._@-]{0,63})\s+sha256:(?P<hash>[0-9a-f]{64})")
_log = structlog.get_logger("resharder.security")


class SecurityFilesError(Exception):
    """Certificate, key or list of tokens that cannot be used. The message names the files."""


class Watched(Generic[Value]):
    """Value of files, as of their last valid content. Thread-safe. The constructor raises SecurityFilesError."""

    def __init__(self, paths: Sequence[Path], read: Callable[[], Value]) -> None:
        self._paths, self._read = paths, read
        self._lock = threading.Lock()
        self._stamp = self._look()
        try:
            self._value = read()
        except (OSError, ValueError) as error:
            raise SecurityFilesError(str(error)) from error

    def _look(self) -> tuple[object, ...]:
        try:
            found = [path.stat() for path in self._paths]
        except OSError as error:
            return (str(error),)
        return tuple((stat.st_mtime_ns, stat.st_ino, stat.st_size) for stat in found)

    @property
    def value(self) -> Value:
        """Current value. Stats the files, and reads them again if they have changed."""
        with self._lock:
            stamp = self._look()
            if stamp != self._stamp:
                self._stamp = stamp
                try:
                    self._value = self._read()
                    _log.info("security_files_reloaded", files=[str(path) for path in self._paths])
                except (OSError, ValueError) as error:
                    _log.error("security_files_not_reloaded", files=[str(path) for path in self._paths], reason=str(error))
            return self._value


class Pems(NamedTuple):
    """Contents of PEM files: the certificate with its chain, its key, and the authorities of clients."""

    certificate: bytes
    key: bytes
    client_ca: bytes | None


def read_pems(certificate: Path, key: Path, client_ca: Path | None) -> Pems:
    """Return the contents of PEM files. Raises OSError, ValueError for an invalid certificate or a key that does not match."""
    found = Pems(certificate.read_bytes(), key.read_bytes(), client_ca.read_bytes() if client_ca else None)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        context.load_cert_chain(certificate, key, password="")  # never prompt on a terminal
        if client_ca is not None:
            context.load_verify_locations(client_ca)
    except (ssl.SSLError, OSError) as error:
        raise ValueError(
            f"cannot load a certificate, its key and authorities from {certificate}, {key}, {client_ca}: {error}"
        ) from error
    if found != Pems(certificate.read_bytes(), key.read_bytes(), client_ca.read_bytes() if client_ca else None):
        raise ValueError(f"{certificate}, {key} or {client_ca} changed while they were read")
    return found


def server_credentials(pems: Watched[Pems]) -> grpc.ServerCredentials:
    """Return credentials whose every handshake uses the files' current content.

    With `client_ca`, clients need a certificate.
    """
    current = pems.value

    def fetch() -> grpc.ServerCertificateConfiguration | None:
        nonlocal current
        found = pems.value
        if found is current:
            return None
        current = found
        return _configuration(found)

    return grpc.dynamic_ssl_server_credentials(_configuration(current), fetch, current.client_ca is not None)


def _configuration(pems: Pems) -> grpc.ServerCertificateConfiguration:
    return grpc.ssl_server_certificate_configuration([(pems.key, pems.certificate)], root_certificates=pems.client_ca)


def hash_of(token: str) -> str:
    """Return the SHA-256 of a token, hexadecimal. Tokens are long and random, so a slow hash is not needed."""
    return hashlib.sha256(token.encode()).hexdigest()


def read_tokens(path: Path) -> dict[str, str]:
    """Return {hash: name} of lines `NAME sha256:HEX`; `#` begins a comment. Raises OSError, ValueError."""
    tokens = {}
    for number, line in enumerate(path.read_text().splitlines(), 1):
        entry = line.partition("#")[0].strip()
        if not entry:
            continue
        found = _TOKEN_LINE.fullmatch(entry)
        if found is None:
            raise ValueError(f"{path}, line {number} is not NAME sha256:HEX with 64 lower case digits")
        tokens[found["hash"]] = found["name"]
    return tokens
