"""The setting of a run, and the schedule of a storm: which fault and which operation happens when, from the seed alone.

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
THIRD = "third"
"""Node of a host without ranks and servers, for runs with several replicas."""
REPLICA_SECONDS = 10.0
"""The daemon's `replica_seconds`."""
GONE = 2 * LEASE + REPLICA_SECONDS + 6.0
"""Seconds for which a node stays down after `node.gone`: past its lease and the wait for holders. Its next process is empty."""
_PARTS = ("api", "engine", "worker", "api", "engine", "worker", "all")
_FOLLOWERS_POINTS: tuple[DaemonPoint | DaemonFilePoint, ...] = ("follow.before-fetch", "follow.write", "restore.write")
_REACHED_AT_START = ("serve.listen", "start.read", "pool.write", "reserve.write", "server.claim", "server.attach")
Given = dict[str, Any]


@dataclass(frozen=True)
class Setting:
    """Settings of a run besides its schedules.

    Attributes:
        nodes: Names of the nodes that take part.
        replicas: The daemon's `replicas`.
        security: Whether every party has a certificate and the roles that it needs.
        adapters: Whether the servers follow an adapter beside their model.
        sglang: Whether `left` is a server of SGLang, which follows no adapter.
        region: Whether a daemon in another region follows the archive.
    """

    nodes: tuple[str, ...] = ()
    replicas: int = 2
    security: bool = False
    adapters: bool = False
    sglang: bool = False
    region: bool = False

    @property
    def links(self) -> tuple[str, ...]:
        """Links to the daemon's RPCs, by the caller; `data` to its data port, and `NODE-data` to those of the nodes."""
        return (*SERVERS, "trainer", "operator", *self.nodes, "data", *(f"{name}-data" for name in self.nodes))

    def __str__(self) -> str:
        beside = f"{'with' if self.security else 'without'} security, {'with' if self.adapters else 'without'} adapters"
        return (
            f"replicas {self.replicas}, {beside}, nodes {', '.join(self.nodes)}{', left is of SGLang' * self.sglang}"
            + ", a region" * self.region
        )


def setting_of(
    seed: int,
    replicas: int | None = None,
    security: bool | None = None,
    adapters: bool | None = None,
    *,
    sglang: bool = False,
    region: bool = False,
) -> Setting:
    """Return the setting of a seed: three replicas for each fifth one, else one or two; security for each third one.

    Servers follow an adapter beside their model for all seeds but each fourth.

    Args:
        seed: Seed of the run.
        replicas: Replicas in place of those of the seed.
        security: Whether to have security, in place of what the seed has.
        adapters: Whether to have an adapter, in place of what the seed has.
        sglang: Whether `left` is a server of SGLang; there is no adapter then.
        region: Whether a daemon in another region follows the archive.
    """
    security = seed % 3 == 0 if security is None else security
    replicas = replicas or (2 - seed % 2 if seed % 5 else 3)
    nodes = (*NODES, THIRD) if replicas > 1 else NODES
    adapters = not sglang and (seed % 4 != 0 if adapters is None else adapters)
    return Setting(nodes, replicas, security, adapters, sglang, region)


class Chance(random.Random):
    """A source of random numbers for the runs of one setting."""

    setting = Setting(NODES)


Draw = Callable[[Chance], tuple[str, Given]]


@dataclass(frozen=True)
class Action:
    """A fault or an operation at a time of its storm."""

    at: float
    kind: str
    name: str
    given: Given = field(default_factory=dict)

    def __str__(self) -> str:
        return f"{self.at:6.1f} s  {self.kind:9} {self.name} {self.given or ''}"


def draw(seed: str, seconds: float, setting: Setting = Chance.setting, *, boots: int = 1) -> list[Action]:
    """Return the actions of one storm, in order.

    Args:
        seed: Seed of this storm.
        seconds: Length of the storm.
        setting: What the run has.
        boots: Bound on the faults after which a vLLM server has to boot, and on those after which the trainer has to.
    """
    chance = Chance(seed)
    chance.setting = setting
    faults = {**FAULTS, **(SECURED if setting.security else {}), **(FOLLOWED if setting.region else {})}
    operations = {**OPERATIONS, **(ADAPTED if setting.adapters else {})}
    actions = [*_spread(chance, seconds, 2.0, "operation", operations), *_spread(chance, seconds, 5.0, "fault", faults)]
    kept, left = [], {"server.kill": boots, "trainer.kill": boots}
    for action in sorted(actions, key=lambda action: action.at):
        if action.name in left:
            left[action.name] -= 1
        if left.get(action.name, 0) >= 0:
            kept.append(action)
    return kept


def _spread(chance: Chance, seconds: float, mean: float, kind: str, table: dict[Draw, int]) -> list[Action]:
    found, at = [], chance.expovariate(1 / mean)
    while at < seconds:
        (choice,) = chance.choices(list(table), list(table.values()))
        name, given = choice(chance)
        found.append(Action(round(at, 1), kind, name, given))
        at += chance.expovariate(1 / mean)
    return found


# Operations


def _publish(chance: Chance) -> tuple[str, Given]:
    return "publish", {"retry": chance.random() < 0.5, "direct": chance.random() < 0.7}


def _target(chance: Chance) -> tuple[str, Given]:
    return "target", {"pick": round(chance.random(), 3), "accept_refused": chance.random() < 0.5}


def _latest(chance: Chance) -> tuple[str, Given]:
    return "latest", {"accept_refused": chance.random() < 0.5}


def _rollback(chance: Chance) -> tuple[str, Given]:
    return "rollback", {"pick": chance.choice((None, round(chance.random(), 3)))}


def _strategy(chance: Chance) -> tuple[str, Given]:
    kind = chance.choice(("ALL_AT_ONCE", "ALL_AT_ONCE", "ROLLING", "CANARY", "ATOMIC"))
    given: Given = {"kind": kind}
    if kind == "ROLLING":
        given["at_a_time"] = 1
    if kind == "CANARY":
        given |= {"approval": chance.random() < 0.5, "hold_seconds": chance.choice((0.0, 2.0))}
    return "strategy", given


def _skew(chance: Chance) -> tuple[str, Given]:
    return "skew", {"bound": chance.choice((0, 0, 1, 2))}


def _ahead(chance: Chance) -> tuple[str, Given]:
    return "ahead", {"on": chance.choice((None, None, True, False))}


def _sleep(chance: Chance) -> tuple[str, Given]:
    return "sleep", {"server": chance.choice(("", *SERVERS)), "level": chance.choice((1, 2))}


def _wake(chance: Chance) -> tuple[str, Given]:
    return "wake", {"server": ""}


def _drain(chance: Chance) -> tuple[str, Given]:
    return "drain", {"server": chance.choice(SERVERS)}


def _gc(chance: Chance) -> tuple[str, Given]:
    return "gc", {"keep": chance.choice((1, 2, 3)), "pick": chance.choice((None, round(chance.random(), 3)))}


def _drain_node(chance: Chance) -> tuple[str, Given]:
    return "drain_node", {"node": chance.choice(chance.setting.nodes)}


def _resume_node(chance: Chance) -> tuple[str, Given]:
    return "resume_node", {"node": chance.choice(chance.setting.nodes)}


def _pause_mode(chance: Chance) -> tuple[str, Given]:
    return "pause_mode", {"mode": chance.choice(("KEEP", "KEEP", "WAIT", "ABORT"))}


def _plain(name: str) -> Draw:
    return lambda chance: (name, {})


OPERATIONS: dict[Draw, int] = {
    _publish: 30, _target: 6, _latest: 10, _rollback: 6, _strategy: 10, _skew: 4, _ahead: 6, _sleep: 3, _wake: 6, _drain: 2,
    _plain("resume"): 4, _gc: 4, _pause_mode: 4, _plain("pin"): 3, _plain("approve"): 5, _plain("back"): 2,
    _drain_node: 3, _resume_node: 8,
}  # fmt: skip
"""Weight of each operation."""
ADAPTED: dict[Draw, int] = {_plain("adapter"): 20, _plain("adapter_rollback"): 3, _plain("adapter_latest"): 6}
"""Weight of each operation of runs with an adapter alone."""


# Faults


def _daemon_kill(chance: Chance) -> tuple[str, Given]:
    return "daemon.kill", {"down": round(chance.choice((0.0, chance.uniform(0, 3), LEASE * 1.5)), 1), "failpoint": _point(chance)}


def _point(chance: Chance) -> str:
    """Return a failpoint of the daemon, or none."""
    return "" if chance.random() < 0.4 else _armed(chance, (*DaemonPoint.__args__, *DaemonFilePoint.__args__))


def _armed(chance: Chance, points: Sequence[str]) -> str:
    """Return one of some failpoints with a kind of fault."""
    point = chance.choice(points)
    kinds = ["kill", f"stop:{STOP}", "delay:1"]
    if point in FILE_POINTS:
        kinds += ["eio", "enospc"]
    passes = 1 if point in _REACHED_AT_START else chance.choice((1, 1, 2, 3))
    return f"{point}@{passes}={chance.choice(kinds)}"


def _daemon_stop(chance: Chance) -> tuple[str, Given]:
    return "daemon.stop", {"seconds": chance.choice((1.0, STOP))}


def _node_kill(chance: Chance) -> tuple[str, Given]:
    point = "" if chance.random() < 0.6 else _armed(chance, (*NodePoint.__args__, *NodeFilePoint.__args__))
    down = round(chance.choice((0.0, chance.uniform(0, 3), LEASE * 1.5)), 1)
    given = {"node": chance.choice(chance.setting.nodes), "down": down, "failpoint": point, "small": chance.random() < 0.25}
    return "node.kill", {**given, "alone": chance.random() < 0.5 and given["node"] == "far"}


def _node_gone(chance: Chance) -> tuple[str, Given]:
    """Draw the end of the node that ranks write on, or, with several replicas, of so many nodes that holders may lack."""
    if THIRD in chance.setting.nodes and chance.random() < 0.5:
        return "node.gone", {"nodes": ["node", THIRD], "down": GONE}
    return "node.gone", {"nodes": ["far"], "down": GONE}


def _node_stop(chance: Chance) -> tuple[str, Given]:
    return "node.stop", {"node": chance.choice(chance.setting.nodes), "seconds": chance.choice((2.0, STOP))}


def _rank_kill(chance: Chance) -> tuple[str, Given]:
    return "trainer.kill", {"part": chance.choice(("rank", "job")), "new_job": chance.random() < 0.5}


def _rank_stop(chance: Chance) -> tuple[str, Given]:
    return "trainer.stop", {"rank": chance.choice((0, 1)), "seconds": STOP}


def _server_kill(chance: Chance) -> tuple[str, Given]:
    return "server.kill", {"server": chance.choice(SERVERS), "part": chance.choice(_PARTS), "pick": round(chance.random(), 3)}


def _server_stop(chance: Chance) -> tuple[str, Given]:
    part = chance.choice(("api", "engine", "worker"))
    given = {"server": chance.choice(SERVERS), "part": part, "pick": round(chance.random(), 3)}
    return "server.stop", {**given, "seconds": chance.choice((2.0, STOP))}


def _cut(chance: Chance) -> tuple[str, Given]:
    return "link.cut", {"link": chance.choice(chance.setting.links)}


def _slow(chance: Chance) -> tuple[str, Given]:
    delay = chance.choice((0.02, 0.2))
    return "link.slow", {
        "link": chance.choice(chance.setting.links),
        "delay": delay,
        "seconds": chance.choice((3.0, LEASE, STOP)),
    }


def _silent(chance: Chance) -> tuple[str, Given]:
    return "link.silent", {"link": chance.choice(chance.setting.links), "seconds": chance.choice((2.0, STOP))}


FAULTS: dict[Draw, int] = {
    _daemon_kill: 6, _daemon_stop: 3, _rank_kill: 3, _rank_stop: 2, _server_kill: 3, _server_stop: 4, _cut: 5, _slow: 3,
    _silent: 4, _node_kill: 7, _node_stop: 4, _node_gone: 4,
}  # fmt: skip
"""Weight of each fault."""


def _renew(chance: Chance) -> tuple[str, Given]:
    return "certificates.renew", {"party": chance.choice(("daemon", *SERVERS, "trainer", "operator", *chance.setting.nodes))}


SECURED: dict[Draw, int] = {_renew: 6}
"""Weight of each fault of runs with security alone."""


def _region_kill(chance: Chance) -> tuple[str, Given]:
    point = "" if chance.random() < 0.4 else _armed(chance, _FOLLOWERS_POINTS)
    return "region.kill", {"down": round(chance.choice((0.0, chance.uniform(0, 3), LEASE * 1.5)), 1), "failpoint": point}


def _region_stop(chance: Chance) -> tuple[str, Given]:
    return "region.stop", {"seconds": chance.choice((1.0, STOP))}


def _bucket_fail(chance: Chance) -> tuple[str, Given]:
    return "bucket.fail", {
        "kind": chance.choice((500, 503, "cut", "stale", "lost")),
        "seconds": chance.choice((3.0, LEASE, STOP)),
    }


FOLLOWED: dict[Draw, int] = {_region_kill: 10, _region_stop: 3, _bucket_fail: 10}
"""Weight of each fault of runs with a region alone."""
