"""Fair shares of places and threads for models.

Both follow one rule: a lane (a model, or a caller whose calls name none) may take another place or thread while it has
fewer than are free. A single lane gets half, the next one half of the rest. As calls end, shares become equal, and as much
remains for a new lane. A call without a place is refused at once (TOO_MANY_CALLS); a step without a thread is queued in its lane.
"""

import threading
from collections import Counter, deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, TypeVar

from resharder.converters.wire.chunk_frame import unframe
from resharder.server.state.errors import ResourceExhausted

T = TypeVar("T")


class Places:
    """Places for the open calls of one method. Thread-safe."""

    def __init__(self, method: str, places: int) -> None:
        self._method, self._places = method, places
        self._lock = threading.Lock()
        self._held: Counter[str] = Counter()

    @contextmanager
    def place(self, lane: str) -> Iterator[None]:
        """Occupy a place while the context lasts. Raises ResourceExhausted (TOO_MANY_CALLS) at once if the lane may have none."""
        with self._lock:
            held, free = self._held[lane], self._places - self._held.total()
            if held >= free:
                raise ResourceExhausted(
                    "TOO_MANY_CALLS",
                    f"{lane} has {held} {self._method} calls open, and {free} of {self._places} places are free: try again later",
                )
            self._held[lane] += 1
        try:
            yield
        finally:
            with self._lock:
                self._held[lane] -= 1
                if not self._held[lane]:
                    del self._held[lane]


class FairPool:
    """Bounded pool of threads with fair shares. Thread-safe."""

    def __init__(self, threads: int, name: str) -> None:
        self._threads = threads
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix=name)
        self._lock = threading.Lock()
        self._ended = False
        self._running: Counter[str] = Counter()
        self._queues: dict[
            str, deque[tuple[Future[Any], Callable[[], Any]]]
        ] = {}  # by lane, in the order in which they are served

    def submit(self, lane: str, step: Callable[[], T]) -> Future[T]:
        """Queue `step` until the lane may have a thread. After `shutdown`, the returned future is cancelled."""
        future: Future[T] = Future()
        with self._lock:
            if self._ended:
                future.cancel()
                return future
            self._queues.setdefault(lane, deque()).append((future, step))
            self._start()
        return future

    def shutdown(self) -> None:
        """Cancel queued steps. Running steps continue, and are not waited for."""
        with self._lock:
            self._ended = True
            queued = [future for queue in self._queues.values() for future, _ in queue]
            self._queues.clear()
        for future in queued:
            future.cancel()
        self._pool.shutdown(wait=False)

    def _start(self) -> None:
        """Start the steps that may run. Callers hold the lock."""
        while (lane := self._next()) is not None:
            queue = self._queues.pop(lane)
            future, step = queue.popleft()
            if queue:
                self._queues[lane] = queue  # after other queues
            if future.set_running_or_notify_cancel():
                self._running[lane] += 1
                self._pool.submit(self._run, lane, future, step)

    def _next(self) -> str | None:
        free = self._threads - self._running.total()
        return next((lane for lane in self._queues if self._running[lane] < free), None)

    def _run(self, lane: str, future: Future[Any], step: Callable[[], Any]) -> None:
        try:
            result, error = step(), None
        except BaseException as caught:
            result, error = None, caught
        with self._lock:
            self._running[lane] -= 1
            if not self._running[lane]:
                del self._running[lane]
            self._start()
        if error is not None:
            future.set_exception(error)
        else:
            future.set_result(result)


def model_of_request(request: Any) -> str:
    """Return the model that a request names, directly or in a resource's name; empty if none."""
    names = [getattr(request, field, "") for field in ("version", "publisher", "subject")]
    for name in names:
        if isinstance(name, str) and "models/" in name:
            return name.partition("models/")[2].partition("/")[0]
    model = getattr(request, "model", "")
    return str(getattr(model, "name", model)).removeprefix("models/")


def model_of_chunk(message: bytes) -> str:
    """Return the model in a chunk's frame; empty for invalid frames, which the service refuses."""
    try:
        return unframe(message)[2]
    except ValueError:
        return ""
