"""The daemon's register of files on nodes into which ranks write: which set a version takes, and what becomes of it."""

import pytest
from resharder.converters.geometry.layout import TensorSpec
from resharder.converters.storage.files import FileLayout, lay_out
from resharder.server.holding.part_files import FileProof
from resharder.server.nodes import homes
from resharder.server.nodes.homes import HomeLost, HomeRegister
from resharder.server.nodes.records import nonce_id
from resharder.server.state.errors import FailedPrecondition, InvalidArgument, PermissionDenied, ResourceNotFound
from resharder.server.state.version import ABORTED, DAEMON, READY, VersionRecord
from resharder.v1 import node_pb2

from tests.support.node_reports import lose_nodes, order_of, report_of, report_to, reservation_of, with_values

HOMES = {"a": "one", "b": "two"}
FILES = lay_out([TensorSpec(name, "BF16", (64, 8)) for name in ("a", "b", "c")], homes=HOMES)
FILE_HOMES = {file.path: HOMES[next(iter(file.by_name))] for file in FILES if "c" not in file.by_name}
PUBLISHER, NAMES = "models/policy/publishers/1", [f"models/policy/versions/{number}" for number in (1, 2, 3)]
PROOF = {path: FileProof((5,), (7,)) for path, node in FILE_HOMES.items() if node == "one"}
READS = {node: [{f"/{node}/nonce": node.encode()}] for node in ("one", "two")}

State = node_pb2.FileSetOrder


class World:
    """A register with two live nodes, of which each call of `report` replaces the report."""

    def __init__(self) -> None:
        self.now = 0.0
        self.homes = HomeRegister(clock=self._clock)
        self.reports = {node: report_of(node) for node in ("one", "two")}
        for node in self.reports:
            self.report(node)
        self.homes.reserve(PUBLISHER, FILES, FILE_HOMES)

    def _clock(self) -> float:
        self.now += 1.0  # a wait ends soon
        return self.now

    def reservation(self, node: str = "one") -> str:
        return self.homes.orders(node, ())[0].id

    def report(self, node: str, *sets: str, drained: bool = False, caller: str = "", problem: str = "", **more: object) -> None:
        known = self.homes.orders(node, ())
        reservations = [reservation_of(each.id, node, sets, problem) for each in known]
        self.reports[node] = with_values(self.reports[node], reservations=reservations, **more)
        report_to(self.homes, self.reports[node], caller, drained)

    def take(self, version: str = NAMES[0], **reads: list[dict[str, bytes]]) -> dict[str, str]:
        found = self.homes.take(PUBLISHER, version, {**READS, **reads})
        assert all(home.files == tuple(path for path, node in FILE_HOMES.items() if node == home.node) for home in found)
        return {home.node: home.folder for home in found}

    def files(self, node: str = "one") -> tuple[FileLayout, ...]:
        return tuple(file for file in FILES if FILE_HOMES.get(file.path) == node)

    def is_coming(self, node: str) -> bool:
        return self.homes._is_coming(PUBLISHER, node, READS[node], self.now)

    def states(self, node: str = "one", wanted: tuple[str, ...] = ()) -> list[node_pb2.FileSetOrder]:
        return list(self.homes.orders(node, wanted)[0].sets)

    def settle(self, version: str, state: str) -> None:
        number = int(version.rpartition("/")[2])
        self.homes.version_changed(VersionRecord("policy", number, state, 1, number, "job", 1, 1, 0.0))


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> World:
    monkeypatch.setattr(homes, "LAYOUT_SECONDS", 0.5)
    return World()


def test_a_version_takes_a_set_of_each_node_and_none_twice(world: World) -> None:
    world.report("one", "s")
    world.report("two", "s", "t")
    assert world.take() == {"one": "/one/s", "two": "/two/s"}
    assert world.take(NAMES[1]) == {"two": "/two/t"}, "the other node has none left, and the version does not wait for ever"
    world.settle(NAMES[0], ABORTED)
    world.report("one", "s")
    assert world.take(NAMES[2]) == {}, "the files of an aborted version come back under another id alone"
    assert world.states() == [order_of("", State.ENDED)]


def test_a_node_that_its_ranks_may_not_be_on_any_more_is_no_home(world: World) -> None:
    for node in READS:
        world.report(node, "s")
    assert world.take(one=[{"/one/nonce": b"of an earlier process"}], two=[{}]) == {}
    assert world.take(one=[*READS["one"], {}], two=READS["two"]) == {"two": "/two/s"}, "every rank has to read the node's nonce"


def test_no_set_is_taken_of_a_node_that_is_drained_lost_or_without_memory(world: World) -> None:
    world.report("one", "s", drained=True)
    world.report("two", problem="memory full")
    assert world.homes.nonces() == (("/two/nonce",), (nonce_id(b"one"), nonce_id(b"two")))
    assert world.take() == {}
    assert not any(world.is_coming(node) for node in READS), "so no version waits for it"
    lose_nodes(world.homes, "two")
    assert world.take() == {}


def test_a_node_from_which_the_daemon_could_not_fetch_is_no_home_for_a_time_that_doubles(world: World) -> None:
    world.report("one", "s", "t", "u", "v")
    assert world.take() == {"one": "/one/s"}
    for seconds in (60, 120):
        world.homes.suspend("one")
        assert world.take(NAMES[1]) == {}
        world.now += seconds - 12
        assert world.take(NAMES[1]) == {}
        world.now += 12
        assert world.take(NAMES[1]).keys() == {"one"}
    world.homes.suspend("one")
    world.report("one", "w", instance="j")
    assert world.take(NAMES[2]) == {"one": "/one/w"}, "another process may be reached"


def test_no_version_waits_for_a_node_that_follows_no_reservation(world: World) -> None:
    assert world.is_coming("one")
    world.now += 10
    assert not world.is_coming("one")
    world.report("one")
    assert world.is_coming("one"), "it is laying out a set"


def test_a_set_is_verified_held_if_it_is_wanted_and_ended_otherwise(world: World) -> None:
    world.report("one", "s")
    world.take()
    assert world.states() == [order_of(NAMES[0], State.UPLOADING)]
    (path,) = PROOF
    world.homes.closed(NAMES[0], [path, "of another node"])
    assert world.states() == [order_of(NAMES[0], State.UPLOADING, [path])]
    world.homes.verify(NAMES[0])
    assert world.states() == [order_of(NAMES[0], State.VERIFYING)]
    world.homes.put_proof(NAMES[0], "one", "i", "s", "", "", PROOF)
    assert world.homes.proofs(NAMES[0], 1.0) == PROOF
    assert world.homes.written(NAMES[0]) == {"one": world.files()}
    world.settle(NAMES[0], READY)
    assert world.states(wanted=(NAMES[0],)) == [order_of(NAMES[0], State.READY)]
    assert world.states() == [order_of(NAMES[0], State.ENDED)]
    lose_nodes(world.homes, "one")
    assert world.homes.problem(NAMES[0]) == "", "a READY version needs no home"


def test_a_proof_counts_from_the_owner_of_the_node_for_the_set_that_it_was_ordered_to_verify(world: World) -> None:
    world.report("one", "s", caller="dns:one@h")
    world.take()
    put = world.homes.put_proof
    with pytest.raises(FailedPrecondition, match="waits for no proof"):
        put(NAMES[0], "one", "i", "s", "dns:one@h", "", PROOF)
    world.homes.verify(NAMES[0])
    with pytest.raises(PermissionDenied):
        put(NAMES[0], "one", "i", "s", "dns:two@h", "", PROOF)
    with pytest.raises(ResourceNotFound):
        put(NAMES[0], "three", "i", "s", "dns:one@h", "", PROOF)
    for instance, set, version in (("j", "s", NAMES[0]), ("i", "t", NAMES[0]), ("i", "s", NAMES[1])):
        with pytest.raises(FailedPrecondition, match="waits for no proof"):
            put(version, "one", instance, set, "dns:one@h", "", PROOF)
    (path,) = PROOF
    for wrong in (
        {},
        {path: FileProof((5, 5), (7,))},
        {path: FileProof((5,), ())},
        {FILES[0].path: PROOF[path]} if FILES[0].path != path else {},
    ):
        with pytest.raises(InvalidArgument):
            put(NAMES[0], "one", "i", "s", "dns:one@h", "", wrong)
    with pytest.raises(HomeLost, match="has not verified"):
        world.homes.proofs(NAMES[0], 1.0)
    put(NAMES[0], "one", "i", "s", "dns:one@h", "", PROOF)
    put(NAMES[0], "one", "i", "s", "dns:one@h", "", {path: FileProof((6,), (8,))})
    assert world.homes.proofs(NAMES[0], 1.0) == PROOF, "the first one stays"


@pytest.mark.parametrize(
    ("event", "reason"), [("gone", "is gone"), ("restarted", "has restarted"), ("refused", "open for writing")]
)
def test_a_version_that_has_lost_a_home_says_so(world: World, event: str, reason: str) -> None:
    world.report("one", "s")
    world.take()
    world.homes.verify(NAMES[0])
    assert world.homes.problem(NAMES[0]) == ""
    match event:
        case "gone":
            lose_nodes(world.homes, "one")
        case "restarted":
            world.report("one", instance="j")
        case "refused":
            world.homes.put_proof(NAMES[0], "one", "i", "s", "", "a process still has x open for writing", {})
    assert reason in world.homes.problem(NAMES[0])
    with pytest.raises(HomeLost, match=reason):
        world.homes.proofs(NAMES[0], 1.0)


def test_a_new_epoch_ends_the_reservation_of_the_former_one_and_its_sets(world: World) -> None:
    former = world.reservation()
    world.homes.reserve(PUBLISHER, (), {})
    assert world.homes.orders("one", ()) == []
    with pytest.raises(FailedPrecondition, match="has ended"):
        world.homes.reserved_files(PUBLISHER, former, "one", "")
    world.homes.reserve(PUBLISHER, FILES, FILE_HOMES)
    assert world.reservation() != former, "so files that ranks of an earlier registration could write are never taken"
    world.report("one", "s")
    assert [file.path for file in world.homes.reserved_files(PUBLISHER, world.reservation(), "one", "").files] == [*PROOF]


def test_a_rank_that_reads_the_store_is_on_the_daemons_host(world: World) -> None:
    class Folder:
        shared, nonce_file, nonce = True, "/store/nonce", b"store"

    register = HomeRegister(Folder())  # type: ignore[arg-type]
    report_to(register, world.reports["one"])
    both = {"/store/nonce": b"store", "/one/nonce": b"one"}
    assert register.host_of(both) == DAEMON
    assert register.host_of({"/one/nonce": b"one"}) == "one"
    assert register.host_of({"/one/nonce": b"else"}) is None
    assert register.host_of({}) is None
