"""The fence in vLLM's engine core (`control/fence.py`), and queries about engine cores; read against 0.26, 0.28 and 0.32."""

import asyncio
import functools
import logging
import os
import signal
from collections.abc import Callable
from typing import Any

from resharder.client.errors import UsageError
from resharder.client.inference.control.fence import FENCED, Fence, accepted, claim_in_effect
from resharder.client.inference.engine import STAY_PAUSED
from resharder.client.inference.vllm.adapter_ids import adapter_of, is_ours

_RESUME = "resharder_resume"  # name of the engine core's method for resumptions without a token
ADAPTER = "resharder_adapter"
"""Name of the engine core's method, and of the workers', for an adapter."""
_LOADED = "_resharder_loaded"  # attribute of an engine core: ids of the versions that all workers have loaded, by adapter
_PAUSED = "_resharder_paused"  # attribute of an engine core that an order has paused
_PROCESS = "resharder_process"  # name of the engine core's method for its process
_ORDERLY = (None, 0, -signal.SIGTERM)  # exit codes of engine cores that run, or that got the server's SIGTERM too
logger = logging.getLogger("vllm.resharder.engine_core")


def fence_engine_core() -> None:
    """Add `resharder_fenced`, `resharder_resume` and `resharder_process` to the engine core."""
    from vllm.v1.engine.core import EngineCore

    setattr(EngineCore, FENCED, resharder_fenced)
    setattr(EngineCore, _RESUME, resharder_resume)
    setattr(EngineCore, _PROCESS, resharder_process)
    setattr(EngineCore, ADAPTER, resharder_adapter)
    refuse_missing_adapters(EngineCore)


def resharder_fenced(self: Any, token: list[Any], method: str, args: list[Any]) -> Any:
    """Check a call's token and execute the call: a method of the engine core.

    The core executes one call after the other, so check and execution are atomic.
    """
    fences = self.__dict__.setdefault("_resharder_fences", {})  # the daemon counts terms for each server, also an adapter's
    fence = fences.setdefault(args[0] if method == ADAPTER else "", Fence())
    refusal = fence.refuse(token)
    if method == "resume_scheduler":
        refusal = _agreed(self, refusal)
    if refusal:
        return fence.refused(refusal)
    if method in ("pause_scheduler", "pause_generation") or (method == "wake_up" and STAY_PAUSED in (args[0] or ())):
        setattr(self, _PAUSED, True)
    elif method in ("resume_scheduler", "sleep"):  # vLLM's `wake_up` ends the pause of a sleep
        setattr(self, _PAUSED, False)
    if method == "resume_scheduler":
        return _resume(self)
    return getattr(self, method)(*args)


def resharder_resume(self: Any) -> None:
    """Resume the scheduler for a caller without a token, unless an order has paused it: a method of the engine core.

    The caller's API server may not be the leading one, and then has no record of the order.
    """
    paused = "an order has paused the engine" if paused_by_order(self) else ""
    if refusal := _agreed(self, paused):
        logger.warning("ignoring resume_generation by another caller: %s", refusal)
    else:
        _resume(self)


def resharder_adapter(self: Any, adapter: str, method: str, args: list[Any]) -> Any:
    """Call a method of an adapter's agents in the workers: a method of the engine core.

    A version's slot is freed only here, between two steps: no request in the scheduler uses it, and one that arrives later is
    refused.
    """
    if method == "release":
        lora_requests = [request.lora_request for request in self.scheduler.requests.values()]
        args = [[request.lora_int_id for request in lora_requests if is_ours(request)]]
    answers = self.collective_rpc(ADAPTER, args=(adapter, method, *args))
    loaded = [set(answer.get("loaded", ())) for answer in answers]
    self.__dict__.setdefault(_LOADED, {})[adapter] = set.intersection(*loaded) if loaded else set()
    return answers


def refuse_missing_adapters(core: Any) -> None:
    """Have the engine core refuse a request for a version that is not loaded; vLLM would look for it at its path, and end.

    It answers an error for the one request (`_handle_request_preproc_error`, `v1/engine/core.py`; 0.28 to 0.32). An API server
    that is late by more than `adapter_agent.GRACE_SECONDS` may name such a version.
    """
    plain = core.preprocess_add_request
    if hasattr(plain, "resharder"):
        return

    @functools.wraps(plain)
    def checked(self: Any, request: Any) -> Any:
        lora: Any = getattr(request, "lora_request", None)
        if is_ours(lora) and lora.lora_int_id not in getattr(self, _LOADED, {}).get(adapter_of(lora), ()):
            raise ValueError(f"{lora.lora_name} was superseded and has left this engine: send the request again")
        return plain(self, request)

    checked.resharder = True  # type: ignore[attr-defined]
    core.preprocess_add_request = checked


def _resume(core: Any) -> None:
    """Resume the scheduler, and take requests again.

    Since 0.33 a core refuses new requests after `pause_generation` in the modes `abort` and `wait`. A core of a data parallel
    model that runs returns from `resume_scheduler` before it takes them again (`DPEngineCoreProc`, `v1/engine/core.py`).
    """
    core.resume_scheduler()
    if getattr(core, "reject_new_requests", False):
        core.reject_new_requests = False


def resharder_process(self: Any) -> list[Any]:
    """Return the process namespace and the id of the engine core's process: a method of the engine core."""
    return [_namespace(), os.getpid()]


def _namespace() -> str:
    with open("/proc/sys/kernel/random/boot_id") as boot:
        return f"{boot.read().strip()} {os.readlink('/proc/self/ns/pid')}"


def paused_by_order(core: Any) -> bool:
    """Return whether an order has paused the engine core, and none has resumed it or put it to sleep since."""
    return getattr(core, _PAUSED, False)


def _agreed(core: Any, refusal: str) -> str:
    """Return this core's refusal or that of another engine core; empty if all cores accept.

    Cores of a data parallel MoE wait for each other in `resume_scheduler` (`DPEngineCoreProc`), so the
    refusal of one core would block the others.
    """
    group = getattr(core, "dp_group", None)
    if group is None or core.engines_running:  # vLLM ignores or rejects a resumption of running cores
        return refusal
    from vllm.config import ParallelConfig

    any_refused = ParallelConfig.has_unfinished_dp(group, bool(refusal))
    return refusal or ("another engine core refused the call" if any_refused else "")


def guard(client: Any) -> None:
    """Route calls of an engine core's client within `acting` through the engine core's fence, and others' resumptions too.

    `_call_utility_async` sends every call to one engine core (`v1/engine/core_client.py`; 0.26, 0.28 and 0.32).

    Raises:
        UsageError: The client has no such method.
    """
    plain = getattr(client, "_call_utility_async", None)
    if plain is None:
        raise UsageError(
            f"expected an AsyncLLM with its engine core in another process, got a {type(client).__name__} as its client: "
            "leave VLLM_ENABLE_V1_MULTIPROCESSING at 1"
        )
    if hasattr(plain, "resharder"):
        return

    @functools.wraps(plain)
    async def guarded(method: str, *args: Any, **to: Any) -> Any:
        claim = claim_in_effect()
        if claim is None:
            return await plain(_RESUME if method == "resume_scheduler" else method, *args, **to)
        return accepted(await plain(FENCED, claim.token(), method, list(args), **to))

    guarded.resharder = True  # type: ignore[attr-defined]
    client._call_utility_async = guarded


class EngineEnd:
    """Whether an engine has ended, and whether by an order.

    An order shuts a healthy engine's client down: vLLM's API server does so on SIGTERM and SIGINT, a program by itself. A client
    whose engine core dies marks the engine as dead first, and then shuts itself down as well (`v1/engine/core_client.py`,
    `start_engine_core_monitor`). If there are several API servers, only their parent has the engine cores' processes; it ends
    the API servers by SIGTERM when an engine core has died, so they look for the processes.

    Args:
        engine: vLLM's `AsyncLLM`.
        failed: Called on any thread when the engine's client shuts down after a failure.
    """

    def __init__(self, engine: Any, failed: Callable[[], None]) -> None:
        self._engine, self._client, self._failed = engine, getattr(engine, "engine_core", None), failed
        self._processes: list[int] = []  # of the engine cores, where another process watches them
        self._ordered = False
        shut_down = getattr(self._client, "shutdown", None)
        if shut_down is None:
            return

        @functools.wraps(shut_down)
        def watched(*args: Any, **kwargs: Any) -> None:
            self._order()
            if not self._ordered:
                self._failed()
            shut_down(*args, **kwargs)

        self._client.shutdown = watched  # type: ignore[union-attr]

    def watch_signals(self, loop: asyncio.AbstractEventLoop) -> None:
        """Take signals for which the program adds a handler from now on as orders, at the moment at which they arrive.

        If all processes of a server get a SIGTERM, its workers may have ended before the client is shut down.
        """
        add = loop.add_signal_handler

        def watched(number: int, handler: Callable[..., object], *args: Any) -> None:
            def order() -> None:
                self._order()
                handler(*args)

            add(number, order)

        loop.add_signal_handler = watched  # type: ignore[assignment, method-assign]

    def _order(self) -> None:
        self._ordered = self._ordered or not self._found()

    async def find_processes(self) -> None:
        """Ask engine cores on this host for their processes, if another process watches them."""
        if self._manager() is None:
            found = [
                await self._client._call_utility_async(_PROCESS, engine=core)  # type: ignore[union-attr]
                for core in getattr(self._client, "core_engines", ())
            ]
            self._processes = [process for namespace, process in found if namespace == _namespace()]

    @property
    def failure(self) -> str:
        """Why the engine has ended without an order; empty while it has not, and once it was shut down by an order."""
        return "" if self._ordered else self._found()

    def _found(self) -> str:
        codes = [process.exitcode for process in getattr(self._manager(), "processes", ())]
        if wrong := [code for code in codes if code not in _ORDERLY]:
            return f"its engine core ended with code {wrong[0]}"
        if ended := [process for process in self._processes if not _runs(process)]:
            return f"its engine core, process {ended[0]}, ended"
        stopped = any(code is not None for code in codes)
        return "its engine died" if getattr(self._engine, "errored", False) and not stopped else ""

    def _manager(self) -> Any:
        return getattr(getattr(self._client, "resources", None), "engine_manager", None)


def _runs(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # it runs as another user
        return True
    return True


def engines_are_here(vllm_config: Any) -> bool:
    """Return whether every engine core runs on this host. Ray and `--data-parallel-size-local` place replicas on others."""
    parallel = vllm_config.parallel_config
    spread = parallel.data_parallel_backend == "ray" or parallel.data_parallel_size_local != parallel.data_parallel_size
    return parallel.data_parallel_size == 1 or not spread


def passes_kv(vllm_config: Any) -> bool:
    """Return whether the engine exchanges KV cache with other engines, which must then have the same version."""
    transfer = vllm_config.kv_transfer_config
    return transfer is not None and transfer.kv_role in ("kv_producer", "kv_consumer", "kv_both")
