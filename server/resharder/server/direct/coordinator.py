"""Coordination of the direct path: which ranks send to which servers, and when. `layouts.py` plans the copies.

An *offer* is a version that the ranks of a publisher still have in memory. A *group* is one server's workers and the ranks that
send to them, planned once and reused from version to version while its processes live. A *turn* is one group's transfer: a rank
sends to one group at a time, so that it needs the buffers of one transfer only. Groups with disjoint ranks, such as those of
different replicas, transfer concurrently.

    worker: join (staging) ......... [digests] ........ start (paused) - turn - finish
    rank:   offer ... LINK: joins the group ... [DIGEST: reports] .. RUN: sends - finish ... end: memory may change

The part in brackets is for a version that is served ahead of READY: a worker verifies it against the
digests that the ranks report.

Installs are not decided here: `awaiting` names the servers that an offer is for. Any failure ends the group, and the server's
install continues over the staged path.
"""

import time
from collections.abc import Callable

from resharder.server.direct.exchange import Exchange, TransferObserver
from resharder.server.direct.key_store import KeyStore
from resharder.server.direct.layouts import Memories
from resharder.server.direct.links import Links, Processes
from resharder.server.direct.offered_versions import OfferedVersions
from resharder.server.direct.offers import Awaiting, Offers
from resharder.server.direct.transfers import Transfers


class Direct:
    """Parts of the direct path.

    Attributes:
        offers: Calls of ranks that offer a version.
        links: Calls of members that join a group.
        transfers: Calls during a transfer.
        keys: Set-up of communicators.
        staging_bytes: Memory beyond the weights that each member may use.
        seconds: Bound on the set-up of a group, and on one transfer.

    Args:
        awaiting: Servers that an offer is for.
        processes: Processes of a server.
        offered: Table of offered versions for readers outside.
        observe: Observer of transfers; None: no observer.
        clock: Monotonic clock in seconds.
    """

    def __init__(
        self,
        awaiting: Awaiting,
        processes: Processes,
        *,
        offered: OfferedVersions | None = None,
        observe: TransferObserver | None = None,
        staging_bytes: int = 1 << 30,
        seconds: float = 10.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.staging_bytes, self.seconds = staging_bytes, seconds
        offered = offered or OfferedVersions()
        self.memories = Memories()
        self.exchange = Exchange(seconds, clock, observe) if observe else Exchange(seconds, clock)
        self.offers = Offers(self.exchange, self.memories, awaiting, offered)
        self.links = Links(self.exchange, self.offers, self.memories, processes, offered)
        self.transfers = Transfers(self.exchange)
        self.keys = KeyStore(self.exchange)
