"""A transfer engine between nodes, on the loopback: `python -m benchmarks.host_engines [--rounds N] [--megabytes N]`.

A version is read from a node that holds it by another one, until that one holds every piece, checked: by HTTP, and by NIXL over
TCP. Before each round the reading node is drained, so it writes to fresh pages. Rounds of both ways in turn; the first of each is
left out. CPU seconds are those of both sides' processes.

Needs NIXL's wheel: `make test-nixl` makes a venv with it, `.venv-nixl`. Without, it says so and ends.
"""

import argparse
import importlib
import os
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from resharder.converters.wire.ranges import HELD_FILE, PIECE_BYTES
from resharder.v1 import operator_pb2, operator_pb2_grpc

from benchmarks.host_lab import VERSION, held, publish, request, share
from benchmarks.host_ways import cpu_of
from benchmarks.rows import Row, show, write
from tests.support.daemon import Daemon
from tests.support.node import Node

NIXL = {"transfer": "nixl", "insecure": True}
WAYS = ("http", "nixl")


@dataclass(frozen=True)
class Taken:
    """Seconds of one read, and CPU seconds of both sides."""

    seconds: float
    cpu: float


def set_drained(daemon: Daemon, node: Node, drained: bool) -> None:
    stub = operator_pb2_grpc.OperatorServiceStub(daemon.channel)
    stub.SetNodeDrained(operator_pb2.SetNodeDrainedRequest(node=f"nodes/{node.name}", drained=drained))


def complete(node: Node) -> bool:
    """Whether a node holds every piece of its one version."""
    maps = [path.read_bytes() for path in node.folder.glob(f"versions/*/*/{HELD_FILE}")]
    return bool(maps) and sum(map(int.bit_count, maps[0])) == complete_pieces(node)


def complete_pieces(node: Node) -> int:
    return sum(-(-path.stat().st_size // PIECE_BYTES) for path in node.folder.glob("versions/*/*/*.safetensors"))


def until(holds: Callable[[], bool], seconds: float = 300) -> None:
    end = time.monotonic() + seconds
    while not holds():
        if time.monotonic() > end:
            raise TimeoutError(f"not complete after {seconds:.0f} s")
        time.sleep(0.005)


def read_by_node(daemon: Daemon, source: Node, reader: Node) -> Taken:
    """Let a node without any version take one from another node, and drop it again."""
    assert source.process is not None
    assert reader.process is not None
    processes = (source.process.pid, reader.process.pid)
    cpu, began = sum(map(cpu_of, processes)), time.perf_counter()
    set_drained(daemon, reader, False)
    until(lambda: complete(reader))
    taken = Taken(time.perf_counter() - began, sum(map(cpu_of, processes)) - cpu)
    set_drained(daemon, reader, True)
    until(lambda: not list(reader.folder.glob("versions/*/*")))
    return taken


def measure(megabytes: int, rounds: int) -> list[Row]:
    with ExitStack() as ended:
        daemon = ended.enter_context(Daemon(data_listen="127.0.0.1:0", keep_count=1))
        source = ended.enter_context(Node(daemon.endpoint, "source", **NIXL))
        readers = {"http": Node(daemon.endpoint, "http"), "nixl": Node(daemon.endpoint, "nixl", **NIXL)}
        for reader in readers.values():
            ended.enter_context(reader)
        until(lambda: len(held(daemon)) == len(readers) + 1)
        size = publish(daemon, megabytes)
        request(daemon, source)
        until(lambda: share(held(daemon)["source"]) == 1.0)
        for reader in readers.values():
            set_drained(daemon, reader, True)
            request(daemon, reader)
        taken: dict[str, list[Taken]] = {way: [] for way in WAYS}
        for _ in range(rounds + 1):
            for way in WAYS:
                taken[way].append(read_by_node(daemon, source, readers[way]))
        nodes = held(daemon)
        for way, reader in readers.items():
            node = nodes[reader.name]
            by_engine = node.received_engine_bytes / max(1, node.received_peer_bytes)
            print(f"{way}: {by_engine:.2f} of the bytes from nodes by the engine, {node.received_daemon_bytes} from the daemon")
    print("| way | s, median | s, all rounds | CPU s/GB, both sides |")
    print("|---|---|---|---|")
    for way, found in taken.items():
        seconds = [one.seconds for one in found[1:]]
        cpu = median(one.cpu for one in found[1:]) / size * 1e9
        print(f"| {way} | {median(seconds):.2f} | {', '.join(f'{one:.2f}' for one in seconds)} | {cpu:.2f} |")
    print(f"load {os.getloadavg()[0]:.0f}, {VERSION} of {size / 1e9:.2f} GB")
    seconds_of = {way: median(one.seconds for one in found[1:]) for way, found in taken.items()}
    return [Row(f"node to node, {size / 1e9:.1f} GB, NIXL; peer: HTTP", seconds_of["nixl"], seconds_of["http"], None)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--megabytes", type=int, default=1200)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    try:
        importlib.import_module("nixl._bindings")
    except ImportError as error:
        return print(f"skipped: {error}")
    os.environ["UCX_TLS"] = "tcp"  # UCX would find out that the hosts are one
    rows = measure(arguments.megabytes, arguments.rounds)
    show(rows)
    if arguments.json:
        write(rows, arguments.json)


if __name__ == "__main__":
    main()
