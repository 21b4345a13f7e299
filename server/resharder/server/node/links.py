"""A node's record of its links: what it received from each peer, and whether the last request succeeded."""

import threading
from collections import OrderedDict
from dataclasses import dataclass, replace

from resharder.v1 import resources_pb2

MOST_LINKS = 64
"""Upper bound on the links that a node reports, of the last used peers."""
_MOST_SECONDS = 1e9


@dataclass(frozen=True)
class LinkReport:
    """Transfers from one peer since the node's process began.

    Attributes:
        peer: `nodes/{id}`, or `daemon`.
        received_bytes: Bytes of verified pieces.
        seconds: Sum over their requests, several of which run at a time.
        failures: Requests that failed.
        problem: Reason for which the last request failed; empty if it succeeded.
    """

    peer: str
    received_bytes: int = 0
    seconds: float = 0.0
    failures: int = 0
    problem: str = ""

    def to_proto(self) -> resources_pb2.NodeLink:
        """Return the report as a message."""
        return resources_pb2.NodeLink(
            peer=self.peer,
            received_bytes=self.received_bytes,
            seconds=self.seconds,
            failures=self.failures,
            problem=self.problem,
        )

    @staticmethod
    def of_proto(link: resources_pb2.NodeLink) -> "LinkReport":
        """Return the report of a message, with its values cut to their bounds."""
        seconds = min(max(0.0, link.seconds), _MOST_SECONDS)
        return LinkReport(link.peer[:100], max(0, link.received_bytes), seconds, max(0, link.failures), link.problem[:500])


class LinkLog:
    """Record of the links to the last used peers. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._links: OrderedDict[str, LinkReport] = OrderedDict()

    def received(self, peer: str, size: int, seconds: float) -> None:
        """Record a verified piece of `size` bytes."""
        with self._lock:
            link = self._links.get(peer, LinkReport(peer))
            sums = link.received_bytes + size, link.seconds + seconds
            self._put(replace(link, received_bytes=sums[0], seconds=sums[1], problem=""))

    def failed(self, peer: str, problem: str) -> None:
        """Record a failed request. A busy peer is none."""
        with self._lock:
            link = self._links.get(peer, LinkReport(peer))
            self._put(replace(link, failures=link.failures + 1, problem=problem))

    def all(self) -> list[LinkReport]:
        """Return the links, the last used one last."""
        with self._lock:
            return list(self._links.values())

    def _put(self, link: LinkReport) -> None:
        self._links[link.peer] = link
        self._links.move_to_end(link.peer)
        while len(self._links) > MOST_LINKS:
            self._links.popitem(last=False)
