"""Threads whose current GPU is another one than that of their tensors: right bytes, and no context on the other GPU."""

import ctypes
import multiprocessing
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from resharder.client.gpu.schedule import schedule
from resharder.client.gpu.streams import WorkStream, on_stream, use_gpu
from resharder.client.gpu.table import Table
from resharder.client.transport.host_buffers import host_parts
from resharder.converters.geometry.copy_table import copies_of
from resharder.converters.geometry.layout import Box, Layout, Piece, Range, TensorSpec
from resharder.converters.geometry.piece_arrays import pack
from resharder.converters.geometry.plan import plan_pieces
from resharder.converters.quantization.cast import quantise_whole
from resharder.converters.quantization.scheme import Scheme

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available() or torch.cuda.device_count() < 2, reason="needs two NVIDIA GPUs"),
]
OWN = torch.device("cuda", 1)
ROWS, COLUMNS = 512, 1024
BOX: Box = (Range(0, ROWS, 1), Range(0, COLUMNS, 1))


def has_context(gpu: int) -> bool:
    """Return whether this process has a context on a GPU."""
    flags, active = ctypes.c_uint(), ctypes.c_int()
    assert not ctypes.CDLL("libcuda.so.1").cuDevicePrimaryCtxGetState(gpu, ctypes.byref(flags), ctypes.byref(active))
    return bool(active.value)


def on_a_thread(work: Callable[[], Any]) -> Any:
    """Return what `work` returns on a new thread."""
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(work()))
    thread.start()
    thread.join()
    return found[0]


def in_a_stream() -> None:
    stream = WorkStream(OWN)
    stream.begin()
    with stream.work():
        torch.ones(4, device=OWN).add_(1)
    stream.drain()


def in_an_own_stream() -> None:
    with on_stream(torch.cuda.Stream(OWN)):
        torch.ones(4, device=OWN).add_(1)


def compiled() -> None:
    use_gpu(OWN)
    layout = Layout({"t": TensorSpec("t", "BF16", (ROWS, COLUMNS))}, (Piece("t", BOX, "t", 0, (COLUMNS, 1)),))
    copies = copies_of(plan_pieces(pack({0: layout}), pack({0: layout})), [0], [0])
    source, target = (torch.ones(ROWS, COLUMNS, dtype=torch.bfloat16, device=OWN) for _ in range(2))
    at = [np.array([[t.data_ptr()], [0]], np.int64)[:, 0] for t in (source, target)]
    Table(schedule(copies, 0, 0).local, at[0], at[1], OWN).compile()


def contexts(work: str, answers: Any) -> None:
    """Answer whether there is a context on GPU 0 after some work for GPU 1 on a thread of its own."""
    torch.cuda.set_device(OWN)
    torch.ones(4, device=OWN)
    on_a_thread(globals()[work])
    answers.put((has_context(0), has_context(1)))


@pytest.mark.parametrize("work", ["in_a_stream", "in_an_own_stream", "compiled"])
def test_work_on_a_thread_creates_no_context_on_another_gpu(work: str, tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    answers = context.Queue()
    process = context.Process(target=contexts, args=(work, answers))
    process.start()
    assert answers.get(timeout=120) == (False, True)
    process.join()


def test_tensors_are_read_after_their_copies_whichever_gpu_is_current() -> None:
    tensor = torch.zeros(ROWS, COLUMNS, dtype=torch.int16, device=OWN)
    torch.cuda.synchronize(OWN)

    def read() -> list[int]:
        assert torch.cuda.current_device() == 0
        with torch.cuda.device(OWN):
            torch.cuda._sleep(1_000_000_000)  # cycles: about half a second, after which the values are written
        tensor.fill_(7)
        return [int(np.count_nonzero(part.array != 7)) for part in host_parts([(0, tensor)], [BOX], [[BOX]])]

    assert on_a_thread(read) == [0]


@pytest.mark.parametrize("scheme", [Scheme(), Scheme(channels=True)], ids=["blocks", "channels"])
def test_casts_run_on_the_gpu_of_the_tensors_whichever_is_current(scheme: Scheme) -> None:
    whole = torch.randn(ROWS, COLUMNS, generator=torch.Generator().manual_seed(1)).to(torch.bfloat16)

    def cast() -> list[torch.Tensor]:
        assert torch.cuda.current_device() == 0
        there = torch.zeros_like(whole, device=OWN)
        torch.cuda.synchronize(OWN)
        with torch.cuda.device(OWN):
            torch.cuda._sleep(1_000_000_000)  # as above
        there.copy_(whole)
        return [made.cpu() for made in quantise_whole("w.weight", there, scheme)]

    for here, there in zip(quantise_whole("w.weight", whole, scheme), on_a_thread(cast), strict=True):
        assert torch.equal(here.view(torch.uint8), there.view(torch.uint8))
