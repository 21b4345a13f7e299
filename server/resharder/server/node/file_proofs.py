"""Proofs of files that ranks have written: digests of the tensors, and checksums of the pieces."""

import os
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path

from resharder.converters.storage.files import FileLayout, MappedFiles
from resharder.server.infra.checksums import part_checksums
from resharder.server.infra.filesystem import ReadLease, read_lease
from resharder.server.ingest.homes import FileProof
from resharder.server.store.digests import digest_tensors

PATIENCE = 10.0
"""Seconds to wait for the last rank to close the files."""
THREADS = max(1, min(4, os.cpu_count() or 1))
"""Threads of a verification."""
_PAUSE = 0.005
SetProof = dict[str, FileProof]
"""Proof of each file of a set."""


class ProofRefused(Exception):
    """Files that cannot be verified. The message has the reason."""


def prove_files(
    folder: Path, files: Sequence[FileLayout], patience: float = PATIENCE, clock: Callable[[], float] = time.monotonic
) -> SetProof:
    """Digest files once no process has them open for writing, none of which opens them until the end.

    Args:
        folder: Folder of the files.
        files: Their layouts.
        patience: Seconds to wait for other processes that have the files open for writing.
        clock: Monotonic clock in seconds.

    Raises ProofRefused, OSError.
    """
    found = dict[str, FileProof]()
    with ExitStack() as stack:
        leases = _leases(folder, files, clock() + patience, patience, clock)
        for lease in leases:
            stack.callback(lease.close)
        for file in files:
            with (folder / file.path).open("rb", buffering=0) as opened:
                if opened.read(len(file.header)) != file.header:
                    raise ProofRefused(f"{file.path}: its header was overwritten")
        with MappedFiles(folder, files) as maps:
            digests = digest_tensors(maps, THREADS)
        for file in files:
            checksums = part_checksums(folder / file.path, file.size)
            found[file.path] = FileProof(tuple(digests[name] for name in file.by_name), checksums)
        if broken := [file.path for file, lease in zip(files, leases, strict=True) if not lease.is_intact]:
            raise ProofRefused(f"a process has opened {broken[0]} for writing while it was verified")
    return found


def _leases(
    folder: Path, files: Sequence[FileLayout], deadline: float, patience: float, clock: Callable[[], float]
) -> list[ReadLease]:
    """Take a lease on every file. Raises ProofRefused if a process still has one open for writing at the deadline."""
    leases = list[ReadLease]()
    for file in files:
        while (lease := read_lease(folder / file.path)) is None:
            if clock() > deadline:
                for taken in leases:
                    taken.close()
                raise ProofRefused(f"a process still has {file.path} open for writing after {patience:g} s")
            time.sleep(_PAUSE)
        leases.append(lease)
    return leases
