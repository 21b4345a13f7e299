"""The trial of a new link: what is exchanged, and what it says of a version."""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from resharder.client.direct import trial
from resharder.client.direct.base import DirectFailed, PeerMessage
from resharder.client.direct.trial import check_room, try_link
from resharder.client.gpu.schedule import Post, Round

CPU, MIB = torch.device("cpu"), 1 << 20


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        return self.now


class Group:
    """A group over which `rate` bytes pass in a second."""

    def __init__(self, clock: Clock, rate: float) -> None:
        self.clock, self.rate, self.released = clock, rate, False
        self.messages: list[list[tuple[int, int]]] = []

    def prepare(self, rounds: Any) -> None:
        ((sends, receives),) = rounds
        self.messages = [[(peer, memory.numel()) for peer, memory in side] for side in (sends, receives)]

    def post(self, sends: Sequence[PeerMessage], receives: Sequence[PeerMessage], deadline: float) -> Any:
        size = sum(memory.numel() for _, memory in (*sends, *receives))

        def wait(deadline: float) -> None:
            self.clock.now += size / self.rate
            if self.clock.now > deadline:
                raise DirectFailed("messages did not arrive in time")

        return SimpleNamespace(wait=wait)

    def release(self) -> None:
        self.released = True


def tried(monkeypatch: pytest.MonkeyPatch, rounds: list[Round], rate: float, most_peers: int = 1) -> tuple[float, Group]:
    clock = Clock()
    monkeypatch.setattr(trial, "time", clock)
    group: Any = Group(clock, rate)
    return try_link(group, SimpleNamespace(rounds=rounds), most_peers, CPU), group  # type: ignore[arg-type]


def test_a_small_version_is_exchanged_as_a_whole_in_messages_of_one_scratch_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    rounds = [Round((), (Post(1, 0, 0, 20 * MIB), Post(2, 0, 0, MIB))), Round((), (Post(1, -1, 0, 2 * MIB),))]
    seconds, group = tried(monkeypatch, rounds, 100 * MIB)
    assert seconds == pytest.approx(0.23)
    assert group.messages == [[], [(1, 16 * MIB), (1, 6 * MIB), (2, MIB)]]
    assert group.released


def test_of_a_large_version_a_part_tells_the_time_of_all(monkeypatch: pytest.MonkeyPatch) -> None:
    sent = Round((Post(3, 0, 0, 10 << 30), Post(4, 0, 0, 10 << 30)), ())
    seconds, group = tried(monkeypatch, [sent], 40 << 30, most_peers=2)
    assert seconds == pytest.approx(0.5)
    assert sum(size for _, size in group.messages[0]) == 256 * MIB


def test_the_time_is_never_0_for_a_daemon_takes_that_for_no_trial(monkeypatch: pytest.MonkeyPatch) -> None:
    assert tried(monkeypatch, [Round((), ())], 1.0)[0] > 0


def test_a_link_over_which_little_passes_in_two_seconds_has_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(DirectFailed, match="268435456 bytes did not pass within 2 s over a new link"):
        tried(monkeypatch, [Round((), (Post(1, 0, 0, 1 << 30),))], 100 * MIB)


@pytest.mark.parametrize(("free", "fits"), [(3 << 30, True), ((3 << 30) - 1, False)])
def test_a_gpu_keeps_room_for_its_own_work(free: int, fits: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free, 80 << 30))
    device: Any = SimpleNamespace(type="cuda")
    if fits:
        check_room(device, 1 << 30)
    else:
        with pytest.raises(DirectFailed, match=r"needs 3\.2 GB of GPU memory beside the weights"):
            check_room(device, 1 << 30)
    check_room(CPU, 1 << 40)
