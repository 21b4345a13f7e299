"""vLLM's API for weight transfer with the backend `resharder`, on the server's side; read against 0.32.

With `--weight-transfer-config '{"backend": "resharder"}'`, the four phases of `AsyncLLM` go to `control/weight_update.py`
instead of the workers: a call of the workers would block the engine until the version is served, and the
version could not be installed. `ResharderWeightTransferEngine`, which vLLM creates in each worker, moves no weights. A call that
arrives there means that the engine has no control side. The trainer's side is `integrations/vllm.py`.

The phases are recognised in `collective_rpc`, which each of vLLM's methods looks up in the engine. The
attribute of the engine is replaced, not that of the class: Ray binds the methods of an actor's class before
vLLM loads the plugin, and copies them to a class of its own. `finish_weight_update` is replaced too, because
its label does not reach `collective_rpc`; vLLM's client for actors gives none.

An engine without an API server has no control side until it is attached. The first call,
`init_weight_transfer_engine`, attaches it.
"""

import asyncio
import functools
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import TYPE_CHECKING, Any, NoReturn

from resharder.client.errors import ResharderError, UsageError
from resharder.client.inference.settings import PluginSettings

if TYPE_CHECKING:
    from resharder.client.inference.control.weight_update import WeightUpdates

try:
    from vllm.distributed.weight_transfer.base import WeightTransferEngine
except ModuleNotFoundError:  # an older vLLM, which has no such engines
    WeightTransferEngine = object

BACKEND = "resharder"
_ENGINE = (__name__, "ResharderWeightTransferEngine")
_TRAINER = ("resharder.client.integrations.vllm", "ResharderTrainerEngine")
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
_UPDATES, _LOCK = "_resharder_updates", "_resharder_attaching"  # attributes of an engine
_INIT, _FINISH = "init_weight_transfer_engine", "finish_weight_update"

Call = Callable[..., Awaitable[Any]]
Attach = Callable[[Any], Awaitable[object]]


def register_backend() -> bool:
    """Register both halves of the backend, by the names of their classes.

    Returns:
        Whether this vLLM has the factories, as 0.28 and 0.32 do.
    """
    try:
        factory: Any = import_module("vllm.distributed.weight_transfer.factory")
    except ModuleNotFoundError:
        return False
    if not hasattr(factory, "WeightTransferTrainerFactory"):
        return False
    for registry, place in ((factory.WeightTransferEngineFactory, _ENGINE), (factory.WeightTransferTrainerFactory, _TRAINER)):
        if BACKEND not in registry._registry:
            registry.register_engine(BACKEND, *place)
    return True


class ResharderWeightTransferEngine(WeightTransferEngine):  # type: ignore[misc]
    """Implementation of vLLM's interface.

    Raises:
        UsageError: A variable is missing or invalid; the exception ends the server's start.
    """

    init_info_cls = update_info_cls = dict
    supports_draft_weight_update = False

    def __init__(self, config: Any, vllm_config: Any, device: Any, model: Any) -> None:
        super().__init__(config, vllm_config, device, model)
        try:
            PluginSettings.from_environment()
        except UsageError as error:
            raise UsageError(f"the weight transfer backend resharder cannot start: {error}") from None

    def init_transfer_engine(self, init_info: Any) -> NoReturn:
        """Refuse the call."""
        _refuse()

    def start_weight_update(self) -> NoReturn:
        """Refuse the call."""
        _refuse()

    def receive_weights(self, update_info: Any) -> NoReturn:
        """Refuse the call."""
        _refuse()

    def finish_weight_update(self) -> NoReturn:
        """Refuse the call."""
        _refuse()

    def shutdown(self) -> None:
        """Do nothing: the engine holds no connection."""


def _refuse() -> NoReturn:
    raise UsageError(
        "this engine does not follow the daemon, because it has no control side: name resharder in VLLM_PLUGINS of the API "
        "server, or call resharder.client.attach(engine) in the program around AsyncLLM"
    )


def is_selected(vllm_config: Any) -> bool:
    """Return whether a configuration (vLLM's `VllmConfig`) selects the backend `resharder`."""
    selected = getattr(vllm_config, "weight_transfer_config", None)
    return selected is not None and selected.backend == BACKEND


def take_over(engine: Any, updates: "WeightUpdates") -> None:
    """Send an engine's calls for weight transfer to `updates`."""
    setattr(engine, _UPDATES, updates)
    replace_calls(engine)


def watch_engines(attach: Attach) -> None:
    """Replace the calls of each new `AsyncLLM` with this backend.

    Args:
        attach: Attaches an engine to the daemon, which calls `take_over`.
    """
    from vllm.v1.engine.async_llm import AsyncLLM

    plain = AsyncLLM.__init__
    if hasattr(plain, BACKEND):
        return

    @functools.wraps(plain)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        plain(self, *args, **kwargs)
        if is_selected(self.vllm_config):
            replace_calls(self, attach)

    setattr(init, BACKEND, True)
    AsyncLLM.__init__ = init


def replace_calls(engine: Any, attach: Attach | None = None) -> None:
    """Replace an engine's calls for weight transfer.

    Args:
        engine: An `AsyncLLM`.
        attach: Attaches the engine at the first call, unless that happened before.
    """
    if hasattr(engine.collective_rpc, BACKEND):
        return
    call, finish = _phases(engine, engine.collective_rpc, attach), _labelled(engine, engine.finish_weight_update)
    setattr(call, BACKEND, True)
    engine.collective_rpc, engine.finish_weight_update = call, finish


def _phases(engine: Any, plain: Call, attach: Attach | None) -> Call:
    @functools.wraps(plain)
    async def collective_rpc(
        method: str, timeout: float | None = None, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if phase := _PHASES.get(method):
            with _vllms_errors():
                if method == _INIT and attach is not None:
                    await _attached(engine, attach)
                if updates := getattr(engine, _UPDATES, None):
                    await phase(updates, **(kwargs or {}))
                    return []
        return await plain(method, timeout, args, kwargs)  # without a control side, the workers' error names what is missing

    return collective_rpc


def _labelled(engine: Any, plain: Call) -> Call:
    @functools.wraps(plain)
    async def finish_weight_update(weight_version: str | None = None) -> None:
        if updates := getattr(engine, _UPDATES, None):
            with _vllms_errors():
                await updates.finish(weight_version)
        else:
            await plain(weight_version)

    return finish_weight_update


async def _attached(engine: Any, attach: Attach) -> None:
    async with engine.__dict__.setdefault(_LOCK, asyncio.Lock()):
        if not hasattr(engine, _UPDATES):
            await attach(engine)


@contextmanager
def _vllms_errors() -> Iterator[None]:
    """Convert errors to ones whose message vLLM's routes return: 400 for a wrong argument, else 500."""
    try:
        yield
    except UsageError as error:
        raise ValueError(str(error)) from error
    except ResharderError as error:
        from vllm.exceptions import VLLMServerError

        raise VLLMServerError(str(error)) from error


async def _init(updates: "WeightUpdates", init_info: Any) -> None:
    await updates.init(init_info)


async def _update(updates: "WeightUpdates", update_info: Any) -> None:
    await updates.update(update_info)


async def _finish(updates: "WeightUpdates") -> None:
    await updates.finish(None)


async def _start(updates: "WeightUpdates") -> None:
    """Do nothing: the server serves until the version is installed."""


async def _draft(updates: "WeightUpdates") -> None:
    raise UsageError("a version has the drafter's weights too: call start_weight_update instead")


_PHASES: dict[str, Callable[..., Awaitable[None]]] = {
    _INIT: _init,
    "shutdown_weight_transfer_engine": _start,
    "start_weight_update": _start,
    "start_draft_weight_update": _draft,
    "update_weights": _update,
    _FINISH: _finish,
}
