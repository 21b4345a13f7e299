"""The choice of sources, grants and peers by their rules, and 8 and 40 simulated hosts within their bounds."""

from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from resharder.converters.wire.pieces import Bitmap
from resharder.server.holding.sources import (
    LIMITS,
    PeerOffer,
    PeerRecord,
    PieceChoice,
    PieceRequest,
    after_answer,
    after_busy,
    after_failure,
    choose,
)
from resharder.server.nodes.tracker import LATE, LEAST, STREAMS, SourceGrants, neighbours

from benchmarks.swarm import Network, Swarm

COUNT = 20
NOTHING, ALL = Bitmap(COUNT), Bitmap.full(COUNT)


def chosen(
    *offers: PeerOffer,
    held: Bitmap = NOTHING,
    wanted: Bitmap = ALL,
    scarce: Bitmap = NOTHING,
    granted: tuple[int, ...] = (),
    records: dict[str, PeerRecord] | None = None,
    requests: tuple[PieceRequest, ...] = (),
    now: float = 0.0,
    seed: int = 1,
) -> list[PieceChoice]:
    chance = np.random.default_rng(seed)
    return choose(held, wanted, offers, scarce, granted, records or {}, requests, now, chance)


some = st.sets(st.integers(0, COUNT - 1)).map(lambda pieces: Bitmap.of(COUNT, pieces))
offers = st.lists(
    st.builds(PeerOffer, st.sampled_from("abcdef"), some, st.integers(0, 9), st.booleans()), unique_by=lambda o: o.peer
)


@given(offers, some, some, some, st.sets(st.integers(0, COUNT - 1), max_size=4), st.integers(0, 9), st.integers(0, 99))
def test_a_choice_is_missing_wanted_offered_and_within_the_limits(
    offers: list[PeerOffer], held: Bitmap, wanted: Bitmap, scarce: Bitmap, granted: set[int], flying: int, seed: int
) -> None:
    requests = tuple(PieceRequest(piece, "abcdef"[piece % 6], 0.0, 1) for piece in range(flying))
    granted_list = tuple(sorted(granted & set(scarce)))
    found = chosen(*offers, held=held, wanted=wanted, scarce=scarce, granted=granted_list, requests=requests, now=0.0, seed=seed)
    by_peer = {offer.peer: offer for offer in offers}
    assert len(found) <= max(0, LIMITS.requests - flying)
    assert len({choice.piece for choice in found}) == len(found)
    for piece, peer in found:
        assert piece in wanted
        assert piece not in held
        assert piece >= flying  # not in flight
        assert piece in by_peer[peer].held
        assert piece not in scarce or piece in granted_list
        others = [offer for offer in offers if piece in offer.held and not offer.is_source]
        assert not by_peer[peer].is_source or (piece in granted_list and not others)
    mine = Counter(request.peer for request in requests)
    for peer, count in Counter(choice.peer for choice in found).items():
        limit = LIMITS.per_source if by_peer[peer].is_source else LIMITS.per_peer
        assert mine[peer] + count <= limit


def test_pieces_that_few_peers_have_come_first() -> None:
    rare = PeerOffer("rare", ALL)
    others = [PeerOffer(f"p{i}", Bitmap.of(COUNT, range(2, COUNT))) for i in range(3)]
    firsts = Counter(chosen(rare, *others, seed=seed)[0].piece for seed in range(40))
    assert set(firsts) <= {0, 1}


def test_of_two_sources_the_one_with_less_load_or_a_higher_rate_is_chosen() -> None:
    piece = Bitmap.of(COUNT, [3])
    assert chosen(PeerOffer("a", ALL, load=4), PeerOffer("b", ALL), wanted=piece) == [(3, "b")]
    records = {"a": PeerRecord(rate=100.0), "b": PeerRecord(rate=10.0)}
    assert chosen(PeerOffer("a", ALL), PeerOffer("b", ALL), wanted=piece, records=records) == [(3, "a")]


def test_a_peer_that_fails_is_left_alone_for_twice_as_long_each_time_and_a_source_takes_its_place() -> None:
    record, pauses = PeerRecord(rate=5.0), []
    for _ in range(8):
        record = after_failure(record, 100.0)
        pauses.append(record.retry_at - 100.0)
    assert pauses == [1, 2, 4, 8, 16, 32, 60, 60]
    relay, source = PeerOffer("relay", ALL), PeerOffer("source", ALL, is_source=True)
    assert {peer for _, peer in chosen(relay, source, now=100.0)} == {"relay"}
    assert {peer for _, peer in chosen(relay, source, records={"relay": record}, now=100.0)} == {"source"}
    assert {peer for _, peer in chosen(relay, source, records={"relay": record}, now=200.0)} == {"relay"}
    assert after_answer(record, 10, 2.0) == PeerRecord(rate=5.0)


def test_a_busy_peer_is_asked_again_soon_and_counts_no_failure() -> None:
    record = after_busy(PeerRecord(rate=100.0), 50, 10.0, np.random.default_rng(1))
    assert 10.25 <= record.retry_at <= 10.75
    assert record.failures == 0
    relay, source = PeerOffer("relay", ALL), PeerOffer("source", ALL, is_source=True)
    assert chosen(relay, source, records={"relay": record}, now=10.0) == []


def test_a_slow_request_is_repeated_elsewhere_once_nothing_else_is_missing() -> None:
    records, request = {"a": PeerRecord(rate=10.0), "b": PeerRecord(rate=10.0)}, PieceRequest(0, "a", 0.0, 10)
    offers, last = (PeerOffer("a", ALL), PeerOffer("b", ALL)), Bitmap.of(COUNT, [0])
    ask = {"records": records, "requests": (request,), "wanted": last}
    assert chosen(*offers, **ask, now=1.5) == []
    assert chosen(*offers, **ask, now=3.5) == [(0, "b")]
    twice = (request, PieceRequest(0, "b", 3.5, 10))
    assert chosen(*offers, records=records, requests=twice, wanted=last, now=99.0) == []
    assert {piece for piece, _ in chosen(*offers, records=records, requests=(request,), now=99.0)}.isdisjoint({0})


def test_each_piece_is_granted_to_one_node_and_few_nodes_have_grants() -> None:
    grants, copies = SourceGrants(), np.ones(200, np.int32)
    nothing, all_pieces = Bitmap(200), Bitmap.full(200)
    first = {f"n{i}": grants.give(f"n{i}", 0.0, nothing, all_pieces, copies) for i in range(40)}
    pieces = [piece for mine in first.values() for piece in mine]
    assert len(pieces) == len(set(pieces)) == STREAMS * LEAST
    assert sum(map(bool, first.values())) == STREAMS
    assert grants.give("n0", 1.0, nothing, all_pieces, copies) == first["n0"]
    grants.forget("n0")
    freed = [grants.give(f"m{i}", 1.0, nothing, all_pieces, copies) for i in range(3)]
    assert [len(mine) for mine in freed] == [LEAST, 0, 0]


def test_a_node_that_uses_its_grants_gets_others_and_an_unused_one_passes_on() -> None:
    grants, copies = SourceGrants(), np.ones(3, np.int32)
    nothing, all_pieces = Bitmap(3), Bitmap.full(3)
    slow = grants.give("slow", 0.0, nothing, all_pieces, copies)
    last = grants.give("fast", 0.0, nothing, all_pieces, copies)
    assert sorted(slow + last) == [0, 1, 2]
    copies[last] = 2
    held = Bitmap.of(3, last)
    assert grants.give("fast", 1.0, held, all_pieces, copies) == []
    assert sorted(grants.give("fast", LATE + 1.0, held, all_pieces, copies)) == sorted(slow)
    assert grants.give("slow", LATE + 1.0, nothing, all_pieces, copies) == []


def test_every_node_is_a_peer_of_as_many_others_and_all_nodes_are_reached_in_few_steps() -> None:
    for nodes in (1, 2, 8, 25, 300):
        found = {row: neighbours(row, nodes, period=5) for row in range(nodes)}
        size = min(nodes - 1, 24)
        assert all(len(set(peers)) == size and row not in peers for row, peers in found.items())
        assert set(Counter(peer for peers in found.values() for peer in peers).values()) <= {size}
        reached = {0}
        for _ in range(3):
            reached |= {peer for row in reached for peer in found[row]}
        assert len(reached) == nodes
    changed = set(neighbours(7, 300, 5)) - set(neighbours(7, 300, 6))
    assert 0 < len(changed) <= 6


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
