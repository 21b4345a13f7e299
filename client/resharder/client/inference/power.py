"""How awake an engine is, in the words of the wire and in those of vLLM's sleep mode.

vLLM (device_allocator/cumem.py; 0.26, 0.28 and 0.32) tags what is allocated while the model is loaded `weights`, and the KV
cache `kv_cache`. Sleep takes the memory behind both and leaves their addresses; waking gives it back, tag by tag. At level 1
weights are copied to the host and back, at level 2 they come back with whatever the memory happens to hold.
"""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import IntEnum

from resharder.v1 import resources_pb2

logger = logging.getLogger("vllm.resharder.power")

WEIGHTS, KV_CACHE = "weights", "kv_cache"
STAY_PAUSED = (
    "resharder: stay paused"  # beside tags: do not go on by itself when nothing sleeps any more (compat.let_stay_paused)
)

NOTHING_GAINED = "Memory usage increased after sleeping"


class Power(IntEnum):
    """From most awake to least; UNKNOWN: nobody has looked."""

    UNKNOWN = resources_pb2.POWER_UNSPECIFIED
    AWAKE = resources_pb2.AWAKE
    WEIGHTS_AWAKE = resources_pb2.WEIGHTS_AWAKE
    ASLEEP_1 = resources_pb2.ASLEEP_1
    ASLEEP_2 = resources_pb2.ASLEEP_2

    @property
    def asleep(self) -> bool:
        return self in (Power.ASLEEP_1, Power.ASLEEP_2)

    @property
    def level(self) -> int:
        """vLLM's; 0 where the weights are there."""
        return {Power.ASLEEP_1: 1, Power.ASLEEP_2: 2}.get(self, 0)


@dataclass
class Slumber:
    """One worker's sleep. `level`: of the last one. `tags`: what sleeps now."""

    level: int = 0
    tags: set[str] = field(default_factory=set)

    def begin(self, level: int) -> None:
        self.level, self.tags = level, {WEIGHTS, KV_CACHE}

    def end(self, tags: list[str] | None) -> None:
        self.tags -= self.tags if tags is None else set(tags)

    @property
    def power(self) -> Power:
        if WEIGHTS in self.tags:
            return Power.ASLEEP_2 if self.level == 2 else Power.ASLEEP_1
        return Power.WEIGHTS_AWAKE if self.tags else Power.AWAKE


@contextmanager
def beside_others() -> Iterator[None]:
    """For vLLM's sleep, which ends with a look at how much of the GPU is free (Worker.sleep in v1/worker/gpu_worker.py; 0.26 to
    0.32) and fails where that is less than before: where another process, as a trainer, took some meanwhile (vLLM pull request
    45620, verl issue 3902). All that was to sleep does so by then, and an engine that believes otherwise would read it."""
    try:
        yield
    except AssertionError as error:
        if NOTHING_GAINED not in str(error):
            raise
        logger.warning("asleep, but other processes took more of the GPU's memory meanwhile than that freed")
