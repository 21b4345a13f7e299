"""A rank registers the files that a daemon has laid out for later versions, and copies into these; on a CPU they are mapped."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from resharder.client import Publisher, connect
from resharder.client.gpu import device_to_host, device_to_pages
from resharder.client.gpu.device_to_host import DeviceToHost
from resharder.client.gpu.device_to_pages import DeviceToPages
from resharder.client.transport.gpu_buffers import FromGpu
from resharder.client.transport.selection import TransportSelector
from resharder.converters.geometry.layout import ITEM_SIZES, Layout, box_shape
from resharder.converters.models.tensor_io import read_piece
from resharder.converters.storage.digest import digest
from resharder.converters.storage.files import BITS

from tests.client.models import CONFIG, equal, exported, weights
from tests.support.daemon import Daemon


class HostDigests:
    """Stands for the digests of a GPU, whose kernels are compiled for one."""

    def __init__(self, layout: Layout, device: torch.device) -> None:
        self._layout, self._tensors = layout, dict[str, torch.Tensor]()

    def at(self, tensors: Mapping[str, torch.Tensor]) -> "HostDigests":
        self._tensors = dict(tensors)
        return self

    def begin(self) -> None: ...

    begin_all = begin

    def digests(self) -> list[int]:
        found = []
        for piece in self._layout.pieces:
            spec = self._layout.tensors[piece.tensor]
            values = read_piece(self._tensors, piece).reshape(-1).view(torch.uint8).numpy()
            found.append(digest(values.view(BITS[ITEM_SIZES[spec.dtype]]).reshape(box_shape(piece.box)), piece.box, spec.shape))
        return found


class Rank:
    """Its transport is that of a GPU, on a CPU. `ways` has the copy of each version."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.ways, self.transport = list[str](), list[FromGpu]()
        for module, kind in ((device_to_host, DeviceToHost), (device_to_pages, DeviceToPages)):
            self._note(monkeypatch, kind)
            monkeypatch.setattr(module, "CachedDigester", HostDigests)

        def from_memory(selector: TransportSelector) -> FromGpu:
            if not self.transport:
                made = FromGpu(torch.device("cpu"), 2, lambda: pytest.fail("all of it"), next_files=selector._next_files)
                self.transport.append(made)
                selector._from_gpu = made
            return self.transport[0]

        monkeypatch.setattr(TransportSelector, "_from_memory", from_memory)

    def _note(self, monkeypatch: pytest.MonkeyPatch, kind: type) -> None:
        run = kind.run  # type: ignore[attr-defined]

        def noted(*arguments: Any) -> Any:
            self.ways.append(kind.__name__)
            return run(*arguments)

        monkeypatch.setattr(kind, "run", noted)


@pytest.fixture
def rank(monkeypatch: pytest.MonkeyPatch) -> Rank:
    return Rank(monkeypatch)


@pytest.fixture
def daemon() -> Iterator[Daemon]:
    with Daemon(keep_count=1) as running:
        yield running


@pytest.fixture
def model() -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in weights(0).items()}


@pytest.fixture
def publisher(daemon: Daemon, model: dict[str, torch.Tensor], rank: Rank) -> Iterator[Publisher]:
    with connect(daemon.endpoint, model="policy", job="j", rank=0, world_size=1, direct_wait=0) as found:
        found.attach(model, CONFIG)
        yield found


def test_later_versions_go_into_files_that_were_registered_before_them(
    daemon: Daemon, publisher: Publisher, model: dict[str, torch.Tensor], rank: Rank, tmp_path: Path
) -> None:
    for step in range(1, 7):
        for name, tensor in weights(step).items():
            model[name].copy_(tensor)
        handle = publisher.publish(step)
        assert rank.transport[0].wait_prepared(60)
        handle.wait_ready(60)
        assert equal(exported(daemon.endpoint, str(handle.version), tmp_path / f"{step}"), weights(step))
    assert rank.ways == ["DeviceToHost", *["DeviceToPages"] * 5]


def test_a_version_that_is_published_at_once_goes_through_buffers(
    publisher: Publisher, rank: Rank, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(TransportSelector, "_next_files", lambda selector, version: None)
    for step in (1, 2, 3):
        publisher.publish(step).wait_ready(60)
        assert not rank.transport[0].wait_prepared(0)
    assert rank.ways == ["DeviceToHost"] * 3
