"""One SGLang server that boots from the daemon, follows it, sleeps and leaves.

The tests share the server and run in order; each leaves it serving.
"""

import itertools
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from resharder.client import connect
from resharder.client.operator.answers import PauseMode, Power

from tests.support.observing import expect_leaving, export, servers, wait_serving, wait_until
from tests.support.sglang_server import asked
from tests.support.sglang_site import PROMPT, Site, alone, checksums, contents, running, write_config
from tests.support.tiny_hf import tiny_config
from tests.support.vllm_server import Response, Token
from tests.support.weights import random_weights

CONFIG = tiny_config("qwen3", num_hidden_layers=2)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    with running(tmp_path_factory.mktemp("config"), CONFIG, arguments=["--enable-metrics"]) as built:
        yield built


def test_it_boots_from_the_daemon_without_a_checkpoint(site: Site) -> None:
    assert not list(site.folder.glob("*.safetensors"))
    site.check_answers(1)
    (server,) = servers(site.daemon)
    assert [worker.transport for worker in server.workers] == ["shared-memory"]


def test_it_follows_new_versions_by_boxes(site: Site) -> None:
    for _ in range(2):
        site.check_answers(site.serve())
    (server,) = servers(site.daemon)
    (worker,) = server.workers
    needed = sum(tensor.numel() * 4 for tensor in random_weights(CONFIG, 1).values())
    assert worker.boxed_bytes == worker.needed_bytes == needed


def test_metrics_of_the_gate_are_on_its_page(site: Site) -> None:
    version = site.serve()
    page = site.server.request("GET", "/metrics").body.decode()
    (served,) = re.findall(r"^resharder_sglang_served_version(?:{.*})? (\S+)$", page, re.MULTILINE)
    assert float(served) == version
    assert re.search(r'^resharder_sglang_gate_position{.*position="open".*} 1.0$', page, re.MULTILINE)
    assert "sglang:" in page, "its own"


def test_a_request_in_flight_goes_on_and_each_of_its_tokens_comes_from_the_version_that_its_label_names(site: Site) -> None:
    for _ in range(5):  # on a busy machine an answer can be over before the install begins
        old = max(site.seeds)
        new, tokens, spans = across_an_install(site, 300)
        made = {version: made_by(site, version, tokens) for version in (old, new)}
        assert (spans[0]["start"], spans[-1]["end"]) == (0, len(tokens))
        for span in spans:
            assert bool(made[int(span["version"])][span["start"] : span["end"]].all()), spans
        if len(spans) == 2:
            assert [span["version"] for span in spans] == [str(old), str(new)]
            return
    pytest.fail("no install of five fell into an answer")


def across_an_install(site: Site, count: int) -> tuple[int, list[Token], list[dict[str, Any]]]:
    """The version that is installed while an answer is on its way, the answer's tokens, and SGLang's spans of them."""
    with on_its_way(site, count) as found:
        version = site.serve()
    response = found[0]
    meta = response.json()["meta_info"]
    assert response.version == ",".join(span["version"] for span in meta["weight_versions"])
    tokens = [Token(token, logprob, 0.0) for logprob, token, *_ in meta["output_token_logprobs"]]
    return version, tokens, meta["weight_versions"]


@contextmanager
def on_its_way(site: Site, count: int) -> Iterator[list[Response]]:
    """Ask for an answer of so many tokens; in the block, some are computed. The list has the response after the block."""
    found: list[Response] = []
    streamed: list[Token] = []
    clients = [
        threading.Thread(target=lambda: found.append(site.server.request("POST", "/generate", asked(PROMPT, count)))),
        threading.Thread(target=lambda: streamed.extend(tokens)),
    ]
    clients[0].start()
    tokens = site.server.stream(PROMPT, count)
    streamed += itertools.islice(tokens, 5)
    clients[1].start()
    try:
        yield found
    finally:
        for client in clients:
            client.join(120)


def made_by(site: Site, version: int, tokens: list[Token]) -> torch.Tensor:
    """Which tokens this version's weights could have made."""
    ids = [token.token_id for token in tokens]
    logprobs = site.reference(version).logprobs([*PROMPT, *ids])[len(PROMPT) - 1 :]
    chosen = logprobs.gather(-1, torch.tensor(ids)[:, None])[:, 0]
    return (torch.tensor([token.logprob for token in tokens]) - chosen).abs() < 1e-3


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
    old = max(site.seeds)
    site.operator.set_fleet("policy", pause_mode=mode)
    try:
        with on_its_way(site, 300) as found:
            version = site.serve()
    finally:
        site.operator.set_fleet("policy", pause_mode=PauseMode.KEEP)
    meta = found[0].json()["meta_info"]
    assert meta["finish_reason"]["type"] == finish
    assert found[0].version == str(old)
    site.check_answers(version)


def test_calls_that_change_the_engine_are_refused(site: Site) -> None:
    for path, body in (
        ("/update_weights_from_disk", {"model_path": "/nowhere"}),
        ("/begin_weight_update", {}),
        ("/pause_generation", {"mode": "abort"}),
        ("/continue_generation", {}),
        ("/release_memory_occupation", {}),
        ("/update_weight_version", {"new_version": "9"}),
    ):
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
    held, answered = checksums(site.server), contents(site.server)
    export(site.daemon, f"models/policy/versions/{version}", tmp_path / "exported")
    with expect_leaving(site.daemon):
        site.server.stop()
    with alone(tmp_path / "exported") as fresh:
        assert checksums(fresh) == held
        assert contents(fresh) == answered
