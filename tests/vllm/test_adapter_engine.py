"""The engine as the control side of an adapter sees it: slots are freed whatever becomes of a version."""

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
from resharder.client.inference.vllm.adapter_engine import AdapterEngine


class Core:
    """An engine core whose worker loads each staged version for 0.3 s, in vain, and keeps its slot until a release after that."""

    def __init__(self) -> None:
        self.slots, self._loading_until, self.calls = 0, 0.0, list[str]()

    async def call_utility_async(self, method: str, adapter: str, called: str, args: list[Any]) -> list[dict[str, Any]]:
        self.calls.append(called)
        now = asyncio.get_running_loop().time()
        if called == "stage":
            self.slots, self._loading_until = self.slots + 1, now + 0.3
        if called == "unstage":
            self._loading_until = now
        if called == "release" and now >= self._loading_until:
            self.slots = 0
        return [{"left": [7] * self.slots, "full": False}]


@pytest.mark.parametrize("ends", ["in vain", "by an order"])
def test_a_version_that_is_staged_and_not_applied_leaves_its_slot(ends: str) -> None:
    core = Core()

    async def stage() -> None:
        engine = AdapterEngine(SimpleNamespace(engine_core=core), "lora")
        await engine.collective_rpc("resharder_stage", args=("i", "models/lora/versions/2"))
        if ends == "by an order":
            await engine.collective_rpc("resharder_unstage", args=("i",))
        await asyncio.sleep(1.5)
        assert core.slots == 0
        count = len(core.calls)
        await asyncio.sleep(1.2)
        assert len(core.calls) == count, "once nothing is left, the engine is left alone"

    asyncio.run(stage())
