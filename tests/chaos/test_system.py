"""When a server counts as booted, and what makes one a server of another host."""

from pathlib import Path

import pytest
from resharder.client.inference.worker import host_node, source
from resharder.v1 import resources_pb2

from tests.chaos.system import booted
from tests.support.raw_mode import resharder_other_host
from tests.support.vllm_server import Response


def refused(reason: str) -> Response:
    return Response(503, {}, f'{{"error": {{"message": "not serving: {reason}", "code": 503}}}}'.encode())


@pytest.mark.parametrize(
    "reason", ["an operator put the server to sleep", "an operator put it to sleep", "drained for maintenance"]
)
def test_a_server_that_an_operator_holds_has_booted(reason: str) -> None:
    assert booted(refused(reason))


@pytest.mark.parametrize("reason", ["no version is confirmed yet", "its version is not confirmed yet", "the lease ended"])
def test_a_server_without_a_confirmed_version_has_not_booted(reason: str) -> None:
    assert not booted(refused(reason))


def test_a_server_that_serves_has_booted() -> None:
    assert booted(Response(200, {}, b""))
    assert not booted(Response(500, {}, b""))


def test_workers_of_another_host_read_the_nonce_of_their_node_alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    own, other = tmp_path / "own", tmp_path / "other"
    for folder in (own, other):
        folder.mkdir()
        (folder / "nonce").write_bytes(b"1234")
    monkeypatch.setattr(source, "shares_memory", source.shares_memory)
    monkeypatch.setattr(host_node, "_read", host_node._read)
    monkeypatch.setenv("RESHARDER_OTHER_HOST", str(own))
    resharder_other_host.register()
    resharder_other_host.register()  # vLLM loads plugins more than once
    assert not source.shares_memory(resources_pb2.StoreAccess(nonce_file=str(own / "nonce"), nonce=b"1234"))
    read = host_node._read([str(other / "nonce"), str(own / "nonce")])
    assert [found.nonce_file for found in read] == [str(own / "nonce")]
