"""checkpoint-engine 0.4: weights go to pinned memory of the host, and from there to the server.

Its parameter server has a rank on the GPU of each worker: here a single one, in the trainer's process. The trainer may go on once
its weights are in pinned memory. vLLM is paused meanwhile; nothing is verified.
"""

import os
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager

import torch

from benchmarks.systems.base import Points, Sender, Setup, Site, System, WholeTensors, missing, needs_gpus
from benchmarks.systems.vllm_control import Control
from tests.support.ports import free_port

NAME = "weights"


class ParameterServer(WholeTensors):
    """A trainer whose process sees the server's GPU first, and its own last."""

    def __init__(self, setup: Setup) -> None:
        super().__init__(setup, torch.device("cuda", len(set(setup.gpus)) - 1))
        from checkpoint_engine.ps import ParameterServer as Server

        os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
        self._server = Server(auto_pg=True, gpu_count=1)
        self._pool = ThreadPoolExecutor(1)
        self._update: Future[float] | None = None

    def open(self, server: str) -> None:
        self._control = Control(server)

    def publish(self, step: int) -> int:
        self._server.register_checkpoint(NAME, named_tensors=self.tensors, use_shared_memory_pool=True)
        torch.cuda.synchronize(self.device)
        self._update = self._pool.submit(self._send)
        return step

    def _send(self) -> float:
        torch.cuda.set_device(0)
        self._server.gather_metas(NAME)
        with self._control.paused():
            self._server.update(NAME, lambda handles: self._control.call("update_weights_from_ipc", dict(handles)))
            updated = time.time()
        self._server.unregister_checkpoint(NAME)
        return updated

    def settle(self) -> Points:
        assert self._update is not None
        return {"transferred": self._update.result()}


class CheckpointEngine(System):
    name = "checkpoint-engine"

    def unavailable(self, setup: Setup) -> str:
        return needs_gpus(setup) or ("checkpoint-engine is not installed" if missing("checkpoint_engine") else "")

    def visible(self, setup: Setup) -> str:
        return ",".join(dict.fromkeys(reversed(setup.gpus)))

    @contextmanager
    def site(self, setup: Setup) -> Iterator[Site]:
        extension = "checkpoint_engine.worker.VllmColocateWorkerExtension"
        yield Site(["--load-format", "dummy", "--worker-extension-cls", extension])

    def sender(self, setup: Setup) -> Sender:
        return ParameterServer(setup)
