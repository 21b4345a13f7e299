"""The interface of an inference engine, implemented once for each engine in a folder of its own (`vllm/`).

`Host` is the engine around one worker's model, `Engine` the engine as a whole. `worker/` and `control/` reach engines through
these protocols alone.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Literal, Protocol

if TYPE_CHECKING:  # the control side does without
    import torch

Mode = Literal["keep", "wait", "abort"]  # for the requests in flight when the engine pauses
Loader = Callable[..., object]  # copies a checkpoint's tensor, or a part of it, into a parameter


class ModelConfig(Protocol):
    """The engine's configuration of one model; opaque except for `quantization`."""

    @property
    def quantization(self) -> Any:
        """The name of the quantisation method; `None` without one."""


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
        """Number of workers that may share this machine's cores."""

    def refusal(self) -> str:
        """Return why versions cannot be installed into this engine; empty if they can."""

    def model_config(self, *, drafter: bool) -> ModelConfig:
        """Return the configuration of the model or of its drafter."""

    def calling(self) -> AbstractContextManager[None]:
        """Enter the context (configuration, device, no gradients) in which the engine's own loading code runs."""

    def recordable(self, model: "torch.nn.Module") -> AbstractContextManager[None]:
        """Give the parameters of a running model the shapes they had before loading, on the meta device; restore them at exit."""

    def original_loader(self, tensor: "torch.Tensor") -> Loader:
        """Return the tensor's own weight loader, without the wrappers that the engine's reload puts around it."""

    def reloading(
        self, model: "torch.nn.Module", model_config: ModelConfig, modules: frozenset[str]
    ) -> AbstractContextManager[None]:
        """Open `modules` for `model.load_weights` and process them at exit.

        Parameters that were not loaded completely get their old values back, however the block ends.
        """


class Engine(Protocol):
    """The engine's client in the process of the control side.

    `collective_rpc` has no `timeout`: one desynchronises tensor parallel workers (vLLM issue 49972).
    """

    async def pause_generation(self, *, mode: Mode, clear_cache: bool) -> None: ...
    async def resume_generation(self) -> None: ...
    async def is_paused(self) -> bool: ...
    async def sleep(self, level: int, mode: Mode) -> None: ...
    async def wake_up(self, tags: list[str]) -> object: ...
    async def is_sleeping(self) -> bool: ...
    async def collective_rpc(self, method: str, *, args: tuple[Any, ...] = ()) -> Sequence[Any]: ...
    async def reset_prefix_cache(self, reset_running_requests: bool, reset_connector: bool) -> bool: ...
    async def reset_mm_cache(self) -> None: ...
    async def reset_encoder_cache(self) -> None: ...
