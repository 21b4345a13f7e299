"""Publishing a Qwen3-0.6B-shaped model (1.2 GB in bf16) from two real Megatron ranks to READY, all checks included.

gRPC is compared with the same bytes over plain TCP sockets to one process, shared memory with a plain copy in both ranks. A
transport and its peers alternate in one run, without the first rounds (the pool is warm from the third version on). The
transports are measured one after the other, so that memory has the versions of one daemon only.
"""

import json
import shutil
import subprocess
import sys
from statistics import median

from benchmarks.rows import Row
from benchmarks.shapes import QWEN3_0_6B
from benchmarks.stores import fast_store
from tests.support.daemon import Daemon

RANKS = 2


def measure(rounds: int) -> list[Row]:
    with fast_store() as (store, kind):
        return [
            _measure("publish Qwen3-0.6B to READY, gRPC", "tcp", {"shared_memory": False, "store": store / "remote"}, rounds),
            _measure(f"the same, shared memory, {kind}", "memcpy", {"store": store / "local"}, rounds),
            _measure("the same, shared memory, /dev/shm", "memcpy", {}, rounds),
        ]


def _measure(work: str, peer: str, options: dict[str, object], rounds: int) -> Row:
    with Daemon(keep_count=1, **options) as daemon:
        seconds = _seconds(daemon.endpoint, rounds)
    if "store" in options:
        shutil.rmtree(str(options["store"]))
    names = {"tcp": "plain TCP", "memcpy": "memcpy"}
    return Row(f"{work} (peer: {names[peer]})", seconds["publish"], seconds[peer], seconds[peer])


def _seconds(endpoint: str, rounds: int) -> dict[str, float]:
    """Return the medians of `publish` and of each peer, in seconds."""
    with subprocess.Popen([sys.executable, "-m", "benchmarks.peers", str(RANKS)], stdout=subprocess.PIPE, text=True) as receiver:
        try:
            port = int(receiver.stdout.readline() if receiver.stdout else 0)
            settings = {"config": QWEN3_0_6B, "tcp_port": port, "endpoint": endpoint, "warm_up": 3, "rounds": rounds}
            torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(RANKS)]
            command = [*torchrun, "-m", "benchmarks.ranks", json.dumps(settings)]
            output = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
        finally:
            receiver.kill()
    return {way: median(times) for way, times in json.loads(output.strip().splitlines()[-1]).items()}
