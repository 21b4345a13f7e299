"""A Lease object of Kubernetes as the lease of daemons."""

import threading
import time
from collections.abc import Iterator
from dataclasses import replace

import pytest
from resharder.server.standby.kubernetes_lease import KubernetesLease
from resharder.server.standby.lease import Lease, LeaseConflict, LeaseRecord

from tests.support.lease_api import LeaseApi

SECONDS = 2.0
KEY = "rl/resharder"


@pytest.fixture
def api() -> Iterator[LeaseApi]:
    with LeaseApi() as running:
        yield running


def store(api: LeaseApi) -> KubernetesLease:
    return KubernetesLease("rl", "resharder", SECONDS, api.config)


def held(api: LeaseApi, name: str, *, at_once: bool = False, lost: "list[str] | None" = None) -> Lease:
    lease = Lease(store(api), name, SECONDS, (lost if lost is not None else []).append)
    assert lease.acquire(lambda: 0, threading.Event(), lambda reason: None, at_once=at_once)
    return lease


def test_the_object_is_made_and_shows_who_holds_it_and_for_how_long(api: LeaseApi) -> None:
    assert store(api).read() is None
    assert held(api, "a").term == 1
    spec = api.objects[KEY]["spec"]
    assert (spec["holderIdentity"], spec["leaseTransitions"], spec["leaseDurationSeconds"]) == ("a", 1, 2)
    assert spec["renewTime"].endswith("Z")
    found = store(api).read()
    assert found is not None
    assert (found.term, found.holder) == (1, "a")


def test_one_of_those_who_take_it_at_once_gets_it(api: LeaseApi) -> None:
    held(api, "a")
    before = store(api).read()
    store(api).write(before, LeaseRecord(2, "b"))
    with pytest.raises(LeaseConflict, match="the object has been modified"):
        store(api).write(before, LeaseRecord(2, "c"))
    with pytest.raises(LeaseConflict, match="already exists"):
        store(api).write(None, LeaseRecord(1, "d"))


def test_a_standby_takes_it_once_it_was_not_renewed_for_a_lease(api: LeaseApi) -> None:
    held(api, "a")
    began = time.monotonic()
    assert held(api, "b").term == 2
    assert SECONDS < time.monotonic() - began < 2 * SECONDS


def test_a_released_one_is_taken_at_once(api: LeaseApi) -> None:
    first = held(api, "a")
    first.start()
    first.release()
    assert "holderIdentity" not in api.objects[KEY]["spec"]
    began = time.monotonic()
    assert held(api, "b").term == 2
    assert time.monotonic() - began < SECONDS / 2


def test_a_label_that_somebody_sets_takes_it_from_nobody(api: LeaseApi) -> None:
    lost = list[str]()
    first = held(api, "a", lost=lost)
    api.touch(KEY)
    first.renew()
    assert not first.expires
    assert lost == []


def test_a_renewal_of_which_the_answer_was_lost_is_no_conflict(api: LeaseApi) -> None:
    lease = store(api)
    record = lease.write(None, LeaseRecord(1, "a"))
    lease.write(record, replace(record, renewals=1))  # its answer is lost
    again = lease.write(record, replace(record, renewals=1))
    assert (again.term, again.holder) == (1, "a")


def test_a_holder_that_finds_another_one_ends(api: LeaseApi) -> None:
    first = held(api, "a")
    held(api, "b", at_once=True)
    with pytest.raises(LeaseConflict):
        first.renew()


@pytest.mark.parametrize(("code", "message"), [(503, "answers 503: it fails"), (403, "answers 403: it fails")])
def test_an_api_server_that_refuses_is_no_conflict(api: LeaseApi, code: int, message: str) -> None:
    lease = store(api)
    record = lease.write(None, LeaseRecord(1, "a"))
    api.failing = code
    for call in (lease.read, lambda: lease.write(record, record)):
        with pytest.raises(OSError, match=message):
            call()


def test_an_api_server_that_is_away_is_no_conflict(api: LeaseApi) -> None:
    lease = store(api)
    api.close()
    with pytest.raises(OSError, match="the API server cannot be reached"):
        lease.read()
