"""The matrix: which process each failpoint is in, on which pass it acts, and with which kinds."""

from dataclasses import dataclass
from typing import Literal, get_args

from resharder.converters.failpoints import (
    FILE_POINTS,
    POINTS,
    ControlPoint,
    DaemonFilePoint,
    DaemonPoint,
    NodeFilePoint,
    NodePoint,
    OperatorFilePoint,
    OperatorPoint,
    TrainerFilePoint,
    TrainerPoint,
)

Place = Literal["daemon", "trainer", "operator", "server", "node"]
LEASE = 2.0
KINDS = {"kill": "kill", "stop": f"stop:{1.5 * LEASE}", "delay": "delay:0.5", "eio": "eio", "enospc": "enospc"}
AT_ONCE = ("kill", "stop", "delay")
PASSES = {
    "seal.after-slot": 2, "commit.before-proof": 2, "commit.after-proof": 2, "commit.before-manifest": 2,
    "commit.after-manifest": 2, "commit.before-rename": 2, "commit.after-rename": 2, "commit.sync": 2, "commit.after-sync": 2,
    "commit.after-history": 2, "begin.after-number": 2, "begin.after-rename": 2, "journal.write": 4, "server.order": 4,
    "server.worker-report": 3, "deliver.begin": 2, "deliver.begun": 2, "deliver.seal": 2, "deliver.sealed": 2, "shared.open": 2,
    "shared.write": 2, "handle.wait": 2, "control.report": 5, "worker.report": 3, "worker.stage.map": 2, "sender.run": 1,
    "node.sync": 3, "worker.adapter.reserve": 2, "worker.adapter.write": 2, "worker.adapter.proven": 2,
    "worker.adapter.enter": 2, "worker.adapter.entered": 2, "snapshot.kept": 2,
}  # fmt: skip
"""The pass on which a point acts; 1 for all others."""
RESTARTED = {"start.read", "serve.listen"}
"""Points of a daemon that finds versions in its store: armed in the second one of a cycle."""
REMOTE = {"worker.stage.mirror", "worker.fetch.write", "data.send"}
"""Points that are reached for a server that may not map the store."""
AT_HOME = {"gather.write", "snapshot.kept"}
"""Points of the daemon that are reached with a node: for ranks that write into its files, and for what it keeps."""
AWAY = {"follow.before-fetch", "follow.write"}
"""Points of a daemon that follows the archive of the cycle's."""


TOGETHER: dict[str, tuple[int, ...]] = {
    "register.claim": (1, 2), "register.slot": (1, 2), "register.assigned": (1, 2), "lease.renew": (2,),
    "deliver.begin": (3, 4), "deliver.begun": (3, 4), "deliver.seal": (3, 4), "deliver.sealed": (3, 4), "handle.wait": (2,),
    "shared.open": (3, 4), "shared.write": (3, 4), "chunks.upload": (1, 2), "chunks.put": (1, 2), "sender.declare": (1, 2),
    "sender.offer": (1, 2), "claim.write": (1, 2), "reserve.write": (1, 2), "claim.effect": (1, 2), "pool.write": (1, 2),
    "direct.offer": (1, 2),
    "begin.after-number": (3, 4), "begin.after-rename": (3, 4), "seal.after-slot": (5, 8), "commit.before-proof": (3, 4),
    "commit.after-proof": (3, 4), "commit.before-manifest": (3, 4), "commit.after-manifest": (3, 4), "decision.write": (2,),
    "commit.before-rename": (3, 4), "commit.after-rename": (3, 4), "commit.sync": (3, 4), "commit.after-sync": (3, 4),
    "decision.remove": (2,), "commit.after-history": (3, 4), "abort.record": (1, 2), "start.read": (1,),
    "decision.complete": (1, 2), "serve.listen": (1,),
}  # fmt: skip
"""Points on the way of versions that are READY together, and the passes on which they act: those of one model, and the other."""
DECIDED = {"start.read", "decision.complete", "serve.listen"}
"""Points of a daemon that starts with a decision in its store, left by a kill between the renames of one step."""
DECISION = {"decision.write", "decision.remove", "decision.complete"}
"""Points that versions of one model do not reach."""


@dataclass(frozen=True)
class Case:
    """One fault in one cycle: that of `cycle`, or with `together` the number of the pass in that of `together_cycle`."""

    point: str
    kind: str
    together: int = 0

    @property
    def place(self) -> Place:
        return place_of(self.point)

    @property
    def spec(self) -> str:
        return f"{self.point}@{self.together or PASSES.get(self.point, 1)}={KINDS[self.kind]}"


def place_of(point: str) -> Place:
    if point in (*_names(DaemonPoint), *_names(DaemonFilePoint)):
        return "daemon"
    if point in (*_names(TrainerPoint), *_names(TrainerFilePoint)):
        return "trainer"
    if point in (*_names(NodePoint), *_names(NodeFilePoint)):
        return "node"
    return "operator" if point in (*_names(OperatorPoint), *_names(OperatorFilePoint)) else "server"


def _names(group: object) -> tuple[str, ...]:
    return get_args(group)


def kinds_of(point: str) -> tuple[str, ...]:
    return (*AT_ONCE, "eio", "enospc") if point in FILE_POINTS else AT_ONCE


def all_cases() -> list[Case]:
    alone = [Case(point, kind) for point in POINTS if point not in DECISION for kind in kinds_of(point)]
    return alone + [Case(point, kind, nth) for point, passes in TOGETHER.items() for nth in passes for kind in kinds_of(point)]


ADAPTER_POINTS = tuple(point for point in POINTS if point.startswith("worker.adapter."))
"""Points of a cycle of its own, `adapter_cycle`."""
CONTROL_POINTS = _names(ControlPoint)
