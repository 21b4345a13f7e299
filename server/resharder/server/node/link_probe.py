"""A node's measurement of the link to another data port, on an operator's order that the daemon passes on."""

import threading
import time
from collections.abc import Callable, Iterable

import grpc
import structlog
from resharder.converters.wire.port_probe import (
    LIMIT_SECONDS,
    PortMeasurement,
    Problem,
    StreamRate,
    TlsOptions,
    measure_port,
    parts_of,
)
from resharder.converters.wire.ranges import PIECE_BYTES
from resharder.server.holding.tls import NodeTls
from resharder.server.holding.transfers import data_address
from resharder.server.node.daemon_client import DaemonClient, RemoteVersion
from resharder.v1 import node_pb2, resources_pb2

_OPTIONS = TlsOptions("--tls-ca", "--tls-cert and --tls-key", "--tls-peer-name, for the daemon --tls-name")
_MOST_VERSIONS = 4  # whose pieces are tried
_NOT_ADMITTED = "the daemon allows no such node"
_ADMISSION_SECONDS = 5.0  # until the target has learnt that this node may read the model
_RETRY_SECONDS = 0.25
_SILENT_SECONDS = 5.0
_log = structlog.get_logger("resharder.node")


class LinkProbe:
    """Measurements of one node, one at a time.

    Args:
        daemon: Calls of the daemon.
        node: The node's id.
        instance: Nonce of the process's lifetime.
        tls: Certificates; None connects without TLS.
        limit_seconds: Bound on the measurement of one rate.
    """

    def __init__(
        self,
        daemon: DaemonClient,
        node: str,
        instance: str,
        tls: NodeTls | None,
        limit_seconds: float = LIMIT_SECONDS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._daemon, self._node, self._instance, self._tls = daemon, node, instance, tls
        self._limit, self._clock = limit_seconds, clock
        self._measuring = threading.Lock()
        self._current = ""

    def follow(self, order: node_pb2.LinkOrder) -> None:
        """Start the measurement of an order on a thread of its own, unless it has been started; an empty id is no order."""
        if order.id == self._current:
            return
        self._current = order.id
        if order.id:
            threading.Thread(target=self._run, args=(order,), name="link", daemon=True).start()

    def _run(self, order: node_pb2.LinkOrder) -> None:
        with self._measuring:
            if order.id != self._current:
                return
            try:
                found = self._measure(order)
            except grpc.RpcError as error:
                found = _failed(f"the daemon: {error.details() or error.code().name}")
            except (OSError, ValueError) as error:
                found = _failed(str(error) or type(error).__name__)
        while order.id == self._current:
            try:
                return self._daemon.put_link(self._node, self._instance, order.id, found)
            except (grpc.RpcError, OSError) as error:
                _log.info("link_not_reported", target=order.target, reason=str(error))
                time.sleep(_RETRY_SECONDS)

    def _measure(self, order: node_pb2.LinkOrder) -> resources_pb2.LinkMeasurement:
        """Measure a link. Raises grpc.RpcError, OSError, ValueError (an address that is none)."""
        versions, refusal = self._versions(order.versions)
        address = order.data_address or next((version.data_address for version in versions), "")
        if not address:
            return resources_pb2.LinkMeasurement(unread=refusal or "no version is READY, or the daemon has no data port")
        at = data_address(address, self._tls, _SILENT_SECONDS, origin=not order.data_address)
        parts = [part for version in versions for part in parts_of(version.name, version.fingerprint, version.files)]
        until = self._clock() + _ADMISSION_SECONDS
        while True:
            found = measure_port(at, parts, limit_seconds=self._limit, options=_OPTIONS)
            if _NOT_ADMITTED not in found.unread or self._clock() >= until:
                return _message(found, address, refusal if not parts else "")
            time.sleep(_RETRY_SECONDS)

    def _versions(self, names: Iterable[str]) -> tuple[list[RemoteVersion], str]:
        """Return versions that this node may read, and why it may not read the last other one."""
        found, refusal = list[RemoteVersion](), ""
        for name in names:
            try:
                version = self._daemon.version(name)
                if self._tls is not None:  # other nodes admit a node once it has asked the daemon for checksums of the model
                    first = version.files[0]
                    self._daemon.checksums(name, first.path, 0, min(PIECE_BYTES, first.size))
                found.append(version)
            except grpc.RpcError as error:
                refusal = error.details() or error.code().name
            if len(found) == _MOST_VERSIONS:
                break
        return found, refusal


def _message(found: PortMeasurement, address: str, refusal: str) -> resources_pb2.LinkMeasurement:
    problem = found.problem or Problem("", "")
    return resources_pb2.LinkMeasurement(
        data_address=address,
        round_trip_seconds=found.round_trip,
        rates=map(_rate, found.rates),
        problem=problem.found,
        mend=problem.mend,
        unread=refusal or found.unread,
    )


def _rate(rate: StreamRate) -> resources_pb2.LinkRate:
    return resources_pb2.LinkRate(streams=rate.streams, bytes=rate.bytes, seconds=rate.seconds)


def _failed(problem: str) -> resources_pb2.LinkMeasurement:
    return resources_pb2.LinkMeasurement(problem=problem, mend="look in the log of the node that measures")
