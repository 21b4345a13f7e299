"""Pins of fleets and servers: a version is pinned once for each holder, and released once nobody of it needs it."""

import pytest
from resharder.server.direct.offered_versions import OfferedVersions
from resharder.server.fleets.versions import FleetVersions
from resharder.server.state.errors import ResourceNotFound
from resharder.server.state.version import READY, VersionRecord


class Store:
    """The pins of a store with two READY versions."""

    def __init__(self) -> None:
        self.pinned: list[tuple[str, int, str]] = []
        self.calls = 0

    def pin(self, name: str, number: int, holder: str) -> VersionRecord:
        self.calls += 1
        if number > 2:
            raise ResourceNotFound("VERSION_UNKNOWN", f"version {number} is unknown")
        self.pinned.append((name, number, holder))
        return VersionRecord(name, number, READY, 1, 1, "job", 0, 0, 0.0)

    def release(self, name: str, number: int, holder: str) -> None:
        self.pinned.remove((name, number, holder))


@pytest.fixture
def store() -> Store:
    return Store()


def test_versions_are_pinned_in_addition_to_earlier_ones_and_once(store: Store) -> None:
    pins = FleetVersions(store, store, OfferedVersions())
    assert pins.pin("servers/a", "policy", [1]) == frozenset()
    assert pins.pin("servers/a", "policy", [1, 2]) == frozenset()
    assert pins.pin("servers/b", "policy", [2]) == frozenset()
    assert store.pinned == [("policy", 1, "servers/a"), ("policy", 2, "servers/a"), ("policy", 2, "servers/b")]
    assert (pins.pinned("servers/a", "policy"), pins.pinned("servers/b", "policy")) == ({1, 2}, {2})
    assert pins.pinned("servers/a", "other") == pins.pinned("servers/c", "policy") == frozenset()


def test_versions_that_are_gone_are_returned_and_do_not_keep_others_from_being_pinned(store: Store) -> None:
    pins = FleetVersions(store, store, OfferedVersions())
    assert pins.pin("servers/a", "policy", [3, 1, 4]) == {3, 4}
    assert pins.pinned("servers/a", "policy") == {1}
    assert pins.pin("servers/a", "policy", [3]) == {3}
    assert store.calls == 4


def test_a_release_leaves_what_is_kept_and_what_others_pin(store: Store) -> None:
    pins = FleetVersions(store, store, OfferedVersions())
    for holder in ("servers/a", "fleets/b"):
        pins.pin(holder, "policy", [1, 2])
    pins.release("servers/a", "policy", keep=frozenset({2, 7}))
    assert (pins.pinned("servers/a", "policy"), pins.pinned("fleets/b", "policy")) == ({2}, {1, 2})
    assert store.pinned == [("policy", 2, "servers/a"), ("policy", 1, "fleets/b"), ("policy", 2, "fleets/b")]
    pins.release("servers/a", "policy")
    pins.release("servers/a", "policy")
    assert pins.pinned("servers/a", "policy") == frozenset()
    pins.pin("servers/a", "policy", [2])
    assert store.pinned == [("policy", 1, "fleets/b"), ("policy", 2, "fleets/b"), ("policy", 2, "servers/a")]
