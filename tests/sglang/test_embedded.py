"""A program that embeds SGLang's engine follows the daemon too."""

import json
import os
import subprocess
import sys
from pathlib import Path

from resharder.client import connect

from tests.support.daemon import Daemon
from tests.support.engine_site import write_config
from tests.support.observing import wait_serving
from tests.support.sglang_program import PROMPT
from tests.support.sglang_server import environment
from tests.support.tiny_hf import tiny_config
from tests.support.weights import Reference, random_weights

CONFIG = tiny_config("qwen3", num_hidden_layers=2)


def test_an_embedded_engine_answers_with_the_version_that_its_handle_waits_for(tmp_path: Path) -> None:
    write_config(tmp_path, CONFIG)
    with (
        Daemon() as daemon,
        connect(daemon.endpoint, model="policy", job="j", rank=0, world_size=1, config=CONFIG, tokenizer=tmp_path) as publisher,
    ):
        publisher.publish_tensors(1, random_weights(CONFIG, 1).items()).wait_ready(60)
        given = {**os.environ, **environment(), "RESHARDER_ENDPOINT": daemon.endpoint}
        command = [sys.executable, "-m", "tests.support.sglang_program", str(tmp_path), "2"]
        program = subprocess.Popen(command, env=given, stdout=subprocess.PIPE, start_new_session=True)
        try:
            assert program.stdout is not None
            lines = (line for line in program.stdout if line.startswith(b'{"versions"'))
            answers = [json.loads(next(lines))]
            wait_serving(daemon, 1)
            publisher.publish_tensors(2, random_weights(CONFIG, 2).items()).wait_ready(60)
            answers.append(json.loads(next(lines)))
            assert program.wait(60) == 0
        finally:
            program.kill()
    for version, answer in zip((1, 2), answers, strict=True):
        assert answer["versions"] == [version]
        assert answer["spans"] == [{"version": str(version), "start": 0, "end": 8}], "SGLang's own, and with 0.5.17 the plugin's"
        logprobs = Reference(CONFIG, random_weights(CONFIG, version)).logprobs([*PROMPT, *answer["tokens"]])[len(PROMPT) - 1 :]
        assert answer["tokens"] == logprobs.argmax(-1).tolist()
