"""An asyncio event loop on simulated time. Each handle is an event of its own, so other processes run between any two."""

import asyncio
import asyncio.events
from collections import deque
from collections.abc import Callable, Coroutine
from contextvars import Context
from functools import partial
from typing import Any

from tests.simulation.control.schedule import Process, Schedule

_STEP = 1e-6  # seconds between two handles
_UNWINDINGS = 5  # a task may wait again when it is cancelled


class SimulatedLoop(asyncio.AbstractEventLoop):
    """The event loop of a process."""

    def __init__(self, schedule: Schedule, process: Process) -> None:
        self._schedule, self._process = schedule, process
        self._ready: deque[asyncio.Handle] = deque()
        self._stepping = False
        self.tasks: list[asyncio.Task[Any]] = []
        self.errors: list[dict[str, Any]] = []
        """Contexts of exceptions that nothing handled."""

    def call_soon(self, callback: Callable[..., object], *args: Any, context: Context | None = None) -> asyncio.Handle:  # type: ignore[override]
        handle = asyncio.Handle(callback, args, self, context)
        self._ready.append(handle)
        self._step_soon()
        return handle

    call_soon_threadsafe = call_soon  # type: ignore[assignment]

    def call_at(  # type: ignore[override]
        self, when: float, callback: Callable[..., object], *args: Any, context: Context | None = None
    ) -> asyncio.TimerHandle:
        timer = asyncio.TimerHandle(when, callback, args, self, context)
        self._schedule.at(when, self._process, partial(self._due, timer), "loop")
        return timer

    def call_later(  # type: ignore[override]
        self, delay: float, callback: Callable[..., object], *args: Any, context: Context | None = None
    ) -> asyncio.TimerHandle:
        return self.call_at(self.time() + delay, callback, *args, context=context)

    def _due(self, timer: asyncio.TimerHandle) -> None:
        if not timer.cancelled():
            self._ready.append(timer)
            self._step_soon()

    def _step_soon(self) -> None:
        if not self._stepping and self._process.alive:
            self._stepping = True
            self._schedule.after(_STEP, self._process, self._step, "loop")

    def _step(self) -> None:
        self._stepping = False
        self._schedule.hazard_point(0.0005)
        if self._process.stopped:
            self._step_soon()
            return
        before = asyncio.events._get_running_loop()
        asyncio.events._set_running_loop(self)
        try:
            while self._ready:
                handle = self._ready.popleft()
                if not handle.cancelled():
                    handle._run()
                    break
        finally:
            asyncio.events._set_running_loop(before)
        if self._ready:
            self._step_soon()

    def unwind(self) -> None:
        """Cancel all tasks of a killed process, so that none is left to the garbage collector."""
        for _ in range(_UNWINDINGS):
            left = [task for task in self.tasks if not task.done()]
            if not left:
                break
            for task in left:
                task.cancel()
            while self._ready:
                self._step()

    def time(self) -> float:
        return self._schedule.now

    def create_future(self) -> asyncio.Future[Any]:
        return asyncio.Future(loop=self)

    def create_task(  # type: ignore[override]
        self, coro: Coroutine[Any, Any, Any], *, name: object = None, context: Context | None = None
    ) -> asyncio.Task[Any]:
        task: asyncio.Task[Any] = asyncio.Task(coro, loop=self, name=None if name is None else str(name), context=context)
        task._log_destroy_pending = False  # type: ignore[attr-defined]
        self.tasks.append(task)
        return task

    def get_debug(self) -> bool:
        return False

    def is_closed(self) -> bool:
        return False

    def is_running(self) -> bool:
        return True

    def _timer_handle_cancelled(self, handle: asyncio.TimerHandle) -> None:
        pass

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        if self._process.alive:
            self.errors.append(context)
