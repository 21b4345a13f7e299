"""The daemon's own fetcher of pieces, with the certificates of the daemon."""

import ssl
from dataclasses import dataclass

import structlog
from resharder.server.holding.sources import LIMITS
from resharder.server.holding.swarm import Swarm
from resharder.server.holding.tls import NodeTls
from resharder.server.holding.transfers import HttpTransfer, ReceivedBytes
from resharder.server.nodes.registry import NodeRegistry
from resharder.server.nodes.store_fetch import CommittedChecksums, StoreFetcher
from resharder.server.security.settings import Security
from resharder.server.store.store import Store

_log = structlog.get_logger("resharder.node")


def fetcher(store: Store, nodes: NodeRegistry, tls: NodeTls | None, threads: int) -> StoreFetcher:
    """Return the fetcher of what the store lacks. `threads`: threads that digest."""
    transfer = HttpTransfer(CommittedChecksums(store.reader), tls, LIMITS.stalled)
    return StoreFetcher(store.lifecycle, nodes, lambda changed: Swarm(transfer, ReceivedBytes(), changed), threads)


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


def node_tls(security: Security | None) -> NodeTls | None:
    """Return the certificates with which the daemon calls nodes; None without security."""
    if security is None:
        return None
    own, authority = security.certificate, security.client_ca
    return DaemonTls(authority or own, own, security.key, verified=authority is not None)


def certificate_of(tls: NodeTls | None) -> str:
    """Return `sha256:HEX` of the daemon's certificate; empty if there is none, or it cannot be read now."""
    try:
        return tls.fingerprint() if tls is not None else ""
    except (OSError, ValueError) as error:
        _log.warning("certificate_not_read", reason=str(error))
        return ""
