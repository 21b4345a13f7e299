"""Ranks and nodes with certificates: a node lays out files of the models that its fleets follow, and the daemon fetches them."""

from pathlib import Path

import pytest
import torch
from resharder.client.operator import Operator

from tests.support.home_rank import Ranks, weights
from tests.support.node import Node, stored
from tests.support.observing import wait_until
from tests.support.secure import PROBE, Authority, SecureDaemon

SHAPE = [1000, 1024]


@pytest.mark.parametrize(("fleet", "transport", "replicas"), [("policy", "node", 2), ("policy", "node", 1), ("other", "http", 2)])
def test_ranks_write_into_files_of_a_node_that_may_hold_the_model_alone(
    tmp_path: Path, fleet: str, transport: str, replicas: int
) -> None:
    authority = Authority(tmp_path / "pki")
    roles = {f"dns:{PROBE}": ["publisher:*", "server:*", "operator", "viewer"], "dns:one.test": [f"node:{fleet}"]}
    options = {"data_listen": "127.0.0.1:0", "shared_memory": False, "replicas": replicas}
    with SecureDaemon(authority, roles, **options) as daemon, pytest.MonkeyPatch.context() as patch:
        tls = authority.tls("one.test")
        files = {"tls_ca": tls.ca, "tls_cert": tls.certificate, "tls_key": tls.key}
        for name, value in authority.environment(PROBE).items():
            patch.setenv(name, value)
        with Node(daemon.endpoint, "one", **files) as node, Operator(daemon.endpoint) as operator:
            wait_until(lambda: [found.state.value for found in operator.nodes()] == ["LIVE"])
            ranks = Ranks()
            ranks.attach(daemon.endpoint, "job", {"0": [("a", SHAPE, 0, SHAPE[0])]}, 1)
            ((version, used, _),) = ranks.publish(1)
            ranks.wait(1)
            assert used == transport
            wait_until(lambda: not list(daemon.store.glob("models/policy/versions/*/held")))
            assert ("version_lacks_pieces" in daemon.log.read_text()) == (replicas == 1), "it was READY before"
            content = stored(daemon, version)
            assert weights("a", SHAPE, 1).view(torch.uint8).numpy().tobytes() in content["model.safetensors"]
            if transport == "node":
                wait_until(lambda: list(node.folder.glob("versions/policy/*/held")))
                assert node.files(version) == content
            else:
                assert "may not call GetReservedFiles" in node.log.read_text()
            ranks.close()


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
    with SecureDaemon(authority, roles, certificates=False, **options) as daemon, pytest.MonkeyPatch.context() as patch:
        patch.setenv("RESHARDER_TLS_CA", str(authority.folder / "ca.pem"))
        patch.setenv("RESHARDER_TOKEN", "probe-token")
        with Node(daemon.endpoint, "one", **files) as node, Operator(daemon.endpoint) as operator:
            wait_until(lambda: [found.state.value for found in operator.nodes()] == ["LIVE"])
            ranks = Ranks()
            ranks.attach(daemon.endpoint, "job", {"0": [("a", SHAPE, 0, SHAPE[0])]}, 1)
            ((version, used, _),) = ranks.publish(1)
            ranks.wait(1)
            assert used == "node"
            wait_until(lambda: not list(daemon.store.glob("models/policy/versions/*/held")))
            content = stored(daemon, version)
            assert weights("a", SHAPE, 1).view(torch.uint8).numpy().tobytes() in content["model.safetensors"]
            wait_until(lambda: list(node.folder.glob("versions/policy/*/held")))
            assert node.files(version) == content
            ranks.close()
