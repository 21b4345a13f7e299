"""How awake an engine is, in the words of the wire and in those of vLLM's sleep mode.

vLLM (device_allocator/cumem.py; 0.26, 0.28 and 0.32) tags what is allocated while the model is loaded `weights`, and the KV
cache `kv_cache`. Sleep takes the memory behind both and leaves their addresses; waking gives it back, tag by tag. At level 1
weights are copied to the host and back, at level 2 they come back with whatever the memory happens to hold.
"""

from dataclasses import dataclass, field
from enum import IntEnum

from resharder.v1 import resources_pb2

WEIGHTS, KV_CACHE = "weights", "kv_cache"
STAY_PAUSED = "resharder: stay paused"  # beside tags to wake: the engine stays paused when nothing sleeps any more


class PowerState(IntEnum):
    """From most awake to least; UNKNOWN: nobody has looked."""

    UNKNOWN = resources_pb2.POWER_UNSPECIFIED
    AWAKE = resources_pb2.AWAKE
    WEIGHTS_AWAKE = resources_pb2.WEIGHTS_AWAKE
    ASLEEP_1 = resources_pb2.ASLEEP_1
    ASLEEP_2 = resources_pb2.ASLEEP_2

    @property
    def asleep(self) -> bool:
        return self in (PowerState.ASLEEP_1, PowerState.ASLEEP_2)

    @property
    def level(self) -> int:
        """vLLM's; 0 where the weights are there."""
        return {PowerState.ASLEEP_1: 1, PowerState.ASLEEP_2: 2}.get(self, 0)


@dataclass
class SleepState:
    """One worker's sleep. `level`: of the last one. `tags`: what sleeps now."""

    level: int = 0
    tags: set[str] = field(default_factory=set)

    def begin(self, level: int) -> None:
        self.level, self.tags = level, {WEIGHTS, KV_CACHE}

    def end(self, tags: list[str] | None) -> None:
        self.tags -= self.tags if tags is None else set(tags)

    @property
    def power(self) -> PowerState:
        if WEIGHTS in self.tags:
            return PowerState.ASLEEP_2 if self.level == 2 else PowerState.ASLEEP_1
        return PowerState.WEIGHTS_AWAKE if self.tags else PowerState.AWAKE
