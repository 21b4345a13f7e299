"""Two real servers with two adapters each: fleets of an adapter move as those of a model do, and each by itself."""

import threading
import time
from collections.abc import Iterator

import pytest
from resharder.client.operator.answers import Move, Power, UpdateStrategy

from tests.support.adapter_server import ADAPTER, AdapterSite
from tests.support.observing import wait_until

pytestmark = pytest.mark.full
SECOND = "summaries"
ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
BOTH = ("left", "right")
AT_ONCE = UpdateStrategy(kind=UpdateStrategy.Kind.ALL_AT_ONCE)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[AdapterSite]:
    folder = tmp_path_factory.mktemp("fleets")
    with AdapterSite(folder, adapters=f"{ADAPTER},{SECOND}:night", targets=ATTENTION, args=["--max-loras", "4"]) as running:
        for name in BOTH:
            running.serve(name)
        yield running


def check_answers(site: AdapterSite, version: int, *names: str, adapter: str = ADAPTER) -> None:
    for name in names:
        label, tokens = site.answer(name, adapter)
        assert (label, site.is_right(label, tokens)) == (f"1;{adapter}={version}", True)


def test_adapters_of_one_server_are_versions_of_their_own_and_in_fleets_of_their_own(site: AdapterSite) -> None:
    first, second = site.publish(0), site.publish(1, 2, adapter=SECOND)
    site.wait_versions(first, first)
    site.wait_versions(second, second, adapter=SECOND)
    assert {server.name: server.fleet for server in site.operator.servers()} == {
        f"servers/{name}{suffix}": fleet
        for name in BOTH
        for suffix, fleet in (("", "policy"), (f".{ADAPTER}", ADAPTER), (f".{SECOND}", "night"))
    }
    check_answers(site, first, *BOTH)
    check_answers(site, second, *BOTH, adapter=SECOND)
    assert site.answer("left", "m") == ("1", site.of_base)
    names = [model["id"] for model in site.servers["left"].request("GET", "/v1/models").json()["data"]]
    assert names == ["m", ADAPTER, SECOND]


def test_a_canary_is_one_server_of_the_adapters_fleet_and_the_others_follow_an_approval(site: AdapterSite) -> None:
    before, other = site.versions()[0], site.versions(SECOND)
    canary = UpdateStrategy(kind=UpdateStrategy.Kind.CANARY, canaries=1, approval=True)
    site.operator.set_fleet(ADAPTER, strategy=canary)
    number = site.publish(1)
    wait_until(lambda: sorted(site.versions()) == [before, number], "one server is the canary", 60)
    move = site.operator.fleet(ADAPTER).move
    assert move is not None
    assert move.state in (Move.State.TRYING, Move.State.HOLDING)
    for name, version in zip(BOTH, site.versions(), strict=True):
        check_answers(site, version, name)
    wait_until(lambda: site.operator.fleet(ADAPTER).move.state == Move.State.HOLDING, "it waits", 30)  # type: ignore[union-attr]
    site.operator.approve(ADAPTER)
    site.wait_versions(number, number)
    check_answers(site, number, *BOTH)
    assert site.versions(SECOND) == other, "the other adapter's fleet has not moved"


def test_a_pinned_fleet_stays_until_it_is_updated(site: AdapterSite) -> None:
    site.operator.set_fleet(ADAPTER, strategy=AT_ONCE)
    before = site.versions()[0]
    site.operator.pin(ADAPTER)
    number, other = site.publish(2), site.publish(0, adapter=SECOND)
    site.wait_versions(other, other, adapter=SECOND)
    assert site.versions() == [before, before]
    check_answers(site, before, *BOTH)
    site.operator.update(ADAPTER)
    site.wait_versions(number, number)
    check_answers(site, number, *BOTH)


def test_after_an_atomic_move_no_server_answers_with_the_version_before(site: AdapterSite) -> None:
    site.operator.set_fleet(ADAPTER, strategy=UpdateStrategy(kind=UpdateStrategy.Kind.ATOMIC))
    before, found, ended = site.versions()[0], list[str](), threading.Event()

    def ask() -> None:
        while not ended.is_set():
            for name in BOTH:
                label, tokens = site.answer(name)
                assert site.is_right(label, tokens)
                found.append(label)

    reader = threading.Thread(target=ask)
    reader.start()
    time.sleep(0.5)
    number = site.publish(0)
    site.wait_versions(number, number)
    time.sleep(0.5)
    ended.set()
    reader.join()
    labels = [f"1;{ADAPTER}={version}" for version in (before, number)]
    assert found == [labels[0]] * found.count(labels[0]) + [labels[1]] * found.count(labels[1])
    assert set(found) == set(labels)
    site.operator.set_fleet(ADAPTER, strategy=AT_ONCE)


def test_a_rank_above_the_servers_is_refused_and_the_version_before_stays(site: AdapterSite) -> None:
    before = site.versions()[0]
    site.publish_folder(site.adapter("deep", rank=16, targets=ATTENTION))
    says = "the adapter has rank 16, and this server takes 8: start vLLM with --max-lora-rank 16"
    wait_until(lambda: all(says in site.state(name).reason for name in BOTH), "both servers refuse it", 60)
    check_answers(site, before, *BOTH)
    other = site.publish(2, adapter=SECOND)
    site.wait_versions(other, other, adapter=SECOND, timeout=30)  # it gets the only slot that is free


def test_a_module_that_the_server_has_not_wrapped_is_refused_and_a_version_without_it_follows(site: AdapterSite) -> None:
    before = site.versions()[0]
    site.publish_folder(site.adapter("wide", targets=()))
    says = "this server has no adapters for 6 modules of the adapter, and would serve it without them"
    wait_until(lambda: all(says in site.state(name).reason for name in BOTH), "both servers refuse it", 60)
    check_answers(site, before, *BOTH)
    number = site.publish(1)
    site.wait_versions(number, number)
    check_answers(site, number, *BOTH)


@pytest.mark.parametrize("level", [1, 2])
def test_adapters_sleep_and_wake_with_their_base(site: AdapterSite, level: int) -> None:
    before, other = site.versions()[0], site.versions(SECOND)[0]
    site.operator.sleep("policy", "left", level=level)
    asleep = {1: Power.ASLEEP_1, 2: Power.ASLEEP_2}[level]
    wait_until(lambda: site.operator.server("left").power == asleep, "it sleeps", 60)
    assert site.ask("left").status == 503
    check_answers(site, before, "right")
    number = site.publish(level)
    wait_until(lambda: site.versions()[1] == number, "the server that is awake follows", 60)
    site.operator.wake("policy", "left")
    site.wait_versions(number, number)
    check_answers(site, number, *BOTH)
    check_answers(site, other, *BOTH, adapter=SECOND)
    assert site.answer("left", "m") == ("1", site.of_base)


def test_the_name_of_an_adapter_in_vllms_metrics_has_no_version(site: AdapterSite) -> None:
    check_answers(site, site.versions()[0], "left")
    lines = site.servers["left"].request("GET", "/metrics").body.decode().splitlines()
    found = [
        line for line in lines if line.startswith("vllm:lora_requests_info") and f'running_lora_adapters="{ADAPTER}"' in line
    ]
    assert found
    assert not [line for line in lines if f"{ADAPTER}@" in line]
