"""CUDA streams by purpose, and the durations of their work.

On a CPU, where work is sequential, the same calls order nothing.

A thread begins with GPU 0. If its work is for another one, a launch of Triton or the end of `torch.cuda.stream` creates a
context on GPU 0, which takes 0.5 GiB of its memory (seen with torch 2.11 and CUDA 13: `set_stream` calls cudaSetDevice).
`use_gpu` and `on_stream` prevent that.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

Mark = Any  # torch.cuda.Event; None on a CPU


def use_gpu(device: torch.device) -> None:
    """Make a GPU the calling thread's current one. A no-op for a CPU."""
    if device.type == "cuda":
        torch.cuda.set_device(device)


@contextmanager
def on_stream(stream: torch.cuda.Stream) -> Iterator[None]:
    """Make a stream and its GPU current in the block."""
    with torch.cuda.device(stream.device), torch.cuda.stream(stream):
        yield


class WorkStream:
    """CUDA stream, or none on a CPU. Its work follows the work that the current stream had at the time of `begin`."""

    def __init__(self, device: torch.device, before: int = 0) -> None:
        """Create the stream. Kernels of streams with a higher `before`, up to 3, start first."""
        self._stream: Any = _stream(device, before) if device.type == "cuda" else None
        self._spans: list[tuple[Any, Any]] = []
        self._seconds = 0.0

    def begin(self) -> None:
        """Reset the durations, and order later work after the current stream's pending work."""
        self._spans, self._seconds = [], 0.0
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))

    @contextmanager
    def work(self) -> Iterator[None]:
        """Launch the block's work on this stream, and add its duration to `seconds`."""
        if self._stream is None:
            started = time.perf_counter()
            try:
                yield
            finally:
                self._seconds += time.perf_counter() - started
            return
        with on_stream(self._stream):
            before = self.mark()
            yield
            self._spans.append((before, self.mark()))

    def mark(self, *, blocking: bool = False) -> Mark:
        """Record an event at the end of this stream's pending work.

        A thread that waits for a `blocking` event sleeps; otherwise it occupies its core.
        """
        if self._stream is None:
            return None
        event: Any = torch.cuda.Event(enable_timing=True, blocking=blocking)  # type: ignore[no-untyped-call,unused-ignore]
        event.record(self._stream)
        return event

    def after(self, mark: Mark) -> None:
        """Order later work of this stream after `mark`."""
        if self._stream is not None and mark is not None:
            self._stream.wait_event(mark)

    def join_current(self) -> None:
        """Order later work of the current stream after this stream's pending work."""
        if self._stream is not None:
            torch.cuda.current_stream(self._stream.device).wait_stream(self._stream)

    def drain(self) -> None:
        """Wait until this stream's work is done."""
        if self._stream is not None:
            self._stream.synchronize()

    @property
    def seconds(self) -> float:
        """Seconds of work since `begin`; valid after `drain`."""
        return self._seconds + float(sum(a.elapsed_time(b) for a, b in self._spans)) / 1000


def _stream(device: torch.device, before: int) -> Any:
    return torch.cuda.Stream(device, priority=-before)  # type: ignore[no-untyped-call,unused-ignore]
