"""The event log: `events.jsonl` beside the versions, oldest event first, and the newest events in memory.

    events = Events(store_folder)
    events.add("server", "servers/a", "lost", "its lease ended", version=3)
    for event in events.follow(0, "fleets/policy"): ...     # events, and pauses

Each event is one line, written before a caller can read the event, so ids increase over restarts and SIGKILL. At `limit` lines
the file replaces `events.1.jsonl`.
"""

import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from itertools import takewhile
from pathlib import Path
from typing import Any, Literal, Self

import structlog
from google.protobuf.timestamp_pb2 import Timestamp
from resharder.converters.failpoints import failpoint
from resharder.converters.json_input import check_fields, is_text
from resharder.converters.signal import Signal
from resharder.server.infra.caller import CALLER
from resharder.server.infra.change_signal import ChangeSignal, Pause
from resharder.server.infra.filesystem import sync, touching
from resharder.server.infra.journal import JournalFile, read_records
from resharder.v1 import operator_pb2

Kind = Literal["daemon", "publisher", "version", "server", "fleet", "move", "operator", "archive", "node"]

_LONGEST = 2000  # characters of a reason or a detail
_LAST = 100
_WIDEST = 1 << 62
_LOOK = 1.0  # seconds between checks that a following caller is still connected
_log = structlog.get_logger("resharder.events")


@dataclass(frozen=True)
class Event:
    """One event. `time` is in seconds since 1970."""

    id: int
    time: float
    kind: str
    subject: str
    what: str
    reason: str = ""
    details: dict[str, str] = field(default_factory=dict)

    @classmethod
    def of(cls, content: Mapping[str, Any]) -> Self:
        """Build an event from stored fields. Raises TypeError or ValueError for others."""
        if not isinstance(content, Mapping):
            raise TypeError(f"expected the fields of an event, got a {type(content).__name__}")
        event = cls(**content)
        check_fields(event)
        if not 0 < event.id < _WIDEST:  # ids of new events follow, and have to fit the protocol's
            raise ValueError(f"expected an id of 1 or more, and of at most 62 bits, got {event.id}")
        if not isinstance(event.details, dict) or not all(is_text(text) for pair in event.details.items() for text in pair):
            raise TypeError(f"expected details as strings by name, got {str(event.details)[:40]}")
        return event

    def about(self, subject: str) -> bool:
        """Return whether the event is about this resource or one under it; always True for the empty name."""
        return not subject or self.subject == subject or self.subject.startswith(f"{subject}/")


class Events:
    """The events of one daemon. Thread-safe.

    No other lock is taken under that of the log, so `add` may be called under any. `added` is emitted for every event. The
    constructor raises OSError.
    """

    def __init__(self, root: Path, limit: int = 10_000, wall: Callable[[], float] = time.time) -> None:
        self._root, self._wall = root, wall
        self.added: Signal[Event] = Signal()
        self._lock, self._changed = threading.Lock(), ChangeSignal()
        self._closed = False
        self._journal = JournalFile(root / "events.jsonl", max_late=limit, max_lines=limit)
        files = (self._journal.older, self._journal.path)
        # Sorted, since queries end at the first event with a lower id, which a damaged line may have anywhere.
        known = sorted((event for path in files for event in read_records(path, Event.of)), key=lambda event: event.id)
        self._events = deque(known, maxlen=limit)
        self._id = max((event.id for event in known), default=0)
        self._journal.open()

    def add(self, kind: Kind, subject: str, what: str, reason: str = "", **details: object) -> Event:
        """Add an event; `what` is one word.

        An operator's event is synced before this returns; any other reaches the medium when the kernel writes it back. Raises
        OSError if the sync fails.
        """
        if kind == "operator" and (caller := CALLER.get()):
            details["by"] = caller
        texts = {name: str(value)[:_LONGEST] for name, value in details.items()}
        with self._lock:
            event = Event(self._id + 1, self._wall(), kind, subject, what, reason[:_LONGEST], texts)
            self._id = event.id
            if not self._closed:
                self._write(event)
            self._events.append(event)
            self._changed.emit()
            with touching(self._journal.path, "syncing"):
                synced = self._journal.duplicate() if kind == "operator" and not self._closed else None
        if synced is not None:
            self._sync(synced)
        self.added.emit(event)
        return event

    def last(self, count: int, subject: str = "") -> list[Event]:
        """Return the newest `count` events about `subject`, oldest first."""
        return [event for event in self._since(0) if event.about(subject)][-count:] if count > 0 else []

    def after(self, id: int, subject: str = "") -> list[Event]:
        """Return the events about `subject` with an id above `id`, among the newest `limit` events, oldest first."""
        return [event for event in self._since(id) if event.about(subject)]

    def follow(self, after: int, subject: str) -> Iterator[Event | Pause]:
        """Yield the events that `after` returns, then new ones and pauses, until the log is closed."""
        while True:
            seen, closed = self._changed.count, self._closed
            fresh = self._since(after)
            yield from (event for event in fresh if event.about(subject))
            if closed:
                return
            after = fresh[-1].id if fresh else after
            yield self._changed.pause(seen, _LOOK)

    def listed(self, request: operator_pb2.ListEventsRequest) -> Iterator[Event | Pause]:
        """Yield the events of a ListEvents call; with `follow`, new ones as well until the log is closed."""
        last, subject = request.last or _LAST, request.subject
        found = self.after(request.after, subject) if request.after else self.last(last, subject)
        yield from found
        if request.follow:
            yield from self.follow(found[-1].id if found else request.after, subject)

    def close(self) -> None:
        """End every `follow`. Later events are kept in memory only."""
        with self._lock:
            if not self._closed:
                with suppress(OSError):
                    self._journal.flush()
                self._closed = True
                self._journal.close()
            self._changed.emit()

    def _since(self, id: int) -> list[Event]:
        with self._lock:
            return list(takewhile(lambda event: event.id > id, reversed(self._events)))[::-1]

    def _write(self, event: Event) -> None:
        """Append the event to the file. An event that the medium refuses is logged, and written before the next one."""
        try:
            self._journal.append(asdict(event))
        except OSError as error:
            _log.error("event_not_written", **asdict(event) | {"error": str(error)})

    def _sync(self, file: int) -> None:
        try:
            with touching(self._journal.path, "syncing"):
                failpoint("event.sync")
                os.fsync(file)
            sync(self._root)  # the entry of a new file
        finally:
            os.close(file)


def event_to_proto(event: Event) -> operator_pb2.Event:
    """Convert an event to its message."""
    when = Timestamp()
    when.FromNanoseconds(int(event.time * 1e9))
    return operator_pb2.Event(
        id=event.id,
        time=when,
        kind=event.kind,
        subject=event.subject,
        what=event.what,
        reason=event.reason,
        details=event.details,
    )
