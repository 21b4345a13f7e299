"""Metrics of a real daemon, and of steps of servers and fleets."""

import re
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import replace

import pytest
from prometheus_client import CollectorRegistry
from resharder.client.operator import Operator
from resharder.client.operator.answers import UpdateStrategy
from resharder.converters.geometry.layout import Layout
from resharder.converters.geometry.piece_arrays import pack
from resharder.server.direct.direct import Direct
from resharder.server.direct.plans import Member
from resharder.server.fleets.explain import FleetView, ServerView
from resharder.server.fleets.reconciler.step import step
from resharder.server.observability import metrics, snapshot
from resharder.server.observability.metrics.counters import EVENTS, Observed
from resharder.server.state.errors import FailedPrecondition
from resharder.server.state.fleet import Fleet, Move
from resharder.server.state.fleet import UpdateStrategy as FleetUpdateStrategy
from resharder.server.state.server import Goal, Server, Settings, Worker
from resharder.server.state.server_events import Attached, Reported, Ticked, VersionsChanged, WorkerReported
from resharder.server.state.timing import Timing
from resharder.server.state.version import ABORTED, READY, RETIRED, VersionRecord
from resharder.server.web.status import status
from resharder.v1 import publisher_pb2, resources_pb2, server_pb2

from tests.client.models import connected, publish_all, weights
from tests.support.daemon import Daemon
from tests.support.metrics import exposition, read
from tests.support.observing import wait_until
from tests.support.populated_daemon import job, publish
from tests.support.ports import free_port
from tests.support.simulated_server import SimulatedServer
from tests.support.waits import completed
from tools.metrics_page import PAGE, page

SIZE = 4 * 4096 * 64 * 4  # of a version of `job`


@pytest.fixture(scope="module")
def daemon() -> Iterator[Daemon]:
    with Daemon(web_listen=f"127.0.0.1:{free_port()}", keep_count=2) as running:
        yield running


def test_the_page_of_the_documentation_is_what_the_code_declares() -> None:
    assert PAGE.read_text() == page(), "run `make docs-metrics`"


def test_every_phase_of_a_publish_and_every_byte_is_counted_by_transport(daemon: Daemon) -> None:
    sent = job(daemon, "sent")
    publish(sent, 1, 2, 3)
    publishers = connected(daemon.endpoint, 2, "mapped")  # on the daemon's own host
    publish_all(publishers, 10, weights(1))[0].wait_ready(60)
    for publisher in publishers:
        publisher.close()
    wait_until(lambda: read(daemon)("publish_phase_seconds_count", model="policy", phase="commit") == 1, "it is counted")
    value = read(daemon)
    assert value("received_bytes_total", model="sent", transport="grpc") == 3 * SIZE
    assert value("received_bytes_total", model="policy", transport="shared-memory") == sum(
        tensor.numel() * tensor.element_size() for tensor in weights(1).values()
    )
    for model, times in (("sent", 3), ("policy", 1)):
        counts = {
            phase: value("publish_phase_seconds_count", model=model, phase=phase) for phase in ("upload", "verify", "commit")
        }
        assert counts == dict.fromkeys(counts, times)
        assert value("publish_phase_seconds_count", model=model, phase="registration") == 1
    assert value("slot_upload_bytes_per_second_count", transport="grpc") == 3
    assert value("slot_upload_bytes_per_second_count", transport="shared-memory") == 2


def test_versions_the_store_and_publishers_are_as_the_daemon_has_them(daemon: Daemon) -> None:
    kept = job(daemon, "kept")
    publish(kept, 1, 2, 3)
    open_version = kept.begin(4)
    value = read(daemon)
    states = {state: value("versions", model="kept", state=state) for state in ("UPLOADING", "READY", "RETIRED", "ABORTED")}
    assert states == {"UPLOADING": 1, "READY": 2, "RETIRED": 1, "ABORTED": 0}
    assert value("newest_version", model="kept") == 3
    assert (value("publisher_ranks", model="kept"), value("publisher_live_ranks", model="kept")) == (1, 1)
    with Operator(daemon.endpoint) as operator:
        ready = operator.version(3, model="kept").ready_time
        assert ready is not None
        assert value("newest_version_ready_timestamp_seconds", model="kept") == pytest.approx(ready.timestamp())
        assert value("store_limit_bytes") == operator.daemon().store_limit_bytes
    kept.stub.AbortVersion(publisher_pb2.AbortVersionRequest(version=open_version.name, epoch=kept.epoch, reason="a test"))
    assert read(daemon)("versions", model="kept", state="ABORTED") == 1
    assert (read(daemon)("store_used_bytes") or 0) >= 2 * SIZE


def test_fleets_say_how_far_they_are_behind_and_installs_how_they_went(daemon: Daemon) -> None:
    moved = job(daemon, "moved")
    publish(moved, 1)
    with (
        SimulatedServer(daemon, "moved-a", fleet="moved", model="moved") as good,
        SimulatedServer(daemon, "moved-b", fleet="moved", model="moved") as bad,
        Operator(daemon.endpoint) as operator,
    ):
        for server in (good, bad):
            server.measured = {"stage_seconds": 0.5, "apply_seconds": 0.25, "needed_bytes": 1000, "transport": "grpc"}
            server.measured["timings"] = [proof(0.0625), proof(0.03125)]  # of a model and its drafter
            server.pause_seconds = 0.75
        good.in_flight = 4
        names = {"fleet": "moved", "model": "moved"}
        wait_until(lambda: read(daemon)("servers", **names, state="SERVING") == 2, "both serve")
        bad.torn = {2}
        publish(moved, 2)
        wait_until(lambda: (read(daemon)("installs_total", fleet="moved", outcome="failed") or 0) >= 1, "one went in half-way")
        wait_until(lambda: read(daemon)("install_pause_seconds_count", fleet="moved") is not None, "one went on")
        wait_until(lambda: read(daemon)("fleet_lag_versions", **names) == 1, "the fleet is behind")
        value = read(daemon)
        assert (value("torn_installs_avoided_total", fleet="moved") or 0) >= 1
        assert (value("fleet_lag_seconds", **names) or 0) > 0
        assert value("fleet_wanted_version", **names) == 2
        assert value("requests_in_flight", **names) == 4
        assert value("install_phase_seconds_sum", fleet="moved", phase="stage") is not None
        bad.torn = set()
        operator.set_fleet("moved", strategy=UpdateStrategy(UpdateStrategy.Kind.ALL_AT_ONCE))
        publish(moved, 3)
        wait_until(lambda: read(daemon)("fleet_served_version", **names) == 3, "both serve version 3")
        wait_until(lambda: read(daemon)("fleet_lag_versions", **names) == 0, "and are not behind")
        value = read(daemon)
        done = value("installs_total", fleet="moved", outcome="committed")
        assert done is not None
        assert value("install_phase_seconds_count", fleet="moved", phase="stage") == done
        assert value("install_phase_seconds_sum", fleet="moved", phase="apply") == 0.25 * done
        assert value("install_phase_seconds_sum", fleet="moved", phase="verify") == 0.09375 * done
        assert value("installed_bytes_total", fleet="moved", transport="grpc") == 1000 * done
        assert value("fleet_lag_seconds", **names) == 0
        wait_until(
            lambda: (read(daemon)("move_seconds_count", fleet="moved", strategy="all_at_once", outcome="done") or 0) >= 2,
            "moves end",
        )
    text = exposition(daemon)
    assert "moved-a" not in text, "no server is a label"
    assert not re.search(r'version="', text), "and no version"


def test_refused_calls_are_counted_by_reason_and_events_by_kind(daemon: Daemon) -> None:
    before = read(daemon)("rpc_refusals_total", reason="VERSION_UNKNOWN") or 0
    with Operator(daemon.endpoint) as operator, pytest.raises(Exception, match="there is no models/sent/versions/999"):
        operator.version(999, model="sent")
    value = read(daemon)
    assert value("rpc_refusals_total", reason="VERSION_UNKNOWN") == before + 1
    assert value("events_total", kind="daemon", what="started") == 1
    assert value("events_total", kind="archive", what="failed") == 0
    with Operator(daemon.endpoint) as operator:
        happened = {(event.kind, event.what) for event in operator.events(follow=False) if event.kind in EVENTS}
    assert happened <= {(kind, what) for kind, whats in EVENTS.items() for what in whats}
    assert value("build_info", release=Operator(daemon.endpoint).daemon().release) == 1


def proof(seconds: float) -> resources_pb2.Timing:
    timing = resources_pb2.Timing(phase="verify", seconds=seconds)
    timing.start_time.GetCurrentTime()
    return timing


def lost(daemon: Daemon, holder: str) -> float:
    return read(daemon)("leases_lost_total", model="policy", holder=holder) or 0


def test_a_rank_and_a_server_that_fall_silent_are_counted() -> None:
    with Daemon(web_listen=f"127.0.0.1:{free_port()}", lease_seconds=8) as short:
        silent = job(short, "policy")
        publish(silent, 1)
        server = SimulatedServer(short, "silent", fleet="policy", model="policy")
        with server:
            wait_until(lambda: read(short)("servers", fleet="policy", model="policy", state="SERVING") == 1, "it serves")
        version = silent.begin(2)
        wait_until(lambda: lost(short, "rank") >= 1, "the rank is given up")
        wait_until(lambda: lost(short, "server") >= 1, "and the server")
        assert version.number == 2


def test_prometheus_own_linter_has_nothing_to_say(daemon: Daemon) -> None:
    if not (promtool := shutil.which("promtool")):
        pytest.skip("needs promtool, of Debian's package prometheus")
    linted = subprocess.run([promtool, "check", "metrics"], input=exposition(daemon), capture_output=True, text=True)
    assert (linted.returncode, linted.stdout + linted.stderr) == (0, "")


def test_openmetrics_is_there_for_those_who_ask_for_it(daemon: Daemon) -> None:
    assert exposition(daemon, "application/openmetrics-text; version=1.0.0").endswith("# EOF\n")
    with pytest.raises(AssertionError):
        assert exposition(daemon, "text/plain").endswith("# EOF\n")


# Steps


class Story:
    """A server of one worker that serves version 1, and what is counted of it."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.observed = Observed(self.registry)
        self.server, self.now = Server("a", "policy", "policy", "life", 0.0, {1: "1"}, boot_version=1), 1.0
        self.worker(resources_pb2.Worker.BOOTED, 1)
        self.happens(Attached("control", 1))
        self.happens(Reported("control", self.server.opened_by, server_pb2.Order.RESUME))

    def happens(self, event: object) -> None:
        before = self.server
        self.server, _ = step(before, event, self.now, Settings())  # type: ignore[arg-type]
        self.observed.server_stepped(before, self.server)

    def worker(self, state: resources_pb2.Worker.State, version: int, **more: object) -> None:
        install = self.server.install.id if self.server.install else ""
        reported = Worker(0, state, version, install, process="p", fingerprint=str(version))
        self.happens(WorkerReported(replace(reported, **more)))  # type: ignore[arg-type]

    def value(self, name: str, **labels: str) -> float | None:
        return self.registry.get_sample_value(f"resharder_{name}", labels)

    def stage(self, version: int) -> str:
        self.happens(VersionsChanged({number: str(number) for number in range(1, version + 1)}))
        assert self.server.install is not None
        return self.server.install.id

    def outcomes(self) -> dict[str, float | None]:
        return {
            outcome: self.value("installs_total", fleet="policy", outcome=outcome)
            for outcome in ("committed", "failed", "given_up")
        }


def test_an_install_is_counted_once_with_all_its_phases() -> None:
    story = Story()
    install = story.stage(2)
    story.worker(resources_pb2.Worker.STAGED, 2, stage_seconds=4.0)
    timings = (Timing("pause", 0.0, 0.5), Timing("reset", 0.0, 0.25), Timing("a name from elsewhere", 0.0, 9.0))
    story.happens(Reported("control", install, server_pb2.Order.APPLY, timings=timings))
    measured = {"stage_seconds": 4.0, "apply_seconds": 2.0, "needed_bytes": 8000, "transport": "nobody-knows"}
    for _ in range(2):
        story.worker(resources_pb2.Worker.APPLIED, 2, **measured)
    resumed = Reported("control", install, server_pb2.Order.RESUME, pause_seconds=3.0, timings=(Timing("resume", 0.0, 0.125),))
    for _ in range(2):
        story.happens(resumed)
    phases = ("stage", "pause", "apply", "reset", "resume")
    sums = {phase: story.value("install_phase_seconds_sum", fleet="policy", phase=phase) for phase in phases}
    assert sums == {"stage": 4.0, "pause": 0.5, "apply": 2.0, "reset": 0.25, "resume": 0.125}
    assert [story.value("install_phase_seconds_count", fleet="policy", phase=phase) for phase in phases] == [1] * 5
    assert story.value("install_phase_seconds_count", fleet="policy", phase="a name from elsewhere") is None
    assert story.value("install_pause_seconds_sum", fleet="policy") == 3.0
    assert story.value("installed_bytes_total", fleet="policy", transport="other") == 8000
    assert story.outcomes() == {"committed": 1, "failed": 0, "given_up": 0}


@pytest.mark.parametrize("half", ["staging", "applying"])
def test_only_an_install_that_had_begun_to_write_is_a_torn_one_avoided(half: str) -> None:
    story = Story()
    install = story.stage(2)
    if half == "applying":
        story.worker(resources_pb2.Worker.STAGED, 2)
    kind = server_pb2.Order.APPLY if half == "applying" else server_pb2.Order.STAGE
    story.happens(Reported("control", install, kind, ok=False, error="no"))
    assert story.outcomes() == {"committed": 0, "failed": 1, "given_up": 0}
    assert story.value("torn_installs_avoided_total", fleet="policy") == int(half == "applying")
    assert story.server.opened == (0 if half == "applying" else 1)


def test_a_lease_that_ends_gives_its_install_up_and_says_nothing_about_the_version() -> None:
    story = Story()
    story.stage(2)
    story.now = 1000.0
    for _ in range(3):
        story.happens(Ticked())
    assert story.outcomes() == {"committed": 0, "failed": 0, "given_up": 1}
    assert story.value("leases_lost_total", model="policy", holder="server") == 1


def test_series_of_a_fleet_begin_at_zero_so_that_the_first_event_is_an_increase() -> None:
    story = Story()
    assert story.outcomes() == {"committed": 0, "failed": 0, "given_up": 0}
    assert story.value("torn_installs_avoided_total", fleet="policy") == 0
    assert [story.value("leases_lost_total", model="policy", holder=holder) for holder in ("rank", "server")] == [0, 0]
    assert story.value("fallbacks_total", reason="offer_over") == 0


def test_events_begin_at_zero_so_that_the_first_one_is_an_increase() -> None:
    story = Story()
    for kind, what in (
        ("version", "aborted"),
        ("archive", "failed"),
        ("server", "lost"),
        ("server", "altered"),
        ("move", "stopped"),
    ):
        assert story.value("events_total", kind=kind, what=what) == 0


def test_moves_that_end_are_counted_with_how_long_they_took() -> None:
    story = Story()
    move = Move(1, resources_pb2.Move.MOVING, 1, 2, FleetUpdateStrategy(), started=100.0)
    going = Fleet("policy", "policy", move=move)
    story.observed.fleet_stepped(None, going)
    done = replace(going, move=replace(move, state=resources_pb2.Move.DONE, seconds=7.5))
    story.observed.fleet_stepped(going, done)
    story.observed.fleet_stepped(done, replace(done, max_skew=3))
    labels = {"fleet": "policy", "strategy": "all_at_once", "outcome": "done"}
    assert (story.value("move_seconds_count", **labels), story.value("move_seconds_sum", **labels)) == (1, 7.5)


def test_a_version_that_does_not_go_the_direct_way_is_counted_once_for_its_server_and_with_why() -> None:
    story = Story()
    direct = Direct(lambda *_: frozenset({"a"}), lambda server: {0: "p0", 1: "p1"})
    direct.transferred.connect(story.observed.transferred)
    workers = [Member("servers/a", rank, f"p{rank}") for rank in (0, 1)]
    for worker in workers:
        direct.declare(worker, "memory", pack({worker.rank: Layout({}, ())}))
    for number in (2, 3):
        for worker in workers:
            with pytest.raises(FailedPrecondition, match="goes to server a over the staged path"):
                completed(direct.join, worker, "memory", "policy", number, f"install-{number}")
    assert story.value("fallbacks_total", reason="not_offered") == 2
    story.observed.transferred(0.5, None)
    assert story.value("direct_transfer_seconds_sum") == 0.5


# Lag


def record(number: int, state: str = READY) -> VersionRecord:
    """READY 10 s after the one before."""
    return VersionRecord(
        "policy", number, state, 1, number, "job", 1, 1, 0.0, ready_time=0.0 if state == ABORTED else 10.0 * number
    )


def serving(version: int, *, in_service: bool = True, confirmed: int = 0) -> ServerView:
    server = Server(f"at-{version}", "policy", "policy", "life", 0.0, goal=Goal(open=in_service))
    return ServerView(replace(server, opened=version, resumed=bool(version), confirmed=confirmed or version), 0, "", 0.0, 0.0)


def lag(wanted: int, *servers: ServerView, moved: float = 0.0) -> tuple[int, float]:
    records = [record(1, RETIRED), record(2), record(3, ABORTED), record(4), record(5)]
    move = Move(1, resources_pb2.Move.MOVING, 0, wanted, FleetUpdateStrategy(), started=moved)
    return snapshot.lag(FleetView(Fleet("policy", "policy", move=move), wanted, (), ""), servers, records)


def test_a_fleet_lags_as_far_as_the_last_of_its_servers_in_service() -> None:
    assert lag(5, serving(5), serving(5)) == (0, 0.0)
    assert lag(5, serving(5), serving(4)) == (1, 50.0)
    assert lag(5, serving(5), serving(1)) == (3, 20.0), "aborted versions are none that it misses"
    assert lag(5, serving(5), serving(1, in_service=False)) == (0, 0.0), "nobody waits for one that is drained"
    assert lag(5, serving(5), serving(0)) == (0, 0.0), "nor for one that boots"
    assert lag(5, serving(5), serving(0, confirmed=2)) == (2, 40.0), "a closed one is where it was"
    assert lag(2, serving(2), serving(1)) == (1, 20.0), "what a pinned fleet does not want it does not miss"
    assert lag(2, serving(5), serving(2), moved=77.0) == (2, 77.0), "on the way back it is behind since that was wanted"
    assert lag(0, serving(5)) == (0, 0.0)
    assert lag(5) == (0, 0.0)


def test_a_version_that_cannot_be_retired_is_a_problem_on_the_page_and_a_number_for_an_alert() -> None:
    stays = replace(record(1), reason="beyond retention, but /store/1 cannot be moved (EPERM, Operation not permitted)")
    versions = {"policy": [stays, record(2)], "other": [record(1, RETIRED)]}
    now = replace(metrics.gauges.NOTHING, versions=versions, stuck={"/store/pool/1-7": 4 << 20})
    found = {family.name: family for family in metrics.gauges.families(now)}["resharder_versions_not_retired"]
    assert {sample.labels["model"]: sample.value for sample in found.samples} == {"policy": 1, "other": 0}
    assert status(now, [])["problems"] == [
        f"{stays.name} is {stays.reason}",
        "/store/pool/1-7 cannot be removed, and takes 4.0 MiB of the store: remove what protects it",
    ]


def test_families_are_declared_before_anything_has_happened() -> None:
    registry, _ = metrics.make("1.2.3")
    metrics.show(registry, lambda: metrics.gauges.NOTHING)
    names = {family.name for family in registry.collect()}
    assert {"resharder_fleet_lag_seconds", "resharder_installs", "resharder_store_used_bytes"} <= names
    assert all(name.startswith(("resharder_", "process_")) for name in names)


def test_metrics_and_the_page_say_how_much_of_a_version_was_compared_and_why_the_rest_was_not() -> None:
    packed = resources_pb2.Uncompared(reason="packed", tensors=2, bytes=60)
    found = [
        resources_pb2.Verification(covered_bytes=40, digested_bytes=30, total_bytes=100, uncompared=[packed]),
        resources_pb2.Verification(covered_bytes=100, digested_bytes=100, total_bytes=100),
        resources_pb2.Verification(total_bytes=100, skipped="asleep"),
    ]
    workers = {rank: Worker(rank, resources_pb2.Worker.APPLIED, 5, verification=one) for rank, one in enumerate(found)}
    view = serving(5)
    view = replace(view, server=replace(view.server, workers=workers))
    fleet = FleetView(Fleet("policy", "policy"), 5, (), "")
    now = replace(metrics.gauges.NOTHING, fleets=(fleet,), servers={"policy": (view,)}, versions={"policy": [record(5)]})
    registry, _ = metrics.make("1.2.3")
    metrics.show(registry, lambda: now)
    sizes = {
        sample.labels["compared_with"]: sample.value
        for family in registry.collect()
        for sample in family.samples
        if family.name == "resharder_verified_bytes"
    }
    assert sizes == {"digest": 130, "fingerprint": 10, "nothing": 160}
    (server,) = status(now, [])["fleets"][0]["servers"]
    assert server["verification"] == {"time": 0, "compared": 140, "needed": 300, "why": "packed; asleep"}
