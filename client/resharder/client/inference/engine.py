"""The interface of an inference engine, implemented in one folder for each engine (`vllm/`, `sglang/`).

`Host` is the engine around one worker's model; `Engine` is the whole engine. `worker/` and `control/`
reach engines through these protocols only. `InstallError` is the end of an install.
"""

import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, Protocol

from resharder.converters.allowances import refuse
from resharder.converters.hf_config import Difference, described
from resharder.v1.resources_pb2 import Power

if TYPE_CHECKING:  # the control side does not import torch
    import torch

Mode = Literal["keep", "wait", "abort"]
"""Effect of a pause on the requests in flight."""
Loader = Callable[..., object]
"""A weight loader: copies a checkpoint's tensor, or a part of it, into a parameter."""
AdapterTensors = Mapping[str, "torch.Tensor"]
"""An adapter's tensors by PEFT's names."""

WEIGHTS, KV_CACHE = "weights", "kv_cache"
"""vLLM's tags of the memory that sleeps (`device_allocator/cumem.py`; 0.26, 0.28 and 0.32): allocated while the model loads, and
the KV cache. Sleep unmaps the memory of both and keeps their addresses; waking maps memory again, tag by tag.
"""
STAY_PAUSED = "resharder: stay paused"
"""Pseudo-tag among the tags to wake: keep the engine paused after its last tag wakes."""
SLEEP_LEVELS: dict[Power, int] = {Power.ASLEEP_1: 1, Power.ASLEEP_2: 2}
"""vLLM's level of each state in which the weights sleep.

Level 1 copies them to the host and back; after level 2 their memory has undefined contents.
"""
_REFUSAL = "server-config"
_LOOK_SECONDS = 0.2  # between looks whether the weights are awake again


@dataclass
class SleepState:
    """Which of a worker's memory sleeps, by vLLM's tags, and how deeply."""

    level: int = 0
    """Level of the last sleep."""
    tags: set[str] = field(default_factory=set)
    """Tags that sleep now."""
    lock: threading.Lock = field(default_factory=threading.Lock)
    """Held while memory falls asleep, and by a thread that writes to memory beside the engine's own."""

    @contextmanager
    def awake(self) -> Iterator[None]:
        """Wait until the weights are awake, and keep them so."""
        while True:
            with self.lock:
                if WEIGHTS not in self.tags:
                    yield
                    return
            time.sleep(_LOOK_SECONDS)

    def begin(self, level: int) -> None:
        """Mark all tags as asleep."""
        self.level, self.tags = level, {WEIGHTS, KV_CACHE}

    def end(self, tags: list[str] | None) -> None:
        """Mark `tags` as awake, or all of them for `None`."""
        self.tags -= self.tags if tags is None else set(tags)

    @property
    def power(self) -> Power:
        """The power state that follows from level and tags."""
        if WEIGHTS in self.tags:
            return Power.ASLEEP_2 if self.level == 2 else Power.ASLEEP_1
        return Power.WEIGHTS_AWAKE if self.tags else Power.AWAKE


@dataclass(frozen=True)
class EngineTraits:
    """Name, size and capabilities of an engine, for its control side and for operators."""

    name: str
    """Name in metrics."""
    title: str
    """Name in messages."""
    world_size: int
    """Number of workers, over all data parallel replicas."""
    cannot_sleep: str = ""
    """Why the engine cannot sleep; empty if it can."""
    passes_kv: bool = False
    """Whether the engine exchanges KV cache with other servers."""


class ModelConfig(Protocol):
    """The engine's configuration of one model; opaque except for `quantization`."""

    @property
    def quantization(self) -> Any:
        """The name of the quantisation method, or `None`."""


class Host(Protocol):
    """The worker process in which a model runs."""

    @property
    def device(self) -> "torch.device":
        """The device of the model, with its index."""

    @property
    def rank(self) -> int:
        """The worker's rank over all data parallel replicas of the server."""

    @property
    def neighbours(self) -> int:
        """Upper bound on the number of workers that share this machine's cores."""

    def refusal(self) -> str:
        """Return the reason why versions cannot be installed into this engine; empty if they can."""

    def config_differences(self, version: bytes) -> list[Difference]:
        """Return the values that differ between the engine's config.json, first, and a version's.

        Raises:
            InstallError: The engine cannot read the version's config.
        """

    def model_config(self, *, drafter: bool) -> ModelConfig:
        """Return the configuration of the model or of its drafter."""

    def calling(self) -> AbstractContextManager[None]:
        """Enter the context (configuration, device, no gradients) in which the engine's own loading code runs."""

    def recordable(self, model: "torch.nn.Module") -> AbstractContextManager[None]:
        """Replace a running model's parameters by meta tensors of their shapes before loading; restore them at exit."""

    @property
    def cannot_reload_quantised(self) -> str:
        """Why modules of quantised weights that post-processing has changed cannot be reloaded; empty if they can."""

    def original_loader(self, tensor: "torch.Tensor") -> Loader:
        """Return the tensor's own weight loader, without the wrappers that the engine's reload puts around it."""

    def defaults(self, module: "torch.nn.Module") -> Collection[str]:
        """Return the names of the module's parameters that a checkpoint need not have, because the engine has defaults."""

    def reloading(
        self, model: "torch.nn.Module", model_config: ModelConfig, modules: frozenset[str]
    ) -> AbstractContextManager[None]:
        """Prepare `modules` for `model.load_weights` and post-process them at exit.

        At exit, also after an exception, parameters that were not loaded completely get their old values back.
        """


class Engine(Protocol):
    """The engine's client in the process of the control side.

    `collective_rpc` has no `timeout`, because a timeout desynchronises tensor parallel workers (vLLM issue 49972).
    """

    async def pause_generation(self, *, mode: Mode, clear_cache: bool) -> None:
        """Stop scheduling; `mode` determines the effect on requests in flight."""

    async def resume_generation(self) -> None:
        """Schedule requests again."""

    async def is_paused(self) -> bool:
        """Return whether scheduling is paused."""

    async def sleep(self, level: int, mode: Mode) -> None:
        """Pause, then release the memory of the weights and the KV cache."""

    async def wake_up(self, tags: list[str]) -> object:
        """Restore the memory of `tags`."""

    async def is_sleeping(self) -> bool:
        """Return whether the engine sleeps or is paused."""

    async def collective_rpc(self, method: str, *, args: tuple[Any, ...] = ()) -> Sequence[Any]:
        """Call `method` in every worker of the first engine and return their answers."""

    async def reset_prefix_cache(self, reset_running_requests: bool, reset_connector: bool) -> bool:
        """Drop the prefix cache, optionally with running requests' blocks and the KV connector; return whether it succeeded."""

    async def reset_mm_cache(self) -> None:
        """Drop the cache of multimodal inputs."""

    async def reset_encoder_cache(self) -> None:
        """Drop the cache of encoder outputs."""


class AdapterSlots(Protocol):
    """The slots of one worker for adapters, which requests name by the adapter's id."""

    @property
    def dtype(self) -> "torch.dtype":
        """The dtype of the slots."""

    def whole(self) -> bool:
        """Whether this worker has every element of an adapter."""

    def check(self, config: Mapping[str, Any], names: Mapping[str, tuple[int, ...]]) -> None:
        """Raise `InstallError` if the engine would refuse an adapter of this adapter_config.json and these tensors, or a part."""

    def reserve(self, id: int) -> int | None:
        """Give a slot to an adapter, and return its number; None if none is free."""

    def full(self) -> str:
        """Return why no slot is free, and what to do."""

    def write(self, slot: int, id: int, tensors: "AdapterTensors", config: Mapping[str, Any]) -> Any:
        """Have the engine write an adapter into a slot that no request reads; return what `enter` needs.

        Raises:
            InstallError: The engine refuses the adapter.
        """

    def read(self, slot: int) -> "dict[str, torch.Tensor]":
        """Return the engine's memory of a slot, by name, on the engine's device."""

    def holds(self, slot: int, id: int) -> bool:
        """Return whether a slot is that of an adapter's id."""

    def marks(self, slot: int) -> "dict[str, torch.Tensor]":
        """Return the single elements that the engine keeps for a slot beside that, each as a matrix, by name."""

    def renamed(self, adapter: Any, id: int) -> Any:
        """Return what `write` has returned, for another id."""

    def enter(self, id: int, adapter: Any) -> None:
        """Make requests for `id` find their slot."""

    def renew(self, adapter: str, version: int) -> None:
        """Have the requests of an adapter that the engine has preempted go on with another version of it."""

    def release(self, id: int) -> None:
        """Free the slot of an adapter; a no-op for an unknown one."""

    def scaling(self, config: Mapping[str, Any], name: str) -> float:
        """Return the factor by which the engine multiplies a tensor before it keeps it."""

    def unscaled(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """Return the config of an adapter of the same shape that the engine does not scale."""


class InstallError(Exception):
    """A version cannot be staged or installed. The message names the affected tensors."""


def refuse_config(version: str, found: Sequence[Difference], booting: bool = False) -> None:
    """Raise `InstallError` if the engine computes with another config.json than a version's.

    Args:
        version: Full name of the version.
        found: The values that differ, with the engine's first.
        booting: Whether the server starts, so that it is no use to start it again as it is.
    """
    if not found:
        return
    todo = "start it on" if booting else "restart the server with"
    error = InstallError(
        f"{version} has another config.json than this server was started with: {described(found)}; "
        f"{todo} the version's config (`resharder fetch-config`), or allow the difference with RESHARDER_ALLOW={_REFUSAL}"
    )
    refuse(_REFUSAL, error)
