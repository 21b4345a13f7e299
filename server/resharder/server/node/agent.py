"""A node's loop: it reports to the daemon, follows its orders, and keeps the fetcher busy.

Two threads: one exchanges reports and orders, so that a daemon that is away stops no transfer; the other one creates and drops
versions and starts requests. Orders are complete each time: a version that they do not name is dropped, once no process uses it.

At its end, the process waits, for a bounded time, for versions that would be lost or aborted with it (`await_departure`).
"""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import grpc
import structlog
from resharder.converters.failpoints import failpoint
from resharder.converters.wire.endpoint import PROXY, proxy_address
from resharder.converters.wire.pieces import Bitmap, number_pieces
from resharder.server.holding.piece_fetcher import PieceFetcher, named_in
from resharder.server.holding.transfers import ReceivedBytes
from resharder.server.infra.backoff import backoff
from resharder.server.node.copies import CopyProblems, HeldVersion, NodeCopies
from resharder.server.node.daemon_client import DaemonClient, reason_of
from resharder.server.node.file_sets import FileSets
from resharder.server.node.kept_snapshots import KeptSnapshots
from resharder.server.state.errors import DaemonError
from resharder.v1 import node_pb2, resources_pb2

_FIRST_RETRY, _LONGEST_RETRY = 0.2, 2.0
_SHORTEST_REPORT = 0.02  # seconds between two reports
_STEP_SECONDS = 0.25
FEW, EARLY = 3, 0.4
"""Named pieces left at which a node reports early, and after which part of the usual time between two reports."""
_NO_PORT = "the daemon has no data port: its data_listen is empty"
_UNSETTLED_SECONDS = 0.25  # between two reports while a set of files is laid out
_OPEN = (node_pb2.FileSetOrder.UPLOADING, node_pb2.FileSetOrder.VERIFYING)
_REGISTRY_WANTED = "REGISTRY_WANTED"  # reason of a daemon that waits for what nodes keep of its registry
_log = structlog.get_logger("resharder.node")


def needing(orders: node_pb2.NodeOrders) -> Iterator[str]:
    """Yield why versions need a node, by the daemon's orders to it."""
    for order in orders.versions:
        if order.sole_holder:
            yield f"{order.version}: no other host holds pieces that this node has"
    for reservation in orders.reservations:
        for each in reservation.sets:
            if each.state in _OPEN:
                yield f"{each.version}: ranks write it here, or it is being verified"


def await_departure(
    known: node_pb2.NodeOrders,
    exchange: Callable[[], node_pb2.NodeOrders],
    seconds: float,
    forced: threading.Event,
    clock: Callable[[], float] = time.monotonic,
) -> bool:
    """Wait until no version needs a node. Returns False if one still does after `seconds`, or once `forced` is set.

    Args:
        known: The node's last orders, which count while the daemon is away.
        exchange: Function that reports to the daemon and returns the orders. Raises grpc.RpcError, OSError.
        seconds: Bound on the wait.
        forced: Ends the wait.
        clock: Seconds of a monotonic clock.
    """
    deadline, logged = clock() + seconds, list[str]()
    while True:
        with suppress(grpc.RpcError, OSError):  # the loop of reports logs it
            known = exchange()
        if not (waits := list(needing(known))):
            return True
        if waits != logged:
            _log.info("departure_waits", versions=waits[:8], seconds=round(max(0.0, deadline - clock()), 1))
            logged = waits
        if forced.wait(min(_STEP_SECONDS, max(0.0, deadline - clock()))) or clock() >= deadline:
            _log.warning("departs_anyway", versions=waits[:8], reason="a second signal" if forced.is_set() else "drain_seconds")
            return False


class Replaced(Exception):
    """The daemon refuses this process for good: another one has its id, or its release is too old."""


@dataclass(frozen=True)
class NodeIdentity:
    """Identity of a node: id, address of its data port, and the file by which workers recognise its folder.

    `session` is that of its transfer engine; empty for none.
    """

    id: str
    data_address: str
    nonce_file: Path
    nonce: bytes
    session: str = ""


class NodeAgent:
    """The loop of one node. Call `start`, then `close`.

    Args:
        identity: The node's identity.
        daemon: Calls of the daemon.
        copies: The versions.
        make_fetcher: Function that returns the fetcher, which calls its argument after each piece.
        received: Bytes that the fetcher has received.
        sent: Function that returns (bytes sent, requests being answered) of the data port.
        sets: Files into which ranks write.
        instance: Nonce of the process's lifetime.
    """

    def __init__(
        self,
        identity: NodeIdentity,
        daemon: DaemonClient,
        copies: NodeCopies,
        make_fetcher: Callable[[Callable[[], object]], PieceFetcher],
        received: ReceivedBytes,
        sent: Callable[[], tuple[int, int]],
        sets: FileSets,
        instance: str,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._identity, self._daemon, self._copies = identity, daemon, copies
        self._received, self._sent, self._clock = received, sent, clock
        self._sets, self._instance = sets, instance
        sets.changed.connect(self._report_soon)
        self._changed = threading.Condition()
        self._ended = False
        self._orders = node_pb2.NodeOrders()
        self._has_orders = False
        self._report_now = False
        self._reported_at, self._reported_bytes = 0.0, 0  # time of the last report, and what had arrived by then
        self._has_few = False  # whether few pieces are left of those that the daemon has named
        self._ending = False
        self._problems = CopyProblems(clock)
        self._fetcher = make_fetcher(self._wake)
        self._snapshots = KeptSnapshots(daemon, identity.id, self._report_soon)
        self.failure: Exception | None = None
        """Error that ended the loop."""
        self._threads = [
            threading.Thread(target=self._guarded, args=(loop,), name=name, daemon=True)
            for name, loop in (("reports", self._report_loop), ("pieces", self._piece_loop))
        ]

    def start(self) -> None:
        """Begin to report, and to keep what the daemon orders."""
        for thread in self._threads:
            thread.start()
        self._snapshots.start()

    def readers(self, model: str) -> frozenset[str]:
        """Return the identities of nodes that may fetch pieces or boxes of a model, and of the daemon."""
        with self._changed:
            orders, daemon = self._orders.versions, self._orders.daemon_certificate
            nodes = {name for order in orders if order.version.split("/")[1] == model for name in order.readers}
            of_parts = (r.readers for r in self._orders.reservations if r.publisher.split("/")[1] == model)
            return frozenset(nodes.union(*of_parts, [daemon] if daemon else []))

    def wait(self, seconds: float) -> bool:
        """Return whether the loop has ended, at the latest after some seconds."""
        with self._changed:
            return self._changed.wait_for(lambda: self._ended, seconds)

    def drain(self, seconds: float, forced: threading.Event) -> None:
        """Offer no files for further versions, and wait until no version needs this node.

        Args:
            seconds: Bound on the wait.
            forced: Ends the wait.
        """
        self._ending = True
        with self._changed:
            known = self._orders
        await_departure(known, self._exchange, seconds, forced, self._clock)

    def _exchange(self) -> node_pb2.NodeOrders:
        """Report and return the orders; none once the loop has ended, as after another process has taken this node's place."""
        return node_pb2.NodeOrders() if self._ended else self._daemon.sync(self._report(0.0))

    def close(self) -> None:
        """End the loop, and tell the daemon that this node leaves."""
        with self._changed:
            self._ended = True
            self._changed.notify_all()
        for thread in self._threads:
            thread.join(timeout=15)
        self._snapshots.close()
        self._fetcher.close()
        self._sets.close()
        if self.failure is None:
            try:
                self._daemon.sync(self._report(0.0, leaving=True))
            except (grpc.RpcError, OSError) as error:
                _log.info("not_reported", reason=str(error))

    def _wake(self) -> None:
        with self._changed:
            self._changed.notify_all()

    def _report_soon(self) -> None:
        with self._changed:
            self._report_now = True
            self._changed.notify_all()

    def _guarded(self, loop: Callable[[], None]) -> None:
        try:
            loop()
        except Exception as error:
            if not isinstance(error, Replaced):
                _log.error("node_failed", exc_info=error)
            with self._changed:
                self.failure, self._ended = error, True
                self._changed.notify_all()

    # Reports

    def _report_loop(self) -> None:
        failures, wait = 0, 0.0
        while not self._ended:
            with self._changed:
                self._report_now, self._reported_at, self._reported_bytes = False, self._clock(), self._received.total
            try:
                failpoint("node.sync")
                orders = self._daemon.sync(self._report(wait))
            except (grpc.RpcError, OSError) as error:
                failures += 1
                if isinstance(error, grpc.RpcError) and reason_of(error) == _REGISTRY_WANTED:
                    self._return_snapshots()
                _refused(error, failures, self._daemon.endpoint)
                with self._changed:
                    self._changed.wait_for(lambda: self._ended, backoff(failures, _FIRST_RETRY, _LONGEST_RETRY))
                continue
            failures = 0
            self._snapshots.follow(orders.snapshots)
            with self._changed:
                self._orders, self._has_orders = orders, True
                self._sets.follow(orders.reservations, drained=orders.drained or self._ending)
                self._changed.notify_all()
            pause, wait = _interval(
                orders.report_seconds, *self._sets.work(), incomplete=self._is_incomplete() or self._snapshots.fetches()
            )
            with self._changed:
                self._changed.wait_for(lambda: self._ended, min(pause, _SHORTEST_REPORT))
                self._changed.wait_for(lambda: self._ended or self._report_now, max(0.0, pause - _SHORTEST_REPORT))

    def _return_snapshots(self) -> None:
        try:
            models = self._snapshots.give()
            _log.info("snapshots_returned", models=models)
        except (grpc.RpcError, OSError) as error:  # the next report tries again
            _log.warning("snapshots_not_returned", reason=str(error))

    def _is_incomplete(self) -> bool:
        """Return whether a piece of an ordered version is missing and may arrive."""
        versions = [(order, self._copies.get(order.version)) for order in self._orders.versions]
        try:
            return any(version is None or len(_wanted(order, version) - version.held()) for order, version in versions)
        except ValueError:  # of a daemon that numbers pieces in another way, which `_advance` reports
            return True

    def _report(self, wait_seconds: float, *, leaving: bool = False) -> node_pb2.SyncNodeRequest:
        sent, transfers = self._sent()
        reservations = self._sets.report()  # before the versions, which take over the folders of sets
        return node_pb2.SyncNodeRequest(
            node=f"nodes/{self._identity.id}",
            instance=self._instance,
            data_address=self._identity.data_address,
            store=resources_pb2.StoreAccess(nonce_file=str(self._identity.nonce_file), nonce=self._identity.nonce),
            capacity_bytes=self._copies.limit_bytes,
            used_bytes=self._copies.used_bytes(),
            transfers=transfers,
            versions=self._versions(),
            received_daemon_bytes=self._received.daemon,
            received_peer_bytes=self._received.peers,
            session=self._identity.session,
            received_engine_bytes=self._received.engine,
            sent_bytes=sent,
            seen=self._orders.revision,
            wait_seconds=wait_seconds,
            leaving=leaving,
            ending=self._ending,
            gathers=True,
            keeps_snapshots=True,
            snapshots=self._snapshots.revisions(),
            certificate=self._daemon.certificate(),
            links=self._fetcher.links.all(),
            reservations=reservations,
        )

    def _versions(self) -> list[node_pb2.NodeVersion]:
        found = {
            version.name: node_pb2.NodeVersion(
                version=version.name,
                folder=str(version.folder),
                held=version.held().to_bytes(),
                wanted=version.wanted().to_bytes(),
                problem=self._problems.stuck(version, self._fetcher.problem(version.name)),
                addresses=version.addresses(),
            )
            for version in self._copies.all()
        }
        for name, problem in self._problems.all().items():
            found.setdefault(name, node_pb2.NodeVersion(version=name)).problem = problem
        return list(found.values())

    # Versions and pieces

    def _piece_loop(self) -> None:
        while not self._ended:
            present = self._copies.all()  # before the orders: a version that joins later is of later ones
            with self._changed:
                orders = self._orders if self._has_orders else None
            if orders is not None:
                self._drop_others(present, {order.version for order in orders.versions})
                with self._changed:  # the last orders: by earlier ones, sets of a new reservation would be dropped
                    self._sets.follow(self._orders.reservations, drained=self._orders.drained or self._ending)
                self._has_few = False
                for order in orders.versions:
                    self._advance(order)
            with self._changed:
                if (left := self._until_early_report()) <= 0:
                    self._report_now, left = True, _STEP_SECONDS
                    self._changed.notify_all()
                if not self._ended and self._orders is (orders or self._orders):
                    self._changed.wait(min(left, _STEP_SECONDS))

    def _until_early_report(self) -> float:
        """Return the seconds until a report that is early, because few named pieces are left and others have arrived; or many."""
        if not self._has_few or self._received.total == self._reported_bytes:
            return _STEP_SECONDS
        return self._reported_at + EARLY * self._orders.report_seconds - self._clock()

    def _drop_others(self, present: list[HeldVersion], wanted: set[str]) -> None:
        for version in present:
            if version.name not in wanted:
                try:
                    if self._copies.drop(version.name):
                        self._fetcher.forget(version.name)
                        self._problems.forget(version.name)
                        _log.info("version_dropped", version=version.name)
                except OSError as error:
                    _log.warning("not_dropped", version=version.name, reason=str(error))
        for name in set(self._problems.all()) - wanted:
            self._fetcher.forget(name)
            self._problems.forget(name)

    def _advance(self, order: node_pb2.NodeOrder) -> None:
        """Create a version, or start requests for its pieces."""
        try:
            version = self._copies.get(order.version)
            if version is None and self._sets.has(order.version):
                return  # soon held in the files that ranks have written
            version = version or self._create(order)
            if version is not None:
                self._enlarge(version, order)
            if version is None or not len(version.missing()):
                return
            if not version.daemon_address:
                return self._failed(order.version, _NO_PORT)
            named = named_in(order, version.numbering.count, version.daemon_address)
        except ValueError as error:  # of a daemon that numbers pieces in another way
            self._failed(order.version, str(error))
            return
        self._has_few = self._fetcher.fill(version, named) <= FEW or self._has_few

    def _enlarge(self, version: HeldVersion, order: node_pb2.NodeOrder) -> None:
        """Want the pieces that further workers need. Raises ValueError for pieces of another version."""
        wanted = _wanted(order, version)
        if not len(wanted - version.wanted()) or self._problems.waits(order.version):
            return
        try:
            self._copies.want(version, wanted)
        except (DaemonError, OSError) as error:
            self._failed(order.version, str(error))
        else:
            self._problems.solved(order.version)

    def _create(self, order: node_pb2.NodeOrder) -> HeldVersion | None:
        name = order.version
        if self._problems.waits(name):
            return None
        try:
            failpoint("node.manifest")
            remote = self._daemon.version(name)
            if not remote.data_address:
                self._failed(name, _NO_PORT)
                return None
            count = number_pieces(remote.files).count
            wanted = Bitmap.from_bytes(count, order.wanted) if order.wanted else None
            version = self._copies.add(remote, wanted)
        except grpc.RpcError as error:
            self._failed(name, f"the daemon: {error.details() or error.code().name}")
        except (DaemonError, OSError, ValueError) as error:
            self._failed(name, str(error))
        else:
            self._problems.solved(name)
            if len(version.held()):
                self._report_soon()  # the daemon names no piece that another version here has
            _log.info("version_wanted", version=name, pieces=version.numbering.count, wanted=len(version.wanted()))
            return version
        return None

    def _failed(self, name: str, problem: str) -> None:
        if self._problems.add(name, problem):
            _log.warning("version_refused", version=name, reason=problem)
        self._report_soon()


def _interval(longest: float, unsettled: bool, uploading: bool, *, incomplete: bool) -> tuple[float, float]:
    """Return the seconds until the next report, and for how many the daemon may wait for a change of orders to answer it.

    A pause ends once there is something to report. While ranks write into a set, the next order is awaited instead.
    """
    if unsettled:
        shortest = min(longest, _UNSETTLED_SECONDS)
        return (0.0, shortest) if uploading else (shortest, 0.0)
    return (longest, 0.0) if incomplete else (0.0, longest)


def _refused(error: Exception, failures: int, endpoint: str) -> None:
    """Log the first of several failures. Raises Replaced."""
    reason = str(error)
    if isinstance(error, grpc.RpcError):
        reason = f"{error.code().name}: {error.details()}"
        if error.code() is grpc.StatusCode.FAILED_PRECONDITION:
            raise Replaced(error.details()) from error
    if failures == 1:
        through = {"proxy": f"{proxy} ({PROXY})"} if (proxy := proxy_address()) else {}
        _log.warning("daemon_away", endpoint=endpoint, reason=reason, **through)


def _wanted(order: node_pb2.NodeOrder, version: HeldVersion) -> Bitmap:
    """Return the pieces that an order names. Raises ValueError for pieces of another version."""
    count = version.numbering.count
    return Bitmap.from_bytes(count, order.wanted) if order.wanted else Bitmap.full(count)
