"""The direct path's coordinator by itself: who gets which link, whose turn it is, and what becomes of those that fail."""

from concurrent.futures import Future

import numpy as np
import pytest
from resharder.converters.geometry.layout import Layout, Piece, Range, TensorSpec, box_index
from resharder.converters.geometry.piece_arrays import Pieces, pack
from resharder.converters.storage.digest import digest
from resharder.server.direct.plans import Declared, Member
from resharder.server.direct.state import Task
from resharder.server.infra.change_signal import Waiting
from resharder.server.state.errors import FailedPrecondition, InvalidArgument, ResourceExhausted
from resharder.server.state.server import Reach
from resharder.v1 import direct_pb2

from tests.support.direct_site import LONG, Rank, Site, after_drops, linked, share_of_rows
from tests.support.observing import wait_until
from tests.support.waits import completed


@pytest.fixture
def site() -> Site:
    return Site()


def test_members_get_their_places_and_their_own_copies(site: Site) -> None:
    site.declare("left")
    ranks = site.offer()
    links = [future.result(LONG) for future in site.join("left")]
    links = [task.link for task in (rank.task() for rank in ranks) if task] + links
    assert [link.rank for link in links] == [0, 1, 2, 3]  # type: ignore[union-attr]
    assert {link.size for link in links} == {4}  # type: ignore[union-attr]
    for link in links:
        copies = link.copies  # type: ignore[union-attr]
        assert [(int(s), int(t)) for s, t in zip(copies.source, copies.target, strict=True)] == [
            (link.rank % 2, link.rank % 2 + 2)  # type: ignore[union-attr]
        ]


def test_a_group_is_kept_for_the_next_version_and_made_anew_for_other_processes(site: Site) -> None:
    site.declare("left")
    first = linked(site, "left", site.offer(1))
    ranks = site.offer(2)
    again = [future.result(LONG).group for future in site.join("left", 2, "i-2")]  # type: ignore[attr-defined]
    assert again == [first, first]
    for rank in range(2):
        site.direct.declare(Member("servers/left", rank, f"other-{rank}"), "memory", share_of_rows(rank))
    site.known["left"] = {0: "other-0", 1: "other-1"}
    site.worker = lambda server, rank: Member(f"servers/{server}", rank, f"other-{rank}")  # type: ignore[method-assign]
    links = [future.result(LONG) for future in site.join("left", 2, "i-3")]
    tasks = [rank.task() for rank in ranks], [rank.task() for rank in ranks]
    assert [(task.kind, task.group) for task in tasks[0] if task] == [(direct_pb2.DirectTask.DROP, first)] * 2
    assert {task.group for task in tasks[1] if task} == {link.group for link in links} != {first}  # type: ignore[attr-defined]


def test_workers_that_have_let_go_of_their_links_meet_the_ranks_anew(site: Site) -> None:
    site.declare("left")
    first = linked(site, "left", site.offer(1))
    ranks = site.offer(2)
    workers = [site.worker("left", rank) for rank in range(2)]
    joined = [site.begin(site.direct.join, worker, "memory", "policy", 2, "i-2", "") for worker in workers]
    links = [future.result(LONG) for future in joined]
    (second,) = {task.group for task in after_drops(ranks, first)} | {link.group for link in links}  # type: ignore[attr-defined]
    assert second != first
    kept = [site.begin(site.direct.join, worker, "memory", "policy", 2, "i-3", second) for worker in workers]
    assert {future.result(LONG).group for future in kept} == {second}  # type: ignore[attr-defined]


@pytest.mark.parametrize("restarted", [False, True])
def test_workers_that_have_let_go_in_mid_transfer_have_the_next_turn_themselves(site: Site, restarted: bool) -> None:
    site.declare("left")
    ranks = site.offer()
    first = linked(site, "left", ranks)
    [future.result(LONG) for future in site.start("left", first)]
    if restarted:
        site.known["left"] = {0: "other-0", 1: "other-1"}
        site.worker = lambda server, rank: Member(f"servers/{server}", rank, f"other-{rank}")  # type: ignore[method-assign]
    workers = [site.worker("left", rank) for rank in range(2)]
    for worker in workers:
        site.direct.declare(worker, "memory", share_of_rows(worker.rank))
    joined = [site.begin(site.direct.join, worker, "memory", "policy", 1, "i-2", "") for worker in workers]
    (second,) = {future.result(LONG).group for future in joined}  # type: ignore[attr-defined]
    assert second != first
    [future.result(LONG) for future in site.start("left", second, "i-2")]
    assert [task.group for task in after_drops(ranks, first) if task.kind == direct_pb2.DirectTask.RUN] == [first] * 2
    assert [task.group for task in after_drops(ranks, first) if task.kind == direct_pb2.DirectTask.LINK] == [second] * 2
    assert after_drops(ranks, first) == [Task(direct_pb2.DirectTask.RUN, second)] * 2


def test_one_server_at_a_time_takes_from_an_offer(site: Site) -> None:
    site.declare("left", "right")
    ranks = site.offer()
    left, right = linked(site, "left", ranks), linked(site, "right", ranks, install="i-2")
    began = site.start("left", left)
    assert [rank.task() for rank in ranks] == [Task(direct_pb2.DirectTask.RUN, left)] * 2
    waits = site.start("right", right, "i-2")
    [future.result(LONG) for future in began]
    for member in (site.rank(0), site.rank(1), site.worker("left", 0)):
        site.finish(member, left)
    assert not any(future.done() for future in waits)
    site.finish(site.worker("left", 1), left)
    [future.result(LONG) for future in waits]
    assert [rank.task() for rank in ranks] == [Task(direct_pb2.DirectTask.RUN, right)] * 2


def test_servers_take_from_different_replicas_at_the_same_time(site: Site) -> None:
    site.ranks = 4
    site.declare("left", "right", "third")
    ranks = site.offer()
    first, second = ranks[:2], ranks[2:]
    groups = {server: linked(site, server, mine) for server, mine in (("left", first), ("right", second), ("third", first))}
    assert site.offered.at_once("policy") == 2
    assert len(site.direct._plans._plans) == 2  # one for each replica
    for server, mine in (("left", first), ("right", second)):
        [future.result(LONG) for future in site.start(server, groups[server])]
        assert [rank.task() for rank in mine] == [Task(direct_pb2.DirectTask.RUN, groups[server])] * 2
    waits = site.start("third", groups["third"])
    for rank in range(2):
        site.finish(site.rank(2 + rank), groups["right"])
        site.finish(site.worker("right", rank), groups["right"])
    assert not any(future.done() for future in waits)
    for rank in range(2):
        site.finish(site.rank(rank), groups["left"])
        site.finish(site.worker("left", rank), groups["left"])
    [future.result(LONG) for future in waits]
    assert [rank.task() for rank in first] == [Task(direct_pb2.DirectTask.RUN, groups["third"])] * 2


def test_what_an_earlier_publisher_left_does_not_count_as_ranks_that_send(site: Site) -> None:
    site.declare("left", "right")
    ranks = site.offer()
    for server in ("left", "right"):
        linked(site, server, ranks)
    assert site.offered.at_once("policy") == 1
    later = "models/policy/publishers/2"
    site.rank = lambda rank: Member(later, rank, f"later-{rank}")  # type: ignore[method-assign]
    for rank in range(2):
        site.direct.declare(site.rank(rank), "memory", share_of_rows(rank))
    linked(site, "left", site.offer(2), 2, "i-2")  # the other server still has its group of before
    assert site.offered.at_once("policy") == 1


def test_a_replica_that_is_gone_leaves_what_others_send_alone(site: Site) -> None:
    site.ranks = 4
    site.declare("left", "right")
    ranks = site.offer()
    left, right = linked(site, "left", ranks[:2]), linked(site, "right", ranks[2:])
    [future.result(LONG) for server, group in (("left", left), ("right", right)) for future in site.start(server, group)]
    site.direct.leave(ranks[3].offer, 3)
    with pytest.raises(FailedPrecondition, match=r"rank 3 of .* is gone"):
        completed(site.direct.get_key, right, "never", 0.0)
    assert completed(site.direct.get_key, left, "never", 0.0) is None
    for member in (site.rank(0), site.rank(1), site.worker("left", 0), site.worker("left", 1)):
        site.finish(member, left)
    assert ranks[0].offer.served == {"left"}


def test_a_rank_that_goes_away_ends_its_groups_for_all(site: Site) -> None:
    site.declare("left")
    ranks = site.offer()
    group = linked(site, "left", ranks)
    waiting = site.begin(site.direct.start, site.worker("left", 0), group, "i-1")
    asking = site.begin(site.direct.get_key, group, "never", LONG)
    site.direct.leave(ranks[1].offer, 1)
    for future in (waiting, asking):
        with pytest.raises(FailedPrecondition) as ended:  # whether it was there before the rank went or after
            future.result(LONG)
        assert ended.value.reason == "NOT_OFFERED"
    with pytest.raises(FailedPrecondition, match=r"rank 1 of .* is gone"):
        completed(site.direct.get_key, group, "never", 0.0)


def test_a_member_that_fails_costs_its_server_this_version_alone(site: Site) -> None:
    site.declare("left")
    ranks = site.offer()
    group = linked(site, "left", ranks)
    site.finish(site.worker("left", 1), group, "no memory")
    assert [rank.task() for rank in ranks] == [Task(direct_pb2.DirectTask.DROP, group)] * 2
    assert [rank.task() for rank in ranks] == [None, None]  # nobody else wants it
    with pytest.raises(FailedPrecondition, match="failed before"):
        completed(site.direct.join, site.worker("left", 0), "memory", "policy", 1, "i-1")
    assert linked(site, "left", site.offer(2), 2, "i-2") != group


def test_a_server_whose_groups_fail_again_and_again_is_left_in_peace_for_a_while(site: Site) -> None:
    site.declare("left")
    for number in (1, 2):
        group = linked(site, "left", site.offer(number), number, f"i-{number}")
        site.finish(site.rank(0), group, "no GPU")
    site.offer(3)
    with pytest.raises(FailedPrecondition, match="2 transfers in a row failed; the next is due in 30 s"):
        completed(site.direct.join, site.worker("left", 0), "memory", "policy", 3, "i-3")
    site.now += 31.0
    assert linked(site, "left", site.offer(4), 4, "i-4")


def test_a_server_that_never_succeeds_is_tried_every_ten_minutes(site: Site) -> None:
    site.declare("left")
    site.direct._failures["left"] = (5000, 0.0)
    site.finish(site.rank(0), linked(site, "left", site.offer()), "no GPU")
    site.offer(2)
    with pytest.raises(FailedPrecondition, match="5001 transfers in a row failed; the next is due in 600 s"):
        completed(site.direct.join, site.worker("left", 0), "memory", "policy", 2, "i-2")


def test_a_transfer_that_hangs_is_ended_for_all(site: Site) -> None:
    site.declare("left")
    ranks = site.offer()
    group = linked(site, "left", ranks)
    [future.result(LONG) for future in site.start("left", group)]
    assert [rank.task() for rank in ranks] == [Task(direct_pb2.DirectTask.RUN, group)] * 2
    site.now += 16.0
    assert [rank.task() for rank in ranks] == [Task(direct_pb2.DirectTask.DROP, group)] * 2


def test_a_transfer_that_hangs_holds_up_the_next_server_no_longer_than_its_bound_though_no_rank_asks(site: Site) -> None:
    site.declare("left")
    site.declare("right")
    ranks = site.offer()
    groups = [linked(site, server, ranks) for server in ("left", "right")]
    [future.result(LONG) for future in site.start("left", groups[0])]
    waiting = site.start("right", groups[1])
    wait_until(lambda: len(site.direct._offers["policy"].turns) > 0, "both workers wait for their turn")
    site.now += 16.0
    [future.result(LONG) for future in waiting]


def test_what_does_not_fit_goes_over_the_staged_path(site: Site) -> None:
    site.declare("left")
    for rank in range(2):
        site.direct.declare(site.worker("left", rank), "memory", share_of_rows(rank, rows=16))
    site.offer()
    answers = [future.exception(LONG) for future in site.join("left")]
    assert any("the targets expect BF16 [16, 4], the sources have BF16 [8, 4]" in str(answer) for answer in answers)
    assert all(isinstance(answer, FailedPrecondition) and answer.reason == "NOT_OFFERED" for answer in answers)


def test_nobody_joins_or_offers_with_memory_that_is_not_declared(site: Site) -> None:
    with pytest.raises(FailedPrecondition) as unknown:
        site.direct.offer(site.rank(0), "memory", "policy", 1, 2, 1.0)
    assert unknown.value.reason == "MEMORY_UNKNOWN"
    site.declare("left")
    with pytest.raises(FailedPrecondition) as unknown:
        completed(site.direct.join, site.worker("left", 0), "other memory", "policy", 1, "i-1")
    assert unknown.value.reason == "MEMORY_UNKNOWN"


def test_a_version_that_no_publisher_offers_is_not_waited_for(site: Site) -> None:
    site.known["left"] = {0: "left-0"}
    site.direct.declare(site.worker("left", 0), "memory", share_of_rows(0))
    with pytest.raises(FailedPrecondition, match="no publisher offers it"):
        completed(site.direct.join, site.worker("left", 0), "memory", "policy", 1, "i-1")


def test_a_version_that_its_publisher_withholds_is_not_waited_for_and_the_next_one_is(site: Site) -> None:
    site.declare("left")
    waiting = site.join("left")
    site.direct.withhold("policy", 1)
    for future in (*waiting, *site.join("left", install="i-2")):
        with pytest.raises(FailedPrecondition, match="over the staged path"):
            future.result(LONG)
    assert site.causes == ["not_offered"]
    assert linked(site, "left", site.offer(2), 2, "i-3")


def test_a_version_that_is_offered_is_not_withheld_by_a_later_one(site: Site) -> None:
    site.declare("left")
    ranks = site.offer(1)
    site.direct.withhold("policy", 2)
    assert linked(site, "left", ranks)


def test_groups_have_no_strangers_and_keys_are_bounded(site: Site) -> None:
    site.declare("left", "right")
    group = linked(site, "left", site.offer())
    with pytest.raises(InvalidArgument, match="not a member"):
        site.finish(site.worker("right", 0), group)
    with pytest.raises(InvalidArgument, match="not a worker"):
        completed(site.direct.start, site.rank(0), group, "i-1")
    site.direct.set_key(group, "k", b"value")
    assert completed(site.direct.get_key, group, "k", 0.0) == b"value"
    assert completed(site.direct.get_key, group, "other", 0.0) is None
    with pytest.raises(ResourceExhausted):
        site.direct.set_key(group, "large", bytes(1 << 17))
    with pytest.raises(FailedPrecondition, match="is over"):
        site.direct.set_key("no group", "k", b"value")


# What is served ahead of READY


def test_a_version_counts_as_offered_when_every_rank_has_offered_it(site: Site) -> None:
    changes: list[int] = []
    site.offered.offers_changed.connect(lambda: changes.append(1))
    site.declare("left")
    first = Rank(site, 0, 1, 100.0)
    assert not site.offered.offered("policy")
    Rank(site, 1, 1, 100.0)
    assert (site.offered.offered("policy"), changes) == ({1: Reach()}, [1])
    site.direct.leave(first.offer, 0)
    assert site.offered.offered("policy") == {1: Reach()}  # what servers hold by then they are to be believed
    for number in range(2, 7):
        site.offer(number)
    assert [*site.offered.offered("policy")] == [3, 4, 5, 6]


VALUES = np.arange(32, dtype=np.uint16).reshape(8, 4)


def columns(rank: int) -> Pieces[int]:
    piece = Piece("w", (Range(0, 8), Range(rank * 2, 2)), "w", 0, (2, 1))
    return pack({rank: Layout({"w": TensorSpec("w", "BF16", (8, 4))}, (piece,))})


def digests_of(task: Task, sent: Pieces[int]) -> list[int]:
    """Declaration of a rank that has half of the rows of VALUES."""
    assert task.kind == direct_pb2.DirectTask.DIGEST
    boxes = [sent.boxes.box(i, 2) for i in range(len(sent))]
    return [digest(VALUES[box_index(box)], box, VALUES.shape) for box in boxes]


def ask(site: Site, group: str, number: int) -> list["Future[object]"]:
    return [site.begin(site.direct.digests, site.worker("left", rank), group, number) for rank in range(2)]


def announce(site: Site, group: str, rank: int, number: int) -> Waiting[list[int]]:
    return site.direct.digests(site.worker("left", rank), group, number, during_transfer=True)


def start_columns(site: Site, group: str, number: int) -> list["Future[object]"]:
    return [site.begin(site.direct.start, site.worker("left", rank), group, f"i-{number}") for rank in range(2)]


def in_columns(site: Site) -> tuple[str, list[Rank]]:
    """Ranks that hold rows and workers that hold columns, and what they are both linked by."""
    site.declare("left")
    for rank in range(2):
        site.direct.declare(site.worker("left", rank), "columns", columns(rank))
    ranks = site.offer()
    joins = [site.begin(site.direct.join, site.worker("left", i), "columns", "policy", 1, "i-1") for i in range(2)]
    assert [task.kind for task in (rank.task() for rank in ranks) if task] == [direct_pb2.DirectTask.LINK] * 2
    return joins[0].result(LONG).group, ranks  # type: ignore[attr-defined]


def test_workers_hear_what_the_ranks_say_of_all_that_they_are_sent(site: Site) -> None:
    group, ranks = in_columns(site)
    asked = ask(site, group, 1)
    sent = []
    for rank in ranks:
        task = rank.task("UPLOADING")
        assert task
        assert task.sent
        assert task.sent.offset.tolist() == [0, 2]  # each rank has rows for both workers
        sent.append(task.sent)
        site.direct.report(rank.member, group, 1, digests_of(task, task.sent))
    boxes = [(Range(0, 8), Range(worker * 2, 2)) for worker in range(2)]
    wanted = [[digest(VALUES[box_index(box)], box, VALUES.shape)] for box in boxes]
    assert [future.result(LONG) for future in asked] == wanted
    ranks = site.offer(2)  # of the same memory: what is sent over the group is known
    asked = ask(site, group, 2)
    for rank, known in zip(ranks, sent, strict=True):
        task = rank.task("UPLOADING")
        assert task
        assert task.sent is None
        site.direct.report(rank.member, group, 2, [one + 1 for one in digests_of(task, known)])
    assert [future.result(LONG) for future in asked] == [[one + 2] for (one,) in wanted]


def test_ranks_are_asked_for_digests_during_the_transfer_and_no_pause_waits_for_them(site: Site) -> None:
    group, ranks = in_columns(site)
    sent: list[Pieces[int]] = []
    for number in (1, 2):
        ranks = ranks if number == 1 else site.offer(number)
        for rank in range(2):
            assert completed(announce, site, group, rank, number) == [], "at once, for no rank has reported any"
        for future in start_columns(site, group, number):
            future.result(LONG)  # the transfer has begun
        asked = ask(site, group, number)
        for rank in ranks:
            task = rank.task("UPLOADING")
            assert task
            assert (task.kind, task.during_transfer) == (direct_pb2.DirectTask.DIGEST, True)
            sent += [task.sent] if task.sent else []
            assert rank.task("UPLOADING") == Task(direct_pb2.DirectTask.RUN, group), "asked for once, before it sends"
        assert len(sent) == 2, "the boxes are sent once"
        assert not any(future.done() for future in asked)
        for rank, boxes in zip(ranks, sent, strict=True):
            site.direct.report(rank.member, group, number, [one + number for one in digests_of(task, boxes)])
        wanted = [digest(VALUES[:, 2 * rank : 2 * rank + 2], (Range(0, 8), Range(2 * rank, 2)), VALUES.shape) for rank in (0, 1)]
        assert [future.result(LONG) for future in asked] == [[one + 2 * number] for one in wanted]
        assert [completed(announce, site, group, rank, number) for rank in (0, 1)] == [[one + 2 * number] for one in wanted]
        for member in (*(rank.member for rank in ranks), *(site.worker("left", rank) for rank in range(2))):
            site.finish(member, group)


def test_a_worker_does_not_wait_for_digests_of_a_rank_that_is_gone_after_it_has_sent(site: Site) -> None:
    group, ranks = in_columns(site)
    for rank in range(2):
        assert completed(announce, site, group, rank, 1) == []
    for future in start_columns(site, group, 1):
        future.result(LONG)
    asked = ask(site, group, 1)
    task = ranks[1].task("UPLOADING")
    assert task
    assert task.sent
    site.direct.report(ranks[1].member, group, 1, digests_of(task, task.sent))
    site.direct.leave(ranks[0].offer, 0)
    for future in asked:
        with pytest.raises(FailedPrecondition, match=r"rank 0 of .* is gone"):
            future.result(LONG)


def test_digests_are_not_requested_of_a_group_that_has_ended(site: Site) -> None:
    group, _ = in_columns(site)
    asked = ask(site, group, 1)
    site.finish(site.worker("left", 0), group, error="CUDA ran out of memory")
    for future in asked:
        with pytest.raises(FailedPrecondition):
            future.result(LONG)
    offer = site.offer(2)[0].offer
    assert not any(tasks for _, _, tasks in offer.ranks.values())


def test_digests_of_other_boxes_or_of_strangers_are_refused(site: Site) -> None:
    group, ranks = in_columns(site)
    asked = ask(site, group, 1)
    assert ranks[0].task("UPLOADING")
    with pytest.raises(InvalidArgument, match="rank 0 sends 2 boxes, got 3 digests"):
        site.direct.report(ranks[0].member, group, 1, [1, 2, 3])
    with pytest.raises(InvalidArgument, match="not a sender"):
        site.direct.report(site.worker("left", 0), group, 1, [1, 2])
    with pytest.raises(InvalidArgument, match="not a worker"):
        completed(site.direct.digests, ranks[0].member, group, 1)
    with pytest.raises(FailedPrecondition, match="its offer is over"):
        completed(site.direct.digests, site.worker("left", 0), group, 7)
    site.direct.leave(ranks[1].offer, 1)  # without a word
    for future in asked:
        with pytest.raises(FailedPrecondition) as ended:
            future.result(LONG)
        assert ended.value.reason == "NOT_OFFERED"


def pair(rank: int, *, rows: bool) -> Pieces[int]:
    """Half of the rows, or of the columns, of two tensors of the shape of VALUES."""
    box = (Range(rank * 4, 4), Range(0, 4)) if rows else (Range(0, 8), Range(rank * 2, 2))
    specs = {name: TensorSpec(name, "BF16", (8, 4)) for name in ("still", "trained")}
    pieces = tuple(Piece(name, box, name, 0, (box[1].count, 1)) for name in specs)
    return pack({rank: Layout(specs, pieces)})


def with_frozen(
    site: Site, *frozen: set[str], keeps: tuple[bool, bool] = (True, True)
) -> tuple[str, list[Rank], tuple[str, ...]]:
    """The group of ranks, each of which calls some tensors frozen, their offers, and the tensors that the group may leave out."""
    site.declare("left")
    for rank in range(2):
        site.direct.declare(site.rank(rank), "memory", pair(rank, rows=True), declared=Declared(frozen=frozenset(frozen[rank])))
        site.direct.declare(site.worker("left", rank), "columns", pair(rank, rows=False), declared=Declared(keeps=keeps[rank]))
    ranks = site.offer()
    joins = [site.begin(site.direct.join, site.worker("left", i), "columns", "policy", 1, "i-1") for i in range(2)]
    (link, _) = [rank.task().link for rank in ranks]  # type: ignore[union-attr]
    assert link is not None
    return joins[0].result(LONG).group, ranks, link.frozen  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("frozen", "keeps", "left_out"),
    [
        ([{"still"}, {"still"}], (True, True), ("still",)),
        ([{"still"}, set()], (True, True), ()),
        ([{"still"}, {"still"}], (True, False), ()),
    ],
    ids=["all", "one rank expects a change", "one worker is of an earlier release"],
)
def test_what_all_ranks_call_frozen_may_be_left_out_by_workers_that_can(
    site: Site, frozen: list[set[str]], keeps: tuple[bool, bool], left_out: tuple[str, ...]
) -> None:
    assert with_frozen(site, *frozen, keeps=keeps)[2] == left_out


def test_workers_hear_before_the_pause_what_frozen_boxes_are_and_leave_them_out_if_all_have_them(site: Site) -> None:
    group, ranks, _ = with_frozen(site, {"still"}, {"still"})
    asked = [site.begin(announce, site, group, rank, 1) for rank in range(2)]
    assert [future.result(LONG) for future in asked] == [[], []]
    asked = [site.begin(lambda *a: site.direct.digests(*a, frozen=True), site.worker("left", i), group, 1) for i in range(2)]
    for rank in ranks:
        first, task = rank.task("UPLOADING"), rank.task("UPLOADING")
        assert first is not None
        assert task is not None
        assert (first.frozen, first.during_transfer, task.frozen, task.sent) == (False, True, True, None)
        sent = first.sent
        assert sent is not None
        still = [i for i in range(len(sent)) if sent.specs[sent.tensor[i]].name == "still"]
        boxes = [sent.boxes.box(i, 2) for i in still]
        found = [digest(VALUES[box_index(box)], box, VALUES.shape) for box in boxes]
        site.direct.report(rank.member, group, 1, found, frozen=True)
    boxes = [(Range(0, 8), Range(worker * 2, 2)) for worker in range(2)]
    assert [future.result(LONG) for future in asked] == [[digest(VALUES[box_index(box)], box, VALUES.shape)] for box in boxes]

    def begin(install: str, *kept: bool) -> list[object]:
        workers = [site.worker("left", i) for i in range(2)]
        starts = [
            site.begin(lambda *a, k=k: site.direct.start(*a, kept=k), worker, group, install)
            for worker, k in zip(workers, kept, strict=True)
        ]
        answers = [future.result(LONG) for future in starts]
        tasks = [rank.task("UPLOADING") for rank in ranks]
        for member in (*workers, *(rank.member for rank in ranks)):
            site.finish(member, group)
        return [*answers, *(task.kept for task in tasks if task)]

    assert begin("i-1", True, True) == [True] * 4
    assert begin("i-2", True, False) == [False] * 4
    assert begin("i-3", True, True) == [True] * 4
