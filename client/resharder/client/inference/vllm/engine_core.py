"""The fence in vLLM's engine core (`control/fence.py`), and queries about engine cores; read against 0.26, 0.28 and 0.32."""

import asyncio
import functools
import logging
import os
import signal
import time
from collections.abc import Awaitable, Callable
from typing import Any

from resharder.client.errors import UsageError
from resharder.client.inference.control.fence import FENCED, Fence, accepted, claim_in_effect
from resharder.client.inference.engine import STAY_PAUSED, Mode
from resharder.client.inference.vllm.adapter_ids import adapter_of, is_ours, renewed, version_of

_RESUME = "resharder_resume"  # name of the engine core's method for resumptions without a token
ADAPTER = "resharder_adapter"
"""Name of the engine core's method, and of the workers', for an adapter."""
_LOADED = "_resharder_loaded"  # attribute of an engine core: ids of the versions that all workers have loaded, by adapter
_CUT = "_resharder_cut"  # attribute of an engine core: the version to which the last install cut requests over, by adapter
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
    check_adapters(EngineCore)


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
    refused. `apply` has the pause mode as its second argument: all modes but `wait` cut requests in progress over.
    """
    cut_over = method == "apply" and args[1] != "wait"
    if method == "release":
        lora_requests = [request.lora_request for request in self.scheduler.requests.values()]
        args = [[request.lora_int_id for request in lora_requests if is_ours(request)]]
    if cut_over:
        _finish_steps(self)
    called = [args[0], cut_over] if method == "apply" else args
    answers = self.collective_rpc(ADAPTER, args=(adapter, method, *called))
    loaded = [set(answer.get("loaded", ())) for answer in answers]
    self.__dict__.setdefault(_LOADED, {})[adapter] = set.intersection(*loaded) if loaded else set()
    if method == "apply" and all(answer.get("ok") for answer in answers):
        self.__dict__.setdefault(_CUT, {})[adapter] = answers[0]["version"] if cut_over else 0
        if cut_over:
            _cut_over(self, adapter, answers[0]["version"], abort=args[1] == "abort")
    return answers


def _finish_steps(core: Any) -> None:
    """Have the engine core deliver the outputs of the steps in progress, so that each has the time of before the cut."""
    from vllm.v1.core.sched.interface import PauseState

    state = core.scheduler.pause_state
    core.scheduler.set_pause_state(PauseState.PAUSED_ALL)  # no new step
    try:
        while core.batch_queue:  # None where steps do not overlap
            core._process_engine_step()
    finally:
        core.scheduler.set_pause_state(state)


def _cut_over(core: Any, adapter: str, version: int, *, abort: bool) -> None:
    """Preempt or abort all requests of other versions of an adapter, and have the preempted ones go on with `version`.

    It computes their KV cache again, as after an install of the base, so that no block in the prefix cache is of two versions.
    Requests whose KV cache comes from another engine are aborted.
    """
    from vllm.v1.request import RequestStatus

    scheduler = core.scheduler
    requests = [
        request
        for request in scheduler.requests.values()
        if _is_of_another(request.lora_request, adapter, version) and not request.is_finished()
    ]
    ids = {request.request_id for request in requests if not abort}
    for request in [request for request in reversed(scheduler.running) if request.request_id in ids]:
        scheduler.running.remove(request)
        scheduler._preempt_request(request, time.monotonic())  # the last one first: they wait in the order in which they ran
        scheduler.prev_step_scheduled_req_ids.discard(request.request_id)
    remote = RequestStatus.WAITING_FOR_REMOTE_KVS
    ended = [r for r in requests if abort or r.num_computed_tokens or r.status == remote]
    going_on = [] if abort else [r for r in requests if not r.num_computed_tokens and r.status != remote]
    for request in going_on:
        _rename(request, version)
    if going_on and not all(answer.get("ok") for answer in core.collective_rpc(ADAPTER, args=(adapter, "renew"))):
        ended = requests
    core._send_abort_outputs(scheduler.finish_requests([request.request_id for request in ended], RequestStatus.FINISHED_ABORTED))


def _is_of_another(lora: Any, adapter: str, version: int) -> bool:
    """Return whether a `LoRARequest` or None is of another version of an adapter."""
    return is_ours(lora) and adapter_of(lora) == adapter and version_of(lora) != version


def _rename(request: Any, version: int) -> None:
    """Have a request of vLLM's scheduler, of which nothing is computed, name another version of its adapter."""
    request.lora_request = renewed(request.lora_request, version)
    request.block_hashes.clear()
    request.update_block_hashes()


def check_adapters(core: Any) -> None:
    """Have the engine core refuse a request for a version that is not loaded; vLLM would look for it at its path, and end.

    It answers an error for the one request. An API server that is late by more than `adapter_agent.GRACE_SECONDS` may name such
    a version. A request that was on its way during a cut-over gets the new version.
    """
    plain = core.add_request
    if hasattr(plain, "resharder"):
        return

    @functools.wraps(plain)
    def checked(self: Any, request: Any, *args: Any) -> Any:
        if is_ours(lora := request.lora_request):
            adapter = adapter_of(lora)
            if (version := getattr(self, _CUT, {}).get(adapter, 0)) not in (0, version_of(lora)):
                _rename(request, version)
            if request.lora_request.lora_int_id not in getattr(self, _LOADED, {}).get(adapter, ()):
                logger.warning("refusing a request: %s was superseded and has left this engine", lora.lora_name)
                self._send_error_outputs_to_client([request.request_id], request.client_index)
                return None
        return plain(self, request, *args)

    checked.resharder = True  # type: ignore[attr-defined]
    core.add_request = checked


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


def pausing(engine: Any) -> Callable[[Mode], Awaitable[object]]:
    """Return what pauses an engine: on return no step is in progress and none begins, and caches are unchanged.

    vLLM's `AsyncLLM.pause_generation` (`v1/engine/async_llm.py`; 0.26, 0.28 and 0.32) calls the engine
    core, which answers when it is idle, and then sleeps for 20 ms so that the last tokens leave before
    it returns, which is "not required for correctness". Without the sleep, these tokens still leave
    before later ones. The engine core is therefore called directly, if the engine has one.
    """

    async def pause(mode: Mode) -> object:
        pause_core = getattr(getattr(engine, "engine_core", None), "pause_scheduler_async", None) or engine.pause_generation
        return await pause_core(mode=mode, clear_cache=False)

    return pause


class EngineEnd:
    """Whether an engine has ended, and whether by an order.

    An order shuts a healthy engine's client down: vLLM's API server does so on SIGTERM and SIGINT, a program by itself. A client
    whose engine core dies marks the engine as dead first, and then shuts itself down as well (`v1/engine/core_client.py`,
    `start_engine_core_monitor`). If there are several API servers, only their parent has the engine cores' processes; it ends
    the API servers by SIGTERM when an engine core has died, so they look for the processes.

    Args:
        engine: vLLM's `AsyncLLM`.
        leave: Called on any thread, each time before the engine's client shuts down.
    """

    def __init__(self, engine: Any, leave: Callable[[], None]) -> None:
        self._engine, self._client = engine, getattr(engine, "engine_core", None)
        self._processes: list[int] = []  # of the engine cores, where another process watches them
        self._ordered = False
        self._loop: asyncio.AbstractEventLoop | None = None
        shut_down = getattr(self._client, "shutdown", None)
        if shut_down is None:
            return

        @functools.wraps(shut_down)
        def watched(*args: Any, **kwargs: Any) -> None:
            self._order()
            leave()
            shut_down(*args, **kwargs)
            self._end_requests()

        self._client.shutdown = watched  # type: ignore[union-attr]

    def watch_signals(self, loop: asyncio.AbstractEventLoop) -> None:
        """Take signals for which the program adds a handler from now on as orders, at the moment at which they arrive.

        If all processes of a server get a SIGTERM, its workers may have ended before the client is shut down.

        Args:
            loop: The engine's event loop.
        """
        self._loop, add = loop, loop.add_signal_handler

        def watched(number: int, handler: Callable[..., object], *args: Any) -> None:
            def order() -> None:
                self._order()
                handler(*args)

            add(number, order)

        loop.add_signal_handler = watched  # type: ignore[assignment, method-assign]

    def _order(self) -> None:
        self._ordered = self._ordered or not self._found()

    def _end_requests(self) -> None:
        """Raise EngineDeadError in the requests that nothing answers any more, so that their connections close.

        An API server ends after its connections. `AsyncLLM.shutdown` cancels the task that does this (`output_handler`), often
        before it has (vLLM 0.32).
        """
        from vllm.v1.engine.exceptions import EngineDeadError

        processor = getattr(self._engine, "output_processor", None)
        if processor is not None and self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(processor.propagate_error, EngineDeadError())

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
