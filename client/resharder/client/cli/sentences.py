"""Events as sentences: lines of `resharder events`."""

import json
from collections.abc import Iterator, Mapping

from resharder.client.cli.output import time_of
from resharder.client.cli.table import paint
from resharder.client.cli.terminal import styled
from resharder.client.operator.answers import DaemonEvent
from rich.text import Text

_STATES = {"back", "lost", "failed", "stopped", "aborted", "rejected", "ready", "done", "serving"}


def event_line(event: DaemonEvent) -> Text:
    """Return an event as one line: time, subject, what happened, details and reason."""
    line = styled(f"{time_of(event.time)}  {event.subject}  ")
    line.append_text(paint(event.what, event.what.upper() if event.what in _STATES else "-"))
    details = ", ".join(_details(event.details))
    line.append_text(styled(f" ({details})" if details else ""))
    return line.append_text(styled(f": {event.reason}" if event.reason else ""))


def _details(details: Mapping[str, str]) -> Iterator[str]:
    for name, value in sorted(details.items()):
        if name == "request":
            yield from _request(value)
        elif value not in ("", "0"):
            yield f"{_words(name)} {value.lower() if name == 'strategy' else value}"


def _request(text: str) -> Iterator[str]:
    """Yield the fields of an operator's request, which is JSON; a request too long for the journal is cut off, and not shown."""
    try:
        request = json.loads(text)
    except ValueError:
        return
    fleet = request.pop("fleet", {})
    fields = fleet if isinstance(fleet, dict) else {}
    for name, value in {**fields, **request}.items():
        if name not in ("name", "update_mask", "request_id", "reason", "fleet"):
            yield from _field(name, value)


def _field(name: str, value: object) -> Iterator[str]:
    if isinstance(value, dict):
        kind = str(value.pop("kind", "")).lower()
        inner = " ".join(text for field, one in value.items() for text in _field(field, one))
        yield " ".join(filter(None, (_words(name), kind.replace("_", " "), inner)))
    elif isinstance(value, bool):
        yield _words(name) if value else f"not {_words(name)}"
    elif isinstance(value, list):
        yield f"{_words(name)} {' and '.join(map(str, value))}"
    else:
        yield f"{_words(name)} {str(value).lower() if str(value).isupper() else value}"


def _words(name: str) -> str:
    return name.replace("_", " ")
