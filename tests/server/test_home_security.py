"""Ranks and nodes with certificates: a node lays out files of the models that its fleets follow, and the daemon fetches them."""

import ssl
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest
import torch
from resharder.client.operator import Operator
from resharder.converters.wire.range_client import PartRefused, PartRequest, RangeConnection
from resharder.server.holding.tls import NodeTls
from resharder.server.holding.transfers import data_address
from resharder.server.security.settings import Security, node_tls

from tests.support.home_rank import Ranks, weights
from tests.support.namespaces import unavailable
from tests.support.node import Node, patient, stored_files
from tests.support.observing import wait_until
from tests.support.remote import Remote
from tests.support.secure import PROBE, Authority, SecureDaemon
from tests.support.variants import sampled

SHAPE = [1000, 1024]


def published(daemon: SecureDaemon, transport: str) -> tuple[str, dict[str, bytes]]:
    """The version of one rank, which travels by this transport, and its files once the daemon has all of them."""
    ranks = Ranks()
    ranks.attach(daemon.endpoint, "job", {"0": [("a", SHAPE, 0, SHAPE[0])]}, 1)
    ((version, used, _),) = ranks.publish(1)
    ranks.wait(1)
    assert used == transport
    wait_until(lambda: not list(daemon.store.glob("models/policy/versions/*/held")))
    content = stored_files(daemon, version)
    assert weights("a", SHAPE, 1).view(torch.uint8).numpy().tobytes() in content["model.safetensors"]
    ranks.close()
    return version, content


HELD = [("policy", "node", 2), ("policy", "node", 1), ("other", "http", 1)]


@pytest.mark.parametrize(("fleet", "transport", "replicas"), sampled(HELD, HELD[1:]))
def test_ranks_write_into_files_of_a_node_that_may_hold_the_model_alone(
    tmp_path: Path, fleet: str, transport: str, replicas: int
) -> None:
    authority = Authority(tmp_path / "pki")
    roles = {f"dns:{PROBE}": ["publisher:*", "server:*", "operator", "viewer"], "dns:one.test": [f"node:{fleet}"]}
    options = {"data_listen": "127.0.0.1:0", "shared_memory": False, "replicas": replicas}
    with patient(SecureDaemon(authority, roles, **options)) as daemon, pytest.MonkeyPatch.context() as patch:
        tls = authority.tls("one.test")
        files = {"tls_ca": tls.ca, "tls_cert": tls.certificate, "tls_key": tls.key}
        for name, value in authority.environment(PROBE).items():
            patch.setenv(name, value)
        with Node(daemon.endpoint, "one", **files) as node, Operator(daemon.endpoint) as operator:
            wait_until(lambda: [found.state.value for found in operator.nodes()] == ["LIVE"])
            version, content = published(daemon, transport)
            if transport == "node":
                wait_until(lambda: list(node.folder.glob("versions/policy/*/held")))
                assert node.files(version) == content
            else:
                assert "may not call GetReservedFiles" in node.log.read_text()


@pytest.mark.parametrize("replicas", sampled([1, 2], [1]))
def test_ranks_with_tokens_write_into_files_of_a_node_with_a_token(tmp_path: Path, replicas: int) -> None:
    """The daemon asks for no certificates, and shows its own to the node from which it fetches."""
    authority = Authority(tmp_path / "pki")
    authority.allow(probe="probe-token", hosts="hosts-token")
    roles = {"token:probe": ["publisher:*", "server:*", "operator"], "token:hosts": ["node:policy"]}
    options = {"data_listen": "127.0.0.1:0", "shared_memory": False, "replicas": replicas}
    (tmp_path / "token").write_text("hosts-token\n")
    tls = authority.tls("one.test")
    files = {"tls_ca": tls.ca, "tls_cert": tls.certificate, "tls_key": tls.key, "token_file": tmp_path / "token"}
    with patient(SecureDaemon(authority, roles, certificates=False, **options)) as daemon, pytest.MonkeyPatch.context() as patch:
        patch.setenv("RESHARDER_TLS_CA", str(authority.folder / "ca.pem"))
        patch.setenv("RESHARDER_TOKEN", "probe-token")
        with Node(daemon.endpoint, "one", **files) as node, Operator(daemon.endpoint) as operator:
            wait_until(lambda: [found.state.value for found in operator.nodes()] == ["LIVE"])
            version, content = published(daemon, "node")
            wait_until(lambda: list(node.folder.glob("versions/policy/*/held")))
            assert node.files(version) == content


@pytest.mark.parametrize(("mutual", "verifies"), [(True, ssl.CERT_REQUIRED), (False, ssl.CERT_NONE)])
def test_the_daemon_verifies_certificates_of_nodes_by_client_ca(tmp_path: Path, mutual: bool, verifies: ssl.VerifyMode) -> None:
    pki = Authority(tmp_path / "pki").folder
    trust = {"client_ca": pki / "ca.pem"} if mutual else {"tokens": pki / "tokens"}
    tls = node_tls(Security(certificate=pki / "daemon.pem", key=pki / "daemon.key", roles={}, **trust))
    assert tls is not None
    assert (tls.context().verify_mode, tls.context().check_hostname) == (verifies, False)


@pytest.mark.full
@pytest.mark.skipif(bool(unavailable()), reason=unavailable())
@pytest.mark.parametrize("by", ["certificate", "token"])
def test_a_node_sends_boxes_to_the_node_that_gathers_them_alone(tmp_path: Path, by: str) -> None:
    """Each host's rank has half of a tensor. A node of another model may not read what either has written."""
    authority, names = Authority(tmp_path / "pki"), ("a", "b", "other")
    for name in names:
        authority.issue(f"{name}.test", f"{name}.test", "127.0.0.1")
    authority.allow(probe="probe-token", **{name: f"{name}-token" for name in names})
    probe, role = (f"dns:{PROBE}", "dns:{}.test") if by == "certificate" else ("token:probe", "token:{}")
    roles = {probe: ["publisher:*", "server:*", "operator", "viewer"], role.format("other"): ["node:other"]}
    roles |= {role.format(name): ["node:policy"] for name in "ab"}
    with ExitStack() as stack, pytest.MonkeyPatch.context() as patch:
        options = {"data_listen": "127.0.0.1:0", "shared_memory": False, "certificates": by == "certificate"}
        daemon = stack.enter_context(patient(SecureDaemon(authority, roles, **options)))
        environment = authority.environment(PROBE) if by == "certificate" else {"RESHARDER_TOKEN": "probe-token"}
        for key, value in {"RESHARDER_TLS_CA": str(authority.folder / "ca.pem"), **environment}.items():
            patch.setenv(key, value)
        found = {}
        for name in names:
            (tmp_path / name).write_text(f"{name}-token\n")
            tls = authority.tls(f"{name}.test")
            files = {"tls_ca": tls.ca, "tls_cert": tls.certificate, "tls_key": tls.key}
            files |= {"token_file": tmp_path / name} if by == "token" else {}
            found[name] = stack.enter_context(Node(daemon.endpoint, name, **files))
        operator = stack.enter_context(Operator(daemon.endpoint))
        wait_until(lambda: [node.state.value for node in operator.nodes()] == ["LIVE"] * 3)
        hosts = {}
        for name in "ab":
            hidden = [node.root for other, node in found.items() if other != name]
            hosts[name] = stack.enter_context(Remote(Ranks, hidden=hidden))
        for rank, ranks in enumerate(hosts.values()):
            ranks.call("attach", daemon.endpoint, "job", {str(rank): [("a", SHAPE, 500 * rank, 500)]}, 2)
        used = [ranks.call("publish", 1)[0] for ranks in hosts.values()]
        assert [transport for _, transport, _ in used] == ["node", "node"]
        version = used[0][0]
        hosts["a"].call("wait", 1)
        wait_until(lambda: not list(daemon.store.glob("models/policy/versions/*/held")))
        assert weights("a", SHAPE, 1).view(torch.uint8).numpy().tobytes() in stored_files(daemon, version)["model.safetensors"]
        addresses = {node.name.removeprefix("nodes/"): node.data_address for node in operator.nodes()}
        other = authority.tls("other.test")
        intruder = NodeTls(Path(other.ca), Path(str(other.certificate)), Path(str(other.key)))
        request = PartRequest(version, "any", "model.safetensors", 1 << 20, 0, 1 << 10)
        for name in "ab":
            connection = RangeConnection(data_address(addresses[name], intruder, 5.0, daemon=False))
            with pytest.raises(PartRefused, match="403: NOT_ALLOWED"):
                list(connection.blocks(request, np.empty(1 << 10, np.uint8)))
            connection.close()
