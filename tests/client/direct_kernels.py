"""The direct path's kernels against the host: `TRITON_INTERPRET=1 python -m tests.client.direct_kernels ROUNDS`."""

import random
import sys
import tempfile
from pathlib import Path

import numpy as np
import torch
from numpy.lib.array_utils import byte_bounds
from resharder.client.gpu import move_kernel
from resharder.client.gpu.device_to_host import DeviceToHost
from resharder.client.gpu.device_to_pages import DeviceToPages
from resharder.client.gpu.digest import Digester
from resharder.client.gpu.host_to_device import HostToDevice
from resharder.client.gpu.table import _on_host
from resharder.client.transport.at_home import AtHome, PieceSubset
from resharder.client.transport.base import AssignedSlot, Delivered, LiveItems
from resharder.client.transport.gpu_buffers import FromGpu
from resharder.client.transport.host_buffers import digests_of
from resharder.converters.geometry.layout import ITEM_SIZES, Box, Layout, Piece, Range, TensorSpec, box_index, box_shape
from resharder.converters.models.tensor_io import read_piece, view_of
from resharder.converters.storage.digest import digest
from resharder.converters.storage.files import BITS, MappedFiles, lay_out
from resharder.v1 import resources_pb2

from tests.support.released import ImmediateReleases

SHAPES = {
    "F64": [(6, 10), (3, 2, 8), ()],
    "F32": [(9, 40), (3, 5, 16), (7,), ()],
    "BF16": [(150, 64), (4, 6, 24), (33,), (2, 70, 513)],
    "U8": [(5, 48), (17,)],
}
KINDS = {
    "F64": (torch.float64, torch.uint64),
    "F32": (torch.float32, torch.uint32),
    "BF16": (torch.bfloat16, torch.uint16),
    "U8": (torch.uint8, torch.uint8),
}
TILES = ((16, 5, 7, 3), (16, 1, 8192, 0), (8, 3, 100, 1), (4, 70, 1, 2), (2, 9, 11, 5), (1, 40, 3, 4))


def tiles_are_moved_as_the_host_does() -> None:
    source = torch.arange(1 << 16, dtype=torch.int32).view(torch.uint8)
    for word, rows, width, gap in TILES:
        outcome = torch.zeros(2, 1 << 17, dtype=torch.uint8)
        row = [source.data_ptr(), 0, rows, width, width + gap, width + 1]
        table = torch.tensor([row, [row[0] + 64 * word, 1 << 16, *row[2:]]] if width < 8192 else [row])
        move_kernel.move(table, word, 0, outcome[0].data_ptr(), 64)
        for from_, to in _on_host(table.numpy(), word, 0, outcome[1].data_ptr()):
            np.copyto(to, from_)
        assert outcome[0].any(), word
        assert torch.equal(*outcome), word


def some_box(shape: tuple[int, ...]) -> Box:
    ranges = []
    for n in shape:
        start, step = random.randrange(n) // 8 * 8, random.choice((1, 1, 1, 3))
        count = random.randint(1, (n - 1 - start) // step + 1)
        ranges.append(Range(start, count, step if count > 1 else 1))
    return tuple(ranges)


Made = tuple[Layout, dict[str, torch.Tensor], list[int]]


def some_layout() -> Made:
    """Boxes with something in them, and their digests."""
    tensors, pieces, specs, wanted = dict[str, torch.Tensor](), list[Piece](), dict[str, TensorSpec](), list[int]()
    for dtype, shapes in SHAPES.items():
        for shape in shapes:
            for whole in (True, False):
                name, (kind, unsigned) = f"{dtype}{shape}", KINDS[dtype]
                box = tuple(Range(0, n) for n in shape) if whole else some_box(shape)
                bits = torch.randint(0, 256, (*box_shape(box), kind.itemsize), dtype=torch.uint8)
                values = bits.view(kind).squeeze(-1)
                if values.dim() > 1 and not whole and random.random() < 0.5:
                    values = values.mT.contiguous().mT
                specs[name], tensors[f"{name}{whole}"] = TensorSpec(name, dtype, shape), values
                pieces.append(Piece(name, box, f"{name}{whole}", 0, tuple(values.stride())))
                wanted.append(digest(view_of(values, pieces[-1].view(box)).contiguous().view(unsigned).numpy(), box, shape))
    return Layout(specs, tuple(pieces)), tensors, wanted


def digests_are_those_of_the_host() -> None:
    layout, tensors, wanted = some_layout()
    assert Digester(layout, tensors, torch.device("cpu")).digests() == wanted


def digests_of_what_arrives_in_parts_are_the_same() -> None:
    """Twice; tensors hold something else until they have arrived, and those that nothing is said of until the end."""
    layout, tensors, wanted = some_layout()
    complete = {name: random.randrange(3) for name in tensors if random.random() < 0.8}
    proof = Digester(layout, tensors, torch.device("cpu"), complete)
    held = {name: tensor.clone() for name, tensor in tensors.items()}
    for _ in range(2):
        for tensor in tensors.values():
            tensor.zero_()
        proof.begin()
        for number in (0, 1, 2, None):
            for name in (name for name in tensors if complete.get(name) == number):
                tensors[name].copy_(held[name])
            if number is not None:
                proof.arrived(number)
        for name in complete:  # read by now
            tensors[name].zero_()
        assert proof.digests() == wanted


def bits_of(tensor: torch.Tensor) -> bytes:
    return bytes(tensor.contiguous().reshape(-1).view(torch.uint8).numpy())


def boxes_go_to_the_hosts_memory_and_back() -> None:
    """One box of each HF tensor, so that none is written twice."""
    layout, tensors, wanted = some_layout()
    chosen = [i for i in range(len(wanted)) if random.random() < 0.5 or i % 2 == 0]
    chosen = [i for i in chosen if i % 2 == 0 or i - 1 not in chosen]
    layout = Layout(layout.tensors, tuple(layout.pieces[i] for i in chosen))
    arrays = {name: np.zeros(spec.shape, BITS[ITEM_SIZES[spec.dtype]]) for name, spec in layout.tensors.items()}
    cpu = torch.device("cpu")
    assert DeviceToHost(Layout({}, ()), cpu, 1, {}).run(np.zeros((0, 2), np.int64), {}) == []
    for threads, size in ((1, 64 << 20), (3, 160 << 10)):
        for array in arrays.values():
            array[...] = 0
        groups, complete = {name: i % 5 for i, name in enumerate(arrays)}, list[int]()
        copy = DeviceToHost(layout, cpu, threads, groups, size)
        target = np.array([byte_bounds(arrays[name]) for name in copy.targets], np.int64)
        assert copy.run(target, tensors, complete.append) == [wanted[i] for i in chosen]
        assert complete == list(range(1 + max(groups[name] for name in copy.targets)))
    for size in (64 << 20, 160 << 10):
        for array in arrays.values():
            array[...] = 0
        complete.clear()
        straight = DeviceToPages(layout, cpu, groups, size)
        target = np.array([byte_bounds(arrays[name]) for name in straight.targets], np.int64)
        assert straight.run(target, tensors, complete.append) == [wanted[i] for i in chosen]
        assert complete == list(range(1 + max(groups[name] for name in straight.targets)))
    held = {name: tensor.clone() for name, tensor in tensors.items()}
    for piece in layout.pieces:
        tensors[piece.local].zero_()
    assert HostToDevice(layout, cpu).place(arrays, tensors).run() == [wanted[i] for i in chosen]
    assert all(bits_of(held[name]) == bits_of(tensor) for name, tensor in tensors.items())
    for piece in layout.pieces:
        part = np.array(arrays[piece.tensor][box_index(piece.box)])
        assert part.tobytes() == bits_of(tensors[piece.local]), piece
        arrays[piece.tensor][box_index(piece.box)] = 0
    assert not any(array.any() for array in arrays.values())


def a_slot_goes_into_files_of_any_version_and_place(way: str) -> None:
    """With the plan of the first version, into other files, from tensors that have moved; constants are added.

    Ways: all through buffers; into pages that are registered at their first use; or that are registered before their version.
    """
    layout, tensors, _ = some_layout()
    pieces = [piece._replace(plus=float(i % 2 and piece.tensor[0] != "U")) for i, piece in enumerate(layout.pieces[::2])]
    specs = tuple(layout.tensors[piece.tensor] for piece in pieces)
    slot = AssignedSlot(0, tuple(piece.box for piece in pieces), specs, 1 << 20)
    following = list[Path]()
    next_files = None if way == "buffers" else lambda version: following[0]
    transport = FromGpu(torch.device("cpu"), 2, lambda: NotImplemented, next_files=next_files)
    files, plans = lay_out(layout.tensors.values(), 8 << 10), set()
    with tempfile.TemporaryDirectory() as first, tempfile.TemporaryDirectory() as second:
        for folder in (first, second):
            for file in files:
                (Path(folder) / file.path).write_bytes(file.header + bytes(file.size - len(file.header)))
        for number, folder in enumerate((first, second, first)):
            following[:] = [Path(second if folder == first else first)]
            version = resources_pb2.Version(name=f"models/m/versions/{number}" if way == "before" else "", folder=folder)
            tensors = {name: tensor.clone().copy_(torch.randint(0, 100, tensor.shape)) for name, tensor in tensors.items()}
            releases = ImmediateReleases()
            found = transport.deliver(version, slot, LiveItems(tensors, pieces), releases).digests
            assert transport.wait_prepared(30)
            used = {"straight", "through_buffers"} & vars(transport._planned).keys()
            assert (
                used
                == {
                    "buffers": {"through_buffers"},
                    "at once": {"straight"},
                    "before": {"through_buffers", *(["straight"] if number else [])},
                }[way]
            )
            assert releases.files == [file.path for file in files if file.by_name.keys() & {spec.name for spec in specs}]
            with MappedFiles(Path(folder), files) as mapped:
                for piece, spec, value in zip(pieces, specs, found, strict=True):
                    part = np.array(mapped.arrays[spec.name][box_index(piece.box)])
                    assert bits_of(read_piece(tensors, piece)) == part.tobytes(), piece
                    assert value == digest(part, piece.box, spec.shape), piece
            plans.add(id(transport._planned))
        assert len(plans) == 1
        transport.close()


class Sent:
    """A way to the daemon on which boxes are read and digested."""

    def deliver(
        self, version: resources_pb2.Version, slot: AssignedSlot, items: LiveItems, releases: ImmediateReleases
    ) -> Delivered:
        return Delivered(digests_of(slot, items), "http")


def a_slot_is_divided_between_the_files_of_a_node_and_the_daemon() -> None:
    """The GPU's plan is that of the boxes at home, from version to version."""
    layout, tensors, _ = some_layout()
    pieces = list(layout.pieces[::2])
    specs = tuple(layout.tensors[piece.tensor] for piece in pieces)
    home = tuple(i for i, spec in enumerate(specs) if len(spec.name) % 2 or i % 3)
    names = {specs[i].name for i in home}
    home = tuple(i for i, spec in enumerate(specs) if spec.name in names)
    slot = AssignedSlot(0, tuple(piece.box for piece in pieces), specs, 1 << 20, "nodes/a", home)
    memory, subsets = FromGpu(torch.device("cpu"), 2, lambda: NotImplemented), (PieceSubset(), PieceSubset())
    files, plans = lay_out([layout.tensors[name] for name in names]), set()
    for _ in range(2):
        with tempfile.TemporaryDirectory() as folder:
            for file in files:
                (Path(folder) / file.path).write_bytes(file.header + bytes(file.size - len(file.header)))
            items, releases = LiveItems(tensors, pieces), ImmediateReleases()
            transport = AtHome(folder, slot.divided(gathers=False), memory, Sent(), subsets)
            found = transport.deliver(resources_pb2.Version(folder="elsewhere"), slot, items, releases)
            assert found.digests == digests_of(slot, items)
            assert set(releases.files) == {file.path for file in files}
        plans.add(id(memory._planned))
    assert len(plans) == 1


def main(rounds: int) -> None:
    np.seterr(over="ignore")
    random.seed(7)
    torch.manual_seed(7)
    tiles_are_moved_as_the_host_does()
    for _ in range(rounds):
        digests_are_those_of_the_host()
        digests_of_what_arrives_in_parts_are_the_same()
        boxes_go_to_the_hosts_memory_and_back()
        for way in ("buffers", "at once", "before"):
            a_slot_goes_into_files_of_any_version_and_place(way)
    a_slot_is_divided_between_the_files_of_a_node_and_the_daemon()


if __name__ == "__main__":
    main(int(sys.argv[1]))
