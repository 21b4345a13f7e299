"""Labels: which versions made the tokens of an answer.

An `Answer` collects them while the engine's outputs are processed (outputs.py). A whole answer names them in its header. The
header of a stream leaves before its tokens are made, so it reads `streamed`, and each event of a `text/event-stream` names the
versions of its tokens under the key `resharder_versions`.
"""

import asyncio
import re
from collections.abc import Awaitable, Callable, Iterator, MutableMapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

from resharder.client.inference.version_page import joined

Message = MutableMapping[str, Any]
Send = Callable[[Message], Awaitable[None]]

VERSION_HEADER = "X-Resharder-Version"
UNCONFIRMED, STREAMED = "none", "streamed"
_KEY = b"resharder_versions"
_OBJECT = re.compile(rb"(?<![^\r\n])data: ?\{([ \t]*\})?")  # at the start of a line
_LINE_END = re.compile(rb"[\r\n][^\r\n]*\Z")


def name(versions: tuple[int, ...]) -> str:
    return ",".join(str(version) if version else UNCONFIRMED for version in versions)


@dataclass
class _Taken:
    """What was taken from one request's outputs and may not have been sent yet. `here`: by the task that sends the answer."""

    here: bool
    versions: tuple[int, ...]


class Answer:
    """The versions that made one answer, whatever number of requests to the engine it takes. Not for other threads than the event
    loop's."""

    def __init__(self) -> None:
        self.versions: tuple[int, ...] = ()  # of all its tokens, in order
        self._taken: dict[int, _Taken] = {}  # by source
        self._sender: asyncio.Task[Any] | None = None
        self._sent = False  # an event has left since the last outputs were taken

    def made(self, versions: tuple[int, ...]) -> None:
        self.versions = joined(self.versions, versions)

    def took(self, source: int, versions: tuple[int, ...]) -> None:
        """Outputs were taken from a queue. Where the sending task takes them itself, it has sent what it took before; a task in
        between may hold them for any time, so what those took stays."""
        here = self._sender is not None and asyncio.current_task() is self._sender
        if here and self._sent:
            self._taken = {other: taken for other, taken in self._taken.items() if not taken.here and other != source}
            self._sent = False
        before = self._taken[source].versions if source in self._taken else ()
        self._taken[source] = _Taken(here, joined(before, versions))

    def sends_from_here(self) -> None:
        """The current task is the one that sends the answer."""
        self._sender = asyncio.current_task()

    def sent(self) -> tuple[int, ...]:
        """An event leaves now: the versions that may have made its tokens; none before the first tokens."""
        self._sent = True
        return tuple(sorted({version for taken in self._taken.values() for version in taken.versions}))


_CURRENT: ContextVar[Answer | None] = ContextVar("resharder_answer", default=None)


def current() -> Answer | None:
    return _CURRENT.get()


@contextmanager
def answering() -> Iterator[Answer]:
    """Requests to the engine that are begun inside, by this task or by tasks that it starts, belong to one answer."""
    answer = Answer()
    token = _CURRENT.set(answer)
    try:
        yield answer
    finally:
        _CURRENT.reset(token)


class EventLabeller:
    """Puts labels into the events of a stream, wherever its chunks are split."""

    def __init__(self) -> None:
        self._held = b""  # a line that has not ended
        self._held_versions: tuple[int, ...] = ()

    def feed(self, chunk: bytes, versions: tuple[int, ...], *, last: bool = False) -> bytes:
        """The lines that end in `chunk`; what comes after them waits for its end."""
        content = self._held + chunk
        versions = tuple(sorted({*self._held_versions, *versions}))
        cut = len(content)
        if not last:
            found = _LINE_END.search(content)
            cut = found.start() + 1 if found else 0
        self._held, self._held_versions = content[cut:], versions if cut < len(content) else ()
        return _OBJECT.sub(lambda found: _labelled(found, versions), content[:cut]) if versions else content[:cut]


def _labelled(found: re.Match[bytes], versions: tuple[int, ...]) -> bytes:
    label = b'data: {"' + _KEY + b'": "' + name(versions).encode() + b'"'
    return label + (b"}" if found[1] else b", ")


class Signed:
    """An ASGI `send` that adds the header and labels events. `installed`: what the engine has installed now, for answers without
    tokens; 0 where the answer repeats tokens of an earlier one."""

    def __init__(self, send: Send, answer: Answer, installed: Callable[[], int]) -> None:
        self._send, self._answer, self._installed = send, answer, installed
        self._start: Message | None = None  # waits until it is known whether the answer is a whole one
        self._events: EventLabeller | None = None

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self._answer.sends_from_here()
            self._start = message
            if _is_event_stream(message):
                self._events = EventLabeller()
                await self._begin(STREAMED)
            return
        if message["type"] == "websocket.accept":
            message = _with_version(message, STREAMED)
        elif self._start is not None:
            await self._begin(STREAMED if message.get("more_body") else self._whole())
        if self._events is not None and message["type"] == "http.response.body":
            last = not message.get("more_body", False)
            message = {**message, "body": self._events.feed(message.get("body", b""), self._answer.sent(), last=last)}
        await self._send(message)

    async def _begin(self, version: str) -> None:
        assert self._start is not None
        message, self._start = self._start, None
        await self._send(_with_version(message, version))

    def _whole(self) -> str:
        return name(self._answer.versions or (self._installed(),))


def header(value: str) -> tuple[bytes, bytes]:
    return VERSION_HEADER.lower().encode(), value.encode()


def _with_version(message: Message, version: str) -> Message:
    return {**message, "headers": [*message.get("headers", ()), header(version)]}


def _is_event_stream(message: Message) -> bool:
    types = [value for key, value in message.get("headers", ()) if key.lower() == b"content-type"]
    return any(value.lower().startswith(b"text/event-stream") for value in types)
