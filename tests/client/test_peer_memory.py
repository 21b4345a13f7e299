"""Peer memory between two members of one process: who shares with whom, and what becomes of wrong messages."""

import json
import os
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch
from resharder.client.direct.base import DirectFailed
from resharder.client.direct.peer_memory import meeting, messages
from resharder.client.direct.peer_memory.export import blocks_of
from resharder.client.direct.peer_memory.mapping import Mappings
from resharder.client.direct.peer_memory.messages import Line
from resharder.client.direct.peer_memory.owner import PeerOwner
from resharder.client.direct.peer_memory.pairs import PeerPairs
from resharder.client.runtime.host import host_identity
from resharder.converters.geometry.copy_table import Copies, copies_of
from resharder.converters.geometry.layout import Layout, Piece, TensorSpec, full_box
from resharder.converters.geometry.plan import plan
from torch.distributed import HashStore

from tests.support.observing import wait_until

CPU, BOUND = torch.device("cpu"), 60.0


@pytest.fixture
def lines() -> Iterator[tuple[Line, Line]]:
    here, there = socket.socketpair()
    ends = Line(here, "one"), Line(there, "other")
    yield ends
    for end in ends:
        end.close()


@pytest.fixture
def _shares_on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RESHARDER_PEER_MEMORY", "cpu")


def copies() -> Copies:
    layout = Layout({"w": TensorSpec("w", "F32", (4,))}, (Piece("w", full_box((4,)), "w", 0, (1,)),))
    return copies_of(plan({0: layout}, {1: layout}))


def met(store: Any) -> tuple[PeerPairs, PeerPairs]:
    """Return the pairs of a rank and of a worker after they have met."""
    tensors = {"w": torch.arange(4.0)}
    with ThreadPoolExecutor(2) as threads:
        sides = [threads.submit(meeting.meet, store, rank, copies(), CPU, tensors if rank == 0 else {}, BOUND) for rank in (0, 1)]
        return sides[0].result(), sides[1].result()


def test_a_message_arrives_with_its_fields_bytes_and_descriptors(lines: tuple[Line, Line]) -> None:
    read, write = os.pipe()
    with ThreadPoolExecutor(1) as threads:  # it is more than the socket's buffers hold
        sent = threads.submit(lines[0].send, "block", bytes(3_000_000), [write], id="x")
        message = lines[1].receive(time.monotonic() + BOUND)
        sent.result()
    os.close(write)
    assert (message.kind, message.fields, len(message.data), len(message.fds)) == ("block", {"id": "x"}, 3_000_000, 1)
    os.write(message.fds[0], b"!")
    os.close(message.fds[0])
    assert os.read(read, 2) == b"!"
    os.close(read)


@pytest.mark.parametrize(
    "sent", [b"", b"\0" * 14, b"\xff" * 14, b"GET / HTTP/1.1\r\n\r\n"], ids=["nothing", "empty", "ones", "HTTP"]
)
def test_what_is_no_message_is_an_error(sent: bytes) -> None:
    here, there = socket.socketpair()
    there.sendall(sent)
    there.close()
    line = Line(here, "rank 3")
    with pytest.raises(DirectFailed, match="rank 3: "):
        line.receive(time.monotonic() + BOUND)
    line.close()


def test_a_peer_that_stops_in_the_middle_of_a_message_ends_the_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(messages, "MESSAGE_SECONDS", 0.3)
    here, there = socket.socketpair()
    line = Line(here, "rank 3")
    with pytest.raises(DirectFailed, match="rank 3: the connection has ended: timed out"):
        line.send("memory", bytes(30_000_000))  # which a stopped process does not read
    there.sendall(b"\0")
    with pytest.raises(DirectFailed, match="rank 3: the connection has ended: timed out"):
        line.receive(time.monotonic() + BOUND)
    line.close()
    there.close()


def test_a_wait_for_a_message_ends_at_its_deadline_or_when_it_has_become_pointless(lines: tuple[Line, Line]) -> None:
    with pytest.raises(DirectFailed, match="one: no message came in time"):
        lines[0].receive(time.monotonic() + 0.1)

    def aborted() -> None:
        raise DirectFailed("over")

    with pytest.raises(DirectFailed, match="over"):
        lines[0].receive(time.monotonic() + BOUND, aborted)


def test_adjacent_tensors_are_shared_as_one_block() -> None:
    found = blocks_of([(200, 300), (100, 200), (400, 500), (420, 430)], CPU)
    assert [(block.begin, block.size, block.kind) for block in found] == [(100, 200, "host"), (400, 100, "host")]
    assert len({block.id for block in found}) == 2


def test_a_tensor_outside_of_the_shared_blocks_is_refused() -> None:
    memory = np.arange(64, dtype=np.uint8)
    at, mappings = memory.ctypes.data, Mappings(CPU)
    mappings.add("a", "host", at, 64, str(os.getpid()), [64], [])
    assert mappings.translate(np.array([[at + 8, at + 64], [0, 0]]))[1] == 0
    for wrong in ([at - 1, at + 8], [at + 8, at + 65], [1, 2]):
        with pytest.raises(DirectFailed, match="a tensor lies outside of the blocks"):
            mappings.translate(np.array([wrong]))
    with pytest.raises(DirectFailed, match="1 of 2 blocks are missing"):
        mappings.keep(["a", "b"])
    mappings.close()
    with pytest.raises(DirectFailed):
        mappings.translate(np.array([[at, at + 1]]))


def test_a_block_of_a_process_that_is_gone_cannot_be_mapped() -> None:
    with pytest.raises(DirectFailed, match="cannot read the memory of process 4194304"):
        Mappings(CPU).add("a", "host", 4096, 64, "4194304", [64], [])


@pytest.mark.usefixtures("_shares_on_cpu")
def test_two_processes_of_a_host_share() -> None:
    rank, worker = met(HashStore())
    assert (list(rank.owners), list(worker.readers)) == ([1], [0])
    assert not len(rank.rest(copies()))
    assert not len(worker.rest(copies()))
    rank.close()
    worker.close()


def _lent(owner: PeerOwner) -> None:
    owner.go()
    owner.finish(time.monotonic() + BOUND, lambda: None)


@pytest.mark.usefixtures("_shares_on_cpu")
def test_a_worker_that_is_gone_is_an_error_when_it_should_read_and_not_before() -> None:
    rank, worker = met(HashStore())
    worker.close()
    owner = rank.owners[1]
    for _ in range(3):  # in other memory each time
        owner.prepare({"w": torch.arange(4.0)})
    owner.release(time.monotonic() + BOUND)
    with pytest.raises(DirectFailed, match="rank 1: the connection has ended"):
        _lent(owner)
    rank.close()


@pytest.mark.parametrize("setting", ["", "off"])
def test_cpus_do_not_share_unless_they_are_asked_to(monkeypatch: pytest.MonkeyPatch, setting: str) -> None:
    monkeypatch.setenv("RESHARDER_PEER_MEMORY", setting)
    for side in met(HashStore()):
        assert {**side.owners, **side.readers} == {}
        assert len(side.rest(copies())) == len(copies())


@pytest.mark.usefixtures("_shares_on_cpu")
def test_processes_of_different_hosts_do_not_share(monkeypatch: pytest.MonkeyPatch) -> None:
    names = iter(("one", "other"))
    monkeypatch.setattr(meeting, "host_identity", lambda: next(names))
    assert not any(side.owners or side.readers for side in met(HashStore()))


@pytest.mark.usefixtures("_shares_on_cpu")
@pytest.mark.parametrize("where", ["owner.blocks_of", "mapping.Mappings.add"])
def test_a_pair_in_which_one_side_cannot_share_goes_over_the_network(monkeypatch: pytest.MonkeyPatch, where: str) -> None:
    from resharder.client.direct.peer_memory import mapping, owner
    from resharder.client.direct.peer_memory.export import NotShareable

    def refuse(*_: Any) -> Any:
        raise NotShareable("not this memory")

    if where == "owner.blocks_of":
        monkeypatch.setattr(owner, "blocks_of", refuse)
    else:
        monkeypatch.setattr(mapping.Mappings, "add", refuse)
    for side in met(HashStore()):
        assert {**side.owners, **side.readers} == {}
        assert len(side.rest(copies())) == len(copies())


@pytest.mark.usefixtures("_shares_on_cpu")
def test_a_pair_on_one_gpu_that_cannot_share_fails_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> Any:
        raise DirectFailed("not this memory")

    monkeypatch.setattr(Mappings, "add", refuse)
    monkeypatch.setattr(meeting, "_identity", lambda device: "GPU-1")
    with pytest.raises(DirectFailed, match="cannot share its memory: not this memory"):
        met(HashStore())


@pytest.mark.usefixtures("_shares_on_cpu")
def test_a_process_without_the_token_is_not_answered() -> None:
    store = HashStore()
    with ThreadPoolExecutor(1) as threads:
        rank = threads.submit(meeting.meet, store, 0, copies(), CPU, {"w": torch.arange(4.0)}, BOUND)
        store.set("place/1", json.dumps(meeting.Place(host_identity(), "cpu", True, "", "")))
        place = meeting.Place(*json.loads(store.get("place/0")))

        def reader(token: str) -> Line:
            connected = socket.socket(socket.AF_UNIX)
            connected.connect("\0" + place.socket)
            line = Line(connected, "rank 0")
            line.send("hello", token=token, rank=1)
            return line

        for token in ("", "0" * 32):
            stranger = reader(token)
            with pytest.raises(DirectFailed, match="it was closed"):
                stranger.receive(time.monotonic() + BOUND)
            stranger.close()
        reader(place.token).close()  # the one that was awaited
        with pytest.raises(DirectFailed, match="rank 1: "):
            rank.result()
    wait_until(lambda: all(thread.name != "resharder-peer" for thread in threading.enumerate()))


@pytest.mark.usefixtures("_shares_on_cpu")
def test_a_reader_that_never_connects_is_named() -> None:
    store = HashStore()
    store.set("place/1", json.dumps(meeting.Place(host_identity(), "cpu", True, "", "")))
    with pytest.raises(DirectFailed, match=r"ranks \[1\] did not connect"):
        meeting.meet(store, 0, copies(), CPU, {"w": torch.arange(4.0)}, 0.1)
