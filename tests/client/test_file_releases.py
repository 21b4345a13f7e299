"""A rank writes a model's own tensors file by file, and closes each on a thread, whether or not the daemon hears of it."""

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from threading import Event
from typing import Any

import numpy as np
import pytest
import torch
from resharder.client.rpc.channel import Channel
from resharder.client.trainer.delivery import FileReleases
from resharder.client.transport.base import AssignedSlot, LiveItems
from resharder.client.transport.shared_memory import SharedMemory
from resharder.converters.geometry.layout import Piece, Range, TensorSpec, box_index, contiguous_strides, full_box
from resharder.converters.storage.digest import digest
from resharder.converters.storage.files import MappedFiles, lay_out
from resharder.server.infra.filesystem import write_zeros
from resharder.v1 import publisher_pb2, resources_pb2

from tests.support.released import ImmediateReleases

VERSION = resources_pb2.Version(name="models/policy/versions/3", epoch=2)


@pytest.fixture
def channel() -> Iterator[Channel]:
    """Nothing listens there."""
    with Channel("127.0.0.1:1") as made:
        yield made


def released(channel: Channel, names: list[str]) -> list[str]:
    """Return the files in the order in which they were closed."""
    closed: list[str] = []
    with FileReleases(channel, VERSION, 1) as releases:
        for name in names:
            releases.release(name, partial(closed.append, name))
    releases._thread.shutdown(wait=True)
    return closed


def test_files_that_are_written_during_a_report_are_closed_and_in_the_next_one(
    channel: Channel, monkeypatch: pytest.MonkeyPatch
) -> None:
    done, begun, more = list[Any](), Event(), Event()

    def call(method: object, request: publisher_pb2.ReleaseFilesRequest, **named: object) -> None:
        done.append((request.version, request.epoch, request.rank, list(request.files)))
        begun.set()
        assert more.wait(10)

    monkeypatch.setattr(channel, "call", call)
    with FileReleases(channel, VERSION, 1) as releases:
        releases.release("a", partial(done.append, "a"))
        assert begun.wait(10)
        for name in ("b", "c"):
            releases.release(name, partial(done.append, name))
        more.set()
    releases._thread.shutdown(wait=True)
    assert done == ["a", (VERSION.name, 2, 1, ["a"]), "b", "c", (VERSION.name, 2, 1, ["b", "c"])]


def test_files_are_closed_also_if_the_daemon_does_not_answer_and_it_is_asked_once(
    channel: Channel, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked, call = list[Any](), channel.call
    monkeypatch.setattr(channel, "call", lambda method, request, **named: (asked.append(request), call(method, request, **named)))
    assert released(channel, ["a", "b", "c"]) == ["a", "b", "c"]
    assert len(asked) == 1


def test_a_models_own_tensors_are_written_file_by_file(tmp_path: Path) -> None:
    """The model has them in another order, one of them divided over two boxes."""
    shapes = {"c": (4, 8), "a": (16, 8), "b": (2, 3)}
    specs = {name: TensorSpec(name, "F32", shape) for name, shape in shapes.items()}
    files = lay_out(specs.values(), max_file_bytes=128)
    for file in files:
        write_zeros(tmp_path / file.path, file.header, file.size)
    tensors = {name: torch.randn(shape) for name, shape in shapes.items()}
    pieces = [Piece(n, full_box(shapes[n]), n, 0, contiguous_strides(shapes[n])) for n in ("c", "b")]
    halves = [Piece("a", (Range(8 * i, 8), Range(0, 8)), "a", 64 * i, (8, 1)) for i in (1, 0)]
    pieces = [halves[0], *pieces, halves[1]]
    slot = AssignedSlot(0, tuple(piece.box for piece in pieces), tuple(specs[piece.tensor] for piece in pieces), 1 << 20)
    releases = ImmediateReleases()
    version = resources_pb2.Version(folder=str(tmp_path))
    found = SharedMemory(2).deliver(version, slot, LiveItems(tensors, pieces), releases).digests
    assert releases.files == [file.path for file in files]
    assert len(files) == 3
    with MappedFiles(tmp_path, files) as maps:
        for name, tensor in tensors.items():
            assert np.array_equal(maps.arrays[name], tensor.view(torch.int32).numpy().view(np.uint32))
        for piece, value in zip(pieces, found, strict=True):
            part = np.ascontiguousarray(maps.arrays[piece.tensor][box_index(piece.box)])
            assert value == digest(part, piece.box, shapes[piece.tensor])
        del part
