"""Boxes go from the host's pages, registered with CUDA, to a GPU and back, and the digests are those of the host."""

import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest
import torch
from resharder.client.gpu.box_digests import BoxDigests
from resharder.client.gpu.cuda_driver import beside_captures
from resharder.client.gpu.host_to_device import HostToDevice
from resharder.client.gpu.pinned_pages import Registered, register
from resharder.client.gpu.streams import on_stream
from resharder.client.transport.base import AssignedSlot, LiveItems
from resharder.client.transport.gpu_buffers import FromGpu
from resharder.client.transport.host_buffers import digests_of
from resharder.converters.geometry.layout import Box, Layout, Piece, Range, TensorSpec, box_index
from resharder.converters.geometry.piece_arrays import pack
from resharder.converters.models.tensor_io import read_piece
from resharder.converters.storage.digest import digest
from resharder.converters.storage.files import MappedFiles, lay_out
from resharder.server.infra.filesystem import unused_elsewhere
from resharder.v1 import resources_pb2

from tests.support.released import ImmediateReleases

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")]

SPECS = {
    name: TensorSpec(name, dtype, shape)
    for name, dtype, shape in (
        ("rows", "BF16", (512, 1024)),
        ("columns", "BF16", (256, 4096)),
        ("experts", "F32", (6, 48, 40)),
        ("odd", "U8", (333,)),
        ("number", "F32", ()),
    )
}
BOXES: dict[str, Box] = {
    "rows": (Range(128, 256, 1), Range(0, 1024, 1)),
    "columns": (Range(0, 256, 1), Range(2048, 2048, 1)),
    "experts": (Range(1, 2, 3), Range(0, 48, 1), Range(8, 24, 1)),
    "odd": (Range(5, 301, 1),),
    "number": (),
}
DTYPES = {"BF16": torch.bfloat16, "F32": torch.float32, "U8": torch.uint8}


def fill(folder: Path, seed: int) -> None:
    """Files of these tensors, or other bytes in those that are there."""
    random = np.random.default_rng(seed)
    files = lay_out(SPECS.values())
    for file in files:
        path = folder / file.path
        with path.open("r+b" if path.exists() else "wb") as opened:
            opened.write(file.header)
            opened.write(random.integers(0, 100, file.size - len(file.header), np.uint8).tobytes())


def stored(folder: Path) -> dict[str, np.ndarray]:
    with MappedFiles(folder, lay_out(SPECS.values())) as files:
        return {name: np.array(files.arrays[name]) for name in SPECS}


def check(folder: Path, layout: Layout, tensors: dict[str, torch.Tensor], digests: list[int]) -> None:
    """Boxes in files and on the device are the same, with these digests."""
    arrays = stored(folder)
    for piece, found in zip(layout.pieces, digests, strict=True):
        part = np.array(arrays[piece.tensor][box_index(piece.box)])
        assert bits(read_piece(tensors, piece)) == part.tobytes(), piece.tensor
        assert found == digest(part, piece.box, SPECS[piece.tensor].shape), piece.tensor


def on_device() -> tuple[Layout, dict[str, torch.Tensor]]:
    """Boxes in tensors of their own, last dimension first for one of them, with room around others."""
    tensors, pieces = {}, []
    for name, box in BOXES.items():
        shape = tuple(r.count for r in box)
        if name == "experts":
            tensors[name] = torch.zeros(tuple(reversed(shape)), dtype=torch.float32, device="cuda").permute(2, 1, 0)
        elif len(shape) == 2:
            tensors[name] = torch.zeros(shape[0], shape[1] + 64, dtype=torch.bfloat16, device="cuda")[:, 32:-32]
        else:
            tensors[name] = torch.zeros(shape, dtype=DTYPES[SPECS[name].dtype], device="cuda")
        pieces.append(Piece(name, box, name, 0, tuple(tensors[name].stride())))
    return Layout(SPECS, tuple(pieces)), tensors


def bits(tensor: torch.Tensor) -> bytes:
    return bytes(tensor.cpu().contiguous().reshape(-1).view(torch.uint8).numpy())


@pytest.fixture
def folder() -> Iterator[Path]:
    with TemporaryDirectory(prefix="resharder-test-", dir="/dev/shm") as made:
        yield Path(made)


def test_boxes_of_read_only_pages_reach_the_gpu_and_have_the_digests_of_the_host(folder: Path) -> None:
    fill(folder, seed=3)
    layout, tensors = on_device()
    read = MappedFiles(folder, lay_out(SPECS.values()))
    registered = register(read.arrays.values(), torch.device("cuda", 0))
    assert registered is not None
    found = HostToDevice(layout, torch.device("cuda", 0)).place(read.arrays, tensors).run()
    registered.close()
    read.close()
    check(folder, layout, tensors, found)


@pytest.mark.parametrize("keep", [True, False], ids=["registered pages", "through buffers"])
def test_a_rank_on_a_gpu_writes_its_boxes_and_nothing_else_into_the_versions_files(keep: bool, folder: Path) -> None:
    layout, tensors = on_device()
    layout = replace(layout, pieces=tuple(p._replace(plus=float(p.tensor == "experts")) for p in layout.pieces))
    slot = AssignedSlot(
        0, tuple(piece.box for piece in layout.pieces), tuple(SPECS[piece.tensor] for piece in layout.pieces), 1 << 20
    )
    folder = folder / "1"
    there = [folder]
    transport = FromGpu(
        torch.device("cuda", 0),
        2,
        lambda: pytest.fail("all of it is on the GPU"),
        next_files=(lambda version: there[0]) if keep else None,
    )
    folder.mkdir()
    for seed in (1, 2, 3):  # later ones with the plan of the first, into the same files at other places
        folder = there[0] = folder.rename(folder.with_name(str(seed)))
        fill(folder, seed)
        before = stored(folder)
        for tensor in tensors.values():
            tensor.copy_(torch.randint(0, 100, tensor.shape, device="cuda").to(tensor.dtype))
        releases = ImmediateReleases()
        items = LiveItems(tensors, layout.pieces)
        version = resources_pb2.Version(name=f"models/m/versions/{seed}", folder=str(folder))
        found = transport.deliver(version, slot, items, releases).digests
        assert releases.files == [file.path for file in lay_out(SPECS.values())]
        assert transport.wait_prepared(60)
        assert transport._kept is None or len(transport._kept._files) == len(releases.files)
        assert all(unused_elsewhere(folder / file) for file in releases.files)
        check(folder, layout, tensors, found)
        after = stored(folder)
        for piece in layout.pieces:
            for arrays in (before, after):
                arrays[piece.tensor][box_index(piece.box)] = 0
        assert all(np.array_equal(before[name], after[name]) for name in SPECS)
    transport.close()


def test_torch_copies_from_every_array_that_is_not_said_to_be_split_by_a_registration(tmp_path: Path) -> None:
    """A copy that begins or ends in registered pages alone is refused: `CUDA error: invalid argument`."""
    page = np.memmap(tmp_path / "pages", np.uint8, "w+", shape=(8 << 12,))
    middle = page[2 << 12 : 5 << 12]
    registered = register([middle], torch.device("cuda", 0))
    assert registered is not None
    try:
        cases = {
            "inside": (middle[100:-100], False),
            "before": (page[: 2 << 12], False),
            "begins before": (page[(2 << 12) - 100 : 3 << 12], True),
            "ends after": (page[4 << 12 : (5 << 12) + 100], True),
            "contains it": (page, True),
        }
        for name, (array, split) in cases.items():
            assert registered.splits(array) == split, name
            there = torch.from_numpy(np.array(array) if split else array).cuda()
            assert np.array_equal(there.cpu().numpy(), array), name
    finally:
        registered.close()


def test_another_thread_registers_pages_while_this_one_captures_a_graph(tmp_path: Path) -> None:
    """As a trainer does between versions. CUDA ends a capture if a thread calls the driver in its usual mode meanwhile."""
    array, ended = np.memmap(tmp_path / "pages", np.uint8, "w+", shape=(8 << 20,)), threading.Event()
    x, graph, pages = torch.zeros(1 << 20, device="cuda"), torch.cuda.CUDAGraph(), list[Registered | None]()

    def register_and_wait() -> None:
        pages.append(register([array], torch.device("cuda", 0)))
        with beside_captures(x.device), on_stream(torch.cuda.Stream(x.device)):
            torch.cuda.current_stream().record_event().synchronize()
        ended.set()

    x + 1  # kernels are loaded before a capture
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        x += 1
        threading.Thread(target=register_and_wait, daemon=True).start()
        assert ended.wait(30)
        x += 1
    graph.replay()
    assert x.sum().item() == 2 * len(x)
    (registered,) = pages
    assert registered is not None
    registered.close()


@pytest.mark.parametrize("elsewhere", ["", "rows", "plus"])
def test_what_a_rank_would_send_has_the_digests_of_the_host_without_being_copied_there(elsewhere: str) -> None:
    layout, tensors = on_device()
    for tensor in tensors.values():
        tensor.random_(0, 100)
    if elsewhere == "rows":
        rows = tensors["rows"] = tensors["rows"].cpu()
        moved = (p._replace(strides=tuple(rows.stride())) if p.tensor == "rows" else p for p in layout.pieces)
        layout = replace(layout, pieces=tuple(moved))
    if elsewhere == "plus":
        layout = replace(layout, pieces=tuple(p._replace(plus=float(p.tensor == "experts")) for p in layout.pieces))
    slot = AssignedSlot(0, tuple(piece.box for piece in layout.pieces), tuple(SPECS[p.tensor] for p in layout.pieces), 1 << 20)
    device = torch.device("cpu" if elsewhere == "rows" else "cuda")  # that which has all of them, or each its own
    digests, items = BoxDigests(pack({0: layout}), device), LiveItems(tensors, layout.pieces)
    first = digests.digests(tensors)
    assert first == digests_of(slot, items)
    tensors["odd"][7] += 1
    tensors["experts"][1, 2, 3] += 1
    second = digests.digests(tensors)
    assert second == digests_of(slot, items)
    assert [a == b for a, b in zip(first, second, strict=True)] == [True, True, False, False, True]
