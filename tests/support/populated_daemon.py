"""A daemon at work, for looking at: two models, fleets that follow, lag, hold a canary and are pinned, a version half-way in."""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager

from resharder.client.operator import Operator
from resharder.client.operator.answers import Server, UpdateStrategy, VersionTarget
from resharder.converters.geometry.layout import TensorSpec
from resharder.v1 import resources_pb2

from tests.support.daemon import Daemon
from tests.support.observing import wait_until
from tests.support.publishing import Job, random_weights, whole
from tests.support.simulated_server import SimulatedServer

MEASURED = {"stage_seconds": 0.412, "apply_seconds": 0.161, "needed_bytes": 3_100_000_000, "transport": "shared-memory"}


def job(daemon: Daemon, model: str, name: str = "run-42", rows: int = 4096) -> Job:
    """One rank that holds four tensors of a MiB and more."""
    specs = [TensorSpec(f"layers.{i}.weight", "F32", (rows, 64)) for i in range(4)]
    return Job(daemon.channel, specs, [whole(specs)], job=name, model=model).connect()


def publish(job: Job, *steps: int) -> resources_pb2.Version:
    """The last one."""
    for step in steps:
        version = job.publish(step, random_weights(job.specs, step))
        assert version.state == resources_pb2.Version.READY, version
    return version


def upload_half(job: Job, step: int) -> resources_pb2.Version:
    """A version that stays UPLOADING for as long as the rank's lease."""
    version = job.begin(step)
    weights = random_weights(job.specs, step)
    chunks = len(job.chunks(version.number, 0, weights))
    job.upload(version.number, 0, weights, only=range(chunks // 2))
    return version


def serves(operator: Operator, ids: Sequence[str], version: int) -> bool:
    found = {server.name: server for server in operator.servers()}
    return all(found[f"servers/{id}"].version == version and found[f"servers/{id}"].state == Server.State.SERVING for id in ids)


@contextmanager
def populated(daemon: Daemon) -> Iterator[None]:
    """All of it, for as long as the context lasts."""
    with ExitStack() as stack, Operator(daemon.endpoint) as operator:
        policy, draft = job(daemon, "policy"), job(daemon, "draft", "draft-7")
        publish(policy, 100, 200, 300)
        publish(draft, 100)

        def serve(fleet: str, *names: str, model: str = "policy", broken: Sequence[int] = ()) -> list[SimulatedServer]:
            made = []
            for name in names:
                server = SimulatedServer(daemon, name, fleet=fleet, model=model)
                server.measured, server.pause_seconds = dict(MEASURED), 0.206
                server.broken, server.in_flight = set(broken), 17
                made.append(stack.enter_context(server))
            return made

        operator.set_fleet("pinned", model="policy", target=VersionTarget(VersionTarget.Kind.NUMBER, version=2))
        operator.set_fleet(
            "tried", model="policy", strategy=UpdateStrategy(UpdateStrategy.Kind.CANARY, canaries=1, approval=True)
        )
        serve("policy", "rollout-0", "rollout-1")
        serve("policy", "rollout-2", broken=[4])
        serve("tried", "eval-0", "eval-1")
        serve("pinned", "baseline-0")
        serve("draft", "draft-0", model="draft")
        publish(policy, 400)
        wait_until(lambda: serves(operator, ["rollout-0", "rollout-1", "eval-0"], 4), "all that can serve version 4")
        wait_until(lambda: serves(operator, ["rollout-2", "eval-1"], 3), "the others serve version 3")
        wait_until(lambda: serves(operator, ["baseline-0"], 2) and serves(operator, ["draft-0"], 1), "other fleets serve theirs")
        wait_until(lambda: "failed 3 times" in operator.servers("policy")[2].reason, "a server has given up")
        upload_half(draft, 200)
        yield
