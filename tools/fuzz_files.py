"""Read damaged and made-up files and messages with the code of the daemon, the clients and the plugin.

python -m tools.fuzz_files [--inputs N] [--seconds S] [--only NAME] [--seed TEXT]

Exits with 1 after faults, and prints one of each kind.

`tests/support/hostile_targets.py` has the readers: configuration, the store's manifests and journals, fleets, checkpoints (those
of Megatron as well), chunk frames, messages of the direct path, pages in shared memory, certificates, keys and tokens. Each
input ends in success or in one documented error.
"""

import argparse
import logging
import sys
import time
import traceback
from collections import Counter
from math import inf

import structlog

from tests.support.hostile_files import workspace
from tests.support.hostile_targets import TARGETS, try_seed


def fuzz(name: str, inputs: int, seed: str, seconds: float) -> int:
    """Run the inputs of a reader, none of which begins after the time, print counts, and return the number of kinds of faults."""
    outcomes, faults, began = Counter[str](), Counter[str](), time.monotonic()
    with workspace() as made:
        for number in range(inputs):
            if time.monotonic() - began > seconds:
                break
            try:
                outcomes[try_seed(name, f"{seed}/{number}", made)] += 1
            except Exception as error:
                place = traceback.extract_tb(error.__traceback__)[-1]
                kind = f"{type(error).__name__} in {place.name}, {place.filename.rpartition('/')[2]}:{place.lineno}"
                faults[kind] += 1
                if faults[kind] == 1:
                    print("".join(traceback.format_exception(error))[-3000:], flush=True)
    ends = ", ".join(f"{end} {count}" for end, count in outcomes.most_common())
    print(
        f"{name}: {(outcomes + faults).total()} inputs in {time.monotonic() - began:.0f} s: {ends or 'none ends well'}",
        flush=True,
    )
    for kind, count in faults.most_common():
        print(f"{name}: FAULT {count} times: {kind}", flush=True)
    return len(faults)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--inputs", type=int, default=10_000, help="inputs of each reader")
    parser.add_argument("--seconds", type=float, default=inf, help="time of all readers; each has an equal part")
    parser.add_argument("--only", choices=sorted(TARGETS), action="append", help="reader; may be repeated")
    parser.add_argument("--seed", default="0")
    parser.add_argument("--replay", metavar="SEED", help="run one input of the readers")
    options = parser.parse_args()
    logging.disable(logging.CRITICAL)
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))
    names = options.only or sorted(TARGETS)
    if options.replay is not None:
        with workspace() as made:
            print(*(f"{name}: {try_seed(name, options.replay, made)}" for name in names), sep="\n")
        return 0
    return int(sum(fuzz(name, options.inputs, options.seed, options.seconds / len(names)) for name in names) > 0)


if __name__ == "__main__":
    sys.exit(main())
