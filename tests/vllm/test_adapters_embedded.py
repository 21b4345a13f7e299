"""A program that embeds AsyncLLM asks adapters by the handle of `attach`."""

import os
from pathlib import Path

import pytest

from demo.jobs import JobFailed, Requests
from tests.support.adapter_server import ADAPTER, PROMPT, TOKENS, AdapterSite
from tests.support.forked import start
from tests.support.vllm_server import EAGER_ENVIRONMENT

PROGRAM = "tests.support.embedding_adapters"


@pytest.mark.full
def test_the_handle_of_an_embedded_engine_gives_requests_of_the_version_in_service(tmp_path: Path) -> None:
    with AdapterSite(tmp_path) as site:
        (jobs := tmp_path / "jobs").mkdir()
        environment = {**os.environ, **EAGER_ENVIRONMENT, **site.environment("one")}
        with (tmp_path / "log").open("wb") as log:
            options = {"arguments": [str(jobs), str(site.bare)], "session": True, "imported_with": EAGER_ENVIRONMENT}
            process = start(PROGRAM, environment, log, **options)
        program, found = Requests(jobs, lambda: process.poll() is None), []
        try:
            for which in (0, 1, 2):
                number = site.publish(which)
                found.append(program.ask(version=number, prompt=PROMPT, tokens=TOKENS))
            assert process.wait(60) == 0
        except JobFailed as error:
            raise AssertionError((tmp_path / "log").read_text()[-4000:]) from error
        finally:
            process.kill()
    assert {each["early"] for each in found} == {f"no version of {ADAPTER}"}
    assert [each["label"] for each in found] == [f"1;{ADAPTER}={number}" for number in (1, 2, 3)]
    assert [each["tokens"] for each in found] == site.expected
