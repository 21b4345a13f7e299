"""SGLang as an `engine.Engine`: the tokenizer manager, by which the control side reaches schedulers.

Read against 0.5.17 and 0.5.23. A program that has the tokenizer manager pauses the engine and releases its memory without a
route: verl's server does so around each update. Such a pause outlasts the orders that are carried out in it.
"""

import asyncio
import json
from collections.abc import Callable, Sequence
from typing import Any

from resharder.client.errors import UsageError
from resharder.client.inference.control.fence import accepted, claim_in_effect
from resharder.client.inference.control.labels import Label
from resharder.client.inference.engine import KV_CACHE, STAY_PAUSED, Mode
from resharder.client.inference.sglang.messages import ResharderReqInput, ResharderReqOutput
from resharder.client.inference.version_page import page
from sglang.srt.managers.communicator import FanOutCommunicator
from sglang.utils import TypeBasedDispatcher

_LOOK_SECONDS = 0.02  # between looks whether all requests have ended
_PAUSED = "resharder_program_paused"  # of a tokenizer manager: whether a program has paused it, beside orders


class CallFailed(Exception):
    """A call of the engine failed in a scheduler process. The message has the error of each rank."""


class SGLangEngine:
    """The engine behind one tokenizer manager. Use it on the tokenizer manager's event loop only.

    Args:
        manager: SGLang's `TokenizerManager`.
        replicas: Number of data parallel replicas.
        ended: Returns whether the engine follows the daemon no more.
    """

    def __init__(self, manager: Any, replicas: int, ended: Callable[[], bool]) -> None:
        manager.auto_create_handle_loop()
        if manager.event_loop is not asyncio.get_running_loop():
            raise UsageError("attach the engine on the event loop on which it answers requests")
        self._manager, self._ended = manager, ended
        self._calls = FanOutCommunicator(manager._dispatch_to_scheduler, replicas)
        manager._result_dispatcher += TypeBasedDispatcher([(ResharderReqOutput, self._calls.handle_recv)])
        self._watch_program()

    def _watch_program(self) -> None:
        """Note a program's own pause, and refuse what would lose weights or memory behind the daemon's back."""
        manager = self._manager
        pause, go_on = manager.pause_generation, manager.continue_generation
        release, restore = manager.release_memory_occupation, manager.resume_memory_occupation

        async def watched_pause(request: Any) -> None:
            setattr(manager, _PAUSED, True)
            await pause(request)

        async def watched_continue(request: Any) -> None:
            setattr(manager, _PAUSED, False)
            await go_on(request)

        async def watched_release(request: Any, *args: Any) -> None:
            await self._refuse_memory(request.tags)
            await release(request, *args)

        async def watched_restore(request: Any, *args: Any) -> None:
            await self._refuse_memory(request.tags)
            await restore(request, *args)

        manager.pause_generation, manager.continue_generation = watched_pause, watched_continue
        manager.release_memory_occupation, manager.resume_memory_occupation = watched_release, watched_restore

    async def _refuse_memory(self, tags: Sequence[str] | None) -> None:
        """Raise `UsageError` unless a program may release and restore the memory of `tags`: that of the KV cache, awake."""
        if self._ended():
            return
        if set(tags or ()) != {KV_CACHE}:
            raise UsageError(
                "this engine follows a Resharder daemon, and its weights are released and restored by `resharder sleep` and "
                f"`resharder wake` alone: name the tag {KV_CACHE}"
            )
        if any(answer["asleep"] for answer in await self._engine_call("state")):
            raise UsageError("the engine sleeps: wake it first, with `resharder wake`")

    async def pause_generation(self, *, mode: Mode, clear_cache: bool) -> None:
        """Hold new requests and stop scheduling: `keep` puts requests in progress back into the queue."""
        async with self._manager.is_pause_cond:
            self._manager.is_pause = True
        while mode != "keep" and await self._manager.model_update_lock.is_locked():
            if mode == "abort":
                self._manager.abort_request(abort_all=True)
            await asyncio.sleep(_LOOK_SECONDS)
        await self._engine_call("pause")

    async def resume_generation(self) -> None:
        """Schedule requests again, unless a program has paused the engine too."""
        held = getattr(self._manager, _PAUSED, False)
        await self._engine_call("resume", held)
        if held:
            return
        async with self._manager.is_pause_cond:
            self._manager.is_pause = False
            self._manager.is_pause_cond.notify_all()

    async def is_paused(self) -> bool:
        """Return whether scheduling is paused."""
        return self._manager.is_pause or any(answer["paused"] for answer in await self._engine_call("state"))

    async def sleep(self, level: int, mode: Mode) -> None:
        """Pause, then release the memory of the weights and the KV cache."""
        await self.pause_generation(mode=mode, clear_cache=True)
        await self._engine_call("sleep", level)

    async def wake_up(self, tags: list[str] | None) -> None:
        """Restore the memory of `tags`; resume unless `STAY_PAUSED` is among them."""
        named = [tag for tag in tags or () if tag != STAY_PAUSED]
        await self._engine_call("wake", named)
        if STAY_PAUSED not in (tags or ()):
            await self.resume_generation()

    async def is_sleeping(self) -> bool:
        """Return whether the engine sleeps or is paused."""
        return any(answer["paused"] or answer["asleep"] for answer in await self._engine_call("state"))

    async def collective_rpc(self, method: str, *, args: tuple[Any, ...] = ()) -> Sequence[Any]:
        """Call `method` in every scheduler process and return their answers."""
        return await self._call(method, *args)

    async def reset_prefix_cache(self, reset_running_requests: bool, reset_connector: bool) -> bool:
        """Drop the KV cache of a paused engine, which no request uses; return whether it succeeded."""
        return all(answer["reset"] for answer in await self._engine_call("reset"))

    async def reset_mm_cache(self) -> None:
        """Do nothing: models with other inputs than text are refused."""

    async def reset_encoder_cache(self) -> None:
        """Do nothing, as for `reset_mm_cache`."""

    async def _engine_call(self, method: str, *args: Any) -> list[dict[str, Any]]:
        """Call one of the engine's own methods. Raises CallFailed if a rank failed."""
        answers = await self._call(method, *args)
        if problems := [f"rank {answer['rank']}: {answer['error']}" for answer in answers if not answer["ok"]]:
            raise CallFailed("; ".join(problems))
        return answers

    async def _call(self, method: str, *args: Any) -> list[dict[str, Any]]:
        claim = claim_in_effect()
        token = json.dumps(claim.token()) if claim is not None else ""
        outputs = await self._calls(ResharderReqInput(method=method, args=json.dumps(args), token=token))
        self._follow_page()
        answers = [each for output in outputs for each in accepted(json.loads(output.answers))]
        return sorted(answers, key=lambda answer: answer["rank"])

    def _follow_page(self) -> None:
        """Make the installed version the weight version of `/model_info` and of answers without tokens."""
        label = str(Label((page().version,)))
        if self._manager.config_value("weight_version") != label:
            self._manager._update_weight_version_if_provided(label)
