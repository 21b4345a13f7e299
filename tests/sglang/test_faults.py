"""An SGLang server of two ranks, one of which dies or hangs in each phase of an install, and one that is not supported."""

import signal
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
from resharder.client.operator.answers import Server

from tests.support.client_traffic import Client, Judge
from tests.support.engine_kinds import SGLANG
from tests.support.engine_site import Site, running, write_config
from tests.support.observing import servers, wait_serving, wait_until
from tests.support.sglang_server import SGLangServer
from tests.support.tiny_hf import tiny_config
from tests.support.vllm_server import ServerFailed, VllmServer

CONFIG = tiny_config("qwen3", num_hidden_layers=2)
RANKS = ("worker.stage.begin", "worker.apply.half-way", "worker.apply.written")
"""Points of a rank: it stages, applies, and compares digests."""
RESET = "control.reset"
"""A point of the process that answers requests, before it has the ranks drop their caches."""
LEASE = 10
STOPPED = 14.0  # seconds: past the lease
OPTIONS: dict[str, Any] = {"lease_seconds": LEASE, "shared_memory": False}  # versions come from the data port


def two_ranks(server: VllmServer) -> None:
    assert isinstance(server, SGLangServer)
    server.tp = 2


def failing(spec: str, mark: Path) -> dict[str, str | None]:
    """Only the first rank that reaches the failpoint fails."""
    return {"RESHARDER_FAILPOINT": spec, "RESHARDER_FAILPOINT_MARK": str(mark)}


def strike(site: Site, mark: Path, number: signal.Signals) -> psutil.Process:
    """Send a signal to the second rank once the file shows that the point has been reached; the rank."""
    wait_until(mark.exists, f"{mark.name} is reached", 120)
    assert isinstance(site.server, SGLangServer)
    rank = site.server.child("scheduler_TP1")
    rank.send_signal(number)
    return rank


def test_a_rank_that_is_killed_in_any_phase_ends_its_server_which_comes_back_with_what_its_fleet_should_serve(
    tmp_path: Path,
) -> None:
    specs = [*(f"{point}=kill" for point in RANKS), f"{RESET}=delay:5", ""]
    marks = [tmp_path / f"mark-{number}" for number in range(len(specs))]
    with running(SGLANG, tmp_path, CONFIG, failing(specs[0], marks[0]), server=two_ranks, **OPTIONS) as site:
        for number, spec in enumerate(specs[1:]):
            version = site.publish()
            if specs[number].startswith(RESET):
                strike(site, marks[number], signal.SIGKILL)
            wait_until(marks[number].exists, f"{specs[number]} acts", 60)
            wait_until(lambda: not site.server.alive or state(site) == Server.State.LOST, f"it ends: {specs[number]}", 60)
            wait_until(lambda: state(site) == Server.State.LOST, "the daemon has noticed", 60)
            began = time.monotonic()
            site.server.kill()
            site.server.env = {**site.server.env, **failing(spec, marks[number + 1])}
            site.server.start()
            site.server.wait_ready()
            wait_serving(site.daemon, version)
            print(f"{specs[number]}: serves version {version} {time.monotonic() - began:.1f} s later")
            site.check_answers(version)
        site.check_answers(site.serve())
        assert [worker.transport for worker in servers(site.daemon)[0].workers] == ["http"] * 2


def test_a_rank_that_is_stopped_past_its_lease_in_every_phase_answers_with_nothing_torn(tmp_path: Path) -> None:
    """The ranks' points and the last, in which the test stops one, fall into installs of one version."""
    spec = ",".join([*(f"{point}=stop:{STOPPED}" for point in RANKS), f"{RESET}=delay:5"])
    marks = [tmp_path / f"mark.{point}" for point in (*RANKS, RESET)]
    with running(SGLANG, tmp_path, CONFIG, failing(spec, tmp_path / "mark"), server=two_ranks, **OPTIONS) as site:
        with Client({"one": site.server}) as client:
            version = site.publish()
            rank = strike(site, marks[-1], signal.SIGSTOP)
            time.sleep(STOPPED)
            rank.send_signal(signal.SIGCONT)
            assert [mark.name for mark in marks if not mark.exists()] == []
            wait_serving(site.daemon, version)
            wait_until(lambda: site.server.request("GET", "/health").status == 200, "it answers", 60)
        site.check_answers(version)
        judge = Judge(site.reference)
        assert {number for answer in client.answers for number in answer.versions} <= {"1", str(version)}
        assert [wrong for answer in client.answers if (wrong := judge.wrong(answer))] == []
        assert {failed.status for failed in client.failed} <= {503}


def state(site: Site) -> Server.State:
    (server,) = site.operator.servers()
    return server.state


def test_a_server_that_is_not_supported_starts_no_process_and_names_the_reasons(tmp_path: Path) -> None:
    write_config(tmp_path, CONFIG)
    arguments = ["--cpu-offload-gb=1", "--enable-streaming-session"]
    server = SGLangServer(tmp_path, arguments, {"RESHARDER_ENDPOINT": "127.0.0.1:1"}, tp=2)
    with pytest.raises(ServerFailed, match="does not support SGLang servers with weights that are offloaded") as failed, server:
        pass
    assert "--enable-streaming-session" in str(failed.value)
    assert "Load weight begin" not in server.log_text()
