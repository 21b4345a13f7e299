"""What goes over the direct path, and what a server refuses there before anything is applied; over gloo."""

import json
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from resharder.client.operator import Operator
from resharder.client.operator.answers import ServeAhead
from resharder.client.trainer.delivery import DEFAULT_WAIT
from resharder.v1 import resources_pb2

from tests.support.daemon import Daemon
from tests.support.direct_jobs import ConfiguredServer, Job
from tests.support.observing import servers, versions, wait_serving, wait_until
from tests.support.remote import Gone, Remote
from tests.support.tiny_hf import tiny_config
from tests.support.variants import sampled

CONFIG = tiny_config("llama") | {"architectures": ["TeleChat3ForCausalLM"]}  # vLLM's, without a table here
ENVIRONMENT = {"RESHARDER_PEER_MEMORY": "off"}
SHARING = {"RESHARDER_PEER_MEMORY": "cpu"}


@dataclass
class Site:
    daemon: Daemon
    served: Path  # versions in service, each with the fingerprint of memory
    server: Remote
    stack: ExitStack
    jobs: int = 0

    def job(self, config: dict[str, Any] = CONFIG, environment: Mapping[str, str] = ENVIRONMENT, **options: Any) -> Remote:
        """A new job, which takes the model over."""
        self.jobs += 1
        job = Remote(Job, self.daemon.endpoint, f"job-{self.jobs}", config, environment=environment, **options)
        self.stack.callback(job.close)
        return job

    def publish(self, job: Remote, step: int, exchange: bool = False) -> resources_pb2.Worker:
        """Publish, and return the worker once the server serves the version."""
        with ThreadPoolExecutor(1) as pool:  # the call may end after the server has asked for its version again
            number = pool.submit(job.call, "publish", step, exchange, timeout=600).result()
        (worker,) = wait_serving(self.daemon, number).workers
        return worker

    def order(self, job: Remote, step: int, *, slow: bool) -> tuple[str, list[str]]:
        """Publish, and return the worker's path and `Job.order`."""
        with ThreadPoolExecutor(1) as pool:
            number, events = pool.submit(job.call, "order", step, slow, timeout=600).result()
        (worker,) = wait_serving(self.daemon, number).workers
        return worker.path, events

    def transferred(self) -> dict[int, int]:
        """Bytes that workers have received of each version, in transfers that have ended."""
        lines = [json.loads(line) for line in self.daemon.log.read_text().splitlines() if '"direct_transfer"' in line]
        return {line["version"]: line["size_bytes"] for line in lines}

    def turns(self) -> int:
        """Number of transfers that began."""
        return sum('"direct_turn"' in line for line in self.daemon.log.read_text().splitlines())


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    served = tmp_path_factory.mktemp("site") / "served"
    with Daemon(log_format="json", direct_seconds=60) as daemon, ExitStack() as stack:
        environment = {
            **SHARING, "RESHARDER_ENDPOINT": daemon.endpoint, "RESHARDER_SERVER_ID": "one",
            "RESHARDER_PAGE": str(served.parent / "page"),
        }  # fmt: skip
        server = Remote(ConfiguredServer, str(served), CONFIG, environment=environment)
        stack.callback(server.close)
        site = Site(daemon, served, server, stack)
        job = site.job()
        job.call("publish", 1, False, timeout=600)
        assert server.call("boot", timeout=600) == 1
        wait_serving(daemon, 1)
        yield site


@pytest.fixture(params=[True, False], ids=["ahead of READY", "READY"])
def ahead(site: Site, request: pytest.FixtureRequest) -> bool:
    with Operator(site.daemon.endpoint) as operator:
        operator.set_fleet("policy", serve_ahead=ServeAhead.AUTO if request.param else False)
    return bool(request.param)


def test_parameters_that_were_exchanged_are_sent_with_their_new_values(site: Site, ahead: bool) -> None:
    job = site.job()
    for step in (2, 3, 4):  # over one link
        worker = site.publish(job, step, exchange=step > 2)
        assert worker.path == "gloo", site.daemon.log.read_text()[-3000:]
        assert site.server.call("memory") == job.call("fingerprint", step)


@pytest.mark.parametrize("environment", [ENVIRONMENT, SHARING], ids=["sent", "shared memory"])
def test_frozen_boxes_are_not_transferred_unless_they_have_changed(site: Site, ahead: bool, environment: dict[str, str]) -> None:
    job = site.job(environment=environment, frozen=["head"])
    for step in range(40, 45):
        if step == 43:
            job.call("alter", "head")
        worker = site.publish(job, step)
        assert worker.path == ("gloo" if environment is ENVIRONMENT else "peer-memory"), site.daemon.log.read_text()[-3000:]
        found, parameters = job.call("memory")
        assert site.server.call("memory") == found, "which was compared whole, digest by digest"
        wait_until(lambda version=worker.version: version in site.transferred())
        fresh = step in (40, 43)  # the version before the first one is another job's
        assert site.transferred()[worker.version] == sum(parameters.values()) - (0 if fresh else parameters["head"]), step


WRONG = {
    "another config": ({"config": CONFIG | {"rms_norm_eps": 0.5}}, ["rms_norm_eps is 0.5 in the version", "restart the server"]),
    "a tensor less": ({"left_out": ["head"]}, ["head"]),
    "a tensor more": ({"added": "bias"}, ["bias"]),
}


@pytest.mark.parametrize("kind", sampled(WRONG, ["another config"]))
def test_a_version_that_is_not_the_servers_model_is_refused_by_name_before_anything_is_applied(
    site: Site, ahead: bool, kind: str
) -> None:
    good = site.job()
    assert site.publish(good, 5).path == "gloo"
    memory, turns, (before,) = site.server.call("memory"), site.turns(), servers(site.daemon)
    options, names = WRONG[kind]
    job = site.job(**options)
    with ThreadPoolExecutor(1) as pool:
        publishing = pool.submit(job.call, "publish", 6, False, timeout=600)

        def refused() -> bool:
            (server,) = servers(site.daemon)
            return all(name in server.workers[0].error for name in names)

        wait_until(refused, f"the worker refuses the version, not: {servers(site.daemon)}", timeout=120)
        publishing.result()
    (after,) = servers(site.daemon)
    assert (after.version, site.server.call("memory"), site.turns()) == (before.version, memory, turns)


def serve_ahead(site: Site) -> None:
    with Operator(site.daemon.endpoint) as operator:
        operator.set_fleet("policy", serve_ahead=ServeAhead.AUTO)


@pytest.mark.parametrize("environment", [ENVIRONMENT, SHARING], ids=["sent", "shared memory"])
def test_a_rank_that_dies_between_its_boxes_and_their_digests_leaves_the_version_before(
    site: Site, environment: dict[str, str]
) -> None:
    serve_ahead(site)
    good = site.job()
    step = 20 if environment is ENVIRONMENT else 30
    assert site.publish(good, step).path == "gloo"
    before = servers(site.daemon)[0].version
    job = site.job(environment={**environment, "RESHARDER_FAILPOINT": "sender.digest=kill"})
    turns = site.turns()
    with pytest.raises(Gone):
        job.call("offer", step + 1, timeout=600)
    wait_until(lambda: versions(site.daemon)[before + 1] == "ABORTED", "its version is ABORTED", 120)
    wait_serving(site.daemon, before)
    assert site.turns() == turns + 1, "its boxes were sent"
    assert site.server.call("memory") == good.call("fingerprint", step)
    in_service = [line.split()[0] for line in site.served.read_text().splitlines()]
    assert str(before + 1) not in in_service
    assert site.publish(site.job(), step + 2).path == "gloo"


def test_a_rank_delivers_to_the_daemon_when_the_worker_on_its_device_has_the_version(site: Site) -> None:
    serve_ahead(site)
    job = site.job(environment=SHARING, direct_wait=None)
    order = [("peer-memory", ["delivery", "transfer"]), *[("peer-memory", ["transfer", "delivery"])] * 3]
    assert [site.order(job, step, slow=step == 40) for step in (40, 41, 42, 43)] == order
    assert site.server.call("memory") == job.call("fingerprint", 43)


WAITS = pytest.mark.parametrize("wait", [None, 0], ids=["by default", "off"])


@WAITS
def test_a_bound_on_how_far_the_trainer_is_ahead_holds_it_no_longer(site: Site, wait: float | None) -> None:
    serve_ahead(site)
    job, times = site.job(direct_wait=wait, max_ahead=1), list[float]()
    first = 50 if wait is None else 60
    for step in range(first, first + 4):
        with ThreadPoolExecutor(1) as pool:
            number, held = pool.submit(job.call, "timed", step, timeout=600).result()
        times.append(held)
        wait_serving(site.daemon, number)
        assert site.server.call("memory") == job.call("fingerprint", step)
    assert min(times[1:]) < DEFAULT_WAIT, times


@WAITS
def test_a_generation_without_a_publish_has_the_version_of_before(site: Site, wait: float | None) -> None:
    serve_ahead(site)
    job, step = site.job(direct_wait=wait), 70 if wait is None else 80
    with ThreadPoolExecutor(1) as pool:
        version, again = (pool.submit(job.call, "generate", step, publish, timeout=600).result() for publish in (True, False))
    assert version == again == max(versions(site.daemon))
    assert versions(site.daemon)[version] == "READY"
    with Operator(site.daemon.endpoint) as operator:
        operator.wake("policy")
    wait_serving(site.daemon, version)
    assert site.server.call("memory") == job.call("fingerprint", step)
