"""Streams of control sides, and the queues of orders to them."""

import queue
from collections.abc import Callable
from dataclasses import dataclass, field

from resharder.server.infra.change_signal import ChangeSignal
from resharder.server.state.server_events import Attached, Order, Reported


@dataclass(eq=False)
class Attachment:
    """Stream of one control side. Methods are thread-safe."""

    server: str
    first: Attached
    on_report: Callable[["Attachment", Reported], None]
    on_close: Callable[["Attachment"], None]
    orders: queue.SimpleQueue[Order | None] = field(default_factory=queue.SimpleQueue)
    """Orders to send; None ends the stream."""
    changed: ChangeSignal = field(default_factory=ChangeSignal)
    """Signals new orders."""

    def put(self, order: Order | None) -> None:
        """Queue an order, or with None the end of the stream."""
        self.orders.put(order)
        self.changed.notify()

    def report(self, report: Reported) -> None:
        """Process a report. Raises ResourceNotFound (SERVER_UNKNOWN) if the server was removed."""
        self.on_report(self, report)

    def close(self) -> None:
        """Detach the control side. A no-op if a newer stream has replaced this one."""
        self.on_close(self)


class Attachments:
    """Attached control sides by server and nonce. Callers hold the roster's lock."""

    def __init__(self) -> None:
        self._streams: dict[tuple[str, str], Attachment] = {}

    def add(self, attachment: Attachment) -> None:
        """Add a stream, and end an earlier one of the same control side."""
        key = (attachment.server, attachment.first.control)
        former = self._streams.get(key)
        if former is not None and former is not attachment:
            former.put(None)
        self._streams[key] = attachment

    def has(self, attachment: Attachment, control: str) -> bool:
        """Return whether this is the current stream of a control side."""
        return self._streams.get((attachment.server, control)) is attachment

    def remove(self, attachment: Attachment) -> bool:
        """Remove a stream; return False if it is not the current one."""
        if not self.has(attachment, attachment.first.control):
            return False
        del self._streams[attachment.server, attachment.first.control]
        return True

    def send(self, server: str, order: Order) -> None:
        """Queue an order for its control side. It is dropped if the control side is not attached."""
        attachment = self._streams.get((server, order.control))
        if attachment is not None:
            attachment.put(order)

    def end_all(self) -> None:
        """End every stream."""
        for attachment in self._streams.values():
            attachment.put(None)
