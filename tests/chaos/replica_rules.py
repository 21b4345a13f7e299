"""Rules about `replicas`: how many hosts hold a version when it becomes READY, and when one may be ABORTED for lack of them."""

from collections.abc import Iterator, Sequence
from itertools import chain

from tests.chaos.history import Event
from tests.chaos.schedule import LEASE, REPLICA_SECONDS
from tests.chaos.violations import Violation, of, short_of_holders

SHOWN = 5.0
"""Seconds after which the daemon's answers about nodes show what it knew when a version became READY."""
BARRED = 60.0
"""Seconds for which the daemon places no replica of a version on a node that reported a problem with it."""
_LATE = 2 * LEASE + SHOWN  # until a node whose fault has ended is live again, and was seen so


def holders(events: Sequence[Event]) -> Iterator[Violation]:
    """A version becomes READY once the daemon has all of it, with two replicas, and as many live nodes besides as it takes.

    A node that a fault hits around that time may be gone before the daemon has noticed.
    """
    replicas = next((event["replicas"] for event in of(events, "run")), 1)
    seen = dict[int, Event]()
    for event in of(events, "version"):
        if event["state"] == "READY":
            seen.setdefault(event["number"], event)
            if replicas > 1 and not event.get("whole", True):
                yield Violation(event["t"], "holders", f"version {event['number']} is READY, and the daemon lacks pieces of it")
    for number, event in seen.items() if replicas > 2 else ():
        begin, end = event["before"], event["t"] + SHOWN
        found = max(_held(events, number, begin, end), key=len)
        if len(found) < replicas - 1 and not _disturbed(events, begin - _LATE, end):
            text = f"version {number} is READY with {replicas} replicas, and beside the daemon {sorted(found)} hold it"
            yield Violation(event["t"], "holders", text)


def needless(events: Sequence[Event]) -> Iterator[Violation]:
    """A version is ABORTED for lack of holders only with more than two replicas, and after a fault or a drain of nodes."""
    replicas = next((event["replicas"] for event in of(events, "run")), 1)
    for event in (event for event in of(events, "version") if short_of_holders(event)):
        begin = event["before"] - REPLICA_SECONDS - BARRED - _LATE
        if replicas <= 2 or not _disturbed(events, begin, event["t"]):
            text = f"version {event['number']} is ABORTED without a fault of a node: {event['why']}"
            yield Violation(event["t"], "needless abort", text)


def _held(events: Sequence[Event], number: int, begin: float, end: float) -> Iterator[set[str]]:
    """Yield which live nodes hold a version at a time, and at each change until another time."""
    found, yielded = set[str](), False
    for event in (event for event in of(events, "node") if event["t"] <= end):
        if event["t"] > begin and not yielded:
            yielded = True
            yield set(found)
        found.discard(event["name"])
        if event["state"] == "LIVE" and number in event.get("holds", ()):
            found.add(event["name"])
        if yielded:
            yield set(found)
    yield found


def _disturbed(events: Sequence[Event], begin: float, end: float) -> bool:
    """Return whether a node, or the daemon's knowledge of nodes, is not as it should be at some time of these."""
    down = dict[str, float]()
    for event in events:
        if event["kind"] == "node":
            if event["state"] == "LIVE":
                if (since := down.pop(event["name"], None)) is not None and since <= end and event["t"] >= begin:
                    return True
            else:
                down.setdefault(event["name"], event.get("before", event["t"]))
    spans = chain.from_iterable(map(_span, events))
    return any(since <= end for since in down.values()) or any(at <= end and until >= begin for at, until in spans)


def _span(event: Event) -> Iterator[tuple[float, float]]:
    """Yield begin and end of the effect of an event on a node, or on what the daemon knows of nodes; nothing for others."""
    if event["kind"] == "fault":
        kind, given = event["name"].partition(".")[0], event["given"]
        if kind in ("node", "daemon", "certificates") or (kind == "link" and _of_nodes(event["target"])):
            yield event["t"], event["t"] + given.get("seconds", 0.0) + given.get("down", 0.0)
    drained = event["kind"] in ("begin", "end") and event["name"] == "drain_node"
    if drained or (event["kind"] in ("death", "start", "ready") and _of_nodes(event["process"])):
        yield event["t"], event["t"]


def _of_nodes(name: str) -> bool:
    """Return whether a process or link is the daemon, or a node, or between them."""
    return name not in ("left", "right", "trainer", "operator")
