"""Power states of an engine, on the wire and in vLLM's sleep mode.

vLLM (`device_allocator/cumem.py`; 0.26, 0.28 and 0.32) tags memory that is allocated while the model
loads `weights`, and the KV cache `kv_cache`. Sleep unmaps the memory of both tags and keeps their
addresses; waking maps memory again, tag by tag. Level 1 copies the weights to the host and back.
After level 2 the weights' memory has undefined contents.
"""

from dataclasses import dataclass, field
from enum import IntEnum

from resharder.v1 import resources_pb2

WEIGHTS, KV_CACHE = "weights", "kv_cache"
STAY_PAUSED = "resharder: stay paused"
"""Pseudo-tag among the tags to wake: keep the engine paused after its last tag wakes."""


class PowerState(IntEnum):
    """Power state of an engine, ordered from awake to asleep; `UNKNOWN` before the first query."""

    UNKNOWN = resources_pb2.POWER_UNSPECIFIED
    AWAKE = resources_pb2.AWAKE
    WEIGHTS_AWAKE = resources_pb2.WEIGHTS_AWAKE
    ASLEEP_1 = resources_pb2.ASLEEP_1
    ASLEEP_2 = resources_pb2.ASLEEP_2

    @property
    def asleep(self) -> bool:
        """Whether the weights sleep."""
        return self in (PowerState.ASLEEP_1, PowerState.ASLEEP_2)

    @property
    def level(self) -> int:
        """vLLM's sleep level; 0 if the weights are awake."""
        return {PowerState.ASLEEP_1: 1, PowerState.ASLEEP_2: 2}.get(self, 0)


@dataclass
class SleepState:
    """The sleep of one worker."""

    level: int = 0
    """Level of the last sleep."""
    tags: set[str] = field(default_factory=set)
    """Tags that sleep now."""

    def begin(self, level: int) -> None:
        """Mark all tags as asleep."""
        self.level, self.tags = level, {WEIGHTS, KV_CACHE}

    def end(self, tags: list[str] | None) -> None:
        """Mark `tags` as awake, or all of them for `None`."""
        self.tags -= self.tags if tags is None else set(tags)

    @property
    def power(self) -> PowerState:
        """The power state that follows from level and tags."""
        if WEIGHTS in self.tags:
            return PowerState.ASLEEP_2 if self.level == 2 else PowerState.ASLEEP_1
        return PowerState.WEIGHTS_AWAKE if self.tags else PowerState.AWAKE
