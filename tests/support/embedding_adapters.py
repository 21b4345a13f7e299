"""A program that embeds AsyncLLM and asks an adapter by the handle of `attach`: its arguments are a folder and the model's.

It answers requests in its folder (`demo.jobs`) with the adapter's version and the label and tokens of a greedy answer by it.
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
from tests.support.adapters import RANK


def main() -> None:
    asyncio.run(follow(Path(sys.argv[1]), sys.argv[2]))


async def follow(folder: Path, model: str) -> None:
    from resharder.client.inference.vllm.attach import attach

    options: dict[str, Any] = {"enable_lora": True, "max_loras": 3, "max_lora_rank": RANK}
    engine = AsyncLLM.from_engine_args(
        AsyncEngineArgs(
            model=model,
            load_format="resharder",
            dtype="float32",
            enforce_eager=True,
            max_model_len=512,
            max_num_seqs=8,
            kv_cache_memory_bytes=64 << 20,
            **options,
        )
    )
    handle = await attach(engine)
    await handle.wait(1, timeout=200)
    (adapter,) = handle.adapters.values()
    try:
        early = adapter.request().lora_name
    except KeyError as error:
        early = f"no version of {error.args[0]}"
    for number in (1, 2, 3):
        request = await asyncio.to_thread(next_request, folder, number)
        while adapter.version < request["version"]:
            await asyncio.sleep(0.05)
        with handle.answering() as found:
            tokens = await greedy(engine, request["prompt"], request["tokens"], adapter.request())
        label = str(found.label)
        answer(folder, number, {"early": early, "version": adapter.version, "label": label, "tokens": tokens})
    handle.close()
    engine.shutdown()


async def greedy(engine: AsyncLLM, prompt: list[int], tokens: int, adapter: Any) -> list[int]:
    parameters, last = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True), Any
    async for output in engine.generate({"prompt_token_ids": prompt}, parameters, "r", lora_request=adapter):
        last = output
    return list(last.outputs[0].token_ids)


if __name__ == "__main__":
    main()
