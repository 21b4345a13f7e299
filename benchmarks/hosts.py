"""One version to and from another host, on the loopback: `python -m benchmarks.hosts [--rounds N] [--json FILE] [--plain]`.

A version with the tensors of Qwen3-0.6B (1.2 GB) is read by HTTP ranges from the daemon's data port, every piece and digest
checked. Peer: the gRPC stream, checked as well. Limit: one plain TCP connection with `sendfile`, which checks nothing. Then the
same over mutual TLS (unless `--plain`), where the limit is Python's ssl module over one connection. Rounds of all ways in turn;
the first of each is left out. CPU seconds are those of both processes.

Then half of the columns of each matrix are read, as under tensor parallelism, where the limit reads as many bytes, and all
tensors in order, as `open_source` does.

One rank publishes the same tensors, whole and as halves of their columns, by HTTP to the data port and by gRPC, until the daemon
has all bytes. The limit is the same TCP connection, in the same rounds.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch
from resharder.client import connect
from resharder.client.rpc.tls import Tls
from resharder.client.trainer.connect import DeclaredTensor
from resharder.converters.geometry.layout import box_size

from benchmarks.host_ways import cpu_of, held_box
from benchmarks.rows import Row, show, write
from benchmarks.shapes import QWEN3_0_6B
from tests.support.daemon import Daemon
from tests.support.secure import Authority, SecureDaemon
from tests.support.weights import random_weights

VERSION = "models/policy/versions/1"
ROLES = {"dns:trainer.test": ["publisher:policy"], "dns:reader.test": ["server:policy"], "dns:probe.test": ["viewer"]}
READER = "reader.test"
WAYS = ("http", "grpc", "tcp")
HELD = ("rows", "columns")


@dataclass(frozen=True)
class Way:
    """A process that reads or publishes, and the id of the process at the other end."""

    process: "subprocess.Popen[str]"
    other: int

    def run(self, step: int) -> tuple[float, float, float]:
        """Read or publish once; return seconds, CPU seconds of both processes, and the seconds until READY of a publish."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        before = cpu_of(self.other)
        self.process.stdin.write(f"{step}\n")
        self.process.stdin.flush()
        took: dict[str, float] = json.loads(self.process.stdout.readline())
        return took["seconds"], took["cpu"] + cpu_of(self.other) - before, took.get("ready", took["seconds"])


@contextmanager
def started(
    *arguments: str, environment: dict[str, str] | None = None
) -> Iterator[tuple["subprocess.Popen[str]", dict[str, Any]]]:
    """Start a process of `host_ways`, and yield it with its first line."""
    command = [sys.executable, "-m", "benchmarks.host_ways", *arguments]
    variables = os.environ | (environment or {})
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=variables) as process:
        assert process.stdout is not None
        try:
            yield process, json.loads(process.stdout.readline())
        finally:
            process.kill()


def publish(daemon: Daemon, weights: dict[str, torch.Tensor], tls: Tls | None) -> Path:
    """Publish a version, and return a file with the bytes of all its safetensors files, in shared memory as they are."""
    with connect(daemon.endpoint, model="policy", job="j", rank=0, world_size=1, config=QWEN3_0_6B, tls=tls) as publisher:
        publisher.attach_tensors([DeclaredTensor(name, torch.bfloat16, tuple(t.shape)) for name, t in weights.items()])
        publisher.publish_tensors(1, list(weights.items())).wait_ready(300)
    whole = daemon.store.parent / "whole"
    with whole.open("wb") as target:
        for file in sorted((daemon.store / "models" / "policy" / "versions" / "00000001").glob("*.safetensors")):
            with file.open("rb") as source:
                shutil.copyfileobj(source, target, 1 << 24)
    return whole


@dataclass(frozen=True)
class Times:
    """Medians of one way."""

    seconds: float
    cpu: float
    ready: float


def timed(ways: dict[str, Way], rounds: int) -> dict[str, Times]:
    """Run all ways in turn, and return the medians of all rounds but the first."""
    taken: dict[str, list[tuple[float, float, float]]] = {name: [] for name in ways}
    for number in range(rounds + 1):
        for position, (name, way) in enumerate(ways.items()):
            taken[name].append(way.run(len(ways) * number + position))
    return {name: Times(*(median(values) for values in zip(*found[1:], strict=True))) for name, found in taken.items()}


def daemon_of(authority: Authority | None) -> Daemon:
    options: dict[str, Any] = {"data_listen": "127.0.0.1:0", "keep_count": 1}
    return Daemon(**options) if authority is None else SecureDaemon(authority, ROLES, **options)


def measure(weights: dict[str, torch.Tensor], rounds: int, authority: Authority | None) -> list[Row]:
    with ExitStack() as ended:
        daemon = ended.enter_context(daemon_of(authority))
        file = publish(daemon, weights, authority.tls("trainer.test") if authority else None)
        size, folder = file.stat().st_size, str(authority.folder) if authority else ""
        environment = authority.environment(READER) if authority else {}
        server, first = ended.enter_context(started("serve", str(file), folder))
        ways = {"tcp": Way(ended.enter_context(started("plain", str(first["port"]), str(size), folder))[0], server.pid)}
        tcp, over = ways["tcp"], "mutual TLS" if authority else "plain TCP"
        half = sum(box_size(held_box(tuple(t.shape), "columns")) * t.element_size() for t in weights.values())
        columns = Way(ended.enter_context(started("plain", str(first["port"]), str(half), folder))[0], server.pid)
        rows = []
        for what, limit, moved, role, held in (
            ("", tcp, size, "version", ["rows"]),
            ("half of all columns, ", columns, half, "version", ["columns"]),
            ("by open_source, ", tcp, size, "source", []),
        ):
            with started(role, daemon.endpoint, VERSION, *held, environment=environment) as (reader, _):
                read = timed({"http": Way(reader, daemon.pid), "tcp": limit}, rounds)
            work = f"read {what}{moved / 1e9:.1f} GB over {over}"
            rows += [
                Row(f"{work}: HTTP, unchecked TCP", read["http"].seconds, None, read["tcp"].seconds),
                Row(
                    f"{work}, CPU of both sides",
                    read["http"].cpu / moved * 1e9,
                    None,
                    read["tcp"].cpu / moved * 1e9,
                    "CPU s/GB",
                ),
            ]
        return rows + [row for held in HELD for row in published(held, size, over, tcp, rounds, authority)]


def published(held: str, size: int, over: str, tcp: Way, rounds: int, authority: Authority | None) -> list[Row]:
    """Return the rows of one rank that publishes what it holds; the limit is measured in the same rounds."""
    environment = authority.environment("trainer.test") if authority else {}
    with ExitStack() as ended:
        daemon, ways = ended.enter_context(daemon_of(authority)), {"tcp": tcp}
        for name in ("http", "grpc"):
            rank, _ = ended.enter_context(started("rank", daemon.endpoint, name, held, environment=environment))
            ways[name] = Way(rank, daemon.pid)
        found = timed(ways, rounds)
    what = f"publish {size / 1e9:.1f} GB as {held} over {over}"
    return [
        Row(f"{what}: HTTP, gRPC, unchecked TCP", *(found[name].seconds for name in WAYS)),
        Row(f"{what}, to READY", *(found[name].ready for name in WAYS)),
        Row(f"{what}, CPU of both sides", *(found[name].cpu / size * 1e9 for name in WAYS), "CPU s/GB"),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--plain", action="store_true", help="without TLS")
    arguments = parser.parse_args()
    weights = random_weights(QWEN3_0_6B, 1, torch.bfloat16)
    rows = measure(weights, arguments.rounds, None)
    if not arguments.plain:
        with tempfile.TemporaryDirectory() as folder:
            authority = Authority(Path(folder))
            authority.tls(READER)
            rows += measure(weights, arguments.rounds, authority)
    show(rows)
    if arguments.json:
        write(rows, arguments.json)


if __name__ == "__main__":
    main()
