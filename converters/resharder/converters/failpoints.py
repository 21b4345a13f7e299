"""Named points at which tests break a process on purpose: daemon, trainer, operator, and both sides of the plugin.

    RESHARDER_FAILPOINT=commit.before-rename@2=kill     SIGKILL, the second time that the point is reached
    RESHARDER_FAILPOINT=worker.stage.map=stop:4         SIGSTOP; a process of its own sends SIGCONT after 4 s
    RESHARDER_FAILPOINT=claim.write=enospc              OSError, as from a full medium; `eio` as from a broken one
    RESHARDER_FAILPOINT=lease.renew=delay:0.5           a pause of this thread

Several are separated by commas. A point acts once in a process. With RESHARDER_FAILPOINT_MARK it acts once in all processes
that share this variable: the first one creates the file of that name, followed by `.` and the point's name if there are
several. Without RESHARDER_FAILPOINT a point costs one look-up in an empty dictionary. No point is on the path of a single tensor.
"""

import errno
import itertools
import os
import signal
import time
from collections.abc import Callable
from typing import Literal, get_args

from resharder.converters.environment import FAILPOINT, FAILPOINT_MARK

DaemonPoint = Literal[
    "serve.listen", "begin.after-number", "begin.after-rename", "seal.after-slot", "commit.before-proof",
    "commit.after-proof", "commit.before-manifest", "commit.after-manifest", "commit.after-rename", "commit.after-sync",
    "commit.after-history", "abort.record", "leave.after-rename", "adopt.before-proof", "adopt.before-rename",
    "adopt.after-rename", "server.claim", "server.attach", "server.order", "server.worker-report", "archive.before-marker",
    "archive.before-latest", "follow.before-fetch", "direct.offer", "direct.join", "data.send", "snapshot.kept",
]  # fmt: skip
"""Points of the daemon between two steps."""
DaemonFilePoint = Literal[
    "start.read", "claim.write", "reserve.write", "claim.effect", "pool.write", "pool.recycle", "commit.before-rename",
    "commit.sync", "leave.before-rename", "journal.write", "event.sync", "fleet.write", "archive.read", "restore.write",
    "export.read", "decision.write", "decision.remove", "decision.complete", "gather.write",
    "follow.write",
]  # fmt: skip
"""Points of the daemon before a file operation."""
TrainerPoint = Literal[
    "register.claim", "register.slot", "register.assigned", "lease.renew", "deliver.begin", "deliver.begun", "deliver.seal",
    "deliver.sealed", "chunks.upload", "chunks.put", "handle.wait", "sender.declare", "sender.offer", "sender.link", "sender.run",
    "sender.digest",
]  # fmt: skip
"""Points of a trainer's rank; `sender`: the direct path."""
TrainerFilePoint = Literal["shared.open", "shared.write"]
"""Points of a trainer's rank before it opens or writes to the store's files."""
OperatorPoint = Literal["operator.call", "import.publish"]
"""Points of a process with the operator SDK or the tools."""
OperatorFilePoint = Literal["import.open", "export.write", "export.rename"]
"""Points of such a process before a file operation."""
ControlPoint = Literal[
    "control.claim", "control.attend", "control.lead", "control.pause", "control.apply", "control.reset", "control.resume",
    "control.open", "control.sleep", "control.wake", "control.report",
]  # fmt: skip
"""Points of the plugin's control side, in the API server."""
WorkerPoint = Literal[
    "worker.boot.claim", "worker.boot.claimed", "worker.boot.verify", "worker.stage.begin", "worker.stage.staged",
    "worker.boot.renew", "worker.apply.begin", "worker.apply.half-way", "worker.apply.written", "worker.apply.verified",
    "worker.verify", "worker.sleep", "worker.wake", "worker.report", "worker.direct.join", "worker.direct.receive",
    "worker.direct.compare", "worker.direct.received", "worker.adapter.reserve", "worker.adapter.write",
    "worker.adapter.proven", "worker.adapter.enter", "worker.adapter.entered", "worker.adapter.release",
]  # fmt: skip
"""Points of the plugin's workers and their helper processes."""
WorkerFilePoint = Literal["worker.boot.load", "worker.stage.mirror", "worker.stage.map", "worker.fetch.write"]
"""Points of the plugin's workers before a file operation."""
NodePoint = Literal["node.sync", "node.manifest", "node.piece", "node.held"]
"""Points of a node."""
NodeFilePoint = Literal["node.layout", "node.write", "node.drop", "node.reserve", "node.verify", "node.adopt"]
"""Points of a node before a file operation."""
FilePoint = Literal[DaemonFilePoint, TrainerFilePoint, OperatorFilePoint, WorkerFilePoint, NodeFilePoint]
Point = Literal[DaemonPoint, TrainerPoint, OperatorPoint, ControlPoint, WorkerPoint, NodePoint, FilePoint]
"""Every name that a call of `failpoint` may have."""

POINTS: tuple[str, ...] = get_args(Point)
FILE_POINTS: frozenset[str] = frozenset(get_args(FilePoint))
STATUS_OF_ERRORS = {"eio": errno.EIO, "enospc": errno.ENOSPC}

_armed: dict[str, Callable[[], None]] = {}


def failpoint(name: Point) -> None:
    """Act if this point is armed. Raises OSError for `eio` and `enospc`."""
    act = _armed.get(name)
    if act is not None:
        act()


def arm(spec: str, mark: str = "") -> None:
    """Arm the points of `NAME[@N]=KIND,…`, in place of earlier ones; an empty `spec` arms none.

    Args:
        spec: `KIND` is `kill`, `stop:SECONDS`, `eio`, `enospc` or `delay:SECONDS`; `N` is the pass on which the point acts.
        mark: File to create when the point acts; nothing happens if it exists. Of several points, each has its own.

    Raises:
        ValueError: An undeclared point, an unknown kind, or an error at a point without a file operation.
    """
    _armed.clear()
    several = "," in spec
    for one in filter(None, spec.split(",")):
        _arm(one, f"{mark}.{one.partition('=')[0].partition('@')[0]}" if mark and several else mark)


def _arm(spec: str, mark: str) -> None:
    place, _, kind = spec.partition("=")
    name, _, number = place.partition("@")
    if name not in POINTS:
        raise ValueError(f"expected a declared failpoint in RESHARDER_FAILPOINT, got {name!r}")
    act, passes, wanted = _action(name, kind), itertools.count(1), int(number or 1)

    def reached() -> None:
        if next(passes) == wanted and (not mark or _first(mark)):
            act()

    _armed[name] = reached


def _first(mark: str) -> bool:
    try:
        os.close(os.open(mark, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))
    except FileExistsError:
        return False
    return True


def _action(name: str, kind: str) -> Callable[[], None]:
    effect, _, seconds = kind.partition(":")
    if effect == "kill":
        return lambda: os.kill(os.getpid(), signal.SIGKILL)
    if effect == "stop":
        return lambda: stop(float(seconds))
    if effect == "delay":
        return lambda: time.sleep(float(seconds))
    if effect in STATUS_OF_ERRORS and name in FILE_POINTS:
        return lambda: refuse(STATUS_OF_ERRORS[effect], name)
    raise ValueError(
        f"expected kill, stop:SECONDS, delay:SECONDS, or eio or enospc before a file operation, got {kind!r} at {name}"
    )


def stop(seconds: float) -> None:
    """Stop this process with SIGSTOP; a shell, which outlives it, sends SIGCONT after `seconds`."""
    me = os.getpid()
    watcher = os.posix_spawn("/bin/sh", ["sh", "-c", f"sleep {seconds}; kill -CONT {me}"], {"PATH": os.defpath})
    os.kill(me, signal.SIGSTOP)
    os.waitpid(watcher, 0)


def refuse(number: int, name: str) -> None:
    """Raise the OSError of a medium that fails."""
    raise OSError(number, os.strerror(number), f"failpoint {name}")


arm(FAILPOINT.text(), FAILPOINT_MARK.text())
