"""`release="transfer"`: `publish` returns when the SDK has a copy of its own, from which it uploads while the trainer goes on."""

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from resharder.client import Publisher, connect
from resharder.client.errors import CorruptData, ResharderError, UsageError, VersionAborted
from resharder.client.trainer import transfer_copy
from resharder.client.trainer.transfer_copy import TransferCopy, available_host_bytes, place_for
from resharder.client.transport.base import LiveItems
from resharder.client.transport.shared_memory import SharedMemory
from resharder.converters.geometry.layout import Piece, full_box

from tests.client.models import CONFIG, equal, exported, weights
from tests.failpoints.roles import CONFIG as TINY
from tests.failpoints.roles import PATIENCE, Trainer
from tests.support.daemon import Daemon
from tests.support.observing import versions, wait_until
from tests.support.remote import Remote

CPU, FIRST, SECOND, THIRD = torch.device("cpu"), *(torch.device("cuda", number) for number in range(3))


class Gate:
    """Holds uploads up before their first byte is read, until it is opened; then they fail if there is an error."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.opened, self.error = False, None
        self.error: Exception | None
        deliver = SharedMemory.deliver

        def gated(transport: SharedMemory, *arguments: Any) -> Any:
            wait_until(lambda: self.opened, "the gate is opened", 120)
            if self.error is not None:
                raise self.error
            return deliver(transport, *arguments)

        monkeypatch.setattr(SharedMemory, "deliver", gated)


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Gate:
    return Gate(monkeypatch)


@pytest.fixture
def daemon() -> Iterator[Daemon]:
    with Daemon() as running:
        yield running


@pytest.fixture
def model() -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in weights(0).items()}


def fill(model: dict[str, torch.Tensor], seed: int) -> None:
    for name, tensor in weights(seed).items():
        model[name].copy_(tensor)


@pytest.fixture
def publisher(daemon: Daemon, model: dict[str, torch.Tensor], gate: Gate) -> Iterator[Publisher]:
    with connect(daemon.endpoint, model="policy", job="j", rank=0, world_size=1, release="transfer") as found:
        found.attach(model, CONFIG)
        yield found
        gate.opened, gate.error = True, None


def test_weights_that_change_when_publish_has_returned_never_reach_the_store(
    daemon: Daemon, publisher: Publisher, model: dict[str, torch.Tensor], gate: Gate, tmp_path: Path
) -> None:
    for step in (1, 2, 3):
        gate.opened = False
        fill(model, step)
        handle = publisher.publish(step)
        fill(model, 99)
        assert (handle.progress().state, handle.transport) == ("UPLOADING", "")
        gate.opened = True
        handle.wait_ready(60)
        assert equal(exported(daemon.endpoint, str(handle.version), tmp_path / f"{step}"), weights(step))
    wait_until(lambda: handle.transport == "shared-memory", "the handle has the way", 60)


def test_a_publish_waits_for_the_upload_before_it(
    daemon: Daemon, publisher: Publisher, model: dict[str, torch.Tensor], gate: Gate, tmp_path: Path
) -> None:
    fill(model, 1)
    first = publisher.publish(1)
    fill(model, 2)
    gate.opened = True
    second = publisher.publish(2)
    fill(model, 99)
    for step, handle in enumerate((first, second), 1):
        handle.wait_ready(60)
        assert equal(exported(daemon.endpoint, str(handle.version), tmp_path / f"{step}"), weights(step))


def test_a_failed_upload_aborts_its_version_and_the_next_publish_raises_its_error_once(publisher: Publisher, gate: Gate) -> None:
    handle = publisher.publish(1)
    gate.error = CorruptData("bad memory")
    gate.opened = True
    with pytest.raises(VersionAborted, match="bad memory"):
        handle.wait_ready(60)
    wait_until(lambda: handle.failed is gate.error, "the handle has the error", 60)  # the version is aborted before
    gate.error = None
    with pytest.raises(CorruptData, match="bad memory") as raised:
        publisher.publish(2)
    assert "call `publish` again" in raised.value.__notes__[0]
    publisher.publish(2).wait_ready(60)


def test_a_version_that_the_trainer_aborts_is_no_failure(publisher: Publisher, gate: Gate) -> None:
    handle = publisher.publish(1)
    publisher.abort()
    gate.opened = True
    with pytest.raises(VersionAborted):
        handle.wait_ready(60)
    publisher.publish(2).wait_ready(60)


def test_close_waits_for_the_upload(
    daemon: Daemon, publisher: Publisher, model: dict[str, torch.Tensor], gate: Gate, tmp_path: Path
) -> None:
    fill(model, 1)
    handle = publisher.publish(1)
    gate.opened = True
    publisher.close()
    wait_until(lambda: versions(daemon)[handle.version] == "READY", "the version is READY", 60)
    assert equal(exported(daemon.endpoint, str(handle.version), tmp_path / "out"), weights(1))


def test_a_generation_waits_until_the_version_is_ready(publisher: Publisher, model: dict[str, torch.Tensor], gate: Gate) -> None:
    handle = publisher.publish(1)
    gate.opened = True
    with (
        pytest.raises(ResharderError, match="has no live server"),
        publisher.generation(1, timeout=3),
    ):
        pass
    assert handle.progress().state == "READY"


def test_without_room_publish_returns_after_the_upload_which_is_logged_once(
    daemon: Daemon,
    publisher: Publisher,
    model: dict[str, torch.Tensor],
    gate: Gate,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    tmp_path: Path,
) -> None:
    gate.opened = True
    monkeypatch.setattr(transfer_copy, "available_host_bytes", lambda: 1 << 20)
    for step in (1, 2):
        fill(model, step)
        handle = publisher.publish(step)
        assert handle.transport == "shared-memory"
        fill(model, 99)
        handle.wait_ready(60)
        assert equal(exported(daemon.endpoint, str(handle.version), tmp_path / f"{step}"), weights(step))
    assert sum("needs a copy of this rank's part" in record.message for record in caplog.records) == 1


class ReleasedTrainer(Trainer):
    """A rank that leaves its upload behind: `begin` returns with the version UPLOADING, for its file is not taken yet."""

    def begin(self, step: int) -> int:
        deliver: Callable[..., Any] = SharedMemory.deliver

        def slow(transport: SharedMemory, *arguments: Any) -> Any:
            time.sleep(PATIENCE)
            return deliver(transport, *arguments)

        SharedMemory.deliver = slow  # type: ignore[method-assign]
        self._publisher = connect(self._endpoint, model="policy", job="j", rank=0, world_size=1, config=TINY, release="transfer")
        self._publisher.attach({"embed": torch.zeros(64, 32)}, TINY)
        return self._publisher.publish(step).version


def test_the_version_of_a_rank_that_dies_while_it_uploads_is_aborted() -> None:
    with Daemon(lease_seconds=2) as daemon, Remote(ReleasedTrainer, daemon.endpoint) as rank:
        number = rank.call("begin", 1)
        assert versions(daemon)[number] == "UPLOADING"
        rank.send_signal(9)
        wait_until(lambda: versions(daemon)[number] == "ABORTED", "the version is aborted", 60)


def test_another_value_is_refused() -> None:
    with pytest.raises(UsageError, match="expected release delivery or transfer, got 'soon'"):
        connect("127.0.0.1:1", model="policy", job="j", rank=0, world_size=1, release="soon")


@pytest.mark.parametrize(
    ("sources", "gpus", "host", "expected"),
    [
        ({FIRST}, {SECOND: 20 << 30, THIRD: 30 << 30}, 100 << 30, THIRD),
        ({FIRST}, {SECOND: 17 << 30}, 100 << 30, CPU),  # less than 2 GiB would be left
        ({FIRST}, {}, 100 << 30, CPU),
        ({FIRST}, {}, 16 << 30, None),
        ({CPU}, {SECOND: 80 << 30}, 100 << 30, CPU),
    ],
)
def test_the_copy_is_where_there_is_room(
    sources: set[torch.device], gpus: dict[torch.device, int], host: int, expected: torch.device | None
) -> None:
    assert place_for(16 << 30, sources, gpus, host) == expected


def test_the_hosts_room_is_that_of_the_control_group_if_this_is_less(tmp_path: Path) -> None:
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/meminfo").write_text("MemTotal: 100 kB\nMemAvailable:  1000 kB\n")
    assert available_host_bytes(tmp_path) == 1000 << 10
    group = tmp_path / "sys/fs/cgroup"
    group.mkdir(parents=True)
    for name, text in {"memory.stat": "anon 5\ninactive_file 2000\n", "memory.current": "5000", "memory.max": "max"}.items():
        (group / name).write_text(text)
    assert available_host_bytes(tmp_path) == 1000 << 10
    (group / "memory.max").write_text("10000")
    assert available_host_bytes(tmp_path) == 7000


def test_copies_have_the_values_of_strided_parts_and_of_those_with_a_constant() -> None:
    whole = torch.arange(24, dtype=torch.float32).view(4, 6)
    norm = torch.nn.Parameter(torch.ones(3, dtype=torch.bfloat16))
    pieces = [Piece("w", full_box((4, 3)), "w", 1, (6, 2)), Piece("n", full_box((3,)), "n", 0, (1,), False, 1)]
    copied = TransferCopy().take(LiveItems({"w": whole, "n": norm}, pieces))
    assert copied is not None
    expected = whole[:, 1::2].clone()
    whole.zero_()
    (_, first), (_, second) = copied
    assert torch.equal(first, expected)  # type: ignore[arg-type]
    assert torch.equal(second, torch.full((3,), 2.0, dtype=torch.bfloat16))  # type: ignore[arg-type]
    assert first.is_contiguous()  # type: ignore[union-attr]
