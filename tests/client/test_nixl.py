"""NIXL's way of the direct path: boxes that are merged, the choice of a pair's way, and groups of two members of this process."""

import json
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from resharder.client.direct import nixl_agent
from resharder.client.direct.base import DirectFailed, Exchange, JoinedGroup, PeerMessage
from resharder.client.direct.boxes import merge_boxes, merge_ranges, outside
from resharder.client.direct.nixl_group import NixlGroup
from resharder.client.direct.peer_memory import meeting
from resharder.client.direct.peer_memory.meeting import Place, path_between
from torch.distributed import HashStore, PrefixStore

CPU, BOUND = torch.device("cpu"), 60.0
needs_nixl = pytest.mark.skipif(bool(nixl_agent.unavailable()), reason=nixl_agent.unavailable())


@st.composite
def boxes(draw: st.DrawFn) -> list[tuple[int, int, int]]:
    """Boxes that overlap on neither side: in the source one after another with gaps, in the target in another order."""
    sizes = draw(st.lists(st.integers(1, 5), max_size=12))
    places = []
    for _ in range(2):
        order = draw(st.permutations(range(len(sizes)))) if draw(st.booleans()) else range(len(sizes))
        at, found = draw(st.integers(0, 9)), dict[int, int]()
        for i in order:
            found[i] = at = at + draw(st.sampled_from([0, 0, 0, 1, 7]))
            at += sizes[i]
        places.append(found)
    return [(places[0][i], places[1][i], size) for i, size in enumerate(sizes)]


def read_by(found: list[tuple[int, int, int]]) -> dict[int, int]:
    """The byte of the source that each byte of the target comes from."""
    return {there + i: here + i for here, there, size in found for i in range(size)}


@given(boxes(), st.data())
def test_merged_boxes_read_the_same_bytes_and_only_allocations_have_neighbours(
    given_boxes: list[tuple[int, int, int]], data: st.DataObject
) -> None:
    begins = [data.draw(st.lists(st.sampled_from([box[side] for box in given_boxes] or [0]))) for side in (0, 1)]
    there, here = (np.array(each, np.int64) for each in begins)
    merged = [tuple(row) for row in merge_boxes(np.array(given_boxes, np.int64).reshape(-1, 3), (there, here)).tolist()]
    assert read_by(merged) == read_by(given_boxes)
    assert sum(size for *_, size in merged) == sum(size for *_, size in given_boxes)
    assert not any(box[side] < begin < box[side] + box[2] for side in (0, 1) for begin in begins[side] for box in merged)
    together = [b for a, b in pairwise(merged) if (a[0] + a[2], a[1] + a[2]) == b[:2]]
    assert all(b[0] in begins[0] or b[1] in begins[1] for b in together)


@given(st.lists(st.tuples(st.integers(0, 60), st.integers(0, 8)), max_size=12))
def test_merged_ranges_hold_the_same_bytes_and_do_not_overlap(ranges: list[tuple[int, int]]) -> None:
    merged = merge_ranges(np.array(ranges, np.int64).reshape(-1, 2)).tolist()
    held = [{at + i for at, size in some for i in range(size)} for some in (ranges, merged)]
    assert held[0] == held[1]
    assert all(a + size <= b for (a, size), (b, _) in pairwise(merged))
    assert {at for at, _ in merged} <= {at for at, _ in ranges}


def place(host: str = "a", *, shares: bool = False, nixl: bool = False, named: bool = False) -> Place:
    return Place(host, "gpu", shares, "", "", nixl, named)


@given(st.lists(st.tuples(st.integers(0, 30), st.integers(1, 6))), st.lists(st.tuples(st.integers(0, 30), st.integers(1, 6))))
def test_ranges_outside_of_regions_are_those_that_no_region_holds_as_a_whole(
    ranges: list[tuple[int, int]], regions: list[tuple[int, int]]
) -> None:
    apart = merge_ranges(np.array(regions, np.int64).reshape(-1, 2))
    found = outside(np.array(ranges, np.int64).reshape(-1, 2), apart)
    held = [set(range(at, at + size)) for at, size in apart.tolist()]
    assert [*map(tuple, found.tolist())] == [
        (at, size) for at, size in ranges if not any(set(range(at, at + size)) <= each for each in held)
    ]


@pytest.mark.parametrize(
    ("one", "other", "path"),
    [
        (place("a", shares=True, nixl=True), place("a", shares=True, nixl=True), "peer-memory"),
        (place("a", shares=True, nixl=True), place("b", shares=True, nixl=True), "nixl"),
        (place("a", shares=True, nixl=True), place("b", shares=True), ""),
        (place("a", nixl=True), place("a", nixl=True), ""),
        (place("a", shares=True, nixl=True, named=True), place("a", shares=True, nixl=True, named=True), "nixl"),
        (place("a", shares=True, nixl=True, named=True), place("a", shares=True, nixl=True), "peer-memory"),
        (place("a", shares=True), place("a"), ""),
    ],
)
def test_a_pair_uses_nixl_between_hosts_or_where_both_name_it(one: Place, other: Place, path: str) -> None:
    assert path_between(one, other) == path_between(other, one) == path


def both(act: Callable[[int], object]) -> list[object]:
    with ThreadPoolExecutor(2) as threads:
        return [each.result() for each in [threads.submit(act, rank) for rank in (0, 1)]]


@pytest.fixture
def groups() -> Iterator[list[NixlGroup]]:
    """A rank, 0, and a worker, 1."""
    store, made = HashStore(), dict[int, NixlGroup]()
    both(lambda rank: made.update({rank: NixlGroup(store, "group", rank, [1 - rank], CPU, BOUND)}))
    yield [made[0], made[1]]
    for group in made.values():
        group.close()


def rounds_of(memory: torch.Tensor, peer: int) -> list[Exchange]:
    """Two rounds, the second in two messages of which nothing lies between."""
    half = len(memory) // 2
    parts = [[memory[:half]], [memory[half : half + 1000], memory[half + 1000 :]]]
    messages = [[PeerMessage(peer, part) for part in each] for each in parts]
    return [(each, []) if peer else ([], each) for each in messages]


def exchange(groups: list[NixlGroup], round_: list[Exchange], rank: int) -> None:
    deadline = time.monotonic() + BOUND
    groups[rank].post(*round_[rank], deadline).wait(deadline)


def send(groups: list[NixlGroup], rounds: list[list[Exchange]], seconds: float = BOUND) -> None:
    def one(rank: int) -> None:
        deadline = time.monotonic() + seconds
        for work in [groups[rank].post(*exchange, deadline) for exchange in rounds[rank]]:
            work.wait(deadline)

    for rank in (0, 1):
        groups[rank].prepare(rounds[rank])
    both(one)


@needs_nixl
def test_a_worker_reads_version_after_version_also_after_memory_has_moved_or_was_given_back(groups: list[NixlGroup]) -> None:
    for _ in range(3):
        source, target = torch.zeros(1_000_000, dtype=torch.uint8), torch.zeros(1_000_000, dtype=torch.uint8)
        rounds = [rounds_of(source, 1), rounds_of(target, 0)]
        for version in range(4):
            source.random_(0, 255)
            if version == 2:
                for group in groups:
                    group.release()
            send(groups, rounds)
            assert torch.equal(source, target)


@needs_nixl
def test_every_round_is_read_into_its_place_after_a_trial_of_another_number_of_rounds(
    groups: list[NixlGroup],
) -> None:
    scratch = [torch.zeros(1000, dtype=torch.uint8) for _ in range(2)]
    send(groups, [[([PeerMessage(1, scratch[0])], [])], [([], [PeerMessage(0, scratch[1])])]])
    for group in groups:
        group.release()
    source, target = torch.ones(1_000_000, dtype=torch.uint8), torch.zeros(1_000_000, dtype=torch.uint8)
    rounds, half = [rounds_of(source, 1), rounds_of(target, 0)], len(source) // 2
    for rank in (0, 1):
        groups[rank].prepare(rounds[rank])
    for number, place in enumerate((slice(half), slice(half, None))):
        assert not target[place].any()
        round_ = [each[number] for each in rounds]
        both(partial(exchange, groups, round_))
        assert target[place].all()


class Counted:
    """NIXL's agent, with the number of calls of each of its methods."""

    def __init__(self, agent: Any) -> None:
        self._agent, self.calls = agent, Counter[str]()

    def __getattr__(self, name: str) -> Any:
        self.calls[name] += 1
        return getattr(self._agent, name)


def counted(agent: nixl_agent.NixlAgent) -> Counter[str]:
    agent._agent = made = Counted(agent._agent)
    return made.calls


@needs_nixl
def test_memory_is_registered_and_reads_are_prepared_once_for_all_versions_and_servers() -> None:
    store, shared, made = HashStore(), nixl_agent.SharedAgent(CPU), dict[str, list[NixlGroup]]()
    for server in ("left", "right"):
        within, pair = PrefixStore(server, store), dict[int, NixlGroup]()

        def meet(rank: int, server: str = server, within: Any = within, pair: dict[int, NixlGroup] = pair) -> None:
            pair[rank] = NixlGroup(within, server, rank, [1 - rank], CPU, BOUND, None if rank else shared.get())

        both(meet)
        made[server] = [pair[0], pair[1]]
    source = torch.zeros(1_000_000, dtype=torch.uint8)
    parts = {"left": source[:600_000], "right": source[400_000:]}  # which overlap
    targets = {server: torch.zeros(600_000, dtype=torch.uint8) for server in parts}
    rounds = {server: [rounds_of(parts[server], 1), rounds_of(targets[server], 0)] for server in parts}
    rank, workers = counted(shared.get()), {server: counted(groups[1]._agent) for server, groups in made.items()}
    for _ in range(4):
        source.random_(0, 255)
        for server, groups in made.items():
            send(groups, rounds[server])
            assert torch.equal(targets[server], parts[server])
    assert (rank["registerMem"], rank["prepXferDlist"]) == (1, 0)
    for calls in workers.values():
        assert (calls["registerMem"], calls["prepXferDlist"], calls["makeXferReq"], calls["postXferReq"]) == (1, 2, 2, 8)
    made["left"][0].close()
    made["left"][1].close()
    send(made["right"], rounds["right"])  # as before
    assert (rank["registerMem"], rank["deregisterMem"]) == (1, 0)
    made["right"][0].release()
    assert rank["deregisterMem"] == 1
    send(made["right"], rounds["right"])
    assert rank["registerMem"] == 2
    for group in made["right"]:
        group.close()
    shared.close()


@needs_nixl
def test_a_read_that_does_not_begin_in_time_names_the_rank(groups: list[NixlGroup]) -> None:
    target = torch.zeros(1000, dtype=torch.uint8)
    groups[1].prepare(rounds_of(target, 0))
    work = groups[1].post(*rounds_of(target, 0)[0], time.monotonic() + BOUND)
    with pytest.raises(DirectFailed, match=r"rank 1: reads between it and ranks \[0\] did not end in time"):
        work.wait(time.monotonic() + 0.1)


@needs_nixl
def test_two_sides_that_divide_their_bytes_in_two_ways_read_nothing(groups: list[NixlGroup]) -> None:
    source, target = torch.ones(1_000_000, dtype=torch.uint8), torch.zeros(999_000, dtype=torch.uint8)
    rounds = [rounds_of(source, 1), rounds_of(target, 0)]
    for rank in (0, 1):
        groups[rank].prepare(rounds[rank])
    groups[0].post(*rounds[0][0], time.monotonic() + BOUND)
    with pytest.raises(DirectFailed, match="divides its bytes in another way"):
        groups[1].post(*rounds[1][0], time.monotonic() + BOUND).wait(time.monotonic() + BOUND)
    assert not target.any()


@needs_nixl
@pytest.mark.parametrize("sent", [b"", b"[]", b"{}", b'{"kind": "memory"}\n', b'{"kind": "memory", "counts": [3]}\nx', b"\xff"])
def test_what_is_no_message_is_an_error(groups: list[NixlGroup], sent: bytes) -> None:
    groups[0]._agent.send("group/1", sent)

    def take() -> None:
        for _ in range(1000):
            groups[1].advance()
            time.sleep(0.01)

    with pytest.raises(DirectFailed, match="which is no message"):
        take()


@needs_nixl
def test_a_group_that_another_thread_aborts_says_why_and_one_that_is_closed_is_of_no_use(groups: list[NixlGroup]) -> None:
    target = torch.zeros(1000, dtype=torch.uint8)
    groups[1].prepare(rounds_of(target, 0))
    work = groups[1].post(*rounds_of(target, 0)[0], time.monotonic() + BOUND)
    groups[1].abort("the daemon said so")
    with pytest.raises(DirectFailed, match="the daemon said so"):
        work.wait(time.monotonic() + BOUND)
    groups[0].close()
    groups[0].release()  # it has no memory any more
    with pytest.raises(DirectFailed, match="the group is closed"):
        groups[0].prepare([])


@needs_nixl
def test_a_peer_that_does_not_come_is_named() -> None:
    with pytest.raises(DirectFailed, match="rank 0: a peer did not report its address for NIXL"):
        NixlGroup(HashStore(), "group", 0, [1], CPU, 0.5)
    store = HashStore()
    silent = nixl_agent.NixlAgent("group/1", CPU)
    store.set("nixl/1", json.dumps([silent.name, silent.address().hex()]))
    with pytest.raises(DirectFailed, match=r"rank 0: no word from ranks \[1\] over NIXL; each has to reach the others"):
        NixlGroup(store, "group", 0, [1], CPU, 0.5)
    silent.close()


@needs_nixl
def test_ucx_that_does_not_start_is_said_with_the_variables_to_look_at(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UCX_TLS", "tcp")
    monkeypatch.setenv("UCX_NET_DEVICES", "absent0")
    with pytest.raises(DirectFailed, match=r"UCX does not start, .* look at UCX_TLS and UCX_NET_DEVICES"):
        nixl_agent.NixlAgent("alone", CPU)


@needs_nixl
def test_an_idle_agent_leaves_the_processor_alone(groups: list[NixlGroup]) -> None:
    began = time.process_time()
    time.sleep(1.0)
    assert time.process_time() - began < 0.2


class _Written:
    """A group that notes what is posted."""

    def __init__(self, path: str) -> None:
        self.rank, self.size, self.path, self.why = 0, 2, path, ""
        self.posted: list[list[int]] = []
        self.prepared = 0

    def prepare(self, rounds: list[Exchange]) -> None:
        self.prepared = len(rounds)

    def post(self, sends: list[PeerMessage], receives: list[PeerMessage], deadline: float) -> "_Written":
        self.posted.append([message.peer for message in (*sends, *receives)])
        return self

    def wait(self, deadline: float) -> None:
        self.posted.append([])

    def check(self) -> None:
        if self.why:
            raise DirectFailed(self.why)

    def abort(self, why: str) -> None:
        self.why = why


def test_joined_groups_take_the_messages_of_their_own_peers_and_fail_together() -> None:
    one, other, memory = _Written("nixl"), _Written("gloo"), torch.zeros(4, dtype=torch.uint8)
    joined = JoinedGroup(0, {one: {1, 2}, other: {3}})  # type: ignore[dict-item]
    sends = [PeerMessage(peer, memory) for peer in (1, 3, 2)]
    joined.prepare([(sends, [])])
    joined.post(sends, [], 0.0).wait(0.0)
    assert (joined.path, joined.size, one.prepared, other.prepared) == ("nixl+gloo", 4, 1, 1)
    assert (one.posted, other.posted) == ([[1, 2], []], [[3], []])
    with pytest.raises(DirectFailed, match="ranks that are in no group"):
        joined.post([PeerMessage(4, memory)], [], 0.0)
    other.why = "a rank is gone"
    with pytest.raises(DirectFailed, match="a rank is gone"):
        joined.post(sends, [], 0.0)
    joined.abort("over")
    assert one.why == other.why == "over"


@pytest.mark.parametrize(
    ("setting", "allowed", "rdma", "used", "warned"),
    [
        ("", True, True, True, False),
        ("", True, False, False, False),
        ("on", True, False, True, False),
        ("off", True, True, False, False),
        ("on", False, True, False, True),
        ("", False, True, False, False),
    ],
)
def test_nixl_is_refused_by_either_and_a_user_who_names_it_is_told(
    setting: str,
    allowed: bool,
    rdma: bool,
    used: bool,
    warned: bool,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setenv("RESHARDER_NIXL", setting)
    monkeypatch.setattr(nixl_agent, "unavailable", lambda: "")
    monkeypatch.setattr(meeting, "has_rdma", lambda: rdma)
    assert meeting.may_use_nixl(allowed) is used
    assert [record.levelname for record in caplog.records] == ["WARNING"] * warned
