"""One daemon under the load of many: `python -m benchmarks.load [--minutes N] [--ranks N] [--servers N] [--json FILE]`.

Ranks of one job publish a small model over gRPC again and again, each as soon as the last version is READY; servers follow, as
the wire sees them (tests/support/simulated.py). Meanwhile one process asks what ranks, operators and status pages ask all day, a
call at a time, and takes the time of each from its start to its answer. Once a minute: the slowest of these calls, how many
versions were published, and what memory the daemon has of its own (versions are files, and not in it).

Ranks, servers and calls share the machine with the daemon. They are one caller to it, so its bound on calls a second is off.
"""

import argparse
import json
import multiprocessing
import queue
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass
from multiprocessing.queues import Queue
from multiprocessing.synchronize import Event
from pathlib import Path
from statistics import median
from threading import Thread
from types import SimpleNamespace

import grpc
from resharder.v1 import (
    operator_pb2,
    operator_pb2_grpc,
    publisher_pb2,
    publisher_pb2_grpc,
    resources_pb2,
)
from rich.console import Console
from rich.table import Table

from tests.support.daemon import Daemon

MODEL = "policy"
CONFIG = {"model_type": "none", "architectures": ["NoneForCausalLM"]}
ELEMENTS = 1 << 17  # of BF16, of each rank: 256 KiB
LIMIT = 0.05  # seconds, that 99 of 100 control calls may take
_EVERY = 0.02  # seconds from the end of a control call to the next
_context = multiprocessing.get_context("spawn")
Timed = tuple[str, float]  # call, seconds


@dataclass(frozen=True)
class Minute:
    """`calls`: how long each control call took, by its name."""

    minute: float
    versions: int
    serving_newest: int
    memory_bytes: int
    calls: dict[str, list[float]]

    @property
    def all(self) -> list[float]:
        return [seconds for calls in self.calls.values() for seconds in calls]


# In processes of their own


def publish(endpoint: str, job: str, ranks: list[int], world_size: int, ended: Event) -> None:
    threads = [Thread(target=_publish_as, args=(endpoint, job, rank, world_size, ended)) for rank in ranks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def _publish_as(endpoint: str, job: str, rank: int, world_size: int, ended: Event) -> None:
    """Until it is ended, or another rank was: then nobody completes the version."""
    import torch
    from resharder.client import connect
    from resharder.client.errors import WaitTimeout
    from resharder.client.trainer import DeclaredTensor

    name, weight = f"rank.{rank}.weight", torch.zeros(ELEMENTS, dtype=torch.bfloat16)
    options = {"model": MODEL, "job": job, "world_size": world_size, "config": CONFIG, "transport": "grpc"}
    with connect(endpoint, rank=rank, staging_timeout=30, **options) as publisher:
        publisher.attach_tensors([DeclaredTensor(name, torch.bfloat16, (ELEMENTS,))])
        step = 0
        while not ended.is_set():
            weight.fill_(step % 256)
            handle = publisher.publish_tensors(step, [(name, weight)])
            while not ended.is_set():
                with suppress(WaitTimeout):
                    handle.wait_ready(1.0)
                    break
            step += 1


def follow(endpoint: str, names: list[str], ended: Event) -> None:
    from tests.support.simulated import SimulatedServer

    with ExitStack() as held:
        for name in names:
            channel = held.enter_context(_channel(endpoint))
            held.enter_context(SimulatedServer(SimpleNamespace(channel=channel), name, model=MODEL))  # type: ignore[arg-type]
        ended.wait()


def ask(endpoint: str, timed: "Queue[Timed]", ended: Event) -> None:
    with _channel(endpoint) as channel:
        operator = operator_pb2_grpc.OperatorServiceStub(channel)
        publishers = publisher_pb2_grpc.PublisherServiceStub(channel)
        rank = operator.GetDaemon(operator_pb2.GetDaemonRequest()).publishers[0].name
        page = operator_pb2.ListVersionsRequest(page_size=1)

        def wait() -> Callable[[], object]:
            (newest,) = operator.ListVersions(page).versions
            request = publisher_pb2.WaitVersionRequest(version=newest.name, wait_seconds=0)
            return lambda: publishers.WaitVersion(request)

        calls: dict[str, Callable[[], Callable[[], object]]] = {
            "RenewLease": lambda: lambda: publishers.RenewLease(publisher_pb2.RenewLeaseRequest(publisher=rank, rank=0)),
            "GetDaemon": lambda: lambda: operator.GetDaemon(operator_pb2.GetDaemonRequest()),
            "ListServers": lambda: lambda: operator.ListServers(operator_pb2.ListServersRequest()),
            "WaitVersion": wait,
        }
        while not ended.is_set():
            for name, prepare in calls.items():
                call = prepare()
                began = time.perf_counter()
                call()
                timed.put((name, time.perf_counter() - began))
                ended.wait(_EVERY)


def _channel(endpoint: str) -> grpc.Channel:
    return grpc.insecure_channel(endpoint, options=[("grpc.use_local_subchannel_pool", 1)])


# Here


@contextmanager
def running(processes: list[multiprocessing.context.SpawnProcess], ended: Event) -> Iterator[None]:
    for process in processes:
        process.start()
    try:
        yield
    finally:
        ended.set()
        for process in processes:
            process.join(60)
            if process.is_alive():
                process.kill()


def measure(minutes: float, ranks: int, servers: int, processes: int, console: Console) -> Iterator[Minute]:
    ended, timed = _context.Event(), _context.Queue()
    with Daemon(keep_count=2, caller_rate=0) as daemon:
        where = daemon.endpoint
        spread = [list(range(i, ranks, processes)) for i in range(processes)]
        names = [f"server-{i:02}" for i in range(servers)]
        work = [_context.Process(target=publish, args=(where, "load", some, ranks, ended)) for some in spread]
        work += [_context.Process(target=follow, args=(where, names[i::2], ended)) for i in range(2)]
        asking = _context.Process(target=ask, args=(where, timed, ended))
        with running(work, ended):
            settled(daemon, servers)
            with running([asking], ended):
                yield from _minutes(daemon, timed, minutes)


def settled(daemon: Daemon, servers: int) -> None:
    """Waits until all are there, so that start-up is not in the figures."""
    while _look(daemon)[1] == 0 or len(_servers(daemon)) < servers:
        time.sleep(0.2)


def _minutes(daemon: Daemon, timed: "Queue[Timed]", minutes: float) -> Iterator[Minute]:
    began, step = time.monotonic(), min(1.0, minutes)
    first = _look(daemon)[0]
    for minute in range(1, max(1, round(minutes)) + 1):
        calls: dict[str, list[float]] = {}
        while (left := began + minute * step * 60 - time.monotonic()) > 0:
            with suppress(queue.Empty):
                name, seconds = timed.get(timeout=left)
                calls.setdefault(name, []).append(seconds)
        newest, serving = _look(daemon)
        yield Minute(minute * step, newest - first, serving, memory(daemon), calls)


def _look(daemon: Daemon) -> tuple[int, int]:
    """The newest READY version's number, and how many servers serve something."""
    stub = operator_pb2_grpc.OperatorServiceStub(daemon.channel)
    with suppress(grpc.RpcError):  # before the first publisher there is no model
        listed = stub.ListVersions(operator_pb2.ListVersionsRequest(model=MODEL)).versions
        ready = [version.number for version in listed if version.state == resources_pb2.Version.READY]
        return max(ready, default=0), sum(server.version > 0 for server in _servers(daemon))
    return 0, 0


def _servers(daemon: Daemon) -> list[resources_pb2.Server]:
    return list(operator_pb2_grpc.OperatorServiceStub(daemon.channel).ListServers(operator_pb2.ListServersRequest()).servers)


def memory(daemon: Daemon) -> int:
    status = Path(f"/proc/{daemon.pid}/status").read_text()
    return next(int(line.split()[1]) << 10 for line in status.splitlines() if line.startswith("RssAnon:"))


def percentile(times: list[float], share: float) -> float:
    ordered = sorted(times)
    return ordered[min(len(ordered) - 1, int(len(ordered) * share))]


def show(found: list[Minute], console: Console) -> None:
    table = Table("minute", "versions", "servers in service", "memory", "calls", "p50", "p99", "slowest")
    for one in found:
        p50, p99, slowest = (f"{1e3 * seconds:.1f} ms" for seconds in (median(one.all), percentile(one.all, 0.99), max(one.all)))
        table.add_row(
            f"{one.minute:g}", str(one.versions), str(one.serving_newest), f"{one.memory_bytes / (1 << 20):.0f} MiB",
            str(len(one.all)), p50, p99, slowest,
        )  # fmt: skip
    console.print(table)
    by_call = Table("call", "calls", "p50", "p99", "slowest")
    names = sorted({name for one in found for name in one.calls})
    together = {name: [s for one in found for s in one.calls.get(name, [])] for name in names}
    together["all"] = [seconds for times in list(together.values()) for seconds in times]
    for name, times in together.items():
        shown = (f"{1e3 * seconds:.1f} ms" for seconds in (median(times), percentile(times, 0.99), max(times)))
        by_call.add_row(name, str(len(times)), *shown)
    console.print(by_call)
    p99 = percentile(together["all"], 0.99)
    grown = found[-1].memory_bytes - found[0].memory_bytes
    console.print(f"p99 {1e3 * p99:.1f} ms, aim {1e3 * LIMIT:.0f} ms: {'met' if p99 < LIMIT else 'missed'}")
    console.print(f"memory from the first to the last of these minutes: {grown / (1 << 20):+.1f} MiB")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--ranks", type=int, default=32)
    parser.add_argument("--servers", type=int, default=32)
    parser.add_argument("--processes", type=int, default=4, help="that the ranks are in")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    console, found = Console(width=120), []
    for minute in measure(arguments.minutes, arguments.ranks, arguments.servers, arguments.processes, console):
        found.append(minute)
        p99 = 1e3 * percentile(minute.all, 0.99)
        mib = minute.memory_bytes / (1 << 20)
        console.print(
            f"minute {minute.minute:g}: {minute.versions} versions, {len(minute.all)} calls, p99 {p99:.1f} ms, {mib:.0f} MiB"
        )
    show(found, console)
    if arguments.json:
        arguments.json.write_text(json.dumps([asdict(one) for one in found]) + "\n")


if __name__ == "__main__":
    main()
