"""A model of the service, and the rules that every history has to keep. Pure functions of a list of events (`history`).

    for violation in check(read(file), documented):
        print(violation)

Each rule is a function from events to violations; RULES lists them. Those about nodes are in `home_rules` and
`replica_rules`, those about security in `access_rules`, those about another region in `region_rules`.
"""

from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass

from tests.chaos.access_rules import intrusions, pages, plain
from tests.chaos.history import Event
from tests.chaos.home_rules import gone, lost, moved_to_lost, other_hosts
from tests.chaos.region_rules import followed, served_there
from tests.chaos.replica_rules import holders, needless
from tests.chaos.violations import Violation, is_lost, of, published
from tests.support.client_traffic import first_wrong

BOUNDS = {"publish": 260.0}
"""Seconds in which an operation has to end; OPERATION_BOUND for others."""
OPERATION_BOUND = 60.0
_SUPERSEDED = "was superseded and has left this engine: send the request again"
"""Answer of an engine to a request of an API server that was late by more than the grace of an adapter's version."""
HARNESS = ("JOB_ENDED",)
"""Outcomes of operations that are not the service's: the trainer was killed by a fault."""


def check(events: Sequence[Event], documented: Collection[str]) -> list[Violation]:
    """Return every violation of every rule, in order of time.

    Args:
        events: The history.
        documented: Reasons that a refusal may have.
    """
    found = [violation for rule in RULES for violation in rule(events)]
    return sorted([*found, *undocumented(events, documented)], key=lambda violation: violation.t)


# Answers


def wrong_token(events: Sequence[Event]) -> Iterator[Violation]:
    """Every token is one that the named versions, one after the other, would have given."""
    for event in of(events, "answer"):
        made = {version: [bit == "1" for bit in bits] for version, bits in event["made"].items()}
        if (at := first_wrong(event["versions"], made)) is not None:
            named = ",".join(event["versions"])
            yield Violation(event["t"], "wrong token", f"{event['server']}: token {at} of an answer of version {named}: {event}")


def wrong_label(events: Sequence[Event]) -> Iterator[Violation]:
    """Every named version exists and made a token of the answer, the first one its first token."""
    known = {event["number"] for event in of(events, "version")} | {number for number, _ in published(events)}
    for event in of(events, "answer"):
        for version in event["versions"]:
            if not version.isdigit() or int(version) not in known:
                yield Violation(event["t"], "wrong label", f"{event['server']} names version {version!r}, which does not exist")
            elif "1" not in event["made"][version]:
                yield Violation(event["t"], "wrong label", f"{event['server']} names version {version}, no token is its: {event}")
            elif version == event["versions"][0] and event["made"][version][0] == "0":
                yield Violation(event["t"], "wrong label", f"{event['server']} names version {version} first: {event}")


def adapted(events: Sequence[Event]) -> Iterator[Violation]:
    """Every token of an answer by the adapter is one that its version would have given beside the named ones of the base."""
    for event in of(events, "adapted"):
        made = {version: [bit == "1" for bit in bits] for version, bits in event["made"].items()}
        if (at := first_wrong(event["versions"], made)) is not None:
            named = f"{','.join(event['versions'])};{event['adapter']}"
            yield Violation(event["t"], "wrong token", f"{event['server']}: token {at} of an answer of version {named}: {event}")


def not_ready(events: Sequence[Event]) -> Iterator[Violation]:
    """A version that is served becomes READY, unless the fleet may serve ahead of READY."""
    never = {event["number"] for event in of(events, "version")} - {number for number, _ in published(events)}
    never -= {event["number"] for event in of(events, "version") if event["state"] in ("READY", "RETIRED")}
    ordered = (event["t"] for event in of(events, "begin") if event["name"] == "ahead" and event["given"]["on"] is not False)
    by_rule = (event["before"] for event in of(events, "fleet") if event.get("ahead"))
    ahead = min([*ordered, *by_rule], default=1e9)
    for event in of(events, "answer"):
        for version in event["versions"]:
            if version.isdigit() and int(version) in never and event["t"] < ahead:
                yield Violation(event["t"], "not READY", f"{event['server']} served version {version}, which was never READY")


def turned(events: Sequence[Event]) -> Iterator[Violation]:
    """Without an answer, a request gets 503 with the gate's reason; anything else needs a server that was killed."""
    down = _down(events)
    for event in of(events, "turned"):
        if (event["status"] == 503 and "not serving: " in event["reason"]) or _SUPERSEDED in event["reason"]:
            continue
        if not any(begin <= event["t"] and event["began"] <= end for begin, end in down[event["server"]]):
            what = f"{event['server']} answered {event['status']} without a fault: {event['reason']}"
            yield Violation(event["t"], "turned away", what)


def _down(events: Sequence[Event]) -> dict[str, list[tuple[float, float]]]:
    """Return, for each server, when a fault of its processes had effect: until it is ready again."""
    found: dict[str, list[tuple[float, float]]] = defaultdict(list)
    begun: dict[str, float] = {}
    for event in events:
        if event["kind"] == "fault" and event["name"] == "server.kill":
            begun.setdefault(event["target"], event["t"])
        if event["kind"] == "fault" and event["name"] == "server.stop":
            found[event["target"]].append((event["t"], event["t"] + event["given"]["seconds"] + 30))
        if event["kind"] == "ready" and event["process"] in begun:
            found[event["process"]].append((begun.pop(event["process"]), event["t"]))
        if event["kind"] == "peace" and event["phase"] == "shutdown":
            for name in ("left", "right"):
                begun.setdefault(name, event["t"])
    for server, at in begun.items():
        found[server].append((at, float("inf")))
    return found


def served_back(events: Sequence[Event]) -> Iterator[Violation]:
    """A server goes back to an older version only by an order, after a failed move, or if the newer one was aborted or lost."""
    last: dict[tuple[str, str], tuple[int, float]] = {}
    orders, refusals = _orders(events), _refusals(events)
    for event in sorted(of(events, "answer"), key=lambda event: event.get("ended", event["t"])):
        if not all(version.isdigit() for version in event["versions"]):
            continue
        place, end = (event["server"], event["client"]), event.get("ended", event["t"])
        numbers = [int(version) for version in event["versions"]]
        for number in [*numbers, *numbers[-2:-1]] if _returned(event) else numbers:
            before, since = last.get(place, (0, 0.0))
            ordered = any(order.allows(before, number, since, end) for order in orders)
            if number < before and not ordered and not any(refused == before and t <= end + 2 for refused, t in refusals):
                text = f"{event['server']} went from version {before} back to {number}, seen by client {event['client']}"
                yield Violation(event["t"], "served back", text)
            last[place] = (number, end if number != before else since)


def mixed(events: Sequence[Event]) -> Iterator[Violation]:
    """Once a server answers with the version of an atomic move, no later request to any server gets the version before it."""
    for begin, end, before, after in _atomic_moves(events):
        answers = [event for event in of(events, "answer") if event["began"] >= begin and event.get("ended", event["t"]) <= end]
        first = min((event.get("ended", event["t"]) for event in answers if str(after) in event["versions"]), default=end)
        for event in answers:
            if event["began"] > first and event["versions"][0] == str(before):
                text = (
                    f"{event['server']} gave version {before} at {event['began']:.1f} s, after version {after} at {first:.1f} s"
                )
                yield Violation(event["t"], "mixed versions", text)


_STRICT = 30.0  # seconds after which every server that could be reached has renewed its lease under an atomic fleet


def _atomic_moves(events: Sequence[Event]) -> Iterator[tuple[float, float, int, int]]:
    """Yield begin, end and versions of atomic moves that did not fail, while nothing has followed them.

    A server that is out of reach when its fleet becomes atomic does not know it, so the first seconds do not count.
    """
    moves: dict[int, list[Event]] = defaultdict(list)
    last, strict = dict[int, float](), dict[int, float]()
    current, since = 0, float("inf")
    for event in of(events, "fleet"):
        since = min(since, event["t"]) if event["strategy"] == "ATOMIC" else float("inf")
        id = event["move"][0] if event["move"] else 0
        if id != current:
            last[current] = event["before"]
        current = id
        moves[id].append(event)
        strict[id] = since + _STRICT
    for id, seen in moves.items():
        states, kinds = (
            {event["move"][1] for event in seen if event["move"]},
            {event["move"][4] for event in seen if event["move"]},
        )
        if kinds == {"ATOMIC"} and not states & {"BACK", "FAILED"}:
            yield max(seen[0]["t"], strict[id]), last.get(id, events[-1]["t"]), seen[0]["move"][2], seen[0]["move"][3]


def _returned(event: Event) -> bool:
    """Return whether an answer ends with the version before the last one that it names."""
    made = [event["made"][version] for version in event["versions"][-2:]]
    return len(made) == 2 and made[0].endswith("1") and made[1].endswith("0") and "1" in made[1]


@dataclass(frozen=True)
class Order:
    """An operator's order that may move servers back, while it may have effect.

    Attributes:
        to: The version; 0 for any.
        newest: The newest version that existed when the call ended; later ones are not affected.
        ready: The newest READY version when the call began, for an order that moves servers from later ones alone.
    """

    begin: float
    end: float
    to: int
    newest: int
    ready: int = 0

    def allows(self, before: int, now: int, since: float, until: float) -> bool:
        return self.begin <= until and since <= self.end and self.to in (0, now) and self.ready < before <= self.newest


_TRANSIENT = 60.0  # seconds in which servers follow an order that does not name a version


def _orders(events: Sequence[Event]) -> list[Order]:
    found, open_, newest, ready = list[Order](), dict[int, tuple[Event, int]](), 0, 0
    for event in events:
        if event["kind"] == "version":
            newest = max(newest, event["number"])
            ready = max(ready, event["number"] if event["state"] == "READY" else 0)
        if event["kind"] == "begin":
            open_[event["id"]] = event, ready
        if event["kind"] == "end" and (begun := open_.pop(event["id"], None)):
            found += _order(*begun, event["t"], event["result"].get("wanted", 0), newest)
    for begun in open_.values():
        found += _order(*begun, float("inf"), 0, newest)
    return found


def _order(begun: Event, ready: int, end: float, wanted: int, newest: int) -> list[Order]:
    name, at, given = begun["name"], begun["t"], begun["given"]
    if name in ("target", "rollback", "pin"):
        return [Order(at, float("inf"), wanted, int(1e9) if name != "rollback" else newest + 1)]
    if name in ("latest", "back"):
        return [Order(at, end + _TRANSIENT, 0, newest + 1)]
    ready_only = given.get("on", True) is False or given.get("kind", "ALL_AT_ONCE") != "ALL_AT_ONCE" or given.get("bound")
    if name in ("ahead", "strategy", "skew") and ready_only:
        return [Order(at, end + _TRANSIENT, 0, newest + 1, ready)]
    return []


def _refusals(events: Sequence[Event]) -> list[tuple[int, float]]:
    """Return the versions that the fleet refused, or that were aborted or lost, with the time."""
    ended = (event for event in of(events, "version") if event["state"] in ("ABORTED", "ABSENT") or is_lost(event))
    found = [(event["number"], event.get("before", event["t"])) for event in ended]
    for event in of(events, "fleet"):
        found += [(number, event["t"]) for number in event["refused"]]
        move = event["move"]
        if move and move[1] in ("BACK", "FAILED"):
            found.append((move[3], event["t"]))
    return found


# Versions


def ready_lost(events: Sequence[Event]) -> Iterator[Violation]:
    """A version that was READY is READY or RETIRED from then on."""
    ready: dict[int, float] = {}
    for event in of(events, "version", "end"):
        if event["kind"] == "version":
            if event["state"] == "READY":
                ready.setdefault(event["number"], event["t"])
            lost = event["state"] in ("ABORTED", "UPLOADING", "ABSENT")
            if lost and ready.get(event["number"], float("inf")) < event.get("asked", event["t"]):
                text = f"version {event['number']} was READY and is {event['state']}: {event.get('why', '')}"
                yield Violation(event["t"], "READY lost", text)
        elif event["name"] == "publish" and event["outcome"] == "ok":
            ready.setdefault(event["result"]["version"], event["t"])
    for number in {number for number, _ in published(events)}:
        states = [event["state"] for event in of(events, "version") if event["number"] == number]
        if states and not {"READY", "RETIRED"} & set(states):
            yield Violation(events[-1]["t"], "READY lost", f"version {number} was published, the daemon has it as {states}")


def numbers(events: Sequence[Event]) -> Iterator[Violation]:
    """A number has one step for ever, and later publications have greater numbers and no smaller epochs."""
    steps: dict[int, tuple[int, float]] = {}
    for event in of(events, "version"):
        step, _ = steps.setdefault(event["number"], (event["step"], event["t"]))
        if step != event["step"]:
            text = f"version {event['number']} is of step {event['step']}, it was of step {step}"
            yield Violation(event["t"], "number reused", text)
    begun = {event["id"]: event for event in of(events, "begin")}
    done = [(begun[event["id"]], number, event) for number, event in published(events) if event["id"] in begun]
    for i, (_, number, ended) in enumerate(done):
        step = begun[ended["id"]]["given"]["step"]
        if number in steps and steps[number][0] != step:
            yield Violation(ended["t"], "number reused", f"step {step} is version {number}, which is of step {steps[number][0]}")
        for later, other, end in done[i + 1 :]:
            same = later["given"]["step"] == step
            if later["t"] >= ended["t"] and (other < number or (other == number and not same)):
                yield Violation(end["t"], "number order", f"version {other} was published after version {number}")
            if later["t"] >= ended["t"] and end["result"]["epoch"] < ended["result"]["epoch"]:
                yield Violation(end["t"], "number order", f"epoch {end['result']['epoch']} after {ended['result']['epoch']}")


# Operations and processes


def stuck(events: Sequence[Event]) -> Iterator[Violation]:
    """Every operation ends within its bound."""
    ends = {event["id"]: event["t"] for event in of(events, "end")}
    for event in of(events, "begin"):
        bound = BOUNDS.get(event["name"], OPERATION_BOUND)
        took = ends.get(event["id"], events[-1]["t"]) - event["t"]
        if took > bound or event["id"] not in ends:
            yield Violation(
                event["t"], "stuck", f"{event['name']} {event['given']} took {took:.0f} s, the bound is {bound:.0f} s"
            )


def undocumented(events: Sequence[Event], documented: Collection[str]) -> Iterator[Violation]:
    """Every call is answered with a result or a documented reason, and no process logs a fault of its own."""
    for event in of(events, "end"):
        reasons = [event["outcome"]] if event["outcome"] not in ("ok", *HARNESS) else []
        reasons += [rank["reason"] for rank in event["result"].get("ranks", ()) if rank["reason"]]
        for reason in reasons:
            if reason == "INTERNAL" or reason not in documented:
                yield Violation(event["t"], "INTERNAL", f"{event['name']} ended with {reason}: {event['text']} {event['result']}")
    for event in of(events, "log", "trouble"):
        yield Violation(event["t"], "INTERNAL", f"{event.get('process', 'harness')}: {event['text']}")


_KILLS = (
    "daemon.kill",
    "daemon.disarm",
    "region.kill",
    "region.disarm",
    "trainer.kill",
    "server.kill",
    "node.kill",
    "node.disarm",
    "node.gone",
)


def unexpected_death(events: Sequence[Event]) -> Iterator[Violation]:
    """A process ends only by a fault of its own."""
    faulty: dict[str, bool] = defaultdict(bool)
    for event in events:
        if event["kind"] == "fault" and event["name"] in _KILLS:
            faulty |= dict.fromkeys([event["target"], *event["given"].get("nodes", ())], True)
        if event["kind"] in ("ready", "killing"):
            faulty[event["process"]] = event["kind"] == "killing" or bool(event.get("failpoint"))
        if event["kind"] == "peace" and event["phase"] == "shutdown":
            return
        if event["kind"] in ("death", "failed") and not faulty[event["process"]]:
            text = f"{event['process']} ended with {event.get('status', event.get('text'))} without a fault"
            yield Violation(event["t"], "unexpected death", text)


def peace(events: Sequence[Event]) -> Iterator[Violation]:
    """Once faults end, everything arrives at its target within its bound, and nothing is left behind."""
    for event in of(events, "peace"):
        for problem in event.get("problems", ()):
            yield Violation(event["t"], f"peace, {event['phase']}", problem)


Rule = Callable[[Sequence[Event]], Iterator[Violation]]
RULES: tuple[Rule, ...] = (
    wrong_token, wrong_label, adapted, not_ready, turned, served_back, mixed, ready_lost, numbers, stuck, unexpected_death, peace,
    lost, moved_to_lost, gone, other_hosts, holders, needless, intrusions, plain, pages, followed, served_there,
)  # fmt: skip
