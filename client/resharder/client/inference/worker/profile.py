"""A profile of one install in one worker: torch.profiler around `apply`, then its trace and its table to the daemon.

Whatever fails here is said in the profile's place, and the install goes on as any other.
"""

import logging
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from resharder.client.errors import ResharderError
from resharder.client.rpc.channel import Channel
from resharder.v1 import resources_pb2, server_pb2, server_pb2_grpc

logger = logging.getLogger("vllm.resharder.profile")
MOST_BYTES = 60 << 20  # of a trace; the daemon takes 64 MiB with the table
_ROWS = 60


@contextmanager
def profiled(channel: Channel, server: str, rank: int, install: str, device: torch.device) -> Iterator[None]:
    """Profiles the block, and has its profile sent from a thread of its own. Nothing is sent of a block that raises."""
    profile = resources_pb2.Profile(rank=rank, install=install)
    profiler = None
    try:
        profiler = _started(device)
    except Exception as error:
        profile.error = f"{type(error).__name__}: {error}"
    try:
        yield
    except BaseException:
        with suppress(Exception):
            profiler.stop() if profiler is not None else None
        raise
    if profiler is not None:
        try:
            profiler.stop()
        except Exception as error:
            profiler, profile.error = None, f"{type(error).__name__}: {error}"
    work = (channel, server, profiler, profile, device)
    threading.Thread(target=_send, args=work, name="resharder-profile", daemon=True).start()


def _started(device: torch.device) -> Any:
    if torch.autograd.profiler._is_profiler_enabled:  # a second one would take the first one's events
        raise RuntimeError("expected no other profiler in this process, one is running")
    kinds = [torch.profiler.ProfilerActivity.CPU]
    if device.type == "cuda":
        kinds.append(torch.profiler.ProfilerActivity.CUDA)
    profiler = torch.profiler.profile(activities=kinds)
    profiler.start()
    return profiler


def _send(channel: Channel, server: str, profiler: Any, profile: resources_pb2.Profile, device: torch.device) -> None:
    try:
        if profiler is not None:
            _fill(profile, profiler, device)
    except Exception as error:
        profile.error = f"{type(error).__name__}: {error}"
    try:
        stub = server_pb2_grpc.ServerServiceStub(channel.grpc)
        channel.call(stub.PutProfile, server_pb2.PutProfileRequest(server=server, profile=profile), timeout=120, patience=30)
    except ResharderError as error:
        logger.error("the profile of install %s is lost: %s", profile.install, error)


def _fill(profile: resources_pb2.Profile, profiler: Any, device: torch.device) -> None:
    times = "self_device_time_total" if device.type == "cuda" else "self_cpu_time_total"
    profile.table = profiler.key_averages().table(sort_by=times, row_limit=_ROWS, max_name_column_width=60)
    with tempfile.TemporaryDirectory(prefix="resharder-profile-") as folder:
        path = Path(folder) / "trace.json.gz"
        profiler.export_chrome_trace(str(path))
        if (size := path.stat().st_size) > MOST_BYTES:
            profile.error = f"its trace has {size} bytes, more than the {MOST_BYTES} that are sent"
        else:
            profile.trace = path.read_bytes()
