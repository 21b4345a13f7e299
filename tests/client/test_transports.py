"""What holds for every transport, against a real daemon."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from resharder.client.errors import Conflict

from tests.client.models import connected, declared, equal, exported, parts, publish_all, spread, together, weights
from tests.support.daemon import Daemon
from tests.support.variants import sampled


@pytest.fixture(scope="module")
def daemon() -> Iterator[Daemon]:
    with Daemon(data_listen="127.0.0.1:0") as running:
        yield running


pytestmark = pytest.mark.parametrize("transport", ["grpc", "http", "shared-memory"])


@pytest.mark.parametrize("ranks", sampled([1, 2, 3], [2]))
def test_what_is_exported_is_what_the_ranks_held_bit_for_bit(daemon: Daemon, transport: str, ranks: int, tmp_path: Path) -> None:
    full = weights(ranks)
    publishers = connected(daemon.endpoint, ranks, f"{transport} {ranks}", transport=transport)
    handles = publish_all(publishers, 1, full)
    handles[0].wait_ready(60)
    assert len({handle.version for handle in handles}) == 1
    assert {(handle.transport, handle.transport_reason) for handle in handles} == {(transport, "")}
    assert equal(exported(daemon.endpoint, str(handles[0].version), tmp_path / "out"), full)


def test_values_that_arithmetic_would_change_survive(daemon: Daemon, transport: str, tmp_path: Path) -> None:
    full = weights(0)
    full["norm"][:] = torch.tensor([float("nan"), float("inf"), -0.0, 1e-45, -float("inf"), 3.4e38, 0.0])
    full["norm"].view(torch.int32)[0] = -4194303  # a NaN with a payload
    (publisher,) = connected(daemon.endpoint, 1, f"{transport} special", transport=transport)
    handle = publish_all([publisher], 1, full)[0]
    handle.wait_ready(60)
    assert equal(exported(daemon.endpoint, str(handle.version), tmp_path / "out"), full)


def test_weights_may_change_as_soon_as_publish_returns(daemon: Daemon, transport: str, tmp_path: Path) -> None:
    live, before = weights(5), weights(5)
    publishers = connected(daemon.endpoint, 2, f"{transport} mutate", transport=transport)

    def publish(rank: int) -> object:
        handle = publishers[rank].publish_tensors(1, parts(live, spread(2)[rank]))
        for name, index in spread(2)[rank]:
            live[name][index].fill_(7)
        return handle

    handles = together(publish, 2)
    handles[0].wait_ready(60)
    assert equal(exported(daemon.endpoint, str(handles[0].version), tmp_path / "out"), before)


def test_a_generator_may_reuse_one_buffer_for_all_its_tensors(daemon: Daemon, transport: str, tmp_path: Path) -> None:
    full = weights(6)
    (publisher,) = connected(daemon.endpoint, 1, f"{transport} buffer", transport=transport)
    memory = torch.empty(8 << 20, dtype=torch.uint8)

    def items() -> Iterator[tuple[str, tuple[slice, ...], torch.Tensor]]:
        for name, index, part in parts(full, spread(1)[0]):
            copy = memory[: part.numel() * part.element_size()].view(part.dtype).view(part.shape)
            yield name, index, copy.copy_(part)
            memory.fill_(255)

    handle = publisher.publish_tensors(1, items())
    handle.wait_ready(60)
    assert equal(exported(daemon.endpoint, str(handle.version), tmp_path / "out"), full)


def test_tensors_may_come_in_another_order_at_each_step(daemon: Daemon, transport: str, tmp_path: Path) -> None:
    full = weights(8)
    (publisher,) = connected(daemon.endpoint, 1, f"{transport} order", transport=transport)
    handle = publisher.publish_tensors(1, reversed(list(parts(full, spread(1)[0]))))
    handle.wait_ready(60)
    assert equal(exported(daemon.endpoint, str(handle.version), tmp_path / "out"), full)


def test_the_same_step_again_is_the_same_version_and_other_bytes_are_a_conflict(daemon: Daemon, transport: str) -> None:
    (publisher,) = connected(daemon.endpoint, 1, f"{transport} again", transport=transport)
    first = publish_all([publisher], 4, weights(9))[0]
    first.wait_ready(60)
    assert publish_all([publisher], 4, weights(9))[0].version == first.version
    with pytest.raises(Conflict, match="other bytes"):
        publish_all([publisher], 4, weights(10))
    assert first.progress().state == "READY"


def test_strided_and_expanded_tensors_are_read_as_they_look(daemon: Daemon, transport: str, tmp_path: Path) -> None:
    full = weights(11)
    full["large"] = torch.randn(1024, 3000, generator=torch.Generator().manual_seed(1)).bfloat16().t()
    full["bias"] = torch.tensor([2.5]).expand(64)
    full["experts"] = torch.randn(96, 6, 40, generator=torch.Generator().manual_seed(2)).half().permute(1, 2, 0)
    (publisher,) = connected(daemon.endpoint, 1, f"{transport} strided", transport=transport)
    handle = publish_all([publisher], 1, full)[0]
    handle.wait_ready(60)
    assert equal(exported(daemon.endpoint, str(handle.version), tmp_path / "out"), {n: t.contiguous() for n, t in full.items()})


def test_a_rank_with_nothing_to_send_publishes_too(daemon: Daemon, transport: str, tmp_path: Path) -> None:
    from resharder.client.trainer.connect import connect

    from tests.client.models import CONFIG

    full = weights(12)
    publishers = [
        connect(
            daemon.endpoint, model="policy", job=f"{transport} idle", rank=r, world_size=2, config=CONFIG, transport=transport
        )
        for r in range(2)
    ]
    held = [spread(1)[0], []]
    together(lambda rank: publishers[rank].attach_tensors(declared(held[rank])), 2)
    handles = together(lambda rank: publishers[rank].publish_tensors(1, parts(full, held[rank])), 2)
    handles[1].wait_ready(60)
    assert equal(exported(daemon.endpoint, str(handles[1].version), tmp_path / "out"), full)
