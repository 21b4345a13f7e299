"""Threads of simulated processes: real threads of which one runs at a time, each until it waits.

`threading_of` stands in for the module `threading` in code that runs in a simulated process. Its locks do nothing: a
thread gives way to others only where it waits.
"""

from collections.abc import Callable, Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any

from tests.simulation.control.schedule import Killed, Process, Schedule
from tests.simulation.coroutine import Coroutine


class SimulatedThread:
    """A thread of `process`, with the interface of `threading.Thread`."""

    def __init__(self, schedule: Schedule, process: Process, target: Callable[[], object]) -> None:
        self._schedule, self._process, self._target = schedule, process, target
        self._carrier: Coroutine | None = None
        self._error: BaseException | None = None
        self._waits = 0  # number of the wait in progress; a wake-up for another one is late
        self._notified = False
        self._over = False
        self.lane = f"thread {id(self)}"

    def start(self) -> None:
        self._process.when_killed.append(self.end)
        self._schedule.after(1e-5, self._process, self.resume, self.lane)

    def is_alive(self) -> bool:
        return self._carrier is not None and not self._over

    def join(self, timeout: float | None = None) -> None:
        pass

    def resume(self) -> None:
        """Run the thread until it waits or ends. Called by the schedule."""
        if self._over:
            return
        if self._carrier is None:
            self._carrier = Coroutine(self._work)
        before, self._schedule.thread = self._schedule.thread, self
        self._carrier.resume()
        self._schedule.thread = before
        if self._over and self._error is not None:
            raise self._error

    def end(self) -> None:
        """Unwind the thread of a killed process."""
        if self._carrier is not None and not self._over and self._schedule.thread is not self:
            self.resume()

    def block(self) -> None:
        """Give way. Called on the thread itself."""
        assert self._carrier is not None
        self._carrier.pause()
        if not self._process.alive:
            raise Killed

    def wait(self, timeout: float | None) -> bool:
        """Wait for `wake`, on the thread itself. Return False after the timeout."""
        if not self._process.alive:
            raise Killed
        self._waits += 1
        if timeout is not None:
            self._schedule.after(max(timeout, 0.0), self._process, partial(self._go_on, self._waits, False), self.lane)
        self.block()
        return self._notified

    def wake(self) -> None:
        """End the current wait."""
        self._schedule.after(1e-6, self._process, partial(self._go_on, self._waits, True), self.lane)

    def _go_on(self, number: int, notified: bool) -> None:
        if number == self._waits:
            self._waits += 1
            self._notified = notified
            self.resume()

    def _work(self) -> None:
        try:
            self._target()
        except Killed:
            pass
        except BaseException as error:
            self._error = error if self._process.alive else None
        self._over = True


class Waiters:
    """Threads that wait for one thing."""

    def __init__(self, schedule: Schedule) -> None:
        self._schedule, self._threads = schedule, list[SimulatedThread]()

    def wait(self, timeout: float | None = None) -> bool:
        thread: SimulatedThread = self._schedule.thread
        self._threads.append(thread)
        try:
            return thread.wait(timeout)
        finally:
            if thread in self._threads:
                self._threads.remove(thread)

    def wake(self) -> None:
        for thread in self._threads:
            thread.wake()


class _Condition(Waiters):
    def __enter__(self) -> bool:
        return True

    def __exit__(self, *error: object) -> None:
        pass

    notify_all = Waiters.wake


class _Event(Waiters):
    _set = False

    def is_set(self) -> bool:
        return self._set

    def set(self) -> None:
        self._set = True
        self.wake()

    def wait(self, timeout: float | None = None) -> bool:
        return self._set or super().wait(timeout) or self._set


def threading_of(schedule: Schedule) -> SimpleNamespace:
    """Return a namespace in place of `threading`. Threads belong to the process that makes them."""

    def thread(target: Callable[[], object], name: str = "", daemon: bool = True) -> SimulatedThread:
        assert schedule.running is not None
        return SimulatedThread(schedule, schedule.running, target)

    return SimpleNamespace(Thread=thread, Condition=lambda: _Condition(schedule), Event=lambda: _Event(schedule))


def each(items: Iterator[Any], take: Callable[[Any], None], done: Callable[[], None]) -> None:
    """Give each item to `take`; the body of a thread that reads an iterator."""
    for item in items:
        take(item)
    done()
