"""verl's checkpoint engine `resharder`; read against verl 0.9.1 (`verl/checkpoint_engine/base.py`).

    actor_rollout_ref.rollout.checkpoint_engine:
      backend: resharder
      custom_backend_module: resharder.client.integrations.verl
      engine_kwargs: {resharder: {model: policy, endpoint: "daemon:7677"}}

Every actor rank publishes its part of a version, and every rollout worker waits for that version: it copies the version into
its server, or leaves it to the daemon if its server follows the model. Importing this module registers the engine.
"""

import asyncio
import functools
import secrets
import time
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from resharder.client.errors import NotFound, NotServed, UsageError, VersionAborted, WaitTimeout
from resharder.client.integrations.weight_sources import DividedStream
from resharder.client.operator import Operator
from resharder.client.operator.answers import Version
from resharder.client.rpc.channel import endpoint_or_default
from resharder.client.trainer.connect import connect
from resharder.client.trainer.handle import Handle
from resharder.client.trainer.publisher import Publisher
from resharder.client.trainer.rank_layout import DeclaredTensor
from resharder.client.versions.source import SCHEME, open_source, whole_tensors
from verl.checkpoint_engine.base import CheckpointEngine, CheckpointEngineRegistry
from verl.utils.device import is_support_ipc
from verl.workers.engine.base import BaseEngine

if TYPE_CHECKING:
    import torch
    from resharder.client.trainer.model_files import Config, Tokenizer

__all__ = ["ResharderCheckpointEngine"]

BACKEND = "resharder"
_EVERY = 0.05
"""Seconds between two questions of a rollout worker about the version."""


class EngineWeights:
    """Stream of a training engine's weights that has the engine too, as an iterator of (name, tensor).

    Args:
        engine: The training engine.
        weights: The stream.
        adapter: The config of a LoRA adapter that is not merged into the weights of the stream; None without one.
    """

    def __init__(
        self, engine: Any, weights: "Iterable[tuple[str, torch.Tensor]]", adapter: Mapping[str, Any] | None = None
    ) -> None:
        self.engine, self.adapter = engine, adapter
        self._weights = iter(weights)

    def __iter__(self) -> "Iterator[tuple[str, torch.Tensor]]":
        return self

    def __next__(self) -> "tuple[str, torch.Tensor]":
        return next(self._weights)


class Followed:
    """No tensors, once `wait` returns. verl's adapter of vLLM iterates asynchronously, that of SGLang's deltas does not."""

    def __init__(self, wait: Callable[[], object]) -> None:
        self._wait = wait

    def __iter__(self) -> "Followed":
        return self

    def __next__(self) -> Any:
        self._wait()
        raise StopIteration

    def __aiter__(self) -> "Followed":
        return self

    async def __anext__(self) -> Any:
        await asyncio.to_thread(self._wait)
        raise StopAsyncIteration


class ResharderCheckpointEngine(CheckpointEngine):  # type: ignore[misc]
    """Implementation of verl's interface, in an actor rank or in a rollout worker.

    Args:
        bucket_size: Required by verl, not used.
        is_master: Whether this is the actor's rank 0.
        model: Name of the model.
        base: Name of the base; the actor's LoRA adapter is published then, and it alone. Needs `follow`.
        endpoint: The daemon's `host:port`; by default RESHARDER_ENDPOINT.
        path: Folder with config.json and the tokenizer; by default the training engine's own.
        follow: Whether rollouts' servers follow the daemon, by the plugin. Rollout workers then copy nothing, and wait until
            the servers of the model serve the version.
        shards: Whether Megatron actors publish their shards in place. False publishes verl's gathered stream.
        timeout: Bound in seconds on a rollout worker's wait for a version.
        options: Further arguments of `connect`, such as `direct_wait`, which is 0 here by default.

    Raises:
        UsageError: `base` is given without `follow`.
    """

    def __init__(
        self,
        bucket_size: int,
        is_master: bool = False,
        *,
        model: str,
        base: str | None = None,
        endpoint: str | None = None,
        path: str | None = None,
        follow: bool = False,
        shards: bool = True,
        timeout: float = 600.0,
        options: Mapping[str, Any] | None = None,
    ) -> None:
        if base and not follow:
            raise UsageError(
                f"verl's rollout workers take no adapter from a checkpoint engine: set engine_kwargs.{BACKEND}.follow, and start "
                f"servers with RESHARDER_ADAPTERS={model}"
            )
        self._model, self._base, self._endpoint, self._path = model, base, endpoint_or_default(endpoint), path
        self._follow, self._shards, self._timeout = follow, shards, timeout
        self._options = dict(options or {})
        # An empty stream of verl's deltas copies nothing and allocates nothing; verl has it for servers in CUDA IPC's reach.
        self.wire_format = "delta_flush" if follow and is_support_ipc() else "named_tensors"
        self._is_master, self._job = is_master, secrets.token_hex(16)
        self._rank, self._world_size, self._round = -1, 0, 0
        self._publisher: Publisher | None = None
        self._attached: list[Any] | None = None  # names of a stream's tensors, or places of a Megatron model's

    def prepare(self) -> dict[str, Any]:
        """Begin a round. Rank 0 of the actor answers with the job and the round's number."""
        if not self._is_master:
            return {}
        self._round += 1
        return {"job": self._job, "round": self._round}

    @classmethod
    def build_topology(
        cls, actor_wg_world_size: int, rollout_world_size: int, metadata: list[dict[str, Any]]
    ) -> tuple[dict[str, list[Any]], dict[str, list[Any]]]:
        """Return the arguments of `init_process_group` for actor ranks and rollout workers. Rollout workers have rank -1."""
        ranks = list(range(actor_wg_world_size))
        shared = {"world_size": actor_wg_world_size} | metadata[0]

        def arguments(ranks: Sequence[int]) -> dict[str, list[Any]]:
            return {"rank": list(ranks)} | {name: [value] * len(ranks) for name, value in shared.items()}

        return arguments(ranks), arguments([-1] * rollout_world_size)

    def init_process_group(self, rank: int, world_size: int, job: str, round: int) -> None:
        """Take this process's place in the round. There is no group of processes: they meet at the daemon."""
        self._rank, self._world_size, self._job, self._round = rank, world_size, job, round

    def finalize(self) -> None:
        """End the round. The registration of the actor's ranks stays for the next one."""

    async def send_weights(
        self, weights: "Iterable[tuple[str, torch.Tensor]]", global_steps: int | None = None
    ) -> dict[str, float]:
        """Publish this rank's part of a version. The weights may change when it returns. Every actor rank must call.

        Args:
            weights: verl's stream. Megatron's shards are published in place, and the stream is not iterated.
            global_steps: Label of the version; by default the round's number.

        Returns:
            Metrics: the version's number and the seconds that the call took.

        Raises:
            ResharderError: As in `Publisher.publish` and `Publisher.attach`.
        """
        start = time.perf_counter()
        handle = self._publish(weights, self._step(global_steps))
        return {"resharder/version": float(handle.version), "resharder/publish_seconds": time.perf_counter() - start}

    def receive_weights(self, global_steps: int | None = None) -> "AsyncIterator[tuple[str, torch.Tensor]] | Followed":
        """Iterate the tensors of the round's version, verified; with `follow` none, when the servers of the model serve it.

        Args:
            global_steps: The actor's label of the version; by default the round's number.

        Raises:
            VersionAborted: The version ended before READY.
            WaitTimeout: The version was not READY in time.
            NotServed: With `follow`, a server did not serve the version in time, or no server follows the model.
        """
        step = self._step(global_steps)
        return Followed(lambda: self._wait(step)) if self._follow else self._received(step)

    async def _received(self, step: int) -> "AsyncIterator[tuple[str, torch.Tensor]]":
        version = await asyncio.to_thread(self._wait, step)
        with open_source(f"{SCHEME}{self._endpoint}/{version.name}") as source:
            for name, tensor in whole_tensors(source):
                yield name, tensor.to(_device())

    def _step(self, global_steps: int | None) -> int:
        return self._round if global_steps is None else global_steps

    def _publish(self, weights: "Iterable[tuple[str, torch.Tensor]]", step: int) -> Handle:
        engine: Any = weights.engine if isinstance(weights, EngineWeights) else None
        adapter = weights.adapter if isinstance(weights, EngineWeights) else None
        self._check_adapter(adapter)
        publisher = self._connected()
        if self._shards and (module := _megatron_module(engine, adapter)) is not None:
            # Megatron's offload may have given the parameters other memory.
            attached = [(t.data_ptr(), t.shape) for chunk in module for t in (*chunk.parameters(), *chunk.buffers())]
            if attached != self._attached:
                publisher.attach(module, *self._files(engine))
                self._attached = attached
            return publisher.publish(step, sync=True)
        if adapter is not None:  # verl asks its engines for the base's weights alone
            weights, _ = engine.get_per_tensor_param(base_sync_done=True)
            return self._publish_stream(publisher, lambda: (adapter, None), weights, step)
        return self._publish_stream(publisher, lambda: self._files(engine), weights, step)

    def _check_adapter(self, adapter: Mapping[str, Any] | None) -> None:
        if adapter is not None and not self._base:
            raise UsageError(
                "the actor's LoRA adapter is not merged, and verl's stream is its base without it: set engine_kwargs."
                f"{BACKEND}.base and follow, or actor_rollout_ref.model.lora.merge=True"
            )
        if self._base and adapter is None:
            raise UsageError(
                f"the actor has no LoRA adapter, or merges it into its weights: leave engine_kwargs.{BACKEND}.base out, "
                "or set actor_rollout_ref.model.lora.merge=False"
            )

    def _publish_stream(
        self,
        publisher: Publisher,
        files: "Callable[[], tuple[Config, Tokenizer | None]]",
        weights: "Iterable[tuple[str, torch.Tensor]]",
        step: int,
    ) -> Handle:
        """Publish every `world_size`-th tensor. All ranks iterate the whole stream, since a tensor may be a collective."""
        numbered = ((position, name, tensor) for position, (name, tensor) in enumerate(weights))
        mine = ((name, t.detach()) for position, name, t in numbered if position % self._world_size == self._rank)
        if self._attached is None:
            publisher.attach_config(*files())
            # The names are known after one pass, and a second pass would cost another gather.
            kept = [(name, tensor.to("cpu", copy=True)) for name, tensor in mine]
            declared = [DeclaredTensor(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in kept]
            publisher.attach_tensors(declared)
            self._attached = [name for name, _ in kept]
            return publisher.publish_tensors(step, lambda: kept)
        stream = DividedStream(mine, self._attached)
        try:
            return publisher.publish_tensors(step, iter(stream))
        finally:
            stream.drain()

    def _connected(self) -> Publisher:
        if self._publisher is None:
            if self._rank < 0:
                raise UsageError("send_weights was called in an actor rank before init_process_group")
            self._publisher = connect(
                self._endpoint,
                model=self._model,
                base=self._base,
                job=self._job,
                rank=self._rank,
                world_size=self._world_size,
                **{"direct_wait": 0.0, **self._options},  # verl offloads the actor's memory, which workers must not have mapped
            )
        return self._publisher

    def _files(self, engine: Any) -> "tuple[Config, Tokenizer | None]":
        if self._path is not None:
            from transformers import AutoConfig

            return AutoConfig.from_pretrained(self._path), self._path
        model_config: Any = getattr(engine, "model_config", None)
        if getattr(model_config, "hf_config", None) is None:
            raise UsageError(f"{type(engine).__name__} has no model_config.hf_config: set engine_kwargs.{BACKEND}.path")
        return model_config.hf_config, model_config.tokenizer

    def _wait(self, step: int) -> Version:
        """Return the version of a step when it is READY, and with `follow` when the servers of the model serve it."""
        end = time.monotonic() + self._timeout
        with Operator(self._endpoint, connect_timeout=60) as operator:
            while True:
                version = self._find(operator, step)
                if version is not None and _arrived(version, self._follow):
                    return version
                if time.monotonic() >= end:
                    raise self._late(version, step)
                time.sleep(_EVERY)

    def _find(self, operator: Operator, step: int) -> Version | None:
        with suppress(NotFound):  # before the actor's first registration, the daemon has no such model
            return next((v for v in operator.versions(self._model) if (v.job, v.step) == (self._job, step)), None)
        return None

    def _late(self, version: Version | None, step: int) -> WaitTimeout | NotServed:
        if version is None:
            return WaitTimeout(f"the actor has not published step {step} of model {self._model!r} after {self._timeout:g} s")
        if version.state is not Version.State.READY:
            return WaitTimeout(f"{version.name} is not READY after {self._timeout:g} s: it is {version.state.name}")
        counts = f"{version.servers_serving} of {version.servers_following} servers that follow the model"
        return NotServed(f"{version.name} is not served by all after {self._timeout:g} s: it is by {counts}")


def _arrived(version: Version, follow: bool) -> bool:
    """Return whether a rollout worker may go on. Raises VersionAborted."""
    if version.state is Version.State.ABORTED:
        raise VersionAborted(f"{version.name} (step {version.step}) was aborted: {version.reason}")
    if version.state is not Version.State.READY:
        return False
    return not follow or 0 < version.servers_following <= version.servers_serving


def _megatron_module(engine: Any, adapter: object) -> "list[torch.nn.Module] | None":
    """Return the chunks of a Megatron engine; None for other engines, QAT, and adapters that are merged into a stream."""
    from resharder.converters.models import megatron_chunks

    module = getattr(engine, "module", None)
    if (
        module is None
        or (getattr(engine, "peft_cls", None) is not None and adapter is None)
        or getattr(engine, "_qat_enabled", False)
    ):
        return None
    with suppress(TypeError):  # modules of other engines that cannot be iterated
        return megatron_chunks(module) or None
    return None


def _device() -> "torch.device":
    """Return this process's accelerator, from which verl's adapters send; the CPU without one."""
    import torch

    accelerator = torch.accelerator.current_accelerator(check_available=True)
    return (
        torch.device("cpu") if accelerator is None else torch.device(accelerator.type, torch.accelerator.current_device_index())
    )


def _carry_engine(cls: type) -> None:
    """Wrap the stream of a training engine's class so that it has the engine.

    verl gives a checkpoint engine the stream alone; shards and the model's config are attributes of the training engine.
    """
    original = vars(cls).get("get_per_tensor_param")
    if original is not None and not hasattr(original, "__wrapped__"):

        @functools.wraps(original)
        def get_per_tensor_param(self: Any, *args: Any, **kwargs: Any) -> tuple[EngineWeights, Any]:
            weights, peft_config = original(self, *args, **kwargs)
            return EngineWeights(self, weights, peft_config), peft_config

        cls.get_per_tensor_param = get_per_tensor_param  # type: ignore[attr-defined]
    for subclass in cls.__subclasses__():
        _carry_engine(subclass)


CheckpointEngineRegistry.register(BACKEND)(ResharderCheckpointEngine)
_carry_engine(BaseEngine)
