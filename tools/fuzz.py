"""Send a daemon in this process invalid requests of every method, among valid ones.

python -m tools.fuzz [--inputs N] [--seconds S] [--seed TEXT]     # exits with 1 at the first violation, and prints it

A request is generated from its message's descriptor, or is a valid one that was changed, and has names of existing resources.
Frames of the data stream are damaged in each possible way. After every 500 requests, the files of READY versions, the log, the
status page and the metrics are checked; then valid ranks and servers continue their work, which has to succeed.
"""

import argparse
import faulthandler
import tempfile
import time
from math import inf
from pathlib import Path
from random import Random

from resharder.server.infra.filesystem import anonymous_bytes

from tests.support.fuzz_daemon import World, fuzzed_daemon

BATCH = 500
WARM_UP = 40  # batches, after which memory may not grow by more than
GROWTH = 256 << 20  # bytes
_SAY = 15.0  # seconds
_LONGEST = 300.0  # seconds of a batch, after which the stacks of calls that do not end are printed


def fuzz(inputs: int, seed: str, seconds: float) -> None:
    """Run batches of requests, none of which begins after the time. Raises AssertionError, with the batch in its notes."""
    with tempfile.TemporaryDirectory(prefix="resharder-fuzz-", dir="/dev/shm") as folder, fuzzed_daemon(Path(folder)) as world:
        began = printed = time.monotonic()
        warm = 0
        for batch in range(-(-inputs // BATCH)):
            if time.monotonic() - began > seconds:
                break
            random = Random(f"{seed}/{batch}")
            faulthandler.dump_traceback_later(_LONGEST, exit=True)
            try:
                for _ in range(BATCH):
                    world.call(random)
                world.check()
                world.work()
            except Exception as error:
                error.add_note(f"in batch {batch} of seed {seed!r}, after {world.calls} inputs")
                raise
            if batch == WARM_UP:
                warm = anonymous_bytes()
            if time.monotonic() > printed + _SAY:
                printed = time.monotonic()
                print(line(world, printed - began), flush=True)
        faulthandler.cancel_dump_traceback_later()
        print(line(world, time.monotonic() - began))
        grown = anonymous_bytes() - warm if warm else 0
        assert grown < GROWTH, f"memory has grown by {grown >> 20} MiB in {world.calls} inputs"
    print(f"no findings; memory has grown by {grown / (1 << 20):.0f} MiB since the warm-up")


def line(world: World, seconds: float) -> str:
    ends = ", ".join(f"{end} {count}" for end, count in world.outcomes.most_common())
    return (
        f"{world.calls} inputs, {world.calls / seconds:.0f} a second, {anonymous_bytes() >> 20} MiB; {world.published} versions "
        f"published, {world.transfers} transfers; {ends}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--inputs", type=int, default=1_000_000)
    parser.add_argument("--seconds", type=float, default=inf, help="begin no batch after this time")
    parser.add_argument("--seed", default="0")
    arguments = parser.parse_args()
    fuzz(arguments.inputs, arguments.seed, arguments.seconds)


if __name__ == "__main__":
    main()
