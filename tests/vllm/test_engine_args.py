"""What the plugin makes of vLLM's arguments: no server boots from the daemon without following it, no other one is touched."""

import json
import logging
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from resharder.client.errors import UsageError
from resharder.client.inference.vllm.engine_args import watch_engine_args
from vllm.engine.arg_utils import AsyncEngineArgs, EngineArgs
from vllm.usage.usage_lib import UsageContext

from tests.support.tiny_hf import tiny_config
from tests.support.vllm_engine import ENVIRONMENT

SERVER = UsageContext.OPENAI_API_SERVER
Create = Callable[..., Any]


@pytest.fixture
def create(monkeypatch: pytest.MonkeyPatch) -> tuple[Create, list[str]]:
    """Function that makes a configuration of a load format, and the endpoints at each registration."""
    monkeypatch.setattr(EngineArgs, "create_engine_config", lambda self, context=None, headless=False: (context, headless))
    for name in ("RESHARDER_ENDPOINT", "VLLM_PLUGINS", "RESHARDER_ALLOW"):
        monkeypatch.setenv(name, "")  # so that what the plugin sets is taken back
        monkeypatch.delenv(name)
    registered = list[str]()
    for _ in range(2):
        watch_engine_args(lambda: registered.append(os.environ["RESHARDER_ENDPOINT"]))

    def made(load_format: str, *given: Any, **named: Any) -> Any:
        args = object.__new__(AsyncEngineArgs)
        args.load_format = load_format
        return args.create_engine_config(*given, **named)

    return made, registered


def test_a_server_without_the_gate_is_refused_with_what_to_set(
    create: tuple[Create, list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    made, _ = create
    for plugins in (None, "", "other"):
        monkeypatch.delenv("VLLM_PLUGINS", raising=False) if plugins is None else monkeypatch.setenv("VLLM_PLUGINS", plugins)
        for given, named in (((SERVER,), {}), ((), {"usage_context": SERVER})):
            with pytest.raises(UsageError, match=r"never leave the version that it boots.*Set VLLM_PLUGINS=resharder"):
                made("resharder", *given, **named)


def test_a_server_with_the_gate_and_one_that_is_allowed_start(
    create: tuple[Create, list[str]], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    made, _ = create
    monkeypatch.setenv("VLLM_PLUGINS", "other,resharder")
    assert made("Resharder", SERVER) == (SERVER, False)
    monkeypatch.delenv("VLLM_PLUGINS")
    monkeypatch.setenv("RESHARDER_ALLOW", "no-gate")
    assert made("resharder", SERVER) == (SERVER, False)
    assert "allowed by RESHARDER_ALLOW=no-gate" in caplog.text


@pytest.mark.parametrize("context", [None, UsageContext.ENGINE_CONTEXT, UsageContext.LLM_CLASS])
def test_programs_around_an_engine_need_no_gate(create: tuple[Create, list[str]], context: UsageContext | None) -> None:
    made, _ = create
    assert made("resharder", context) == (context, False)


def test_a_host_without_an_api_server_needs_no_gate(create: tuple[Create, list[str]]) -> None:
    made, _ = create
    assert made("resharder", usage_context=SERVER, headless=True) == (SERVER, True)


def test_a_missing_endpoint_is_the_commands_default_for_this_load_format_alone(
    create: tuple[Create, list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    made, registered = create
    monkeypatch.setenv("VLLM_PLUGINS", "resharder")
    assert made("auto", SERVER) == (SERVER, False)
    assert "RESHARDER_ENDPOINT" not in os.environ
    assert registered == []
    made("resharder", SERVER)
    assert registered == ["127.0.0.1:7677"]
    made("resharder", SERVER)
    assert registered == ["127.0.0.1:7677"], "its processes inherit the variable"


def test_another_server_is_not_touched_and_one_that_names_the_daemon_alone_is_warned(
    create: tuple[Create, list[str]], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    made, registered = create
    with caplog.at_level(logging.INFO):
        assert made("auto", SERVER) == (SERVER, False)
        assert caplog.text == ""
        monkeypatch.setenv("RESHARDER_ENDPOINT", "daemon:7677")
        assert made("auto", SERVER) == (SERVER, False)
    assert "does not follow the daemon: VLLM_PLUGINS does not name resharder" in caplog.text
    assert registered == []


@pytest.mark.full
def test_vllms_own_server_ends_with_the_sentence_before_it_loads_anything(tmp_path: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if name not in ("VLLM_PLUGINS", "RESHARDER_ENDPOINT")}
    (tmp_path / "config.json").write_text(json.dumps(tiny_config("qwen3")))
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(tmp_path), "--load-format", "resharder"]
    done = subprocess.run(command, env=environment | ENVIRONMENT, capture_output=True, text=True, timeout=300)
    assert done.returncode != 0
    last = done.stderr.rstrip().splitlines()[-1]
    assert "Set VLLM_PLUGINS=resharder" in last, done.stderr
    assert "EngineCore" not in done.stdout + done.stderr, "no engine was started"
