"""Which pieces nodes fetch from whom, by the rules, and 8 and 40 simulated hosts within their bounds."""

from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from resharder.converters.wire.pieces import Bitmap
from resharder.server.holding.piece_fetcher import named_in
from resharder.server.holding.piece_requests import (
    LIMITS,
    PeerRecord,
    PieceRequest,
    after_answer,
    after_busy,
    after_failure,
    choose,
)
from resharder.server.nodes.pieces import PieceTable
from resharder.server.nodes.tracker import AHEAD, ALONE, LATE, SENDING, STREAMS, Tracker
from resharder.v1 import node_pb2

from benchmarks.swarm import Network, Swarm

COUNT = 20
NOTHING, ALL = Bitmap(COUNT), Bitmap.full(COUNT)
VERSION = "v"


some = st.sets(st.integers(0, COUNT - 1)).map(lambda pieces: Bitmap.of(COUNT, pieces))
named = st.lists(st.tuples(st.sampled_from("abcdef"), some, st.booleans()), unique_by=lambda each: each[0])


@given(named, some, st.integers(0, 9))
def test_requests_are_for_missing_named_pieces_and_within_the_limits(
    named: list[tuple[str, Bitmap, bool]], missing: Bitmap, flying: int
) -> None:
    requests = tuple(PieceRequest(piece, "abcdef"[piece % 6], 0.0, 1) for piece in range(flying))
    found = choose(missing, named, {}, requests, 0.0)
    by_peer = {peer: (pieces, is_source) for peer, pieces, is_source in named}
    assert len(found) <= max(0, LIMITS.requests - flying)
    assert len({choice.piece for choice in found}) == len(found)
    for piece, peer in found:
        assert piece in missing
        assert piece >= flying  # not in flight
        assert piece in by_peer[peer][0]
    mine = Counter(request.peer for request in requests)
    for peer, count in Counter(choice.peer for choice in found).items():
        assert mine[peer] + count <= (LIMITS.per_source if by_peer[peer][1] else LIMITS.per_peer)


def test_a_peer_that_fails_is_left_alone_for_twice_as_long_each_time() -> None:
    record, pauses = PeerRecord(rate=5.0), []
    for _ in range(8):
        record = after_failure(record, 100.0)
        pauses.append(record.retry_at - 100.0)
    assert pauses == [1, 2, 4, 8, 16, 32, 60, 60]
    assert choose(ALL, [("a", ALL, False)], {"a": record}, (), 100.0) == []
    assert choose(ALL, [("a", ALL, False)], {"a": record}, (), 200.0)
    assert after_answer(record, 10, 2.0) == PeerRecord(rate=5.0)


def test_a_busy_peer_is_asked_again_soon_and_counts_no_failure() -> None:
    record = after_busy(PeerRecord(rate=100.0), 50, 10.0, np.random.default_rng(1))
    assert 10.25 <= record.retry_at <= 10.75
    assert record.failures == 0


def test_a_piece_that_is_named_twice_is_requested_a_second_time_after_a_while() -> None:
    piece, request = Bitmap.of(COUNT, [0]), (PieceRequest(0, "a", 0.0, 10),)
    both = [("a", piece, False), ("b", piece, False)]
    assert choose(ALL, both, {}, request, LIMITS.repeated) == []
    assert choose(ALL, both, {}, request, LIMITS.repeated + 0.1) == [(0, "b")]


def test_what_an_earlier_daemon_sends_is_followed_but_for_pieces_that_are_not_granted() -> None:
    order = node_pb2.NodeOrder(scarce=Bitmap.of(COUNT, [0, 1]).to_bytes(), granted=[1])
    order.peers.add(node="daemon", held=ALL.to_bytes(), source=True)
    order.peers.add(node="nodes/a", data_address="a:1", held=Bitmap.of(COUNT, [0, 2]).to_bytes())
    found = named_in(order, COUNT, "daemon:1")
    assert [(each.peer, each.source.address, each.source.daemon) for each in found] == [
        ("daemon", "daemon:1", True),
        ("nodes/a", "a:1", False),
    ]
    assert [list(each.pieces) for each in found] == [[1, *range(2, COUNT)], [2]]


class Nodes:
    """A tracker over a version of `COUNT` pieces that the source `s` holds, and what nodes have."""

    def __init__(self) -> None:
        self.tracker, self.held, self.now = Tracker(PieceTable()), dict[str, Bitmap](), 0.0
        self.tracker.table.add_version(VERSION, COUNT)
        self.tracker.table.add_source(VERSION, "s")
        self.tracker.table.report(VERSION, "s", ALL)

    def report(self, node: str, *pieces: int, wanted: Bitmap = ALL, **failures: int) -> dict[str, list[int]]:
        """The pieces that are named to a node which has further pieces, by holder."""
        self.held[node] = self.held.get(node, NOTHING) | Bitmap.of(COUNT, pieces)
        answer = self.tracker.report(VERSION, node, self.held[node], wanted, failures, self.now)
        return {holder: list(found) for holder, found in answer.named.items()}


def test_a_piece_that_a_source_has_alone_is_named_to_one_node_and_few_nodes_have_some() -> None:
    nodes = Nodes()
    first = {f"n{i}": nodes.report(f"n{i}") for i in range(COUNT)}
    pieces = [piece for found in first.values() for piece in found.get("s", ())]
    assert len(pieces) == len(set(pieces)) == STREAMS
    assert [len(found.get("s", ())) for found in first.values()] == [ALONE] * (STREAMS // ALONE) + [0] * (
        COUNT - STREAMS // ALONE
    )
    assert nodes.report("n0") == first["n0"], "until they have arrived"
    nodes.tracker.remove_node("n0")
    assert len(nodes.report("n19")["s"]) == ALONE, "those of a node that is gone are named to others"


def test_a_piece_comes_from_the_node_that_has_it_and_from_the_source_once_that_one_fails() -> None:
    nodes = Nodes()
    (piece, _) = nodes.report("a")["s"]
    nodes.report("a", piece)
    only = Bitmap.of(COUNT, [piece])
    assert nodes.report("b", wanted=only) == {"a": [piece]}
    assert nodes.report("b", wanted=only, a=1) == {"s": [piece]}
    assert nodes.report("c", wanted=only) == {"a": [piece]}, "it has failed for the other node alone"
    nodes.report("b", piece, wanted=only)
    assert nodes.report("d", wanted=only) == {"b": [piece]}, "the one that has least to send"


def test_a_piece_that_does_not_arrive_is_named_to_another_node() -> None:
    nodes = Nodes()
    slow = nodes.report("slow", wanted=Bitmap.of(COUNT, [0, 1]))
    assert slow == {"s": [0, 1]}
    assert nodes.report("other", wanted=Bitmap.of(COUNT, [0, 1])) == {}
    nodes.now = LATE + 1
    assert nodes.report("slow", wanted=Bitmap.of(COUNT, [0, 1])) == {"s": [0, 1]}, "it may still arrive"
    assert nodes.report("other", wanted=Bitmap.of(COUNT, [0, 1])) == {"s": [0, 1]}
    assert nodes.report("third", wanted=Bitmap.of(COUNT, [0, 1])) == {}


def test_a_node_that_cannot_fetch_keeps_few_pieces_from_others() -> None:
    nodes = Nodes()
    for second in range(60):
        nodes.now = float(second)
        stuck = nodes.report("stuck")
    assert stuck == {"s": stuck["s"]}
    assert len(stuck["s"]) == ALONE


def test_a_slow_link_is_learned_and_its_pieces_are_not_late_any_longer() -> None:
    nodes = Nodes()
    for piece in range(COUNT - 1):
        nodes.now += 10.0
        wanted = Bitmap.of(COUNT, [piece])
        assert nodes.report("n", wanted=wanted) == {"s": [piece]}
        nodes.now += 10.0
        nodes.report("n", piece, wanted=wanted)
    nodes.report("n", wanted=Bitmap.of(COUNT, [COUNT - 1]))
    nodes.now += LATE + 1
    nodes.report("n", wanted=Bitmap.of(COUNT, [COUNT - 1]))
    assert nodes.report("other", wanted=Bitmap.of(COUNT, [COUNT - 1])) == {}


def test_pieces_that_will_have_fewest_holders_come_first_and_no_holder_has_much_to_send() -> None:
    nodes = Nodes()
    nodes.report("a", *range(COUNT))
    nodes.report("b", *range(2, COUNT), wanted=NOTHING)
    assert {0, 1} <= {piece for found in nodes.report("c").values() for piece in found}
    for i in range(10):
        nodes.report(f"n{i}")
    load = Counter(holder for i in range(10) for holder, found in nodes.report(f"n{i}").items() for _ in found)
    assert max(load.values()) <= max(SENDING, AHEAD)


def test_a_node_gets_more_pieces_ahead_the_more_it_fetches_between_reports() -> None:
    nodes = Nodes()
    for holder in "abcdefgh":
        nodes.report(holder, *range(COUNT))
    found = nodes.report("n")
    assert sum(map(len, found.values())) == AHEAD
    nodes.report("n", *(piece for pieces in found.values() for piece in pieces))
    found = nodes.report("n")
    assert sum(map(len, found.values())) >= AHEAD


def test_a_slow_piece_is_named_a_second_time_once_nothing_else_is_missing() -> None:
    nodes = Nodes()
    nodes.report("a", 0, 1)
    nodes.report("b", 0, 1)
    nodes.report("n", wanted=Bitmap.of(COUNT, [0]))
    nodes.now = 1.0
    nodes.report("n", 0, wanted=Bitmap.of(COUNT, [0, 1]))
    assert sum(map(len, nodes.report("n", wanted=Bitmap.of(COUNT, [0, 1])).values())) == 1
    nodes.now = 4.0
    assert nodes.report("n", wanted=Bitmap.of(COUNT, [0, 1])) == {"a": [1], "b": [1]}


@pytest.mark.parametrize(
    ("network", "bound", "sent"),
    [
        (Network(8, 64, 18_750_000, 62.5e6), 1.25, 1.2),
        (Network(8, 64, 18_750_000, 62.5e6, deaths=(0.5,)), 1.6, 1.2),
        (Network(8, 64, 18_750_000, 62.5e6, late=2), 1.75, 1.2),
        pytest.param(Network(40, 96, 16 << 20, 62.5e6, deaths=(0.6,)), 1.5, 1.2, marks=pytest.mark.full),
        (Network(1, 64, 18_750_000, 62.5e6), 1.05, 1.0),
        (Network(8, 64, 18_750_000, 62.5e6, parts=8), 1.1, 1.0),
        pytest.param(Network(120, 96, 16 << 20, 62.5e6, parts=40), 1.3, 1.1, marks=pytest.mark.full),
    ],
    ids=[
        "eight hosts",
        "one of eight dies",
        "two of eight join late",
        "forty hosts, one dies",
        "one host",
        "a part each",
        "three hosts for each part",
    ],
)
def test_simulated_hosts_are_complete_within_their_bound(network: Network, bound: float, sent: float) -> None:
    outcome = Swarm(network).run()
    assert outcome.seconds <= bound * network.one_transfer
    assert outcome.origin_sent <= sent + 1e-6
