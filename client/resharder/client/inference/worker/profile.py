"""Profile of one install in one worker: torch.profiler around `apply`; its trace and table are sent to the daemon.

An error of the profiler is sent in place of the profile and does not affect the install.
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

logger = logging.getLogger("resharder.inference.profile")
MOST_BYTES = 60 << 20  # of a trace; the daemon accepts 64 MiB for trace and table
_ROWS = 60


@contextmanager
def profiled(channel: Channel, server: str, rank: int, install: str, device: torch.device) -> Iterator[None]:
    """Profile the block and send the profile from a new thread. Nothing is sent if the block raises."""
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
    if torch.autograd.profiler._is_profiler_enabled:  # a second profiler would take the events of the first
        raise RuntimeError("another profiler is running in this process")
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
        logger.error("cannot send the profile of install %s: %s", profile.install, error)


def _fill(profile: resources_pb2.Profile, profiler: Any, device: torch.device) -> None:
    times = "self_device_time_total" if device.type == "cuda" else "self_cpu_time_total"
    profile.table = profiler.key_averages().table(sort_by=times, row_limit=_ROWS, max_name_column_width=60)
    with tempfile.TemporaryDirectory(prefix="resharder-profile-") as folder:
        path = Path(folder) / "trace.json.gz"
        profiler.export_chrome_trace(str(path))
        if (size := path.stat().st_size) > MOST_BYTES:
            profile.error = f"expected a trace of at most {MOST_BYTES} bytes, got {size}"
        else:
            profile.trace = path.read_bytes()
