"""Uploads with and without TLS: `python -m benchmarks.tls [--rounds N] [--mib N] [--json FILE]`.

One rank publishes over gRPC to two daemons in turn, one with client certificates and one without, in one run. The time is from
the first byte to READY, with every chunk and digest checked. The first round of each is left out, because its pool is cold.
"""

import argparse
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from statistics import median

import torch
from resharder.client.rpc.tls import Tls
from resharder.client.trainer.connect import DeclaredTensor, connect
from resharder.client.trainer.publisher import Publisher

from benchmarks.rows import Row, show, write
from tests.support.daemon import Daemon
from tests.support.secure import Authority, SecureDaemon

CONFIG = {"model_type": "none", "architectures": ["NoneForCausalLM"]}
ROLES = {"dns:trainer.test": ["publisher:policy"]}
COLUMNS = 4096


@contextmanager
def publisher(daemon: Daemon, rows: int, tls: Tls | None = None) -> Iterator[Publisher]:
    made = connect(daemon.endpoint, model="policy", job="job", rank=0, world_size=1, config=CONFIG, transport="grpc", tls=tls)
    made.attach_tensors([DeclaredTensor("weight", torch.bfloat16, (rows, COLUMNS))])
    yield made
    made.close()


def seconds(publisher: Publisher, step: int, weight: torch.Tensor) -> float:
    began = time.perf_counter()
    publisher.publish_tensors(step, [("weight", weight)]).wait_ready(600)
    return time.perf_counter() - began


def measure(rounds: int, mib: int) -> list[Row]:
    rows = mib * (1 << 20) // (2 * COLUMNS)
    weight = torch.randn(rows, COLUMNS).to(torch.bfloat16)
    with tempfile.TemporaryDirectory() as folder, ExitStack() as ended:
        authority = Authority(Path(folder))
        secure = ended.enter_context(SecureDaemon(authority, ROLES, keep_count=1))
        plain = ended.enter_context(Daemon(keep_count=1))
        with publisher(secure, rows, authority.tls("trainer.test")) as over_tls, publisher(plain, rows) as without:
            took: list[tuple[float, float]] = []
            for step in range(rounds + 1):
                took.append((seconds(over_tls, step, weight), seconds(without, step, weight)))
    ours, peer = (median(times) for times in zip(*took[1:], strict=True))
    return [Row(f"publish {mib} MiB to READY, gRPC over mTLS (peer: without TLS)", ours, peer, None)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--mib", type=int, default=1024)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    rows = measure(arguments.rounds, arguments.mib)
    show(rows)
    if arguments.json:
        write(rows, arguments.json)


if __name__ == "__main__":
    main()
