"""The daemon as one more fetcher of pieces: of versions that became READY while nodes alone held some of their bytes.

Two threads: one requests pieces from the nodes that hold them, of the newest version first, as a node does; the other one
verifies tensors whose pieces have arrived, and makes complete versions whole.
"""

import threading
import time
from collections.abc import Callable

import structlog
from resharder.server.holding.held_files import HeldFiles
from resharder.server.holding.sources import LIMITS
from resharder.server.holding.swarm import PieceOffers, Swarm
from resharder.server.holding.tls import NodeTls
from resharder.server.holding.transfers import HttpTransfer, ReceivedBytes
from resharder.server.infra.backoff import backoff
from resharder.server.nodes.registry import NodeRegistry
from resharder.server.state.errors import DaemonError
from resharder.server.store.lifecycle import VersionLifecycle
from resharder.server.store.partial import PartialVersion

_STEP_SECONDS = 0.25
_LONGEST_RETRY = 30.0
_log = structlog.get_logger("resharder.node")


class StoreFetcher:
    """Fetches what the daemon's store lacks. Call `start`, then `close`.

    Args:
        lifecycle: The store's versions, some of which lack pieces.
        nodes: The register of nodes.
        tls: Certificates with which the daemon calls nodes; None connects without TLS.
        threads: Threads that digest.
    """

    def __init__(
        self,
        lifecycle: VersionLifecycle,
        nodes: NodeRegistry,
        tls: NodeTls | None,
        threads: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._lifecycle, self._nodes, self._threads, self._clock = lifecycle, nodes, threads, clock
        self._changed = threading.Condition()
        self._ended = False
        self._partials: dict[str, PartialVersion] = {}
        self._settled: dict[str, tuple[int, float, int]] = {}  # pieces at the last attempt, when the next is due, and failures
        self._swarm = Swarm(HttpTransfer(HeldFiles.checksum, tls, LIMITS.stalled), ReceivedBytes(), self._wake)
        self._loops = [
            threading.Thread(target=self._loop, args=(step,), name=name, daemon=True)
            for name, step in (("store-pieces", self.fetch), ("store-verify", self.settle))
        ]

    def start(self) -> None:
        for loop in self._loops:
            loop.start()

    def close(self) -> None:
        """Stop fetching. Missing pieces are fetched by the next daemon."""
        with self._changed:
            self._ended = True
            self._changed.notify_all()
        for loop in self._loops:
            if loop.is_alive():
                loop.join()
        self._swarm.close()

    def fetch(self) -> None:
        """Start requests for missing pieces, as many as the limits allow."""
        partials = {partial.name: partial for partial in self._lifecycle.partials()}
        for name in self._partials.keys() - partials.keys():
            self._swarm.forget(name)
        for name, partial in partials.items():
            missing = len(partial.missing())
            if self._partials.get(name) is not partial:
                _log.info("version_lacks_pieces", version=name, pieces=partial.numbering.count, missing=missing)
            if missing:
                self._swarm.fill(partial, PieceOffers.of(self._nodes.own_order(name), partial.numbering.count, ""))
        self._partials = partials
        self._nodes.count_own()

    def settle(self) -> None:
        """Verify the tensors whose pieces have arrived since, and make complete versions whole."""
        for partial in self._lifecycle.partials():
            held = len(partial.held())
            before, due, failures = self._settled.get(partial.name, (-1, 0.0, 0))
            if self._ended or (held == before and not failures) or self._clock() < due:
                continue
            try:
                done = self._lifecycle.settle(partial, self._threads)
            except (OSError, DaemonError) as error:
                if partial in self._lifecycle.partials():  # not retired meanwhile
                    failures += 1
                    self._settled[partial.name] = held, self._clock() + backoff(failures, 1.0, _LONGEST_RETRY), failures
                    _log.error("version_not_completed", version=partial.name, reason=str(error))
                continue
            self._settled[partial.name] = held, 0.0, 0
            if done:
                del self._settled[partial.name]
                self._nodes.count_own()

    def _wake(self) -> None:
        with self._changed:
            self._changed.notify_all()

    def _loop(self, step: Callable[[], None]) -> None:
        while not self._ended:
            try:
                step()
            except Exception as error:
                _log.error("store_fetch_failed", exc_info=error)
            with self._changed:
                if not self._ended:
                    self._changed.wait(_STEP_SECONDS)
