"""Exchange of maxima: what ranks bring, whom a rank waits for, and how the wait ends."""

from pathlib import Path

import numpy as np
import pytest
from resharder.converters.errors import LayoutError
from resharder.converters.geometry.layout import Range, TensorSpec
from resharder.server.ingest.boxes import pack
from resharder.server.ingest.intake import Intake
from resharder.server.ingest.maxima import RankBlocks, plan_shared, read_shared
from resharder.server.state.errors import DaemonError
from resharder.server.store.store import Store
from resharder.v1 import publisher_pb2

from tests.support.waits import completed

SPECS = [TensorSpec("a.weight_scale_inv", "F32", (3, 2)), TensorSpec("a.weight", "F8_E4M3", (3, 2))]


def blocks(*numbers: int) -> np.ndarray:
    return read_shared([publisher_pb2.SharedBlocks(tensor=0, blocks=numbers)], SPECS)


class Clock:
    now = 0.0

    def __call__(self) -> float:
        self.now += 0.05  # a wait without news goes on
        return self.now


class Ranks:
    """Three ranks of one version. Ranks 0 and 1 share blocks 1 and 2, ranks 1 and 2 block 4."""

    SHARES = ((1, 2), (1, 2, 4), (4,))

    def __init__(self, folder: Path) -> None:
        self.clock = Clock()
        self.intake = Intake(Store(folder / "store", limit_bytes=1 << 20, clock=self.clock), clock=self.clock, lease_seconds=1e6)
        self.name = self.intake.create_publisher("policy", "job", 3, {"config.json": b"{}"}).name
        for rank in range(3):
            rows = [(tensor, (Range(rank, 1), Range(0, 2)), False) for tensor in range(2)]
            shared = RankBlocks(blocks(*self.SHARES[rank]), blocks(*self.SHARES[rank]))
            self.intake.register_slot(self.name, rank, str(rank), SPECS, pack(rows), f"process {rank}", shared)
        self.version = completed(self.intake.create_version, self.name, 0, 1)

    def exchange(self, rank: int, *values: float, wait: float = 0.0) -> list[float]:
        found = completed(self.intake.exchange_maxima, "policy", self.version.number, self.version.epoch, rank, values, wait)
        return list(found)

    def refused(self, rank: int, *values: float) -> DaemonError:
        with pytest.raises(DaemonError) as caught:
            self.exchange(rank, *values)
        return caught.value


@pytest.fixture
def ranks(tmp_path: Path) -> Ranks:
    return Ranks(tmp_path)


def test_a_rank_gets_the_largest_of_what_the_ranks_of_its_blocks_bring(ranks: Ranks) -> None:
    assert ranks.refused(0, 1.0, 5.0).reason == "MAXIMA_MISSING"
    assert ranks.refused(1, 2.0, 3.0, 4.0).reason == "MAXIMA_MISSING"  # rank 2 is missing
    assert ranks.exchange(0, 1.0, 5.0) == [2.0, 5.0]  # does not wait for rank 2
    assert ranks.exchange(2, 9.0) == [9.0]
    assert ranks.exchange(1, 2.0, 3.0, 4.0) == [2.0, 5.0, 9.0]


def test_a_wait_names_the_ranks_that_are_missing(ranks: Ranks) -> None:
    assert "ranks without maxima: 1" in str(ranks.refused(0, 1.0, 5.0))


def test_other_values_of_a_rank_are_refused(ranks: Ranks) -> None:
    ranks.refused(0, 1.0, 5.0)
    assert ranks.refused(0, 1.0, 6.0).reason == "SLOT_DIFFERS"


@pytest.mark.parametrize("values", [(1.0,), (1.0, 2.0, 3.0), (1.0, -1.0), (1.0, float("nan")), (1.0, float("inf"))])
def test_values_that_are_no_maxima_of_the_ranks_blocks_are_refused(ranks: Ranks, values: tuple[float, ...]) -> None:
    assert ranks.refused(0, *values).reason == "MAXIMA"


def test_an_abort_ends_the_wait(ranks: Ranks) -> None:
    ranks.intake.abort_version("policy", ranks.version.number, ranks.version.epoch, "rank 1 is gone")
    error = ranks.refused(0, 1.0, 5.0)
    assert (error.reason, "rank 1 is gone" in str(error)) == ("VERSION_ABORTED", True)


def test_a_later_job_ends_the_wait(ranks: Ranks) -> None:
    later = ranks.intake.create_publisher("policy", "later", 1, {"config.json": b"{}"})
    boxes = pack((tensor, (Range(0, 3), Range(0, 2)), False) for tensor in range(2))
    ranks.intake.register_slot(later.name, 0, "0", SPECS, boxes)
    assert ranks.refused(0, 1.0, 5.0).reason == "STALE_EPOCH"


def test_blocks_without_a_rank_that_contributes_are_refused() -> None:
    with pytest.raises(LayoutError, match="rank 1 shares blocks to which no rank contributes"):
        plan_shared({0: RankBlocks(blocks(1), blocks()), 1: RankBlocks(blocks(), blocks(2))})


@pytest.mark.parametrize(("tensor", "block"), [(2, 0), (1, 0), (0, 6)])
def test_blocks_outside_of_a_tensor_of_scales_are_refused(tensor: int, block: int) -> None:
    with pytest.raises(LayoutError, match="shared block"):
        read_shared([publisher_pb2.SharedBlocks(tensor=tensor, blocks=[block])], SPECS)
