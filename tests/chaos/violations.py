"""Violations, and views of a history, for all rules of the model."""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from tests.chaos.history import Event


@dataclass(frozen=True)
class Violation:
    """A promise that the history breaks."""

    t: float
    rule: str
    text: str

    def __str__(self) -> str:
        return f"{self.t:.1f} s  {self.rule}: {self.text}"


def of(events: Sequence[Event], *kinds: str) -> Iterator[Event]:
    """Yield the events of some kinds."""
    return (event for event in events if event["kind"] in kinds)


def published(events: Sequence[Event]) -> Iterator[tuple[int, Event]]:
    """Yield each published version with the end of its publication."""
    for event in of(events, "end"):
        if event["name"] == "publish" and event["outcome"] == "ok":
            yield event["result"]["version"], event


def is_lost(event: Event) -> bool:
    """Return whether an event shows a version as LOST: it was READY, and no process has some of its pieces."""
    return event["kind"] == "version" and event["state"] == "RETIRED" and str(event.get("why", "")).startswith("LOST:")


def short_of_holders(event: Event) -> bool:
    """Return whether an event shows a version that is ABORTED because too few hosts held it."""
    aborted = event["kind"] == "version" and event["state"] == "ABORTED"
    return aborted and re.search(r"have fewer than \d+ holders", str(event.get("why", ""))) is not None
