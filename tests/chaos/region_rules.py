"""Rules about a region: it has home's versions and labels, and no others."""

from collections import defaultdict
from collections.abc import Iterator, Sequence

from tests.chaos.history import Event
from tests.chaos.violations import Violation, of


def followed(events: Sequence[Event]) -> Iterator[Violation]:
    """A version that is READY in the region was READY at home with this step, epoch and fingerprint, and has its weights."""
    home: dict[int, set[tuple[object, ...]]] = defaultdict(set)
    for event in of(events, "version"):
        if event["state"] == "READY":
            home[event["number"]].add(_label(event))
    for event in (event for event in of(events, "region") if event["what"] == "ready"):
        number, at = event["number"], event["t"]
        if number not in home:
            yield Violation(at, "region", f"version {number} is READY in the region, and was not at home")
        elif _label(event) not in home[number]:
            yield Violation(at, "region", f"version {number} is {_label(event)} in the region, at home {sorted(home[number])}")
        if not event["same"]:
            yield Violation(at, "region", f"version {number} has other weights in the region than step {event['step']}")


def served_there(events: Sequence[Event]) -> Iterator[Violation]:
    """A server in the region serves versions that were READY there."""
    ready = {event["number"] for event in of(events, "region") if event["what"] == "ready"}
    for event in of(events, "region"):
        if event["what"] == "served" and event["number"] not in ready:
            yield Violation(event["t"], "served in the region", f"version {event['number']}, which was not READY there")


def _label(event: Event) -> tuple[object, ...]:
    return event["step"], event["epoch"], event.get("fingerprint", "")
