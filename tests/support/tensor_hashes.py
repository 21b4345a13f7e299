"""Hashes of every tensor that the models of a vLLM server's workers reach, by a plugin that uses nothing of Resharder.

socket = new_socket()
with VllmServer(folder, env={"VLLM_PLUGINS": "tensor_hashes", "TENSOR_HASHES": socket, "PYTHONPATH": PLUGINS}):
    differing(hashes(socket, workers=2), wanted)
"""

import tempfile
import time
from collections.abc import Sequence
from multiprocessing.connection import Client
from pathlib import Path

PLUGINS = str(Path(__file__).with_name("raw_mode"))
Held = list[dict[str, str]]  # hashes by name, of each worker


def new_socket() -> str:
    """Return a path for the sockets of one server."""
    return f"{tempfile.mkdtemp(prefix='hashes-')}/worker"


def hashes(socket: str, workers: int = 1, seconds: float = 60.0) -> Held:
    """Return the hashes of all workers. Raises RuntimeError if one of them does not tell."""
    found, end = Held(), time.monotonic() + seconds
    while len(found) < workers:
        try:
            with Client(f"{socket}-{len(found)}", "AF_UNIX") as worker:
                found.append(worker.recv())
        except (FileNotFoundError, ConnectionRefusedError) as error:
            if time.monotonic() > end:
                raise RuntimeError(f"expected worker {len(found)} to tell its hashes: is the plugin loaded?") from error
            time.sleep(0.1)
    if errors := [one["error"] for one in found if "error" in one]:
        raise RuntimeError(f"a worker could not hash its tensors: {errors}")
    return found


def differing(found: Sequence[dict[str, str]], wanted: Sequence[dict[str, str]]) -> list[str]:
    """Return the names of tensors that differ, or that one side alone has."""
    if len(found) != len(wanted):
        raise ValueError(f"expected {len(wanted)} workers, got {len(found)}")
    pairs = zip(found, wanted, strict=True)
    return [name for a, b in pairs for name in sorted(a.keys() | b.keys()) if a.get(name) != b.get(name)]
