"""The direct path between processes: two senders and two receivers over gloo, and what happens when one of them fails."""

import json
import os
import signal
import subprocess
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from tests.support import megatron_shim  # noqa: F401 - before megatron-core

# isort: split
import torch
from resharder.client.direct.base import DirectFailed
from resharder.client.direct.nccl_group import ctas_of
from resharder.client.direct.rendezvous import address_towards, make_group
from resharder.converters.models.megatron.worlds import Parallel, world_layouts
from torch.distributed import HashStore, TCPStore

from benchmarks.direct_layouts import DENSE, EXPERTS, written_trainer

Acts = list[dict[str, dict[str, Any]]]  # by rank and name


@pytest.fixture(scope="module")
def acts() -> Acts:
    """Four processes, once, for all tests here."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=60))
    command = [sys.executable, "-m", "tests.client.direct_ranks"]
    environment, folder = os.environ | {"OMP_NUM_THREADS": "1"}, Path(__file__).parents[2]
    processes = [
        subprocess.Popen([*command, str(rank), str(store.port)], stdout=subprocess.PIPE, text=True, env=environment, cwd=folder)
        for rank in range(4)
    ]
    try:
        outputs = [process.communicate(timeout=900)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert [process.returncode for process in processes] == [0, -signal.SIGKILL, 0, 0]
    return [{act["act"]: act for act in map(json.loads, text.splitlines())} for text in outputs]


@pytest.mark.parametrize("kind", ["dense", "experts"])
def test_receivers_hold_each_version_byte_for_byte(acts: Acts, kind: str) -> None:
    for rank in (2, 3):
        assert acts[rank][kind]["equal"] == [True, True]
        assert acts[rank][kind]["rounds"] > 3
        assert acts[rank][kind]["round0"] > 0


@pytest.mark.parametrize("kind", ["dense", "experts"])
def test_tensors_are_whole_when_the_last_round_that_writes_into_them_has_arrived(acts: Acts, kind: str) -> None:
    for rank in (2, 3):
        assert acts[rank][kind]["as complete"] == acts[rank][kind]["tensors"]
        assert acts[rank][kind]["early"] > 0


@pytest.mark.parametrize("act", ["shared dense", "shared experts", "mixed"])
def test_workers_copy_each_version_from_memory_that_ranks_share(acts: Acts, act: str) -> None:
    for rank in (2, 3):
        assert acts[rank][act]["equal"] == [True, True] * (3 if act == "shared dense" else 2)
        assert acts[rank][act]["received"][0] == acts[rank][act]["received"][1] > 0


def test_only_what_is_not_shared_goes_over_the_network_library(acts: Acts) -> None:
    assert [act["shared dense"]["rest"] for act in acts] == [[], [], [], []]
    assert [act["shared experts"]["readers"] for act in acts] == [[], [], [0, 1], [0, 1]]
    assert [act["mixed"]["owners"] for act in acts] == [[2], [2], [], []]
    assert [act["mixed"]["rest"] for act in acts] == [[3], [3], [], [0, 1]]


def test_members_of_a_shared_transfer_give_up_when_one_sleeps_or_is_told_to(acts: Acts) -> None:
    # The other receiver may have read everything before the senders learn of the abort: then it has a whole version.
    for act, ranks in (("shared asleep", (0, 1, 2, 3)), ("shared aborted", (0, 1, 2))):
        for rank in ranks:
            assert acts[rank][act]["error"], (act, rank)
    assert not any(rank_acts["shared asleep"]["torn"] for rank_acts in acts), "no rank has let a worker read"


def test_a_receiver_that_refuses_at_the_end_has_a_torn_transfer(acts: Acts) -> None:
    assert acts[2]["refused"]["error"] == "other tensors than before"
    assert acts[2]["refused"]["torn"]


def test_a_group_has_no_members_that_nothing_goes_between(acts: Acts) -> None:
    assert {act["dense"]["size"] for act in acts} == {2}
    assert {act["experts"]["size"] for act in acts} == {4}


def test_receivers_of_a_sender_that_sleeps_too_long_give_up_while_it_does(acts: Acts) -> None:
    for rank in (2, 3):
        assert acts[rank]["asleep"]["error"]
        assert acts[rank]["asleep"]["torn"]
    assert acts[1]["asleep"]["error"]
    assert not acts[1]["asleep"]["torn"]


def test_a_group_that_another_thread_aborts_fails_while_its_peer_sleeps_and_says_why(acts: Acts) -> None:
    assert acts[2]["aborted"]["error"] == "the daemon said so"


def test_after_failures_a_new_group_works(acts: Acts) -> None:
    assert all(acts[rank]["again"]["equal"] == [True] for rank in (2, 3))


def test_receivers_outlive_a_killed_sender_and_hear_of_it_before_the_timeout(acts: Acts) -> None:
    for rank in (2, 3):
        assert acts[rank]["killed"]["error"]
        assert "timed out" not in acts[rank]["killed"]["error"].lower()
        assert all(acts[rank]["survivors"]["equal"])


def test_a_member_that_does_not_say_whom_it_sends_to_is_not_waited_for_longer() -> None:
    with pytest.raises(DirectFailed, match="rank 1 did not report its peers in time"):
        make_group(HashStore(), "silent", 0, 2, torch.device("cpu"), 1.0, peers={1})


def test_a_group_that_does_not_come_together_says_so_in_time() -> None:
    with pytest.raises(DirectFailed, match="2 processes did not meet within 1 s"):
        make_group(HashStore(), "alone", 0, 2, torch.device("cpu"), 1.0)


def test_an_interface_that_the_host_does_not_have_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "absent0")
    with pytest.raises(DirectFailed, match="this one is at GLOO_SOCKET_IFNAME=absent0"):
        make_group(HashStore(), "nowhere", 0, 2, torch.device("cpu"), 1.0)


@pytest.mark.parametrize("endpoint", ["127.0.0.1:7677", "localhost:7677", "[::1]:7677", "no.such.host.invalid:7677"])
def test_an_endpoint_on_the_loopback_or_nowhere_selects_no_address(endpoint: str) -> None:
    assert address_towards(endpoint) == ""


@pytest.mark.parametrize(("most_peers", "ctas"), [(0, None), (1, None), (2, None), (3, 21), (4, 16), (8, 8), (64, 4)])
def test_communicators_of_more_than_two_pairs_share_what_two_may_use(most_peers: int, ctas: int | None) -> None:
    assert ctas_of(most_peers) == ctas


@pytest.mark.parametrize("config", [DENSE, EXPERTS], ids=["dense", "experts"])
def test_the_trainer_of_these_tests_holds_what_megatron_would(config: dict[str, Any]) -> None:
    parallel = Parallel(2, tp=2, ep=2 if config is EXPERTS else 1)
    for (_, layout), written in zip(
        world_layouts(config, parallel, vocab_multiple=2), written_trainer(config, 2).values(), strict=True
    ):
        assert {(p.tensor, p.box, p.offset, p.strides) for p in layout.pieces} == {
            (p.tensor, p.box, p.offset, p.strides) for p in written.pieces
        }
