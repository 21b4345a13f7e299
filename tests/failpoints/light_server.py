"""The whole plugin around a small module: all of a server but vLLM's engine.

Boot, worker methods, sleep hooks, attachment, gate, lease and executor are the plugin's own. The engine below pauses,
sleeps and wakes as vLLM's does, and drops the weights in a sleep at level 2.
"""

import asyncio
import os
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import xxhash
from resharder.client.inference.control.attach import AttachedEngine
from resharder.client.inference.engine import STAY_PAUSED
from resharder.client.inference.recording import inventory
from resharder.client.inference.vllm import attach as attach_module
from resharder.client.inference.vllm import boot_loader, worker_rpc
from resharder.client.inference.vllm.attach import attach
from resharder.client.inference.vllm.sleep import watch_sleep
from resharder.client.inference.worker import boot
from resharder.client.inference.worker.model_part import MODEL

from tests.failpoints.roles import SHAPES

TAGS = ("weights", "kv_cache")
WORKER_METHODS = {method.__name__: method for method in worker_rpc.METHODS}
"""Methods that the plugin adds to vLLM's workers, by name."""


def fingerprint(tensors: Iterable[tuple[str, torch.Tensor]]) -> str:
    """One digest of all bytes, by name."""
    state = xxhash.xxh3_128()
    for name, tensor in sorted(tensors):
        state.update(name.encode())
        state.update(tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return state.hexdigest()


class Module(torch.nn.Module):
    """Parameters with the names and shapes of the checkpoint."""

    def __init__(self) -> None:
        super().__init__()
        for name, (dtype, shape) in SHAPES.items():
            self.register_parameter(name, torch.nn.Parameter(torch.zeros(shape, dtype=dtype), requires_grad=False))

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        loaded = set()
        for name, tensor in weights:
            self.get_parameter(name).data.copy_(tensor)
            loaded.add(name)
        return loaded


@dataclass(frozen=True)
class Host:
    """`inference.engine.Host` of the module."""

    vllm_config: Any
    device: torch.device
    rank: int = 0
    neighbours: int = 1
    cannot_reload_quantised: str = ""

    @classmethod
    def of_loader(cls, vllm_config: Any) -> "Host":
        return cls(vllm_config, torch.device("cpu"))

    def refusal(self) -> str:
        return ""

    def config_differences(self, version: bytes) -> list[Any]:
        return []

    def model_config(self, *, drafter: bool) -> Any:
        return SimpleNamespace(quantization=None)

    def calling(self) -> Any:
        return torch.no_grad()

    def recordable(self, model: torch.nn.Module) -> Any:
        return nullcontext()

    def original_loader(self, tensor: torch.Tensor) -> Any:
        return lambda parameter, loaded: parameter.data.copy_(loaded)

    def defaults(self, module: torch.nn.Module) -> frozenset[str]:
        return frozenset()

    @contextmanager
    def reloading(self, model: torch.nn.Module, model_config: Any, modules: frozenset[str]) -> Iterator[None]:
        yield


class Worker:
    """A worker of vLLM, as the plugin's methods see it."""

    rank = 0

    def __init__(self, vllm_config: Any, model: torch.nn.Module) -> None:
        self.vllm_config, self._model = vllm_config, model

    def get_model(self) -> torch.nn.Module:
        return self._model

    def sleep(self, level: int = 1) -> None:
        if level == 2:
            for parameter in self._model.parameters():
                parameter.data.zero_()

    def wake_up(self, tags: list[str] | None = None) -> None:
        pass


class Core:
    """The client of an engine core, for the plugin's fence."""

    async def _call_utility_async(self, method: str, *args: Any, **to: Any) -> Any:
        raise NotImplementedError(method)


class Engine:
    """vLLM's `AsyncLLM` over one worker."""

    def __init__(self, vllm_config: Any, worker: Worker, core: Core) -> None:
        self.vllm_config, self._worker, self.engine_core = vllm_config, worker, core
        self._paused, self._asleep = False, set[str]()

    async def pause_generation(self, *, mode: str, clear_cache: bool) -> None:
        self._paused = True

    async def resume_generation(self) -> None:
        self._paused = False

    async def is_paused(self) -> bool:
        return self._paused

    async def sleep(self, level: int, mode: str) -> None:
        self._paused = True
        if not self._asleep:
            await asyncio.to_thread(self._worker.sleep, level)
            self._asleep = set(TAGS)

    async def wake_up(self, tags: list[str]) -> None:
        await asyncio.to_thread(self._worker.wake_up, [tag for tag in tags if tag != STAY_PAUSED])
        self._asleep -= set(tags)
        self._paused = self._paused and (STAY_PAUSED in tags or bool(self._asleep))

    async def is_sleeping(self) -> bool:
        return self._paused or bool(self._asleep)

    async def collective_rpc(self, method: str, *, args: tuple[Any, ...] = ()) -> Sequence[Any]:
        return [await asyncio.to_thread(WORKER_METHODS[method], self._worker, *args)]

    async def reset_prefix_cache(self, reset_running_requests: bool, reset_connector: bool) -> bool:
        return True

    async def reset_mm_cache(self) -> None:
        pass

    async def reset_encoder_cache(self) -> None:
        pass


def configuration() -> Any:
    parallel = SimpleNamespace(
        world_size=1, world_size_across_dp=1, data_parallel_external_lb=False, data_parallel_hybrid_lb=False
    )
    return SimpleNamespace(
        parallel_config=parallel,
        device_config=SimpleNamespace(device_type="cpu", device="cpu"),
        model_config=SimpleNamespace(enable_sleep_mode=True),
        speculative_config=None,
        kv_transfer_config=None,
    )


class LightServer:
    """The role: boots when asked to, then follows the daemon by itself.

    Args:
        served: File to which each pair of a served version and the fingerprint of memory is appended once.
    """

    preloaded = ("tests.failpoints.light_server",)

    def __init__(self, served: str) -> None:
        self._served, self._seen = Path(served), set[tuple[int, str]]()
        boot_loader.VLLMHost = Host  # type: ignore[attr-defined]
        attach_module.refuse_unsupported = lambda config: None
        self._loop = asyncio.new_event_loop()
        self._handle: AttachedEngine | None = None
        self._model = Module()

    def boot(self) -> int:
        """The version that is booted, after the attachment has begun."""
        config = self.configuration()
        agent = boot_loader._begin(config)
        assert agent is not None
        assert agent.boot is not None
        assert agent.staging.sources is not None
        booting = boot.Booting(agent, agent.staging.sources, agent.boot, agent.parts.part(MODEL))
        booting.load(self._model)
        inventory.after_loading(self._model)
        booting.verify(self._model)
        worker_rpc.AGENTS[self._model] = agent
        worker = self.worker(config)
        watch_sleep(worker)
        threading.Thread(target=self._loop.run_forever, daemon=True).start()
        self._handle = asyncio.run_coroutine_threadsafe(attach(Engine(config, worker, self.core(worker))), self._loop).result(60)
        threading.Thread(target=self._watch, daemon=True).start()
        return agent.boot.number

    def configuration(self) -> Any:
        return configuration()

    def worker(self, vllm_config: Any) -> Worker:
        return Worker(vllm_config, self._model)

    def core(self, worker: Worker) -> Core:
        return Core()

    def memory(self) -> str:
        """The fingerprint of what answers are computed with."""
        return fingerprint(self._model.named_parameters())

    def version(self) -> int:
        """The version in service, 0 for none."""
        return (self._handle.version if self._handle else None) or 0

    def pid(self) -> int:
        return os.getpid()

    def _watch(self) -> None:
        while True:
            before = self.version()
            found = before, self.memory()
            if before and before == self.version() and found not in self._seen:
                self._seen.add(found)
                with self._served.open("a") as file:
                    file.write(f"{found[0]} {found[1]}\n")
            time.sleep(0.005)
