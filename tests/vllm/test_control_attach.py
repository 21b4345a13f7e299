"""A program that embeds AsyncLLM follows the daemon without an API server; configurations that are refused."""

import asyncio
import json
import os
from pathlib import Path
from types import SimpleNamespace

import pytest
from resharder.client import connect
from resharder.client.errors import UsageError
from resharder.client.inference.vllm.attach import refuse_unsupported
from resharder.client.inference.vllm.endpoint import EndpointPlugin
from resharder.client.inference.vllm.engine_core import passes_kv
from resharder.client.inference.vllm.sleep import cannot_sleep

from demo.jobs import JobFailed, Requests
from tests.support.daemon import Daemon
from tests.support.forked import start
from tests.support.observing import wait_serving
from tests.support.tiny_hf import save_tokenizer, tiny_config
from tests.support.vllm_server import EAGER_ENVIRONMENT
from tests.support.weights import random_weights

PROGRAM = "tests.support.embedding_program"
RAW_MODE = Path(__file__).parents[1] / "support" / "raw_mode"
DROPPING_SLEEP = {"VLLM_PLUGINS": "resharder,dropping_sleep", "PYTHONPATH": str(RAW_MODE)}


@pytest.mark.full
def test_an_embedded_engine_boots_and_follows_and_its_program_can_wait_for_a_version_and_put_it_to_sleep(tmp_path: Path) -> None:
    config = tiny_config("qwen3")
    save_tokenizer(tmp_path, config["vocab_size"])
    (tmp_path / "config.json").write_text(json.dumps(config))
    with (
        Daemon() as daemon,
        connect(daemon.endpoint, model="policy", job="j", rank=0, world_size=1, config=config, tokenizer=tmp_path) as publisher,
    ):
        publisher.publish_tensors(1, random_weights(config, 1).items()).wait_ready(120)
        environment = {**os.environ, **EAGER_ENVIRONMENT, **DROPPING_SLEEP, "RESHARDER_ENDPOINT": daemon.endpoint}
        with (tmp_path / "log").open("wb") as log:
            process = start(PROGRAM, environment, log, arguments=[str(tmp_path)], session=True, imported_with=EAGER_ENVIRONMENT)
        program = Requests(tmp_path, lambda: process.poll() is None)
        try:
            first = program.ask(do="first")
            assert wait_serving(daemon, 1).control_sides == 1
            publisher.publish_tensors(2, random_weights(config, 2).items()).wait_ready(120)
            second = program.ask(do="second")
            woken = program.reply(3)
            assert process.wait(60) == 0
        except JobFailed as error:
            raise AssertionError((tmp_path / "log").read_text()[-4000:]) from error
        finally:
            process.kill()
    assert (first["before"], first["version"], second["version"]) == (None, 1, 2)
    assert first["tokens"] != second["tokens"]
    assert second["waited"] == "expected version 3 within 0.2 s, got 2"
    assert woken == {"before": None, "version": 2, "tokens": second["tokens"]}


def vllm_config(**parallel: bool) -> SimpleNamespace:
    names = ("data_parallel_external_lb", "data_parallel_hybrid_lb", "enable_eplb", "enable_elastic_ep")
    return SimpleNamespace(
        parallel_config=SimpleNamespace(**(dict.fromkeys(names, False) | parallel)),
        kv_transfer_config=None,
        lora_config=None,
        quant_config=None,
        speculative_config=None,
        model_config=SimpleNamespace(model="org/model"),
    )


def test_a_plain_configuration_is_supported() -> None:
    refuse_unsupported(vllm_config())


@pytest.mark.parametrize(
    ("setting", "named"),
    [
        ("data_parallel_external_lb", "external data-parallel load balancing"),
        ("data_parallel_hybrid_lb", "hybrid data-parallel load balancing"),
        ("enable_eplb", "EPLB"),
        ("enable_elastic_ep", "elastic expert parallelism"),
    ],
)
def test_what_is_not_proven_is_refused_by_name(setting: str, named: str) -> None:
    with pytest.raises(UsageError, match=named):
        refuse_unsupported(vllm_config(**{setting: True}))


@pytest.mark.parametrize("role", [None, "kv_producer", "kv_consumer", "kv_both"])
def test_a_server_that_passes_kv_to_others_is_supported_and_known_for_it(role: str | None) -> None:
    config = vllm_config()
    if role:
        config.kv_transfer_config = SimpleNamespace(kv_role=role)
    refuse_unsupported(config)
    assert passes_kv(config) == (role is not None)


def test_an_engine_on_a_gpu_sleeps_only_with_vllms_sleep_mode() -> None:
    def problem(device: str, enabled: bool) -> str:
        config = SimpleNamespace(
            device_config=SimpleNamespace(device_type=device), model_config=SimpleNamespace(enable_sleep_mode=enabled)
        )
        return cannot_sleep(config)

    assert [problem("cpu", False), problem("cuda", True)] == ["", ""]
    assert "--enable-sleep-mode" in problem("cuda", False)


def test_the_endpoint_plugin_does_nothing_without_a_daemon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RESHARDER_ENDPOINT", raising=False)
    plugin = EndpointPlugin()
    plugin.attach_router(None)
    asyncio.run(plugin.init_state(None, None, SimpleNamespace()))  # type: ignore[arg-type]
    assert plugin.handle is None
