"""Simulated time: events in a random order that one seed determines, and the processes whose code they run.

A process may be stopped, as by SIGSTOP, or killed between any two of its events, and stopped whenever its code reads
the clock. Its events wait until it continues. Events of one lane (a thread, a connection) keep their order; lanes that
waited continue in a random order.
"""

import asyncio.events
import heapq
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import Context
from dataclasses import dataclass, field
from math import inf
from random import Random
from typing import Any, NoReturn

Act = Callable[[], None]
Trace = Callable[[str], None]

_TICK = 1e-7  # seconds that each event takes, so that no two have the same time
_MOST_STEPS = 300_000
_DEPTH = 2  # bound on processes stopped within a synchronous section at the same time


class Killed(BaseException):
    """Ends the code of a killed process."""


class Inert(AssertionError):
    """A schedule has more events than any that makes progress."""


@dataclass(eq=False)
class Process:
    """A process of the operating system."""

    name: str
    alive: bool = True
    stopped: bool = False
    read_at: float = 0.0
    """Time that its code last read from the clock."""
    event_at: float = 0.0
    """Time at which its current event, or the last one, began."""
    waiting: list[tuple[str, Act]] = field(default_factory=list)
    """Lane and act of events that came while it was stopped."""
    interrupted: list[Act] = field(default_factory=list)
    """Threads that were stopped while they ran; they continue before anything else."""
    killed_at: float = inf
    when_killed: list[Act] = field(default_factory=list)
    program: Any = None
    """The model of the program that it runs."""


class Schedule:
    """Events, the clock, and the faults of processes.

    Args:
        random: The only source of randomness.
        trace: Takes each line of the trace.
    """

    def __init__(self, random: Random, trace: Trace) -> None:
        self.random, self.now, self.wall_offset = random, 1000.0, 1.7e9
        self.running: Process | None = None
        self.thread: Any = None
        """The simulated thread (`threads.py`) that runs, if any."""
        self.hazard = 0.0
        """Probability scale of stops at hazardous points; 0 in peace."""
        self.stop_seconds: tuple[float, ...] = (0.1,)
        self.steps = 0
        self.violation: str | None = None
        self._trace = trace
        self._events: list[tuple[float, float, int, Process | None, str, Act]] = []
        self._count = 0
        self._depth = 0

    def trace(self, line: str) -> None:
        """Write a line with the time and the process that runs."""
        name = self.running.name if self.running else "-"
        self._trace(f"{self.now - 1000:9.4f} {name:10} {line}")

    def fail(self, message: str) -> NoReturn:
        """Report a violated invariant. The code under test cannot suppress it."""
        self.violation = self.violation or f"at {self.now - 1000:.4f} s: {message}"
        self.trace(f"VIOLATED {message}")
        raise AssertionError(self.violation)

    # Events

    def at(self, when: float, process: Process | None, act: Act, lane: str = "") -> None:
        """Run `act` in `process` at time `when`."""
        self._count += 1
        heapq.heappush(self._events, (when, 0.0 if lane else self.random.random(), self._count, process, lane, act))

    def after(self, seconds: float, process: Process | None, act: Act, lane: str = "") -> None:
        """Run `act` in `process` after a time."""
        self.at(self.now + seconds, process, act, lane)

    def run_until(self, end: float, done: Callable[[], bool] = lambda: False) -> bool:
        """Run events until `end`, or until `done` after an event. Return whether `done`."""
        while self._events and self._events[0][0] <= end:
            when, _, _, process, lane, act = heapq.heappop(self._events)
            if process is not None and not process.alive:
                continue
            if process is not None and process.stopped:
                process.waiting.append((lane, act))
                continue
            self.now = max(when, self.now + _TICK)
            self.steps += 1
            if self.steps > _MOST_STEPS:
                raise Inert(f"{self.steps} events")
            before, self.running = self.running, process
            if process is not None:
                process.event_at = self.now
            try:
                act()
            finally:
                self.running = before
            if self.violation is not None:
                raise AssertionError(self.violation)
            if done():
                return True
        self.now = max(self.now, end)
        return False

    @contextmanager
    def _in(self, process: Process | None) -> Iterator[None]:
        before, self.running = self.running, process
        try:
            yield
        finally:
            self.running = before

    # Faults of processes

    def stop(self, process: Process, seconds: float) -> None:
        """Stop a process, as by SIGSTOP, and continue it later."""
        if process.alive and not process.stopped:
            self.trace(f"STOP {process.name} for {seconds:.3f} s")
            process.stopped = True
            self.after(seconds, None, lambda: self.go_on(process))

    def go_on(self, process: Process) -> None:
        """Continue a stopped process."""
        if not process.alive or not process.stopped:
            return
        self.trace(f"CONT {process.name}")
        process.stopped = False
        interrupted, process.interrupted = process.interrupted, []
        waiting, process.waiting = process.waiting, []
        for act in interrupted:
            with self._in(process):
                act()
        starts = {lane: self.random.random() * 0.01 for lane, _ in waiting}
        for lane, act in waiting:
            self.after(starts[lane], process, act, lane or "waited")

    def kill(self, process: Process) -> None:
        """Kill a process, as by SIGKILL."""
        if process.alive:
            self.trace(f"KILL {process.name}")
            process.alive = process.stopped = False
            process.killed_at = self.now
            for act in process.when_killed:
                act()

    def hazard_point(self, probability: float) -> None:
        """Stop the running process here with a probability, while the schedule has faults."""
        process = self.running
        if process is None or not self.hazard or not process.alive or process.stopped:
            return
        if self.random.random() < probability * self.hazard:
            self.stop(process, self.random.choice(self.stop_seconds))

    # The clock, as the code under test reads it

    def monotonic(self) -> float:
        """Read the monotonic clock. The process may be stopped before or after it has read the time."""
        process = self.running
        if process is None:
            return self.now
        now = self.now
        if process.alive and self.hazard and self.random.random() < 0.002 * self.hazard:
            self._stop_here(process)
            now = self.random.choice((now, self.now))
        process.read_at = now
        return now

    def wall(self) -> float:
        """Read the wall clock."""
        return self.now + self.wall_offset

    def _stop_here(self, process: Process) -> None:
        """Stop a process in the middle of a synchronous section, and run everything else meanwhile."""
        seconds = self.random.choice(self.stop_seconds)
        if self.thread is not None:
            thread = self.thread
            self.stop(process, seconds)
            process.interrupted.append(thread.resume)
            thread.block()
            return
        if self._depth >= _DEPTH:
            return
        self._depth += 1
        loop = asyncio.events._get_running_loop()
        asyncio.events._set_running_loop(None)
        try:
            self.trace(f"STOP {process.name} between two instructions for {seconds:.3f} s")
            process.stopped = True
            with self._in(None):
                # Not in the context of the code that was stopped: it may act on an order.
                Context().run(self.run_until, self.now + seconds)
            self.go_on(process)
        finally:
            asyncio.events._set_running_loop(loop)
            self._depth -= 1
        if not process.alive:
            raise Killed
