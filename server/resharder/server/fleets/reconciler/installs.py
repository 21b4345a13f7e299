"""Installs and changes of power: what is next, begin, progress, end. A server does one of them at a time."""

from dataclasses import replace

from resharder.server.fleets.reconciler.gate import closing, hold_order
from resharder.server.infra.backoff import backoff
from resharder.server.state.server import ASLEEP, Ahead, Change, Control, Failure, Install, Server, Settings, Worker
from resharder.server.state.server_events import Order, Reported
from resharder.v1 import resources_pb2, server_pb2
from resharder.v1.resources_pb2 import Power

_REPORT_SECONDS = 5.0  # for the report of a worker that has failed, after the outcome of the order


def all_ranks(server: Server) -> frozenset[int]:
    """Return the ranks of all workers, reported or not."""
    return frozenset(range(server.world_size))


def end_install(server: Server, install: Install, error: str, now: float) -> Server:
    """End an install for a reason that does not count against its version."""
    install = replace(install, state=resources_pb2.Install.FAILED, error=error, ended=now)
    return replace(server, install=install, ended=install)


def fail(server: Server, install: Install, error: str, now: float, settings: Settings) -> Server:
    """End an install as failed, which counts against its version; the staging of a profiled install does not count."""
    if install.profiled and install.state == resources_pb2.Install.STAGING:  # an install for a profile, which has changed nothing
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
    if error := why_failed(server, install, now):
        return fail(server, install, error, now, settings)
    about = _about(server, install)
    if install.state == resources_pb2.Install.STAGING and len(about) == server.world_size:
        return _apply(server, install, now, orders) if server.goal.apply else server
    applied = len(about) == server.world_size and all(w.state == resources_pb2.Worker.APPLIED for w in about.values())
    if install.state == resources_pb2.Install.APPLYING and applied and install.control_done:
        return _commit(server, install, now)
    if now > install.step_started + settings.install_step:
        done = sorted(
            rank
            for rank, w in about.items()
            if w.state == resources_pb2.Worker.APPLIED or install.state == resources_pb2.Install.STAGING
        )
        half = resources_pb2.Install.State.Name(install.state).lower()
        what = f"{half} took longer than {settings.install_step:g} s; done: workers {done}"
        return fail(server, install, what, now, settings)
    return server


def _about(server: Server, install: Install) -> dict[int, Worker]:
    """Return the workers whose last report is about an install, by rank."""
    return {rank: worker for rank, worker in server.workers.items() if worker.install == install.id}


def why_failed(server: Server, install: Install, now: float) -> str:
    """Return why an active install has failed, as operators read it; empty if it has not.

    A worker's report says what has failed in it. The outcome of the order ends the install as well, but of workers only if none
    reports a failure in time.
    """
    for rank, worker in _about(server, install).items():
        if worker.state == resources_pb2.Worker.FAILED:
            return f"worker {rank}: {worker.error or 'no reason given'}"
        if worker.state == resources_pb2.Worker.APPLIED and worker.version != install.version:
            return f"worker {rank} applied version {worker.version} instead"
    failed = install.order_failed
    if failed is None or (failed.workers_failed and now <= failed.at + _REPORT_SECONDS):
        return ""
    order = server_pb2.Order.Kind.Name(failed.kind).lower()
    return failed.error if failed.workers_failed else f"the control side could not {order} it: {failed.error}"


def _apply(server: Server, install: Install, now: float, orders: list[Order]) -> Server:
    leader, *others = server.controls
    orders += [hold_order(install, control) for control in others]
    orders.append(Order(leader.nonce, server_pb2.Order.APPLY, install.id, install.version, profile=install.profiled))
    return replace(
        server,
        install=replace(install, state=resources_pb2.Install.APPLYING, step_started=now, order_failed=None),
        workers={rank: replace(worker, ordered=True) for rank, worker in server.workers.items()},
        torn=all_ranks(server),
        **closing(server),
    )


def _commit(server: Server, install: Install, now: float) -> Server:
    install = replace(install, state=resources_pb2.Install.COMMITTED, ended=now)
    return replace(
        server,
        install=install,
        ended=install,
        torn=frozenset(),
        altered={},
        confirmed=install.version,
        failures={version: failure for version, failure in server.failures.items() if version > install.version},
    )


_REMOTE = ("http", "grpc")
"""Transports of workers that fetch versions from the daemon; the latter is that of older releases."""


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
    return why_out_of_reach(server, server.ahead[version])


def why_out_of_reach(server: Server, ahead: Ahead) -> str:
    """Return why a server can take no version that is offered like this before it is READY; empty if it can."""
    remote = [rank for rank, worker in sorted(server.workers.items()) if worker.transport in _REMOTE]
    if remote and not ahead.remote:
        return f"worker {remote[0]} would fetch a version to fall back on, and the fleet does not ask for it"
    behind = [rank for rank, worker in sorted(server.workers.items()) if not worker.direct]
    if behind:
        return f"worker {behind[0]} cannot take all of it over the direct path"
    return ahead.reach.why_not(server)


def begin_install(server: Server, now: float, settings: Settings, orders: list[Order]) -> Server:
    """Begin the next due install, unless an install or a change of power is in progress or the server sleeps."""
    if (server.install is not None and server.install.active) or server.change is not None:
        return server
    if server.power in ASLEEP or server.goal.power in ASLEEP:
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
    install = Install(id, version, resources_pb2.Install.STAGING, now, now, profiled=profiled, ahead_of=ahead_of)
    server = replace(server, install=install, installs=number)
    orders.append(stage_order(server, install))
    return server


def stage_order(server: Server, install: Install) -> Order:
    """Return the order to the leader to stage an install."""
    return Order(
        server.controls[0].nonce,
        server_pb2.Order.STAGE,
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
    if install is None or install.state != resources_pb2.Install.STAGING:
        return server
    recovers = not server.opened and install.version == server.confirmed
    wanted = server.goal.version is None or install.version == server.wanted or recovers
    if wanted and server.serves(install.version) and server.goal.power not in ASLEEP:
        return server
    orders.append(Order(server.controls[0].nonce, server_pb2.Order.UNSTAGE, install.id, install.version))
    return end_install(server, install, f"version {install.version} is no longer the target", now)


def change_power(server: Server, now: float, settings: Settings, orders: list[Order]) -> Server:
    """Order the next change of power, one at a time, with the gate closed and no install in progress."""
    if server.change is not None:
        if now <= server.change.began + settings.install_step:
            return server
        late = Reported("", server.change.id, ok=False, error=f"no answer in {settings.install_step:g} s")
        server = power_changed(server, server.change, late, now, settings)
    power = _next_power(server, now, settings)
    if power is None or server.opened or (server.install is not None and server.install.active):
        return server
    number = server.changes + 1
    server = replace(server, change=Change(f"{server.life}-p{number}", power, now), changes=number)
    if power == Power.ASLEEP_2:
        server = replace(server, torn=all_ranks(server))
    orders.append(power_order(server, server.controls[0]))
    return server


def _next_power(server: Server, now: float, settings: Settings) -> "Power | None":
    have, goal = server.power, server.goal.power
    if have == Power.POWER_UNSPECIFIED or (server.change_failed is not None and now < server.change_failed.retry_at):
        return None
    if goal in ASLEEP:
        return None if have in ASLEEP else goal
    if have in ASLEEP:
        return Power.WEIGHTS_AWAKE
    if have == Power.WEIGHTS_AWAKE and goal == Power.AWAKE and server.serves(server.agreed):
        version = target(server, settings)
        waits = version in server.failures and now < server.failures[version].retry_at
        return Power.AWAKE if not version or waits else None
    return None


def power_order(server: Server, leader: Control) -> Order:
    """Return the order of the current change of power."""
    assert server.change is not None
    kind = server_pb2.Order.SLEEP if server.change.power in ASLEEP else server_pb2.Order.WAKE
    return Order(leader.nonce, kind, server.change.id, power=server.change.power, reason="the fleet's power state")


def power_changed(server: Server, change: Change, event: Reported, now: float, settings: Settings) -> Server:
    """End the current change by its outcome. A failure sets the time of the next attempt."""
    if event.ok:
        return replace(server, change=None, change_failed=None, power=change.power)
    count = server.change_failed.count + 1 if server.change_failed else 1
    wait = backoff(count, settings.first_retry, settings.last_retry)
    failed = Failure(count, f"could not go {Power.Name(change.power)}: {event.error}", now + wait)
    server = replace(server, change=None, change_failed=failed)
    return replace(server, power=event.power) if event.power else server
