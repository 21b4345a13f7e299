"""Reports of workers: which version each one has, and which is torn or altered."""

from dataclasses import replace

from resharder.server.fleets.reconciler.installs import end_install, fail
from resharder.server.state.server import Install, Server, Settings, Worker
from resharder.v1 import resources_pb2


def worker_reported(server: Server, report: Worker, now: float, settings: Settings) -> Server:
    """Apply a worker's report. Reports of replaced processes and of ranks beyond the world size are ignored."""
    if _is_replaced(server, report, now, settings) or (server.world_size and report.rank >= server.world_size):
        return server
    if not server.attached:
        server = replace(server, seen=now, lost_at=None, failure="")
    server = _worker_taken(replace(server, reported_at={**server.reported_at, report.rank: now}), report, now, settings)
    kept = server.workers.get(report.rank)
    if kept is None or kept.process != report.process:
        return server
    return _keep_worker(server, replace(kept, verification=report.verification, released_bytes=report.released_bytes))


def _is_replaced(server: Server, report: Worker, now: float, settings: Settings) -> bool:
    """Return whether another process has taken the rank of the report's process.

    A report that arrives late, also the first one, can make a dead process the successor of the living one. The living one
    returns with its report on the current install, whose id only the processes of the running engine have, or once the other
    has been silent for a lease: living workers report every few seconds.
    """
    install = server.install
    ordered = install is not None and install.active and report.install == install.id
    silent = now > server.reported_at.get(report.rank, now) + settings.lease
    return report.process in server.gone and report.rank in server.workers and not ordered and not silent


def _altered(server: Server, known: Worker, report: Worker) -> Server:
    """Mark a worker as torn after a verification found a difference. Its staged slices remain."""
    install = server.install
    goes_on = install is not None and install.active and known.install == install.id
    worker = replace(known, holds=0, held_as="", differs="") if goes_on else _holding(replace(report, ordered=known.ordered))
    server = replace(server, torn=server.torn | {report.rank}, altered={**server.altered, report.rank: report.error})
    return _keep_worker(server, worker)


def _worker_taken(server: Server, report: Worker, now: float, settings: Settings) -> Server:
    report = _judged(server, report)
    known = server.workers.get(report.rank)
    if known is None:
        return _keep_worker(replace(server, gone=server.gone - {report.process}), _holding(report))
    if known.process != report.process:
        altered = {rank: found for rank, found in server.altered.items() if rank != report.rank}
        returns, install = report.process in server.gone, server.install
        gone, torn = (server.gone | {known.process}) - {report.process}, server.torn - {report.rank}
        server = replace(server, gone=gone, torn=torn, altered=altered, failures={})
        if install is not None and install.active:
            if returns:
                server = end_install(server, install, f"worker {report.rank} was replaced by another process", now)
            else:
                ended = f"worker {report.rank} ended, and another process has taken its place"
                server = fail(server, install, ended, now, settings)
            server = replace(server, torn=server.torn - {report.rank})
        return _keep_worker(server, _holding(report))
    if report.altered:
        return _altered(server, known, report)
    install = server.install
    if install is not None and report.install == install.id:
        return _keep_worker(server, _merge(server, install, known, report))
    if report.state == resources_pb2.Worker.EMPTY and not report.error and (install is None or not install.active):
        return _keep_worker(
            server, replace(report, ordered=known.ordered)
        )  # its weights were dropped, by an order or by another program
    if not report.install.startswith(server.life) and not known.ordered:
        return _keep_worker(server, _holding(report))
    if _proven(report) == known.holds != 0:  # a late report, but with the result of a comparison
        return _keep_worker(server, replace(known, held_as=report.fingerprint, differs=report.error))
    return server


def _judged(server: Server, report: Worker) -> Worker:
    """Return the report, as EMPTY or FAILED if the worker's version is not the store's version of that number."""
    stored, ahead = server.ready.get(report.version), server.ahead.get(report.version)
    if not _proven(report):
        return report
    if report.fingerprint == stored:
        return replace(report, error="")
    if ahead is not None and report.fingerprint == ahead.fingerprint:
        return report
    theirs = f"fingerprint {stored[:12]}" if stored is not None else "none READY"
    error = (
        f"it holds version {report.version} with fingerprint {report.fingerprint[:12] or 'unknown'}, and the store has {theirs}"
    )
    ordered = server.install is not None and server.install.active and report.install == server.install.id
    return replace(report, state=resources_pb2.Worker.FAILED if ordered else resources_pb2.Worker.EMPTY, version=0, error=error)


def _proven(report: Worker) -> int:
    return report.version if report.state in (resources_pb2.Worker.BOOTED, resources_pb2.Worker.APPLIED) else 0


def _holding(report: Worker) -> Worker:
    """Return a report with the version that it verifies."""
    if not (version := _proven(report)):
        return replace(report, holds=0, held_as="", differs="")
    return replace(report, holds=version, held_as=report.fingerprint, differs=report.error)


def _merge(server: Server, install: Install, known: Worker, report: Worker) -> Worker:
    """Return the state of a known worker after its report on the current or last install."""
    report = replace(report, ordered=known.ordered, holds=known.holds, held_as=known.held_as, differs=known.differs)
    if report.state == resources_pb2.Worker.APPLIED:
        return _holding(report)
    if report.state == resources_pb2.Worker.FAILED:
        written = report.rank in server.torn or install.state == resources_pb2.Install.COMMITTED
        return _holding(report) if written else report
    if known.install == report.install and known.state in (resources_pb2.Worker.APPLIED, resources_pb2.Worker.FAILED):
        return known  # a late STAGED
    return report


def _keep_worker(server: Server, worker: Worker) -> Server:
    return replace(server, workers={**server.workers, worker.rank: worker})
