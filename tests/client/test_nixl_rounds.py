"""Rounds of a NIXL group that a version leaves out; the agents are this process's, and copy its memory."""

import ctypes
import time
from collections import defaultdict, deque
from collections.abc import Collection
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from resharder.client.direct.base import Exchange, PeerMessage
from resharder.client.direct.nixl_group import NixlGroup
from resharder.converters.geometry.piece_arrays import Ints
from torch.distributed import HashStore

CPU, BOUND = torch.device("cpu"), 60.0


class Agent:
    """An agent whose reads end at once."""

    place = 0

    def __init__(self, name: str, mail: dict[str, deque[tuple[str, bytes]]]) -> None:
        self.name, self._mail, self._reads = name, mail, dict[str, list[Ints]]()

    def address(self) -> bytes:
        return self.name.encode()

    def add(self, known: bytes) -> None: ...

    def listen(self, peers: Collection[str]) -> None: ...

    def leave(self, group: str, peers: Collection[str]) -> None: ...

    def register(self, group: str, ranges: Ints) -> list[bytes]:
        return [b"key"]

    def deregister(self, group: str, peers: Collection[str]) -> None:
        self._reads.clear()

    def prepare(self, peer: str, boxes: list[Ints], device: int) -> None:
        self._reads[peer] = boxes

    def start(self, peer: str, read: int, message: bytes) -> None:
        for there, here, size in self._reads[peer][read].tolist():
            ctypes.memmove(here, there, size)
        self.send(peer, message)

    def has_ended(self, peer: str, read: int) -> bool:
        return True

    def send(self, peer: str, message: bytes) -> None:
        self._mail[peer].append((self.name, message))

    def received(self, peers: Collection[str]) -> list[tuple[str, bytes]]:
        box = self._mail[self.name]
        return [box.popleft() for _ in range(len(box))]


def test_a_version_without_its_last_rounds_leaves_them_as_they_were_and_the_next_one_reads_each_in_its_place() -> None:
    store, mail = HashStore(), defaultdict[str, deque[tuple[str, bytes]]](deque)

    def group(rank: int) -> NixlGroup:
        agent: Any = Agent(f"agent-{rank}", mail)
        return NixlGroup(store, "g", rank, [1 - rank], CPU, BOUND, agent)

    sources, targets = ([torch.zeros(64, dtype=torch.uint8) for _ in range(3)] for _ in range(2))
    sends: list[Exchange] = [([PeerMessage(1, each)], []) for each in sources]
    receives: list[Exchange] = [([], [PeerMessage(0, each)]) for each in targets]
    with ThreadPoolExecutor(2) as pool:
        sender, receiver = pool.map(group, (0, 1))

        def run(side: NixlGroup, rounds: list[Exchange], end: int) -> None:
            deadline = time.monotonic() + BOUND
            side.prepare(rounds)
            posted = [side.post(out, into, deadline) for out, into in rounds[:end]]
            side.skip(rounds[end:])
            for work in posted:
                work.wait(deadline)

        expected = [0, 0, 0]
        for version, end in enumerate([3, 2, 1, 3, 2, 3], 1):
            for number, source in enumerate(sources):
                source.fill_(10 * version + number)
            sides = [pool.submit(run, sender, sends, end), pool.submit(run, receiver, receives, end)]
            for side in sides:
                side.result(BOUND)
            expected[:end] = [10 * version + number for number in range(end)]
            assert [set(each.tolist()) for each in targets] == [{value} for value in expected], f"version {version}"
