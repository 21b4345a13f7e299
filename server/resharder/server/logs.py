"""Logs on standard error, one event per line: each change of state once, with its reason, as in the event log."""

import logging
import sys
from typing import Any

import structlog
from resharder.server.infra.descriptors import FewWords
from resharder.server.infra.event_log import Event

_GRAVE = {"aborted", "back", "differs", "failed", "lost", "stopped", "store_lost"}
_log = structlog.get_logger("resharder.events")


def configure_logs(form: str, level: str) -> None:
    """Configure logging. `form` is console or json."""
    last: Any = (
        structlog.processors.JSONRenderer() if form == "json" else structlog.dev.ConsoleRenderer(colors=sys.stderr.isatty())
    )
    processors = [
        FewWords(),
        structlog.stdlib.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        *([structlog.processors.format_exc_info] if form == "json" else []),
        last,
    ]
    structlog.configure(
        processors=processors,
        wrapper_class=structlog.make_filtering_bound_logger(logging.getLevelNamesMapping()[level.upper()]),
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
        cache_logger_on_first_use=False,
    )


def log_event(event: Event) -> None:
    """Log an event of the journal: as a warning if a server, version or move failed, else as information."""
    say = _log.warning if event.what in _GRAVE else _log.info
    say(f"{event.kind}_{event.what}", subject=event.subject, reason=event.reason, **event.details)
