"""Parties of a run, with their certificates and roles if the run has security."""

from pathlib import Path
from typing import Any

from resharder.client.rpc.tls import Tls

from tests.chaos.schedule import SERVERS
from tests.support.daemon import Daemon
from tests.support.secure import Authority, SecureDaemon

ROLES = {
    "dns:trainer.test": ["publisher:policy", "publisher:policy-lora"],
    "dns:*.servers.test": ["server:policy", "server:policy-lora"],
    "dns:*.hosts.test": ["node:policy", "node:policy-lora"],
    "dns:operator.test": ["operator"],
    "dns:observer.test": ["viewer", "server:policy", "server:policy-lora"],  # a viewer alone is not shown the folders of versions
    "dns:scraper.test": ["viewer"],
}
STRANGER = "stranger"
"""Party with a certificate of another authority."""
NOBODY = "nobody"
"""Party without a certificate."""


class Parties:
    """Certificates of all parties, as files in a folder; none without security.

    Every party has a certificate by one authority, and its name, below `.test`, has a row in the daemon's table of roles. The
    daemon and nodes answer at the loopback's address, which their certificates name too.

    Args:
        folder: For the files.
        nodes: Names of the nodes.
        security: Whether parties have certificates.

    Attributes:
        names: Names in the certificates by party.
    """

    def __init__(self, folder: Path, nodes: tuple[str, ...], security: bool) -> None:
        self.security, self._folder = security, folder / "tls"
        self.names = {name: f"{name}.test" for name in ("trainer", "operator", "observer", "scraper")}
        self.names |= {name: f"{name}.servers.test" for name in SERVERS} | {name: f"{name}.hosts.test" for name in nodes}
        if security:
            self._authority, self._other = Authority(self._folder), Authority(folder / "other-tls")
            for party in self.names:
                self.renew(party)
            self._other.issue(STRANGER, "operator.test")

    def daemon(self, **options: Any) -> Daemon:
        """Return a daemon that does not run yet."""
        if not self.security:
            return Daemon(**options)
        return SecureDaemon(self._authority, ROLES, name=self.names["observer"], **options)

    def renew(self, party: str) -> None:
        """Replace the certificate and the key of a party."""
        names = ("localhost",) if party == "daemon" else (self.names[party],)
        self._authority.issue(party, *names, "127.0.0.1")

    def files(self, party: str) -> dict[str, str]:
        """Return the files of a party, as named arguments of `Tls`; empty without security."""
        if not self.security:
            return {}
        own, ca = (self._other.folder if party == STRANGER else self._folder), str(self._folder / "ca.pem")
        if party == NOBODY:
            return {"ca": ca}
        return {"ca": ca, "certificate": str(own / f"{party}.pem"), "key": str(own / f"{party}.key")}

    def tls(self, party: str) -> Tls | None:
        """Return the TLS settings of a party; None without security."""
        return Tls(**self.files(party)) if self.security else None

    def environment(self, party: str) -> dict[str, str]:
        """Return the variables that give a client its files."""
        names = {"ca": "RESHARDER_TLS_CA", "certificate": "RESHARDER_TLS_CERT", "key": "RESHARDER_TLS_KEY"}
        return {names[name]: file for name, file in self.files(party).items()}

    def node_options(self, party: str) -> dict[str, str]:
        """Return the options of a node, without their prefix."""
        names = {"ca": "tls_ca", "certificate": "tls_cert", "key": "tls_key"}
        return {names[name]: file for name, file in self.files(party).items()}
