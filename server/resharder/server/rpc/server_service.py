"""ServerService: calls of vLLM servers."""

import hashlib
import threading
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from functools import partial

import numpy as np
from resharder.converters.failpoints import failpoint
from resharder.converters.geometry.layout import full_box
from resharder.converters.storage.files import Array
from resharder.converters.wire.chunk_frame import frame
from resharder.server.fleets.fleets import Attachment, Fleets
from resharder.server.fleets.worker_requests import Profiles, Verifications
from resharder.server.infra.change_signal import Pause, Waiting
from resharder.server.rpc.convert import (
    attached_from_proto,
    manifest_to_proto,
    report_from_proto,
    server_to_proto,
    store_access,
    version_to_proto,
    worker_from_proto,
)
from resharder.server.rpc.dispatch import Call
from resharder.server.state.errors import InvalidArgument
from resharder.server.state.server_events import Order
from resharder.server.state.version import parse_name
from resharder.server.store.box_reads import CheckedBoxes, check_boxes, packed_chunks
from resharder.server.store.digests import TensorBox, digest_boxes
from resharder.server.store.manifest import Manifest
from resharder.server.store.reader import VersionReader
from resharder.server.store.store import Store
from resharder.v1 import resources_pb2, server_pb2

_ORDERS_SECONDS = 60.0  # longest pause; a new order ends it
_CACHED_DIGESTS = 1 << 21  # 8 bytes each
_CACHED_REQUESTS = 256
_BORROWED_BYTES = 512 << 20  # of tensors that are digested at a time, where they come from nodes
_CACHED_MANIFESTS = 4  # some MB each for models of many thousand tensors


class ServerService:
    """Methods of `ServerService`. Errors are those of the parts that each method calls."""

    def __init__(
        self,
        fleets: Fleets,
        store: Store,
        profiles: Profiles,
        verifications: Verifications,
        digest_threads: int,
        data_address: str = "",
    ) -> None:
        self._data_address = data_address
        self._fleets, self._store, self._profiles, self._verifications = fleets, store, profiles, verifications
        self._digester, self._manifests = _BoxDigester(store.reader, digest_threads), _Manifests()

    def ClaimServer(self, request: server_pb2.ClaimServerRequest, call: Call) -> Waiting[server_pb2.Claim]:
        """Register a server's process; with `boot`, wait for a version to load."""
        failpoint("server.claim")
        server = yield from self._fleets.claim(
            request.server.removeprefix("servers/"),
            request.model.removeprefix("models/"),
            request.fleet,
            wait_seconds=request.wait_seconds,
            boot=request.boot,
            renews=request.renews,
            base_server=request.base_server.removeprefix("servers/"),
        )
        return server_pb2.Claim(
            server=f"servers/{server.id}",
            model=server.model,
            fleet=server.fleet,
            boot_version=server.boot_version,
            store=store_access(self._store.folder),
            lease_seconds=self._fleets.settings.lease,
            attached=server.attached,
        )

    def Attend(self, call: Call) -> "Attendance":
        """Exchange reports and orders with a control side, until either side ends the stream."""
        return Attendance(self._fleets)

    def ReportWorker(self, request: server_pb2.ReportWorkerRequest, call: Call) -> resources_pb2.Server:
        """Record a worker's report. The answer may carry a request to verify its memory."""
        failpoint("server.worker-report")
        view = self._fleets.report_worker(request.server.removeprefix("servers/"), worker_from_proto(request.worker))
        answer = server_to_proto(view)
        answer.verify_request = self._verifications.requested(view.server.id)
        return answer

    def PutProfile(self, request: server_pb2.PutProfileRequest, call: Call) -> server_pb2.PutProfileResponse:
        """Pass a worker's profile to the operator that waits for it."""
        self._profiles.put(request.server.removeprefix("servers/"), request.profile)
        return server_pb2.PutProfileResponse()

    def GetManifest(self, request: server_pb2.GetManifestRequest, call: Call) -> server_pb2.Manifest:
        """Return the tensors, files and digests of a READY version, or of one that nodes replicate before it is READY."""
        model, number = parse_name(request.version, "versions")
        verified = self._store.reader.waiting(model, number) if request.replica else None
        manifest = verified.manifest if verified is not None else self._store.reader.manifest(model, number)
        version = version_to_proto(self._store, manifest.record, self._fleets.serving(model, number))
        return self._manifests.message(version, manifest, self._data_address, self._store.reader.config(model, number))

    def GetNextFiles(self, request: server_pb2.GetNextFilesRequest, call: Call) -> server_pb2.NextFiles:
        """Return the folder of the files for the version after a READY one."""
        folder = self._store.lifecycle.next_files(*parse_name(request.version, "versions"))
        return server_pb2.NextFiles(folder=str(folder or ""))

    def DigestBoxes(self, request: server_pb2.BoxesRequest, call: Call) -> server_pb2.BoxDigests:
        """Return the digests of boxes of a READY version, in the order of the boxes."""
        boxes = check_boxes(request, self._store.reader.manifest(*parse_name(request.version, "versions")))
        return server_pb2.BoxDigests(digests=self._digester.digests(boxes))

    def DownloadChunks(self, request: server_pb2.BoxesRequest, call: Call) -> Iterator[bytes]:
        """Stream the bytes of boxes of a READY version, which is pinned until the call ends."""
        boxes = check_boxes(request, self._store.reader.manifest(*parse_name(request.version, "versions")))
        record, names = boxes.manifest.record, {each.spec.name for each in boxes.boxes}
        reader, version = self._store.reader, (record.model, record.number)
        reading = partial(reader.reading, *version) if reader.borrow is not None else None  # chunk by chunk
        with (
            reader.open(*version, names if reading is None else ()) as files,
            closing(packed_chunks(files.arrays, boxes, reading)) as packed,
        ):
            for header, data in packed:
                message = frame(header, data, record.model if header.index == 0 else "")
                del data  # of a mapped file
                yield message

    def GetModel(self, request: server_pb2.GetModelRequest, call: Call) -> resources_pb2.Model:
        """Return `config.json` and the tokenizer's files of the version that a server of a fleet boots now.

        Without a READY version, they are those of the newest publisher; without a model's name, those of the only one. For a
        version that the request names, they are all files but the weights.
        """
        name = request.model.removeprefix("models/") or self._fleets.only_model()
        if request.version:
            files = self._store.reader.files_besides_weights(name, request.version)
        else:
            files = self._store.reader.model_files(name, self._fleets.boot_version(name, request.fleet))
        return resources_pb2.Model(
            name=name, files=[resources_pb2.ModelFile(path=path, content=content) for path, content in sorted(files.items())]
        )


class Attendance:
    """Session of a control side's stream of reports and orders."""

    def __init__(self, fleets: Fleets) -> None:
        self._fleets = fleets
        self._attachment: Attachment | None = None

    def receive(self, report: server_pb2.ControlReport) -> None:
        """Attach the control side with its first report, then process each further one."""
        if self._attachment is None:
            failpoint("server.attach")
            self._attachment = self._fleets.attach(report.server.removeprefix("servers/"), attached_from_proto(report))
            if report.done:
                self._attachment.report(report_from_proto(report))
            return
        known = self._attachment.first.control
        if report.control != known:
            raise InvalidArgument(
                "CONTROL", f"expected reports of control side {known} on this stream, got one of {report.control}"
            )
        self._attachment.report(report_from_proto(report))

    def end(self) -> None:
        """End the orders, because the control side sends no further reports."""
        if self._attachment is not None:
            self._attachment.put(None)

    def responses(self) -> Iterator[server_pb2.Order | Pause]:
        """Yield orders until the stream is ended or replaced by a newer one."""
        attachment = self._attachment
        assert attachment is not None
        while True:
            seen = attachment.changed.count
            while not attachment.orders.empty():
                order = attachment.orders.get_nowait()
                if order is None:
                    return
                failpoint("server.order")
                yield self._order_to_proto(attachment.server, order)
            yield attachment.changed.pause(seen, _ORDERS_SECONDS)

    def close(self) -> None:
        """Detach the control side."""
        if self._attachment is not None:
            self._attachment.close()

    def _order_to_proto(self, server: str, order: Order) -> server_pb2.Order:
        pause_mode, strict = self._fleets.policy(server)
        return server_pb2.Order(
            kind=order.kind,
            install=order.install,
            version=order.version,
            pause_mode=pause_mode,
            strict_lease=strict,
            power=order.power,
            lease_seconds=self._fleets.settings.lease,
            reason=order.reason,
            profile=order.profile,
            ahead_of=order.ahead_of,
            term=order.term,
            boots_another=order.boots_another,
            base_version=order.base_version,
        )


class _Manifests:
    """Messages of manifests. Thread-safe.

    Those of the last layouts are used again, with other digests: the versions of a model have one layout.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._known: OrderedDict[tuple[tuple[str, bytes, int], ...], server_pb2.Manifest] = OrderedDict()

    def message(
        self, version: resources_pb2.Version, manifest: Manifest, data_address: str, config: bytes
    ) -> server_pb2.Manifest:
        """Return the message of a manifest, as `manifest_to_proto`."""
        layout = tuple((file.path, file.header, file.size) for file in manifest.files)  # a header describes all of its tensors
        with self._lock:
            known = self._known.get(layout)
            if known is not None:
                self._known.move_to_end(layout)
        if known is None:
            known = manifest_to_proto(resources_pb2.Version(), manifest)
            with self._lock:
                self._known[layout] = known
                while len(self._known) > _CACHED_MANIFESTS:
                    self._known.popitem(last=False)
        found = server_pb2.Manifest(version=version, data_address=data_address, config=config)
        found.MergeFrom(known)
        for tensor, digest in zip(found.tensors, _digests_in_order(manifest), strict=True):
            tensor.digest = digest
        return found


def _digests_in_order(manifest: Manifest) -> Iterator[int]:
    return (manifest.digests[placed.spec.name] for file in manifest.files for placed in file.tensors)


class _BoxDigester:
    """Digests of boxes in the store. Thread-safe.

    The last 256 answers are cached, because workers of a fleet request the same boxes. Concurrent requests divide the threads.
    """

    def __init__(self, reader: VersionReader, threads: int) -> None:
        self._reader, self._threads = reader, threads
        self._lock, self._asking = threading.Lock(), 0
        self._known: OrderedDict[tuple[str, bytes], Array] = OrderedDict()

    def digests(self, boxes: CheckedBoxes) -> list[int]:
        """Return the digests, in the order of the boxes. Raises as `VersionReader.open` does."""
        record = boxes.manifest.record
        # by fingerprint, because numbers restart with a new store
        key = (record.fingerprint, hashlib.sha256(repr([(b.spec.name, b.box) for b in boxes.boxes]).encode()).digest())
        with self._lock:
            known = self._known.get(key)
            if known is not None:
                self._known.move_to_end(key)
        if known is None:
            with self._share() as threads:
                known = np.array(self._compute(boxes, threads), dtype=np.uint64)
            self._keep(key, known)
        return [int(value) for value in known]

    @contextmanager
    def _share(self) -> Iterator[int]:
        with self._lock:
            self._asking += 1
            threads = max(1, self._threads // self._asking)
        try:
            yield threads
        finally:
            with self._lock:
                self._asking -= 1

    def _compute(self, boxes: CheckedBoxes, threads: int) -> list[int]:
        record, whole = boxes.manifest.record, boxes.manifest.digests
        parts = [each for each in boxes.boxes if each.box != full_box(each.spec.shape)]
        digests = list[int]()
        for some in _batches(parts, _BORROWED_BYTES if self._reader.borrow is not None else 0):
            with self._reader.open(record.model, record.number, {each.spec.name for each in some}) as files:
                digests += digest_boxes(files, some, threads)
        found = iter(digests)
        return [whole[spec.name] if box == full_box(spec.shape) else next(found) for spec, box in boxes.boxes]

    def _keep(self, key: tuple[str, bytes], values: Array) -> None:
        with self._lock:
            self._known[key] = values
            while len(self._known) > _CACHED_REQUESTS or sum(v.size for v in self._known.values()) > _CACHED_DIGESTS:
                self._known.popitem(last=False)


def _batches(boxes: Sequence[TensorBox], most: int) -> Iterator[Sequence[TensorBox]]:
    """Yield boxes in batches, the tensors of each of which have at most `most` bytes, or are one; with 0, all at once."""
    batch, names = list[TensorBox](), dict[str, int]()
    for each in boxes:
        size = 0 if each.spec.name in names else each.spec.size
        if most and batch and sum(names.values()) + size > most:
            yield batch
            batch, names = [], {}
        batch.append(each)
        names[each.spec.name] = each.spec.size
    if batch:
        yield batch
