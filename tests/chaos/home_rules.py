"""Rules about nodes: versions whose pieces nodes alone hold, and which processes share memory with which."""

from collections.abc import Iterator, Sequence
from itertools import islice, pairwise

from tests.chaos.history import Event
from tests.chaos.schedule import LEASE, NODES
from tests.chaos.violations import Violation, is_lost, of, published

SOON = 30.0
"""Seconds in which an install that has begun before its version was lost may end."""
ENDS = 90.0
"""Seconds in which a version ends whose only holders were killed: their lease, and a daemon that is down or stopped meanwhile."""
_AWAY = LEASE / 2
"""Seconds of silence of a node after which its lease may end: it reports three times per lease, and a busy machine is slow."""


def lost(events: Sequence[Event]) -> Iterator[Violation]:
    """A version is LOST only with one replica, before the daemon has copied it, and after a node that held it was gone."""
    replicas = next((event["replicas"] for event in of(events, "run")), 2)
    for event in (event for event in of(events, "version") if is_lost(event)):
        number, at = event["number"], event["t"]
        text, homes, since = f"version {number} is lost: {event['why']}", homes_of(events, number), begun_of(events, number)
        if replicas > 1:
            yield Violation(at, "lost", f"{text}, with {replicas} replicas")
        if (whole := _whole(events, number)) < at:
            yield Violation(at, "lost", f"{text}, and the daemon had all of it at {whole:.1f} s")
        if not any(begin <= at and end >= since for node in homes for begin, end in _away(events, node)):
            yield Violation(at, "lost", f"{text}, and no node that held it was gone after {since:.1f} s: {sorted(homes)}")


def moved_to_lost(events: Sequence[Event]) -> Iterator[Violation]:
    """No server moves to a version that is LOST. One that serves it already may do so until its fleet moves it."""
    since = {event["number"]: event["t"] + SOON for event in reversed(list(of(events, "version"))) if is_lost(event)}
    answers = [event for event in of(events, "answer") if since and all(map(str.isdigit, event["versions"]))]
    for event in answers:
        earlier = [one for one in answers if one["server"] == event["server"] and one["ended"] < event["began"]]
        last = max(earlier, key=lambda one: one["ended"], default=None)
        before = [] if last is None else [(last["versions"][-1], last["ended"])]
        path = [*before, *((version, event["began"]) for version in event["versions"])]
        for (version, at), (later, _) in pairwise(path):
            if later != version and at > since.get(int(later), float("inf")):
                text = f"{event['server']} moved from version {version} to {later}, which was lost {at - since[int(later)]:.0f} s"
                yield Violation(event["t"], "moved to a lost version", f"{text} and {SOON:.0f} s before")


def gone(events: Sequence[Event]) -> Iterator[Violation]:
    """A version that was on killed nodes alone is ABORTED or LOST, and no server answers with it.

    One on the direct path may be served until then, ahead of READY. If the daemon had copied all of it before, it may be READY.
    """
    begun = {event["id"]: event["given"] for event in of(events, "begin")}
    for event in of(events, "alone"):
        for number in event["versions"]:
            seen = [one for one in of(events, "version") if one["number"] == number]
            if any(one["state"] == "READY" and one.get("whole") for one in seen):
                continue
            text = f"version {number}, which was on {', '.join(event['nodes'])} alone when these were killed,"
            ended = next((one["t"] for one in seen if one["state"] in ("ABORTED", "ABSENT") or is_lost(one)), float("inf"))
            if events[-1]["t"] > event["t"] + ENDS and ended > event["t"] + ENDS:
                yield Violation(event["t"] + ENDS, "gone", f"{text} is {seen[-1]['state'] if seen else 'not listed'}")
            ahead = all(begun[one["id"]].get("direct", True) for one in _publications(events, number))
            for answer in of(events, "answer"):
                if str(number) in answer["versions"] and (not ahead or answer["began"] > ended + ENDS):
                    yield Violation(answer["t"], "gone", f"{text} is served by {answer['server']}")


_PLACES = {"store": {"shared-memory", "http", "grpc"}, "grpc": {"grpc"}}
"""Transports of ranks by their place; on a node's host, all but that into the daemon's memory."""
_WORKERS = {"left": {"node"}, "right": {"shared-memory"}}
"""Transports that workers of a server cannot have."""


def other_hosts(events: Sequence[Event]) -> Iterator[Violation]:
    """Ranks and workers share memory with the host that they are on alone, and ranks have written versions on the node there."""
    begun = {event["id"]: event["given"] for event in of(events, "begin")}
    used = list[str]()
    for number, event in published(events):
        found = {rank["transport"] for rank in event["result"].get("ranks", ()) if rank.get("transport")}
        place = begun.get(event["id"], {}).get("place", "")
        used += found & {"node"} if place in NODES else ()
        if place and (wrong := found - _PLACES.get(place, {"node", "http", "grpc"})):
            yield Violation(event["t"], "other host", f"ranks at {place} delivered version {number} over {sorted(wrong)}")
    for event in of(events, "server"):
        if wrong := set(event["transports"]) & _WORKERS[event["name"]]:
            yield Violation(event["t"], "other host", f"workers of {event['name']} read over {sorted(wrong)}")
    for event in of(events, "run"):
        if "far" in event["nodes"] and any(published(events)) and not used:
            yield Violation(events[-1]["t"], "other host", "no rank has written a version on the node of its host")


def homes_of(events: Sequence[Event], number: int) -> set[str]:
    """Return the nodes on which ranks wrote a version, as seen while it was UPLOADING, and by its ranks."""
    seen = (event for event in of(events, "version") if event["number"] == number)
    found = {name.removeprefix("nodes/") for event in seen for name in event.get("homes", ())}
    begun = {event["id"]: event["given"] for event in of(events, "begin")}
    for event in _publications(events, number):
        found |= {begun[event["id"]]["place"] for rank in event["result"]["ranks"] if rank.get("transport") == "node"}
    return found


def _publications(events: Sequence[Event], number: int) -> Iterator[Event]:
    """Yield the ends of publications in which a rank had a version."""
    for event in of(events, "end"):
        ranks = event["result"].get("ranks", ()) if event["name"] == "publish" else ()
        if any(rank.get("version") == number for rank in ranks):
            yield event


def _away(events: Sequence[Event], node: str) -> Iterator[tuple[float, float]]:
    """Yield begin and end of times at which a node died, was silent, or was shown as lost."""
    for event in events:
        silent = event["kind"] == "fault" and event["name"] in ("node.stop", "link.silent") and event["target"] == node
        if silent and event["given"]["seconds"] > _AWAY:
            yield event["t"], event["t"] + event["given"]["seconds"]
        elif event["kind"] == "death" and event["process"] == node:
            yield event["t"] - 1.0, event["t"]  # a keeper looks a few times a second
        elif event["kind"] == "node" and event["name"] == f"nodes/{node}" and event["state"] == "LOST":
            yield event["before"], event["t"]


def begun_of(events: Sequence[Event], number: int) -> float:
    """Return a time before which a version was not there."""
    ids = {event["id"] for event in _publications(events, number)}
    begun = [event["t"] for event in of(events, "begin") if event["id"] in ids]
    seen = (event["before"] for event in of(events, "version") if event["number"] == number)
    return min([*begun, *islice(seen, 1)])


def _whole(events: Sequence[Event], number: int) -> float:
    """Return when the daemon was first seen to have all of a READY version."""
    seen = (e["t"] for e in of(events, "version") if e["number"] == number and e["state"] == "READY" and e.get("whole"))
    return next(seen, float("inf"))
