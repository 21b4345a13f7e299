"""Megatron ranks of two hosts write a model, and its FP8 cast, into the memory of their own hosts."""

import json
from pathlib import Path

import pytest
import torch

from tests.client.models import equal, exported
from tests.support.daemon import Daemon
from tests.support.fp8_reference import cast
from tests.support.namespaces import unavailable
from tests.support.node import Node, nodes, wait_live
from tests.support.ranks import forked
from tests.support.tiny_hf import load_checkpoint, save_checkpoint, tiny_config

REASON = unavailable()


@pytest.mark.full
@pytest.mark.skipif(bool(REASON), reason=REASON)
def test_pipeline_stages_on_two_hosts_publish_two_models_into_the_memory_of_their_hosts(tmp_path: Path) -> None:
    save_checkpoint(tmp_path / "policy", tiny_config("qwen3_moe"), seed=5, dtype=torch.bfloat16)
    with (
        Daemon(data_listen="127.0.0.1:0", shared_memory=False) as daemon,
        Node(daemon.endpoint, "a") as first,
        Node(daemon.endpoint, "b") as second,
    ):
        (tmp_path / "nodes.json").write_text(json.dumps([str(first.root), str(second.root)]))
        wait_live(daemon, "a", "b")
        forked("tests.client.home_ranks", daemon.endpoint, tmp_path)
        found = [json.loads((tmp_path / f"transports-{rank}.json").read_text()) for rank in range(4)]
        assert found == [["node", "node"]] * 4
        copies = {copy.version: copy for node in nodes(daemon).values() for copy in node.copies}
        assert {"models/policy/versions/2", "models/policy-fp8/versions/2"} <= copies.keys()
        # READY comes before the daemon's copies, for which exports wait
        plain = exported(daemon.endpoint, "models/policy/versions/1", tmp_path / "plain")
        assert equal(plain, load_checkpoint(tmp_path / "policy"))
        scaled = exported(daemon.endpoint, "models/policy/versions/2", tmp_path / "scaled")
        assert equal(scaled, {name: tensor * 3 for name, tensor in plain.items()})
        for version, reference in ((1, plain), (2, scaled)):
            quantised = exported(daemon.endpoint, f"models/policy-fp8/versions/{version}", tmp_path / f"cast-{version}")
            assert equal(quantised, cast(reference, json.loads((tmp_path / f"cast-{version}" / "config.json").read_text())))
