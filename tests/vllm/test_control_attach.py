"""A program that embeds AsyncLLM follows the daemon without an API server; configurations that are refused."""

import asyncio
import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from resharder.client import connect
from resharder.client.errors import UsageError
from resharder.client.inference.vllm.attach import refuse_unsupported
from resharder.client.inference.vllm.endpoint import EndpointPlugin
from resharder.client.inference.vllm.engine_core import passes_kv
from resharder.client.inference.vllm.sleep import cannot_sleep

from tests.support.daemon import Daemon
from tests.support.observing import wait_serving
from tests.support.tiny_hf import save_tokenizer, tiny_config
from tests.support.vllm_server import CPU_ENVIRONMENT
from tests.support.weights import random_weights

# Says the version and a greedy answer, waits for a line on stdin, says them again for version 2, and once more after a sleep that
# drops the weights, from which the daemon wakes it.
PROGRAM = """
import asyncio, json, sys
from vllm import SamplingParams
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.v1.engine.async_llm import AsyncLLM
from resharder.client.errors import WaitTimeout
from resharder.client.inference.vllm.attach import attach

async def answer(engine):
    greedy = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    async for output in engine.generate({"prompt_token_ids": [5, 17, 42]}, greedy, "r"):
        last = output
    return list(last.outputs[0].token_ids)

async def main():
    engine = AsyncLLM.from_engine_args(AsyncEngineArgs(
        model=sys.argv[1], load_format="resharder", dtype="float32", enforce_eager=True, max_model_len=512, max_num_seqs=8,
        kv_cache_memory_bytes=64 << 20))
    handle = await attach(engine)
    before = handle.version
    await handle.wait(1, timeout=200)
    print(json.dumps([before, handle.version, await answer(engine)]), flush=True)
    await asyncio.to_thread(sys.stdin.readline)
    await handle.wait(2, timeout=200)
    try:
        await handle.wait(3, timeout=0.2)
    except WaitTimeout as error:
        print(json.dumps([str(error), handle.version, await answer(engine)]), flush=True)
    await engine.sleep(level=2)
    asleep = handle.version
    await handle.wait(2, timeout=200)
    print(json.dumps([asleep, handle.version, await answer(engine)]), flush=True)
    handle.close()
    engine.shutdown()

if __name__ == "__main__":
    asyncio.run(main())
"""


RAW_MODE = Path(__file__).parents[1] / "support" / "raw_mode"
DROPPING_SLEEP = {"VLLM_PLUGINS": "resharder,dropping_sleep", "PYTHONPATH": str(RAW_MODE)}


def test_an_embedded_engine_boots_and_follows_and_its_program_can_wait_for_a_version_and_put_it_to_sleep(tmp_path: Path) -> None:
    config = tiny_config("qwen3")
    save_tokenizer(tmp_path, config["vocab_size"])
    (tmp_path / "config.json").write_text(json.dumps(config))
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    with (
        Daemon() as daemon,
        connect(daemon.endpoint, model="policy", job="j", rank=0, world_size=1, config=config, tokenizer=tmp_path) as publisher,
    ):
        publisher.publish_tensors(1, random_weights(config, 1).items()).wait_ready(120)
        environment = {**os.environ, **CPU_ENVIRONMENT, **DROPPING_SLEEP, "RESHARDER_ENDPOINT": daemon.endpoint}
        with (
            (tmp_path / "log").open("wb") as log,
            subprocess.Popen(
                [sys.executable, str(program), str(tmp_path)],
                env=environment,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
            ) as process,
        ):
            assert process.stdin is not None
            assert process.stdout is not None
            try:
                before, first, tokens = _json_line(process.stdout, tmp_path / "log")
                assert wait_serving(daemon, 1).control_sides == 1
                publisher.publish_tensors(2, random_weights(config, 2).items()).wait_ready(120)
                process.stdin.write(b"\n")
                process.stdin.flush()
                error, second, others = _json_line(process.stdout, tmp_path / "log")
                woken = _json_line(process.stdout, tmp_path / "log")
                assert process.wait(60) == 0
            finally:
                process.kill()
    assert (before, first, second) == (None, 1, 2)
    assert tokens != others
    assert error == "expected version 3 within 0.2 s, got 2"
    assert woken == [None, 2, others]


def _json_line(output, log: Path):  # type: ignore[no-untyped-def]
    for line in output:
        if line.startswith(b"["):
            try:
                return json.loads(line)
            except ValueError:  # vLLM's own lines on stdout
                continue
    raise AssertionError(log.read_text()[-4000:])


def vllm_config(**parallel: bool) -> SimpleNamespace:
    names = ("data_parallel_external_lb", "data_parallel_hybrid_lb", "enable_eplb", "enable_elastic_ep")
    return SimpleNamespace(
        parallel_config=SimpleNamespace(**(dict.fromkeys(names, False) | parallel)),
        kv_transfer_config=None,
        lora_config=None,
        speculative_config=None,
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
        ("lora", "LoRA"),
    ],
)
def test_what_is_not_proven_is_refused_by_name(setting: str, named: str) -> None:
    config = vllm_config() if setting == "lora" else vllm_config(**{setting: True})
    if setting == "lora":
        config.lora_config = object()
    with pytest.raises(UsageError, match=named):
        refuse_unsupported(config)


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
