"""How a client knows the daemon and shows who it is: TLS, a certificate, a token.

connect("daemon:7677", model="policy", tls=Tls("ca.crt", "tls.crt", "tls.key"))   # or RESHARDER_TLS_CA, … in the environment
"""

import os
import ssl
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

import grpc
from resharder.client.errors import UsageError

_OTHERS = ("RESHARDER_TLS_CERT", "RESHARDER_TLS_KEY", "RESHARDER_TLS_NAME", "RESHARDER_TOKEN", "RESHARDER_TOKEN_FILE")


@dataclass(frozen=True)
class Tls:
    """`ca`: of the daemon's certificate. `certificate`, `key`: this client's own. `name`: in the daemon's certificate, where it
    is not that of the endpoint. `token`, or a file that holds one. Files are PEM, and read again when they change.

    Raises UsageError.
    """

    ca: str | Path
    certificate: str | Path = ""
    key: str | Path = ""
    name: str = ""
    token: str = field(default="", repr=False)
    token_file: str | Path = ""

    def __post_init__(self) -> None:
        if bool(self.certificate) != bool(self.key):
            raise UsageError("expected a certificate and its key, got one of them: RESHARDER_TLS_CERT and RESHARDER_TLS_KEY")
        if self.token and self.token_file:
            raise UsageError("expected a token or a file with one, got both: RESHARDER_TOKEN and RESHARDER_TOKEN_FILE")
        if not (self.token.isascii() and self.token.isprintable() and " " not in self.token):
            raise UsageError("expected a token of printable letters and digits in RESHARDER_TOKEN")
        for file in self.files:
            if not os.access(file, os.R_OK):
                raise UsageError(
                    f"expected a file that can be read, got {file}: RESHARDER_TLS_CA, _CERT, _KEY, RESHARDER_TOKEN_FILE"
                )

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] = os.environ) -> Self | None:
        """None where RESHARDER_TLS_CA is not set. A variable that is empty counts as not set. Raises UsageError."""
        given = {name: value for name, value in environment.items() if value}
        if "RESHARDER_TLS_CA" not in given:
            if without := [name for name in _OTHERS if name in given]:
                raise UsageError(f"expected RESHARDER_TLS_CA, the authority of the daemon's certificate, beside {without[0]}")
            return None
        return cls(given["RESHARDER_TLS_CA"], *(given.get(name, "") for name in _OTHERS))

    @property
    def files(self) -> tuple[Path, ...]:
        return tuple(Path(file) for file in (self.ca, self.certificate, self.key, self.token_file) if file)

    def stamp(self) -> tuple[object, ...]:
        """Another one when what a channel is made of has changed."""
        found = [os.stat(file) for file in (self.ca, self.certificate, self.key) if file]
        return tuple((stat.st_mtime_ns, stat.st_ino, stat.st_size) for stat in found)

    def credentials(self) -> grpc.ChannelCredentials:
        """Raises OSError, and ValueError for files that are none or do not fit together."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.load_verify_locations(self.ca)
        if not self.certificate:
            return grpc.ssl_channel_credentials(Path(self.ca).read_bytes())
        context.load_cert_chain(self.certificate, self.key, password="")  # never asked for on a terminal
        return grpc.ssl_channel_credentials(*(Path(file).read_bytes() for file in (self.ca, self.key, self.certificate)))

    def metadata(self) -> tuple[tuple[str, str], ...]:
        """What goes with every call."""
        token = Path(self.token_file).read_text().strip() if self.token_file else self.token
        return (("authorization", f"Bearer {token}"),) if token else ()
