"""What happened, oldest first: `events.jsonl` beside the versions, and the newest of it in memory.

    events = Events(store_folder)
    events.add("server", "servers/a", "lost", "its lease ended", version=3)
    for event in events.follow(0, "fleets/policy"): ...     # events, and pauses

One line per event, written before anybody can see it, so ids increase over restarts and SIGKILL; a line that was cut short is
dropped. At `limit` lines the file becomes `events.1.jsonl`, in place of the one before.
"""

import json
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from itertools import takewhile
from pathlib import Path
from typing import Literal

import structlog
from google.protobuf.timestamp_pb2 import Timestamp
from resharder.server.infra.caller import CALLER
from resharder.server.infra.change_signal import ChangeSignal, Pause
from resharder.server.infra.filesystem import sync, touching
from resharder.v1 import operator_pb2

Kind = Literal["daemon", "publisher", "version", "server", "fleet", "move", "operator", "archive"]

_FILE, _OLDER = "events.jsonl", "events.1.jsonl"
_LONGEST = 2000  # characters of a reason or a detail
_LAST = 100
_LOOK = 1.0  # seconds; between looks whether a caller that follows is still there
_log = structlog.get_logger("resharder.events")


@dataclass(frozen=True)
class Event:
    """`time` is the wall clock's, in seconds."""

    id: int
    time: float
    kind: str
    subject: str
    what: str
    reason: str = ""
    details: dict[str, str] = field(default_factory=dict)

    def about(self, subject: str) -> bool:
        """Whether it is about this resource or one under it; every event is about the empty name."""
        return not subject or self.subject == subject or self.subject.startswith(f"{subject}/")


class Events:
    """Thread-safe; `_changed` guards everything. No other lock is taken under it, so `add` may be called under any. Each of
    `listeners` is called for every event, and must not wait."""

    def __init__(self, root: Path, limit: int = 10_000) -> None:
        self._root, self._limit = root, limit
        self.listeners: list[Callable[[Event], None]] = []
        self._lock, self._changed = threading.Lock(), ChangeSignal()
        self._closed = False
        known = [event for name in (_OLDER, _FILE) for event in _read(root / name)]
        self._events = deque(known, maxlen=limit)
        self._late: deque[bytes] = deque(maxlen=limit)
        self._torn = False
        self._id = max((event.id for event in known), default=0)
        self._lines = _end_with_a_line(root / _FILE)
        self._file = _open(root / _FILE)

    def add(self, kind: Kind, subject: str, what: str, reason: str = "", **details: object) -> Event:
        """`what` is one word. An operator's event is on the medium when this returns, any other once the kernel writes it."""
        if kind == "operator" and (caller := CALLER.get()):
            details["by"] = caller
        said = {name: str(value)[:_LONGEST] for name, value in details.items()}
        with self._lock:
            event = Event(self._id + 1, time.time(), kind, subject, what, reason[:_LONGEST], said)
            self._id = event.id
            if not self._closed:
                self._write(event)
            self._events.append(event)
            self._changed.notify()
            with touching(self._root / _FILE, "syncing"):
                synced = os.dup(self._file) if kind == "operator" and not self._closed else None
        if synced is not None:
            self._sync(synced)
        for listener in self.listeners:
            listener(event)
        return event

    def last(self, count: int, subject: str = "") -> list[Event]:
        """The newest `count` about `subject`, oldest first."""
        return [event for event in self._since(0) if event.about(subject)][-count:] if count > 0 else []

    def after(self, id: int, subject: str = "") -> list[Event]:
        """Those with a greater id, of the newest `limit`, oldest first."""
        return [event for event in self._since(id) if event.about(subject)]

    def follow(self, after: int, subject: str) -> Iterator[Event | Pause]:
        """As `after`, and then what comes, until the journal is closed."""
        while True:
            seen, closed = self._changed.count, self._closed
            fresh = self._since(after)
            yield from (event for event in fresh if event.about(subject))
            if closed:
                return
            after = fresh[-1].id if fresh else after
            yield self._changed.pause(seen, _LOOK)

    def listed(self, request: operator_pb2.ListEventsRequest) -> Iterator[Event | Pause]:
        """The events that a ListEvents call asks for."""
        last, subject = request.last or _LAST, request.subject
        found = self.after(request.after, subject) if request.after else self.last(last, subject)
        yield from found
        if request.follow:
            yield from self.follow(found[-1].id if found else request.after, subject)

    def close(self) -> None:
        """Ends every `follow`. What is added from here on is kept in memory alone."""
        with self._lock:
            if not self._closed:
                self._write_late()
                self._closed = True
                os.close(self._file)
            self._changed.notify()

    def _since(self, id: int) -> list[Event]:
        with self._lock:
            return list(takewhile(lambda event: event.id > id, reversed(self._events)))[::-1]

    def _write(self, event: Event) -> None:
        """A full medium must not stop what the event tells of: the log gets it then, and the file with the next event."""
        self._late.append(json.dumps(asdict(event)).encode() + b"\n")
        if error := self._write_late():
            _log.error("event_not_written", **asdict(event) | {"error": error})

    def _write_late(self) -> str:
        """Why lines are left; empty where none are."""
        try:
            if self._late and self._lines >= self._limit:
                self._rotate()
            while self._late:
                line = (b"\n" if self._torn else b"") + self._late[0]
                done = os.write(self._file, line)
                self._torn = 0 < done < len(line) or (self._torn and not done)
                if done < len(line):
                    return f"{done} of {len(line)} bytes were written"
                self._late.popleft()
                self._lines += 1
        except OSError as error:
            return str(error)
        return ""

    def _rotate(self) -> None:
        with suppress(FileNotFoundError):  # renamed by an earlier call, which could not open the new one
            os.replace(self._root / _FILE, self._root / _OLDER)
        full, self._file, self._lines = self._file, _open(self._root / _FILE), 0
        os.close(full)

    def _sync(self, file: int) -> None:
        try:
            with touching(self._root / _FILE, "syncing"):
                os.fsync(file)
            sync(self._root)  # the file's name, where it is new
        finally:
            os.close(file)


def _open(path: Path) -> int:
    return os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)


def _read(path: Path) -> Iterator[Event]:
    """The whole lines."""
    for line in path.read_bytes().splitlines() if path.exists() else []:
        try:
            yield Event(**json.loads(line))
        except (ValueError, TypeError):
            continue


def _end_with_a_line(path: Path) -> int:
    """Drops a last line that was cut short; how many lines are left."""
    content = path.read_bytes() if path.exists() else b""
    whole = content.rfind(b"\n") + 1
    if whole < len(content):
        os.truncate(path, whole)
    return content.count(b"\n")


def event_to_proto(event: Event) -> operator_pb2.Event:
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
