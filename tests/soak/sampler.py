"""Samples of a run: memory, descriptors, mappings, threads and children of every process, and the files that the run has.

| measure | source in /proc |
|---|---|
| rss, pss, anonymous | `smaps_rollup`; uss is `Private_Clean` and `Private_Dirty` |
| shared | `RssShmem` of `status`: pages of tmpfs files and shared anonymous memory |
| descriptors | `fd`; sockets, pipes, events (`anon_inode`), segments (files in /dev/shm), files (all others) |
| mappings, threads, children | `maps`, `status`, `task/*/children` |
"""

import os
import re
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

from tests.soak.verdict import Sample

if TYPE_CHECKING:
    from tests.chaos.system import System

SHARED_MEMORY = "/dev/shm/"
RUN = "files of the run"
_JOURNALS = ("history", "events")
_SEGMENT = re.compile(rb"(?m)" + re.escape(SHARED_MEMORY.encode()) + rb"[^\n]*")


def sample(system: "System", versions: int) -> Iterator[Sample]:
    """Yield a sample of each process of the run, and one of its files. Processes that end meanwhile are left out."""
    held: set[str] = set()
    for name, pid in processes(system):
        with suppress(OSError, KeyError, psutil.Error):
            yield Sample(name, versions, {**memory(pid), **descriptors(pid), **mappings(pid, held)})
    yield Sample(RUN, versions, {"processes": len(list(processes(system))), **files(system, held)})


def processes(system: "System") -> Iterator[tuple[str, int]]:
    """Yield the name and the id of each process of the daemon, the trainer job and the servers."""
    started = [("daemon", system.daemon.process)]
    started += [("trainer", system.trainer.job.process)] if system.trainer.job else []
    started += [(name, kept.server.process) for name, kept in system.servers.items()]
    for owner, process in started:
        with suppress(psutil.Error):
            if process is not None and process.poll() is None:
                main = psutil.Process(process.pid)
                seen = Counter[str]()
                for one in [main, *main.children(recursive=True)]:
                    with suppress(psutil.Error):
                        name = named(owner, " ".join(one.cmdline()), one, main.pid)
                        seen[name] += 1
                        yield (name if seen[name] == 1 else f"{name} {seen[name]}"), one.pid


def named(owner: str, command: str, process: psutil.Process, started: int) -> str:
    """Return the name of a process of the daemon, the trainer or a server. `started`: the one that the others are children of."""
    if owner == "daemon":
        return "daemon" if "tests.support.forked" in command else "daemon, helper"
    if owner == "trainer":
        if process.pid == started:
            return "torchrun"
        return "rank" if "tests.support.torchrun" in command else "trainer, helper"
    if found := re.search(r"VLLM::(Worker\w*|EngineCore|APIServer\w*)", command):
        return f"{owner}, {found[1]}"
    return f"{owner}, API server" if "vllm_serve" in command else f"{owner}, helper"


def memory(pid: int) -> dict[str, float]:
    """Return the memory of a process in bytes, and its threads and children. Raises OSError, KeyError."""
    rolled, status = fields(Path(f"/proc/{pid}/smaps_rollup").read_text()), fields(Path(f"/proc/{pid}/status").read_text())
    children = sum(len(path.read_text().split()) for path in Path(f"/proc/{pid}/task").glob("*/children"))
    return {
        "rss": rolled["Rss"] * 1024,
        "pss": rolled["Pss"] * 1024,
        "uss": (rolled["Private_Clean"] + rolled["Private_Dirty"]) * 1024,
        "anonymous": rolled["Anonymous"] * 1024,
        "shared": status["RssShmem"] * 1024,
        "threads": status["Threads"],
        "children": children,
    }


def fields(text: str) -> dict[str, float]:
    """Return the numeric fields of a file such as /proc/PID/status, in their units."""
    found = re.findall(r"(?m)^(\w+):\s+(\d+)(?: kB)?$", text)
    return {name: float(value) for name, value in found}


def descriptors(pid: int) -> dict[str, float]:
    """Return the number of descriptors of a process by kind. Raises OSError."""
    kinds = Counter[str]()
    for path in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(OSError):
            kinds[kind(os.readlink(path))] += 1
    return {"descriptors": kinds.total(), **{name: kinds[name] for name in ("sockets", "pipes", "events", "segments", "files")}}


def kind(target: str) -> str:
    """Return the kind of a descriptor, by what its link in /proc/PID/fd names."""
    for prefix, found in (("socket:", "sockets"), ("pipe:", "pipes"), ("anon_inode:", "events")):
        if target.startswith(prefix):
            return found
    return "segments" if target.startswith((SHARED_MEMORY, "/memfd:")) else "files"


def mappings(pid: int, held: set[str]) -> dict[str, float]:
    """Return the number of mappings of a process, and add the files in shared memory to `held`. Raises OSError."""
    text = Path(f"/proc/{pid}/maps").read_bytes()
    held |= {found.decode(errors="replace") for found in _SEGMENT.findall(text)}
    return {"mappings": text.count(b"\n")}


def files(system: "System", held: set[str]) -> dict[str, float]:
    """Return files and bytes of the store, of staging folders, of other mapped files in shared memory, of journals and logs.

    Args:
        system: The processes of the run.
        held: Files in shared memory that a process has mapped; a deleted one counts too, without its bytes.
    """
    store, own = system.daemon.store, f"{system.daemon.folder}/"
    elsewhere = sorted(path for path in held if not path.startswith(own))
    staging = [size for kept in system.servers.values() for size in sizes(kept.staging)]
    versions = sizes(store / "models")
    logs = [size for folder in (system.folder, system.daemon.folder) for size in sizes(folder, "*.log", "log")]
    journals = {f"{name} bytes": sum(sizes(store, f"{name}*.jsonl")) for name in _JOURNALS}
    return {
        "store files": len(versions),
        "store bytes": sum(versions),
        "staging files": len(staging),
        "staging bytes": sum(staging),
        "held files": len(elsewhere),
        "held bytes": sum(size_of(Path(path)) or 0 for path in elsewhere),
        "fleets bytes": sum(sizes(store / "fleets")),
        **journals,
        "log bytes": sum(logs),
    }


def sizes(folder: Path, *patterns: str) -> list[int]:
    """Return the size of each file below a folder whose name matches one of the patterns; of all files without patterns.

    Folders and files that are removed meanwhile are left out.
    """
    paths = [Path(parent, name) for parent, _, names in os.walk(folder) for name in names]
    wanted = [path for path in paths if not patterns or any(path.match(pattern) for pattern in patterns)]
    return [size for path in wanted for size in [size_of(path)] if size is not None]


def size_of(path: Path) -> int | None:
    """Return the size of a regular file; None if there is none."""
    with suppress(OSError):
        return path.stat().st_size if path.is_file() else None
    return None
