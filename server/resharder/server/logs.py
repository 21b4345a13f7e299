"""Logs on standard error, one event per line: each change of state once, with its reason, as in the event log.

Names, reasons and texts of exceptions are others' and may hold anything: the console shows what acts on a terminal escaped, and
indents further lines, so that none of them passes for an event.
"""

import logging
import sys
import textwrap
import threading
from collections.abc import MutableMapping
from contextlib import suppress
from typing import Any, TextIO

import structlog
from resharder.converters.printable import printable, unescaped
from resharder.server.infra.descriptors import DescriptorErrorFilter
from resharder.server.infra.event_log import Event

_GRAVE = {"aborted", "back", "differs", "failed", "lost", "stopped", "store_lost"}
_LONG = ("exception", "stack")  # texts of several lines
_log = structlog.get_logger("resharder.events")


def configure_logs(form: str, level: str) -> None:
    """Configure logging. `form` is console or json."""
    # The formatter of tracebacks is the plain one: others show the values of variables, tokens too.
    console = structlog.dev.ConsoleRenderer(colors=sys.stderr.isatty(), exception_formatter=structlog.dev.plain_traceback)
    last: list[Any] = [structlog.processors.JSONRenderer()] if form == "json" else [_escape, console]
    lines = _Lines(unescaped(sys.stderr))
    structlog.configure(
        processors=[
            DescriptorErrorFilter(),
            structlog.stdlib.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.format_exc_info,
            *last,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(logging.getLevelNamesMapping()[level.upper()]),
        logger_factory=lambda *_: lines,
        cache_logger_on_first_use=False,
    )


class _Lines:
    """Logger of structlog that drops lines which cannot be written: no call fails because nobody reads the log."""

    def __init__(self, stream: TextIO) -> None:
        self._stream, self._lock = stream, threading.Lock()

    def msg(self, line: str) -> None:
        """Write a line."""
        with self._lock, suppress(OSError, ValueError):  # ValueError: closed at the end of the process
            self._stream.write(f"{line}\n")
            self._stream.flush()

    debug = info = warning = error = critical = msg


def _escape(logger: object, method: str, event: MutableMapping[str, Any]) -> dict[str, Any]:
    """Escape all texts of an event: a processor of structlog."""
    return {printable(name): _escaped_lines(value) if name in _LONG else _escaped(value) for name, value in event.items()}


def _escaped(value: object) -> object:
    if value is None or isinstance(value, (bool, int, float)):
        return value
    return printable(value if isinstance(value, str) else repr(value))


def _escaped_lines(text: str) -> str:
    return textwrap.indent("\n".join(map(printable, text.split("\n"))), "    ")


def log_event(event: Event) -> None:
    """Log an event of the journal: as a warning if a server, version or move failed, else as information."""
    log = _log.warning if event.what in _GRAVE else _log.info
    log(f"{event.kind}_{event.what}", subject=event.subject, reason=event.reason, **event.details)
