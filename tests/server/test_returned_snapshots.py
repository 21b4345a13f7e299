"""Snapshots of the registry, from a store by a node's memory back into an empty folder: which counts, and what is refused."""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
from blake3 import blake3
from resharder.converters.wire.term import Term
from resharder.server.node.kept_snapshots import KeptSnapshots
from resharder.server.nodes import snapshots as snapshots_module
from resharder.server.nodes.decisions import ReplicasShort
from resharder.server.nodes.snapshots import Snapshots
from resharder.server.standby.seals import read_key, seal_of
from resharder.server.standby.tenure import read_term, write_term
from resharder.server.state.errors import FailedPrecondition, InvalidArgument, ResourceNotFound
from resharder.server.state.version import READY, RETIRED
from resharder.server.store import returned_snapshots
from resharder.server.store.folder import StoreFolder
from resharder.server.store.partial import VerifiedVersion
from resharder.server.store.returned_snapshots import PART, ReturnedSnapshots, SnapshotsDiffer, prepare, restore, unfinished
from resharder.server.store.store import Store
from resharder.v1 import node_pb2

from tests.support.observing import wait_until
from tests.support.partial_versions import publish_partial
from tests.support.store_versions import FILES, LAYOUTS, claim, publish

REGISTRY, OTHER = "0123456789abcdef", "fedcba9876543210"
KEY = bytes(range(32))
BLOCK = b"content of a file"
DIGEST = blake3(BLOCK).digest()


def snapshot(term: int, revision: int, registry: str = REGISTRY, model: str = "policy", **file: object) -> node_pb2.Snapshot:
    given = {"path": "drained_nodes.json", "size_bytes": len(BLOCK), "blocks": [DIGEST]} | file
    files = [node_pb2.SnapshotFile(**given)]
    return node_pb2.Snapshot(model=model, registry=registry, term=term, revision=revision, files=files)


def test_of_each_model_the_newest_whole_snapshot_counts() -> None:
    returned = ReturnedSnapshots()
    assert returned.put("a", [snapshot(1, 9)], []) == [DIGEST]
    assert returned.newest() == {}
    assert returned.put("a", [snapshot(1, 9)], [BLOCK, b"unasked"]) == []
    absent = blake3(b"absent").digest()
    newer = snapshot(2, 3, blocks=[absent])
    assert returned.put("b", [newer], []) == [absent]
    assert returned.newest() == {"policy": snapshot(1, 9)}, "it is not whole"
    assert returned.put("c", [snapshot(1, 10), snapshot(2, 2), snapshot(1, 1, model="draft")], []) == []
    assert returned.newest() == {"policy": snapshot(2, 2), "draft": snapshot(1, 1, model="draft")}
    assert returned.put("c", [snapshot(2, 1, blocks=[blake3(b"older").digest()])], []) == [], "of an older one nothing is wanted"
    assert returned.put("b", [newer], [b"absent"]) == []
    assert returned.newest()["policy"] == newer
    assert returned.nodes == {"a", "b", "c"}


def test_nodes_of_two_registries_are_refused_by_name() -> None:
    returned = ReturnedSnapshots()
    returned.put("a", [snapshot(1, 1)], [BLOCK])
    with pytest.raises(SnapshotsDiffer, match=f"nodes/a keeps registry {REGISTRY}, and nodes/b registry {OTHER}: stop the nodes"):
        returned.put("b", [snapshot(7, 7, registry=OTHER)], [])
    assert returned.conflict is not None
    assert returned.newest() == {"policy": snapshot(1, 1)}


def test_different_registries_of_one_revision_are_refused_by_name() -> None:
    returned = ReturnedSnapshots()
    returned.put("a", [snapshot(1, 1)], [])
    with pytest.raises(SnapshotsDiffer, match="nodes/a and nodes/b return different registries of model 'policy' with the same"):
        returned.put("b", [snapshot(1, 1, size_bytes=1)], [])


@pytest.mark.parametrize(
    "wrong",
    [
        snapshot(1, 1, model="../policy"),
        snapshot(0, 1),
        snapshot(1, 0),
        snapshot(1, 1, registry="x"),
        snapshot(1, 1, size_bytes=-1),
        snapshot(1, 1, blocks=[DIGEST] * ((1 << 16) + 1)),
        node_pb2.Snapshot(model="policy", registry=REGISTRY, term=1, revision=1, files=[*snapshot(1, 1).files] * 2),
        *(
            snapshot(1, 1, path=path)
            for path in (
                "",
                "/etc/passwd",
                "../lock",
                "lock",
                "term.json",
                "fleets/../../x.json",
                "models/other/claim.json",
                "models/policy/../other/claim.json",
                "models/policy/versions/00000001/../../claim.json",
                "models/policy/versions/00000001/..",
                "models/policy/versions/1/config.json",
                "models/policy/pool/1-1/model.safetensors",
            )
        ),
    ],
)
def test_what_is_no_snapshot_is_refused(wrong: node_pb2.Snapshot) -> None:
    returned = ReturnedSnapshots()
    with pytest.raises(InvalidArgument, match="the snapshot of model"):
        returned.put("a", [snapshot(1, 1), wrong], [BLOCK])
    assert (returned.newest(), returned.nodes, returned.conflict) == ({}, frozenset(), None)


def test_only_what_is_sealed_with_the_key_counts(tmp_path: Path) -> None:
    file = tmp_path / "key"
    file.write_bytes(b"x" * 32 + b"\n")
    key, given = read_key(file), snapshot(1, 1)
    given.seal = seal_of(given, key)
    changes: list[Callable[[node_pb2.Snapshot], object]] = [
        lambda each: each.ClearField("seal"),
        lambda each: setattr(each, "revision", 2),
        lambda each: setattr(each, "term", 2),
        lambda each: setattr(each, "registry", OTHER),
        lambda each: setattr(each, "model", "draft"),
        lambda each: setattr(each.files[0], "size_bytes", 0),
        lambda each: setattr(each.files[0], "path", "fleets/starts"),
        lambda each: each.files[0].blocks.append(DIGEST),
        lambda each: setattr(each, "seal", seal_of(each, bytes(32))),
    ]
    for change in changes:
        forged, returned = node_pb2.Snapshot(), ReturnedSnapshots(key)
        forged.CopyFrom(given)
        change(forged)
        with pytest.raises(InvalidArgument, match="it is not sealed with this daemon's registry_key"):
            returned.put("a", [forged], [BLOCK])
        assert returned.put("a", [given], []) == [DIGEST]
    file.write_bytes(b"x" * 31)
    with pytest.raises(ValueError, match="has 31 bytes: expected a random secret of at least 32"):
        read_key(file)


class World:
    """A store, its snapshots, and a node that keeps them: the node's calls are method calls."""

    def __init__(self, root: Path, keepers: int = 1) -> None:
        self._begin(root, Store(root), keepers)
        write_term(root, Term(REGISTRY, 4))
        (root / "fleets").mkdir()
        (root / "fleets/starts").write_bytes(b"3\n")
        for fleet in self.fleets:
            (root / f"fleets/{fleet}.json").write_bytes(b"{}")

    @classmethod
    def over(cls, other: "World") -> "World":
        """Return the world of the daemon's next start."""
        made = cls.__new__(cls)
        made._begin(other.root, other.store, 1)
        return made

    def _begin(self, root: Path, store: Store, keepers: int) -> None:
        self.root, self.store, self.fleets, self.now = root, store, {"canary": "policy", "other": "draft"}, 0.0
        self.snapshots = Snapshots(
            root,
            self.store.catalogue,
            lambda: self.fleets,
            lambda key, read: read(),
            Term(REGISTRY, 4),
            3,
            keepers,
            5.0,
            KEY,
            lambda: self.now,
        )
        self.kept = KeptSnapshots(self, "a", lambda: None)  # type: ignore[arg-type]
        self.returned = ReturnedSnapshots(KEY)

    def report(self, node: str = "a") -> None:
        """Let a node report what it keeps."""
        given = {"node": f"nodes/{node}", "keeps_snapshots": True, "snapshots": self.kept.revisions()}
        self.snapshots.reported(node_pb2.SyncNodeRequest(**given))

    def keep(self) -> None:
        """Let the node keep the newest snapshots, as its thread does, and report it."""
        self.report()
        self.snapshots.refresh()
        self.kept.follow(self.snapshots.revisions())
        for model in self.kept._due():
            self.kept._keep(self.kept._wanted[model], *self.kept._fetch(model))
        self.report()

    def snapshot(self, node: str, model: str, known: list[bytes]) -> node_pb2.GetSnapshotResponse:
        return self.snapshots.get(model, known)

    def put_snapshots(self, node: str, snapshots: list[node_pb2.Snapshot], blocks: list[bytes]) -> list[bytes]:
        return self.returned.put(node, snapshots, blocks)


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    made = World(tmp_path / "first")
    with closing(made.store):
        yield made


def test_a_registry_comes_back_from_a_nodes_memory(world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(snapshots_module, "_ANSWER_BYTES", 1)  # a block in each answer
    epoch = claim(world.store)
    whole, (partial, _) = publish(world.store, epoch, 1), publish_partial(world.store, epoch, 2, [0])
    world.keep()
    assert world.kept.give() == ["policy"]
    root = tmp_path / "second"
    with closing(StoreFolder(root, shared=False)):
        prepare(root)
        assert restore(root, world.returned) == read_term(root) == Term(REGISTRY, 5)
    assert not unfinished(root)
    with closing(Store(root)) as store:
        for record in (whole, partial):
            found = store.catalogue.get("policy", record.number)
            assert found == record
            lacking = store.reader.partial("policy", record.number)
            assert lacking is not None
            assert (len(lacking.held()), lacking.nodes) == (0, {"a"})
            assert (
                store.reader.manifest("policy", record.number).digests
                == world.store.reader.manifest("policy", record.number).digests
            )
            for layout in LAYOUTS:
                stat = (store.folder.path(found) / layout.path).stat()
                assert (stat.st_size, stat.st_blocks * 512 < layout.size) == (layout.size, True)
        assert store.reader.model_files("policy") == FILES
        assert store.epochs.claim("policy") == world.store.epochs.claim("policy")
        assert store.epochs.begin("policy", "job", 1).epoch == epoch
        assert store.epochs.begin("policy", "another job", 1).epoch == epoch + 101
        assert store.catalogue.newest_number("policy") == partial.number + 100
    assert sorted(path.name for path in (root / "fleets").iterdir()) == ["canary.json", "starts"]


def test_a_snapshot_has_a_higher_revision_once_something_in_it_has_changed(world: World) -> None:
    epoch = claim(world.store)
    record = publish(world.store, epoch, 1)
    assert world.snapshots.revisions() == [], "no node keeps any"
    world.keep()
    (first,) = world.snapshots.revisions()
    assert first.revision >> 32 == 3, "the number of the start"
    world.keep()
    assert world.snapshots.revisions() == [first]
    for change in (
        lambda: publish(world.store, epoch, 2),
        lambda: (world.root / "fleets/canary.json").write_bytes(b'{"pinned": 1}'),
        lambda: (world.root / "drained_nodes.json").write_bytes(b'["b"]'),
        lambda: world.store.lifecycle.retire("policy", [record.number]),
    ):
        change()
        before, _ = world.snapshots.revisions(), world.keep()
        assert world.snapshots.revisions()[0].revision == before[0].revision + 1
    with pytest.raises(ResourceNotFound, match="no snapshot of the registry of model 'nobody'"):
        world.snapshots.get("nobody", [])


def test_a_node_keeps_what_a_daemon_without_snapshots_does_not_name_and_drops_another_registry(world: World) -> None:
    publish(world.store, claim(world.store), 1)
    world.keep()
    kept = world.kept.revisions()
    world.kept.follow([])
    assert world.kept.revisions() == kept
    world.kept.follow([node_pb2.SnapshotRevision(model="draft", revision=1, registry=OTHER, term=1)])
    world.kept._keep((OTHER, 1, 1), snapshot(1, 1, registry=OTHER, model="draft"), {DIGEST: BLOCK})
    assert [each.model for each in world.kept.revisions()] == ["draft"]
    world.kept.follow(kept)
    assert world.kept._due() == ["policy"]


def test_what_a_node_keeps_of_another_registry_or_term_does_not_count(world: World) -> None:
    publish(world.store, claim(world.store), 1)
    world.keep()
    assert world.snapshots.copies() == {"policy": 1}
    (own,) = world.kept.revisions()
    for wrong in ({"registry": OTHER}, {"term": 3}):
        other = node_pb2.SnapshotRevision(
            **{"model": own.model, "revision": own.revision, "registry": own.registry, "term": own.term} | wrong
        )
        world.snapshots.reported(node_pb2.SyncNodeRequest(node="nodes/a", keeps_snapshots=True, snapshots=[other]))
        assert world.snapshots.copies() == {"policy": 0}
        world.kept.follow([other])
        assert world.kept._due() == ["policy"]


def test_a_snapshot_that_is_newer_than_the_order_is_not_fetched_again(world: World) -> None:
    epoch = claim(world.store)
    world.keep()
    publish(world.store, epoch, 1)
    world.snapshots.refresh()
    ordered = world.snapshots.revisions()
    publish(world.store, epoch, 2)
    world.snapshots.refresh()
    world.kept.follow(ordered)
    (model,) = world.kept._due()
    assert world.kept.fetches()
    world.kept._keep(world.kept._wanted[model], *world.kept._fetch(model))
    assert not world.kept.fetches()
    assert world.kept.revisions() == world.snapshots.revisions() != ordered
    assert world.kept._due() == []
    world.kept.follow(world.snapshots.revisions())
    assert world.kept._due() == [model]


def test_a_daemon_that_starts_again_does_not_read_its_versions_for_their_checksums(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    epoch = claim(world.store)
    kept, ended = publish(world.store, epoch, 1), publish(world.store, epoch, 2)
    newest = publish(world.store, epoch, 3)
    world.keep()
    before = world.snapshots.get("policy", []).snapshot
    world.store.lifecycle.retire("policy", [ended.number])

    def unread(*arguments: object) -> int:
        raise AssertionError("it reads a version")

    with monkeypatch.context() as patched:
        patched.setattr(snapshots_module, "checksum_of", unread)
        again = World.over(world)
        again.keep()
        files = {file.path: file for file in again.snapshots.get("policy", []).snapshot.files}
    assert files.keys() < {file.path for file in before.files}
    assert all(files[file.path] == file for file in before.files if "/versions/" in file.path and file.path in files)
    assert {path.name for path in (world.root / "checksums").iterdir()} == {kept.fingerprint, newest.fingerprint}
    (world.root / "checksums" / kept.fingerprint / "pieces.json").write_bytes(b"{}")
    damaged = World.over(world)
    damaged.keep()
    assert {file.path: file for file in damaged.snapshots.get("policy", []).snapshot.files} == files


def before_ready(world: World, act: Callable[[Sequence[VerifiedVersion]], object]) -> None:
    """Commit a version, and call a function once it is verified."""

    def verified(versions: Sequence[VerifiedVersion], content: object) -> None:
        act(versions)

    publish_partial(world.store, claim(world.store), 1, [0], before_ready=verified)


def test_ready_waits_until_nodes_keep_the_registry_with_the_version(world: World) -> None:
    def act(versions: Sequence[VerifiedVersion]) -> None:
        world.report()
        with ThreadPoolExecutor() as pool:
            waiting = pool.submit(world.snapshots.await_keepers, versions, lambda: "")
            wait_until(lambda: bool(world.snapshots.revisions()))
            assert not waiting.done()
            world.keep()
            waiting.result(60)
        manifest = f"models/policy/versions/{versions[0].manifest.record.number:08}/resharder.json"
        assert manifest in {file.path for file in world.snapshots.get("policy", []).snapshot.files}

    before_ready(world, act)


def test_ready_waits_for_no_node_where_none_keeps_a_registry(world: World) -> None:
    before_ready(world, lambda versions: world.snapshots.await_keepers(versions, lambda: ""))


def test_a_version_that_no_node_keeps_the_registry_of_is_aborted_with_the_reason(world: World) -> None:
    def act(versions: Sequence[VerifiedVersion]) -> None:
        world.report()
        with pytest.raises(ReplicasShort, match="nodes/b, into whose files ranks wrote, is gone"):
            world.snapshots.await_keepers(versions, lambda: "nodes/b, into whose files ranks wrote, is gone")
        with ThreadPoolExecutor() as pool:
            waiting = pool.submit(world.snapshots.await_keepers, versions, lambda: "")
            wait_until(lambda: bool(world.snapshots.revisions()))
            world.now = 6.0
            with pytest.raises(ReplicasShort, match="0 of 1 nodes keep the registry with it: nothing has changed for 5 s"):
                waiting.result(60)

    before_ready(world, act)


def returned(world: World) -> ReturnedSnapshots:
    publish(world.store, claim(world.store), 1)
    world.keep()
    world.kept.give()
    return world.returned


def test_a_folder_that_is_not_empty_is_refused_and_left_as_it_is(world: World) -> None:
    found = {path: path.stat().st_mtime_ns for path in world.root.rglob("*")}
    with pytest.raises(FailedPrecondition, match=r"is not empty, it has .*models.*: start without this option"):
        prepare(world.root)
    assert found == {path: path.stat().st_mtime_ns for path in world.root.rglob("*")}


@pytest.mark.parametrize("stops_at", ["write_term", "move", "sync"])
def test_a_restore_that_is_interrupted_begins_anew(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stops_at: str
) -> None:
    found, root = returned(world), tmp_path / "second"
    root.mkdir()

    def stop(*arguments: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(returned_snapshots, stops_at, stop)
        with pytest.raises(KeyboardInterrupt):
            restore(root, found)
    assert unfinished(root)
    prepare(root)
    assert list(root.iterdir()) == []
    assert restore(root, found) == Term(REGISTRY, 5)
    (root / PART).mkdir()  # as after a kill before it was removed
    assert not unfinished(root)
    with closing(Store(root)) as store:
        assert [record.state for record in store.catalogue.versions("policy")] == [READY]


def test_a_forged_manifest_is_no_version(world: World, tmp_path: Path) -> None:
    found, root = returned(world), tmp_path / "second"
    root.mkdir()
    for file in found.newest()["policy"].files:
        if file.path.endswith("resharder.json"):
            found._blocks[file.blocks[0]] = found._blocks[file.blocks[0]].replace(b'"step":1', b'"step":7')
    restore(root, found)
    with closing(Store(root)) as store:
        assert not [each for each in store.catalogue.versions("policy") if each.state in (READY, RETIRED)]


def test_a_version_of_which_no_piece_comes_back_is_lost_with_the_reason(world: World, tmp_path: Path) -> None:
    found, root = returned(world), tmp_path / "second"
    root.mkdir()
    restore(root, found)
    with closing(Store(root)) as store:
        (record,) = store.catalogue.versions("policy")
        lost = store.lifecycle.lose("policy", record.number, "neither the daemon nor a node holds 1 of 1 pieces")
        assert (lost.state, lost.is_lost) == (RETIRED, True)
        assert replace(record, state=RETIRED, reason=lost.reason, end_time=lost.end_time) == lost
