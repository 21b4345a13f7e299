"""Decisions about access: the table of roles, the rule of each call, the resource of a request, a caller's limits."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from google.protobuf import message_factory
from google.protobuf.descriptor import MethodDescriptor
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection_pb2
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError
from resharder.converters.wire.chunk_frame import ChunkHeader, frame
from resharder.server.config import Config, ConfigError, load
from resharder.server.infra.addresses import is_loopback
from resharder.server.rpc.methods import BY_PATH, METHODS, OURS, About, Cost, Method, Role
from resharder.server.security.files import read_tokens
from resharder.server.security.identities import bearer, identity, of_grpc, of_ssl
from resharder.server.security.limits import BURST_SECONDS, Limits
from resharder.server.security.resources import resource_of
from resharder.server.security.roles import Grant, Roles
from resharder.server.security.rules import Resource, decide
from resharder.server.state.errors import DaemonError, ResourceExhausted
from resharder.v1 import direct_pb2, node_pb2, operator_pb2, publisher_pb2, resources_pb2, server_pb2

PROTO = Path(__file__).parents[2] / "proto/resharder/v1"


def methods() -> Iterator[tuple[str, MethodDescriptor]]:
    """Every call of every service that the daemon could offer."""
    own = [file.DESCRIPTOR for file in (publisher_pb2, server_pb2, operator_pb2, direct_pb2, node_pb2)]
    for file in [*own, health_pb2.DESCRIPTOR, reflection_pb2.DESCRIPTOR]:
        for service in file.services_by_name.values():
            for method in service.methods:
                yield f"/{service.full_name}/{method.name}", method


def test_the_table_has_every_method_of_every_service_and_no_other() -> None:
    """Enter a new method in rpc/methods.py, and the fields that name its resource in security/resources.py."""
    assert len(BY_PATH) == len(METHODS)
    assert {name for name, _ in methods()} ^ BY_PATH.keys() <= {"/grpc.health.v1.Health/List"}, "older grpcio lacks it"
    in_files = {
        line.split()[1] for path in PROTO.glob("*.proto") for line in path.read_text().splitlines() if line[:8] == "service "
    }
    assert {f"resharder.v1.{name}" for name in in_files} == {
        method.service for method in METHODS if method.service.startswith(OURS)
    }


class World:
    """Fleets `policy` and `canaries` follow policy, `other` follows other; server s is of canaries."""

    fleets = {"policy": "policy", "canaries": "policy", "other": "other"}  # noqa: RUF012

    def only_model(self) -> str:
        return "policy"

    def following(self) -> dict[str, str]:
        return dict(self.fleets)

    def fleet_of(self, server: str) -> str:
        return {"s": "canaries"}.get(server, "")


def about(name: str, request: object) -> Resource:
    return resource_of(next(method for method in METHODS if method.name == name), request, World())


VERSION = "models/policy/versions/3"
HEADER = ChunkHeader(3, 1, 0, 0, 0)
POLICY = ("policy", ("policy", "canaries"))


@pytest.mark.parametrize(
    ("name", "request_", "model", "fleets"),
    [
        ("CreatePublisher", publisher_pb2.CreatePublisherRequest(model=resources_pb2.Model(name="policy")), *POLICY),
        ("RenewLease", publisher_pb2.RenewLeaseRequest(publisher="models/policy/publishers/1"), *POLICY),
        ("SealSlot", publisher_pb2.SealSlotRequest(version=VERSION), *POLICY),
        ("SealSlot", publisher_pb2.SealSlotRequest(version="models/policy"), "", ()),
        ("UploadChunks", frame(HEADER, b"", "policy"), *POLICY),
        ("UploadChunks", frame(HEADER, b""), "", ()),
        ("UploadChunks", b"\xff" * 9, "", ()),
        ("GetManifest", server_pb2.GetManifestRequest(version=VERSION), *POLICY),
        ("GetModel", server_pb2.GetModelRequest(), *POLICY),
        ("GetModel", server_pb2.GetModelRequest(model="models/new"), "new", ("new",)),
        ("ListVersions", operator_pb2.ListVersionsRequest(), "", ()),
        ("ListVersions", operator_pb2.ListVersionsRequest(model="policy"), *POLICY),
        ("ClaimServer", server_pb2.ClaimServerRequest(server="new", fleet="canaries"), "", ("canaries",)),
        ("ClaimServer", server_pb2.ClaimServerRequest(server="new"), "", ("policy",)),
        ("ClaimServer", server_pb2.ClaimServerRequest(server="new", model="new"), "", ("new",)),
        ("ClaimServer", server_pb2.ClaimServerRequest(server="new", model="other", fleet="mine"), "", ()),
        ("ClaimServer", server_pb2.ClaimServerRequest(server="s", fleet="policy"), "", ("canaries", "policy")),
        ("Attend", server_pb2.ControlReport(server="servers/s"), "", ("canaries",)),
        ("ReportWorker", server_pb2.ReportWorkerRequest(server="s"), "", ("canaries",)),
        ("UpdateFleet", operator_pb2.UpdateFleetRequest(fleet=resources_pb2.Fleet(name="canaries")), "", ("canaries",)),
        ("UpdateFleet", operator_pb2.UpdateFleetRequest(fleet=resources_pb2.Fleet(name="new", model="other")), "", ()),
        ("SetPower", operator_pb2.SetPowerRequest(fleet="fleets/canaries"), "", ("canaries",)),
        ("RetireVersions", operator_pb2.RetireVersionsRequest(model="policy"), "", ()),
        ("DeclareMemory", direct_pb2.DeclareMemoryRequest(member={"owner": "models/policy/publishers/1"}), "policy", ()),
        ("DeclareMemory", direct_pb2.DeclareMemoryRequest(member={"owner": "servers/s"}), "", ("canaries",)),
        ("JoinTransfer", direct_pb2.JoinTransferRequest(member={"owner": "servers/s"}, version=VERSION), "", ("canaries",)),
        (
            "JoinTransfer",
            direct_pb2.JoinTransferRequest(member={"owner": "servers/s"}, version="models/other/versions/1"),
            "",
            (),
        ),
    ],
)
def test_what_a_request_is_about(name: str, request_: object, model: str, fleets: tuple[str, ...]) -> None:
    found = about(name, request_)
    assert (found.model, sorted(found.fleets)) == (model, sorted(fleets))


@pytest.mark.parametrize("method", [name for name, _ in methods()])
def test_an_empty_request_is_about_nothing_that_a_narrow_role_covers(method: str) -> None:
    entry, descriptor = BY_PATH[method], dict(methods())[method]
    request = message_factory.GetMessageClass(descriptor.input_type)()
    try:
        resource = resource_of(entry, b"" if descriptor.name == "UploadChunks" else request, World())
    except DaemonError:
        return
    grants = [Grant(Role.PUBLISHER, "other"), Grant(Role.SERVER, "other"), Grant(Role.OPERATOR, "other")]
    assert entry.about is About.NOTHING or decide(grants, entry, resource)


NAMED = [
    ("dns:trainer.test", "dns:trainer.test", True),
    ("dns:trainer.test", "dns:TRAINER.test", True),
    ("dns:trainer.test", "cn:trainer.test", False),
    ("dns:trainer.test", "token:trainer.test", False),
    ("dns:trainer.test", "dns:trainerxtest", False),
    ("dns:*.test", "dns:a.test", True),
    ("dns:*.test", "dns:a.b.test", False),
    ("dns:*.test", "dns:a.test.evil", False),
    ("uri:spiffe://x/ns/serve/sa/*", "uri:spiffe://x/ns/serve/sa/vllm", True),
    ("uri:spiffe://x/ns/serve/sa/*", "uri:spiffe://x/ns/serve/sa/vllm/more", False),
    ("uri:spiffe://x/ns/*/sa/vllm", "uri:spiffe://x/ns/a/b/sa/vllm", False),
    ("token:*", "token:a.b", True),
    ("cn:*", "dns:a", False),
]


@pytest.mark.parametrize(("row", "name", "matches"), NAMED)
def test_a_row_is_of_the_names_that_it_matches_whole(row: str, name: str, matches: bool) -> None:
    kind, _, value = name.partition(":")
    assert bool(Roles({row: ["viewer"]}).of([identity(kind, value)])) is matches


def test_a_caller_has_the_roles_of_all_its_rows_and_operators_are_viewers() -> None:
    roles = Roles({"dns:a": ["publisher:p", "server:f*"], "token:b": ["operator:g"], "token:c": ["operator"]})
    assert roles.of(["dns:a", "token:b"]) == (
        Grant(Role.PUBLISHER, "p"),
        Grant(Role.SERVER, "f*"),
        Grant(Role.OPERATOR, "g"),
        Grant(Role.VIEWER),
    )
    assert roles.of(["dns:b"]) == ()
    assert Grant(Role.SERVER, "f*").covers("f.1")
    assert not Grant(Role.SERVER, "f*").covers("g")


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ({"trainer": ["viewer"]}, "expected a row as KIND:NAME with a KIND of dns, .*got 'trainer'"),
        ({"dns:": ["viewer"]}, "expected a row as KIND:NAME"),
        ({"host:a": ["viewer"]}, "got 'host:a'"),
        ({"dns:a": ["root"]}, "dns:a: expected a role of publisher, server, node, operator, viewer, got 'root'"),
        ({"dns:a": ["publisher"]}, "dns:a: expected publisher:MODEL, or publisher:\\* for every model"),
        ({"dns:a": ["server"]}, "expected server:FLEET"),
        ({"dns:a": ["node"]}, "expected node:FLEET"),
        ({"dns:a": ["server:"]}, "dns:a: expected a name after the colon"),
        ({"dns:a": ["viewer:policy"]}, "dns:a: expected viewer alone"),
    ],
)
def test_a_wrong_row_is_refused_by_name(table: dict[str, list[str]], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Roles(table)


@given(
    st.sampled_from([method for method in METHODS if method.who]),
    st.lists(st.builds(Grant, st.sampled_from(Role), st.sampled_from(["a", "b"])), max_size=4),
)
def test_more_roles_allow_more_and_what_is_anothers_stays_anothers(method: Method, grants: list[Grant]) -> None:
    theirs = Resource("models/c", "c", ("c",))
    mine = [Grant(role, "c") for role in (Role.PUBLISHER, Role.SERVER, Role.NODE)]
    wider = [*grants, *mine, Grant(Role.OPERATOR), Grant(Role.VIEWER)]
    assert not decide(wider, method, theirs)
    looks = [grant for grant in grants if grant.role is Role.VIEWER]
    if method.about is not About.NOTHING and not (looks and Role.VIEWER in method.who):
        assert decide(grants, method, theirs)


def test_names_are_those_of_a_verified_certificate_and_keep_their_kind() -> None:
    properties = {"peer_dns": [b"A.test"], "peer_email": [b"dns:b.test"], "x509_common_name": [b"c"], "x509_subject": [b"CN=c"]}
    assert of_grpc(properties) == ("dns:a.test", "email:dns:b.test", "cn:c")
    assert of_grpc({}) == ()
    certificate = {
        "subject": ((("commonName", "c"),),),
        "subjectAltName": (("DNS", "A.test"), ("URI", "spiffe://x"), ("other", "y")),
    }
    assert of_ssl(certificate) == ("dns:a.test", "uri:spiffe://x", "cn:c")
    assert of_ssl(None) == ()


@pytest.mark.parametrize("headers", [["Basic x"], ["Bearer "], ["x"], [""], ["Bearer a", "Bearer a"]])
def test_an_authorization_that_is_no_token_is_refused(headers: list[str]) -> None:
    with pytest.raises(DaemonError, match="needs one authorization header"):
        bearer(headers)


def test_lines_of_tokens_are_a_name_and_a_hash(tmp_path: Path) -> None:
    file = tmp_path / "tokens"
    file.write_text(f"# all\n\nalice sha256:{'a' * 64}  # old\nalice sha256:{'b' * 64}\n")
    assert read_tokens(file) == {"a" * 64: "alice", "b" * 64: "alice"}
    for wrong in ("alice", f"alice {'a' * 64}", f"alice sha256:{'a' * 63}", f"al/ice sha256:{'a' * 64}"):
        file.write_text(f"bob sha256:{'a' * 64}\n{wrong}")
        with pytest.raises(ValueError, match=r"tokens, line 2 is not NAME sha256:HEX"):
            read_tokens(file)


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_a_caller_that_begins_too_many_calls_is_refused_until_time_has_passed_and_others_are_not() -> None:
    clock = Clock()
    limits = Limits(2, 1, clock)
    for _ in range(round(2 * BURST_SECONDS)):
        limits.begin("a")
    for _ in range(3):
        with pytest.raises(ResourceExhausted, match="a makes more than 2 calls a second") as caught:
            limits.begin("a")
        assert caught.value.reason == "TOO_FAST"
    limits.begin("b")
    limits.begin("a", renewal=True)
    clock.now = 0.5
    limits.begin("a")
    with pytest.raises(ResourceExhausted):
        limits.begin("a")
    Limits(0, 1, clock).begin("a")


def test_who_has_all_its_calls_back_is_forgotten() -> None:
    clock = Clock()
    limits = Limits(1, 1, clock)
    for i in range(5000):
        limits.begin(f"caller {i}")
    clock.now = 60.0
    limits.begin("one more")
    assert len(limits._left) == 1


def test_a_caller_has_no_more_calls_open_than_it_may() -> None:
    limits = Limits(0, 2)
    with limits.open("a"), limits.open("a"), limits.open("b"):
        with pytest.raises(ResourceExhausted, match="a has 2 open calls") as caught, limits.open("a"):
            pass
        assert caught.value.reason == "TOO_MANY_CALLS"
    with limits.open("a"), limits.open("a"):
        pass
    assert not limits._open


def test_calls_with_long_messages_are_those_that_carry_much() -> None:
    large = {method.name for method in METHODS if method.large}
    carrying = {"CreatePublisher", "RegisterSlot", "ExchangeMaxima", "UploadChunks", "SealSlot", "DigestBoxes", "DownloadChunks"}
    carrying |= {"PutFileProof", "PutSnapshots"}
    assert large == carrying | {"DeclareMemory", "PutDigests", "SetGroupKey", "GetGroupKey", "PutProfile"}
    assert {"UploadChunks", "DownloadChunks", "RegisterSlot"} <= {m.name for m in METHODS if m.cost is Cost.TRANSFER}


@pytest.mark.parametrize(
    ("listen", "is_"),
    [
        ("127.0.0.1:1", True),
        ("127.9.9.9:1", True),
        ("[::1]:1", True),
        ("localhost:1", True),
        ("unix:/run/resharder.sock", True),
        ("0.0.0.0:1", False),
        ("[::]:1", False),
        ("127.example.com:1", False),
        ("daemon:1", False),
        ("10.0.0.1:1", False),
    ],
)
def test_a_daemon_without_security_listens_on_the_loopback_unless_it_is_told_to_be_insecure(listen: str, is_: bool) -> None:
    assert is_loopback(listen) is is_
    for option in ("listen", "web_listen"):
        if is_:
            assert getattr(Config(**{option: listen}), option) == listen
        else:
            with pytest.raises(ValidationError, match=f"expected a loopback address without security, got .*{listen[-1]}"):
                Config(**{option: listen})
        Config(**{option: listen}, insecure=True)


@pytest.mark.parametrize(
    ("security", "message"),
    [
        ("{certificate: a, key: b, roles: {}}", "set client_ca, tokens or both"),
        ("{certificate: a, tokens: c, roles: {}}", "security.key"),
        ("{certificate: a, key: b, tokens: c}", "security.roles"),
        ("{certificate: a, key: b, tokens: c, roles: {dns:a: [root]}}", "dns:a: expected a role"),
        ("{certificate: a, key: b, tokens: c, roles: {}, rolls: {}}", "rolls"),
    ],
)
def test_a_wrong_security_is_refused_by_name(security: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "file.yaml").write_text(f"security: {security}")
    with pytest.raises(ConfigError, match=message):
        load(tmp_path / "file.yaml", {})
