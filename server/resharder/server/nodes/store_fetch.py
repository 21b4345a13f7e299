"""The daemon as one more holder: it fetches pieces of versions that nodes alone hold, before READY and afterwards.

Before READY it fetches one piece of each node into whose files ranks wrote, which shows that it reaches them; with several
replicas all pieces, because the daemon is one holder. After READY it fetches what is missing, of the newest version first.
"""

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

import structlog
from resharder.converters.wire.pieces import Bitmap, PieceSpan
from resharder.converters.wire.ranges import PIECE_BYTES
from resharder.server.holding.held_files import pieces_of
from resharder.server.holding.piece_fetcher import PieceFetcher, named_in
from resharder.server.holding.piece_requests import LIMITS
from resharder.server.holding.transfers import HttpTransfer, ReceivedBytes
from resharder.server.infra.backoff import backoff
from resharder.server.nodes.decisions import ReplicasShort
from resharder.server.nodes.registry import NodeRegistry
from resharder.server.state.errors import DaemonError
from resharder.server.state.version import UPLOADING
from resharder.server.store.lifecycle import VersionLifecycle
from resharder.server.store.partial import VerifiedVersion
from resharder.server.store.reader import Borrow

_STEP_SECONDS = 0.25
_PATIENCE = 10.0  # seconds without a piece, before a version is READY
_LONGEST_PAUSE = 2.0  # seconds for which a node that fails is left alone: READY waits for it
_LONGEST_RETRY = 30.0
_log = structlog.get_logger("resharder.node")


class StoreFetcher:
    """Fetches what the daemon's store lacks. Call `start`, then `close`.

    Args:
        lifecycle: The store's versions, some of which lack pieces.
        nodes: The register of nodes.
        transfer: Fetcher of pieces.
        borrow: Brings bytes that are read, if the store holds no versions; None if it holds them.
        await_keepers: Function that waits until nodes keep the registry with versions: of `Snapshots`.
    """

    def __init__(
        self,
        lifecycle: VersionLifecycle,
        nodes: NodeRegistry,
        transfer: HttpTransfer,
        borrow: Borrow | None = None,
        await_keepers: Callable[[Sequence[VerifiedVersion], Callable[[], str]], object] = lambda versions, problem: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._lifecycle, self._nodes, self._borrow, self._clock = lifecycle, nodes, borrow, clock
        self._await_keepers = await_keepers
        self._changed = threading.Condition()
        self._ended = self._woken = False
        self._partials: dict[str, VerifiedVersion] = {}
        self._retries: dict[str, tuple[float, int]] = {}  # when the next attempt to make a version whole is due, and failures
        self._fetcher = PieceFetcher(transfer, ReceivedBytes(), self._wake, replace(LIMITS, longest=_LONGEST_PAUSE))
        self._thread = threading.Thread(target=self._loop, name="store-pieces", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        """Stop fetching. Missing pieces are fetched by the next daemon."""
        with self._changed:
            self._ended = True
            self._changed.notify_all()
        if self._thread.is_alive():
            self._thread.join()
        self._fetcher.close()

    # Before READY

    def hold(self, versions: Sequence[VerifiedVersion], stopped: Callable[[], bool]) -> None:
        """Have each piece of verified versions held by as many holders as it needs, and return once it is.

        Args:
            versions: The versions.
            stopped: Returns whether one of the versions is aborted.

        Raises:
            ReplicasShort: The daemon does not reach a home, or no further piece arrives, or the versions are aborted.
            OSError: The store cannot hold a piece.
        """
        if self._nodes.replicas == 1 and not any(each.is_partial for each in versions):
            return
        self._nodes.begin(versions)
        for each in versions:
            self._reach(each, lambda: self._nodes.problem(versions, stopped))
        for each in versions if self._nodes.replicas > 1 and self._borrow is None else ():
            each.want(Bitmap.full(each.numbering.count))
        self._wake()
        self._nodes.await_holders(versions, stopped)
        self._await_keepers(versions, lambda: self._nodes.problem(versions, stopped))

    def _reach(self, version: VerifiedVersion, problem: Callable[[], str]) -> None:
        """Fetch the shortest piece of each home. A node that does not deliver it is no home for some time."""
        if not version.is_partial:
            return
        if self._borrow is not None:
            homes = self._nodes.homes.written(version.name).values()
            shortest = [min(files, key=lambda file: (file.size - 1) % PIECE_BYTES) for files in homes]
            with self._borrow(version, [PieceSpan(file.path, file.size - 1, file.size) for file in shortest]):
                return
        for files in self._nodes.homes.written(version.name).values():
            pieces = pieces_of(version.numbering, files) - version.held()
            found = (Bitmap.of(pieces.count, [piece]) for piece in pieces)
            version.want(min(found, key=version.numbering.size_of, default=Bitmap(pieces.count)))
        self._wake()
        held, since = version.held(), self._clock()
        while len(missing := version.wanted() - held):
            if why := problem():
                raise ReplicasShort(why)
            if version.failure is not None:
                raise version.failure
            before, held = held, version.await_more(held, _STEP_SECONDS)
            if held is not before:
                since = self._clock()
            elif self._clock() - since > _PATIENCE:
                raise self._unreached(version, missing)

    def _unreached(self, version: VerifiedVersion, missing: Bitmap) -> ReplicasShort:
        """Suspend a home that does not deliver a piece, and return the error that names it."""
        written = self._nodes.homes.written(version.name).items()
        homes = ((node, pieces_of(version.numbering, files) & missing) for node, files in written)
        node, lacked = next((node, lacked) for node, lacked in homes if len(lacked))
        self._nodes.homes.suspend(node)
        file, start, end = version.numbering.span(next(iter(lacked)))
        problems = {link.peer: link.problem for link in self._fetcher.links.all()}
        why = problems.get(f"nodes/{node}") or f"nothing has arrived for {_PATIENCE:g} s"
        return ReplicasShort(f"nodes/{node}: {file}, bytes {start} to {end}: {why}")

    # Pieces

    def fetch(self) -> None:
        """Start requests for missing pieces, as many as the limits allow."""
        ready = {partial.name: partial for partial in self._lifecycle.partials()} if self._borrow is None else {}
        for name, partial in ready.items():
            if self._partials.get(name) is not partial:
                self._partials[name] = partial
                partial.want(Bitmap.full(partial.numbering.count))
                _log.info("version_lacks_pieces", version=name, pieces=partial.numbering.count, missing=len(partial.missing()))
        for name in self._partials.keys() - ready.keys():
            del self._partials[name]
            self._retries.pop(name, None)
            self._fetcher.forget(name)
        for partial in [*self._lifecycle.partials(UPLOADING), *ready.values()]:
            if len(partial.missing()):
                order = self._nodes.own_order(partial, self._fetcher.links.all())
                self._fetcher.fill(partial, named_in(order, partial.numbering.count, ""))
        self._nodes.count_own()

    def settle(self) -> None:
        """Make versions whole whose pieces have all arrived."""
        for partial in self._lifecycle.partials() if self._borrow is None else ():
            due, failures = self._retries.get(partial.name, (0.0, 0))
            if not partial.is_whole() or self._clock() < due:
                continue
            try:
                self._lifecycle.settle(partial)
            except (OSError, DaemonError) as error:
                if partial in self._lifecycle.partials():  # not retired meanwhile
                    pause = backoff(failures + 1, 1.0, _LONGEST_RETRY)
                    self._retries[partial.name] = self._clock() + pause, failures + 1
                    _log.error("version_not_completed", version=partial.name, reason=str(error))
                continue
            self._nodes.count_own()

    def _wake(self) -> None:
        with self._changed:
            self._woken = True
            self._changed.notify_all()

    def _loop(self) -> None:
        while not self._ended:
            with self._changed:
                self._woken = False
            try:
                self.fetch()
                self.settle()
            except Exception as error:
                _log.error("store_fetch_failed", exc_info=error)
            with self._changed:
                self._changed.wait_for(lambda: self._ended or self._woken, _STEP_SECONDS)
