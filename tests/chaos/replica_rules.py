"""Rules about `replicas`: how many hosts hold a version when it becomes READY, and when one may be ABORTED for lack of them."""

from collections.abc import Iterator, Sequence
from itertools import chain

from tests.chaos.history import Event
from tests.chaos.home_rules import begun_of, homes_of
from tests.chaos.schedule import LEASE, REPLICA_SECONDS
from tests.chaos.violations import Violation, of, short_of_holders

SHOWN = 1.0
"""Seconds between the daemon's answers about versions and those about nodes, two polls of an observer."""
BARRED = 60.0
"""Seconds for which the daemon places replicas of a version last on a node that reported a problem with it."""
_LATE = 2 * LEASE + 5.0  # until a node whose fault has ended is live again, and was seen so


def holders(events: Sequence[Event]) -> Iterator[Violation]:
    """A version becomes READY once the daemon has all of it, with several replicas, and as many live nodes besides as it takes.

    Nodes are those that the daemon shows, unless a node, its process or the daemon's has changed since the version began: until
    the new process of a node has reported, the daemon counts what the last one held.
    """
    replicas = next((event["replicas"] for event in of(events, "run")), 1)
    seen = dict[int, Event]()
    for event in of(events, "version"):
        if event["state"] == "READY":
            seen.setdefault(event["number"], event)
            if replicas > 1 and not event.get("whole", True):
                yield Violation(event["t"], "holders", f"version {event['number']} is READY, and the daemon lacks pieces of it")
    for number, event in seen.items() if replicas > 1 else ():
        found = holders_of(events, number, event)
        if len(found) < replicas - 1 and not changes(events, begun_of(events, number), event["t"]):
            text = f"version {number} is READY with {replicas} replicas, and beside the daemon {sorted(found)} hold it"
            yield Violation(event["t"], "holders", text)


def holders_of(events: Sequence[Event], number: int, ready: Event) -> set[str]:
    """Return the nodes that held a version when it became READY: those that were shown so, and those on which ranks wrote it."""
    shown = max(_held(events, number, ready["before"], ready["t"] + SHOWN), key=len)
    return shown | {f"nodes/{node}" for node in homes_of(events, number)}


def changes(events: Sequence[Event], begin: float, end: float) -> bool:
    """Return whether a node's state, its process or the daemon's has changed between these times, or shortly after."""
    states = dict[str, str]()
    for event in events:
        now = begin <= event["t"] <= end + SHOWN
        if event["kind"] == "node":
            if states.setdefault(event["name"], event["state"]) != event["state"] and now:
                return True
            states[event["name"]] = event["state"]
        elif now and (_is_drain(event) or (event["kind"] in ("start", "ready", "death") and _of_nodes(event["process"]))):
            return True
    return False


def needless(events: Sequence[Event]) -> Iterator[Violation]:
    """A version is ABORTED for lack of holders only with several replicas, and after a fault or a drain of nodes."""
    replicas = next((event["replicas"] for event in of(events, "run")), 1)
    for event in (event for event in of(events, "version") if short_of_holders(event)):
        begin = event["before"] - REPLICA_SECONDS - BARRED - _LATE
        if replicas == 1 or not _disturbed(events, begin, event["t"]):
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
    if _is_drain(event) or (event["kind"] in ("death", "start", "ready") and _of_nodes(event["process"])):
        yield event["t"], event["t"]


def _of_nodes(name: str) -> bool:
    """Return whether a process or link is the daemon, or a node, or between them."""
    return name not in ("left", "right", "trainer", "operator")


def _is_drain(event: Event) -> bool:
    return event["kind"] in ("begin", "end") and event["name"] == "drain_node"
