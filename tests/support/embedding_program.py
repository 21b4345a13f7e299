"""A program that embeds AsyncLLM, without an API server: its argument is a folder with the model's config.

It answers requests there (`demo.jobs`) with its version and a greedy answer: for version 1, for version 2, and once more after a
sleep that drops the weights, from which the daemon wakes it.
"""

import asyncio
import sys
from pathlib import Path
from typing import Any

from vllm import SamplingParams
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.v1.engine.async_llm import AsyncLLM

from demo.jobs import answer, next_request
from tests.support import vllm_serve  # noqa: F401  # its processes are forked


def main() -> None:
    asyncio.run(follow(Path(sys.argv[1])))


async def follow(folder: Path) -> None:
    from resharder.client.errors import WaitTimeout
    from resharder.client.inference.vllm.attach import attach

    engine = AsyncLLM.from_engine_args(
        AsyncEngineArgs(
            model=str(folder),
            load_format="resharder",
            dtype="float32",
            enforce_eager=True,
            max_model_len=512,
            max_num_seqs=8,
            kv_cache_memory_bytes=64 << 20,
        )
    )
    handle = await attach(engine)
    before = handle.version
    await handle.wait(1, timeout=200)
    answer(folder, 1, {"before": before, "version": handle.version, "tokens": await greedy(engine)})
    await asyncio.to_thread(next_request, folder, 2)
    await handle.wait(2, timeout=200)
    try:
        await handle.wait(3, timeout=0.2)
    except WaitTimeout as error:
        answer(folder, 2, {"waited": str(error), "version": handle.version, "tokens": await greedy(engine)})
    await engine.sleep(level=2)
    asleep = handle.version
    await handle.wait(2, timeout=200)
    answer(folder, 3, {"before": asleep, "version": handle.version, "tokens": await greedy(engine)})
    handle.close()
    engine.shutdown()


async def greedy(engine: AsyncLLM) -> list[int]:
    parameters, last = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True), Any
    async for output in engine.generate({"prompt_token_ids": [5, 17, 42]}, parameters, "r"):
        last = output
    return list(last.outputs[0].token_ids)
