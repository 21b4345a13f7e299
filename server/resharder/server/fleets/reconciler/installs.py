"""Installs: which version is next, begin, progress, end."""

from dataclasses import replace

from resharder.server.fleets.reconciler.gate import closing, hold_order
from resharder.server.infra.backoff import backoff
from resharder.server.state.server import Failure, Install, InstallState, OrderKind, Server, Settings, WorkerState
from resharder.server.state.server_events import Order


def all_ranks(server: Server) -> frozenset[int]:
    """Return the ranks of all workers, reported or not."""
    return frozenset(range(server.world_size))


def end_install(server: Server, install: Install, error: str, now: float) -> Server:
    """End an install for a reason that does not count against its version."""
    install = replace(install, state=InstallState.FAILED, error=error, ended=now)
    return replace(server, install=install, ended=install)


def fail(server: Server, install: Install, error: str, now: float, settings: Settings) -> Server:
    """End an install as failed, which counts against its version; the staging of a profiled install does not count."""
    if install.profiled and install.state == InstallState.STAGING:  # an install for a profile, which has changed nothing
        return end_install(server, install, error, now)
    return end_install(note_failure(server, install.version, error, now, settings), install, error, now)


def note_failure(server: Server, version: int, error: str, now: float, settings: Settings) -> Server:
    """Count a failure against a version, and set the time of its next attempt."""
    count = server.failures[version].count + 1 if version in server.failures else 1
    wait = backoff(count, settings.first_retry, settings.last_retry)
    return replace(server, failures={**server.failures, version: Failure(count, error, now + wait)})


def advance_install(server: Server, now: float, settings: Settings, orders: list[Order]) -> Server:
    """Advance the active install by the workers' reports: apply, commit, or fail on an error or a timeout."""
    install = server.install
    if install is None or not install.active:
        return server
    about = {rank: worker for rank, worker in server.workers.items() if worker.install == install.id}
    for rank, worker in about.items():
        if worker.state == WorkerState.FAILED:
            return fail(server, install, f"worker {rank}: {worker.error or 'no reason given'}", now, settings)
        if worker.state == WorkerState.APPLIED and worker.version != install.version:
            return fail(server, install, f"worker {rank} applied version {worker.version} instead", now, settings)
    if install.state == InstallState.STAGING and len(about) == server.world_size:
        return _apply(server, install, now, orders) if server.goal.apply else server
    applied = len(about) == server.world_size and all(w.state == WorkerState.APPLIED for w in about.values())
    if install.state == InstallState.APPLYING and applied and install.control_done:
        return _commit(server, install, now)
    if now > install.step_started + settings.install_step:
        done = sorted(
            rank for rank, w in about.items() if w.state == WorkerState.APPLIED or install.state == InstallState.STAGING
        )
        what = f"{install.state.name.lower()} took longer than {settings.install_step:g} s; done: workers {done}"
        return fail(server, install, what, now, settings)
    return server


def _apply(server: Server, install: Install, now: float, orders: list[Order]) -> Server:
    leader, *others = server.controls
    orders += [hold_order(install, control) for control in others]
    orders.append(Order(leader.nonce, OrderKind.APPLY, install.id, install.version, profile=install.profiled))
    return replace(
        server,
        install=replace(install, state=InstallState.APPLYING, step_started=now),
        workers={rank: replace(worker, ordered=True) for rank, worker in server.workers.items()},
        torn=all_ranks(server),
        **closing(server),
    )


def _commit(server: Server, install: Install, now: float) -> Server:
    install = replace(install, state=InstallState.COMMITTED, ended=now)
    return replace(
        server,
        install=install,
        ended=install,
        torn=frozenset(),
        altered={},
        confirmed=install.version,
        failures={version: failure for version, failure in server.failures.items() if version > install.version},
    )


def target(server: Server, settings: Settings) -> int:
    """Return the version to install next, now or when its retry is due; 0: none."""
    held = 0 if server.differs else server.opened or server.agreed
    choices = [version for version in (server.wanted, 0 if held else server.confirmed) if version != held]
    able = [version for version in choices if version in server.ready or not why_not_ahead(server, version)]
    counts = {version: server.attempts(version) for version in able}
    best = min(counts, key=lambda version: counts[version], default=0)
    return best if best and counts[best] < settings.attempts else 0


def why_not_ahead(server: Server, version: int) -> str:
    """Return why a version cannot be installed before it is READY; empty if it can."""
    if not server.is_ahead(version):
        return "it is not READY"
    if version in server.failures:
        return server.failures[version].error
    if server.opened not in server.ready:
        return "it serves no READY version that it could fall back on"
    remote = [rank for rank, worker in sorted(server.workers.items()) if worker.transport == "grpc"]
    if remote and not server.ahead[version].remote:
        return f"worker {remote[0]} would fetch a version to fall back on, and the fleet does not ask for it"
    behind = [rank for rank, worker in sorted(server.workers.items()) if not worker.direct]
    return f"worker {behind[0]} cannot take all of it over the direct path" if behind else ""


def begin_install(server: Server, now: float, settings: Settings, orders: list[Order]) -> Server:
    """Begin the next due install, unless an install or a change of power is in progress or the server sleeps."""
    if (server.install is not None and server.install.active) or server.change is not None:
        return server
    if server.power.asleep or server.goal.power.asleep:
        return server
    version = target(server, settings)
    if not version or (version in server.failures and now < server.failures[version].retry_at):
        return server
    return stage(server, version, now, orders)


def stage(server: Server, version: int, now: float, orders: list[Order], *, profiled: bool = False) -> Server:
    """Begin an install under a new id, with the order to stage. Does not check whether one is active."""
    number = server.installs + 1
    ahead_of = server.opened if server.is_ahead(version) else 0
    id = f"{server.life}-{number}"
    install = Install(id, version, InstallState.STAGING, now, now, profiled=profiled, ahead_of=ahead_of)
    server = replace(server, install=install, installs=number)
    orders.append(stage_order(server, install))
    return server


def stage_order(server: Server, install: Install) -> Order:
    """Return the order to the leader to stage an install."""
    return Order(
        server.controls[0].nonce,
        OrderKind.STAGE,
        install.id,
        install.version,
        profile=install.profiled,
        ahead_of=install.ahead_of,
        boots_another=server.boots != install.version,
    )


def is_at_rest(server: Server) -> bool:
    """Return whether a server serves its target and neither does nor waits for anything else."""
    installs = server.install is not None and server.install.active
    busy = installs or server.change is not None or any(control.busy for control in server.controls)
    served = server.serving if server.serving == server.agreed == server.wanted else 0
    return served in server.ready and bool(server.controls) and server.goal.apply and server.goal.permits(served) and not busy


def drop_unwanted(server: Server, now: float, orders: list[Order]) -> Server:
    """End the staging of a version that is no longer the target, or that is not due before the server wakes."""
    install = server.install
    if install is None or install.state != InstallState.STAGING:
        return server
    recovers = not server.opened and install.version == server.confirmed
    wanted = server.goal.version is None or install.version == server.wanted or recovers
    if wanted and server.serves(install.version) and not server.goal.power.asleep:
        return server
    orders.append(Order(server.controls[0].nonce, OrderKind.UNSTAGE, install.id, install.version))
    return end_install(server, install, f"version {install.version} is no longer the target", now)
