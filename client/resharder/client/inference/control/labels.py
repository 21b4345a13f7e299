"""Labels: the versions that computed the tokens of an answer.

An `Answer` collects them while the engine's outputs are processed (`outputs.py`). A complete answer has
them in its header. A stream's header is sent before its tokens are computed: it is `streamed`, and each
event of a `text/event-stream` has the versions of its tokens under the key `resharder_versions`.
"""

import asyncio
import re
from collections.abc import Awaitable, Callable, Iterable, Iterator, MutableMapping
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


@dataclass(frozen=True)
class Label:
    """The versions that computed tokens. `str` formats them for the header, as in `8;policy-lora=3,4`; `none` is for 0."""

    versions: tuple[int, ...] = ()
    """Versions of the model, in order, without repetitions of the one before."""
    adapters: tuple[tuple[str, int], ...] = ()
    """Adapters and their versions, in the order in which they appeared."""

    def __add__(self, later: "Label") -> "Label":
        return Label(joined(self.versions, later.versions), _unique(self.adapters + later.adapters))

    def __bool__(self) -> bool:
        return bool(self.versions)

    def __str__(self) -> str:
        adapters = dict.fromkeys(adapter for adapter, _ in self.adapters)
        parts = [f"{adapter}={_numbers(v for name, v in self.adapters if name == adapter)}" for adapter in adapters]
        return ";".join([_numbers(self.versions), *parts])


def in_any_order(labels: Iterable[Label]) -> Label:
    """Return the label of tokens with these labels whose order is unknown."""
    found = list(labels)
    versions = {version for label in found for version in label.versions}
    return Label(tuple(sorted(versions)), _unique(pair for label in found for pair in label.adapters))


def _numbers(versions: Iterable[int]) -> str:
    return ",".join(str(version) if version else UNCONFIRMED for version in versions)


def _unique(adapters: Iterable[tuple[str, int]]) -> tuple[tuple[str, int], ...]:
    return tuple(dict.fromkeys(adapters))


@dataclass
class _Taken:
    """Label of outputs that were taken from one queue and may not have been sent."""

    here: bool
    """Whether the task that sends the answer took them."""
    label: Label


class Answer:
    """The versions that computed one answer, which may take several requests to the engine.

    Not thread-safe; use it on the event loop only.
    """

    def __init__(self) -> None:
        self.label = Label()
        """The versions of all tokens, in order."""
        self._taken: dict[int, _Taken] = {}  # by source
        self._sender: asyncio.Task[Any] | None = None
        self._sent = False  # whether an event was sent since outputs were last taken

    @property
    def versions(self) -> tuple[int, ...]:
        """The versions of the model that computed the tokens, in order."""
        return self.label.versions

    @property
    def adapters(self) -> tuple[tuple[str, int], ...]:
        """The adapters that computed them, each with a version: `("policy-lora", 4)`."""
        return self.label.adapters

    def made(self, label: Label) -> None:
        """Append the label of new tokens."""
        self.label += label

    def took(self, source: int, label: Label) -> None:
        """Record that the current task took outputs from the queue `source`.

        If the sending task takes them, it has sent its earlier outputs, and their label is dropped.
        Labels that another task took are kept, since it may delay the outputs for any time.
        """
        here = self._sender is not None and asyncio.current_task() is self._sender
        if here and self._sent:
            self._taken = {other: taken for other, taken in self._taken.items() if not taken.here and other != source}
            self._sent = False
        before = self._taken[source].label if source in self._taken else Label()
        self._taken[source] = _Taken(here, before + label)

    def sends_from_here(self) -> None:
        """Mark the current task as the one that sends the answer."""
        self._sender = asyncio.current_task()

    def sent(self) -> Label:
        """Record that an event is sent now.

        Returns:
            The versions that may have computed the event's tokens; empty before the first tokens.
        """
        self._sent = True
        return in_any_order(taken.label for taken in self._taken.values())


_CURRENT: ContextVar[Answer | None] = ContextVar("resharder_answer", default=None)


def current() -> Answer | None:
    """Return the answer of the `answering` block around the caller."""
    return _CURRENT.get()


@contextmanager
def answering() -> Iterator[Answer]:
    """Collect the versions of all requests to the engine that this task, and tasks that it starts, begin inside the block."""
    answer = Answer()
    token = _CURRENT.set(answer)
    try:
        yield answer
    finally:
        _CURRENT.reset(token)


class EventLabeller:
    """Inserts labels into the events of a stream, independent of the boundaries of its chunks."""

    def __init__(self) -> None:
        self._partial = b""  # a line without its end
        self._partial_label = Label()

    def feed(self, chunk: bytes, label: Label, *, last: bool = False) -> bytes:
        """Return the labelled lines that are complete with `chunk`, and buffer the rest.

        Args:
            chunk: The next bytes of the stream.
            label: The label of the chunk's tokens.
            last: Whether the stream ends here; nothing is buffered then.
        """
        content = self._partial + chunk
        label = in_any_order([self._partial_label, label])
        cut = len(content)
        if not last:
            found = _LINE_END.search(content)
            cut = found.start() + 1 if found else 0
        self._partial, self._partial_label = content[cut:], label if cut < len(content) else Label()
        named = str(label).encode()
        return _OBJECT.sub(lambda found: _labelled(found, named), content[:cut]) if label else content[:cut]


def _labelled(found: re.Match[bytes], named: bytes) -> bytes:
    label = b'data: {"' + _KEY + b'": "' + named + b'"'
    return label + (b"}" if found[1] else b", ")


class Signed:
    """An ASGI `send` that adds the header and labels events.

    Args:
        send: The server's `send`.
        answer: The versions of the answer's tokens.
        installed: Returns the version for an answer without tokens: the installed one, or 0 for a stored answer.
    """

    def __init__(self, send: Send, answer: Answer, installed: Callable[[], int]) -> None:
        self._send, self._answer, self._installed = send, answer, installed
        self._start: Message | None = None  # delayed until the first body shows whether the answer is complete
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
            labelled = self._events.feed(message.get("body", b""), self._answer.sent(), last=last)
            message = {**message, "body": labelled}
        await self._send(message)

    async def _begin(self, version: str) -> None:
        assert self._start is not None
        message, self._start = self._start, None
        await self._send(_with_version(message, version))

    def _whole(self) -> str:
        return str(self._answer.label or Label((self._installed(),)))


def header(value: str) -> tuple[bytes, bytes]:
    """Return the version header as an ASGI header."""
    return VERSION_HEADER.lower().encode(), value.encode()


def _with_version(message: Message, version: str) -> Message:
    return {**message, "headers": [*message.get("headers", ()), header(version)]}


def _is_event_stream(message: Message) -> bool:
    types = [value for key, value in message.get("headers", ()) if key.lower() == b"content-type"]
    return any(value.lower().startswith(b"text/event-stream") for value in types)
