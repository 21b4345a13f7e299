"""A vLLM server follows a model that no host may hold, on a host that holds nothing of it. Real processes on emulated hosts."""

import json
from contextlib import ExitStack
from math import prod
from pathlib import Path

import pytest
from resharder.converters.architectures.checkpoint import expected_shapes
from resharder.v1 import operator_pb2, operator_pb2_grpc, resources_pb2

from tests.support.model_ranks import ModelRanks
from tests.support.namespaces import unavailable
from tests.support.node import nodes
from tests.support.observing import export, servers, wait_serving
from tests.support.spread_site import Spread
from tests.support.tiny_hf import save_tokenizer
from tests.support.vllm_server import Answer, VllmServer

REASON = unavailable()
pytestmark = pytest.mark.skipif(bool(REASON), reason=REASON)
PROMPT = [5, 17, 42, 7, 300, 11]
SIZE = 4 * sum(map(prod, expected_shapes(ModelRanks.config).values()))
LIMIT = SIZE * 8 // 10


class Model(Spread):
    """Each of three ranks has about a third of the tensors."""

    role = ModelRanks

    def __init__(self, stack: ExitStack, folder: Path) -> None:
        shapes = expected_shapes(ModelRanks.config)
        self.holdings = [[], [], []]  # type: ignore[misc]
        for name in sorted(shapes, key=lambda name: -prod(shapes[name])):
            least = min(self.holdings, key=lambda rows: sum(prod(shape) for _, shape, *_ in rows))
            least.append((name, list(shapes[name]), 0, shapes[name][0]))  # type: ignore[attr-defined]
        super().__init__(stack, folder, LIMIT)


def test_a_server_on_a_host_that_holds_nothing_follows_versions_that_no_host_may_hold(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    save_tokenizer(tmp_path / "model", ModelRanks.config["vocab_size"])
    (tmp_path / "model" / "config.json").write_text(json.dumps(ModelRanks.config))
    with ExitStack() as stack:
        site = Model(stack, tmp_path / "archive")
        site.attach("job", tokenizer=str(tmp_path / "model"))
        said: dict[int, Answer] = {}
        version, found = site.publish(1)
        assert (version.state, [transport for _, transport, _ in found]) == (resources_pb2.Version.READY, ["node"] * 3), version
        environment = {"RESHARDER_ENDPOINT": site.daemon.endpoint, "VLLM_PLUGINS": "resharder"}
        server = VllmServer(
            tmp_path / "model",
            ["--load-format", "resharder"],
            environment,
            hidden=[site.daemon.folder, *site.hidden("d")],
            within=site.network.command(3),
            host=site.network.address_of(3),
        )
        stack.enter_context(server)
        for step in (1, 2, 3):
            if step > 1:
                version, _ = site.publish(step)
                assert version.state == resources_pb2.Version.READY, version.reason
            wait_serving(site.daemon, version.number)
            said[step] = server.generate(PROMPT, 12)
            assert said[step].version == str(version.number)
            (worker,) = servers(site.daemon)[0].workers
            assert worker.transport == "http", "nothing is mapped on its host"
            holding = nodes(site.daemon)
            assert holding["nodes/d"].capacity_bytes == holding["nodes/d"].used_bytes == 0
            assert all(node.used_bytes <= node.capacity_bytes < SIZE for node in holding.values())
        daemon = operator_pb2_grpc.OperatorServiceStub(site.daemon.channel).GetDaemon(operator_pb2.GetDaemonRequest())
        assert daemon.store_used_bytes < SIZE // 10, "holes and headers"
        export(site.daemon, version.name, tmp_path / "export")
        assert site.is_published(tmp_path / "export", 3)
    with VllmServer(tmp_path / "export", env={"RESHARDER_ENDPOINT": None, "VLLM_PLUGINS": ""}) as fresh:
        expected = fresh.generate(PROMPT, 12)
    assert (said[3].token_ids, said[3].logprobs) == (expected.token_ids, expected.logprobs)
    assert len({answer.token_ids for answer in said.values()}) == 3
