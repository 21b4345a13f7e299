"""What the collector of garbage looks at in a worker."""

import gc
import weakref
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import grpc
import numpy as np
import pytest
from resharder.client.inference.worker.receiver import EarlyVersion, compare_with_store
from resharder.client.runtime import gc_pauses
from resharder.client.runtime.gc_pauses import collect_and_freeze, collect_before_sleep, gc_paused
from resharder.client.versions.manifest import BoxDigests, NeededDigests, VersionManifest
from resharder.converters.geometry.layout import Piece, TensorSpec, full_box
from resharder.converters.storage.files import lay_out
from resharder.converters.wire.boxes import spec_to_proto
from resharder.v1 import resources_pb2, server_pb2


class Thing:
    """May refer to itself."""

    def __init__(self, circular: bool) -> None:
        self.other = self if circular else None


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    gc.freeze()  # what the tests before have left is much
    yield
    gc.enable()


@pytest.fixture
def all_freeze(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every block freezes, as one of many objects."""
    monkeypatch.setattr(gc_pauses, "_FEW", -1)


def test_blocks_of_few_objects_freeze_nothing_and_need_no_full_collection(monkeypatch: pytest.MonkeyPatch) -> None:
    """A full collection stops all threads: a trainer that waits for this server, and every stream."""
    collect_and_freeze()
    frozen, full = gc.get_freeze_count(), list[int]()
    monkeypatch.setattr(gc_pauses, "collect_and_freeze", lambda: full.append(1))
    for _ in range(3 * gc_pauses._OFTEN):
        with gc_paused():
            gone = weakref.ref(Thing(circular=True))
    assert not full
    assert gc.get_freeze_count() <= frozen
    gc.collect()
    assert gone() is None


@pytest.mark.usefixtures("all_freeze")
def test_what_is_made_while_gc_is_paused_is_not_looked_at_and_goes_with_its_last_reference() -> None:
    collect_and_freeze()
    with gc_paused():
        assert not gc.isenabled()
        things = [Thing(circular=False) for _ in range(1000)]
    assert gc.isenabled()
    looked_at = {id(each) for each in gc.get_objects()}
    assert not looked_at & {id(thing) for thing in things}
    gone = weakref.ref(things[7])
    del things
    assert gone() is None


@pytest.mark.usefixtures("all_freeze")
def test_garbage_of_that_time_goes_with_the_next_collection() -> None:
    with gc_paused():
        gone = weakref.ref(Thing(circular=True))
    gc.collect()
    assert gone() is not None
    collect_and_freeze()
    assert gone() is None


@pytest.mark.usefixtures("all_freeze")
def test_garbage_does_not_pile_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gc_pauses, "_MORE", 10_000)
    collect_and_freeze()
    seen = []
    for _ in range(6):
        with gc_paused():
            garbage = [Thing(circular=True) for _ in range(4000)]
            seen.append(weakref.ref(garbage[0]))
            del garbage
    alive = [one() is not None for one in seen]
    assert alive[-1]
    assert not alive[0]
    assert sum(alive) <= 4


@pytest.mark.usefixtures("all_freeze")
def test_before_a_sleep_garbage_is_collected_only_if_there_is_much_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """A collection takes most of the time of a sleep."""
    monkeypatch.setattr(gc_pauses, "_BEFORE_SLEEP", 5_000)
    collect_and_freeze()
    for more, gone in ((1000, False), (9000, True)):
        with gc_paused():
            garbage = [Thing(circular=True) for _ in range(more)]
            seen = weakref.ref(garbage[0])
            del garbage
        collect_before_sleep()
        assert (seen() is None) == gone


@pytest.mark.usefixtures("all_freeze")
def test_what_was_in_use_during_an_install_goes_too_though_it_is_little(monkeypatch: pytest.MonkeyPatch) -> None:
    """As the engine's objects of requests, which are frozen with all others and refer to memory that is not counted."""
    monkeypatch.setattr(gc_pauses, "_OFTEN", 10)
    collect_and_freeze()
    seen = []
    for _ in range(25):
        in_use = Thing(circular=True)
        seen.append(weakref.ref(in_use))
        with gc_paused():
            pass
        del in_use
    alive = [one() is not None for one in seen]
    assert not any(alive[:10])
    assert sum(alive) <= 11


@pytest.mark.usefixtures("all_freeze")
def test_objects_are_not_counted_each_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """It takes all threads' time."""
    collect_and_freeze()
    count, calls = gc.get_freeze_count, list[int]()
    monkeypatch.setattr(gc, "get_freeze_count", lambda: calls.append(1) or count())
    monkeypatch.setattr(gc_pauses, "_MORE", 10_000)
    for versions, counted in ((5, 0), (2, 1), (3, 1)):
        for _ in range(versions):
            with gc_paused():
                things = [Thing(circular=False) for _ in range(2000)]
            del things
        assert len(calls) == counted


def test_a_collector_that_was_off_stays_off_and_errors_leave_it_as_it_was() -> None:
    with pytest.raises(ValueError, match="in the middle"), gc_paused():
        raise ValueError("in the middle")
    assert gc.isenabled()
    gc.disable()
    with gc_paused():
        pass
    assert not gc.isenabled()


def test_versions_of_many_tensors_are_compared_with_the_store_without_a_freeze_after_the_first() -> None:
    """And so without a full collection, which with the objects of an engine takes half a second."""
    specs = [TensorSpec(f"model.layers.{i // 400}.mlp.experts.{i % 400}.w", "BF16", (8, 8)) for i in range(18_867)]
    answer = server_pb2.Manifest(
        version=resources_pb2.Version(name="models/m/versions/1", number=1),
        tensors=[server_pb2.ManifestTensor(spec=spec_to_proto(spec), digest=i) for i, spec in enumerate(specs)],
        files=[server_pb2.ManifestFile(path=f.path, header=f.header, size_bytes=f.size) for f in lay_out(specs)],
    ).SerializeToString()
    channel: Any = SimpleNamespace(grpc=grpc.insecure_channel("127.0.0.1:1"))
    channel.call = lambda method, request, **options: server_pb2.Manifest.FromString(answer)
    pieces = tuple(Piece(spec.name, full_box(spec.shape), spec.name, 0, (8, 1)) for spec in specs)
    needs = {spec.name: (full_box(spec.shape),) for spec in specs}
    early, digests = EarlyVersion("models/m/versions/1", "", pieces, b""), np.arange(len(specs), dtype=np.uint64)
    needed: list[NeededDigests] = []

    def stored(manifest: VersionManifest) -> BoxDigests:
        if not needed:
            needed.append(NeededDigests(manifest.specs, needs))
        assert needed[0].are_of(manifest.specs, needs)
        return needed[0].of(channel, manifest)

    blocks = []
    for _ in range(4):
        with gc_paused():
            found = compare_with_store(channel, early, digests, stored, lambda: True)
        assert found is not None
        assert not found[1]
        blocks.append(gc_pauses._blocks)
    assert blocks[1:] == blocks[:1] * 3
