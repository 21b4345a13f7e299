"""An SGLang server whose processes die in each phase of an install, and one that is not supported."""

import time
from pathlib import Path

import pytest
from resharder.client.operator.answers import Server

from tests.support.engine_kinds import SGLANG
from tests.support.engine_site import Site, running, write_config
from tests.support.observing import servers, wait_serving, wait_until
from tests.support.sglang_server import SGLangServer
from tests.support.tiny_hf import tiny_config
from tests.support.vllm_server import ServerFailed

CONFIG = tiny_config("qwen3", num_hidden_layers=2)
PHASES = ("worker.stage.begin", "worker.apply.half-way", "control.reset")


def restart(site: Site, failpoint: str) -> None:
    site.server.kill()
    site.server.env = {**site.server.env, "RESHARDER_FAILPOINT": failpoint, "RESHARDER_FAULT": ""}
    site.server.start()
    site.server.wait_ready()


def test_a_server_that_dies_in_any_phase_of_an_install_comes_back_with_what_its_fleet_should_serve(tmp_path: Path) -> None:
    """Its versions come from the data port."""
    options = {"lease_seconds": 10, "shared_memory": False}
    with running(SGLANG, tmp_path, CONFIG, {"RESHARDER_FAILPOINT": f"{PHASES[0]}=kill"}, **options) as site:
        for phase, following in zip(PHASES, (*(f"{each}=kill" for each in PHASES[1:]), ""), strict=True):
            before = max(site.seeds)
            version = site.publish()
            wait_until(lambda: not site.server.alive or state(site) == Server.State.LOST, f"it dies at {phase}", 60)
            wait_until(lambda: state(site) == Server.State.LOST, f"the daemon has noticed the end at {phase}", 60)
            began = time.monotonic()
            restart(site, following)
            wait_serving(site.daemon, version)
            print(f"killed at {phase}: serves version {version}, before {before}, {time.monotonic() - began:.1f} s later")
            site.check_answers(version)
        version = site.serve()
        site.check_answers(version)
        assert [worker.transport for worker in servers(site.daemon)[0].workers] == ["http"]


def state(site: Site) -> Server.State:
    (server,) = site.operator.servers()
    return server.state


def test_a_server_that_is_not_supported_starts_no_process_and_names_the_reasons(tmp_path: Path) -> None:
    write_config(tmp_path, CONFIG)
    server = SGLangServer(tmp_path, ["--ep-size=2", "--enable-streaming-session"], {"RESHARDER_ENDPOINT": "127.0.0.1:1"}, tp=2)
    with pytest.raises(ServerFailed, match="does not support SGLang servers with expert parallelism") as failed, server:
        pass
    assert "--enable-streaming-session" in str(failed.value)
    assert "Load weight begin" not in server.log_text()
