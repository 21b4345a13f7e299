"""`demo.trainer` whose ranks go wrong in mid-transfer when they are told to.

`fault`: {"rank": 1, "what": "sleep" | "die" | "change" | "digests" | "old scale" | "other block"} happens in that rank's next
transfer: weights change before it, or their digests after it; the last two give the first block of a matrix an old scale, or its
neighbour's. `reseed`: {"step": 13, "seed": 11}
gives a step the weights of another. `hold`: {"rank": 1, "until": PATH, "change": false}: that rank's next delivery to the daemon
begins when the file is there, with other weights by then if `change` says so. `withhold`: the next version is not offered.
`generate`: a generation over the direct path, whose block ends when the file is there.
"""

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from demo import trainer

# isort: split
import torch
import torch.distributed as dist
from resharder.client.direct.transfer import Seconds, Transfer
from resharder.client.gpu.box_digests import BoxDigests
from resharder.client.transport.shared_memory import SharedMemory
from resharder.converters.quantization.layout import SCALES

SLEEP = 35.0  # seconds: beyond what the daemon of these tests allows a transfer
_plain_run, _plain_digests = Transfer.run, BoxDigests.digests
_plain_deliver = SharedMemory.deliver
_next = ""
_held: list[Callable[[], None]] = []


def fault(publisher: Any, chunks: Any, config: Any, rank: int, what: str) -> dict[str, Any]:
    global _next
    if dist.get_rank() == rank:
        _next = what
    return {}


def hold(publisher: Any, chunks: Any, config: Any, rank: int, until: str, change: bool) -> dict[str, Any]:
    def held() -> None:
        while not Path(until).exists():
            time.sleep(0.05)
        if change:
            with torch.no_grad():
                for chunk in chunks:
                    for parameter in chunk.parameters():
                        parameter.add_(1)

    if dist.get_rank() == rank:
        _held.append(held)
    return {}


def withhold(publisher: Any, chunks: Any, config: Any) -> dict[str, Any]:
    plain = publisher.publish

    def publish(step: int) -> Any:
        publisher.publish = plain
        return plain(step, direct=False)

    publisher.publish = publish
    return {}


def generate(publisher: Any, chunks: Any, config: Any, step: int, until: str) -> dict[str, Any]:
    trainer.fill_from_hf(chunks, config, trainer.random_weights(config, step))
    held = [parameter.detach().clone() for chunk in chunks for parameter in chunk.parameters()]
    with publisher.generation(step, offload=True, direct=True, timeout=120) as generation:
        while not Path(until).exists():
            time.sleep(0.05)
    dist.barrier()  # every rank has found the server asleep
    kept = all(map(torch.equal, held, (parameter for chunk in chunks for parameter in chunk.parameters())))
    return {"version": generation.version, "kept": kept}


def deliver(self: SharedMemory, *arguments: Any) -> list[int]:
    if _held:
        _held.pop()()
    return _plain_deliver(self, *arguments)


def reseed(publisher: Any, chunks: Any, config: Any, step: int, seed: int) -> dict[str, Any]:
    plain = trainer.random_weights
    trainer.random_weights = lambda config, seed_: plain(config, seed if seed_ == step else seed_)
    return {}


def differing(self: BoxDigests, tensors: Any) -> list[int]:
    """Return other digests once, as of weights that have changed since they were sent."""
    BoxDigests.digests = _plain_digests  # type: ignore[method-assign]
    return [one ^ 1 for one in _plain_digests(self, tensors)]


def run(self: Transfer, *arguments: Any, **options: Any) -> Seconds:
    global _next
    what, _next = _next, ""
    if what == "sleep":
        time.sleep(SLEEP)
    if what == "die":
        os.kill(os.getpid(), signal.SIGKILL)
    if what in ("old scale", "other block"):
        scales = self._sources[SCALES]
        scales[:1] = 1e-3 if what == "old scale" else scales[1:2].clone()
    if what == "digests":
        BoxDigests.digests = differing  # type: ignore[method-assign]
    if what == "change":
        for source in self._sources.values():
            with torch.no_grad():
                source.add_(1)
            break
    return _plain_run(self, *arguments, **options)


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    Transfer.run = run  # type: ignore[method-assign]
    SharedMemory.deliver = deliver  # type: ignore[method-assign]
    trainer.ACTIONS |= {"fault": fault, "reseed": reseed, "hold": hold, "withhold": withhold, "generate": generate}
    trainer.main()
