"""The daemon's register of files on nodes, where nodes gather boxes from each other: in which versions, by which orders."""

import pytest
from resharder.converters.geometry.layout import Range, TensorSpec
from resharder.converters.storage.files import lay_out
from resharder.server.holding.part_files import FileProof, GatheredBoxes
from resharder.server.nodes import homes
from resharder.server.nodes.homes import HomeLost, HomeRegister, NodeHome
from resharder.server.state.version import ABORTED, READY, VersionRecord
from resharder.v1 import node_pb2

from tests.support.node_reports import lose_nodes, order_of, report_of, report_to, reservation_of, with_values

GROUPS = {"a": "one", "b": "two", "g": "one, gathered"}
FILES = lay_out([TensorSpec(name, "BF16", (64, 8)) for name in ("a", "b", "c", "g")], homes=GROUPS)
PATHS = {name: file.path for file in FILES for name in file.by_name}
HOMES = {PATHS["a"]: "one", PATHS["b"]: "two", PATHS["g"]: "one"}
GATHERED = tuple(
    GatheredBoxes(PATHS["g"], node, (("g", (Range(start, 16), Range(0, 8))),)) for node, start in (("two", 32), ("three", 48))
)
PUBLISHER, VERSION = "models/policy/publishers/1", "models/policy/versions/1"
READS = {node: [{f"/{node}/nonce": node.encode()}] for node in ("one", "two", "three")}
WHOLE = (NodeHome("one", "/one/s", (PATHS["a"],)), NodeHome("two", "/two/s", (PATHS["b"],)))

State = node_pb2.FileSetOrder


def proof(*names: str) -> dict[str, FileProof]:
    return {PATHS[name]: FileProof((5,), (7,)) for name in names}


class World:
    """A register with three nodes that have a set each: `one` gathers boxes from the others, and `three` has nothing else."""

    def __init__(self) -> None:
        self.now = 0.0
        self.homes = HomeRegister(clock=self._clock)
        for node in READS:
            self.report(node)
        self.homes.reserve(PUBLISHER, FILES, HOMES, GATHERED)
        for node in READS:
            self.report(node)

    def _clock(self) -> float:
        self.now += 0.2  # a wait ends soon
        return self.now

    def report(self, node: str, *, drained: bool = False, caller: str = "", **more: object) -> None:
        known = [reservation_of(each.id, node, ["s"]) for each in self.homes.orders(node, ())]
        report = report_of(node, gathers=True, reservations=known)
        report_to(self.homes, with_values(report, **more), caller, drained)

    def take(self) -> tuple[NodeHome, ...]:
        return self.homes.take(PUBLISHER, VERSION, READS)

    def order(self, node: str, *wanted: str) -> node_pb2.FileSetOrder:
        (found,) = self.homes.orders(node, wanted)[0].sets
        return found

    def prove(self, node: str, files: dict[str, FileProof], problem: str = "", unreachable: str = "") -> None:
        self.homes.put_proof(VERSION, node, "i", "s", "", problem, files, unreachable)


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> World:
    monkeypatch.setattr(homes, "LAYOUT_SECONDS", 0.5)
    return World()


def test_a_version_for_which_all_nodes_have_a_set_is_gathered(world: World) -> None:
    assert world.take() == (
        NodeHome("one", "/one/s", (PATHS["a"], PATHS["g"]), True),
        NodeHome("two", "/two/s", (PATHS["b"],), True),
        NodeHome("three", "/three/s", (), True),
    )
    world.homes.closed(VERSION, [PATHS["a"], PATHS["g"]])
    assert world.order("one") == order_of(VERSION, State.UPLOADING, [PATHS["a"]], True), "`g` lacks boxes until then"
    world.homes.verify(VERSION)
    sources = (("three", "three:7679"), ("two", "two:7679"))
    assert world.order("one") == order_of(VERSION, State.VERIFYING, (), True, *sources)
    assert world.order("three") == order_of(VERSION, State.VERIFYING, (), True)
    world.prove("one", proof("a", "g"))
    world.prove("two", proof("b"))
    assert world.homes.proofs(VERSION, 5) == proof("a", "b", "g"), "no proof of a node without a file of its own is waited for"
    assert set(world.homes.written(VERSION)) == {"one", "two"}
    world.homes.version_changed(VersionRecord("policy", 1, READY, 1, 1, "job", 1, 1, 0.0))
    assert world.order("one", VERSION).state == node_pb2.FileSetOrder.READY
    assert world.order("three").state == node_pb2.FileSetOrder.ENDED


@pytest.mark.parametrize("why", ["older", "drained", "gone", "other ranks"])
def test_a_version_that_one_node_cannot_be_part_of_is_gathered_by_none(world: World, why: str) -> None:
    if why == "gone":
        lose_nodes(world.homes, "three")
    elif why != "other ranks":
        world.report("three", drained=why == "drained", gathers=why != "older")
    reads = {**READS, "three": [{"/three/nonce": b"of an earlier process"}]} if why == "other ranks" else READS
    assert world.homes.take(PUBLISHER, VERSION, reads) == WHOLE
    world.homes.closed(VERSION, [PATHS["a"], PATHS["g"]])
    assert world.order("one") == order_of(VERSION, State.UPLOADING, [PATHS["a"]]), "`g` is the daemon's"
    world.homes.verify(VERSION)
    assert world.order("one") == order_of(VERSION, State.VERIFYING)
    world.prove("one", proof("a"))
    world.prove("two", proof("b"))
    assert world.homes.proofs(VERSION, 5) == proof("a", "b")


def test_a_node_that_did_not_deliver_its_boxes_is_suspended(world: World) -> None:
    world.take()
    world.homes.verify(VERSION)
    world.prove("one", {}, "nodes/three does not deliver boxes: 404", "three")
    with pytest.raises(HomeLost, match="nodes/one: nodes/three does not deliver boxes: 404"):
        world.homes.proofs(VERSION, 5)
    world.homes.version_changed(VersionRecord("policy", 1, ABORTED, 1, 1, "job", 1, 1, 0.0))
    assert [world.homes._usable(PUBLISHER, node, READS[node], world.now) is not None for node in READS] == [
        True,
        True,
        False,
    ]


def test_a_node_blames_none_from_which_it_gathers_nothing(world: World) -> None:
    world.take()
    world.homes.verify(VERSION)
    world.prove("two", {}, "a problem", "one")
    assert world.homes._usable(PUBLISHER, "one", READS["one"], world.now) is not None


def test_nodes_keep_memory_for_their_parts(world: World) -> None:
    assert world.homes.reserved_bytes("three") == 2 * 4096, "the page of the header and of the boxes, in two sets"


def test_a_node_admits_the_nodes_that_gather_from_it_once_the_daemon_has_let_them_read_the_layout(world: World) -> None:
    (order,) = world.homes.orders("three", ())
    world.report("one", caller="dns:one.test@10.0.0.1")
    assert order.readers == []
    world.homes.reserved_files(PUBLISHER, order.id, "one", "dns:one.test@10.0.0.1")
    assert world.homes.orders("three", ())[0].readers == ["dns:one.test"]
    assert world.homes.orders("one", ())[0].readers == []
    world.report("one", caller="dns:another.test@10.0.0.1")
    assert world.homes.orders("three", ())[0].readers == [], "another identity has the node's name"
    world.report("one", caller="token:hosts@10.0.0.1", certificate="sha256:1234")
    world.homes.reserved_files(PUBLISHER, order.id, "one", "token:hosts@10.0.0.1")
    assert world.homes.orders("three", ())[0].readers == ["sha256:1234"]


def test_files_that_ranks_write_are_shown_on_the_node_that_is_their_home(world: World) -> None:
    world.take()
    assert {node: [file.path for file in world.homes.uploading(node).get(VERSION, ((), ()))[0]] for node in READS} == {
        "one": [PATHS["a"], PATHS["g"]],
        "two": [PATHS["b"]],
        "three": [],
    }
