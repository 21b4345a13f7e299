"""An engine with adapters from a daemon, whose orders a test gives itself."""

import time
from typing import Any

from resharder.client.inference.vllm.engine_core import ADAPTER
from resharder.client.inference.worker.adapter_agent import adapter_id

from tests.support.adapters import RANK
from tests.support.vllm_engine import PROMPT, Engine

LORA: dict[str, Any] = {"enable_lora": True, "max_loras": 4, "max_lora_rank": RANK, "dtype": "float32"}


class Adapters:
    """An engine with a base from the daemon, and one adapter."""

    def __init__(self, engine: Engine, model: str, index: int = 0) -> None:
        self.engine, self.model, self.index = engine, model, index

    def call(self, method: str, *args: Any) -> list[dict[str, Any]]:
        answers: list[dict[str, Any]] = self.engine.core(ADAPTER, self.model, method, list(args))
        return answers

    def stage(self, install: str, version: str) -> None:
        for answer in self.call("stage", install, version):
            assert answer["ok"], answer["error"]

    def install(self, install: str, version: str) -> None:
        self.stage(install, version)
        self.wait_staged(install)
        for answer in self.call("apply", install, "wait"):
            assert answer["ok"], answer["error"]

    def wait_staged(self, install: str) -> None:
        deadline = time.monotonic() + 20
        while not all(answer["staged"] == install for answer in self.call("describe")):
            assert time.monotonic() < deadline, [answer["problem"] for answer in self.call("describe")]
            time.sleep(0.02)

    def problem(self, worker: int = 0) -> str:
        """Why the version that is being staged cannot be in a worker."""
        deadline = time.monotonic() + 20
        while not (problem := self.call("describe")[worker]["problem"]):
            assert time.monotonic() < deadline, [answer["problem"] for answer in self.call("describe")]
            time.sleep(0.02)
        return str(problem)

    def logprobs(self, version: int) -> list[tuple[int, float]]:
        return self.engine.logprobs(PROMPT, 8, (self.model, adapter_id(self.index, version), version))
