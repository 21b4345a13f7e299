"""How one server gets to the version it should serve: a pure function of its state, what happened and the time.

`step(server, event, now, settings)` gives the new state and the orders to send. One install goes

    STAGE -> every worker STAGED -> CLOSE (others), APPLY (leader) -> leader done and every worker APPLIED -> RESUME (all)

and each arrow is idempotent: after any interruption the same order is given again, under the same install id. From APPLY until
that install, or another, is confirmed in full the workers count as torn, and a server with a torn worker is never resumed; it
gets its last confirmed version again, staged and applied like any other, or stays closed. Reports that are late or repeated are
told by the install id, which is new for every attempt and every life of the daemon, and by the workers' process nonces.

Numbers start again with a new store, while servers live on. So a worker says the fingerprint of what it holds too, and one whose
fingerprint is not that of the READY version of that number counts as EMPTY.

A worker that finds other contents in its memory than its version gives (another hand's RPC) says FAILED with the verification: it
counts as torn, and what is torn goes the way above.

What its fleet wants of a server is its `Goal`: which version, whether it may go on from staged to applied, which versions it may
open its gate on, whether it may open it at all (drained), and how awake it is. Power changes go

    asleep  <- SLEEP -  awake          gate closed first; at level 2 the workers count as torn from the order on
    asleep  - WAKE weights ->  weights awake  - [an install, if one is wanted or the weights were dropped] - WAKE all ->  awake

so that an install wanted while asleep happens at wake, and nothing is served from weights that were dropped.

A version that every rank has offered for the direct path may be installed before it is READY, where the fleet serves ahead: by a
server that serves a READY one, which its workers keep at hand (STAGE says which), once, and over the direct path alone. What
fails goes the way of every failure: the last confirmed version again. Workers hold it by a fingerprint of the daemon's making
until it is READY and they have compared it with the store's copy; one that finds a difference says so, and the version is
installed from the store. What became ABORTED is never served anew, and served on only until its successor is staged.

Leadership is numbered. Each LEAD begins a higher `term`, which goes with every order, and the engine refuses orders of lower ones
than it has seen: a leader that was stopped, and let go meanwhile, changes nothing when it goes on.

What the plugin has to keep to: it carries out one order at a time and drops what it has not begun when its stream breaks; a
control side that attaches in the middle of an order names that order's install in its first report, and gets no others until it
has reported how that one went; an order repeated is answered without harm; a worker that failed to apply says FAILED until it
succeeds.
"""

from dataclasses import replace
from typing import Any

from resharder.server.infra.backoff import backoff
from resharder.server.state.server import (
    Attached,
    Change,
    Claimed,
    Control,
    Detached,
    Event,
    Failure,
    Install,
    InstallState,
    Order,
    OrderKind,
    Power,
    Reinstalled,
    Reported,
    Server,
    Settings,
    Ticked,
    VersionsChanged,
    Wanted,
    Worker,
    WorkerReported,
    WorkerState,
)


def step(server: Server, event: Event, now: float, settings: Settings) -> tuple[Server, tuple[Order, ...]]:
    """The state after `event`, and the orders it leads to, to be sent in this order."""
    orders: list[Order] = []
    match event:
        case Claimed():
            server = _claimed(server, event, now)
        case Attached():
            server = _attached(server, event, now, orders)
        case Reported():
            server = _reported(server, event, now, settings, orders)
        case Detached():
            server = _let_go(server, {event.control}, orders)
        case WorkerReported():
            server = _worker_reported(server, event.worker, now, settings)
        case VersionsChanged():
            server = _versions_changed(server, event)
        case Ticked():
            server = _ticked(server, now, settings, orders)
        case Wanted():
            again = event.goal.retry != server.goal.retry
            server = replace(server, goal=event.goal, failures={} if again else server.failures)
        case Reinstalled() if _rests(server):
            server = _stage(server, server.serving, now, orders, profiled=True)
    if server.lost_at is None and server.controls and server.complete and not server.busy_elsewhere(server.controls[0]):
        server = _move_install_on(_drop_unwanted(replace(server, booting=False), now, orders), now, settings, orders)
        server = _change_power(_close_gate(server, orders), now, settings, orders)
        server = _open_gate(server, orders)
        server = _begin_install(server, now, settings, orders)
    return _leave_aborted(_close_gate(server, orders), settings, orders), tuple(orders)


def _versions_changed(server: Server, event: VersionsChanged) -> Server:
    """What failed ahead of READY says nothing about the store's copy."""
    fresh = event.ready.keys() & server.ahead.keys() - server.ready.keys()
    there = (event.ready.keys() | event.ahead.keys()) - fresh
    kept = {version: failure for version, failure in server.failures.items() if version in there}
    return replace(server, ready=event.ready, ahead=event.ahead, failures=kept)


def _claimed(server: Server, event: Claimed, now: float) -> Server:
    if not server.attached:
        server = replace(server, seen=now, lost_at=None, renews=server.renews or event.renews)
    if not event.boot or (server.boot_version in server.ready and (server.booting or server.controls)):
        return server
    if server.controls or (server.booting and not server.boot_version):
        return replace(server, boot_version=server.boots)
    # Booted before, and nobody is there: the same id starts again, with new processes.
    return Server(
        id=server.id,
        model=server.model,
        fleet=server.fleet,
        life=server.life,
        seen=now,
        renews=event.renews,
        ready=server.ready,
        boot_version=server.boots,
        gone=server.gone,
        installs=server.installs,
        goal=server.goal,
        changes=server.changes,
        term=server.term,
    )


def _attached(server: Server, event: Attached, now: float, orders: list[Order]) -> Server:
    control = Control(event.control, event.address, now, event.busy, event.in_flight, closing=bool(event.serving))
    server = replace(server, lingers=event.serving or server.lingers)
    leader = server.controls[0].nonce if server.controls else event.control
    if any(c.nonce == event.control for c in server.controls):
        controls = tuple(control if c.nonce == event.control else c for c in server.controls)
    else:
        controls = (*server.controls, control)
    if event.world_size != server.world_size:
        server = _resized(server, event.world_size, now, orders)
    server = replace(server, controls=controls, seen=now, attached=True, lost_at=None, passes_kv=event.passes_kv)
    server = _powered(server, event.control, event.power)
    orders.append(Order(event.control, OrderKind.RENEWED))
    if event.term > server.term:  # numbered by a daemon on another store: the engine refuses all below
        server = replace(server, term=event.term)
        if event.control != leader:
            server = _lead(server, leader, orders)
    return _greet(server, control, orders, leads=event.control == leader)


def _lead(server: Server, leader: str, orders: list[Order]) -> Server:
    """From here on the engine obeys no order of an earlier term."""
    orders.append(Order(leader, OrderKind.LEAD))
    return replace(server, term=server.term + 1)


def _powered(server: Server, control: str, power: Power) -> Server:
    """What the leader says of its engine, but for while it changes. Weights that were dropped are nobody's."""
    if control != server.controls[0].nonce or not power or server.change is not None:
        return server
    dropped = power == Power.ASLEEP_2 and server.power != Power.ASLEEP_2
    return replace(server, power=power, torn=_all_ranks(server) if dropped else server.torn)


def _all_ranks(server: Server) -> frozenset[int]:
    return frozenset(range(server.world_size))


def _resized(server: Server, world_size: int, now: float, orders: list[Order]) -> Server:
    workers = {rank: worker for rank, worker in server.workers.items() if rank < world_size}
    torn = frozenset(rank for rank in server.torn if rank < world_size)
    if server.install is not None and server.install.active:
        server = _end_install(server, server.install, f"the server now has {world_size} workers", now)
    return _close_gate(replace(server, workers=workers, torn=torn, world_size=world_size), orders)


def _greet(server: Server, control: Control, orders: list[Order], *, leads: bool) -> Server:
    """Tells a control side what it is and where things stand."""
    if leads:
        server = _lead(server, control.nonce, orders)
    if server.busy_elsewhere(control):
        return server
    install, change = server.install, server.change
    if leads and change is not None and control.busy != change.id:
        orders.append(_power_order(server, control))
    if server.opened:
        if server.serves(server.opened):  # else it stays as it is: open or shut
            orders.append(_resume(server, control))
    elif install is not None and install.state == InstallState.APPLYING:
        if not leads:  # one that leads gets APPLY below, or is at it: it may have shut its gate over a failure by then
            orders.append(_hold(install, control))
    elif server.torn:
        orders.append(Order(control.nonce, OrderKind.CLOSE, reason="the last install went wrong half-way"))
    elif (server.goal.strict or not server.goal.in_service) and not (server.lingers and server.goal.permits(server.lingers)):
        orders.append(Order(control.nonce, OrderKind.CLOSE, reason=_closed_because(server)))
    if not leads or install is None or not install.active or control.busy == install.id:
        return server
    kind = OrderKind.STAGE if install.state == InstallState.STAGING else OrderKind.APPLY
    order = Order(control.nonce, kind, install.id, install.version, profile=install.profiled, ahead_of=install.ahead_of)
    orders.append(order)
    return replace(server, install=replace(install, control_done=False))


def _reported(server: Server, event: Reported, now: float, settings: Settings, orders: list[Order]) -> Server:
    control = next((c for c in server.controls if c.nonce == event.control), None)
    if control is None:
        return server
    was_busy = server.busy_elsewhere(control)
    idle = event.done is not None and event.install == control.busy
    closed = event.done in (OrderKind.CLOSE, OrderKind.APPLY, OrderKind.SLEEP)
    control = replace(
        control,
        seen=now,
        busy="" if idle else control.busy,
        in_flight=event.in_flight,
        closing=control.closing and not closed,
    )
    controls = tuple(control if c.nonce == control.nonce else c for c in server.controls)
    server = replace(server, controls=controls, seen=now)
    server = replace(_powered(server, control.nonce, event.power), lingers=_lingering(server))
    orders.append(Order(control.nonce, OrderKind.RENEWED))
    leads = control.nonce == server.controls[0].nonce
    if was_busy and idle:
        return _greet(server, control, orders, leads=leads)
    return _order_done(server, event, now, settings, orders) if leads and event.done is not None else server


def _order_done(server: Server, event: Reported, now: float, settings: Settings, orders: list[Order]) -> Server:
    """The leader said how an order went."""
    install, change = server.install, server.change
    if change is not None and event.install == change.id and event.done in (OrderKind.SLEEP, OrderKind.WAKE):
        return _power_changed(server, change, event, now, settings)
    if event.done == OrderKind.RESUME and server.opened and event.install == server.opened_by:
        if not event.ok:
            # Workers are proven, but the engine would not go on: whatever state it is in, it is not one to serve from.
            error = f"could not resume on version {server.opened}: {event.error}"
            server = _note_failure(server, server.opened, error, now, settings)
            return _close_gate(replace(server, torn=_all_ranks(server)), orders)
        return replace(_went_on(server, event), resumed=True)
    if install is None or not install.active or event.install != install.id:
        return server
    install = replace(install, timings=event.timings)
    if not event.ok and event.done in (OrderKind.STAGE, OrderKind.APPLY):
        return _fail(server, install, f"the control side could not {event.done.name.lower()} it: {event.error}", now, settings)
    if event.done == OrderKind.APPLY and install.state == InstallState.APPLYING:
        return replace(server, install=replace(install, control_done=True))
    return server


def _went_on(server: Server, event: Reported) -> Server:
    """What its leader said of the pause, once; the next install may have begun by then."""
    ended = server.ended
    if server.resumed or ended is None or ended.id != event.install or ended.pause_seconds:
        return server
    ended = replace(ended, pause_seconds=event.pause_seconds, timings=(*ended.timings, *event.timings))
    same = server.install is not None and server.install.id == ended.id
    return replace(server, ended=ended, install=ended if same else server.install)


def _let_go(server: Server, gone: set[str], orders: list[Order]) -> Server:
    leader = server.controls[0].nonce if server.controls else ""
    controls = tuple(control for control in server.controls if control.nonce not in gone)
    server = replace(server, controls=controls)
    server = replace(server, lingers=_lingering(server) if controls else server.lingers)
    return _greet(server, controls[0], orders, leads=True) if controls and leader in gone else server


def _lingering(server: Server) -> int:
    return server.lingers if any(control.closing for control in server.controls) else 0


def _worker_reported(server: Server, report: Worker, now: float, settings: Settings) -> Server:
    if report.process in server.gone or (server.world_size and report.rank >= server.world_size):
        return server
    if not server.attached:
        server = replace(server, seen=now, lost_at=None)
    server = _worker_taken(server, report, now, settings)
    kept = server.workers.get(report.rank)
    if kept is None or kept.process != report.process:
        return server
    return _keep_worker(server, replace(kept, verification=report.verification))


def _altered(server: Server, known: Worker, report: Worker) -> Server:
    """Its memory is not what its version gives: it counts as torn. What it has staged by now stays staged."""
    install = server.install
    goes_on = install is not None and install.active and known.install == install.id
    worker = replace(known, holds=0, held_as="", differs="") if goes_on else _holding(replace(report, ordered=known.ordered))
    server = replace(server, torn=server.torn | {report.rank}, altered={**server.altered, report.rank: report.error})
    return _keep_worker(server, worker)


def _worker_taken(server: Server, report: Worker, now: float, settings: Settings) -> Server:
    report = _judged(server, report)
    known = server.workers.get(report.rank)
    if known is None:
        return _keep_worker(server, _holding(report))
    if known.process != report.process:
        altered = {rank: found for rank, found in server.altered.items() if rank != report.rank}
        gone, torn = server.gone | {known.process}, server.torn - {report.rank}
        server = replace(server, gone=gone, torn=torn, altered=altered, failures={})
        if server.install is not None and server.install.active:
            server = _end_install(server, server.install, f"worker {report.rank} was replaced by another process", now)
            server = replace(server, torn=server.torn - {report.rank})
        return _keep_worker(server, _holding(report))
    if report.altered:
        return _altered(server, known, report)
    install = server.install
    if install is not None and report.install == install.id:
        return _keep_worker(server, _merge(server, install, known, report))
    if report.state == WorkerState.EMPTY and not report.error and (install is None or not install.active):
        return _keep_worker(server, replace(report, ordered=known.ordered))  # whoever it was that dropped its weights
    if not report.install.startswith(server.life) and not known.ordered:
        return _keep_worker(server, _holding(report))
    if _proven(report) == known.holds != 0:  # late, but for what it has found out of what it holds
        return _keep_worker(server, replace(known, held_as=report.fingerprint, differs=report.error))
    return server


def _judged(server: Server, report: Worker) -> Worker:
    """The report, or what it amounts to where it proves another version than the store's of that number."""
    stored, ahead = server.ready.get(report.version), server.ahead.get(report.version)
    if not _proven(report):
        return report
    if report.fingerprint == stored:
        return replace(report, error="")
    if ahead is not None and report.fingerprint == ahead.fingerprint:
        return report
    theirs = f"fingerprint {stored[:12]}" if stored is not None else "none READY"
    error = f"it holds a version {report.version} of fingerprint {report.fingerprint[:12] or 'unknown'}, the store has {theirs}"
    ordered = server.install is not None and server.install.active and report.install == server.install.id
    return replace(report, state=WorkerState.FAILED if ordered else WorkerState.EMPTY, version=0, error=error)


def _proven(report: Worker) -> int:
    return report.version if report.state in (WorkerState.BOOTED, WorkerState.APPLIED) else 0


def _holding(report: Worker) -> Worker:
    """With what it proves."""
    if not (version := _proven(report)):
        return replace(report, holds=0, held_as="", differs="")
    return replace(report, holds=version, held_as=report.fingerprint, differs=report.error)


def _merge(server: Server, install: Install, known: Worker, report: Worker) -> Worker:
    """A report on the current or last install, by a worker that is known."""
    report = replace(report, ordered=known.ordered, holds=known.holds, held_as=known.held_as, differs=known.differs)
    if report.state == WorkerState.APPLIED:
        return _holding(report)
    if report.state == WorkerState.FAILED:
        written = report.rank in server.torn or install.state == InstallState.COMMITTED
        return _holding(report) if written else report
    if known.install == report.install and known.state in (WorkerState.APPLIED, WorkerState.FAILED):
        return known  # STAGED came late
    return report


def _keep_worker(server: Server, worker: Worker) -> Server:
    return replace(server, workers={**server.workers, worker.rank: worker})


def _ticked(server: Server, now: float, settings: Settings, orders: list[Order]) -> Server:
    server = _let_go(server, {c.nonce for c in server.controls if now > c.seen + settings.lease}, orders)
    if server.controls or server.lost_at is not None or now <= server.seen + server.lease(settings):
        return server
    if server.install is not None and server.install.active:
        server = _end_install(server, server.install, "the server's lease ended", now)
    return replace(server, lost_at=now, opened=0, resumed=False, lingers=0, change=None)


def _end_install(server: Server, install: Install, error: str, now: float) -> Server:
    """Given up for a reason that says nothing about the version."""
    install = replace(install, state=InstallState.FAILED, error=error, ended=now)
    return replace(server, install=install, ended=install)


def _fail(server: Server, install: Install, error: str, now: float, settings: Settings) -> Server:
    if install.profiled and install.state == InstallState.STAGING:  # nobody needed it, and nothing was touched
        return _end_install(server, install, error, now)
    return _end_install(_note_failure(server, install.version, error, now, settings), install, error, now)


def _note_failure(server: Server, version: int, error: str, now: float, settings: Settings) -> Server:
    count = server.failures[version].count + 1 if version in server.failures else 1
    wait = backoff(count, settings.first_retry, settings.last_retry)
    return replace(server, failures={**server.failures, version: Failure(count, error, now + wait)})


def _move_install_on(server: Server, now: float, settings: Settings, orders: list[Order]) -> Server:
    install = server.install
    if install is None or not install.active:
        return server
    about = {rank: worker for rank, worker in server.workers.items() if worker.install == install.id}
    for rank, worker in about.items():
        if worker.state == WorkerState.FAILED:
            return _fail(server, install, f"worker {rank}: {worker.error or 'no reason given'}", now, settings)
        if worker.state == WorkerState.APPLIED and worker.version != install.version:
            return _fail(server, install, f"worker {rank} applied version {worker.version} instead", now, settings)
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
        return _fail(server, install, what, now, settings)
    return server


def _apply(server: Server, install: Install, now: float, orders: list[Order]) -> Server:
    leader, *others = server.controls
    orders += [_hold(install, control) for control in others]
    orders.append(Order(leader.nonce, OrderKind.APPLY, install.id, install.version, profile=install.profiled))
    return replace(
        server,
        install=replace(install, state=InstallState.APPLYING, step_started=now),
        workers={rank: replace(worker, ordered=True) for rank, worker in server.workers.items()},
        torn=_all_ranks(server),
        **_closing(server),
    )


def _closing(server: Server) -> dict[str, Any]:
    """What becomes of the gate when control sides are told to close it."""
    controls = tuple(replace(control, closing=True) for control in server.controls)
    return {"opened": 0, "resumed": False, "lingers": server.opened or server.lingers, "controls": controls}


def _hold(install: Install, control: Control) -> Order:
    """Requests wait for this install instead of being turned away."""
    return Order(control.nonce, OrderKind.CLOSE, install.id, install.version, f"version {install.version} is being installed")


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


def _close_gate(server: Server, orders: list[Order]) -> Server:
    """Closed, unless it is open on what every worker is proven to hold, awake and not to be drained."""
    kept = server.agreed == server.opened and server.power == Power.AWAKE and server.change is None
    if not server.opened or (kept and server.goal.in_service):
        return server
    return _close(server, _closed_because(server) if kept else f"not every worker holds version {server.opened}", orders)


def _leave_aborted(server: Server, settings: Settings, orders: list[Order]) -> Server:
    """What was served ahead of READY and became ABORTED is served on until its successor is staged, where one can be."""
    lost = server.opened and not server.serves(server.opened) and server.wanted in server.ready
    if not lost or _failed(server, server.wanted) < settings.attempts:
        return server
    return _close(server, f"version {server.opened} is not to be served any more, and no other could be installed", orders)


def _close(server: Server, reason: str, orders: list[Order]) -> Server:
    orders += [Order(control.nonce, OrderKind.CLOSE, reason=reason) for control in server.controls]
    return replace(server, **_closing(server))


def _closed_because(server: Server) -> str:
    if server.goal.power != Power.AWAKE:
        return "an operator put it to sleep"
    return "drained for maintenance" if not server.goal.open else "its version is not confirmed yet"


def _open_gate(server: Server, orders: list[Order]) -> Server:
    held = server.agreed
    if server.opened or not server.serves(held) or server.differs or not server.goal.permits(held):
        return server
    if server.power not in (Power.AWAKE, Power.UNKNOWN) or server.change is not None:
        return server
    controls = tuple(replace(control, closing=False) for control in server.controls)
    server = replace(server, opened=held, confirmed=held, resumed=False, controls=controls)
    server = replace(server, opened_by=_opening(server))
    orders += [_resume(server, control) for control in server.controls if not server.busy_elsewhere(control)]
    return server


def _opening(server: Server) -> str:
    install = server.install
    fits = install is not None and install.state == InstallState.COMMITTED and install.version == server.opened
    return install.id if install is not None and fits else f"{server.life}-0"


def _resume(server: Server, control: Control) -> Order:
    return Order(control.nonce, OrderKind.RESUME, server.opened_by, server.opened)


def target(server: Server, settings: Settings) -> int:
    """The version to install next, now or when its time for a retry has come; 0 where there is nothing to do, or no hope."""
    held = 0 if server.differs else server.opened or server.agreed
    choices = [version for version in (server.wanted, 0 if held else server.confirmed) if version != held]
    able = [version for version in choices if version in server.ready or not why_not_ahead(server, version)]
    counts = {version: _failed(server, version) for version in able}
    best = min(counts, key=lambda version: counts[version], default=0)
    return best if best and counts[best] < settings.attempts else 0


def why_not_ahead(server: Server, version: int) -> str:
    """Why it has to wait until the version is READY; empty where it can install it now."""
    if not server.is_ahead(version):
        return "it is not READY"
    if version in server.failures:
        return server.failures[version].error
    if server.opened not in server.ready:
        return "it serves no READY version that it could fall back on"
    behind = [rank for rank, worker in sorted(server.workers.items()) if not worker.direct]
    return f"worker {behind[0]} cannot take all of it over the direct path" if behind else ""


def _failed(server: Server, version: int) -> int:
    return server.failures[version].count if version in server.failures else 0


def _begin_install(server: Server, now: float, settings: Settings, orders: list[Order]) -> Server:
    if (server.install is not None and server.install.active) or server.change is not None:
        return server
    if server.power.asleep or server.goal.power.asleep:
        return server
    version = target(server, settings)
    if not version or (version in server.failures and now < server.failures[version].retry_at):
        return server
    return _stage(server, version, now, orders)


def _stage(server: Server, version: int, now: float, orders: list[Order], *, profiled: bool = False) -> Server:
    number = server.installs + 1
    ahead_of = server.opened if server.is_ahead(version) else 0
    id = f"{server.life}-{number}"
    install = Install(id, version, InstallState.STAGING, now, now, profiled=profiled, ahead_of=ahead_of)
    orders.append(Order(server.controls[0].nonce, OrderKind.STAGE, id, version, profile=profiled, ahead_of=ahead_of))
    return replace(server, install=install, installs=number)


def _rests(server: Server) -> bool:
    """It serves what it should, and neither does nor waits for anything."""
    installs = server.install is not None and server.install.active
    busy = installs or server.change is not None or any(control.busy for control in server.controls)
    served = server.serving if server.serving == server.agreed == server.wanted else 0
    return served in server.ready and bool(server.controls) and server.goal.apply and server.goal.permits(served) and not busy


def _drop_unwanted(server: Server, now: float, orders: list[Order]) -> Server:
    """A version that is being staged, and that the fleet wants no more, or not before the server wakes."""
    install = server.install
    if install is None or install.state != InstallState.STAGING:
        return server
    recovers = not server.opened and install.version == server.confirmed
    wanted = server.goal.version is None or install.version == server.wanted or recovers
    if wanted and server.serves(install.version) and not server.goal.power.asleep:
        return server
    orders.append(Order(server.controls[0].nonce, OrderKind.UNSTAGE, install.id, install.version))
    return _end_install(server, install, f"version {install.version} is not wanted any more", now)


def _change_power(server: Server, now: float, settings: Settings, orders: list[Order]) -> Server:
    """The next order towards the power that the fleet wants, one at a time, with the gate closed and no install under way."""
    if server.change is not None:
        if now <= server.change.began + settings.install_step:
            return server
        late = Reported("", server.change.id, ok=False, error=f"no answer in {settings.install_step:g} s")
        server = _power_changed(server, server.change, late, now, settings)
    power = _next_power(server, now, settings)
    if power is None or server.opened or (server.install is not None and server.install.active):
        return server
    number = server.changes + 1
    server = replace(server, change=Change(f"{server.life}-p{number}", power, now), changes=number)
    if power == Power.ASLEEP_2:
        server = replace(server, torn=_all_ranks(server))
    orders.append(_power_order(server, server.controls[0]))
    return server


def _next_power(server: Server, now: float, settings: Settings) -> Power | None:
    have, goal = server.power, server.goal.power
    if have == Power.UNKNOWN or (server.change_failed is not None and now < server.change_failed.retry_at):
        return None
    if goal.asleep:
        return None if have.asleep else goal
    if have.asleep:
        return Power.WEIGHTS_AWAKE
    if have == Power.WEIGHTS_AWAKE and goal == Power.AWAKE and server.serves(server.agreed):
        version = target(server, settings)
        waits = version in server.failures and now < server.failures[version].retry_at
        return Power.AWAKE if not version or waits else None
    return None


def _power_order(server: Server, leader: Control) -> Order:
    """Raises AssertionError where no change is under way."""
    assert server.change is not None
    kind = OrderKind.SLEEP if server.change.power.asleep else OrderKind.WAKE
    return Order(leader.nonce, kind, server.change.id, power=server.change.power, reason="the fleet wants it so")


def _power_changed(server: Server, change: Change, event: Reported, now: float, settings: Settings) -> Server:
    if event.ok:
        return replace(server, change=None, change_failed=None, power=change.power)
    count = server.change_failed.count + 1 if server.change_failed else 1
    wait = backoff(count, settings.first_retry, settings.last_retry)
    failed = Failure(count, f"could not go {change.power.name}: {event.error}", now + wait)
    server = replace(server, change=None, change_failed=failed)
    return replace(server, power=event.power) if event.power else server
