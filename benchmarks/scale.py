"""A version to many hosts, simulated: `python -m benchmarks.scale [--hosts N] [--gigabytes N] [--gigabits N] …`.

The daemon's tracker and the nodes' requests are the real code; the network is simulated (benchmarks/swarm.py), in its own time.
Without arguments: 1,000 hosts, 1 TB, links of 100 Gb/s, 1 % of the hosts die. Half an hour on one core.
"""

import argparse
import time

import numpy as np
from resharder.converters.wire.pieces import piece_bytes_for

from benchmarks.swarm import Network, Outcome, Swarm


def network_of(hosts: int, total: int, rate: float, dying: float, seed: int, size: int) -> Network:
    """Return hosts that fetch `total` bytes over links of `rate` bytes a second; a share of them dies at random times."""
    deaths = np.random.default_rng(seed).random(round(dying * hosts)).tolist()
    return Network(hosts, -(-total // size), size, rate, deaths=tuple(deaths), seed=seed)


def describe(network: Network, outcome: Outcome) -> str:
    """Return the figures of a simulation as lines of text."""
    once, reports = network.one_transfer, outcome.reports / outcome.seconds
    cpu, refused = outcome.cpu / outcome.reports, outcome.refused / network.hosts / network.pieces
    return "\n".join(
        [
            f"{network.hosts} hosts, {network.pieces} pieces of {network.piece_bytes >> 20} MiB, one transfer {once:.1f} s",
            f"{len(network.deaths)} hosts die, seed {network.seed}",
            f"last host {outcome.seconds:.1f} s, {outcome.seconds / once:.3f} of one transfer; first {outcome.first / once:.3f}",
            f"origin sent {outcome.origin_sent:.3f} of the version, {outcome.repeated:.4f} of all pieces arrived twice",
            f"{refused:.2f} requests for each piece were refused as busy, {outcome.failed} were given up",
            f"daemon: {reports:.0f} reports/s, {cpu * 1e6:.0f} us of CPU each, {reports * cpu:.3f} cores",
            f"bitmaps in an answer {outcome.answer_bytes:.0f} B, table {outcome.table_bytes / 1e6:.2f} MB",
            f"node: {outcome.choosing:.2f} s of CPU for its choices",
        ]
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hosts", type=int, default=1000)
    parser.add_argument("--gigabytes", type=float, default=1000)
    parser.add_argument("--gigabits", type=float, default=100)
    parser.add_argument("--dying", type=float, default=0.01)
    parser.add_argument("--piece-mib", type=int, help="MiB of a piece; by default as in a version of this size")
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    total, rate = int(arguments.gigabytes * 1e9), arguments.gigabits * 1e9 / 8
    size = arguments.piece_mib << 20 if arguments.piece_mib else piece_bytes_for(total)
    network = network_of(arguments.hosts, total, rate, arguments.dying, arguments.seed, size)
    began = time.perf_counter()
    print(describe(network, Swarm(network).run()))
    print(f"simulated in {time.perf_counter() - began:.0f} s")


if __name__ == "__main__":
    main()
