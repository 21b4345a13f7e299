"""TLS settings of clients: the daemon's authority, and the client's certificate or token.

connect("daemon:7677", model="policy", tls=Tls("ca.crt", "tls.crt", "tls.key"))   # or RESHARDER_TLS_CA, … in the environment
"""

import os
import ssl
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

import grpc
from resharder.client import settings
from resharder.client.errors import UsageError


@dataclass(frozen=True)
class Tls:
    """TLS settings. Certificates and keys are PEM files. All files are read again when they change.

    Args:
        ca: Authority of the daemon's certificate.
        certificate: The client's certificate.
        key: Private key of `certificate`.
        name: Name in the daemon's certificate, if it differs from the endpoint's host.
        token: Token of the client.
        token_file: File that contains the token.

    Raises:
        UsageError: The settings contradict each other, or a file cannot be read.
    """

    ca: str | Path
    certificate: str | Path = ""
    key: str | Path = ""
    name: str = ""
    token: str = field(default="", repr=False)
    token_file: str | Path = ""

    def __post_init__(self) -> None:
        if bool(self.certificate) != bool(self.key):
            raise UsageError("a certificate needs its key: set both RESHARDER_TLS_CERT and RESHARDER_TLS_KEY")
        if self.token and self.token_file:
            raise UsageError("a token and a token file were given: set only one of RESHARDER_TOKEN and RESHARDER_TOKEN_FILE")
        if not _is_token(self.token):
            raise UsageError("the token in RESHARDER_TOKEN has characters other than printable letters and digits")
        for file in self.files:
            if not os.access(file, os.R_OK):
                raise UsageError(f"{file} cannot be read: check RESHARDER_TLS_CA, _CERT, _KEY and RESHARDER_TOKEN_FILE")

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] | None = None) -> Self | None:
        """Return the settings in the environment, or None without RESHARDER_TLS_CA. An empty variable counts as unset.

        Args:
            environment: Variables by name; by default those of this process.

        Raises:
            UsageError: The settings contradict each other, or a file cannot be read.
        """
        given = [variable.text(environment) for variable in settings.TLS]
        if not given[0]:
            if without := [variable.name for variable, text in zip(settings.TLS, given, strict=True) if text]:
                raise UsageError(f"{without[0]} needs RESHARDER_TLS_CA, the authority of the daemon's certificate")
            return None
        return cls(*given)

    @property
    def files(self) -> tuple[Path, ...]:
        """Files that are set, in the order ca, certificate, key, token_file."""
        return tuple(Path(file) for file in (self.ca, self.certificate, self.key, self.token_file) if file)

    def stamp(self) -> tuple[object, ...]:
        """Return a value that changes with the files from which a channel is created. Raises OSError if one is missing."""
        found = [os.stat(file) for file in (self.ca, self.certificate, self.key) if file]
        return tuple((stat.st_mtime_ns, stat.st_ino, stat.st_size) for stat in found)

    def credentials(self) -> grpc.ChannelCredentials:
        """Return the credentials of a channel. Raises OSError or ValueError for invalid files and
        for a key that does not match.
        """
        self.context()  # whose errors name the cause
        if not self.certificate:
            return grpc.ssl_channel_credentials(Path(self.ca).read_bytes())
        return grpc.ssl_channel_credentials(*(Path(file).read_bytes() for file in (self.ca, self.key, self.certificate)))

    def context(self) -> ssl.SSLContext:
        """Return the context of a connection. Raises OSError for invalid files and for a key that does not match."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.load_verify_locations(self.ca)
        if self.certificate:
            context.load_cert_chain(self.certificate, self.key, password="")  # never prompt on a terminal
        return context

    def metadata(self) -> tuple[tuple[str, str], ...]:
        """Return the metadata of every call: the token, read anew from its file.

        Raises OSError if the file cannot be read, ValueError if it contains no token.
        """
        token = self.token
        if self.token_file:
            token = Path(self.token_file).read_text(encoding="latin-1").strip()
            if not token or not _is_token(token):
                raise ValueError(f"{self.token_file} has no token of printable letters and digits")
        return (("authorization", f"Bearer {token}"),) if token else ()


def _is_token(text: str) -> bool:
    return text.isascii() and text.isprintable() and " " not in text
