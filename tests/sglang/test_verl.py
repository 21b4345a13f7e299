"""A server that a program starts and pauses by itself, as verl's does. verl's own: `tests/integrations/test_verl_sglang.py`."""

import json
import os
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from resharder.client import connect

from tests.support.daemon import Daemon
from tests.support.engine_site import write_config
from tests.support.observing import wait_serving
from tests.support.ports import free_port
from tests.support.sglang_program import PROMPT
from tests.support.sglang_server import asked, environment
from tests.support.tiny_hf import tiny_config
from tests.support.vllm_server import VERSION_HEADER
from tests.support.weights import Reference, random_weights

CONFIG = tiny_config("qwen3", num_hidden_layers=2)


class Program:
    """`tests.sglang.verl_program`."""

    def __init__(self, process: "subprocess.Popen[bytes]") -> None:
        self._process = process

    def found(self, key: str) -> Any:
        """The value that the present step of the program prints under a key."""
        assert self._process.stdout is not None
        line = next(line for line in self._process.stdout if line.startswith(b'{"' + key.encode()))
        return json.loads(line)[key]

    def go_on(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(b"\n")
        self._process.stdin.flush()


@contextmanager
def running(folder: Path, port: int, given: dict[str, str]) -> Iterator[Program]:
    command = [sys.executable, "-m", "tests.sglang.verl_program", str(folder), str(port)]
    variables = {**os.environ, **environment(), **given}
    process = subprocess.Popen(command, env=variables, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True)
    try:
        yield Program(process)
    finally:
        process.kill()
        process.wait()


def check(answer: Any, version: int) -> None:
    assert answer["spans"] == [{"version": str(version), "start": 0, "end": 8}]
    logprobs = Reference(CONFIG, random_weights(CONFIG, version)).logprobs([*PROMPT, *answer["tokens"]])[len(PROMPT) - 1 :]
    assert answer["tokens"] == logprobs.argmax(-1).tolist()


def test_a_server_that_a_program_starts_follows_and_stays_paused_over_an_install_until_the_program_goes_on(
    tmp_path: Path,
) -> None:
    write_config(tmp_path, CONFIG)
    with (
        Daemon() as daemon,
        connect(daemon.endpoint, model="policy", job="j", rank=0, world_size=1, config=CONFIG, tokenizer=tmp_path) as publisher,
    ):
        publisher.publish_tensors(1, random_weights(CONFIG, 1).items()).wait_ready(60)
        with running(tmp_path, free_port(), {"RESHARDER_ENDPOINT": daemon.endpoint}) as program:
            port = program.found("started")
            wait_serving(daemon, 1)
            body = json.dumps(asked(PROMPT, 8)).encode()
            request = urllib.request.Request(f"http://127.0.0.1:{port}/generate", body, {"Content-Type": "application/json"})
            with urllib.request.urlopen(request, timeout=60) as answer:
                assert answer.headers[VERSION_HEADER] == "1"
            program.go_on()
            check(program.found("answer"), 1)
            program.go_on()
            assert "its weights are released and restored by `resharder sleep`" in program.found("refused")
            publisher.publish_tensors(2, random_weights(CONFIG, 2).items()).wait_ready(60)
            wait_serving(daemon, 2)
            program.go_on()
            assert program.found("done") is False, "the program's own pause holds, since it has released the KV cache"
            program.go_on()
            check(program.found("answer"), 2)
