"""Transfer engines between hosts, on the loopback: `python -m benchmarks.host_engines [--rounds N] [--megabytes N]`.

A version is read from a node that holds it by another one, until that one holds every piece, checked: by HTTP, and by the
Mooncake Transfer Engine over TCP. Before each round the reading node is drained, so it writes to fresh pages. Peer: Mooncake
Store's own transfer of the same files, as objects of a piece each, into fresh pages; it compares no checksums. Rounds of all ways
in turn; the first of each is left out. CPU seconds are those of both sides' processes.

Needs Mooncake's wheel: `make test-mooncake` makes a venv with it, `.venv-mooncake`. Without, it says so and ends.
"""

import argparse
import importlib
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from resharder.converters.wire.ranges import HELD_FILE, PIECE_BYTES
from resharder.v1 import operator_pb2, operator_pb2_grpc

from benchmarks.host_lab import VERSION, held, publish, request, share, stored
from benchmarks.host_ways import cpu_of
from benchmarks.rows import Row, show, write
from tests.support.daemon import Daemon
from tests.support.node import Node

MOONCAKE = {"transfer": "mooncake", "transfer_protocol": "tcp", "insecure": True}
WAYS = ("http", "mooncake", "store")


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


@dataclass(frozen=True)
class StoreReader:
    """A process that reads all objects of a Mooncake Store, and the process that holds them."""

    process: "subprocess.Popen[str]"
    holder: int

    def read(self) -> Taken:
        """Read them once into fresh memory."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        before = cpu_of(self.holder) + cpu_of(self.process.pid)
        self.process.stdin.write("read\n")
        self.process.stdin.flush()
        seconds = float(self.process.stdout.readline())
        return Taken(seconds, cpu_of(self.holder) + cpu_of(self.process.pid) - before)


@contextmanager
def process_of(role: str, master: str, files: list[Path]) -> Iterator["subprocess.Popen[str]"]:
    """Start a process of `store_process`, and wait until it is ready."""
    command = [sys.executable, "-m", "benchmarks.host_engines", role, master, *map(str, files)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as process:
        assert process.stdout is not None
        try:
            if not process.stdout.readline():
                raise RuntimeError(f"Mooncake Store does not {role}")
            yield process
        finally:
            process.kill()


@contextmanager
def mooncake_store(files: list[Path]) -> Iterator[StoreReader]:
    """A Mooncake Store with the files, a process that holds them, and one that reads them."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    binary = Path(importlib.import_module("mooncake").__path__[0]) / "mooncake_master"
    with subprocess.Popen(
        [binary, f"--rpc_port={port}", "--metrics_port=0"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    ) as master:
        try:
            time.sleep(2)
            address = f"127.0.0.1:{port}"
            with process_of("put", address, files) as holder, process_of("get", address, files) as reader:
                yield StoreReader(reader, holder.pid)
        finally:
            master.kill()


def store_process(role: str, master: str, *names: str) -> None:
    """Put the pieces of files into a Mooncake Store, or read them for each line of the input and print the seconds."""
    import mmap

    import numpy as np
    from mooncake.store import MooncakeDistributedStore

    files = [(name, os.stat(name).st_size) for name in names]
    pieces = [(f"{name}-{at}", at, min(PIECE_BYTES, size - at)) for name, size in files for at in range(0, size, PIECE_BYTES)]
    size = sum(length for _, _, length in pieces)
    store = MooncakeDistributedStore()
    segment = (size // PIECE_BYTES + 16) * 2 * PIECE_BYTES if role == "put" else 0
    if code := store.setup("127.0.0.1", "P2PHANDSHAKE", segment, 64 << 20, "tcp", "", master):
        raise RuntimeError(f"Mooncake Store does not start: {code}")
    if role == "put":
        for name, _ in files:
            array = np.fromfile(name, np.uint8)
            store.register_buffer(array.ctypes.data, array.nbytes)
            for key, at, length in (piece for piece in pieces if piece[0].startswith(f"{name}-")):
                if code := store.put_from(key, array.ctypes.data + at, length):
                    raise RuntimeError(f"Mooncake Store does not take {key}: {code}")
            store.unregister_buffer(array.ctypes.data)
    print("ready", flush=True)
    for line in sys.stdin:
        assert line == "read\n"
        descriptor = os.open("/dev/shm", os.O_TMPFILE | os.O_RDWR, 0o600)
        os.ftruncate(descriptor, size)
        target = np.frombuffer(mmap.mmap(descriptor, size), np.uint8)
        os.close(descriptor)
        base = target.ctypes.data
        store.register_buffer(base, size)
        places = np.cumsum([0, *(length for _, _, length in pieces)]).tolist()[:-1]
        began = time.perf_counter()
        found = store.batch_get_into([key for key, _, _ in pieces], [base + at for at in places], [n for _, _, n in pieces])
        seconds = time.perf_counter() - began
        store.unregister_buffer(base)
        whole = b"".join(Path(name).read_bytes()[:4096] for name, _ in files[:1])
        if found != [length for _, _, length in pieces] or target[:4096].tobytes() != whole:
            raise RuntimeError("Mooncake Store has read other bytes")
        del target
        print(seconds, flush=True)


def measure(megabytes: int, rounds: int) -> list[Row]:
    with ExitStack() as ended:
        daemon = ended.enter_context(Daemon(data_listen="127.0.0.1:0", keep_count=1))
        source = ended.enter_context(Node(daemon.endpoint, "source", **MOONCAKE))
        readers = {"http": Node(daemon.endpoint, "http"), "mooncake": Node(daemon.endpoint, "mooncake", **MOONCAKE)}
        for reader in readers.values():
            ended.enter_context(reader)
        until(lambda: len(held(daemon)) == len(readers) + 1)
        size = publish(daemon, megabytes)
        request(daemon, source)
        until(lambda: share(held(daemon)["source"]) == 1.0)
        for reader in readers.values():
            set_drained(daemon, reader, True)
            request(daemon, reader)
        store = ended.enter_context(mooncake_store(stored(daemon)))
        taken: dict[str, list[Taken]] = {way: [] for way in WAYS}
        for _ in range(rounds + 1):
            for way in WAYS:
                taken[way].append(store.read() if way == "store" else read_by_node(daemon, source, readers[way]))
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
    return [
        Row(f"node to node, {size / 1e9:.1f} GB, {way}; peer: Mooncake Store", seconds_of[way], seconds_of["store"], None)
        for way in ("http", "mooncake")
    ]


def main() -> None:
    if len(sys.argv) > 1 and sys.argv[1] in ("put", "get"):
        return store_process(*sys.argv[1:])
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--megabytes", type=int, default=1200)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    try:
        importlib.import_module("mooncake.store")
    except ImportError as error:
        return print(f"skipped: {error}")
    rows = measure(arguments.megabytes, arguments.rounds)
    show(rows)
    if arguments.json:
        write(rows, arguments.json)


if __name__ == "__main__":
    main()
