"""`resharder doctor --links`: a real daemon, nodes behind a slow proxy, dead ones, and certificates that do not match."""

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from resharder.client.operator.answers import Node as ReportedNode
from resharder.client.operator.answers import NodeLink
from resharder.client.rpc.channel import Channel
from resharder.client.rpc.data_port import data_port
from resharder.client.rpc.tls import Tls
from resharder.client.tools import links
from resharder.client.tools.links import HostLink, judged, measure_links, reported
from resharder.client.versions.manifest import get_manifest
from resharder.converters.geometry.layout import TensorSpec, full_box
from resharder.converters.storage.digest import digest
from resharder.converters.wire.port_probe import StreamRate, measure_port, problem_of
from resharder.converters.wire.range_client import DataAddress

from tests.chaos.proxy import Proxies
from tests.support.command import answer, resharder
from tests.support.daemon import Daemon
from tests.support.node import Node, holds, nodes, wait_live
from tests.support.observing import wait_until
from tests.support.ports import free_port
from tests.support.publishing import Job, random_weights, whole
from tests.support.secure import PROBE, Authority, SecureDaemon
from tests.support.staging import stage

SPECS = [TensorSpec("big", "BF16", (2 << 10, 1024))]  # one piece


@pytest.fixture(scope="module")
def daemon() -> Iterator[Daemon]:
    with Daemon(data_listen="127.0.0.1:0", lease_seconds=12) as running:
        yield running


@pytest.fixture(scope="module")
def version(daemon: Daemon) -> str:
    return publish(daemon)


def publish(daemon: Daemon) -> str:
    job = Job(daemon.channel, SPECS, [whole(SPECS)], job="job").connect()
    weights = random_weights(SPECS, 1)
    digest(weights["big"], full_box(SPECS[0].shape), SPECS[0].shape)  # compiled here: the rank has a lease of 12 s
    return job.publish(1, weights).name


def hold(daemon: Daemon, node: Node, *others: Node, version: str) -> None:
    """Let a node hold a version, as a worker on its host does, which cannot read the folders of the other nodes."""
    for other in others:
        (other.folder / "nonce").rename(other.folder / "hidden")
    assert stage(daemon.endpoint, version)["transport"] == "node"
    wait_until(lambda: holds(daemon, node.name, version))
    for other in others:
        (other.folder / "hidden").rename(other.folder / "nonce")


@pytest.fixture
def even(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a busy machine, one link of several may be measured at a fraction of the others' rate."""
    monkeypatch.setattr(links, "_SLOW", 16.0)


def by_target(found: list[HostLink]) -> dict[tuple[str, str, str], HostLink]:
    return {(link.source, link.target, link.port): link for link in found}


@pytest.mark.full
@pytest.mark.usefixtures("even")
def test_a_fast_a_slow_and_a_dead_link_are_told_apart(daemon: Daemon, version: str) -> None:
    proxies, port = Proxies(), free_port()
    slow = proxies.link("slow", f"127.0.0.1:{port}")
    here = {"listen": f"127.0.0.1:{port}", "address": slow.endpoint}
    with (
        Node(daemon.endpoint, "near") as near,
        Node(daemon.endpoint, "far", **here) as far,
        Node(daemon.endpoint, "dead") as dead,
    ):
        wait_live(daemon, "near", "far", "dead")
        hold(daemon, far, near, dead, version=version)
        slow.delay = 0.01  # of 16 KiB
        hold(daemon, near, far, dead, version=version)
        wait_until(lambda: any(link.peer == "nodes/far" for link in nodes(daemon)["nodes/near"].links))
        dead.kill()
        slow.delay = 0.05
        found = by_target(measure_links(daemon.endpoint, limit_seconds=1.0))
        calls, data = found["here", "daemon", "calls"], found["here", "daemon", "data"]
        assert (calls.verdict, data.verdict, found["here", "nodes/near", "data"].verdict) == ("ok", "ok", "ok")
        assert [rate.streams for rate in data.rates] == [1, 4]
        assert all(64 << 20 <= rate.bytes < 128 << 20 or rate.seconds >= 1 for rate in data.rates)
        behind = found["here", "nodes/far", "data"]
        assert behind.verdict == "warn"
        assert "MB/s, the median link has" in behind.found
        assert behind.round_trip is not None
        assert behind.round_trip >= 2 * slow.delay
        assert all(rate.rate <= rate.streams * 2 * (16 << 10) / slow.delay for rate in behind.rates)
        gone = found["here", "nodes/dead", "data"]
        assert (gone.verdict, gone.found, gone.round_trip) == ("fail", "connection refused", None)
        (seen,) = found["nodes/near", "nodes/far", "data"].rates
        assert seen.bytes > 0
        wait_until(lambda: nodes(daemon)["nodes/dead"].state == 3)
        slow.delay = 0.0
        done = resharder("doctor", "--links", "--json", "--endpoint", daemon.endpoint)
        assert done.code == 1
        every = {(link["source"], link["target"], link["port"]): link for link in json.loads(done.out)["links"]}
        assert "lost: no report since" in every["here", "nodes/dead", "data"]["found"]
        assert every["here", "nodes/dead", "data"]["found"].endswith("connection refused")
        assert every["here", "daemon", "data"]["rates"][0].keys() == {"streams", "bytes", "seconds"}
    proxies.close()


def test_the_links_of_a_daemon_without_versions_and_data_port_are_answers_too() -> None:
    with Daemon(data_listen="") as daemon:
        found = answer("doctor", "--links", "--endpoint", daemon.endpoint)["links"]
        assert [(link["port"], link["verdict"]) for link in found] == [("calls", "ok"), ("data", "ok")]
        assert found[1]["found"] == "not measured: no version is READY"
        publish(daemon)
        (_, data) = measure_links(daemon.endpoint)
        assert (data.verdict, data.found) == ("warn", "the daemon has no data port: its data_listen is empty")
        done = resharder("doctor", "--links", "--endpoint", daemon.endpoint)
        assert done.code == 0
        assert [line.split()[:4] for line in done.out.splitlines()[1:]] == [
            ["ok", "here", "daemon", "(calls)"],
            ["warn", "here", "daemon", "(data)"],
        ]


def test_the_data_port_is_reached_at_the_address_that_the_daemon_names() -> None:
    proxies, listen = Proxies(), f"127.0.0.1:{free_port()}"
    mapped = proxies.link("data", listen)
    with Daemon(data_listen=listen, data_address=mapped.endpoint) as daemon:
        publish(daemon)
        (_, data) = measure_links(daemon.endpoint, limit_seconds=0.5)
        assert (data.verdict, data.address) == ("ok", mapped.endpoint)
        assert mapped.forwarded >= data.rates[0].bytes
    proxies.close()


def test_certificates_of_other_names_and_authorities_are_said_as_expected_and_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    authority, other = Authority(tmp_path / "pki"), Authority(tmp_path / "other")
    roles = {f"dns:{PROBE}": ["publisher:*", "server:*", "operator"], "dns:*.hosts.test": ["node:*"]}
    authority.issue("one.hosts.test", "one.hosts.test")
    with SecureDaemon(authority, roles, data_listen="127.0.0.1:0") as daemon:
        version = publish(daemon)
        tls = authority.tls("one.hosts.test")
        files = {"tls_ca": tls.ca, "tls_cert": tls.certificate, "tls_key": tls.key}
        with Node(daemon.endpoint, "one", **files) as one:
            wait_live(daemon, "one")
            for name, value in authority.environment(PROBE).items():
                monkeypatch.setenv(name, value)
            hold(daemon, one, version=version)

            def found(node_tls_name: str = "") -> HostLink:
                return by_target(measure_links(daemon.endpoint, node_tls_name))["here", "nodes/one", "data"]

            wrong = found()
            assert (wrong.verdict, wrong.found) == ("fail", "its certificate is for one.hosts.test, not for 127.0.0.1")
            refused = found("one.hosts.test")
            assert refused.verdict == "ok"
            assert "may not read model policy: the daemon allows no such node" in refused.found
            assert refused.round_trip is not None

            def at_port(tls: Tls | None) -> str:
                host, _, port = nodes(daemon)["nodes/one"].data_address.rpartition(":")
                address = DataAddress(host, int(port), tls.context if tls else None, "one.hosts.test")
                problem = measure_port(address, []).problem
                assert problem is not None
                return problem.found

            assert at_port(other.tls(PROBE)).startswith(
                "expected a valid certificate of the authority in RESHARDER_TLS_CA, got: "
            )
            assert "refuses this client's certificate" in at_port(authority.tls())
            assert at_port(None) == "the port closed the connection without an HTTP answer"


def test_tls_to_a_port_without_it_is_told_from_other_problems(daemon: Daemon, version: str, tmp_path: Path) -> None:
    with Channel(daemon.endpoint) as channel:
        address = data_port(channel, get_manifest(channel, version).data_address)
    assert address is not None
    problem = measure_port(replace(address, tls_context=Authority(tmp_path).tls(PROBE).context), []).problem
    assert problem is not None
    assert problem.found == "the port closed the connection during the TLS handshake"


@pytest.mark.parametrize(
    ("rates", "verdicts"), [([8e9, 8e9, 1e9], "ok ok warn"), ([8e9, 1e9], "ok ok"), ([4e9, 2e9, 1e9], "ok ok ok")]
)
def test_a_link_is_slow_beside_the_median_one(rates: list[float], verdicts: str) -> None:
    found = judged(
        [HostLink("here", f"nodes/{at}", "data", "", rates=(StreamRate(1, int(rate), 1.0),)) for at, rate in enumerate(rates)]
    )
    assert [link.verdict for link in found] == verdicts.split()


def test_a_link_is_no_faster_for_the_pieces_that_came_as_deltas() -> None:
    """Else links without deltas would be slow beside it, and a slow one with them would not be."""
    state, mib = ReportedNode.State.LIVE, 1 << 20
    whole = [NodeLink(peer="daemon", received_bytes=100 * mib, seconds=1.0)]
    deltas = NodeLink(
        peer="daemon", received_bytes=900 * mib, seconds=1.0, delta_part_bytes=800 * mib, delta_bytes=mib, whole_rate=10.0 * mib
    )
    reports = [ReportedNode(name=f"nodes/{name}", state=state, links=tuple(whole)) for name in "ab"]
    found = [*reported([*reports, ReportedNode("nodes/c", state, links=(deltas,))])]
    assert [link.verdict for link in judged(found)] == ["ok", "ok", "warn"]
    assert found[-1].found == "0.88 GiB received, 0.78 GiB of it as 1.0 MiB of deltas"


def test_an_error_without_a_text_is_named_by_its_type() -> None:
    assert problem_of(OSError(), DataAddress("h", 1)).found == "OSError"
