"""Why a server is in the state it is in: one sentence for every state."""

from resharder.server.reconciler import InstallState, Server, Settings, WorkerState, target
from resharder.v1 import resources_pb2


def state_of(server: Server) -> int:
    """The value of `Server.State`."""
    install = server.install
    if server.lost_at is not None:
        return resources_pb2.Server.LOST
    if install is not None and install.state == InstallState.APPLYING:
        return resources_pb2.Server.APPLYING
    staging = install is not None and install.state == InstallState.STAGING
    if server.opened and server.resumed:
        return resources_pb2.Server.STAGING if staging else resources_pb2.Server.SERVING
    if server.torn:
        return resources_pb2.Server.FAILED
    if server.opened:
        return resources_pb2.Server.APPLYING if server.installs else resources_pb2.Server.BOOTING
    broken = any(worker.state == WorkerState.FAILED for worker in server.workers.values())
    if not staging and (broken or (server.complete and server.failures)):
        return resources_pb2.Server.FAILED
    return resources_pb2.Server.BOOTING


def explain(server: Server, now: float, settings: Settings) -> str:
    """Why it is in `state_of(server)`, and what it waits for."""
    if server.lost_at is not None:
        who = "its control side has been silent" if server.attached else "no control side attached"
        return f"{who} for {now - server.seen:.0f} s"
    if not server.controls and server.attached:
        left = max(0.0, server.seen + settings.lease - now)
        return f"{_serving(server)}no control side is attached; its lease ends in {left:.0f} s"
    return _serving(server) + _doing(server, now, settings)


def _serving(server: Server) -> str:
    if server.opened:
        return f"serving version {server.opened}; " if server.resumed else f"opening the gate on version {server.opened}; "
    return ("closed, the last install went wrong half-way; " if _half_way(server) else "closed; ") + _stranger(server)


def _stranger(server: Server) -> str:
    """The first worker that holds a version of another store."""
    workers = sorted(server.workers.items())
    errors = [
        f"worker {rank}: {worker.error}; " for rank, worker in workers if worker.state == WorkerState.EMPTY and worker.error
    ]
    return errors[0] if errors else ""


def _half_way(server: Server) -> bool:
    return bool(server.torn) and not (server.install is not None and server.install.state == InstallState.APPLYING)


def _doing(server: Server, now: float, settings: Settings) -> str:
    missing = [rank for rank in range(server.world_size) if rank not in server.workers]
    if not server.controls:
        return f"waits for its control side; {len(server.workers)} workers have reported"
    if missing:
        return f"waits for workers {_few(missing)} of {server.world_size}"
    install = server.install
    if install is not None and install.active:
        done = WorkerState.STAGED if install.state == InstallState.STAGING else WorkerState.APPLIED
        ready = [w for w in server.workers.values() if w.install == install.id and w.state in (done, WorkerState.APPLIED)]
        what = "staging" if install.state == InstallState.STAGING else "applying"
        last = f" after: {_last_failure(server)}" if server.failures else ""
        return f"{what} version {install.version}, {len(ready)} of {server.world_size} workers done{last}"
    return _idle(server, now, settings)


def _idle(server: Server, now: float, settings: Settings) -> str:
    if busy := server.controls[0].busy:
        return f"its control side is still at install {busy}"
    if not server.ready:
        return f"model {server.model} has no READY version"
    if server.opened and server.opened == server.newest:
        return "it is the newest"
    version = target(server, settings)
    if version and version in server.failures:
        return f"{_last_failure(server)}; tries again in {max(0.0, server.failures[version].retry_at - now):.0f} s"
    if server.failures:
        return f"{_last_failure(server)}; waits for a newer version"
    return f"version {server.newest} is next"


def _last_failure(server: Server) -> str:
    version, failure = max(server.failures.items(), key=lambda item: item[1].retry_at)
    return f"version {version} failed {failure.count} times, last: {failure.error}"


def _few(ranks: list[int]) -> str:
    return ", ".join(str(rank) for rank in ranks[:8]) + (", …" if len(ranks) > 8 else "")
