"""Rules about security and the daemon's pages: who is refused, and that no party speaks without TLS."""

from collections.abc import Iterator, Sequence

from tests.chaos.history import Event
from tests.chaos.violations import Violation, of

REFUSED = ("NOT_ALLOWED", "NO_IDENTITY", "401", "403")
"""Outcomes of an intrusion that the daemon refused."""
UNANSWERED = ("UNREACHABLE", "TIMEOUT", "0", "503")
"""Outcomes of an intrusion without an answer: the handshake fails, or the daemon is away."""


def intrusions(events: Sequence[Event]) -> Iterator[Violation]:
    """Every call that no role permits is refused, and some were tried in each run with security."""
    outcomes = set[str]()
    for event in of(events, "intrusion"):
        outcomes.add(event["outcome"])
        if event["outcome"] not in (*REFUSED, *UNANSWERED):
            yield Violation(event["t"], "intrusion", f"{event['party']} tried to {event['what']}: {event['outcome']}")
    run, peace = next(of(events, "run"), {}), list(of(events, "peace"))
    if run.get("security") and peace and not outcomes & set(REFUSED):
        yield Violation(events[-1]["t"], "intrusion", f"none was refused: {sorted(outcomes)}")


def plain(events: Sequence[Event]) -> Iterator[Violation]:
    """With security, no party has opened a connection without TLS."""
    if next(of(events, "run"), {}).get("security"):
        for event in of(events, "links"):
            for link, count in event["plain"].items():
                yield Violation(event["t"], "plain", f"{count} connections without TLS through {link}")


def pages(events: Sequence[Event]) -> Iterator[Violation]:
    """A page of the daemon is not answered only while the daemon is away, and only the probes may state that it is not ready."""
    for event in of(events, "page"):
        if event["status"] != 0 and not (event["status"] == 503 and event["path"] in ("/readyz", "/healthz")):
            yield Violation(event["t"], "page", f"{event['path']} answered {event['status']}: {event['text']}")
