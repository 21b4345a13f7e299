"""The end of a node's process: it waits, for a bounded time, for versions that would be lost or aborted with it."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress

import grpc
import structlog
from resharder.v1 import node_pb2

_STEP_SECONDS = 0.25
_OPEN = (node_pb2.FileSetOrder.UPLOADING, node_pb2.FileSetOrder.VERIFYING)
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
    deadline, said = clock() + seconds, list[str]()
    while True:
        with suppress(grpc.RpcError, OSError):  # the loop of reports logs it
            known = exchange()
        if not (waits := list(needing(known))):
            return True
        if waits != said:
            _log.info("departure_waits", versions=waits[:8], seconds=round(max(0.0, deadline - clock()), 1))
            said = waits
        if forced.wait(min(_STEP_SECONDS, max(0.0, deadline - clock()))) or clock() >= deadline:
            _log.warning("departs_anyway", versions=waits[:8], reason="a second signal" if forced.is_set() else "drain_seconds")
            return False
