"""Badges: the word and the severity by which a state is shown, for the command, the status page and its data.

    badge("version", "READY")                     Badge("READY", "good")
    server_badge("ASLEEP", power="ASLEEP_1")      Badge("ASLEEP, level 1", "idle")
    health({"a": ServerState("SERVING", 4)}, 4)   counts of a fleet's servers, with the fleet's badge

States are the protocol's, by name.
"""

from collections.abc import Collection, Mapping
from typing import Literal, NamedTuple

Severity = Literal["good", "busy", "idle", "warn", "bad"]
"""good: as it should be. busy: on its way. idle: at rest, as ordered or ended. warn: look at it. bad: something failed."""

IMPORT_JOB = "import-"
"""Prefix of the jobs that import checkpoints."""

_SEVERITIES: Mapping[str, Mapping[Severity, str]] = {
    "server": {"good": "SERVING", "busy": "BOOTING STAGING APPLYING WAITING", "idle": "DRAINED ASLEEP", "bad": "FAILED LOST"},
    "move": {"good": "DONE", "busy": "STAGING APPLYING TRYING HOLDING MOVING", "warn": "BACK", "bad": "STOPPED FAILED"},
    "version": {"good": "READY", "busy": "UPLOADING", "idle": "RETIRED", "bad": "ABORTED"},
    "publisher": {"good": "ACTIVE", "busy": "REGISTERING", "idle": "FENCED", "warn": "GONE", "bad": "REJECTED"},
    "node": {"good": "LIVE", "idle": "DRAINED", "bad": "LOST"},
    "install": {"good": "COMMITTED", "busy": "STAGING APPLYING", "bad": "FAILED"},
    "check": {"good": "ok", "warn": "warn", "bad": "fail"},
    "event": {
        "good": "ready serving done store_back",
        "warn": "back",
        "bad": "failed lost stopped aborted rejected differs altered store_lost",
    },
}
_SEVERITY_OF = {
    (kind, state): severity
    for kind, severities in _SEVERITIES.items()
    for severity, states in severities.items()
    for state in states.split()
}
_POWERS = {"ASLEEP_1": "level 1", "ASLEEP_2": "level 2", "WEIGHTS_AWAKE": "weights awake"}


class Badge(NamedTuple):
    """The word for a state, and the severity that selects its colour."""

    text: str
    severity: Severity


def badge(kind: str, state: str) -> Badge:
    """Return the badge of a state: of a server, move, version, publisher, node, install, check, or of what an event tells."""
    return Badge(state, _SEVERITY_OF.get((kind, state), "idle"))


def server_badge(state: str, *, power: str = "", ahead: bool = False, in_flight: int = 0) -> Badge:
    """Return a server's badge: its state with its level of sleep, requests in flight while it drains, or `ahead` of READY."""
    notes = {
        "ASLEEP": _POWERS.get(power, ""),
        "DRAINED": f"{in_flight} in flight" if in_flight else "",
        "SERVING": "ahead" if ahead else "",
        "STAGING": "ahead" if ahead else "",
    }
    note = notes.get(state, "")
    return Badge(f"{state}, {note}" if note else state, badge("server", state).severity)


def publisher_badge(state: str, job: str) -> Badge:
    """Return a publisher's badge. An import ends once its version is READY; a trainer that has gone may have failed."""
    if state == "GONE" and job.startswith(IMPORT_JOB):
        return Badge("FINISHED", "idle")
    return badge("publisher", state)


class ServerState(NamedTuple):
    """State and version of a server. `staged`: it has staged its next version, and serves this one while it is WAITING."""

    state: str
    version: int
    staged: bool = False

    @property
    def serves(self) -> bool:
        """Whether it answers requests."""
        return self.state in ("SERVING", "STAGING") or (self.state == "WAITING" and self.staged and self.version > 0)


class Health(NamedTuple):
    """How many of a fleet's servers are where.

    `serving`: they answer requests. `behind`: they should have the fleet's version, and do not. `failed`: they are FAILED, or
    failed in the last move and are not at its version.
    """

    servers: int
    serving: int
    behind: int
    failed: int
    lost: int
    badge: Badge


def health(servers: Mapping[str, ServerState], wanted: int, move: str = "", move_failed: Collection[str] = ()) -> Health:
    """Return the health of a fleet.

    Args:
        servers: State and version of each server, by its id.
        wanted: Version that the fleet wants; 0: none.
        move: State of the last move; empty without one.
        move_failed: Ids of servers that failed in the last move.
    """
    states = [server.state for server in servers.values()]
    lost = states.count("LOST")
    failed = sum(
        server.state == "FAILED" or (id in move_failed and server.version != wanted and server.state != "LOST")
        for id, server in servers.items()
    )
    should = [server for server in servers.values() if server.state not in ("LOST", "FAILED", "ASLEEP", "DRAINED")]
    behind = sum(server.version != wanted for server in should) if wanted else 0
    serving = sum(server.serves for server in servers.values())
    shown = _fleet_badge(states, wanted, move, behind, failed, lost)
    return Health(len(states), serving, behind, failed, lost, shown)


def _fleet_badge(states: list[str], wanted: int, move: str, behind: int, failed: int, lost: int) -> Badge:
    troubles = [f"{lost} LOST"] * bool(lost) + [f"{failed} FAILED"] * bool(failed) + [move] * (move == "STOPPED")
    if troubles:
        return Badge(", ".join(troubles), "bad")
    moving = badge("move", move)
    if move and move not in ("DONE", "FAILED"):
        return moving
    if not states:
        return Badge("NO SERVERS", "idle")
    if not wanted:
        return Badge("NO VERSION", "idle")
    if behind:
        busy = any(badge("server", state).severity == "busy" for state in states)
        return Badge("UPDATING", "busy") if busy else Badge("BEHIND", "warn")
    if all(state in ("ASLEEP", "DRAINED") for state in states):
        return Badge("OUT OF SERVICE", "idle")
    return Badge("UP TO DATE", "good")


def trouble(fleet: str, what: str, reasons: Mapping[str, str], of: int) -> str:
    """Return the sentence about servers of a fleet that have a problem.

    Args:
        fleet: Name of the fleet.
        what: The problem, such as `LOST`.
        reasons: The reason for each of the servers, by its id.
        of: Number of all servers of the fleet.
    """
    each = "; ".join(f"servers/{id}: {reason}" for id, reason in reasons.items())
    return f"fleet {fleet}: {len(reasons)} of {of} server{'' if of == 1 else 's'} {what}: {each}"
