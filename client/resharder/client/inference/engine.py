"""The interface of an inference engine, implemented in one folder for each engine (`vllm/`).

`Host` is the engine around one worker's model; `Engine` is the whole engine. `worker/` and `control/`
reach engines through these protocols only.
"""

from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Literal, Protocol

from resharder.converters.hf_config import Difference

if TYPE_CHECKING:  # the control side does not import torch
    import torch

Mode = Literal["keep", "wait", "abort"]
"""Effect of a pause on the requests in flight."""
Loader = Callable[..., object]
"""A weight loader: copies a checkpoint's tensor, or a part of it, into a parameter."""


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
