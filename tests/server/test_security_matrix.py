"""Every role and every call, with real certificates before a real daemon: what is allowed works, everything else is refused and
changes nothing."""

import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import grpc
import pytest
from google.protobuf import descriptor_pool
from google.protobuf.message import Message
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection_pb2
from resharder.converters.geometry.layout import TensorSpec, full_box
from resharder.converters.storage.digest import digest
from resharder.converters.wire.boxes import boxes_to_proto, spec_to_proto
from resharder.server.rpc.methods import BY_PATH
from resharder.v1 import direct_pb2, node_pb2, operator_pb2, publisher_pb2, resources_pb2, server_pb2

from tests.support.observing import wait_until
from tests.support.publishing import Job, random_weights, reason_of, whole
from tests.support.secure import PROBE, Authority, SecureDaemon
from tests.support.variants import sampled

SPECS = [TensorSpec("a", "BF16", (64, 32)), TensorSpec("b", "F32", (32,))]
WEIGHTS = random_weights(SPECS, 1)
BOXES = [(spec.name, full_box(spec.shape)) for spec in SPECS]
CALLERS = {
    "publisher": ["publisher:policy"],
    "server": ["server:policy"],
    "operator": ["operator"],
    "operator-of-policy": ["operator:policy"],
    "viewer": ["viewer"],
    "node": ["node:policy"],
    "publisher-of-other": ["publisher:other"],
    "server-of-other": ["server:other"],
    "operator-of-other": ["operator:other"],
    "node-of-other": ["node:other"],
    "nobody": [],
}

P, S, O, F, V, N = ({name} for name in list(CALLERS)[:6])  # noqa: E741
OPERATORS = O | F | {"operator-of-other"}
KNOWN = set(CALLERS) - {"nobody"}
NO_ARCHIVE = "NO_ARCHIVE"


@dataclass(frozen=True)
class Case:
    """A call about the model, fleet or server `policy`. `ends`: what it comes to where it is allowed; None: not looked at."""

    method: str
    request: Message | bytes
    allowed: set[str]
    ends: str | None = ""


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SecureDaemon]:
    everything = ["publisher:*", "server:*", "operator"]
    roles = {f"dns:{name}.test": given for name, given in CALLERS.items() if given} | {f"dns:{PROBE}": everything}
    with SecureDaemon(Authority(tmp_path_factory.mktemp("pki")), roles, lease_seconds=600) as made:
        yield made


@pytest.fixture(scope="module")
def cases(daemon: SecureDaemon) -> list[Case]:
    """With a version READY, one UPLOADING, one ABORTED, and a server that has claimed its id."""
    job = Job(daemon.channel, SPECS, [whole(SPECS)]).connect()
    ready = job.publish(1, WEIGHTS)
    aborted = job.begin(2)
    job.stub.AbortVersion(publisher_pb2.AbortVersionRequest(version=aborted.name, epoch=job.epoch))
    staging = job.begin(3)
    servers = daemon.channel.unary_unary("/resharder.v1.ServerService/ClaimServer")
    servers(server_pb2.ClaimServerRequest(server="one", model="policy", boot=True).SerializeToString())
    return [
        *publishing(job, ready, staging, aborted),
        *serving(ready),
        *operating(ready),
        *hosting(ready),
        *direct(job, ready),
        *others(),
    ]


def publishing(job: Job, ready: Any, staging: Any, aborted: Any) -> Iterator[Case]:
    digests = [digest(WEIGHTS[name], box, WEIGHTS[name].shape) for name, box in BOXES]
    slot = {"epoch": job.epoch, "rank": 0}
    requests = {
        "CreatePublisher": publisher_pb2.CreatePublisherRequest(model={"name": "policy"}, job=job.job, world_size=1),
        "RegisterSlot": publisher_pb2.RegisterSlotRequest(
            publisher=job.name,
            tensors=map(spec_to_proto, SPECS),
            boxes=boxes_to_proto((number, box, False) for number, (_, box) in enumerate(BOXES)),
        ),
        "GetAssignment": publisher_pb2.GetAssignmentRequest(publisher=job.name),
        "RenewLease": publisher_pb2.RenewLeaseRequest(publisher=job.name),
        "CreateVersion": publisher_pb2.CreateVersionRequest(publisher=job.name, step=3),
        "ExchangeMaxima": publisher_pb2.ExchangeMaximaRequest(version=staging.name, **slot),
        "UploadChunks": job.chunks(staging.number, 0, WEIGHTS, only=[0])[0],
        "ListMissingChunks": publisher_pb2.SlotRequest(version=staging.name, **slot),
        "ReleaseFiles": publisher_pb2.ReleaseFilesRequest(version=staging.name, **slot),
        "ThawFiles": publisher_pb2.SlotRequest(version=staging.name, **slot),
        "SealSlot": publisher_pb2.SealSlotRequest(version=ready.name, digests=digests, **slot),
        "AbortVersion": publisher_pb2.AbortVersionRequest(version=aborted.name, epoch=job.epoch),
        "WaitVersion": publisher_pb2.WaitVersionRequest(version=ready.name),
    }
    for name, request in requests.items():
        yield Case(f"/resharder.v1.PublisherService/{name}", request, P)


def serving(ready: Any) -> Iterator[Case]:
    boxes = server_pb2.BoxesRequest(version=ready.name, tensors=["a"], boxes=boxes_to_proto([(0, BOXES[0][1], False)]))
    worker = resources_pb2.Worker(
        state=resources_pb2.Worker.BOOTED, version=ready.number, fingerprint=ready.fingerprint, process="process"
    )
    requests = {
        "ClaimServer": (server_pb2.ClaimServerRequest(server="one", model="policy"), S),
        "Attend": (server_pb2.ControlReport(server="one", control="control", world_size=1), S),
        "ReportWorker": (server_pb2.ReportWorkerRequest(server="servers/one", worker=worker), S),
        "PutProfile": (server_pb2.PutProfileRequest(server="servers/one"), S),
        "GetManifest": (server_pb2.GetManifestRequest(version=ready.name), P | S | O | N),
        "GetNextFiles": (server_pb2.GetNextFilesRequest(version=ready.name), P | S | O),
        "DigestBoxes": (boxes, P | S | O),
        "DownloadChunks": (boxes, P | S | O | N),
        "GetModel": (server_pb2.GetModelRequest(model="policy"), P | S | O),
    }
    for name, (request, allowed) in requests.items():
        yield Case(f"/resharder.v1.ServerService/{name}", request, allowed)


def operating(ready: Any) -> Iterator[Case]:
    fleet = resources_pb2.Fleet(name="policy", max_skew=0)
    requests: dict[str, tuple[Message, set[str], str]] = {
        "GetDaemon": (operator_pb2.GetDaemonRequest(), KNOWN, ""),
        "ListVersions": (operator_pb2.ListVersionsRequest(model="policy"), P | S | OPERATORS | V | N, ""),
        "GetVersion": (operator_pb2.GetVersionRequest(version=ready.name), P | S | OPERATORS | V | N, ""),
        "ListServers": (operator_pb2.ListServersRequest(), KNOWN, ""),
        "ListFleets": (operator_pb2.ListFleetsRequest(), KNOWN, ""),
        "ListNodes": (operator_pb2.ListNodesRequest(), OPERATORS | V, ""),
        "SetNodeDrained": (operator_pb2.SetNodeDrainedRequest(node="nodes/none"), O, "NODE_UNKNOWN"),
        "ListEvents": (operator_pb2.ListEventsRequest(), OPERATORS | V, ""),
        "ListArchive": (operator_pb2.ListArchiveRequest(), OPERATORS | V, NO_ARCHIVE),
        "ExportVersion": (operator_pb2.ExportVersionRequest(version=ready.name), P | S | O, ""),
        "UpdateFleet": (operator_pb2.UpdateFleetRequest(fleet=fleet, update_mask={"paths": ["max_skew"]}), O | F, ""),
        "RollBackFleet": (operator_pb2.RollBackFleetRequest(fleet="policy"), O | F, "NO_EARLIER"),
        "DecideMove": (operator_pb2.DecideMoveRequest(fleet="policy"), O | F, "NOTHING_TO_DECIDE"),
        "SetPower": (operator_pb2.SetPowerRequest(fleet="policy", power=resources_pb2.AWAKE), O | F, ""),
        "SetDrained": (operator_pb2.SetDrainedRequest(fleet="policy", drained=True), O | F, ""),
        "DeleteFleet": (operator_pb2.DeleteFleetRequest(fleet="policy"), O | F, "FLEET_IN_USE"),
        "ForgetServer": (operator_pb2.ForgetServerRequest(server="servers/one"), O | F, "NOT_LOST"),
        "ProfileInstall": (operator_pb2.ProfileInstallRequest(server="servers/one"), O | F, "NOT_SERVING"),
        "VerifyServer": (operator_pb2.VerifyServerRequest(server="servers/one"), O | F, "NO_VERIFICATION"),
        "RetireVersions": (operator_pb2.RetireVersionsRequest(model="policy", keep=1), O, ""),
        "ArchiveVersion": (operator_pb2.ArchiveVersionRequest(version=ready.name), O, NO_ARCHIVE),
        "RestoreVersion": (operator_pb2.RestoreVersionRequest(version=ready.name), O, NO_ARCHIVE),
    }
    for name, (request, allowed, ends) in requests.items():
        yield Case(f"/resharder.v1.OperatorService/{name}", request, allowed, ends)


def hosting(ready: Any) -> Iterator[Case]:
    part = {"file": "model.safetensors", "start": 1, "end": 2}
    requests: dict[str, tuple[Message, set[str], str]] = {
        "SyncNode": (node_pb2.SyncNodeRequest(node="nodes/one", instance="i", leaving=True), N | {"node-of-other"}, ""),
        "GetPieceChecksums": (node_pb2.GetPieceChecksumsRequest(version=ready.name, **part), N, "NODE"),
        "GetHostVersion": (node_pb2.GetHostVersionRequest(version=ready.name), S, ""),
        "GetReservedFiles": (
            node_pb2.GetReservedFilesRequest(publisher=f"models/policy/publishers/{ready.epoch}", node="nodes/none"),
            N,
            "NODE_UNKNOWN",
        ),
        "PutFileProof": (
            node_pb2.PutFileProofRequest(version=ready.name, node="nodes/none", problem="a problem"),
            N,
            "NODE_UNKNOWN",
        ),
        "GetSnapshot": (node_pb2.GetSnapshotRequest(node="nodes/none", model="policy"), N, "MODEL_UNKNOWN"),
        "PutSnapshots": (node_pb2.PutSnapshotsRequest(node="nodes/none"), N | {"node-of-other"}, ""),
    }
    for name, (request, allowed, ends) in requests.items():
        yield Case(f"/resharder.v1.NodeService/{name}", request, allowed, ends)


def direct(job: Job, ready: Any) -> Iterator[Case]:
    """As a rank and as a worker; what comes of it is the matter of other tests."""
    for owner, allowed in ((job.name, P), ("servers/one", S)):
        member = {"owner": owner, "process": "process"}
        requests = {
            "DeclareMemory": direct_pb2.DeclareMemoryRequest(member=member),
            "OfferVersion": direct_pb2.OfferVersionRequest(member=member, version=ready.name, memory="none"),
            "JoinTransfer": direct_pb2.JoinTransferRequest(member=member, version=ready.name, memory="none"),
            "MeetRanks": direct_pb2.MeetRanksRequest(member=member, memory="none"),
            "StartTransfer": direct_pb2.TransferRequest(member=member, group="none"),
            "FinishTransfer": direct_pb2.FinishTransferRequest(member=member, group="none"),
            "PutDigests": direct_pb2.PutDigestsRequest(member=member, group="none", version=ready.name),
            "GetDigests": direct_pb2.GetDigestsRequest(member=member, group="none", version=ready.name),
        }
        for name, request in requests.items():
            yield Case(f"/resharder.v1.DirectService/{name}", request, allowed, None)
    members = P | S | {"publisher-of-other", "server-of-other"}
    yield Case("/resharder.v1.DirectService/SetGroupKey", direct_pb2.SetGroupKeyRequest(group="none"), members, None)
    yield Case("/resharder.v1.DirectService/GetGroupKey", direct_pb2.GetGroupKeyRequest(group="none"), members, None)


def others() -> Iterator[Case]:
    for name in ("Check", "Watch"):
        yield Case(f"/grpc.health.v1.Health/{name}", health_pb2.HealthCheckRequest(), set(CALLERS))
    reflected = reflection_pb2.ServerReflectionRequest(list_services="")
    yield Case("/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo", reflected, KNOWN)


def outcome(channel: grpc.Channel, case: Case) -> str:
    """The reason of its refusal, else the status of its failure, or nothing: the first answer of a stream is enough."""
    service, _, name = case.method[1:].rpartition("/")
    method = descriptor_pool.Default().FindServiceByName(service).methods_by_name[name]
    shape = f"{'stream' if method.client_streaming else 'unary'}_{'stream' if method.server_streaming else 'unary'}"
    message = case.request if isinstance(case.request, bytes) else case.request.SerializeToString()
    call = getattr(channel, shape)(case.method)
    try:
        answer = call(iter([message]) if method.client_streaming else message, timeout=60)
        if method.server_streaming:
            next(answer, None)
            answer.cancel()
    except grpc.RpcError as error:
        has_reason = "grpc-status-details-bin" in dict(error.trailing_metadata() or ())
        return reason_of(error) if has_reason else str(error.code().name)
    return ""


def state(daemon: SecureDaemon) -> tuple[object, ...]:
    """Every file of the store with the time of its last change, and everything that the daemon says of itself."""
    files = sorted((str(path), path.lstat().st_size, path.lstat().st_mtime_ns) for path in daemon.store.rglob("*"))
    answers = [
        operator_pb2.Daemon.FromString(ask(daemon, "GetDaemon", operator_pb2.GetDaemonRequest())),
        operator_pb2.ListVersionsResponse.FromString(ask(daemon, "ListVersions", operator_pb2.ListVersionsRequest())),
        operator_pb2.ListFleetsResponse.FromString(ask(daemon, "ListFleets", operator_pb2.ListFleetsRequest())),
    ]
    answers[0].ClearField("time")
    servers = operator_pb2.ListServersResponse.FromString(ask(daemon, "ListServers", operator_pb2.ListServersRequest()))
    for server in servers.servers:
        server.ClearField("lease_expire_time")
    return (files, *map(str, answers), str(servers))


def ask(daemon: SecureDaemon, name: str, request: Message) -> bytes:
    answer: bytes = daemon.channel.unary_unary(f"/resharder.v1.OperatorService/{name}")(request.SerializeToString(), timeout=60)
    return answer


def as_(daemon: SecureDaemon, caller: str) -> grpc.Channel:
    options = [("grpc.max_receive_message_length", -1)]
    return grpc.secure_channel(daemon.endpoint, daemon.authority.tls(f"{caller}.test").credentials(), options=options)


def served(cases: list[Case]) -> list[Case]:
    return [case for case in cases if case.method in BY_PATH]


def test_the_matrix_has_every_call(cases: list[Case]) -> None:
    assert {case.method for case in cases} == BY_PATH.keys() - {"/grpc.health.v1.Health/List"}, (
        "which grpcio-health-checking has not made yet"
    )


@pytest.mark.parametrize("caller", sampled(CALLERS, ["publisher-of-other", "server", "viewer", "node", "nobody"]))
def test_whoever_has_no_role_for_a_call_is_refused_and_nothing_changes(
    caller: str, daemon: SecureDaemon, cases: list[Case]
) -> None:
    before = settled(daemon)
    with as_(daemon, caller) as channel:
        refused = [case for case in served(cases) if caller not in case.allowed]
        assert [(case.method, outcome(channel, case)) for case in refused] == [(case.method, "NOT_ALLOWED") for case in refused]
    assert state(daemon) == before


def settled(daemon: SecureDaemon) -> tuple[object, ...]:
    """The state, once it stays as it is: what earlier tests were allowed to do may have gone on."""
    found = [state(daemon)]

    def same() -> bool:
        found.append(state(daemon))
        time.sleep(0.2)
        return len(found) > 6 and all(one == found[-1] for one in found[-6:])

    wait_until(same, "the daemon's state stays as it is")
    return found[-1]


@pytest.mark.parametrize("caller", CALLERS)
def test_whoever_has_a_role_for_a_call_can_make_it(caller: str, daemon: SecureDaemon, cases: list[Case]) -> None:
    with as_(daemon, caller) as channel:
        for case in [case for case in served(cases) if caller in case.allowed]:
            found = outcome(channel, case)
            assert found not in ("NOT_ALLOWED", "NO_IDENTITY", "TOKEN_UNKNOWN", "UNKNOWN", "INTERNAL"), (case.method, found)
            assert case.ends in (None, found), (case.method, found)


def versions(daemon: SecureDaemon, caller: str) -> list[resources_pb2.Version]:
    with as_(daemon, caller) as channel:
        listed = channel.unary_unary("/resharder.v1.OperatorService/ListVersions")
        request = operator_pb2.ListVersionsRequest(model="policy").SerializeToString()
        return list(operator_pb2.ListVersionsResponse.FromString(listed(request, timeout=60)).versions)


def said_of_itself(daemon: SecureDaemon, caller: str) -> operator_pb2.Daemon:
    with as_(daemon, caller) as channel:
        get = channel.unary_unary("/resharder.v1.OperatorService/GetDaemon")
        return operator_pb2.Daemon.FromString(get(operator_pb2.GetDaemonRequest().SerializeToString(), timeout=60))


@pytest.mark.usefixtures("cases")
def test_only_those_who_may_read_weights_are_told_where_they_lie(daemon: SecureDaemon) -> None:
    for caller, may in {
        "publisher": True,
        "server": True,
        "operator": True,
        "viewer": False,
        "operator-of-policy": False,
    }.items():
        ready = [version for version in versions(daemon, caller) if version.state == resources_pb2.Version.READY]
        assert [bool(version.folder) for version in ready] == [may], caller
        found = said_of_itself(daemon, caller)
        shown = [bool(found.store_folder), bool(found.store.nonce), *(bool(p.store.nonce) for p in found.publishers)]
        assert shown == [may] * 3, caller
        assert list(found.models) == ["policy"]
    stranger = said_of_itself(daemon, "publisher-of-other")
    assert [*stranger.models, *stranger.publishers, stranger.store_folder, stranger.store.nonce] == ["", b""]


@pytest.mark.usefixtures("cases")
def test_who_does_not_look_at_everything_sees_the_fleets_and_servers_of_its_model_alone(daemon: SecureDaemon) -> None:
    seen = {}
    for caller in ("viewer", "publisher", "server", "publisher-of-other", "server-of-other"):
        with as_(daemon, caller) as channel:
            servers, fleets = (channel.unary_unary(f"/resharder.v1.OperatorService/List{what}") for what in ("Servers", "Fleets"))
            found = operator_pb2.ListServersResponse.FromString(servers(b"", timeout=60)).servers
            there = operator_pb2.ListFleetsResponse.FromString(fleets(b"", timeout=60)).fleets
            seen[caller] = [server.name for server in found] + [fleet.name for fleet in there]
    all_ = ["servers/one", "policy"]
    assert seen == {"viewer": all_, "publisher": all_, "server": all_, "publisher-of-other": [], "server-of-other": []}


@pytest.mark.usefixtures("cases")
def test_a_role_for_a_fleet_does_not_make_one_that_follows_another_model(daemon: SecureDaemon) -> None:
    """Else its servers could read whatever model they name."""
    fleet = resources_pb2.Fleet(name="other", model="policy")
    make = Case("/resharder.v1.OperatorService/UpdateFleet", operator_pb2.UpdateFleetRequest(fleet=fleet), set())
    with as_(daemon, "operator-of-other") as channel:
        assert outcome(channel, make) == "NOT_ALLOWED"
    request = server_pb2.ClaimServerRequest(server="two", model="policy", fleet="other")
    with as_(daemon, "server-of-other") as channel:
        assert outcome(channel, Case("/resharder.v1.ServerService/ClaimServer", request, set())) == "NOT_ALLOWED"
    with as_(daemon, "server") as channel:
        mine = server_pb2.ClaimServerRequest(server="two", model="policy", fleet="other")
        assert outcome(channel, Case("/resharder.v1.ServerService/ClaimServer", mine, set())) == "NOT_ALLOWED"
