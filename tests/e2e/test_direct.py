"""The direct path with real parts: two Megatron ranks, a daemon, one vLLM server of two workers, over gloo.

The tests share the server and run in order; each leaves it serving.
"""

from collections.abc import Iterator

import pytest
from resharder.client.operator import Operator
from resharder.v1 import resources_pb2

from tests.support.direct_server import PROMPT, System, running
from tests.support.metrics import read
from tests.support.observing import servers, versions, wait_serving, wait_until
from tests.support.tiny_hf import tiny_config
from tests.support.variants import runs_in_full

CONFIG = tiny_config("qwen3_moe")
TRAINER = {"config": CONFIG, "ep": 2, "connect": {"direct_wait": 60.0}}


@pytest.fixture(scope="module")
def system(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Iterator[System]:
    forked = not runs_in_full(request)  # torchrun's own ranks, which have orders of sets of their own, in full
    with running(tmp_path_factory.mktemp("config"), CONFIG, TRAINER, forked=forked) as built:
        yield built


def test_a_version_goes_from_the_ranks_memory_to_the_workers(system: System) -> None:
    version = system.publish(2)
    assert system.sent(version), system.transfers()
    value = read(system.daemon)
    assert value("install_phase_seconds_count", fleet="policy", phase="verify") == 1
    assert (
        0
        < value("install_phase_seconds_sum", fleet="policy", phase="verify")
        < (  # type: ignore[operator]
            value("install_phase_seconds_sum", fleet="policy", phase="apply")
        )
    )


@pytest.mark.full
def test_the_next_version_goes_over_the_same_group(system: System) -> None:
    version = system.publish(3)
    assert system.sent(version), system.transfers()
    assert len([line for line in system.transfers() if line["event"] == "direct_group"]) == 1


@pytest.mark.full
def test_a_version_that_its_ranks_do_not_offer_is_not_waited_for(system: System) -> None:
    system.trainer.ask(do="withhold")
    version = system.publish(4)
    assert not system.sent(version)
    assert f"versions/{version} is installed from the store" in system.server.log_text()


@pytest.mark.full
def test_weights_that_change_before_they_are_sent_are_noticed_and_come_from_the_store(system: System) -> None:
    system.trainer.ask(do="fault", rank=1, what="change")
    version = system.publish(5)
    assert not system.sent(version)
    assert "differ from the store's digests" in system.failures()[-1]
    assert system.sent(system.publish(6)), system.transfers()


@pytest.mark.full
def test_a_rank_that_hangs_costs_its_servers_no_more_than_the_bound(system: System) -> None:
    system.trainer.ask(do="fault", rank=0, what="sleep")
    failed = len(system.failures())
    version = system.publish(7)
    assert not system.sent(version)
    assert len(system.failures()) > failed
    assert system.sent(system.publish(8)), system.transfers()


@pytest.mark.full
def test_a_version_is_served_before_it_is_ready_where_the_fleet_says_so(system: System) -> None:
    with system.ahead():
        version, asked, go = system.publish_held(20)
        server = wait_serving(system.daemon, version)
        assert versions(system.daemon)[version] == "UPLOADING"
        assert server.ahead
        assert "ahead of READY" in server.reason
        held, answer = system.fingerprints(), system.server.generate(PROMPT, 24)
        assert answer.version == str(version)
        go.touch()
        assert system.trainer.requests.reply(asked)["version"] == version
        assert system.wait_proven(version).install.id == server.install.id  # nothing was installed anew
        assert system.fingerprints() == held
        again = system.server.generate(PROMPT, 24)
        assert (again.token_ids, again.logprobs, again.version) == (answer.token_ids, answer.logprobs, answer.version)


@pytest.mark.full
def test_weights_that_change_before_they_are_delivered_are_noticed_and_the_stores_are_served(system: System) -> None:
    with system.ahead():
        version, asked, go = system.publish_held(21, change=True)
        server = wait_serving(system.daemon, version)
        held = system.fingerprints()
        go.touch()
        assert system.trainer.requests.reply(asked)["version"] == version
        assert system.wait_proven(version).install.id != server.install.id
        assert system.fingerprints() != held
        assert "differ from the store's digests" in system.happened("differs")[-1]


@pytest.mark.full
def test_a_transfer_ahead_that_fails_leaves_what_was_served_before(system: System) -> None:
    with system.ahead():
        before, held = max(system.steps), system.fingerprints()
        system.trainer.ask(do="fault", rank=1, what="digests")
        version, asked, go = system.publish_held(22)
        wait_until(
            lambda: len(system.failures()) > 0 and "differ from the ranks' digests" in system.failures()[-1],
            "it is noticed",
        )
        server = wait_serving(system.daemon, before)
        assert "the direct transfer failed" in server.reason
        assert system.fingerprints() == held
        go.touch()
        assert system.trainer.requests.reply(asked)["version"] == version
        system.wait_proven(version)
        assert not system.sent(version)


@pytest.mark.full
def test_a_publisher_killed_before_its_version_is_complete_brings_the_one_before_back(system: System) -> None:
    before = system.publish(23)
    held, answer = system.fingerprints(), system.server.generate(PROMPT, 24)
    with system.ahead():
        version, _, _ = system.publish_held(24)
        wait_serving(system.daemon, version)
        assert system.fingerprints() != held
        system.trainer.kill()
        wait_until(lambda: versions(system.daemon).get(version) == "ABORTED", "the lease of its ranks ends")
        system.wait_proven(before)
        assert system.fingerprints() == held
        again = system.server.generate(PROMPT, 24)
        assert (again.token_ids, again.logprobs, again.version) == (answer.token_ids, answer.logprobs, str(before))
    system.start_trainer()
    assert system.sent(system.publish(25)), system.transfers()


@pytest.mark.full
def test_a_rank_killed_in_mid_transfer_leaves_the_server_serving_what_the_store_has(system: System) -> None:
    system.trainer.ask(do="fault", rank=1, what="die")
    system.trainer.tell(do="publish", step=29)
    version = max(system.steps) + 1
    system.steps[version] = 29
    system.serves(version)
    assert not system.sent(version)
    held = system.fingerprints()
    system.trainer.kill()
    system.start_trainer()
    assert system.sent(system.publish(30)), system.transfers()
    assert system.fingerprints() != held


@pytest.mark.full
def test_a_worker_killed_in_mid_transfer_leaves_the_trainer_as_it_was(system: System) -> None:
    system.trainer.ask(do="fault", rank=0, what="sleep")
    version = max(system.steps) + 1
    asked = system.trainer.requests.send(do="publish", step=31)
    wait_until(lambda: system.began() == version, "the transfer has begun")
    system.server.kill()
    assert system.trainer.requests.reply(asked)["version"] == version
    system.steps[version] = 31
    system.server.start()
    system.server.wait_ready()
    system.serves(version)


@pytest.mark.full
def test_workers_hold_what_a_fresh_server_holds_and_answer_the_same(system: System) -> None:
    """The server before has just booted with the weights of step 31."""
    held, answer = system.fingerprints(), system.server.generate(PROMPT, 24)
    assert system.sent(system.publish(32)), system.transfers()
    assert system.fingerprints() != held
    system.trainer.ask(do="reseed", step=33, seed=31)
    assert system.sent(system.publish(33)), system.transfers()
    assert system.fingerprints() == held
    again = system.server.generate(PROMPT, 24)
    assert (again.token_ids, again.logprobs) == (answer.token_ids, answer.logprobs)


@pytest.mark.full
def test_ranks_of_the_same_host_share_their_memory_where_it_is_asked_for(system: System, monkeypatch: pytest.MonkeyPatch) -> None:
    assert [worker.path for worker in servers(system.daemon)[0].workers] != ["peer-memory", "peer-memory"]
    system.share_memory(monkeypatch)
    assert system.sent(system.publish(34)), system.transfers()
    assert [worker.path for worker in servers(system.daemon)[0].workers] == ["peer-memory", "peer-memory"]
    held = system.fingerprints()
    assert system.sent(system.publish(35)), system.transfers()
    assert system.fingerprints() != held
    with system.ahead():
        assert system.sent(system.publish(36)), system.transfers()
    system.trainer.ask(do="reseed", step=37, seed=34)
    assert system.sent(system.publish(37)), system.transfers()
    assert system.fingerprints() == held


@pytest.mark.full
def test_a_generation_installs_from_the_ranks_memory_while_the_kv_cache_sleeps(
    system: System, monkeypatch: pytest.MonkeyPatch
) -> None:
    system.share_memory(monkeypatch)
    with Operator(system.daemon.endpoint) as operator:
        operator.sleep("policy", level=2)
        wait_until(lambda: servers(system.daemon)[0].power == resources_pb2.ASLEEP_2, "the server sleeps")
        version = max(system.steps) + 1
        for step in (40, 41):
            go, system.steps[version] = system.folder / f"go-{step}", step
            asked = system.trainer.requests.send(do="generate", step=step, until=str(go))
            system.serves(version)
            assert system.sent(version), system.transfers()
            assert [worker.path for worker in servers(system.daemon)[0].workers] == ["peer-memory", "peer-memory"]
            held = system.fingerprints()
            go.touch()
            assert system.trainer.requests.reply(asked) == {"version": version, "kept": True}
            assert servers(system.daemon)[0].power == resources_pb2.ASLEEP_2
            version += 1
        operator.wake("policy")
        system.serves(version - 1)
        assert system.fingerprints() == held, "installed from the store"
    assert system.sent(system.publish(42)), system.transfers()


@pytest.mark.full
def test_a_rank_killed_while_its_memory_is_read_leaves_what_the_store_has(
    system: System, monkeypatch: pytest.MonkeyPatch
) -> None:
    system.share_memory(monkeypatch)
    system.trainer.ask(do="fault", rank=1, what="die")
    system.trainer.tell(do="publish", step=48)
    version = max(system.steps) + 1
    system.steps[version] = 48
    system.serves(version)
    assert not system.sent(version)
    system.trainer.kill()
    system.start_trainer()
    assert system.sent(system.publish(49)), system.transfers()
