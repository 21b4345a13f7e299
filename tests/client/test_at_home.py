"""A slot divided between the files of a host's node and the daemon: each box goes one way, and digests keep their order."""

import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from resharder.client.transport.at_home import AtHome, PieceSubset
from resharder.client.transport.base import AssignedSlot, Delivered, LiveItems
from resharder.client.transport.host_buffers import digests_of
from resharder.client.transport.shared_memory import SharedMemory
from resharder.converters.geometry.layout import Piece, TensorSpec, contiguous_strides, full_box
from resharder.converters.storage.files import lay_out
from resharder.converters.storage.writable_files import WritableFiles
from resharder.v1 import resources_pb2

from tests.support.publishing import read_folder

NAMES = ["away 1", "home 1", "away 2", "home 2", "home 3"]
SPECS = [TensorSpec(name, "F32", (40 + i, 30)) for i, name in enumerate(NAMES)]
WHOLE, GATHERED = (1, 4), (3,)
HOME = (1, 3, 4)
SLOT = AssignedSlot(0, tuple(full_box(s.shape) for s in SPECS), tuple(SPECS), 1 << 20, "nodes/a", WHOLE, GATHERED)
TENSORS = {spec.name: torch.randn(spec.shape, generator=torch.Generator().manual_seed(i)) for i, spec in enumerate(SPECS)}
PIECES = [Piece(s.name, full_box(s.shape), s.name, 0, contiguous_strides(s.shape)) for s in SPECS]


class Daemon:
    """Takes the boxes that are sent to it."""

    def __init__(self) -> None:
        self.names: list[str] = []

    def deliver(self, version: Any, slot: AssignedSlot, items: Iterable[Any], releases: Any) -> Delivered:
        kept = [(number, tensor.clone()) for number, tensor in items]
        self.names = [slot.specs[number].name for number, _ in kept]
        return Delivered(digests_of(slot, kept), "http", "a reason")


class Releases:
    def __init__(self) -> None:
        self.files: list[str] = []

    def release(self, file: str, close: Callable[[], None]) -> None:
        self.files.append(file)
        close()


@pytest.fixture
def folder() -> Iterator[Path]:
    made = Path(tempfile.mkdtemp(prefix="resharder-home-", dir="/dev/shm"))
    for file in lay_out([SPECS[number] for number in HOME]):
        (made / file.path).write_bytes(file.header + bytes(file.size - len(file.header)))
        WritableFiles(made, [file]).close()
    yield made
    shutil.rmtree(made)


@pytest.mark.parametrize("kind", ["live", "iterator"])
def test_boxes_of_the_node_are_written_there_and_the_others_are_sent(folder: Path, kind: str) -> None:
    subsets, releases = (PieceSubset(), PieceSubset()), Releases()
    for gathers in (False, False, True, True):
        home = HOME if gathers else WHOLE
        daemon = Daemon()
        transport = AtHome(str(folder), SLOT.divided(gathers=gathers), SharedMemory(2), daemon, subsets)
        version = resources_pb2.Version(name="models/policy/versions/1", folder="/the/daemons")
        items = LiveItems(TENSORS, PIECES) if kind != "iterator" else iter([*LiveItems(TENSORS, PIECES)])
        found = transport.deliver(version, SLOT, items, releases)
        assert found == (digests_of(SLOT, LiveItems(TENSORS, PIECES)), "node", "a reason", False)
        assert daemon.names == [name for number, name in enumerate(NAMES) if number not in home]
        written = read_folder(str(folder))
        assert {name: array.tobytes() for name, array in written.items()} == {
            NAMES[n]: TENSORS[NAMES[n]].numpy().tobytes() if n in home else bytes(SPECS[n].size) for n in HOME
        }
    assert releases.files == 4 * ["model.safetensors"], "files of a node are reported once they are closed"


def test_a_slot_that_is_all_at_home_needs_no_way_to_the_daemon(folder: Path) -> None:
    home = SLOT.divided(gathers=True).home
    slot = AssignedSlot(0, home.boxes, home.specs, 1 << 20, "nodes/a", (0, 1, 2))
    items = [(number, TENSORS[spec.name]) for number, spec in enumerate(slot.specs)]
    divided = slot.divided(gathers=False)
    transport = AtHome(str(folder), divided, SharedMemory(1), None, (PieceSubset(), PieceSubset()))
    found = transport.deliver(resources_pb2.Version(), slot, iter(items), Releases())
    assert found == (digests_of(slot, items), "node", "", False)
    assert divided.rest_boxes == ()
