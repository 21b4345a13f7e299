"""One daemon under load: `python -m benchmarks.load [--minutes N] [--every SECONDS] [--ranks N] [--servers N] …`.

Ranks of one job publish a small model over gRPC, all at the same time, a version every few seconds. Simulated servers
(tests/support/simulated_server.py) follow. Meanwhile one process makes the usual calls of ranks, operators and status pages, and
measures each from its start to its answer. Once a minute it prints the slowest of these calls, the number of published versions,
and the daemon's anonymous memory, which does not include versions.

The daemon has a core of its own. Everything else shares the others, where ranks and servers have a lower priority than the
measuring process, so that it waits for the daemon only. `--every 0` is the opposite, an overloaded machine: each version begins
when the previous one is READY, and no core is reserved. All clients are one caller to the daemon, so its bound on the rate of
calls is off.
"""

import argparse
import json
import multiprocessing
import os
import queue
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass
from functools import partial
from itertools import cycle
from multiprocessing.queues import Queue
from multiprocessing.synchronize import Event
from pathlib import Path
from statistics import median
from threading import Thread
from types import SimpleNamespace

import grpc
from resharder.v1 import operator_pb2, operator_pb2_grpc, publisher_pb2, publisher_pb2_grpc, resources_pb2
from rich.console import Console
from rich.table import Table

from tests.support.daemon import Daemon

MODEL = "policy"
CONFIG = {"model_type": "none", "architectures": ["NoneForCausalLM"]}
ELEMENTS = 1 << 17  # of BF16, of each rank: 256 KiB
LIMIT = 0.05  # seconds; bound on the 99th percentile of control calls
_PAUSE = 0.02  # seconds from the end of a control call to the next
_NICE = 10  # of ranks and servers, where they share cores with the process that measures
_context = multiprocessing.get_context("spawn")
Timed = tuple[str, float]  # call, seconds


@dataclass(frozen=True)
class Minute:
    """Measurements of one minute. `calls`: seconds of each control call, by its name."""

    minute: float
    versions: int
    serving_newest: int
    memory_bytes: int
    calls: dict[str, list[float]]

    @property
    def all(self) -> list[float]:
        return [seconds for calls in self.calls.values() for seconds in calls]


# Run in processes of their own


def publish(endpoint: str, job: str, ranks: list[int], world_size: int, every: float, ended: Event) -> None:
    os.nice(_NICE)
    threads = [Thread(target=_publish_as, args=(endpoint, job, rank, world_size, every, ended)) for rank in ranks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def _publish_as(endpoint: str, job: str, rank: int, world_size: int, every: float, ended: Event) -> None:
    """Until it is ended, or another rank was: then nobody completes the version."""
    import torch
    from resharder.client import connect
    from resharder.client.errors import WaitTimeout
    from resharder.client.trainer.connect import DeclaredTensor

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
            if every:
                ended.wait(every - time.monotonic() % every)  # the same moment for all ranks


def follow(endpoint: str, names: list[str], ended: Event) -> None:
    from tests.support.simulated_server import SimulatedServer

    os.nice(_NICE)
    with ExitStack() as held:
        for name in names:
            channel = held.enter_context(_channel(endpoint))
            held.enter_context(SimulatedServer(SimpleNamespace(channel=channel), name, model=MODEL))  # type: ignore[arg-type]
        ended.wait()


def ask(endpoint: str, timed: "Queue[Timed]", ended: Event) -> None:
    """Make a call every `_PAUSE` seconds, answered or not, so that a slow call does not hide others."""
    with _channel(endpoint) as channel:
        operator = operator_pb2_grpc.OperatorServiceStub(channel)
        publishers = publisher_pb2_grpc.PublisherServiceStub(channel)
        rank = operator.GetDaemon(operator_pb2.GetDaemonRequest()).publishers[0].name
        (newest,) = operator.ListVersions(operator_pb2.ListVersionsRequest(page_size=1)).versions
        renewal = publisher_pb2.RenewLeaseRequest(publisher=rank, rank=0)
        look = publisher_pb2.WaitVersionRequest(version=newest.name, serving=True, wait_seconds=0)
        calls: dict[str, Callable[[], grpc.Future]] = {
            "RenewLease": lambda: publishers.RenewLease.future(renewal),
            "GetDaemon": lambda: operator.GetDaemon.future(operator_pb2.GetDaemonRequest()),
            "ListServers": lambda: operator.ListServers.future(operator_pb2.ListServersRequest()),
            "WaitVersion": lambda: publishers.WaitVersion.future(look),
        }
        for name, call in cycle(calls.items()):
            call().add_done_callback(partial(_answered, timed, name, time.perf_counter()))
            if ended.wait(_PAUSE):
                return


def _answered(timed: "Queue[Timed]", name: str, began: float, answer: grpc.Future) -> None:
    seconds = time.perf_counter() - began
    timed.put((name if answer.code() is grpc.StatusCode.OK else f"{name}: {answer.code().name}", seconds))


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


@contextmanager
def on_a_core(alone: bool) -> Iterator[Daemon]:
    """Run a daemon; with `alone`, on the first core, which later processes of this one do not use."""
    cores = sorted(os.sched_getaffinity(0))
    if alone and len(cores) < 2:
        raise SystemExit("expected two cores, one of them for the daemon: take --every 0 on one")
    try:
        if alone:
            os.sched_setaffinity(0, cores[:1])
        with Daemon(keep_count=2, caller_rate=0) as daemon:
            if alone:
                os.sched_setaffinity(0, cores[1:])
            yield daemon
    finally:
        os.sched_setaffinity(0, cores)


def measure(minutes: float, every: float, ranks: int, servers: int, processes: int) -> Iterator[Minute]:
    ended, timed = _context.Event(), _context.Queue()
    with on_a_core(alone=every > 0) as daemon:
        where = daemon.endpoint
        spread = [list(range(i, ranks, processes)) for i in range(processes)]
        names = [f"server-{i:02}" for i in range(servers)]
        publishing = [_context.Process(target=publish, args=(where, "load", some, ranks, every, ended)) for some in spread]
        following = [_context.Process(target=follow, args=(where, names[i::2], ended)) for i in range(2)]
        asking = _context.Process(target=ask, args=(where, timed, ended))
        with running(publishing, ended):
            _wait(lambda: _look(daemon)[0] > 0)
            with running(following, ended):
                _wait(lambda: len(_servers(daemon)) == servers)
                with running([asking], ended):
                    yield from _minutes(daemon, timed, minutes)


def _wait(there: Callable[[], bool]) -> None:
    """Wait for the initial state, which the figures do not include."""
    while not there():
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
    """Return the newest READY version's number, and the number of servers that serve a version."""
    stub = operator_pb2_grpc.OperatorServiceStub(daemon.channel)
    with suppress(grpc.RpcError):  # there is no model before the first publisher
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
    parser.add_argument(
        "--every", type=float, default=2, help="seconds from version to version; 0: as fast as it goes, cores shared"
    )
    parser.add_argument("--ranks", type=int, default=32)
    parser.add_argument("--servers", type=int, default=32)
    parser.add_argument("--processes", type=int, default=4, help="that the ranks are in")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    console, found = Console(width=120), []
    load = arguments.minutes, arguments.every, arguments.ranks, arguments.servers, arguments.processes
    for minute in measure(*load):
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
