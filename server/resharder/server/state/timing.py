"""Durations that ranks, control sides and workers measure and report, each by its own clock."""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from time import monotonic, time

from google.protobuf.timestamp_pb2 import Timestamp
from resharder.v1 import resources_pb2

_MOST = 32  # durations of one report
_LONGEST_NAME = 64
_LAST = 1 << 33  # seconds since 1970; nanoseconds of a later time do not fit in a span


@dataclass(frozen=True)
class Timing:
    """Duration of a phase. `start` is in seconds since 1970."""

    phase: str
    start: float
    seconds: float

    @property
    def end(self) -> float:
        """End in seconds since 1970."""
        return self.start + self.seconds


@contextmanager
def timed(timings: list[Timing], phase: str) -> Iterator[None]:
    """Append the duration of a block, however it ends."""
    start, began = time(), monotonic()
    try:
        yield
    finally:
        timings.append(Timing(phase, start, monotonic() - began))


def timings_from_proto(messages: Sequence[resources_pb2.Timing]) -> tuple[Timing, ...]:
    """Return the durations of a report, at most 32. Impossible ones are dropped, because timings must not fail a call."""
    return tuple(timing for timing in map(_from_proto, messages[:_MOST]) if timing is not None)


def possible(seconds: float) -> float:
    """Return a reported duration in seconds, or 0 if it is negative, infinite or NaN."""
    return seconds if 0 <= seconds < _LAST else 0.0  # NaN is not


def _from_proto(message: resources_pb2.Timing) -> Timing | None:
    start = message.start_time.seconds + message.start_time.nanos / 1e9
    if not message.phase or not 0 < start < _LAST or not 0 <= message.seconds < _LAST:
        return None
    return Timing(message.phase[:_LONGEST_NAME], start, message.seconds)


def timings_to_proto(timings: Iterable[Timing]) -> list[resources_pb2.Timing]:
    """Convert durations to messages. Start times are truncated to nanoseconds."""
    return [
        resources_pb2.Timing(
            phase=t.phase, start_time=Timestamp(seconds=int(t.start), nanos=int(t.start % 1 * 1e9)), seconds=t.seconds
        )
        for t in timings
    ]
