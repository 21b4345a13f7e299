"""Ranks and nodes with certificates: a node lays out files of the models that its fleets follow, and the daemon fetches them."""

import ssl
from pathlib import Path

import pytest
import torch
from resharder.client.operator import Operator
from resharder.server.own_fetcher import node_tls
from resharder.server.security.settings import Security

from tests.support.home_rank import Ranks, weights
from tests.support.node import Node, patient, stored
from tests.support.observing import wait_until
from tests.support.secure import PROBE, Authority, SecureDaemon

SHAPE = [1000, 1024]


def published(daemon: SecureDaemon, transport: str) -> tuple[str, dict[str, bytes]]:
    """The version of one rank, which travels by this transport, and its files once the daemon has all of them."""
    ranks = Ranks()
    ranks.attach(daemon.endpoint, "job", {"0": [("a", SHAPE, 0, SHAPE[0])]}, 1)
    ((version, used, _),) = ranks.publish(1)
    ranks.wait(1)
    assert used == transport
    wait_until(lambda: not list(daemon.store.glob("models/policy/versions/*/held")))
    content = stored(daemon, version)
    assert weights("a", SHAPE, 1).view(torch.uint8).numpy().tobytes() in content["model.safetensors"]
    ranks.close()
    return version, content


@pytest.mark.parametrize(("fleet", "transport", "replicas"), [("policy", "node", 2), ("policy", "node", 1), ("other", "http", 2)])
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
            assert ("version_lacks_pieces" in daemon.log.read_text()) == (replicas == 1), "it was READY before"
            if transport == "node":
                wait_until(lambda: list(node.folder.glob("versions/policy/*/held")))
                assert node.files(version) == content
            else:
                assert "may not call GetReservedFiles" in node.log.read_text()


@pytest.mark.parametrize("replicas", [1, 2])
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
