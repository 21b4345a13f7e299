"""The schedule of a storm: which fault and which operation happens when, from the seed alone.

Values that depend on the state of a run, such as the version of a rollback, are drawn as fractions (`pick`) and resolved when the
action runs.
"""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from resharder.converters.failpoints import FILE_POINTS, DaemonFilePoint, DaemonPoint, NodeFilePoint, NodePoint

LEASE = 8.0
STOP = 1.6 * LEASE
"""Seconds for which a process is stopped: past its lease."""
SERVERS = ("left", "right")
NODES = ("node", "far")
LINKS = (*SERVERS, "trainer", "operator", *NODES, "data", *(f"{name}-data" for name in NODES))
"""Links to the daemon's RPCs, by the caller; `data` to its data port, and `node-data` and `far-data` to those of the nodes."""
_PARTS = ("api", "engine", "worker", "api", "engine", "worker", "all")
_REACHED_AT_START = ("serve.listen", "start.read", "pool.write", "reserve.write", "server.claim", "server.attach")
Given = dict[str, Any]
Draw = Callable[[random.Random], tuple[str, Given]]


@dataclass(frozen=True)
class Action:
    """A fault or an operation at a time of its storm."""

    at: float
    kind: str
    name: str
    given: Given = field(default_factory=dict)

    def __str__(self) -> str:
        return f"{self.at:6.1f} s  {self.kind:9} {self.name} {self.given or ''}"


def replicas_of(seed: int) -> int:
    """Return the daemon's `replicas` in the runs of a seed."""
    return 2 - seed % 2


def draw(seed: str, seconds: float, *, boots: int = 1) -> list[Action]:
    """Return the actions of one storm, in order.

    Args:
        seed: Seed of this storm.
        seconds: Length of the storm.
        boots: Bound on the faults after which a vLLM server has to boot, and on those after which the trainer has to.
    """
    chance = random.Random(seed)
    actions = [*_spread(chance, seconds, 2.0, "operation", OPERATIONS), *_spread(chance, seconds, 5.0, "fault", FAULTS)]
    kept, left = [], {"server.kill": boots, "trainer.kill": boots}
    for action in sorted(actions, key=lambda action: action.at):
        if action.name in left:
            left[action.name] -= 1
        if left.get(action.name, 0) >= 0:
            kept.append(action)
    return kept


def _spread(chance: random.Random, seconds: float, mean: float, kind: str, table: dict[Draw, int]) -> list[Action]:
    found, at = [], chance.expovariate(1 / mean)
    while at < seconds:
        (choice,) = chance.choices(list(table), list(table.values()))
        name, given = choice(chance)
        found.append(Action(round(at, 1), kind, name, given))
        at += chance.expovariate(1 / mean)
    return found


# Operations


def _publish(chance: random.Random) -> tuple[str, Given]:
    return "publish", {"retry": chance.random() < 0.5, "direct": chance.random() < 0.7}


def _target(chance: random.Random) -> tuple[str, Given]:
    return "target", {"pick": round(chance.random(), 3), "accept_refused": chance.random() < 0.5}


def _latest(chance: random.Random) -> tuple[str, Given]:
    return "latest", {"accept_refused": chance.random() < 0.5}


def _rollback(chance: random.Random) -> tuple[str, Given]:
    return "rollback", {"pick": chance.choice((None, round(chance.random(), 3)))}


def _strategy(chance: random.Random) -> tuple[str, Given]:
    kind = chance.choice(("ALL_AT_ONCE", "ALL_AT_ONCE", "ROLLING", "CANARY", "ATOMIC"))
    given: Given = {"kind": kind}
    if kind == "ROLLING":
        given["at_a_time"] = 1
    if kind == "CANARY":
        given |= {"approval": chance.random() < 0.5, "hold_seconds": chance.choice((0.0, 2.0))}
    return "strategy", given


def _skew(chance: random.Random) -> tuple[str, Given]:
    return "skew", {"bound": chance.choice((0, 0, 1, 2))}


def _ahead(chance: random.Random) -> tuple[str, Given]:
    return "ahead", {"on": chance.choice((None, None, True, False))}


def _sleep(chance: random.Random) -> tuple[str, Given]:
    return "sleep", {"server": chance.choice(("", *SERVERS)), "level": chance.choice((1, 2))}


def _wake(chance: random.Random) -> tuple[str, Given]:
    return "wake", {"server": ""}


def _drain(chance: random.Random) -> tuple[str, Given]:
    return "drain", {"server": chance.choice(SERVERS)}


def _gc(chance: random.Random) -> tuple[str, Given]:
    return "gc", {"keep": chance.choice((1, 2, 3)), "pick": chance.choice((None, round(chance.random(), 3)))}


def _drain_node(chance: random.Random) -> tuple[str, Given]:
    return "drain_node", {"node": chance.choice(NODES)}


def _resume_node(chance: random.Random) -> tuple[str, Given]:
    return "resume_node", {"node": chance.choice(NODES)}


def _pause_mode(chance: random.Random) -> tuple[str, Given]:
    return "pause_mode", {"mode": chance.choice(("KEEP", "KEEP", "WAIT", "ABORT"))}


def _plain(name: str) -> Draw:
    return lambda chance: (name, {})


OPERATIONS: dict[Draw, int] = {
    _publish: 30, _target: 6, _latest: 10, _rollback: 6, _strategy: 10, _skew: 4, _ahead: 6, _sleep: 3, _wake: 6, _drain: 2,
    _plain("resume"): 4, _gc: 4, _pause_mode: 4, _plain("pin"): 3, _plain("approve"): 5, _plain("back"): 2,
    _drain_node: 3, _resume_node: 8,
}  # fmt: skip
"""Weight of each operation."""


# Faults


def _daemon_kill(chance: random.Random) -> tuple[str, Given]:
    return "daemon.kill", {"down": round(chance.choice((0.0, chance.uniform(0, 3), LEASE * 1.5)), 1), "failpoint": _point(chance)}


def _point(chance: random.Random) -> str:
    """Return a failpoint of the daemon, or none."""
    return "" if chance.random() < 0.4 else _armed(chance, (*DaemonPoint.__args__, *DaemonFilePoint.__args__))


def _armed(chance: random.Random, points: Sequence[str]) -> str:
    """Return one of some failpoints with a kind of fault."""
    point = chance.choice(points)
    kinds = ["kill", f"stop:{STOP}", "delay:1"]
    if point in FILE_POINTS:
        kinds += ["eio", "enospc"]
    passes = 1 if point in _REACHED_AT_START else chance.choice((1, 1, 2, 3))
    return f"{point}@{passes}={chance.choice(kinds)}"


def _daemon_stop(chance: random.Random) -> tuple[str, Given]:
    return "daemon.stop", {"seconds": chance.choice((1.0, STOP))}


def _node_kill(chance: random.Random) -> tuple[str, Given]:
    point = "" if chance.random() < 0.6 else _armed(chance, (*NodePoint.__args__, *NodeFilePoint.__args__))
    down = round(chance.choice((0.0, chance.uniform(0, 3), LEASE * 1.5)), 1)
    given = {"node": chance.choice(NODES), "down": down, "failpoint": point, "small": chance.random() < 0.25}
    return "node.kill", {**given, "alone": chance.random() < 0.5 and given["node"] == "far"}


def _node_stop(chance: random.Random) -> tuple[str, Given]:
    return "node.stop", {"node": chance.choice(NODES), "seconds": chance.choice((2.0, STOP))}


def _rank_kill(chance: random.Random) -> tuple[str, Given]:
    return "trainer.kill", {"part": chance.choice(("rank", "job")), "new_job": chance.random() < 0.5}


def _rank_stop(chance: random.Random) -> tuple[str, Given]:
    return "trainer.stop", {"rank": chance.choice((0, 1)), "seconds": STOP}


def _server_kill(chance: random.Random) -> tuple[str, Given]:
    return "server.kill", {"server": chance.choice(SERVERS), "part": chance.choice(_PARTS), "pick": round(chance.random(), 3)}


def _server_stop(chance: random.Random) -> tuple[str, Given]:
    part = chance.choice(("api", "engine", "worker"))
    given = {"server": chance.choice(SERVERS), "part": part, "pick": round(chance.random(), 3)}
    return "server.stop", {**given, "seconds": chance.choice((2.0, STOP))}


def _cut(chance: random.Random) -> tuple[str, Given]:
    return "link.cut", {"link": chance.choice(LINKS)}


def _slow(chance: random.Random) -> tuple[str, Given]:
    delay = chance.choice((0.02, 0.2))
    return "link.slow", {"link": chance.choice(LINKS), "delay": delay, "seconds": chance.choice((3.0, LEASE, STOP))}


def _silent(chance: random.Random) -> tuple[str, Given]:
    return "link.silent", {"link": chance.choice(LINKS), "seconds": chance.choice((2.0, STOP))}


FAULTS: dict[Draw, int] = {
    _daemon_kill: 6, _daemon_stop: 3, _rank_kill: 3, _rank_stop: 2, _server_kill: 3, _server_stop: 4, _cut: 5, _slow: 3,
    _silent: 4, _node_kill: 7, _node_stop: 4,
}  # fmt: skip
"""Weight of each fault."""
