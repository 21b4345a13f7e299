"""A daemon with security, and clients that it knows: an authority, its certificates and tokens as files.

with tempfile... as folder, SecureDaemon(Authority(folder), {"dns:trainer.test": ["publisher:policy"]}) as daemon:
    daemon.authority.tls("trainer.test")      # what a client passes as `tls=`
"""

import datetime
import hashlib
import json
from pathlib import Path

import grpc
import trustme
from resharder.client.rpc.tls import Tls

from tests.support.daemon import Daemon

PROBE = "probe.test"


class Authority:
    """Files in `folder`: ca.pem, daemon.pem and daemon.key, NAME.pem and NAME.key of each client, tokens."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(exist_ok=True)
        self.tokens = folder / "tokens"
        self.tokens.write_text("# nobody yet\n")
        self.renew()

    def renew(self) -> None:
        """Another authority, in the same files, and the daemon's certificate by it."""
        self._ca = trustme.CA()
        self._ca.cert_pem.write_to_path(self._new("ca.pem"))
        self._put("ca.pem")
        self.issue("daemon", "127.0.0.1", "localhost")

    def issue(self, file: str, *names: str, common_name: str | None = None, not_after: datetime.datetime | None = None) -> None:
        """Files FILE.key and FILE.pem: each is there whole, one after the other."""
        made = self._ca.issue_cert(*names, common_name=common_name, not_after=not_after)
        made.private_key_pem.write_to_path(self._new(f"{file}.key"))
        self._new(f"{file}.pem").write_bytes(b"".join(part.bytes() for part in made.cert_chain_pems))
        self._put(f"{file}.key")
        self._put(f"{file}.pem")

    def _new(self, name: str) -> Path:
        return self.folder / f"{name}.new"

    def _put(self, name: str) -> None:
        self._new(name).rename(self.folder / name)

    def tls(self, name: str = "", **options: str | Path) -> Tls:
        """Channel of a client whose certificate has this name, or which has none."""
        if not name:
            return Tls(self.folder / "ca.pem", **options)
        if not (self.folder / f"{name}.pem").exists():
            self.issue(name, name)
        return Tls(self.folder / "ca.pem", self.folder / f"{name}.pem", self.folder / f"{name}.key", **options)

    def environment(self, name: str) -> dict[str, str]:
        tls = self.tls(name)
        return {
            "RESHARDER_TLS_CA": str(tls.ca),
            "RESHARDER_TLS_CERT": str(tls.certificate),
            "RESHARDER_TLS_KEY": str(tls.key),
        }

    def allow(self, **tokens: str) -> None:
        """{name: token}; no others."""
        lines = [f"{name} sha256:{hashlib.sha256(token.encode()).hexdigest()}  # of a test" for name, token in tokens.items()]
        self._new("tokens").write_text("\n".join(lines))
        self._put("tokens")


class SecureDaemon(Daemon):
    """`certificates`: whether clients must have one. Its own channel is that of `name`."""

    def __init__(
        self,
        authority: Authority,
        roles: dict[str, list[str]],
        *,
        certificates: bool = True,
        name: str = PROBE,
        **options: object,
    ) -> None:
        self.authority, self._name = authority, name if certificates else ""
        security = {
            "certificate": authority.folder / "daemon.pem",
            "key": authority.folder / "daemon.key",
            "tokens": authority.tokens,
            "roles": roles,
        }
        if certificates:
            security["client_ca"] = authority.folder / "ca.pem"
        super().__init__(security=json.dumps(security, default=str), **options)

    def connect(self, options: list[tuple[str, int]]) -> grpc.Channel:
        return grpc.secure_channel(self.endpoint, self.authority.tls(self._name).credentials(), options=options)
