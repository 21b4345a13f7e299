"""`publisher.generation` with a real daemon and servers that do what it orders."""

import random
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest
import torch
from resharder.client.errors import ServersNotAsleep, UsageError, VersionAborted
from resharder.client.trainer.connect import Publisher, connect
from resharder.v1 import resources_pb2

from tests.client.models import CONFIG
from tests.support.daemon import Daemon
from tests.support.observing import servers, versions, wait_serving
from tests.support.simulated_server import SimulatedServer

Server, Power = resources_pb2.Server, resources_pb2.Power


@pytest.fixture
def daemon() -> Iterator[Daemon]:
    with Daemon(lease_seconds=8) as running:  # a server that dies is LOST after so long
        yield running


def trainer_model() -> Any:
    """A trainer's, with a frozen part in eval mode."""
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Dropout(), torch.nn.Linear(16, 8))
    model[1].eval()
    return model


@contextmanager
def published(daemon: Daemon, model: torch.nn.Module, **options: Any) -> Iterator[Publisher]:
    """A publisher of `model` whose step 1 is READY."""
    with connect(daemon.endpoint, model="policy", job="j", rank=0, world_size=1, **options) as publisher:
        publisher.attach(model, CONFIG)
        publisher.publish(1).wait_ready(60)
        yield publisher


def powers(daemon: Daemon) -> set[tuple[str, str]]:
    return {(Server.State.Name(server.state), Power.Name(server.power)) for server in servers(daemon)}


def test_servers_have_the_gpus_for_one_generation_after_another(daemon: Daemon) -> None:
    model = trainer_model()
    with (
        published(daemon, model, max_ahead=1, staging_timeout=60) as publisher,
        SimulatedServer(daemon, "left"),
        SimulatedServer(daemon, "right"),
    ):
        wait_serving(daemon, 1)
        for step, level in ((2, 2), (3, 1), (4, 2)):
            with torch.no_grad():
                model[0].weight.add_(1)
            weights = [parameter.detach().clone() for parameter in model.parameters()]
            state = random.getstate(), torch.get_rng_state()
            with publisher.generation(step, level=level, offload=True) as generation:
                assert {(server.state, server.version) for server in servers(daemon)} == {(Server.SERVING, generation.version)}
                assert len(generation.servers) == 2
                assert not model.training
                random.random(), torch.rand(1)
            assert powers(daemon) == {("ASLEEP", f"ASLEEP_{level}")}
            assert all(map(torch.equal, model.parameters(), weights))
            assert (model.training, model[1].training) == (True, False)
            assert random.getstate() == state[0]
            assert torch.equal(torch.get_rng_state(), state[1])
        with publisher.generation(4), publisher_is_busy(publisher):
            assert sorted(versions(daemon)) == [1, 2, 3, 4], "the step was published already"


@contextmanager
def publisher_is_busy(publisher: Publisher) -> Iterator[None]:
    """For a generation within a generation, and for one in another thread."""

    def refused() -> None:
        with pytest.raises(UsageError, match="previous generation of this publisher"), publisher.generation(5):
            found.append("entered")

    found: list[str] = []
    refused()
    thread = threading.Thread(target=refused)
    thread.start()
    thread.join(60)
    assert not found
    yield


def test_an_error_in_the_block_ends_the_generation_in_order(daemon: Daemon) -> None:
    model = trainer_model()
    with published(daemon, model) as publisher, SimulatedServer(daemon, "one"):
        weights = [parameter.detach().clone() for parameter in model.parameters()]
        with pytest.raises(UsageError, match="moved the parameters out of GPU memory"), publisher.generation(2, offload=True):
            publisher.publish(3)  # of memory that is not there
        assert powers(daemon) == {("ASLEEP", "ASLEEP_2")}
        assert all(map(torch.equal, model.parameters(), weights))
        publisher.publish(3).wait_ready(60)


@pytest.mark.full
def test_a_generation_of_a_step_that_was_aborted_publishes_it_again(daemon: Daemon) -> None:
    with published(daemon, trainer_model()) as publisher, SimulatedServer(daemon, "one"):
        with ExitStack() as stack:  # the daemon refuses files that somebody may still write
            for path in daemon.store.glob("models/policy/pool/*/*.safetensors"):
                stack.enter_context(path.open("r+b"))
            with pytest.raises(VersionAborted):
                publisher.publish(2).wait_ready(60)
        with publisher.generation(2) as generation:
            assert generation.version == 3
        assert versions(daemon) == {1: "READY", 2: "ABORTED", 3: "READY"}


@pytest.mark.full
def test_memory_stays_offloaded_when_a_server_was_lost_until_somebody_says_that_it_is_gone(daemon: Daemon) -> None:
    model = trainer_model()
    with published(daemon, model) as publisher, ExitStack() as ends:
        ends.enter_context(SimulatedServer(daemon, "stays"))
        dying = ends.enter_context(SimulatedServer(daemon, "dies"))
        weights = [parameter.detach().clone() for parameter in model.parameters()]
        with pytest.raises(ServersNotAsleep, match=r"servers/dies: LOST"), publisher.generation(2, offload=True, timeout=120):
            dying.__exit__(None, None, None)
        with pytest.raises(UsageError, match=r"bring_back\(\)"), publisher.generation(3):
            pass
        assert model.training
        publisher.bring_back()
        assert all(map(torch.equal, model.parameters(), weights))
        with publisher.generation(3) as generation:
            assert len(generation.servers) == 1, "a server lost before does not matter"


def test_trainers_that_publish_tensors_lend_what_they_moved_themselves(daemon: Daemon) -> None:
    tensors = {"weight": torch.ones(4, 4)}
    with connect(daemon.endpoint, model="policy", job="j", rank=0, world_size=1, config=CONFIG) as publisher:
        publisher.publish_tensors(1, tensors.items()).wait_ready(60)
        with SimulatedServer(daemon, "one"):
            with publisher.generation(1) as generation:
                assert generation.version == 1
            with pytest.raises(UsageError, match=r"publish_tensors\(2, …\) before generation\(2\)"), publisher.generation(2):
                pass
            with pytest.raises(UsageError, match="attached model to offload"), publisher.generation(1, offload=True):
                pass
            with pytest.raises(UsageError, match="level 1 or 2, got 3"), publisher.generation(1, level=3):
                pass
            with publisher.generation(2, publish=False) as generation:
                assert generation.version == 1
