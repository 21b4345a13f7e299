"""vLLM's calls for weight transfer (`AsyncLLM`; read against 0.32) on an engine that follows the daemon.

With `--weight-transfer-config '{"backend": "resharder"}'`, the four phases go to `control/weight_update.py`
instead of the workers: a call of the workers would block the engine until the version is served, and the
version could not be installed. The methods are replaced on the class, because Ray calls those of an
actor's class.
"""

import functools
from collections.abc import Awaitable, Callable
from typing import Any

from resharder.client.errors import ResharderError, UsageError
from resharder.client.inference.control.weight_update import WeightUpdates
from resharder.client.inference.vllm.weight_transfer import BACKEND

ROUTES = frozenset(
    f"/{name}"
    for name in (
        "init_weight_transfer_engine",
        "shutdown_weight_transfer_engine",
        "start_weight_update",
        "update_weights",
        "finish_weight_update",
        "pause",
        "resume",
        "get_world_size",
    )
)
"""vLLM's routes that a trainer of this backend calls, at any position of the gate."""
_UPDATES = "_resharder_updates"  # attribute of an engine

Call = Callable[..., Awaitable[Any]]


def is_selected(vllm_config: Any) -> bool:
    """Return whether a configuration (vLLM's `VllmConfig`) selects the backend `resharder`."""
    selected = getattr(vllm_config, "weight_transfer_config", None)
    return selected is not None and selected.backend == BACKEND


def take_over(engine: Any, updates: WeightUpdates) -> None:
    """Send an engine's calls for weight transfer to `updates`."""
    setattr(engine, _UPDATES, updates)


def watch_updates() -> None:
    """Make `AsyncLLM` ask for the engine's `WeightUpdates` in each call for weight transfer."""
    from vllm.v1.engine.async_llm import AsyncLLM

    replace_calls(AsyncLLM)


def replace_calls(kind: Any) -> None:
    """Replace the calls for weight transfer that a class of engine clients has; 0.28 lacks `shutdown_weight_transfer_engine`."""
    for name, instead in _INSTEAD.items():
        if hasattr(kind, name):
            _wrap(kind, name, instead)


def _wrap(kind: Any, name: str, instead: Callable[..., Awaitable[None]]) -> None:
    plain: Call = getattr(kind, name)
    if hasattr(plain, BACKEND):
        return

    @functools.wraps(plain)
    async def call(self: Any, *args: Any, **kwargs: Any) -> None:
        updates = getattr(self, _UPDATES, None)
        if updates is None:
            await plain(self, *args, **kwargs)
            return
        try:
            await instead(updates, *args, **kwargs)
        except UsageError as error:
            raise ValueError(str(error)) from error  # vLLM answers 400 with the message
        except ResharderError as error:
            from vllm.exceptions import VLLMServerError

            raise VLLMServerError(str(error)) from error  # 500 with the message

    setattr(call, BACKEND, True)
    setattr(kind, name, call)


async def _init(updates: WeightUpdates, request: Any) -> None:
    await updates.init(request.init_info)


async def _update(updates: WeightUpdates, request: Any) -> None:
    await updates.update(request.update_info)


async def _finish(updates: WeightUpdates, weight_version: str | None = None) -> None:
    await updates.finish(weight_version)


async def _start(updates: WeightUpdates) -> None:
    """Do nothing: the server serves until the version is installed."""


async def _draft(updates: WeightUpdates) -> None:
    raise UsageError("expected start_weight_update: a version has the drafter's weights too")


_INSTEAD: dict[str, Callable[..., Awaitable[None]]] = {
    "init_weight_transfer_engine": _init,
    "shutdown_weight_transfer_engine": _start,
    "start_weight_update": _start,
    "start_draft_weight_update": _draft,
    "update_weights": _update,
    "finish_weight_update": _finish,
}
