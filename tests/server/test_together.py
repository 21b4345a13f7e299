"""Versions of several models that one job publishes together: READY both, or neither, whatever breaks."""

import signal
from collections.abc import Iterator
from contextlib import closing

import grpc
import pytest
from resharder.converters.geometry.layout import TensorSpec
from resharder.v1 import operator_pb2, resources_pb2

from tests.support.daemon import Daemon
from tests.support.observing import wait_until
from tests.support.publishing import Job, Weights, random_weights, read_folder, reason_of, whole
from tests.support.variants import sampled

SPECS = {"keep": [TensorSpec("a", "F32", (64, 8))], "serve": [TensorSpec("a", "BF16", (64, 8)), TensorSpec("s", "F32", ())]}
State = resources_pb2.Version.State


class Pair:
    """One rank's publishers of two models."""

    def __init__(self, daemon: Daemon) -> None:
        self.jobs = {
            model: Job(daemon.channel, specs, [whole(specs)], model=model, together=tuple(SPECS))
            for model, specs in SPECS.items()
        }
        self.connect()

    def connect(self) -> None:
        for job in self.jobs.values():
            job.create()
            job.register(0)
        for job in self.jobs.values():
            job.assigned(0)

    def deliver(self, model: str, step: int) -> resources_pb2.Version:
        job, weights = self.jobs[model], weights_of(model, step)
        version = job.begin(step)
        job.upload(version.number, 0, weights, only=job.missing(version.name, 0))
        return job.seal(version.name, 0, weights)

    def publish(self, step: int) -> list[resources_pb2.Version]:
        delivered = {model: self.deliver(model, step) for model in self.jobs}
        return [self.jobs[model].wait(version.name) for model, version in delivered.items()]

    def ready(self) -> dict[str, set[int]]:
        """The steps that are READY of each model, whose files must have their bytes."""
        found: dict[str, set[int]] = {}
        for model, job in self.jobs.items():
            versions = job.operator.ListVersions(operator_pb2.ListVersionsRequest(model=model, page_size=100)).versions
            found[model] = {version.step for version in versions if version.state == State.READY}
            for version in versions:
                if version.state == State.READY:
                    held = read_folder(version.folder)
                    assert all((held[name] == bits).all() for name, bits in weights_of(model, version.step).items())
        return found


def weights_of(model: str, step: int) -> Weights:
    return random_weights(SPECS[model], step)


@pytest.fixture
def unstarted() -> Iterator[Daemon]:
    with closing(Daemon(chunk_bytes=1024)) as daemon:
        yield daemon


@pytest.fixture
def daemon(unstarted: Daemon) -> Daemon:
    return unstarted.start()


def test_a_version_waits_for_the_one_of_the_other_model_and_both_are_ready_at_once(daemon: Daemon) -> None:
    pair = Pair(daemon)
    kept = pair.deliver("keep", 1)
    assert pair.jobs["keep"].wait(kept.name, 1).state == State.UPLOADING
    served = pair.deliver("serve", 1)
    assert [pair.jobs["keep"].wait(kept.name).state, pair.jobs["serve"].wait(served.name).state] == [State.READY] * 2
    assert [version.state for version in pair.publish(2)] == [State.READY] * 2


def test_an_abort_of_one_aborts_the_other_and_the_step_can_be_published_again(daemon: Daemon) -> None:
    pair = Pair(daemon)
    kept = pair.deliver("keep", 1)
    begun = pair.jobs["serve"].begin(1)
    pair.jobs["serve"].stub.AbortVersion(abort(begun, pair.jobs["serve"].epoch))
    found = pair.jobs["keep"].wait(kept.name)
    assert (found.state, found.reason) == (State.ABORTED, f"{begun.name} of the same step was aborted: no more")
    assert pair.publish(2)[1].state == State.READY
    assert pair.ready() == {"keep": {2}, "serve": {2}}


def abort(version: resources_pb2.Version, epoch: int):  # type: ignore[no-untyped-def]
    from resharder.v1 import publisher_pb2

    return publisher_pb2.AbortVersionRequest(version=version.name, epoch=epoch, reason="no more")


def test_a_rank_that_goes_on_without_the_other_version_ends_the_one_that_it_has_delivered(daemon: Daemon) -> None:
    pair = Pair(daemon)
    kept = pair.deliver("keep", 1)
    pair.deliver("keep", 2)
    assert pair.jobs["keep"].wait(kept.name).state == State.ABORTED


@pytest.mark.full
def test_a_rank_that_is_silent_before_the_other_version_ends_the_one_that_it_has_delivered() -> None:
    with Daemon(lease_seconds=6) as daemon:
        pair = Pair(daemon)
        kept = pair.deliver("keep", 1)
        found = pair.jobs["keep"].wait(kept.name)
        assert (found.state, found.reason.partition(" for ")[0]) == (State.ABORTED, "rank 0 was silent")


def test_a_later_job_of_one_model_ends_the_version_of_the_other(daemon: Daemon) -> None:
    pair = Pair(daemon)
    kept = pair.deliver("keep", 1)
    pair.jobs["serve"].begin(1)
    Job(daemon.channel, SPECS["serve"], [whole(SPECS["serve"])], model="serve", job="later").connect()
    assert pair.jobs["keep"].wait(kept.name).state == State.ABORTED


def test_ranks_that_name_other_models_are_refused(daemon: Daemon) -> None:
    Pair(daemon)
    other = Job(daemon.channel, SPECS["keep"], [whole(SPECS["keep"])], model="keep")
    with pytest.raises(grpc.RpcError) as error:
        other.create()
    assert (reason_of(error.value), "publishes it with ['serve'], this call with []" in str(error.value)) == ("JOB", True)


KILLED = {  # the daemon dies while step 2 is published -> whether it is READY afterwards
    "seal.after-slot@4": False,
    "commit.after-proof@4": False,
    "commit.after-manifest@4": False,
    "commit.before-rename@3": True,  # decided
    "commit.after-rename@3": True,
    "commit.before-rename@4": True,
    "commit.after-sync@4": True,
    "commit.after-history@3": True,
}


@pytest.mark.parametrize(
    "failpoint", sampled(KILLED, ["commit.after-proof@4", "commit.before-rename@3", "commit.before-rename@4"])
)
def test_after_a_kill_at_any_step_both_versions_are_ready_or_neither(unstarted: Daemon, failpoint: str) -> None:
    daemon = unstarted
    daemon.start(failpoint=f"{failpoint}=kill")
    pair = Pair(daemon)
    pair.publish(1)
    with pytest.raises(grpc.RpcError):
        pair.publish(2)
    assert daemon.wait() == -signal.SIGKILL
    daemon.start()
    grpc.channel_ready_future(daemon.channel).result(30)
    steps = {1, 2} if KILLED[failpoint] else {1}
    assert pair.ready() == {"keep": steps, "serve": steps}
    pair.connect()
    assert [version.state for version in pair.publish(2)] == [State.READY] * 2
    assert [version.state for version in pair.publish(3)] == [State.READY] * 2


FAILING = ["commit.before-rename@4=eio", "commit.sync@4=eio", "commit.sync@3=enospc"]


@pytest.mark.parametrize("failpoint", sampled(FAILING, FAILING[:1]))
def test_a_medium_that_fails_between_the_two_leaves_neither_ready(unstarted: Daemon, failpoint: str) -> None:
    daemon = unstarted
    daemon.start(failpoint=failpoint)
    pair = Pair(daemon)
    pair.publish(1)
    assert [version.state for version in pair.publish(2)] == [State.ABORTED] * 2
    assert pair.ready() == {"keep": {1}, "serve": {1}}
    assert [version.state for version in pair.publish(3)] == [State.READY] * 2
    daemon.kill()
    daemon.start()
    grpc.channel_ready_future(daemon.channel).result(30)
    wait_until(lambda: pair.ready() == {"keep": {1, 3}, "serve": {1, 3}})
