"""Ranks on an emulated host, in one process.

with Remote(Ranks, hidden=[other.root]) as ranks:   # cannot read what is in `hidden`
    ranks.call("attach", endpoint, "job", {"0": rows, "1": rows}, 4)
    ranks.call("publish", 1)
"""

import zlib
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any, ClassVar

import torch
from resharder.client import Publisher, connect
from resharder.client.trainer import registration
from resharder.converters.geometry.layout import full_box

from tests.support.staging import stage

CONFIG = {"model_type": "nobody", "architectures": ["NobodyForCausalLM"], "hidden_size": 32}
Rows = Sequence[tuple[Any, ...]]
"""Name and shape of each tensor of which a rank has rows, the first row and the number of rows. Columns, with 1 after it."""


def weights(name: str, shape: Sequence[int], step: int) -> torch.Tensor:
    """The values of a tensor of a step."""
    generator = torch.Generator().manual_seed(zlib.crc32(f"{name} {step}".encode()))
    return torch.randn(tuple(shape), generator=generator).to(torch.bfloat16)


def index(at: int, count: int, dimension: int = 0) -> tuple[slice, ...]:
    """Return the index of `count` rows, or of what another dimension has, from `at` on."""
    return (*(slice(None),) * dimension, slice(at, at + count))


class Ranks:
    """The role. Others have another model."""

    config: ClassVar[Mapping[str, Any]] = CONFIG
    dtype = torch.bfloat16
    weights = staticmethod(weights)

    def __init__(self) -> None:
        self._rows: dict[str, Rows] = {}
        self._publishers: dict[str, Publisher] = {}

    def attach(self, endpoint: str, job: str, ranks: dict[str, Rows], world_size: int, **options: Any) -> None:
        self.close()
        self._rows = ranks
        for rank, rows in ranks.items():
            self._publishers[rank] = connect(
                endpoint, model="policy", job=job, rank=int(rank), world_size=world_size, config=self.config, **options
            )
            declared = [(name, self.dtype, tuple(shape), index(*part)) for name, shape, *part in rows]
            self._publishers[rank].attach_tensors(declared, wait=False)

    def publish(self, step: int, only: Sequence[str] = (), *, once: bool = False, spoil: Sequence[Any] = ()) -> list[list[str]]:
        """Return the version, transport and reason of each rank.

        `spoil`: file and offset of a byte that changes before the last rank writes its tensors.
        """

        def items(rank: str) -> Iterator[tuple[str, tuple[slice, ...], torch.Tensor]]:
            if spoil and rank == max(self._rows):
                change_byte(*spoil)
            for name, shape, *part in self._rows[rank]:
                yield name, index(*part), self.weights(name, shape, step)[index(*part)]

        found = []
        for rank in only or self._rows:
            handle = self._publishers[rank].publish_tensors(step, items(rank) if once else partial(items, rank))
            found.append([handle.name, handle.transport, handle.transport_reason])
        return found

    def wait(self, step: int) -> None:
        """Wait until the last version is READY."""
        for publisher in self._publishers.values():
            newest = publisher._session.newest
            if newest is None or newest.step != step:
                raise AssertionError(f"expected step {step} as the last one, found {newest}")
            newest.wait_ready(60)

    def wait_for_nodes(self, seconds: float) -> float:
        """Set how long a rank waits for nodes to report to a daemon that has restarted; return how long it was before."""
        before, registration._NODE_SECONDS = registration._NODE_SECONDS, seconds
        return before

    def close(self) -> None:
        for publisher in self._publishers.values():
            publisher.close()

    def stage(self, endpoint: str, version: str, needs: dict[str, Sequence[int]] | None = None) -> dict[str, object]:
        """Stage a version as a worker on this host: whole tensors, or of some the first rows and columns."""
        return stage(endpoint, version, needs and {name: (full_box(shape),) for name, shape in needs.items()})


def change_byte(path: str, offset: int) -> None:
    """Change one bit of a file."""
    with open(path, "r+b") as file:
        file.seek(offset)
        (byte,) = file.read(1)
        file.seek(offset)
        file.write(bytes([byte ^ 1]))
