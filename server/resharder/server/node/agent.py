"""A node's loop: it reports to the daemon, follows its orders, and keeps the swarm busy.

Two threads: one exchanges reports and orders, so that a daemon that is away stops no transfer; the other one creates and drops
versions and starts requests. Orders are complete each time: a version that they do not name is dropped, once no process uses it.
"""

import secrets
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import grpc
import structlog
from resharder.converters.failpoints import failpoint
from resharder.server.infra.backoff import backoff
from resharder.server.node.copies import HeldVersion, NodeCopies
from resharder.server.node.daemon_client import DaemonClient
from resharder.server.node.pieces import Bitmap
from resharder.server.node.sources import PeerOffer
from resharder.server.node.swarm import PieceOffers, Swarm
from resharder.server.node.transfers import ReceivedBytes
from resharder.server.state.errors import DaemonError
from resharder.v1 import node_pb2, resources_pb2

_FIRST_RETRY, _LONGEST_RETRY = 0.2, 2.0
_SHORTEST_REPORT = 0.02  # seconds between two reports
_STUCK_SECONDS = 5.0  # without a piece, after which the reason of the last failure is reported
_STEP_SECONDS = 0.25
_RETRY_SECONDS = 2.0  # until a version that could not be created is tried again
_log = structlog.get_logger("resharder.node")


class Replaced(Exception):
    """The daemon refuses this process for good: another one has its id, or its release is too old."""


@dataclass(frozen=True)
class NodeIdentity:
    """Identity of a node: id, address of its data port, and the file by which workers recognise its folder."""

    id: str
    data_address: str
    nonce_file: Path
    nonce: bytes


class NodeAgent:
    """The loop of one node. Call `start`, then `close`.

    Args:
        identity: The node's identity.
        daemon: Calls of the daemon.
        copies: The versions.
        make_swarm: Function that returns the swarm, which calls its argument after each piece.
        received: Bytes that the swarm has received.
        sent: Function that returns (bytes sent, requests being answered) of the data port.
    """

    def __init__(
        self,
        identity: NodeIdentity,
        daemon: DaemonClient,
        copies: NodeCopies,
        make_swarm: Callable[[Callable[[], object]], Swarm],
        received: ReceivedBytes,
        sent: Callable[[], tuple[int, int]],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._identity, self._daemon, self._copies = identity, daemon, copies
        self._received, self._sent, self._clock = received, sent, clock
        self._instance = secrets.token_hex(8)
        self._changed = threading.Condition()
        self._ended = False
        self._orders = node_pb2.NodeOrders()
        self._has_orders = False
        self._report_now = False
        self._problems: dict[str, tuple[str, float]] = {}  # with the time of the next attempt
        self._progress: dict[str, tuple[int, float]] = {}  # pieces, and since when
        self._addresses: dict[str, str] = {}  # of the daemon's data port, by version
        self._swarm = make_swarm(self._wake)
        self.failure: Exception | None = None
        """Error that ended the loop."""
        self._threads = [
            threading.Thread(target=self._guarded, args=(loop,), name=name, daemon=True)
            for name, loop in (("reports", self._report_loop), ("pieces", self._piece_loop))
        ]

    def start(self) -> None:
        """Start the threads."""
        for thread in self._threads:
            thread.start()

    def readers(self, model: str) -> frozenset[str]:
        """Return the identities of nodes that may fetch pieces of a model."""
        with self._changed:
            orders = self._orders.versions
            return frozenset(name for order in orders if order.version.split("/")[1] == model for name in order.readers)

    def wait(self, seconds: float) -> bool:
        """Return whether the loop has ended, at the latest after some seconds."""
        with self._changed:
            return self._changed.wait_for(lambda: self._ended, seconds)

    def close(self) -> None:
        """End the loop, and tell the daemon that this node leaves."""
        with self._changed:
            self._ended = True
            self._changed.notify_all()
        for thread in self._threads:
            thread.join(timeout=15)
        self._swarm.close()
        if self.failure is None:
            try:
                self._daemon.sync(self._report(0.0, leaving=True))
            except (grpc.RpcError, OSError) as error:
                _log.info("not_reported", reason=str(error))

    def _wake(self) -> None:
        with self._changed:
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
        failures = 0
        while not self._ended:
            with self._changed:
                self._report_now = False
            incomplete = self._is_incomplete()
            try:
                failpoint("node.sync")
                orders = self._daemon.sync(self._report(0.0 if incomplete else self._orders.report_seconds))
            except (grpc.RpcError, OSError) as error:
                failures += 1
                self._refused(error, failures)
                with self._changed:
                    self._changed.wait_for(lambda: self._ended, backoff(failures, _FIRST_RETRY, _LONGEST_RETRY))
                continue
            failures = 0
            with self._changed:
                self._orders, self._has_orders = orders, True
                self._changed.notify_all()
            pause = orders.report_seconds if self._is_incomplete() else 0.0
            with self._changed:
                self._changed.wait_for(lambda: self._ended, min(pause, _SHORTEST_REPORT))
                self._changed.wait_for(lambda: self._ended or self._report_now, max(0.0, pause - _SHORTEST_REPORT))

    def _refused(self, error: Exception, failures: int) -> None:
        """Log the first of several failures. Raises Replaced."""
        reason = str(error)
        if isinstance(error, grpc.RpcError):
            reason = f"{error.code().name}: {error.details()}"
            if error.code() is grpc.StatusCode.FAILED_PRECONDITION:
                raise Replaced(error.details()) from error
        if failures == 1:
            _log.warning("daemon_away", endpoint=self._daemon.endpoint, reason=reason)

    def _is_incomplete(self) -> bool:
        """Return whether a piece of an ordered version is missing, and may arrive."""
        versions = [self._copies.get(order.version) for order in self._orders.versions]
        return any(version is None or not version.held().whole() for version in versions)

    def _report(self, wait_seconds: float, *, leaving: bool = False) -> node_pb2.SyncNodeRequest:
        sent, transfers = self._sent()
        return node_pb2.SyncNodeRequest(
            node=f"nodes/{self._identity.id}",
            instance=self._instance,
            data_address=self._identity.data_address,
            store=resources_pb2.StoreAccess(nonce_file=str(self._identity.nonce_file), nonce=self._identity.nonce),
            capacity_bytes=self._copies.limit_bytes,
            used_bytes=self._copies.used_bytes(),
            transfers=transfers,
            versions=self._versions(),
            received_origin_bytes=self._received.origin,
            received_peer_bytes=self._received.peers,
            sent_bytes=sent,
            seen=self._orders.revision,
            wait_seconds=wait_seconds,
            leaving=leaving,
        )

    def _versions(self) -> list[node_pb2.NodeVersion]:
        found = {
            version.name: node_pb2.NodeVersion(
                version=version.name,
                folder=str(version.folder),
                held=version.held().to_bytes(),
                problem=self._stuck(version),
            )
            for version in self._copies.all()
        }
        with self._changed:
            for name, (problem, _) in self._problems.items():
                found.setdefault(name, node_pb2.NodeVersion(version=name, problem=problem))
        return list(found.values())

    def _stuck(self, version: HeldVersion) -> str:
        """Return why no piece of a version has arrived for some seconds; empty while pieces arrive."""
        held, now = len(version.held()), self._clock()
        pieces, since = self._progress.get(version.name, (-1, now))
        if held != pieces:
            self._progress[version.name] = held, now
            return ""
        reason = self._swarm.problem(version.name)
        stuck = held < version.numbering.count and now - since > _STUCK_SECONDS and reason
        return f"no piece for {now - since:.0f} s: {reason}" if stuck else ""

    # Versions and pieces

    def _piece_loop(self) -> None:
        while not self._ended:
            with self._changed:
                orders = self._orders if self._has_orders else None
            if orders is not None:
                self._drop_others({order.version for order in orders.versions})
                for order in orders.versions:
                    self._advance(order)
            with self._changed:
                if not self._ended and self._orders is (orders or self._orders):
                    self._changed.wait(_STEP_SECONDS)

    def _drop_others(self, wanted: set[str]) -> None:
        for version in self._copies.all():
            if version.name not in wanted:
                try:
                    if self._copies.drop(version.name):
                        self._forget(version.name)
                        _log.info("version_dropped", version=version.name)
                except OSError as error:
                    _log.warning("not_dropped", version=version.name, reason=str(error))
        for name in set(self._problems) - wanted:
            self._forget(name)

    def _forget(self, name: str) -> None:
        self._swarm.forget(name)
        with self._changed:
            self._problems.pop(name, None)
            self._progress.pop(name, None)
            self._addresses.pop(name, None)

    def _advance(self, order: node_pb2.NodeOrder) -> None:
        """Create a version, or start requests for its pieces; report early once there is nothing left to request."""
        version = self._copies.get(order.version) or self._create(order.version)
        if version is None or version.held().whole():
            return
        try:
            offers = self._offers(version, order)
        except ValueError as error:  # of a daemon that numbers pieces in another way
            self._failed(order.version, str(error))
            return
        if not self._swarm.fill(version, offers) and not self._swarm.busy():
            with self._changed:
                self._report_now = True
                self._changed.notify_all()

    def _create(self, name: str) -> HeldVersion | None:
        with self._changed:
            if self._problems.get(name, ("", 0.0))[1] > self._clock():
                return None
        try:
            failpoint("node.manifest")
            remote = self._daemon.version(name)
            if not remote.data_address:
                self._failed(name, "the daemon has no data port (data_listen)")
                return None
            version = self._copies.add(name, remote.fingerprint, remote.files)
        except grpc.RpcError as error:
            self._failed(name, f"the daemon: {error.details() or error.code().name}")
        except (DaemonError, OSError, ValueError) as error:
            self._failed(name, str(error))
        else:
            with self._changed:
                self._problems.pop(name, None)
                self._addresses[name] = remote.data_address
            _log.info("version_wanted", version=name, bytes=version.size_bytes, pieces=version.numbering.count)
            return version
        return None

    def _failed(self, name: str, problem: str) -> None:
        with self._changed:
            if self._problems.get(name, ("", 0.0))[0] != problem:
                _log.warning("version_refused", version=name, reason=problem)
            self._problems[name] = problem, self._clock() + _RETRY_SECONDS
            self._report_now = True
            self._changed.notify_all()

    def _offers(self, version: HeldVersion, order: node_pb2.NodeOrder) -> PieceOffers:
        pieces = version.numbering.count
        peers, addresses = [], dict[str, str]()
        for peer in order.peers:
            peers.append(PeerOffer(peer.node, Bitmap.from_bytes(pieces, peer.held), peer.transfers, peer.origin))
            addresses[peer.node] = peer.data_address or self._addresses[version.name]
        return PieceOffers(tuple(peers), addresses, Bitmap.from_bytes(pieces, order.scarce), tuple(order.granted))
