"""Generations of a trainer that publishes two models: the fleet that shares its GPUs takes the version of its model."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from resharder.client.errors import UsageError
from resharder.client.operator import Operator
from resharder.client.trainer.connect import Publisher, connect
from resharder.v1 import resources_pb2

from tests.failpoints.light_server import LightServer, fingerprint
from tests.failpoints.roles import CONFIG, weights
from tests.support.daemon import Daemon
from tests.support.observing import servers, wait_until
from tests.support.remote import Remote
from tests.support.simulated_server import SimulatedServer
from tests.support.variants import sampled

Server, Power = resources_pb2.Server, resources_pb2.Power


@pytest.fixture
def daemon() -> Iterator[Daemon]:
    with Daemon() as running:
        yield running


@contextmanager
def published(daemon: Daemon, earlier: int = 0, **options: Any) -> Iterator[tuple[Publisher, dict[str, torch.Tensor]]]:
    """A publisher of `keep` and `serve` whose step 1 is READY, after `earlier` versions of `keep` alone."""
    model = {name: tensor.clone() for name, tensor in weights(1).items()}
    with connect(daemon.endpoint, model="keep", job="earlier", rank=0, world_size=1) as publisher:
        for step in range(earlier):
            publisher.attach(model, CONFIG)
            publisher.publish(step).wait_ready(60)
    also: Mapping[str, None] = {"serve": None}
    with connect(daemon.endpoint, model="keep", job="j", rank=0, world_size=1, also=also, **options) as publisher:
        publisher.attach(model, CONFIG)
        publisher.publish(1).wait_ready(60)
        yield publisher, model


def steps(daemon: Daemon, model: str) -> dict[int, int]:
    """READY versions by number, and their steps."""
    with Operator(daemon.endpoint) as operator:
        return {version.number: version.step for version in operator.versions(model) if version.state.name == "READY"}


def state(daemon: Daemon, model: str) -> tuple[str, int, str]:
    (found,) = (server for server in servers(daemon) if server.fleet == model)
    return Server.State.Name(found.state), found.version, Power.Name(found.power)


@pytest.mark.parametrize(("fleet", "earlier"), sampled([("keep", 0), ("serve", 3), ("keep", 3), ("serve", 0)], [("serve", 3)]))
def test_a_generation_lends_to_servers_of_either_model_with_its_own_version(daemon: Daemon, fleet: str, earlier: int) -> None:
    numbers = {"keep": earlier + 2, "serve": 2}
    with (
        published(daemon, earlier, max_ahead=1, staging_timeout=30) as (publisher, _),
        SimulatedServer(daemon, "k", model="keep"),
        SimulatedServer(daemon, "s", model="serve"),
    ):
        other = "serve" if fleet == "keep" else "keep"
        for turn in range(2):
            with publisher.generation(2 + turn, fleet=fleet, timeout=60) as generation:
                assert generation.version == numbers[fleet] + turn
                assert state(daemon, fleet) == ("SERVING", generation.version, "AWAKE")
            assert state(daemon, fleet)[2] == "ASLEEP_2"
            wait_until(lambda turn=turn: state(daemon, other) == ("SERVING", numbers[other] + turn, "AWAKE"), f"{other} follows")
        with publisher.generation(3, fleet=fleet, publish=False, timeout=60) as generation:
            assert generation.version == numbers[fleet] + 1


def test_a_fleet_of_a_third_model_takes_no_version_of_the_two(daemon: Daemon) -> None:
    with connect(daemon.endpoint, model="reward", job="r", rank=0, world_size=1) as third:
        third.attach(weights(1), CONFIG)
        third.publish(1).wait_ready(60)
    with published(daemon, 2) as (publisher, _), SimulatedServer(daemon, "r", model="reward"):
        with (
            pytest.raises(UsageError, match="fleet reward follows reward, not keep or serve"),
            publisher.generation(2, fleet="reward"),
        ):
            pass
        assert set(steps(daemon, "serve").values()) == {1}
        with publisher.generation(2, fleet="reward", publish=False, timeout=60) as generation:
            assert (generation.version, len(generation.servers)) == (0, 1)


@pytest.mark.full
@pytest.mark.parametrize("fleet", ["keep", "serve"])
def test_on_the_direct_path_the_servers_of_one_model_wake_once_both_are_ready(daemon: Daemon, fleet: str, tmp_path: Path) -> None:
    with published(daemon, 2, direct_wait=8.0) as (publisher, model):
        server = served(daemon, fleet, tmp_path)
        server.call("boot")
        with Operator(daemon.endpoint) as operator:
            operator.sleep(fleet, level=2)
            wait_until(lambda: state(daemon, fleet)[2] == "ASLEEP_2", "the server sleeps")
        for step in (2, 3):
            for name, tensor in weights(step).items():
                model[name].copy_(tensor)
            with publisher.generation(step, fleet=fleet, direct=True, timeout=60) as generation:
                assert step in steps(daemon, "keep").values()
                assert steps(daemon, fleet)[generation.version] == step
                assert state(daemon, fleet) == ("SERVING", generation.version, "AWAKE")
                assert [worker.path for server in servers(daemon) for worker in server.workers] == ["gloo"]
                assert server.call("held") == fingerprint(weights(step).items())
            assert state(daemon, fleet)[2] == "ASLEEP_2"
            assert set(steps(daemon, "keep").values()) >= set(steps(daemon, "serve").values()) == set(range(1, step + 1))
        server.close()


class Serving(LightServer):
    """A server whose memory can be asked for."""

    def held(self) -> str:
        return fingerprint(self._model.named_parameters())


def served(daemon: Daemon, model: str, folder: Path) -> Remote:
    environment = {
        "RESHARDER_ENDPOINT": daemon.endpoint,
        "RESHARDER_SERVER_ID": "s",
        "RESHARDER_MODEL": model,
        "RESHARDER_PAGE": str(folder / "page"),
    }
    return Remote(Serving, str(folder / "served"), environment=environment)
