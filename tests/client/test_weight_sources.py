"""Division of a source of vLLM's weight transfer over the ranks: each element is published by one rank, which has it."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from math import prod
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from resharder.client import UsageError
from resharder.client.integrations.weight_sources import part_of

WORLD = 8


@dataclass(frozen=True)
class Replicate:
    pass


@dataclass(frozen=True)
class Shard:
    dim: int


@dataclass
class Meta:
    """A parameter as vLLM 0.33 declares it (`vllm/distributed/weight_transfer/base.py`)."""

    name: str
    shape: tuple[int, ...]
    owners: tuple[int, ...] | None = None
    mesh_shape: tuple[int, ...] | None = None
    placements: tuple[Replicate | Shard, ...] | None = None
    dtype: torch.dtype = torch.float32


@dataclass
class Source:
    """A rank's source in the form of vLLM 0.33: whole tensors, or its shards as `torch.chunk` cuts them."""

    metadata: list[Meta]
    tensors: dict[str, torch.Tensor]
    rank: int
    by_shards: bool

    def implements_iter_local(self) -> bool:
        return self.by_shards

    def iter_full(self) -> Iterator[tuple[str, torch.Tensor]]:
        for meta in self.metadata:
            if meta.owners is None or self.rank in meta.owners:
                yield meta.name, self.tensors[meta.name]

    def iter_local(self) -> Iterator[tuple[str, torch.Tensor]]:
        for meta in self.metadata:
            if meta.owners is None or self.rank in meta.owners:
                yield meta.name, self._shard(meta)

    def _shard(self, meta: Meta) -> torch.Tensor:
        tensor = self.tensors[meta.name]
        if meta.owners is None or meta.placements is None or meta.mesh_shape is None:
            return tensor
        place = torch.arange(len(meta.owners)).view(meta.mesh_shape).eq(meta.owners.index(self.rank)).nonzero()[0].tolist()
        for coordinate, length, placement in zip(place, meta.mesh_shape, meta.placements, strict=True):
            if isinstance(placement, Shard):
                chunks = tensor.chunk(length, placement.dim)
                empty = tensor.narrow(placement.dim, 0, 0)
                tensor = chunks[coordinate] if coordinate < len(chunks) else empty
        return tensor


@st.composite
def metas(draw: st.DrawFn) -> list[Meta]:
    found = []
    for number in range(draw(st.integers(1, 4))):
        shape = tuple(draw(st.lists(st.integers(1, 7), min_size=1, max_size=3)))
        mesh = draw(st.sampled_from([None, (1,), (3,), (8,), (2, 2), (2, 3), (2, 2, 2)]))
        if mesh is None:
            found.append(Meta(f"t{number}", shape))
            continue
        owners = tuple(draw(st.permutations(range(WORLD)))[: prod(mesh)])
        kinds = st.one_of(st.just(Replicate()), st.builds(Shard, st.integers(0, len(shape) - 1)))
        placements = draw(st.one_of(st.none(), st.tuples(*(kinds for _ in mesh))))
        found.append(Meta(f"t{number}", shape, owners, mesh, placements))
    return found


@pytest.mark.parametrize("by_shards", [False, True])
@given(declared=metas())
def test_each_element_of_a_source_with_owners_is_published_once_with_its_value(by_shards: bool, declared: list[Meta]) -> None:
    tensors = {meta.name: torch.rand(meta.shape) for meta in declared}
    found = {meta.name: torch.zeros(meta.shape) for meta in declared}
    times = {meta.name: torch.zeros(meta.shape, dtype=torch.int) for meta in declared}
    for rank in range(WORLD):
        part = part_of(Source(declared, tensors, rank, by_shards), rank, WORLD)
        items = list(part.stream())
        assert [item[0] for item in items] == [tensor.name for tensor in part.declared]
        for item, tensor in zip(items, part.declared, strict=True):
            index: Any = item[1] if len(item) == 3 else slice(None)
            assert tensor.part == (item[1] if len(item) == 3 else None)
            found[item[0]][index] = item[-1]
            times[item[0]][index] += 1
    assert all(torch.equal(found[name], tensors[name]) for name in tensors)
    assert all(bool((counts == 1).all()) for counts in times.values())


def test_shards_of_several_replicas_are_published_by_them_in_turn() -> None:
    declared = [Meta(f"t{number}", (4, 2), (0, 1, 2, 3), (2, 2), (Replicate(), Shard(0))) for number in range(4)]
    tensors = {meta.name: torch.rand(meta.shape) for meta in declared}
    parts = [part_of(Source(declared, tensors, rank, by_shards=True), rank, 4) for rank in range(4)]
    names = [[tensor.name for tensor in part.declared] for part in parts]
    assert names == [["t0", "t2"], ["t0", "t2"], ["t1", "t3"], ["t1", "t3"]]


def test_an_owner_that_is_not_one_of_the_ranks_is_refused_by_name() -> None:
    declared = [Meta("experts.weight", (4,), (0, 4))]
    source = Source(declared, {}, 0, by_shards=False)
    with pytest.raises(UsageError, match=r"experts\.weight: its owner, rank 4, is not one of the 4 ranks"):
        part_of(source, 0, 4)


def test_a_source_whose_metadata_is_a_method_is_iterated_itself() -> None:
    """As before vLLM 0.33."""
    pairs = [("a", torch.ones(2)), ("b", torch.zeros(3))]

    class Stream(list[tuple[str, torch.Tensor]]):
        def metadata(self) -> list[Any]:
            return [SimpleNamespace(name=name, dtype=tensor.dtype, shape=tensor.shape) for name, tensor in self]

    part = partial(part_of, Stream(pairs))(0, 1)
    assert [item[0] for item in part.stream()] == ["a", "b"]
    assert [tensor.shape for tensor in part.declared] == [(2,), (3,)]
