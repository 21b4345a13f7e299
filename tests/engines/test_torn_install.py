"""An install that fails half-way, with either engine: torn weights never answer, and the engine lives."""

from pathlib import Path

from resharder.v1 import resources_pb2

from tests.support.engine_kinds import INSTALLED
from tests.support.engine_site import PROMPT, running
from tests.support.observing import servers, wait_serving, wait_until
from tests.support.tiny_hf import tiny_config

CONFIG = tiny_config("qwen3", num_hidden_layers=2)


def test_an_install_that_fails_half_way_leaves_a_server_that_answers_nothing_and_lives(tmp_path: Path) -> None:
    with running(INSTALLED, tmp_path, CONFIG, {"RESHARDER_FAULT": "half-way"}) as site:
        version = site.publish()
        wait_until(lambda: "half-way" in servers(site.daemon)[0].reason, "the install fails", 60)
        refused = site.server.request("POST", "/v1/completions", {"model": "m", "prompt": PROMPT, "max_tokens": 2})
        assert (refused.status, refused.version) == (503, "none")
        assert site.server.request("GET", "/health").status == 503
        assert servers(site.daemon)[0].state != resources_pb2.Server.SERVING
        assert site.server.alive
        assert site.kind.weight_version(site.server) in ("none", ""), "vLLM does not say it behind a shut gate"
        site.server.kill()
        site.server.env = {**site.server.env, "RESHARDER_FAULT": ""}
        site.server.start()
        site.server.wait_ready()
        site.operator.update("policy", accept_refused=True)
        wait_serving(site.daemon, version)
        site.check_answers(version)
