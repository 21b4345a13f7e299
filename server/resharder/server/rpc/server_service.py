"""ServerService: what vLLM servers call. Validates, calls the fleets and the store, and answers."""

import threading
from collections.abc import Iterator

import grpc
from google.protobuf.message import Message
from resharder.server.fleets.fleets import Attachment, Fleets
from resharder.server.fleets.profiles import Profiles
from resharder.server.fleets.verifications import Verifications
from resharder.server.ingest.coordinator import parse_name
from resharder.server.rpc.box_reads import Digester, check_boxes, chunks
from resharder.server.rpc.convert import (
    attached_from_proto,
    manifest_to_proto,
    power_to_proto,
    report_from_proto,
    server_to_proto,
    store_access,
    version_to_proto,
    worker_from_proto,
)
from resharder.server.state.errors import DaemonError, InvalidArgument
from resharder.server.state.server import Order
from resharder.server.store.store import Store
from resharder.v1 import resources_pb2, server_pb2

SERVICE = "resharder.v1.ServerService"


class ServerService:
    """One thread of the gRPC server for every attached control side, every download and every claim that waits."""

    def __init__(
        self, fleets: Fleets, store: Store, profiles: Profiles, verifications: Verifications, digest_threads: int
    ) -> None:
        self._fleets, self._store, self._profiles, self._verifications = fleets, store, profiles, verifications
        self._digester = Digester(store, digest_threads)

    def ClaimServer(self, request: server_pb2.ClaimServerRequest, context: grpc.ServicerContext) -> server_pb2.Claim:
        server = self._fleets.claim(
            request.server.removeprefix("servers/"),
            request.model.removeprefix("models/"),
            request.fleet,
            wait_seconds=request.wait_seconds,
            boot=request.boot,
            renews=request.renews,
            alive=context.is_active,
        )
        return server_pb2.Claim(
            server=f"servers/{server.id}",
            model=server.model,
            fleet=server.fleet,
            boot_version=server.boot_version,
            store=store_access(self._store),
            lease_seconds=self._fleets.settings.lease,
            attached=server.attached,
        )

    def Attend(self, reports: Iterator[server_pb2.ControlReport], context: grpc.ServicerContext) -> Iterator[server_pb2.Order]:
        first = next(reports, None)
        if first is None:
            return
        attachment = self._fleets.attach(first.server.removeprefix("servers/"), attached_from_proto(first))
        errors: list[DaemonError] = []
        reader = threading.Thread(target=_read, args=(first, reports, attachment, errors), name="attend", daemon=True)
        try:
            reader.start()
            for order in iter(attachment.orders.get, None):
                yield self._order_to_proto(attachment.server, order)
            if errors:
                raise errors[0]
        finally:
            attachment.close()

    def _order_to_proto(self, server: str, order: Order) -> server_pb2.Order:
        pause_mode, strict = self._fleets.policy(server)
        return server_pb2.Order(
            kind=order.kind.name,
            install=order.install,
            version=order.version,
            pause_mode=resources_pb2.PauseMode.Value(pause_mode.name),
            strict_lease=strict,
            power=power_to_proto(order.power),
            lease_seconds=self._fleets.settings.lease,
            reason=order.reason,
            profile=order.profile,
            ahead_of=order.ahead_of,
            term=order.term,
        )

    def ReportWorker(self, request: server_pb2.ReportWorkerRequest, context: grpc.ServicerContext) -> resources_pb2.Server:
        view = self._fleets.report_worker(request.server.removeprefix("servers/"), worker_from_proto(request.worker))
        answer = server_to_proto(view)
        answer.verify_request = self._verifications.requested(view.server.id)
        return answer

    def PutProfile(self, request: server_pb2.PutProfileRequest, context: grpc.ServicerContext) -> server_pb2.PutProfileResponse:
        self._profiles.put(request.server.removeprefix("servers/"), request.profile)
        return server_pb2.PutProfileResponse()

    def GetManifest(self, request: server_pb2.GetManifestRequest, context: grpc.ServicerContext) -> server_pb2.Manifest:
        model, number = parse_name(request.version, "versions")
        manifest = self._store.manifest(model, number)
        version = version_to_proto(self._store, manifest.record, self._fleets.serving(model, number))
        return manifest_to_proto(version, manifest)

    def DigestBoxes(self, request: server_pb2.BoxesRequest, context: grpc.ServicerContext) -> server_pb2.BoxDigests:
        boxes = check_boxes(request, self._store.manifest(*parse_name(request.version, "versions")))
        return server_pb2.BoxDigests(digests=self._digester.digests(boxes))

    def DownloadChunks(self, request: server_pb2.BoxesRequest, context: grpc.ServicerContext) -> Iterator[bytes]:
        boxes = check_boxes(request, self._store.manifest(*parse_name(request.version, "versions")))
        yield from chunks(self._store, boxes)

    def GetModel(self, request: server_pb2.GetModelRequest, context: grpc.ServicerContext) -> resources_pb2.Model:
        name = request.model.removeprefix("models/") or self._fleets.only_model()
        files = self._store.model_files(name)
        return resources_pb2.Model(
            name=name, files=[resources_pb2.ModelFile(path=path, content=content) for path, content in sorted(files.items())]
        )


def _read(
    first: server_pb2.ControlReport,
    reports: Iterator[server_pb2.ControlReport],
    attachment: Attachment,
    errors: list[DaemonError],
) -> None:
    """Brings the control side's reports in until its stream ends."""
    try:
        if first.done:
            attachment.report(report_from_proto(first))
        for report in reports:
            if report.control != first.control:
                raise InvalidArgument(
                    "CONTROL", f"this stream is of control side {first.control}, got a report of {report.control}"
                )
            attachment.report(report_from_proto(report))
    except grpc.RpcError:
        pass  # the peer is gone, which is what the end of this thread says
    except DaemonError as error:
        errors.append(error)
    finally:
        attachment.orders.put(None)


def add_server_service(service: ServerService, server: grpc.Server) -> None:
    """As the generated function does, but chunks are framed by hand and go out as they are."""
    unary: dict[str, type[Message]] = {
        "ClaimServer": server_pb2.ClaimServerRequest,
        "ReportWorker": server_pb2.ReportWorkerRequest,
        "PutProfile": server_pb2.PutProfileRequest,
        "GetManifest": server_pb2.GetManifestRequest,
        "DigestBoxes": server_pb2.BoxesRequest,
        "GetModel": server_pb2.GetModelRequest,
    }
    handlers = {
        name: grpc.unary_unary_rpc_method_handler(getattr(service, name), request.FromString, _serialize)
        for name, request in unary.items()
    }
    handlers["Attend"] = grpc.stream_stream_rpc_method_handler(service.Attend, server_pb2.ControlReport.FromString, _serialize)
    handlers["DownloadChunks"] = grpc.unary_stream_rpc_method_handler(service.DownloadChunks, server_pb2.BoxesRequest.FromString)
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, handlers),))
    server.add_registered_method_handlers(SERVICE, handlers)


def _serialize(message: Message) -> bytes:
    return bytes(message.SerializeToString())
