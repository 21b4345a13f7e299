"""The daemon's own fetcher of pieces, with the certificates of the daemon."""

from resharder.server.node.daemon_client import NodeTls
from resharder.server.node.registry import NodeRegistry
from resharder.server.node.sources import LIMITS
from resharder.server.node.store_fetch import CommittedChecksums, StoreFetcher
from resharder.server.node.swarm import Swarm
from resharder.server.node.transfers import HttpTransfer, ReceivedBytes
from resharder.server.security.settings import Security
from resharder.server.store.partials import PartialVersions


def fetcher(partials: PartialVersions, nodes: NodeRegistry, tls: NodeTls | None, threads: int) -> StoreFetcher:
    """Return the fetcher of what the store lacks. `threads`: threads that digest."""
    transfer = HttpTransfer(CommittedChecksums(partials), tls, LIMITS.stalled)
    return StoreFetcher(partials, nodes, lambda changed: Swarm(transfer, ReceivedBytes(), changed), threads)


def node_tls(security: Security | None, name: str) -> NodeTls | None:
    """Return the certificates with which the daemon calls nodes; None without security. `name`: that in their certificates."""
    if security is None:
        return None
    return NodeTls(security.client_ca or security.certificate, security.certificate, security.key, peer_name=name)


def certificate_of(tls: NodeTls | None) -> str:
    """Return `sha256:HEX` of the daemon's certificate; empty if there is none, or it cannot be read now."""
    try:
        return tls.fingerprint() if tls is not None else ""
    except (OSError, ValueError):
        return ""
