"""verl's SGLang rollout in one process: verl's server, replica, adapter and manager of updates, with Ray's calls replaced.

Arguments: FOLDER, and the arguments of the checkpoint engine `resharder` as JSON. Prints a line of JSON before the first update
and after each of two. The trainer's weights change their sign before each.
"""

import asyncio
import json
import os
import sys
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

from tests.support import verl_cpu  # noqa: F401  # CPUs are verl's platform

# isort: split
import ray
from verl.checkpoint_engine import CheckpointEngineManager, CheckpointEngineRegistry, base
from verl.workers.config import CheckpointEngineConfig, HFModelConfig, RolloutConfig
from verl.workers.rollout.replica import RolloutMode, get_rollout_replica_class

from tests.support.sglang_program import OPTIONS
from tests.support.tiny_hf import load_checkpoint

PROMPT, TOKENS = [5, 17, 42, 7], 8
LINE = "answered: "
WIRE_FORMATS = "named_tensors", "delta_flush"
"""Formats in which verl asks for weights: on CPUs, and where it has CUDA IPC."""
ENGINE = {name: value for name, value in OPTIONS.items() if name not in ("dtype", "mem_fraction_static", "disable_cuda_graph")}


class Reference:
    """Ray's reference to an answer."""

    def __init__(self, future: "Future[Any]") -> None:
        self.future = future

    def __await__(self) -> Any:
        return asyncio.wrap_future(self.future).__await__()


class Handle:
    """Ray's handle of an actor whose event loop runs on another thread."""

    def __init__(self, actor: Any, loop: asyncio.AbstractEventLoop) -> None:
        self._actor, self._loop = actor, loop

    def __getattr__(self, name: str) -> Any:
        async def call(*args: Any, **kwargs: Any) -> Any:
            answer = getattr(self._actor, name)(*args, **kwargs)
            return await answer if asyncio.iscoroutine(answer) else answer

        def remote(*args: Any, **kwargs: Any) -> Reference:
            return Reference(asyncio.run_coroutine_threadsafe(call(*args, **kwargs), self._loop))

        return SimpleNamespace(remote=remote)


class Workers:
    """A worker group of one process. `update` is its `update_weights`."""

    world_size = 1

    def __init__(self, engine: Any, pool: ThreadPoolExecutor, update: Callable[[int], Any]) -> None:
        self.engine, self._pool, self._update = engine, pool, update

    def execute_checkpoint_engine(self, method: Sequence[str], **values: Sequence[Any]) -> list[Reference]:
        given = {name: value[0] for name, value in values.items()}
        return [Reference(self._pool.submit(getattr(self.engine, method[0]), **given))]

    def update_weights(self, global_steps: int, **_: Any) -> list[Reference]:
        return [Reference(self._pool.submit(lambda: asyncio.run(self._update(global_steps))))]


def on_a_thread() -> asyncio.AbstractEventLoop:
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, daemon=True).start()
    return loop


def main(folder: str, arguments: str) -> None:
    os.environ |= {"RANK": "0", "RAY_LOCAL_WORLD_SIZE": "1"}
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    config = CheckpointEngineConfig(
        backend="resharder",
        custom_backend_module="resharder.client.integrations.verl",
        update_weights_bucket_megabytes=1,
        engine_kwargs={"resharder": json.loads(arguments)},
    )
    model = HFModelConfig(path=folder)
    rollout = RolloutConfig(
        name="sglang",
        mode="async",
        dtype="float32",
        load_format="auto",
        enforce_eager=True,
        skip_tokenizer_init=True,
        tensor_model_parallel_size=1,
        gpu_memory_utilization=0.6,
        prompt_length=64,
        response_length=64,
        checkpoint_engine=config,
        engine_kwargs={"sglang": ENGINE | {"enable_memory_saver": False}},
    )
    replica = get_rollout_replica_class("sglang")(replica_rank=0, config=rollout, model_config=model)
    from verl.workers.rollout.sglang_rollout.async_sglang_server import SGLangHttpServer
    from verl.workers.rollout.sglang_rollout.sglang_rollout import ServerAdapter

    where = {"replica_rank": 0, "node_rank": 0, "nnodes": 1, "cuda_visible_devices": "", "base_gpu_id": 0}
    handle = Handle(SGLangHttpServer(rollout, model, RolloutMode.STANDALONE, [], **where), on_a_thread())
    handle.launch_server.remote().future.result(200)
    replica.rollout_mode, replica.servers, replica.workers = RolloutMode.STANDALONE, [handle], []
    ray.get_actor = {"sglang_server_0_0": handle}.__getitem__
    ray.get = lambda references: [reference.future.result(200) for reference in references]

    pool, weights = ThreadPoolExecutor(4), load_checkpoint(Path(folder))
    adapter = ServerAdapter(rollout, model, device_mesh=None, replica_rank=0)
    CheckpointEngineManager(config, None, [])  # imports the module of the backend
    trainer, receiver = (
        CheckpointEngineRegistry.new("resharder", bucket_size=1 << 20, is_master=master, **json.loads(arguments), path=folder)
        for master in (True, False)
    )

    async def send(step: int) -> Any:
        return await trainer.send_weights(iter(weights.items()), step)

    async def receive(step: int) -> None:  # as verl's CheckpointEngineWorker
        await adapter.update_weights(receiver.receive_weights(step), global_steps=step, wire_format=receiver.wire_format)

    rollouts = Workers(receiver, pool, receive)
    base.RayWorkerGroup = lambda **_: rollouts
    manager = CheckpointEngineManager(config, Workers(trainer, pool, send), [replica])

    def answered() -> None:
        sampling = {"temperature": 0.0, "max_tokens": TOKENS, "ignore_eos": True}
        answer = handle.generate.remote(prompt_ids=PROMPT, sampling_params=sampling, request_id="one").future.result(100)
        print(LINE + json.dumps({"tokens": answer.token_ids, "step": answer.extra_fields["global_steps"]}), flush=True)

    answered()
    for step, wire_format in enumerate(WIRE_FORMATS, start=1):
        receiver.wire_format = wire_format
        for tensor in weights.values():
            tensor.neg_()
        manager.update_weights(global_steps=step)
        answered()
    os._exit(0)  # SGLang's other processes end with this one


if __name__ == "__main__":
    with torch.no_grad():
        main(*sys.argv[1:])
