"""Conversion of versions, publishers, servers, fleets, workers and nodes to messages and back."""

import re
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from google.protobuf.timestamp_pb2 import Timestamp
from resharder.converters.wire.boxes import spec_to_proto
from resharder.server.fleets.commands import SERVE_AHEAD
from resharder.server.fleets.explain import FleetView, ServerView, explain_serve_ahead
from resharder.server.fleets.fleets import Fleets
from resharder.server.ingest.intake import Intake
from resharder.server.ingest.publisher import PublisherRecord
from resharder.server.observability.tracing.ids import Tracing
from resharder.server.state.errors import InvalidArgument, unknown_value
from resharder.server.state.fleet import Move, UpdateStrategy
from resharder.server.state.server import Install, Worker
from resharder.server.state.server_events import Attached, Reported
from resharder.server.state.timing import possible, timings_from_proto, timings_to_proto
from resharder.server.state.version import READY, UPLOADING, VersionRecord
from resharder.server.store.folder import StoreFolder
from resharder.server.store.manifest import Manifest
from resharder.server.store.store import Store
from resharder.v1 import resources_pb2, server_pb2
from resharder.v1.resources_pb2 import Power

_MAX_WAIT = 3600.0
_NODE_ID = re.compile(r"nodes/(?P<id>[A-Za-z0-9][A-Za-z0-9._-]{0,63})")


class Views:
    """Publishers and versions as messages."""

    def __init__(self, intake: Intake, fleets: Fleets, tracing: Tracing, data_address: str = "") -> None:
        self.intake, self.store, self.fleets, self._tracing = intake, intake.store, fleets, tracing
        self._data_address = data_address

    def publisher(self, publisher: PublisherRecord) -> resources_pb2.Publisher:
        """Convert a publisher, with its live ranks and its model's newest number."""
        live = self.intake.live_ranks(publisher)
        return resources_pb2.Publisher(
            name=publisher.name,
            model=publisher.model,
            job=publisher.job,
            epoch=publisher.epoch,
            world_size=publisher.world_size,
            state=resources_pb2.Publisher.State.Value(publisher.shown_state(live)),
            reason=f"{publisher.error.reason}: {publisher.error}" if publisher.error else "",
            registered_slots=len(publisher.registered),
            store=store_access(self.store.folder),
            lease_seconds=self.intake.lease_seconds,
            live_ranks=live,
            newest_version=self.store.catalogue.newest_number(publisher.model),
            data_address=self._data_address,
            base=publisher.base,
        )

    def version(self, record: VersionRecord, slots: bool = True) -> resources_pb2.Version:
        """Convert a version; with `slots`, the progress of each slot while it is UPLOADING."""
        message = version_to_proto(self.store, record, self.fleets.serving(record.model, record.number))
        message.trace = self._tracing.traceparent(record)
        if record.state == UPLOADING and self.store.folder.shared:
            message.folder = str(self.store.folder.path(record))
        if slots and record.state == UPLOADING:
            for rank, sealed, size, received in self.intake.progress(record):
                state = resources_pb2.Slot.SEALED if sealed else resources_pb2.Slot.OPEN
                message.slots.add(rank=rank, state=state, size_bytes=size, received_bytes=received)
            upload = self.intake.upload(record.model, record.number)
            message.frozen_from = upload.frozen_from if upload is not None else 0
            for home in upload.homes.homes if upload is not None else ():
                message.homes.add(node=f"nodes/{home.node}", folder=home.folder, gathers=home.gathers, shares=home.shares)
        return message


def version_to_proto(store: Store, record: VersionRecord, counts: tuple[int, int] = (0, 0)) -> resources_pb2.Version:
    """Convert a version. `counts` are the servers that serve it and those of its model."""
    return resources_pb2.Version(
        name=record.name,
        model=record.model,
        number=record.number,
        state=resources_pb2.Version.State.Value(record.state),
        reason=record.reason,
        epoch=record.epoch,
        step=record.step,
        job=record.job,
        size_bytes=record.size_bytes,
        tensor_count=record.tensor_count,
        create_time=timestamp(record.create_time),
        ready_time=timestamp(record.ready_time) if record.ready_time else None,
        folder=str(store.folder.path(record)) if _is_mappable(store, record) else "",
        fingerprint=record.fingerprint,
        used_by=store.lifecycle.holders(record.model, record.number),
        servers_serving=counts[0],
        servers_following=counts[1],
        skipped=record.skipped,
        warnings=record.warnings,
        base=record.base,
        base_version=record.base_version,
        sent_bytes=record.size_bytes - record.unsent_bytes if record.ready_time else 0,
    )


def _is_mappable(store: Store, record: VersionRecord) -> bool:
    """Return whether clients on this host may map a version's files: never while they lack pieces."""
    return record.state == READY and store.folder.shared and store.reader.partial(record.model, record.number) is None


def store_access(folder: StoreFolder) -> resources_pb2.StoreAccess | None:
    """Return the nonce file by which clients detect that they can map the store; None if they must not."""
    return resources_pb2.StoreAccess(nonce_file=str(folder.nonce_file), nonce=folder.nonce) if folder.shared else None


def manifest_to_proto(
    version: resources_pb2.Version, manifest: Manifest, data_address: str = "", config: bytes = b""
) -> server_pb2.Manifest:
    """Convert a manifest. Offsets are those of tensors in their files, in bytes."""
    return server_pb2.Manifest(
        version=version,
        data_address=data_address,
        config=config,
        tensors=[
            server_pb2.ManifestTensor(spec=spec_to_proto(spec), file=file.path, offset=offset, digest=manifest.digests[spec.name])
            for file in manifest.files
            for spec, offset in file.tensors
        ],
        files=[server_pb2.ManifestFile(path=file.path, header=file.header, size_bytes=file.size) for file in manifest.files],
    )


def timestamp(seconds: float) -> Timestamp:
    """Convert seconds since 1970."""
    made = Timestamp()
    made.FromNanoseconds(int(seconds * 1e9))
    return made


def worker_from_proto(message: resources_pb2.Worker) -> Worker:
    """Convert a worker's report. Raises InvalidArgument (WORKER) for an unknown state."""
    state = message.state
    if problem := unknown_value(resources_pb2.Worker.State, state, "a worker state"):
        raise InvalidArgument("WORKER", problem)
    if message.version < 0 or (state in (resources_pb2.Worker.BOOTED, resources_pb2.Worker.APPLIED) and not message.version):
        raise InvalidArgument(
            "WORKER", f"expected the version of a worker that is {resources_pb2.Worker.State.Name(state)}, got {message.version}"
        )
    return Worker(
        rank=message.rank,
        state=state,
        version=message.version,
        install=message.install,
        error=message.error[:4000],
        process=message.process,
        fingerprint=message.fingerprint,
        needed_bytes=message.needed_bytes,
        boxed_bytes=message.boxed_bytes,
        verified_tensors=message.verified_tensors,
        transport=message.transport,
        transport_reason=message.transport_reason[:500],
        warnings=tuple(text[:1000] for text in message.warnings[:8]),
        host=message.host[:128],
        stage_seconds=possible(message.stage_seconds),
        apply_seconds=possible(message.apply_seconds),
        memory=message.memory[:128],
        direct=message.direct and bool(message.memory),
        joined=message.joined,
        path=message.path,
        timings=timings_from_proto(message.timings),
        verification=_verification(message),
        altered=message.altered and state == resources_pb2.Worker.FAILED,
        released_bytes=max(0, message.released_bytes) if message.HasField("released_bytes") else None,
    )


def _verification(message: resources_pb2.Worker) -> resources_pb2.Verification | None:
    """Convert a verification of a rank, with bounded lists."""
    if not message.HasField("verification"):
        return None
    given = message.verification
    found = resources_pb2.Verification()
    found.CopyFrom(given)
    found.rank, found.request, found.skipped = message.rank, given.request[:64], given.skipped[:1000]
    found.seconds = possible(given.seconds)
    found.ClearField("different")
    found.different.extend(name[:500] for name in given.different[:8])
    found.ClearField("uncompared")
    for one in given.uncompared[:8]:
        names = [name[:500] for name in one.names[:8]]
        found.uncompared.add(reason=one.reason[:500], tensors=one.tensors, bytes=one.bytes, names=names)
    return found


def worker_to_proto(worker: Worker) -> resources_pb2.Worker:
    """Convert a worker, without what the daemon derives from its reports."""
    return resources_pb2.Worker(
        rank=worker.rank,
        state=worker.state,
        version=worker.version,
        install=worker.install,
        error=worker.error,
        process=worker.process,
        fingerprint=worker.fingerprint,
        needed_bytes=worker.needed_bytes,
        boxed_bytes=worker.boxed_bytes,
        verified_tensors=worker.verified_tensors,
        transport=worker.transport,
        transport_reason=worker.transport_reason,
        warnings=worker.warnings,
        path=worker.path,
        stage_seconds=worker.stage_seconds,
        apply_seconds=worker.apply_seconds,
        timings=timings_to_proto(worker.timings),
        verification=worker.verification,
        released_bytes=worker.released_bytes,
    )


def attached_from_proto(message: server_pb2.ControlReport) -> Attached:
    """Convert a first report. Raises InvalidArgument (POWER) for an unknown power state."""
    return Attached(
        message.control,
        message.world_size,
        message.address,
        message.install,
        known_power(message.power),
        message.in_flight,
        message.passes_kv,
        message.serving,
        message.term,
    )


def known_power(power: Power) -> Power:
    """Return a power state of a report, which may be unspecified. Raises InvalidArgument (POWER) for one of a later release."""
    if power and (problem := unknown_value(Power, power, "a power")):
        raise InvalidArgument("POWER", problem)
    return power


def report_from_proto(message: server_pb2.ControlReport) -> Reported:
    """Convert a report. Raises InvalidArgument (ORDER, POWER)."""
    if message.done and (problem := unknown_value(server_pb2.Order.Kind, message.done, "an order")):
        raise InvalidArgument("ORDER", problem)
    return Reported(
        message.control,
        message.install,
        message.done,
        message.ok,
        message.error[:4000],
        possible(message.pause_seconds),
        known_power(message.power),
        message.in_flight,
        timings_from_proto(message.timings),
        message.leaving,
        message.restarting,
        message.failure[:1000],
        message.workers_failed,
    )


def server_to_proto(view: ServerView) -> resources_pb2.Server:
    """Convert a server's view, with its workers and its last install."""
    server = view.server
    message = resources_pb2.Server(
        name=f"servers/{server.id}",
        fleet=server.fleet,
        model=server.model,
        state=resources_pb2.Server.State.Name(view.state),
        reason=view.reason,
        version=server.opened or server.agreed,
        wanted_version=server.wanted or server.opened or server.agreed,
        workers=[worker_to_proto(worker) for _, worker in sorted(server.workers.items())],
        lease_expire_time=timestamp(view.lease_expires),
        address=server.controls[0].address if server.controls else "",
        world_size=server.world_size,
        control_sides=len(server.controls),
        power=server.power,
        wanted_power=server.goal.power,
        drained=not server.goal.open,
        in_flight=sum(control.in_flight for control in server.controls),
        passes_kv=server.passes_kv,
        base_server=f"servers/{server.base_server}" if server.base_server else "",
        ahead=bool(server.opened) and server.unproven,
    )
    if server.install is not None:
        workers = [worker for worker in server.workers.values() if worker.install == server.install.id]
        message.install.CopyFrom(_install_to_proto(server.install, workers, view.to_wall))
    return message


def _install_to_proto(install: Install, workers: list[Worker], to_wall: float) -> resources_pb2.Install:
    """Convert an install. Stage and apply are those of the slowest worker."""
    return resources_pb2.Install(
        id=install.id,
        version=install.version,
        state=install.state,
        error=install.error,
        start_time=timestamp(install.started + to_wall),
        end_time=None if install.active else timestamp(install.ended + to_wall),
        stage_seconds=max((worker.stage_seconds for worker in workers), default=0.0),
        apply_seconds=max((worker.apply_seconds for worker in workers), default=0.0),
        pause_seconds=install.pause_seconds,
    )


def fleet_to_proto(view: FleetView) -> resources_pb2.Fleet:
    """Convert a fleet's view, with its last move."""
    fleet = view.fleet
    message = resources_pb2.Fleet(
        name=fleet.name,
        model=fleet.model,
        pause_mode=fleet.pause_mode,
        wanted_version=view.wanted_version,
        servers=[f"servers/{id}" for id in view.servers],
        returning=[f"servers/{id}" for id in view.returning],
        target=resources_pb2.VersionTarget(
            kind=fleet.target.kind,
            version=fleet.target.version,
            every_seconds=fleet.target.every_seconds,
        ),
        strategy=_strategy_to_proto(fleet.strategy),
        max_skew=fleet.max_skew,
        serve_ahead=fleet.serves_ahead,
        serve_ahead_setting=resources_pb2.ServeAhead.Name(next(n for n, on in SERVE_AHEAD.items() if on is fleet.serve_ahead)),
        serve_ahead_reason=explain_serve_ahead(fleet),
        settled_version=fleet.settled,
        refused=[resources_pb2.Refusal(version=version, reason=why) for version, why in sorted(fleet.refused.items())],
        power=fleet.power,
        reason=view.reason,
        base_binding=fleet.base_binding,
        base=view.base,
    )
    if fleet.move is not None:
        message.move.CopyFrom(_move_to_proto(fleet.move))
    return message


def _strategy_to_proto(strategy: UpdateStrategy) -> resources_pb2.UpdateStrategy:
    return resources_pb2.UpdateStrategy(**asdict(strategy))


def _move_to_proto(move: Move) -> resources_pb2.Move:
    return resources_pb2.Move(
        id=move.id,
        state=move.state,
        from_version=move.back_to,
        to_version=move.to,
        reason=move.reason,
        strategy=_strategy_to_proto(move.strategy),
        servers=move.servers,
        failed=dict(move.failed),
        start_time=timestamp(move.started),
        end_time=timestamp(move.ended) if move.ended else None,
    )


def node_id(name: str) -> str:
    """Return the id in `nodes/{id}`. Raises InvalidArgument (NODE)."""
    if (found := _NODE_ID.fullmatch(name)) is None:
        raise InvalidArgument("NODE", f"expected nodes/ID with an id of letters, digits, '.', '_' and '-', got {name[:200]!r}")
    return found["id"]


def seconds(wanted: float) -> float:
    """Return a request's bound on a wait, in seconds. Raises InvalidArgument (WAIT_SECONDS) unless it is 0 to 3600."""
    if not 0 <= wanted <= _MAX_WAIT:
        raise InvalidArgument("WAIT_SECONDS", f"expected wait_seconds of 0 to {_MAX_WAIT:.0f}, got {wanted}")
    return wanted


def page_of(items: Sequence[tuple[str, Any]], size: int, token: str) -> tuple[list[Any], str]:
    """Return the items after the one named `token`, and the token of the next page; empty on the last page.

    Args:
        items: Pairs of a unique name and an item, in order.
        size: Items of a page; 0: 100, at most 1000.
        token: Name of the last item of the previous page; empty for the first page.

    Raises InvalidArgument (PAGE_SIZE, PAGE_TOKEN).
    """
    if size < 0:
        raise InvalidArgument("PAGE_SIZE", f"expected a page size of 0 or more, got {size}")
    size = min(size or 100, 1000)
    names = [name for name, _ in items]
    if token and token not in names:
        raise InvalidArgument("PAGE_TOKEN", f"page token {token[:200]!r} is not in this list: start again")
    first = names.index(token) + 1 if token else 0
    chosen = items[first : first + size]
    return [item for _, item in chosen], chosen[-1][0] if first + size < len(items) else ""
