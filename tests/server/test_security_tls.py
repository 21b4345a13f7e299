"""Certificates and tokens before a real daemon: who is let in, files that change under it, the page, the command, the SDKs."""

import base64
import collections
import datetime
import importlib.metadata
import json
import socket
import ssl
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, closing
from pathlib import Path

import grpc
import pytest
from resharder.client import Operator, Tls
from resharder.client.errors import AccessDenied, NotFound, ResharderError, UsageError, WaitTimeout
from resharder.client.inference.settings import PluginSettings
from resharder.client.rpc.channel import Channel
from resharder.client.rpc.daemon_channel import DaemonChannel
from resharder.converters.geometry.layout import TensorSpec
from resharder.v1 import operator_pb2, operator_pb2_grpc, resources_pb2, server_pb2, server_pb2_grpc
from safetensors.torch import load_file

from tests.client.models import connected, equal, publish_all, weights
from tests.support.command import resharder
from tests.support.daemon import Daemon, free_port
from tests.support.publishing import Job, random_weights, reason_of, whole
from tests.support.secure import PROBE, Authority, SecureDaemon
from tests.support.simulated_server import SimulatedServer

RELEASE = importlib.metadata.version("resharder")
SPECS = [TensorSpec("a", "BF16", (64, 32))]
ALL = ["operator", "publisher:*", "server:*"]
ROLES = {
    f"dns:{PROBE}": ALL,
    "dns:trainer.test": ["publisher:policy"],
    "dns:server.test": ["server:policy"],
    "dns:viewer.test": ["viewer"],
    "token:alice": ["operator"],
    "token:probe": ["viewer"],
}


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path / "pki")


@pytest.fixture
def daemon(authority: Authority) -> Iterator[SecureDaemon]:
    with SecureDaemon(authority, ROLES, web_listen=f"127.0.0.1:{free_port()}") as made:
        yield made


def let_in(daemon: Daemon, tls: Tls) -> bool:
    with Operator(daemon.endpoint, connect_timeout=60, tls=tls) as operator:
        return operator.daemon().release == RELEASE


def turned_away(daemon: Daemon, tls: Tls | None) -> str:
    """The error's class and reason. The connection is a new one."""
    with Operator(daemon.endpoint, connect_timeout=0, tls=tls) as operator, pytest.raises(ResharderError) as caught:
        operator.daemon()
    return f"{type(caught.value).__name__} {caught.value.reason}"


CANNOT_CONNECT = "DaemonUnreachable UNREACHABLE"


def test_nobody_connects_without_a_certificate_of_the_authority_that_is_valid_now(
    daemon: SecureDaemon, authority: Authority, tmp_path: Path
) -> None:
    stranger, past = Authority(tmp_path / "elsewhere"), datetime.datetime(2020, 1, 1, tzinfo=datetime.UTC)
    authority.issue("expired", PROBE, not_after=past)
    theirs = stranger.tls(PROBE)
    forged = Tls(authority.tls().ca, theirs.certificate, theirs.key)
    assert let_in(daemon, authority.tls(PROBE))
    assert turned_away(daemon, authority.tls("expired")) == CANNOT_CONNECT
    assert turned_away(daemon, forged) == CANNOT_CONNECT
    assert turned_away(daemon, authority.tls()) == CANNOT_CONNECT
    assert turned_away(daemon, None) == CANNOT_CONNECT


def test_a_client_talks_to_no_daemon_but_its_own(daemon: SecureDaemon, authority: Authority, tmp_path: Path) -> None:
    own = authority.tls(PROBE)
    assert turned_away(daemon, Tls(Authority(tmp_path / "elsewhere").tls().ca, own.certificate, own.key)) == CANNOT_CONNECT
    authority.issue("daemon", "daemon.example")
    assert turned_away(daemon, own) == CANNOT_CONNECT
    assert let_in(daemon, Tls(own.ca, own.certificate, own.key, name="daemon.example"))


def test_a_token_adds_roles_to_a_certificate_and_a_wrong_one_takes_all(daemon: SecureDaemon, authority: Authority) -> None:
    authority.allow(alice="a" * 32)
    assert let_in(daemon, authority.tls("viewer.test"))
    assert turned_away(daemon, authority.tls("nobody.test")) == "AccessDenied NOT_ALLOWED"
    assert let_in(daemon, authority.tls("nobody.test", token="a" * 32))
    assert turned_away(daemon, authority.tls("viewer.test", token="b" * 32)) == "AccessDenied TOKEN_UNKNOWN"


def test_where_clients_have_no_certificates_tokens_say_who_they_are(authority: Authority, tmp_path: Path) -> None:
    authority.allow(alice="a" * 32, probe="p" * 32, mallory="m" * 32)
    with SecureDaemon(authority, ROLES, certificates=False) as daemon:
        assert turned_away(daemon, authority.tls()) == "AccessDenied NO_IDENTITY"
        assert turned_away(daemon, authority.tls(token="x" * 32)) == "AccessDenied TOKEN_UNKNOWN"
        assert turned_away(daemon, authority.tls(token="m" * 32)) == "AccessDenied NOT_ALLOWED"
        assert let_in(daemon, authority.tls(token="a" * 32))
        (tmp_path / "token").write_text("p" * 32 + "\n")
        viewer = authority.tls(token_file=tmp_path / "token")
        assert let_in(daemon, viewer)
        with Operator(daemon.endpoint, tls=viewer) as operator:
            with pytest.raises(AccessDenied, match=r"token:probe@.* may not call RetireVersions.*\[NOT_ALLOWED\]"):
                operator.gc(keep=1, model="policy")
            (tmp_path / "token").write_text("a" * 32)
            with pytest.raises(NotFound, match="MODEL_UNKNOWN"):  # an operator is told so
                operator.gc(keep=1, model="policy")


@pytest.mark.parametrize("content", [b"", b"a\nb", b"a b", b"\xff", "ä".encode(), b"\0"])
def test_a_file_without_a_token_is_refused_at_first_and_ignored_in_use(
    authority: Authority, tmp_path: Path, content: bytes
) -> None:
    file = tmp_path / "token"
    file.write_bytes(b"a" * 32)
    tls = authority.tls(token_file=file)
    with closing(DaemonChannel("127.0.0.1:1", tls, [])) as channel:
        sent = channel.metadata()
        file.write_bytes(content)
        assert channel.metadata() == sent == (("authorization", f"Bearer {'a' * 32}"),)
    with pytest.raises(UsageError, match=f"{file} has no token of printable letters and digits"):
        DaemonChannel("127.0.0.1:1", tls, [])


def test_new_certificates_of_a_new_authority_are_taken_by_daemon_and_clients_without_a_restart(
    daemon: SecureDaemon, authority: Authority, tmp_path: Path
) -> None:
    former = tmp_path / "former"
    authority.tls(PROBE)
    former.mkdir()
    for name in ("ca.pem", f"{PROBE}.pem", f"{PROBE}.key"):
        (former / name).write_bytes((authority.folder / name).read_bytes())
    old = Tls(former / "ca.pem", former / f"{PROBE}.pem", former / f"{PROBE}.key")
    with Operator(daemon.endpoint, connect_timeout=60, tls=authority.tls(PROBE)) as operator:
        assert operator.daemon().release == RELEASE
        pid = daemon.pid
        authority.renew()
        authority.issue(PROBE, PROBE)
        assert let_in(daemon, authority.tls(PROBE))
        assert turned_away(daemon, old) == CANNOT_CONNECT
        assert operator.daemon().release == RELEASE
        assert daemon.pid == pid
        daemon.kill()  # the connections of before are gone; the client's files are still those that it was made with
        daemon.start()
        assert operator.daemon().release == RELEASE
    assert "security_files_reloaded" in daemon.log.read_text()


def test_a_closed_channel_stays_closed_when_its_certificates_change(authority: Authority) -> None:
    channel = Channel("127.0.0.1:1", patience=0, tls=authority.tls("viewer.test"))
    stub = operator_pb2_grpc.OperatorServiceStub(channel.grpc)
    channel.close()
    authority.renew()
    authority.issue("viewer.test", "viewer.test")
    with pytest.raises(UsageError, match=r"the connection to .* was closed"):
        channel.call(stub.ListVersions, operator_pb2.ListVersionsRequest(model="policy"))


def test_a_certificate_without_its_key_changes_nothing_and_is_said(daemon: SecureDaemon, authority: Authority) -> None:
    certificate = (authority.folder / "daemon.pem").read_bytes()
    authority.issue("next", "127.0.0.1")
    (authority.folder / "next.pem").rename(authority.folder / "daemon.pem")
    assert let_in(daemon, authority.tls(PROBE))
    assert shown(daemon, authority) == certificate
    assert "security_files_not_reloaded" in daemon.log.read_text()
    new = (authority.folder / "daemon.pem").read_bytes()
    (authority.folder / "next.key").rename(authority.folder / "daemon.key")
    assert let_in(daemon, authority.tls(PROBE))
    assert shown(daemon, authority) == new


def shown(daemon: SecureDaemon, authority: Authority) -> bytes:
    """The certificate that the daemon shows to a new connection."""
    tls = authority.tls(PROBE)
    context = ssl.create_default_context(cafile=str(tls.ca))
    context.load_cert_chain(tls.certificate, tls.key)
    context.set_alpn_protocols(["h2"])
    with (
        socket.create_connection(("127.0.0.1", daemon.port), timeout=60) as plain,
        context.wrap_socket(plain, server_hostname="127.0.0.1") as connection,
    ):
        return ssl.DER_cert_to_PEM_cert(connection.getpeercert(binary_form=True) or b"").encode()


def test_a_token_that_is_taken_away_ends_the_streams_that_it_opened(authority: Authority) -> None:
    authority.allow(alice="a" * 32)
    roles = {"token:alice": ALL}
    with (
        SecureDaemon(authority, roles, certificates=False) as daemon,
        Channel(daemon.endpoint, tls=authority.tls(token="a" * 32)) as channel,
    ):
        job = Job(channel.grpc, SPECS, [whole(SPECS)]).connect()
        job.publish(1, random_weights(SPECS, 1))
        stub = server_pb2_grpc.ServerServiceStub(channel.grpc)
        stub.ClaimServer(server_pb2.ClaimServerRequest(server="one", model="policy"))
        report = server_pb2.ControlReport(server="one", control="control", world_size=1)

        def reports() -> Iterator[server_pb2.ControlReport]:
            while True:
                yield report
                time.sleep(0.05)

        orders = stub.Attend(reports(), timeout=120)
        assert any(order.kind == server_pb2.Order.RENEWED for order in orders)
        authority.allow(bob="b" * 32)
        with pytest.raises(grpc.RpcError) as ended:
            collections.deque(orders, maxlen=0)
        assert reason_of(ended.value) == "TOKEN_UNKNOWN"


def test_a_caller_has_half_of_the_places_however_many_connections_it_makes(authority: Authority) -> None:
    """A caller's lane of 8 calls; the name that it gives opens no other lane."""
    authority.allow(alice="a" * 32, probe="p" * 32)
    streams: list[Iterator[operator_pb2.Event]] = []  # one that nobody holds is cancelled
    with SecureDaemon(authority, ROLES, certificates=False, threads=8) as daemon, ExitStack() as ended:

        def follow(token: str, subject: str = "daemon") -> operator_pb2.Event:
            channel = ended.enter_context(Channel(daemon.endpoint, tls=authority.tls(token=token)))
            request = operator_pb2.ListEventsRequest(subject=subject, follow=True)
            streams.append(operator_pb2_grpc.OperatorServiceStub(channel.grpc).ListEvents(request, timeout=120))
            return next(streams[-1])

        assert [follow("p" * 32).what for _ in range(4)] == ["started"] * 4
        with pytest.raises(grpc.RpcError) as refused:
            follow("p" * 32, "models/of-nobody")
        assert reason_of(refused.value) == "TOO_MANY_CALLS"
        assert follow("a" * 32).what == "started"


@pytest.mark.parametrize("transport", ["grpc", "shared-memory"])
def test_a_trainer_publishes_and_a_server_follows_each_with_its_own_certificate(
    transport: str, authority: Authority, tmp_path: Path
) -> None:
    with (
        SecureDaemon(authority, ROLES, name="server.test") as daemon,
        Operator(daemon.endpoint, tls=authority.tls(PROBE)) as operator,
    ):
        (publisher,) = connected(daemon.endpoint, 1, "job", transport=transport, tls=authority.tls("trainer.test"))
        publish_all([publisher], 1, weights(1))[0].wait_ready(60)
        with SimulatedServer(daemon, "one"):
            publish_all([publisher], 2, weights(2))[0].wait_serving(60)
            assert [server.version for server in operator.servers()] == [2]
        operator.gc(keep=1, model="policy")
        retired = [event for event in operator.events() if event.what == "retire"]
        assert [event.details["by"] for event in retired] == [f"dns:{PROBE}@ipv4:127.0.0.1"]
        operator.export(operator.latest().number, tmp_path / "out")
        assert equal(load_file(next((tmp_path / "out").glob("*.safetensors"))), weights(2))
        publisher.close()
        with pytest.raises(AccessDenied, match=r"dns:server.test@.* may not call CreatePublisher"):
            connected(daemon.endpoint, 1, "other", tls=authority.tls("server.test"))


def test_the_command_and_the_sdk_take_their_certificates_from_the_environment(
    daemon: SecureDaemon, authority: Authority, monkeypatch: pytest.MonkeyPatch
) -> None:
    without = resharder("status", "--endpoint", daemon.endpoint)
    assert (without.code, "RESHARDER_TLS_CA" in without.err) == (3, True)
    for name, value in authority.environment("viewer.test").items():
        monkeypatch.setenv(name, value)
    assert resharder("status", "--endpoint", daemon.endpoint).code == 0
    refused = resharder("gc", "--model", "policy", "--keep", 1, "--yes", "--endpoint", daemon.endpoint)
    assert (refused.code, "may not call RetireVersions" in refused.err) == (4, True)
    monkeypatch.delenv("RESHARDER_TLS_KEY")
    half = resharder("status", "--endpoint", daemon.endpoint)
    assert (half.code, "RESHARDER_TLS_CERT and RESHARDER_TLS_KEY" in half.err) == (2, True)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"RESHARDER_TOKEN": "x"}, "RESHARDER_TOKEN needs RESHARDER_TLS_CA"),
        ({"RESHARDER_TLS_CA": "/no/such"}, "/no/such cannot be read"),
        ({"RESHARDER_TLS_CA": "CA", "RESHARDER_TLS_CERT": "CA"}, "RESHARDER_TLS_CERT and RESHARDER_TLS_KEY"),
        ({"RESHARDER_TLS_CA": "CA", "RESHARDER_TOKEN": "a", "RESHARDER_TOKEN_FILE": "CA"}, "a token and a token file were given"),
        (
            {"RESHARDER_TLS_CA": "CA", "RESHARDER_TOKEN": "a b"},
            "the token in RESHARDER_TOKEN has characters other than printable",
        ),
    ],
)
def test_a_wrong_environment_is_refused_by_name_also_by_the_plugin(
    given: dict[str, str], message: str, authority: Authority
) -> None:
    environment = {name: str(authority.tls().ca) if value == "CA" else value for name, value in given.items()}
    with pytest.raises(UsageError, match=message):
        Tls.from_environment(environment)
    with pytest.raises(UsageError, match=message):
        PluginSettings.from_environment({"RESHARDER_ENDPOINT": "d:1", "RESHARDER_SERVER_ID": "s", **environment})


def test_certificates_that_are_none_are_refused_before_anything_is_sent(authority: Authority, tmp_path: Path) -> None:
    (tmp_path / "ca.pem").write_text("nothing")
    with pytest.raises(UsageError, match=r"cannot load the certificates in .*ca\.pem"):
        Channel("127.0.0.1:1", tls=Tls(tmp_path / "ca.pem"))
    assert "secret" not in repr(authority.tls(token="secret"))


def test_the_page_is_for_viewers_and_probes_are_for_everybody(daemon: SecureDaemon, authority: Authority) -> None:
    authority.allow(alice="a" * 32, probe="p" * 32, mallory="m" * 32)
    basic = base64.b64encode(b"me:" + b"p" * 32).decode()
    asked = {
        "": ("/healthz", "/readyz"),
        "Bearer " + "p" * 32: ("/metrics", "/api/status", "/"),
        "Basic " + basic: ("/",),
    }
    for header, paths in asked.items():
        assert [get(daemon, authority, path, header) for path in paths] == [200] * len(paths)
    assert get(daemon, authority, "/metrics", "", client="viewer.test") == 200
    assert get(daemon, authority, "/metrics", "", client="trainer.test") == 403
    assert [get(daemon, authority, path, "") for path in ("/metrics", "/api/status", "/")] == [401] * 3
    for header in ("Bearer " + "x" * 32, "Basic !", "Bearer", "Basic " + base64.b64encode(b"x").decode()):
        assert get(daemon, authority, "/api/status", header) == 401, header
    assert get(daemon, authority, "/api/status", "Bearer " + "m" * 32) == 403


def test_the_pages_certificate_changes_with_its_file(daemon: SecureDaemon, authority: Authority) -> None:
    assert get(daemon, authority, "/healthz", "") == 200
    authority.renew()
    assert get(daemon, authority, "/healthz", "") == 200
    authority.issue("viewer.test", "viewer.test")
    assert get(daemon, authority, "/metrics", "", client="viewer.test") == 200


def get(daemon: SecureDaemon, authority: Authority, path: str, header: str, client: str = "") -> int:
    """The status of an answer over HTTPS, by the authority of now."""
    tls = authority.tls(client)
    context = ssl.create_default_context(cafile=str(tls.ca))
    if client:
        context.load_cert_chain(tls.certificate, tls.key)
    request = urllib.request.Request(
        f"https://{daemon.options['web_listen']}{path}", headers={"Authorization": header} if header else {}
    )
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}), urllib.request.HTTPSHandler(context=context))
    end = time.monotonic() + 60
    while True:
        try:
            with opener.open(request, timeout=60) as answer:
                return int(answer.status)
        except urllib.error.HTTPError as error:
            with error:
                return int(error.code)
        except OSError:  # a host that stands still for long is taken for a slow client
            if time.monotonic() > end:
                raise


def started(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "resharder.server.main", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


def test_a_daemon_that_anybody_could_reach_does_not_start_without_security(tmp_path: Path) -> None:
    ended = started("--listen", "0.0.0.0:0", "--store", str(tmp_path / "store"))
    assert ended.returncode == 2
    assert "expected a loopback address without security, got 0.0.0.0:0" in ended.stderr
    assert not (tmp_path / "store").exists()


def test_a_daemon_whose_certificate_cannot_be_used_does_not_start(authority: Authority, tmp_path: Path) -> None:
    (authority.folder / "daemon.key").write_text("nothing")
    security = {"certificate": "daemon.pem", "key": "daemon.key", "tokens": "tokens"}
    paths: dict[str, object] = {name: str(authority.folder / file) for name, file in security.items()}
    (tmp_path / "file.yaml").write_text(
        json.dumps({"security": paths | {"roles": {}}, "listen": "127.0.0.1:0", "web_listen": ""})
    )
    ended = started("--config", str(tmp_path / "file.yaml"), "--store", str(tmp_path / "store"))
    assert ended.returncode == 2
    assert ended.stderr.startswith("resharderd: security: cannot load a certificate, its key and authorities from")
    assert ended.stderr.count("\n") == 1


@pytest.fixture(scope="module")
def plain() -> Iterator[Daemon]:
    """Without security: a caller is a connection."""
    with Daemon(caller_rate=1, caller_calls=2) as made:
        yield made


def test_a_daemon_without_security_says_whom_it_allows_everything(plain: Daemon) -> None:
    assert "everybody of this host" in plain.log.read_text()


def test_a_caller_that_begins_too_many_calls_is_refused_and_tries_again(plain: Daemon) -> None:
    request = operator_pb2.GetDaemonRequest()
    with Channel(plain.endpoint) as channel:
        get = operator_pb2_grpc.OperatorServiceStub(channel.grpc).GetDaemon
        many = (channel.call(get, request, patience=0) for _ in range(1000))
        with pytest.raises(WaitTimeout, match=r"makes more than 1 calls a second.*\[TOO_FAST\]"):
            collections.deque(many, maxlen=0)
        assert channel.call(get, request, patience=60).release == RELEASE


def test_a_caller_has_no_more_streams_open_than_it_may(plain: Daemon) -> None:
    with closing(plain.connect([("grpc.use_local_subchannel_pool", 1)])) as channel:
        stub, request = operator_pb2_grpc.OperatorServiceStub(channel), operator_pb2.ListEventsRequest(follow=True)
        streams = [stub.ListEvents(request, timeout=120) for _ in range(2)]
        assert [next(stream).subject for stream in streams] == ["daemon", "daemon"]
        with pytest.raises(grpc.RpcError) as refused:
            next(stub.ListEvents(request, timeout=60))
        assert reason_of(refused.value) == "TOO_MANY_CALLS"
        for stream in streams:
            stream.cancel()


@pytest.mark.parametrize(("message", "reason"), [(bytes(2 << 20), "MESSAGE_TOO_LARGE"), (b"\xff" * 9, "MESSAGE")])
def test_what_is_no_message_of_a_call_is_refused_before_it_is_read(plain: Daemon, message: bytes, reason: str) -> None:
    with closing(plain.connect([("grpc.use_local_subchannel_pool", 1)])) as channel:
        for call in ("OperatorService/GetVersion", "PublisherService/RenewLease"):
            with pytest.raises(grpc.RpcError) as refused:
                channel.unary_unary(f"/resharder.v1.{call}")(message, timeout=60)
            assert reason_of(refused.value) == reason


def test_every_file_and_folder_of_a_store_is_its_owners_alone_whatever_the_umask_and_the_folder_before(tmp_path: Path) -> None:
    (tmp_path / "store").mkdir()
    (tmp_path / "store").chmod(0o777)
    with Daemon(store=tmp_path / "store", umask=0) as daemon:
        job = Job(daemon.channel, SPECS, [whole(SPECS)]).connect()
        job.publish(1, random_weights(SPECS, 1))
        job.begin(2)
        stub = operator_pb2_grpc.OperatorServiceStub(daemon.channel)
        fleet = resources_pb2.Fleet(name="policy", max_skew=1)
        stub.UpdateFleet(operator_pb2.UpdateFleetRequest(fleet=fleet, update_mask={"paths": ["max_skew"]}))
        daemon.kill()
        found = {path.lstat().st_mode & 0o777: path for path in [tmp_path / "store", *(tmp_path / "store").rglob("*")]}
    assert found.keys() == {0o700, 0o600}, found
