"""Invariants after a cycle with any fault."""

import os
import signal
import time
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import xxhash
from resharder.v1 import operator_pb2, operator_pb2_grpc, resources_pb2

from tests.failpoints.cycle import BOUND, IMPORTED, Cycle, Failed
from tests.failpoints.light_server import fingerprint
from tests.failpoints.roles import weights
from tests.support.publishing import read_folder

Version = resources_pb2.Version


def check(cycle: Cycle) -> None:
    """Raise Failed for the first promise that does not hold. Ends the processes of the cycle."""
    versions = listed(cycle)
    ready_versions_are_whole(cycle, versions)
    what_was_served_was_named_rightly(cycle, versions)
    nothing_is_left_behind(cycle, {number for number, version in versions.items() if version.state == Version.READY})


def listed(cycle: Cycle) -> dict[int, resources_pb2.Version]:
    """Every version, none of them UPLOADING after a bounded time."""
    deadline = time.monotonic() + BOUND
    while True:
        cycle.look()
        stub = operator_pb2_grpc.OperatorServiceStub(cycle.daemon.channel)
        found = stub.ListVersions(operator_pb2.ListVersionsRequest(page_size=500), timeout=20).versions
        if all(version.state != Version.UPLOADING for version in found):
            return {version.number: version for version in found}
        if time.monotonic() > deadline:
            raise Failed(f"a version is still UPLOADING: {found}"[:1000])
        time.sleep(0.1)


def expected(step: int) -> str:
    return fingerprint(weights(1 if step == IMPORTED else step).items())


def bits(tensors: Mapping[str, np.ndarray]) -> str:
    """As `fingerprint`, of raw bits."""
    state = xxhash.xxh3_128()
    for name, array in sorted(tensors.items(), key=lambda item: item[0]):
        state.update(name.encode())
        state.update(array.tobytes())
    return state.hexdigest()


def ready_versions_are_whole(cycle: Cycle, versions: Mapping[int, resources_pb2.Version]) -> None:
    for number in cycle.ready:
        version = versions[number]
        if version.state != Version.READY:
            raise Failed(f"version {number} was READY, it is {Version.State.Name(version.state)}: {version.reason}")
    for number, version in versions.items():
        folder = cycle.daemon.store / f"models/policy/versions/{number:08}"
        if version.state == Version.READY and bits(read_folder(folder)) != expected(version.step):
            raise Failed(f"READY version {number} has other bytes than step {version.step}")


def what_was_served_was_named_rightly(cycle: Cycle, versions: Mapping[int, resources_pb2.Version]) -> None:
    for line in cycle.served.read_text().splitlines():
        number, found = line.split()
        if found != expected(versions[int(number)].step):
            raise Failed(f"version {number} was served with other weights than those of step {versions[int(number)].step}")


def nothing_is_left_behind(cycle: Cycle, ready: set[int]) -> None:
    killed = cycle.report.case is not None and cycle.report.case.kind == "kill"
    for actor in cycle.actors.values():
        actor.close()
    cycle.actors.clear()
    folder = cycle.daemon.store / "models" / "policy"
    deadline = time.monotonic() + BOUND
    while left := [str(path) for kind in ("staging", "retired") for path in (folder / kind).glob("*")]:
        if time.monotonic() > deadline:
            raise Failed(f"left in the store: {left}")
        time.sleep(0.1)
    if (stored := {int(path.name) for path in (folder / "versions").iterdir()}) != ready:
        raise Failed(f"READY are {sorted(ready)}, the store has {sorted(stored)}")
    if cycle.node is not None:
        cycle.node.let_go()
        if (status := cycle.node.stop()) != 0:
            raise Failed(f"the node ended with {status}")
    cycle.daemon.let_go()
    if (status := cycle.daemon.stop()) != 0:
        raise Failed(f"the daemon ended with {status}")
    if hidden := [path.name for path in cycle.folder.glob(".out.*") if not (killed and cycle.report.case.place == "operator")]:  # type: ignore[union-attr]
        raise Failed(f"left by an export: {hidden}")
    log = cycle.daemon.log.read_text()
    if "Traceback" in log or "INTERNAL" in log:
        raise Failed(f"the daemon logs a fault of its own: {log[log.find('Traceback') - 1000 :][:3000]}")
    while left := processes(cycle.folder):
        if time.monotonic() > deadline:
            raise Failed(f"left running: {left}")
        time.sleep(0.1)


def processes(folder: Path) -> dict[int, str]:
    """Processes of the cycle, by their environment."""
    found = {}
    for path in Path("/proc").glob("[0-9]*"):
        try:
            if f"RESHARDER_CYCLE={folder}".encode() in (path / "environ").read_bytes():
                found[int(path.name)] = (path / "cmdline").read_bytes().replace(b"\0", b" ").decode()
        except OSError:
            continue
    return found


def end(folder: Path) -> None:
    """SIGKILL what a failed cycle has left."""
    for process in processes(folder):
        os.kill(process, signal.SIGKILL)
