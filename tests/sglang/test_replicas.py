"""An SGLang server of two data parallel replicas: each worker is listed, and both answer with the version that is served."""

from pathlib import Path

import pytest
from resharder.client.inference.sglang.host import REPLICAS

from tests.support.engine_kinds import SGLANG
from tests.support.engine_site import PROMPT, running
from tests.support.observing import servers, wait_serving
from tests.support.tiny_hf import tiny_config

CONFIG = tiny_config("qwen3", num_hidden_layers=2)


@pytest.mark.skipif(not REPLICAS, reason="refused with this release")
def test_both_replicas_follow_and_return_to_a_version(tmp_path: Path) -> None:
    bound = {"SGLANG_CPU_OMP_THREADS_BIND": "0-1|0-1"}
    with running(SGLANG, tmp_path, CONFIG, bound, ["--dp-size=2", "--load-balance-method=round_robin"]) as site:
        for version in (1, site.serve(), site.serve()):
            (server,) = servers(site.daemon)
            assert (server.world_size, [worker.rank for worker in server.workers]) == (2, [0, 1])
            for _ in range(4):  # by turns
                if version == max(site.seeds):
                    site.check_answers(version)
        for verification in site.operator.verify("one", timeout=60):
            assert (verification.different_tensors, verification.skipped) == (0, "")
        site.operator.rollback("policy", 1, reason="too talkative")
        wait_serving(site.daemon, 1)
        answers = [site.server.generate(PROMPT, 8) for _ in range(4)]
        assert {answer.version for answer in answers} == {"1"}
        assert len({answer.token_ids for answer in answers}) == 1
        site.check_answers(1)
