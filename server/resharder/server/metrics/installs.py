"""Whether an install ended in a step of its server, and how: a pure function of the two states."""

from typing import Literal

from resharder.server.reconciler import Install, InstallState, Server, WorkerState

Outcome = Literal["committed", "failed", "given_up"]


def ended(before: Server, after: Server) -> tuple[Install, Outcome] | None:
    """The install as it was before it ended. The next one may have begun in the same step: `after` need not know it any more."""
    was, now = before.install, after.install
    if was is None or not was.active or (now is not None and now.id == was.id and now.active):
        return None
    if now is not None and now.id == was.id:
        committed = now.state == InstallState.COMMITTED
    else:
        workers = after.workers.values()
        committed = after.complete and all((w.install, w.state) == (was.id, WorkerState.APPLIED) for w in workers)
    if committed:
        return was, "committed"
    return was, "failed" if _tries(after, was.version) > _tries(before, was.version) else "given_up"


def _tries(server: Server, version: int) -> int:
    return server.failures[version].count if version in server.failures else 0
