"""A rank's links: what becomes of the others while one is being met, and of one that fails or is given up meanwhile."""

import threading
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from resharder.client.direct import transfer
from resharder.client.direct.base import DirectFailed
from resharder.client.direct.links import TransferLinks

from tests.support.observing import wait_until

CPU, BOUND = torch.device("cpu"), 10.0


class Link:
    """One that is met as soon as `met` is set. Groups of real processes: tests/e2e/test_direct.py."""

    def __init__(self, met: threading.Event, wrong: str = "") -> None:
        assert met.wait(BOUND)
        self.wrong, self.prepared, self.closed = wrong, 0, threading.Event()

    def prepare(self, sources: Mapping[str, torch.Tensor], targets: Mapping[str, torch.Tensor]) -> None:
        if self.wrong:
            raise DirectFailed(self.wrong)
        self.prepared += 1

    def close(self) -> None:
        self.closed.set()


class Site:
    def __init__(self) -> None:
        self.links = TransferLinks({}, CPU)
        self.made: dict[str, Link] = {}
        self.failures: list[tuple[str, str]] = []
        self.failed = threading.Event()

    def meet(self, group: str, wrong: str = "") -> threading.Event:
        met = threading.Event()

        def make() -> Link:
            self.made[group] = Link(met, wrong)
            return self.made[group]

        self.links.meet(group, make, self.note)  # type: ignore[arg-type]
        return met

    def note(self, group: str, error: Exception) -> None:
        self.failures.append((group, str(error)))
        self.failed.set()


@pytest.fixture
def site() -> Site:
    return Site()


def test_a_link_is_there_while_another_is_being_met(site: Site) -> None:
    slow = site.meet("slow")
    site.meet("quick").set()
    assert site.links.get("quick") is site.made["quick"]
    site.links.prepare(site.note)
    assert (site.made["quick"].prepared, "slow" in site.made) == (2, False)
    slow.set()
    assert site.links.get("slow") is site.made["slow"]
    assert site.made["slow"].prepared == 1


def test_one_that_was_dropped_while_it_was_met_is_closed_when_it_has_been(site: Site) -> None:
    met = site.meet("left")
    site.links.drop("left")
    with pytest.raises(DirectFailed, match="there is no link of group left"):
        site.links.get("left")
    met.set()
    wait_until(lambda: "left" in site.made, "it has been met")
    assert site.made["left"].closed.wait(BOUND)


def test_one_that_fails_is_told_of_and_gone(site: Site) -> None:
    site.meet("wrong", "not as it was declared").set()
    assert site.failed.wait(BOUND)
    assert site.failures == [("wrong", "not as it was declared")]
    assert site.made["wrong"].closed.is_set()
    with pytest.raises(DirectFailed, match="there is no link of group wrong"):
        site.links.get("wrong")


def test_one_whose_tensors_have_changed_is_told_of_before_servers_wait(site: Site) -> None:
    for group in ("a", "b"):
        site.meet(group).set()
        site.links.get(group)
    site.made["a"].wrong = "another shape"
    site.links.prepare(site.note)
    assert site.failures == [("a", "another shape")]
    assert site.made["a"].closed.is_set()
    assert site.links.get("b").prepared == 2  # type: ignore[attr-defined]


def test_all_are_closed_at_the_end(site: Site) -> None:
    for group in ("a", "b"):
        site.meet(group).set()
        site.links.get(group)
    site.links.close()
    assert all(link.closed.is_set() for link in site.made.values())


def is_mapped(address: int) -> bool:
    areas = (line.split()[0].split("-") for line in Path("/proc/self/maps").read_text().splitlines())
    return any(int(begin, 16) <= address < int(end, 16) for begin, end in areas)


def test_the_buffers_of_a_link_that_a_thread_has_formed_go_back_to_the_kernel_with_it() -> None:
    """From malloc, each link would leave them in the arena of the thread that formed it."""
    formed: list[list[torch.Tensor]] = []
    thread = threading.Thread(target=lambda: formed.append(transfer._buffers([70_000, 30_000], CPU, None)))
    thread.start()
    thread.join()
    buffers = formed.pop()
    address = buffers[1].data_ptr()
    buffers[1].fill_(1)
    del buffers[0]
    assert is_mapped(address)
    buffers.clear()
    assert not is_mapped(address)
