"""What a worker tells the daemon of itself, and how a server starts where there is no daemon; real daemons, no engine."""

import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from resharder.client.errors import DaemonUnreachable, Refused, ResharderError, UsageError
from resharder.client.inference.engine import InstallError
from resharder.client.inference.vllm import boot_loader
from resharder.client.inference.vllm.boot_loader import ResharderLoader
from resharder.client.inference.worker import agent as agent_module
from resharder.client.inference.worker import boot
from resharder.client.inference.worker.claim import claim
from resharder.client.inference.worker.model_part import MODEL
from resharder.client.inference.worker.receiver import EarlyVersion
from resharder.client.inference.worker.reporter import PROCESS
from resharder.client.inference.worker.staging import StagedInstall
from resharder.v1 import resources_pb2
from vllm.config.load import LoadConfig

from tests.support.daemon import Daemon
from tests.support.observing import servers, wait_until
from tests.support.ports import free_port
from tests.support.worker_agents import agent_of, booted, publish

pytestmark = pytest.mark.usefixtures("own_page")
Worker = resources_pb2.Worker


@pytest.fixture
def daemon() -> Iterator[Daemon]:
    with Daemon() as running:
        yield running


def worker_when(daemon: Daemon, holds: Callable[[Worker], bool], what: str) -> Worker:
    """What the daemon knows of the worker, once it is so."""

    def now() -> list[Worker]:
        return [worker for server in servers(daemon) for worker in server.workers]

    found: list[Worker] = []

    def comes() -> bool:
        found[:] = now()
        return any(holds(worker) for worker in found)

    wait_until(comes, what)
    (worker,) = found
    return worker


def test_a_worker_that_booted_says_which_version_by_number_and_fingerprint(daemon: Daemon) -> None:
    _, manifest = booted(daemon)
    worker = worker_when(daemon, lambda w: w.state == Worker.BOOTED, "the worker is BOOTED")
    assert (worker.version, worker.fingerprint, worker.process) == (1, manifest.fingerprint, PROCESS)
    assert len(manifest.fingerprint) == 64
    assert (worker.verified_tensors, worker.stage_seconds) == (7, 0.5)


def test_a_daemon_started_anew_hears_what_the_worker_holds_and_not_what_it_staged(daemon: Daemon) -> None:
    agent, manifest = booted(daemon)
    worker_when(daemon, lambda w: w.state == Worker.BOOTED, "the worker is BOOTED")
    agent._report(Worker.STAGED, install="an-install", version=2)
    worker_when(daemon, lambda w: w.state == Worker.STAGED, "the worker is STAGED")
    daemon.kill()
    daemon.start()
    worker = worker_when(daemon, lambda _: True, "the worker found the daemon")
    assert (worker.state, worker.version, worker.install) == (Worker.BOOTED, 1, "")
    assert worker.fingerprint == manifest.fingerprint


def test_a_worker_that_outlives_the_store_is_not_believed_to_hold_its_new_version_of_that_number(daemon: Daemon) -> None:
    booted(daemon)
    worker_when(daemon, lambda w: w.state == Worker.BOOTED, "the worker is BOOTED")
    daemon.kill()
    shutil.rmtree(daemon.store)
    daemon.start()
    assert publish(daemon, 2) == "models/policy/versions/1"
    worker = worker_when(
        daemon, lambda w: "with fingerprint" in w.error and "none READY" not in w.error, "the worker is a stranger"
    )
    assert (worker.state, worker.version) == (Worker.EMPTY, 0)


def test_an_install_that_broke_half_way_is_said_to_every_later_daemon(daemon: Daemon) -> None:
    agent, _ = booted(daemon)
    agent.version = 0  # as apply has it once it writes
    agent.failed("an-install", "stopped half-way")
    worker_when(daemon, lambda w: w.state == Worker.FAILED, "the worker is FAILED")
    daemon.kill()
    daemon.start()
    worker = worker_when(daemon, lambda _: True, "the worker found the daemon")
    assert (worker.state, worker.error) == (Worker.FAILED, "stopped half-way")


@pytest.mark.full
def test_an_install_that_never_began_leaves_what_the_worker_holds(daemon: Daemon) -> None:
    agent, manifest = booted(daemon)
    agent.failed("an-install", "is not staged here")
    worker_when(daemon, lambda w: w.state == Worker.FAILED, "the worker is FAILED")
    daemon.kill()
    daemon.start()
    worker = worker_when(daemon, lambda _: True, "the worker found the daemon")
    assert (worker.state, worker.fingerprint) == (Worker.BOOTED, manifest.fingerprint)


@pytest.mark.full
def test_a_worker_that_refuses_to_stage_reports_it_each_time_that_it_is_asked(
    daemon: Daemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    agent, manifest = booted(daemon)
    monkeypatch.setattr(type(agent.host), "refusal", lambda self: "its modules are unknown")
    for _ in range(2):
        with pytest.raises(InstallError, match="its modules are unknown"):
            agent.stage({}, "an-install", manifest.name)
    worker = worker_when(daemon, lambda w: w.state == Worker.FAILED, "the worker is FAILED")
    assert (worker.install, worker.error) == ("an-install", "InstallError: its modules are unknown")


@pytest.mark.parametrize("error", [RuntimeError("out of memory"), KeyError("w")], ids=["of the device", "of any kind"])
def test_a_worker_that_cannot_stage_reports_why_whatever_it_is(
    daemon: Daemon, error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    agent, manifest = booted(daemon)

    def fail(*_: object) -> None:
        raise error

    monkeypatch.setattr(agent, "_prepare_staging", lambda *_: manifest)
    monkeypatch.setattr(agent.staging, "stage", fail)
    agent.stage({}, "an-install", manifest.name)
    worker = worker_when(daemon, lambda w: w.state == Worker.FAILED, "the worker is FAILED")
    assert (worker.install, worker.error) == ("an-install", f"{type(error).__name__}: {error}")


def test_a_report_that_cannot_be_made_is_made_again(daemon: Daemon, monkeypatch: pytest.MonkeyPatch) -> None:
    agent, _ = booted(daemon)
    worker_when(daemon, lambda w: w.state == Worker.BOOTED, "the worker is BOOTED")
    failures = [KeyError("first"), KeyError("second")]

    def asked(request: int) -> None:
        if failures:
            raise failures.pop()

    monkeypatch.setattr(agent.reporter, "_verify_requested", asked)
    agent._report(Worker.STAGED, install="an-install", version=2)
    wait_until(lambda: not failures, "it has failed twice")
    agent._report(Worker.STAGED, install="another", version=2)
    worker_when(daemon, lambda w: w.install == "another", "the next report has come")


def test_a_worker_that_loaded_from_elsewhere_says_that_it_holds_nothing_of_ours(daemon: Daemon) -> None:
    publish(daemon, 1)
    agent = agent_of(daemon)
    assert agent.describe()["version"] == 0
    worker = worker_when(daemon, lambda _: True, "the worker introduced itself")
    assert (worker.state, worker.version, worker.fingerprint) == (Worker.EMPTY, 0, "")


def test_a_worker_takes_back_what_it_staged_and_before_weights_are_dropped_what_it_holds(daemon: Daemon) -> None:
    agent, _ = booted(daemon)
    agent.staging.current = StagedInstall("an-install")
    agent._report(Worker.STAGED, install="an-install", version=2)
    worker_when(daemon, lambda w: w.state == Worker.STAGED, "the worker is STAGED")
    agent.unstage("another")
    agent.unstage("an-install")
    worker = worker_when(daemon, lambda w: w.state != Worker.STAGED, "the worker is STAGED no more")
    assert (worker.state, worker.version, worker.install) == (Worker.BOOTED, 1, "")

    model = torch.nn.Linear(2, 2)
    agent.fall_asleep({MODEL: model}, level=1)
    assert agent.version == 1
    agent.fall_asleep({MODEL: model}, level=2)
    assert agent.version == 0
    worker = worker_when(daemon, lambda w: w.state == Worker.EMPTY, "the worker is EMPTY")
    assert (worker.version, worker.fingerprint) == (0, "")


# Where the daemon, or a version, is not there


class OwnWeights:
    """vLLM's own loader, as it is asked for."""

    def __init__(self, load_config: LoadConfig) -> None:
        self.load_format = load_config.load_format

    def load_model(self, *args: Any, **kwargs: Any) -> str:
        return f"loaded as {self.load_format}"


@pytest.fixture
def load(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """Starts a worker's load against an endpoint, in a mode."""
    monkeypatch.setattr(boot_loader, "DefaultModelLoader", OwnWeights)
    monkeypatch.setenv("RESHARDER_SERVER_ID", "s")
    monkeypatch.setenv("RESHARDER_BOOT_WAIT_SECONDS", "0.5")
    parallel = SimpleNamespace(rank=0, world_size=1, data_parallel_rank=0, enable_eplb=False)
    vllm_config = SimpleNamespace(
        parallel_config=parallel,
        device_config=SimpleNamespace(device="cpu"),
        lora_config=None,
        quant_config=None,
        speculative_config=None,
        model_config=SimpleNamespace(model="no-folder", hf_config=SimpleNamespace(to_dict=dict)),
    )

    def start(endpoint: str, mode: str, fleet: str = "") -> Any:
        monkeypatch.setenv("RESHARDER_ENDPOINT", endpoint)
        monkeypatch.setenv("RESHARDER_UNREACHABLE", mode)
        monkeypatch.setenv("RESHARDER_FLEET", fleet)
        return ResharderLoader(LoadConfig(load_format="resharder")).load_model(vllm_config, None)

    return start


@pytest.mark.process  # the claim is renewed by one
def test_without_a_daemon_a_server_does_not_start_unless_it_prefers_to(
    load: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    nobody, asked = f"127.0.0.1:{free_port()}", []

    def asks(*args: Any, patience: float, **kwargs: Any) -> Any:
        asked.append(patience)
        return claim(*args, patience=patience, **kwargs)

    monkeypatch.setattr(boot, "claim", asks)
    with pytest.raises(DaemonUnreachable, match=nobody):
        load(nobody, "require")
    monkeypatch.setenv("RESHARDER_BOOT_WAIT_SECONDS", "600")
    assert load(nobody, "prefer") == "loaded as auto"
    assert asked == [0.5, 5.0], "it does not wait as long as one that requires"


def test_without_a_version_a_server_does_not_start_unless_it_prefers_to(daemon: Daemon, load: Callable[..., Any]) -> None:
    with pytest.raises(ResharderError, match=r"no model has been published after 0\.5 s"):
        load(daemon.endpoint, "require")
    assert load(daemon.endpoint, "prefer") == "loaded as auto"


def test_a_daemon_that_says_no_is_not_got_around_by_preferring(daemon: Daemon, load: Callable[..., Any]) -> None:
    booted(daemon)
    with pytest.raises(ResharderError, match="fleet"):
        load(daemon.endpoint, "prefer", fleet="another-than-before")


def test_any_other_word_for_it_is_refused(load: Callable[..., Any]) -> None:
    with pytest.raises(UsageError, match="expected require or prefer in RESHARDER_UNREACHABLE, got 'maybe'"):
        load("127.0.0.1:1", "maybe")


def test_only_what_is_missing_is_got_around() -> None:
    missing = [DaemonUnreachable("gone"), DaemonUnreachable("nothing yet", "NO_VERSION")]
    refused = [Refused("no", "FLEET_MODEL"), UsageError("wrong")]
    assert [boot.is_missing(error) for error in missing + refused] == [True, True, False, False]


def test_a_version_that_is_served_ahead_is_compared_after_the_pause_of_its_install(monkeypatch: pytest.MonkeyPatch) -> None:
    """While clients wait, the worker calls no daemon and collects no garbage."""
    steps: list[str] = []

    @contextmanager
    def collected() -> Iterator[None]:
        steps.append("collect")
        yield

    monkeypatch.setattr(agent_module, "time", SimpleNamespace(sleep=lambda seconds: steps.append("wait")))
    monkeypatch.setattr(agent_module, "gc_paused", collected)
    monkeypatch.setattr(agent_module, "compare_with_store", lambda *_: steps.append("compare"))
    agent = agent_of(SimpleNamespace(endpoint="127.0.0.1:1"))  # type: ignore[arg-type]
    agent._compare(EarlyVersion("models/policy/versions/2", "", (), b""), np.zeros(0, np.uint64), "an-install")
    assert steps == ["wait", "collect", "compare"]
