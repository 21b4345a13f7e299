"""Servers of both engines while they follow a daemon: one suite for vLLM and SGLang.

The tests share the server and run in order; each leaves it serving.
"""

import itertools
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from resharder.client import connect
from resharder.client.operator.answers import PauseMode, Power

from tests.support.engine_kinds import INSTALLED
from tests.support.engine_site import PROMPT, Site, contents, running, write_config
from tests.support.observing import expect_leaving, export, servers, wait_serving, wait_until
from tests.support.tiny_hf import tiny_config
from tests.support.vllm_server import Answer, Token
from tests.support.weights import random_weights

CONFIG = tiny_config("qwen3", num_hidden_layers=2)
LONG = 400  # tokens: an install falls into the answer


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    with running(INSTALLED, tmp_path_factory.mktemp("config"), CONFIG, arguments=INSTALLED.with_metrics) as built:
        yield built


def test_it_boots_from_the_daemon_without_a_checkpoint(site: Site) -> None:
    assert not list(site.folder.glob("*.safetensors"))
    site.check_answers(1)
    (server,) = servers(site.daemon)
    assert [worker.transport for worker in server.workers] == ["shared-memory"]


def test_it_follows_new_versions_by_recorded_boxes(site: Site) -> None:
    for _ in range(2):
        site.check_answers(site.serve())
    (server,) = servers(site.daemon)
    (worker,) = server.workers
    needed = sum(tensor.numel() * 4 for tensor in random_weights(CONFIG, 1).values())
    assert worker.boxed_bytes == worker.needed_bytes == needed


def test_metrics_of_the_gate_are_on_its_page(site: Site) -> None:
    version, name = site.serve(), INSTALLED.name
    page = site.server.request("GET", "/metrics").body.decode()
    (served,) = re.findall(rf"^resharder_{name}_served_version(?:{{.*}})? (\S+)$", page, re.MULTILINE)
    assert float(served) == version
    assert re.search(rf'^resharder_{name}_gate_position{{.*position="open".*}} 1.0$', page, re.MULTILINE)
    assert f"{name}:" in page, "its own"


def test_a_request_in_flight_goes_on_and_each_of_its_tokens_comes_from_the_version_that_its_label_names(site: Site) -> None:
    for _ in range(5):  # on a busy machine an answer can be over before the install begins
        old = max(site.seeds)
        with on_its_way(site) as found:
            new = site.serve()
        (answer,) = found
        assert (len(answer.token_ids), answer.finish_reason) == (LONG, "length")
        from_old, from_new = site.made_by(old, answer), site.made_by(new, answer)
        switch = int(from_old.int().cumprod(0).sum())
        assert bool(from_new[switch:].all()), "tokens after the switch are the new version's"
        if answer.version == f"{old},{new}":
            assert 0 < switch < LONG
            return
        assert answer.version == str(old)
        assert switch == LONG
    pytest.fail("no install of five fell into an answer")


@contextmanager
def on_its_way(site: Site) -> Iterator[list[Answer]]:
    """Ask for a long answer; in the block, some of its tokens are computed. The list has it after the block."""
    found: list[Answer] = []
    streamed: list[Token] = []
    clients = [
        threading.Thread(target=lambda: found.append(site.server.generate(PROMPT, LONG))),
        threading.Thread(target=lambda: streamed.extend(tokens)),
    ]
    clients[0].start()
    tokens = site.server.stream(PROMPT, LONG)
    streamed += itertools.islice(tokens, 5)
    clients[1].start()
    try:
        yield found
    finally:
        for client in clients:
            client.join(120)


def test_events_of_a_stream_are_labelled(site: Site) -> None:
    version = max(site.seeds)
    body = {"model": "m", "prompt": PROMPT, "max_tokens": 4, "temperature": 0, "stream": True}
    response = site.server.request("POST", "/v1/completions", body)
    assert response.version == "streamed"
    events = [line for line in response.body.decode().splitlines() if line.startswith("data: {")]
    assert events
    assert all(f'"resharder_versions": "{version}"' in event for event in events)


@pytest.mark.parametrize(("mode", "finish"), [(PauseMode.WAIT, "length"), (PauseMode.ABORT, "abort")])
def test_requests_in_flight_end_as_the_pause_mode_says(site: Site, mode: PauseMode, finish: str) -> None:
    site.operator.set_fleet("policy", pause_mode=mode)
    try:
        for _ in range(5):  # on a busy machine an answer can be over before the install begins
            old = max(site.seeds)
            with on_its_way(site) as found:
                version = site.serve()
            assert found[0].version == str(old)
            if found[0].finish_reason == finish:
                break
    finally:
        site.operator.set_fleet("policy", pause_mode=PauseMode.KEEP)
    assert found[0].finish_reason == finish
    site.check_answers(version)


def test_calls_that_change_the_engine_are_refused(site: Site) -> None:
    for path, body in INSTALLED.refused:
        response = site.server.request("POST", path, body)
        assert response.status == 409, (path, response.body)
        assert "follows a Resharder daemon" in response.json()["error"]["message"]
    site.check_answers(max(site.seeds))


@pytest.mark.parametrize("level", [1, 2])
def test_it_sleeps_and_wakes_and_then_serves_what_its_fleet_should(site: Site, level: int) -> None:
    asleep = (Power.ASLEEP_1, Power.ASLEEP_2)[level - 1]
    site.operator.sleep("policy", level=level)
    site.operator.wait_power("policy", asleep, timeout=60)
    assert site.operator.servers()[0].power == asleep
    refused = site.server.request("GET", "/health")
    assert (refused.status, refused.version) == (503, "none")
    version = site.publish()
    site.operator.wake("policy")
    site.operator.wait_power("policy", Power.AWAKE, timeout=60)
    wait_serving(site.daemon, version)
    assert site.operator.servers()[0].power == Power.AWAKE
    site.check_answers(version)


def test_it_sleeps_with_its_weights_awake(site: Site) -> None:
    """Its tags wake one after the other: a version is installed before the cache is there."""
    site.operator.sleep("policy", level=2)
    site.operator.wait_power("policy", Power.ASLEEP_2, timeout=60)
    version = site.publish()
    site.operator.wake("policy", tag="weights")
    site.operator.wait_power("policy", Power.WEIGHTS_AWAKE, timeout=60)
    assert site.server.request("GET", "/health").status == 503
    site.operator.wake("policy")
    site.operator.wait_power("policy", Power.AWAKE, timeout=60)
    wait_serving(site.daemon, version)
    site.check_answers(version)


def test_memory_is_what_the_version_says_and_a_rollback_brings_the_one_before_back(site: Site) -> None:
    before, version = max(site.seeds), site.serve()
    for verification in site.operator.verify("one", timeout=60):
        assert (verification.different_tensors, verification.skipped) == (0, "")
        assert verification.covered_bytes == verification.total_bytes > 0
    site.operator.rollback("policy", before, reason="too talkative")
    wait_serving(site.daemon, before)
    site.check_answers(before)
    site.operator.update("policy", accept_refused=True)
    wait_serving(site.daemon, version)


def test_a_version_of_another_config_is_refused_by_name(site: Site, tmp_path: Path) -> None:
    version, other = max(site.seeds), dict(CONFIG) | {"rms_norm_eps": 1e-3}
    write_config(tmp_path, other)
    site.publisher.close()
    with connect(
        site.daemon.endpoint, model="policy", job="k", rank=0, world_size=1, config=other, tokenizer=tmp_path
    ) as another:
        another.publish_tensors(1000, random_weights(other, 1).items()).wait_ready(60)
        wait_until(lambda: "rms_norm_eps" in servers(site.daemon)[0].reason, "it is refused", 60)
    site.operator.rollback("policy", version, reason="of another config")
    wait_serving(site.daemon, version)
    site.check_answers(version)


def test_it_holds_and_answers_what_a_fresh_server_does_and_leaves_when_it_is_ended(site: Site, tmp_path: Path) -> None:
    version = max(site.seeds)
    held, answered = INSTALLED.tensors(site.server), contents(INSTALLED, site.server)
    export(site.daemon, f"models/policy/versions/{version}", tmp_path / "exported")
    with expect_leaving(site.daemon):
        site.server.stop()
    with INSTALLED.alone(tmp_path / "exported") as fresh:
        assert INSTALLED.tensors(fresh) == held
        assert contents(INSTALLED, fresh) == answered
