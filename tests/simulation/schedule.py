"""Tasks that run one at a time under a simulated clock, in an order of chance.

A task is a generator, or a function on a thread of its own that runs only while the schedule waits for it. Locks, conditions,
threads and executors of this module replace those of `threading` and `concurrent.futures`.
"""

from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import Executor, Future
from functools import partial
from random import Random
from typing import Any

from tests.simulation.coroutine import Coroutine

Ready = Callable[[], bool]
Wait = tuple[Ready | None, float | None]
"""Pause of a generator: until a condition holds (None: never by itself), or a time has come (None: no bound)."""


def _always() -> bool:
    return True


NOW: Wait = (_always, None)


class Killed(BaseException):
    """End of a task whose process is stopped."""


class Process:
    """Owner of tasks. Nothing runs in a dead process."""

    def __init__(self, name: str) -> None:
        self.name, self.dead = name, False
        self.stopped_until = 0.0


class Task:
    """Function or generator of a process. `begun` is the time and the number of the step at which it was added."""

    def __init__(self, name: str, process: Process, begun: tuple[float, int]) -> None:
        self.name, self.process, self.begun = name, process, begun
        self.ready: Ready | None = _always
        self.until: float | None = None
        self.done = False
        self.result: Any = None
        self.error: BaseException | None = None
        self.generator: Generator[Wait, None, Any] | None = None
        self.function: Callable[[], Any] | None = None
        self.worker: Coroutine | None = None

    def is_done(self) -> bool:
        return self.done

    def call(self) -> None:
        """Call the function, for its result or error."""
        assert self.function is not None
        try:
            if self.process.dead:
                raise Killed
            self.result = self.function()
        except BaseException as error:
            self.error = error
        self.done = True


class Schedule:
    """One schedule. `switching` is the chance that another task runs at a point where this is possible."""

    def __init__(self, random: Random, trace: Callable[[str], None], switching: float) -> None:
        self.random, self.switching, self._trace = random, switching, trace
        self.now, self.wall_offset, self.steps = 100.0, 1.7e9, 0
        self.tasks: list[Task] = []
        self.current: Task | None = None
        self.unexpected: list[tuple[Task, BaseException]] = []
        self.is_traced = getattr(trace, "__name__", "") != "ignore"

    def trace(self, step: str) -> None:
        """Add a line to the trace."""
        if self.is_traced:
            whose = self.current.name if self.current else "-"
            self._trace(f"{self.steps:5} {self.now:8.2f} {whose}: {step}")

    def monotonic(self) -> float:
        return self.now

    def wall_clock(self) -> float:
        return self.now + self.wall_offset

    # Tasks

    def start(self, name: str, process: Process, function: Callable[[], Any]) -> Task:
        """Add a function as a task on a thread."""
        task = Task(name, process, (self.now, self.steps))
        task.function = function
        self.tasks.append(task)
        return task

    def follow(self, name: str, process: Process, generator: Generator[Wait, None, Any]) -> Task:
        """Add a generator as a task."""
        task = Task(name, process, (self.now, self.steps))
        task.generator = generator
        self.tasks.append(task)
        return task

    def run(self, finished: Ready, steps: int) -> bool:
        """Run tasks until a condition holds, for at most this number of steps. Return whether it holds."""
        for _ in range(steps):
            if finished():
                return True
            if not self.step():
                return finished()
        return finished()

    def step(self) -> bool:
        """Let one task run until its next pause, or time pass. Return whether there was anything to do."""
        self.steps += 1
        now = self.now
        able = []
        for task in self.tasks:  # for every task at every step: no calls that can be saved
            ready, until = task.ready, task.until
            if task.process.stopped_until <= now and (
                ready is _always or (until is not None and until <= now) or (ready is not None and ready())
            ):
                able.append(task)
        if not able or (self.random.random() < 0.01):
            self._pass_time(short=bool(able))
            return bool(able) or bool(self.tasks)
        self.now += 0.001
        self._resume(able[int(self.random.random() * len(able))])
        return True

    def _pass_time(self, *, short: bool) -> None:
        if short:
            self.now += self.random.random()
            return
        times = [max(t.process.stopped_until, t.until or 0.0 if t.ready is None or not t.ready() else 0.0) for t in self.tasks]
        self.now = max(self.now, min((time for time in times if time > self.now), default=self.now)) + 0.001

    def _resume(self, task: Task) -> None:
        self.current = task
        try:
            if task.generator is not None:
                self._advance(task, task.generator)
            else:
                if task.worker is None:
                    task.worker = Coroutine(task.call)
                task.worker.resume()
        finally:
            self.current = None
        if task.done:
            self._finish(task)

    def _advance(self, task: Task, generator: Generator[Wait, None, Any]) -> None:
        try:
            task.ready, task.until = next(generator)
        except StopIteration as ended:
            task.done, task.result = True, ended.value
        except Exception as error:
            task.done, task.error = True, error

    def _finish(self, task: Task) -> None:
        self.tasks.remove(task)
        task.worker = None
        if task.error is not None and not isinstance(task.error, Killed):
            self.unexpected.append((task, task.error))

    def pause(self, ready: Ready | None, until: float | None) -> None:
        """Let other tasks run until a condition holds or a time has come. Only for tasks on threads."""
        task = self.current
        assert task is not None, "the schedule itself cannot wait"
        assert task.worker is not None
        task.ready, task.until = ready, until
        task.worker.pause()
        if task.process.dead:
            raise Killed

    def may_switch(self) -> None:
        """Let other tasks run, by chance. Raises Killed in a dead process."""
        task = self.current
        if task is None:
            return
        if task.process.dead:
            raise Killed
        if task.worker is not None and self.random.random() < self.switching:
            self.pause(_always, None)

    def kill(self, process: Process) -> None:
        """End a process and all its tasks at once. Callers are not among them."""
        process.dead = True
        for task in [each for each in self.tasks if each.process is process]:
            if task.generator is not None:
                task.generator.close()
                self.tasks.remove(task)
            elif task.worker is None:
                self.tasks.remove(task)
            while task.worker is not None:
                self._resume(task)

    def close(self) -> None:
        """End all tasks, and free their threads."""
        for process in {task.process.name: task.process for task in self.tasks}.values():
            self.kill(process)
        for task in list(self.tasks):
            self.kill(task.process)


class SimulatedLock:
    """Reentrant lock and condition variable, as `threading.Condition()`."""

    def __init__(self, schedule: Schedule) -> None:
        self._schedule = schedule
        self._owner: Task | None = None
        self._depth = self._notified = 0

    def __enter__(self) -> bool:
        schedule = self._schedule
        task = schedule.current
        if self._depth and self._owner is task:
            self._depth += 1
            return True
        if task is not None:
            schedule.may_switch()
            while self._depth:
                schedule.pause(self._is_free, None)
        assert not self._depth, "the schedule itself cannot wait for a lock"
        self._owner, self._depth = task, 1
        return True

    def __exit__(self, *error: object) -> None:
        if self._owner is self._schedule.current:  # a killed task has none left
            self._depth -= 1
            self._owner = self._owner if self._depth else None

    def acquire(self) -> bool:
        return self.__enter__()

    def release(self) -> None:
        self.__exit__()

    def _is_free(self) -> bool:
        return not self._depth

    def wait(self, timeout: float | None = None) -> bool:
        seen, depth, schedule = self._notified, self._depth, self._schedule
        self._owner, self._depth = None, 0
        schedule.pause(lambda: self._notified != seen, None if timeout is None else schedule.now + timeout)
        self.__enter__()
        self._depth = depth
        return self._notified != seen

    def wait_for(self, predicate: Callable[[], bool], timeout: float | None = None) -> bool:
        end = None if timeout is None else self._schedule.now + timeout
        while not predicate():
            if end is not None and self._schedule.now >= end:
                return predicate()
            self.wait(None if end is None else end - self._schedule.now)
        return True

    def notify_all(self) -> None:
        self._notified += 1


class SimulatedFuture(Future[Any]):
    """Result of a task of an executor, for which other tasks wait in the schedule."""

    def __init__(self, schedule: Schedule) -> None:
        super().__init__()
        self._schedule = schedule

    def result(self, timeout: float | None = None) -> Any:
        if not self.done():
            self._schedule.pause(self.done, None)
        return super().result(0)


class SimulatedExecutor:
    """Executor of background tasks of a process, `max_workers` at a time. `map` runs at once, on the caller's task.

    With `awaited`, somebody waits for each future, so that errors of tasks are theirs.
    """

    def __init__(
        self, schedule: Schedule, process: Process | None, max_workers: int, name: str, *, awaited: bool = False
    ) -> None:
        self._schedule, self._process, self._most, self._name = schedule, process, max_workers, name
        self._awaited = awaited
        self._running: list[Task] = []
        self._queue: list[tuple[SimulatedFuture, Callable[[], Any]]] = []
        self._closed = False

    def __enter__(self) -> "SimulatedExecutor":
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def submit(self, function: Callable[..., Any], *arguments: Any) -> SimulatedFuture:
        if self._closed:
            raise RuntimeError("cannot schedule new futures after shutdown")
        future = SimulatedFuture(self._schedule)
        self._queue.append((future, lambda: function(*arguments)))
        self._start()
        return future

    def map(self, function: Callable[..., Any], *items: Iterable[Any]) -> Iterator[Any]:
        done: list[tuple[Any, Exception | None]] = []
        for each in zip(*items, strict=False):
            try:
                done.append((function(*each), None))
            except Exception as error:
                done.append((None, error))
        for result, failure in done:
            if failure is not None:
                raise failure
            yield result

    def shutdown(self, wait: bool = True, cancel_futures: bool = False) -> None:
        self._closed = True
        if cancel_futures:
            queue, self._queue = self._queue, []
            for future, _ in queue:
                future.cancel()
        if wait:
            self._schedule.pause(lambda: not self._queue and not self._running, None)

    def _start(self) -> None:
        assert self._process is not None
        while self._queue and len(self._running) < self._most and not self._process.dead:
            run = partial(self._run, *self._queue.pop(0))
            self._running.append(self._schedule.start(self._name, self._process, run))

    def _run(self, future: SimulatedFuture, run: Callable[[], Any]) -> None:
        try:
            future.set_result(run())
        except Exception as error:
            future.set_exception(error)
            if not self._awaited:
                raise
        finally:
            if self._schedule.current in self._running:
                self._running.remove(self._schedule.current)
            self._start()


class InlineExecutor(Executor):
    """Executor that runs each task at once, on the caller's task."""

    def submit(self, function: Callable[..., Any], /, *arguments: Any, **named: Any) -> Future[Any]:
        future = Future[Any]()
        try:
            future.set_result(function(*arguments, **named))
        except Exception as error:
            future.set_exception(error)
        return future
