"""A server as verl 0.9.1 starts it (`SGLangHttpServer.launch_server`), and verl's calls of it around an update of its weights.

Arguments: FOLDER PORT. Prints JSON after each step, and begins the next one at a line on its standard input.
"""

import asyncio
import json
import sys
from typing import Any

import uvicorn
from resharder.client.errors import UsageError
from sglang.srt.entrypoints import engine
from sglang.srt.entrypoints.http_server import Engine, _GlobalState, app, set_global_state
from sglang.srt.managers.io_struct import (
    ContinueGenerationReqInput,
    GenerateReqInput,
    PauseGenerationReqInput,
    ReleaseMemoryOccupationReqInput,
    ResumeMemoryOccupationReqInput,
)
from sglang.srt.server_args import ServerArgs

from tests.support.sglang_program import OPTIONS, PROMPT


async def step(**found: Any) -> None:
    print(json.dumps(found), flush=True)
    await asyncio.to_thread(sys.stdin.readline)


async def ask(manager: Any) -> dict[str, Any]:
    request = GenerateReqInput(input_ids=PROMPT, sampling_params={"temperature": 0, "max_new_tokens": 8})
    answer = await anext(manager.generate_request(request, None))
    return {"tokens": answer["output_ids"], "spans": answer["meta_info"]["weight_versions"]}


async def launch(folder: str, port: int) -> Any:
    server_args = ServerArgs(model_path=folder, skip_server_warmup=True, skip_tokenizer_init=True, log_level="error", **OPTIONS)
    manager, template, scheduler, *_ = Engine._launch_subprocesses(
        server_args=server_args,
        init_tokenizer_manager_func=engine.init_tokenizer_manager,
        run_scheduler_process_func=engine.run_scheduler_process,
        run_detokenizer_process_func=engine.run_detokenizer_process,
    )
    set_global_state(_GlobalState(tokenizer_manager=manager, template_manager=template, scheduler_info=scheduler))
    app.is_single_tokenizer_mode = True
    app.server_args, app.warmup_thread_kwargs = server_args, {"server_args": server_args}
    server = uvicorn.Server(uvicorn.Config(app, host="127.0.0.1", port=port, log_level="warning"))
    app.serving = asyncio.create_task(server.serve())
    while not server.started:
        await asyncio.sleep(0.05)
    return manager


async def main(folder: str, port: int) -> None:
    manager = await launch(folder, port)
    await step(started=port)
    await step(answer=await ask(manager))
    await manager.pause_generation(PauseGenerationReqInput(mode="abort"))
    try:
        await manager.release_memory_occupation(ReleaseMemoryOccupationReqInput(tags=["kv_cache", "weights"]), None)
    except UsageError as error:
        refused = str(error)
    await manager.release_memory_occupation(ReleaseMemoryOccupationReqInput(tags=["kv_cache"]), None)
    await step(refused=refused)
    waiting = asyncio.create_task(ask(manager))
    await step(done=bool((await asyncio.wait([waiting], timeout=2))[0]))
    await manager.resume_memory_occupation(ResumeMemoryOccupationReqInput(tags=["kv_cache"]), None)
    await manager.flush_cache()
    await manager.continue_generation(ContinueGenerationReqInput())
    await step(answer=await waiting)


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], int(sys.argv[2])))
