"""Spans of a version's trace from the timings of ranks, servers and the daemon: pure functions.

    version                        from its first rank's publish to READY, or ABORTED
    ├── publish                    one per rank: create, deliver
    ├── verify, commit             the daemon's
    ├── boot                       one per worker that booted on the version: stage, load
    └── install                    one per server and attempt
        ├── stage, apply           one per worker
        ├── turn, transfer, verify parts of apply, if measured
        └── pause, workers, reset, resume   the control side's

A span's `path` is its place in the trace, from which its id is derived.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from resharder.server.ingest.upload import SlotDelivery
from resharder.server.state.server import Install, Server, Worker
from resharder.server.state.timing import Timing
from resharder.server.state.version import ABORTED, VersionRecord
from resharder.v1 import resources_pb2

ROOT = "version"
Attributes = Mapping[str, str | int]


@dataclass(frozen=True)
class Span:
    """Span of a trace.

    `start` and `end` are in seconds since 1970. `link` is the W3C traceparent of a related span, or empty.
    """

    path: str
    parent: str  # its path; empty for ROOT
    name: str
    start: float
    end: float
    error: str = ""
    attributes: Attributes = field(default_factory=dict)
    link: str = ""


def version_spans(record: VersionRecord, deliveries: Mapping[int, SlotDelivery], own: Sequence[Timing], now: float) -> list[Span]:
    """Return the spans of a version that is no longer UPLOADING. `own` has the daemon's timings."""
    spans = [span for rank, delivery in sorted(deliveries.items()) for span in _publish(rank, delivery)]
    spans += _phases(ROOT, "daemon", own)
    error = record.reason or ABORTED if record.state == ABORTED else ""
    start = min([record.create_time, *(span.start for span in spans)])
    attributes: Attributes = {
        "resharder.state": record.state,
        "resharder.job": record.job,
        "resharder.epoch": record.epoch,
        "resharder.size_bytes": record.size_bytes,
        "resharder.tensors": record.tensor_count,
    }
    return [Span(ROOT, "", "version", start, record.ready_time or now, error, attributes), *spans]


def _publish(rank: int, delivery: SlotDelivery) -> Iterator[Span]:
    path = f"publish/{rank}"
    attributes: Attributes = {
        "resharder.rank": rank,
        "resharder.transport": delivery.transport,
        "resharder.size_bytes": delivery.size_bytes,
    }
    yield from _around(path, ROOT, "publish", delivery.timings, attributes, link=delivery.trace)


def boot_spans(server: Server, worker: Worker) -> list[Span]:
    """Return the spans of a worker's first report of its boot."""
    attributes = _about(server) | _of_worker(worker)
    return list(_around(f"boot/{server.id}/{worker.process}/{worker.rank}", ROOT, "boot", worker.timings, attributes))


def install_spans(server: Server, install: Install, to_wall: float) -> list[Span]:
    """Return the spans of an install that has ended. `to_wall`: seconds to add to its times for seconds since 1970."""
    error = install.error or "failed" if install.state == resources_pb2.Install.FAILED else ""
    attributes = _about(server) | {
        "resharder.install": install.id,
        "resharder.state": resources_pb2.Install.State.Name(install.state),
    }
    path = _path(install)
    whole = Span(path, ROOT, "install", install.started + to_wall, install.ended + to_wall, error, attributes)
    workers = [worker for _, worker in sorted(server.workers.items()) if worker.install == install.id]
    return [
        whole,
        *(span for worker in workers for span in _worker(path, server, worker)),
        *control_spans(install, install.timings),
    ]


def control_spans(install: Install, timings: Iterable[Timing]) -> list[Span]:
    """Return the spans of a control side's part of an install.

    They include the time from the install's end until the server resumes.
    """
    return list(_phases(_path(install), _path(install), timings))


def _path(install: Install) -> str:
    return f"install/{install.id}"


def _worker(parent: str, server: Server, worker: Worker) -> Iterator[Span]:
    attributes = {"resharder.server": server.id} | _of_worker(worker)
    error = worker.error or "failed" if worker.state == resources_pb2.Worker.FAILED else ""
    yield from _phases(parent, f"{parent}/{worker.rank}", worker.timings, attributes, error)


def _about(server: Server) -> dict[str, str | int]:
    return {"resharder.server": server.id, "resharder.fleet": server.fleet, "resharder.workers": server.world_size}


def _of_worker(worker: Worker) -> dict[str, str | int]:
    return {
        "resharder.rank": worker.rank,
        "resharder.transport": worker.transport,
        "resharder.size_bytes": worker.needed_bytes,
        "resharder.verified_tensors": worker.verified_tensors,
    }


def _around(
    path: str, parent: str, name: str, timings: Sequence[Timing], attributes: Attributes, link: str = ""
) -> Iterator[Span]:
    """Return a span around timings, and a span for each; nothing without timings."""
    if timings:
        end = max(timing.end for timing in timings)
        yield Span(path, parent, name, min(timing.start for timing in timings), end, "", attributes, link)
        yield from _phases(path, path, timings)


def _phases(
    parent: str,
    prefix: str,
    timings: Iterable[Timing],
    attributes: Attributes | None = None,
    error: str = "",
) -> Iterator[Span]:
    """Return one span for each timing; `error` is that of the last."""
    timings, seen = list(timings), Counter[str]()
    for number, timing in enumerate(timings, 1):
        seen[timing.phase] += 1
        path = f"{prefix}/{timing.phase}" + (f"/{seen[timing.phase]}" if seen[timing.phase] > 1 else "")
        ended_with = error if number == len(timings) else ""
        yield Span(path, parent, timing.phase, timing.start, timing.end, ended_with, attributes or {})
