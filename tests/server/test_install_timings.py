"""Timings of an ended install stay in a server's state for metrics and traces, also if the next one begins in the same step."""

from resharder.server.fleets.reconciler.step import step
from resharder.server.state.server import Server, Settings, Worker
from resharder.server.state.server_events import Attached, Reinstalled, Reported, Ticked, VersionsChanged, WorkerReported
from resharder.server.state.timing import Timing
from resharder.v1 import resources_pb2, server_pb2

SETTINGS = Settings()
PAUSE, RESUME = Timing("pause", 1.0, 0.5), Timing("resume", 2.0, 0.1)


class Story:
    """A server with one worker and one control side that serves version 1."""

    def __init__(self) -> None:
        self.server = Server("a", "policy", "policy", "life", 0.0, {1: "1"}, boot_version=1)
        self.worker(resources_pb2.Worker.BOOTED, 1)
        self.happens(Attached("control", 1))
        self.report(server_pb2.Order.RESUME, self.server.opened_by)

    def happens(self, event: object, now: float = 1.0) -> None:
        self.server, self.orders = step(self.server, event, now, SETTINGS)  # type: ignore[arg-type]

    def report(self, done: server_pb2.Order.Kind, install: str, *timings: Timing, pause: float = 0.0, ok: bool = True) -> None:
        self.happens(Reported("control", install, done, ok=ok, pause_seconds=pause, timings=timings))

    def worker(self, state: resources_pb2.Worker.State, version: int, install: str = "") -> None:
        self.happens(WorkerReported(Worker(0, state, version, install, process="p", fingerprint=str(version))))

    def ready(self, *versions: int) -> None:
        self.happens(VersionsChanged({version: str(version) for version in versions}))

    def installed(self, version: int) -> str:
        """Up to RESUME."""
        assert self.server.install is not None
        install = self.server.install.id
        self.worker(resources_pb2.Worker.STAGED, version, install)
        self.report(server_pb2.Order.APPLY, install, PAUSE)
        self.worker(resources_pb2.Worker.APPLIED, version, install)
        return install


def test_an_install_that_ended_is_kept_with_what_its_leader_said_then_and_later() -> None:
    story = Story()
    story.ready(1, 2)
    install = story.installed(2)
    ended = story.server.ended
    assert ended is not None
    assert (ended.id, ended.state, ended.timings) == (install, resources_pb2.Install.COMMITTED, (PAUSE,))
    for _ in range(2):  # said again, it changes nothing
        story.report(server_pb2.Order.RESUME, install, RESUME, pause=0.7)
        assert story.server.ended == story.server.install
        assert story.server.ended is not None
        assert (story.server.ended.timings, story.server.ended.pause_seconds) == ((PAUSE, RESUME), 0.7)


def test_a_server_that_goes_on_while_the_next_version_is_staged_serves() -> None:
    story = Story()
    story.ready(1, 2)
    story.ready(1, 2, 3)
    install = story.installed(2)
    assert [order.kind for order in story.orders if order.kind != server_pb2.Order.RENEWED] == [
        server_pb2.Order.RESUME,
        server_pb2.Order.STAGE,
    ]
    story.report(server_pb2.Order.RESUME, install, RESUME, pause=0.7)
    assert story.server.serving == 2
    assert story.server.ended is not None
    assert (story.server.ended.id, story.server.ended.timings) == (install, (PAUSE, RESUME))
    assert story.server.install is not None
    assert (story.server.install.version, story.server.install.timings) == (3, ())


def test_a_version_that_could_not_be_staged_for_a_profile_has_lost_no_try() -> None:
    story = Story()
    for _ in range(SETTINGS.attempts + 1):
        story.happens(Reinstalled())
        assert story.server.install is not None
        assert story.server.install.active
        story.report(server_pb2.Order.STAGE, story.server.install.id, ok=False)
        assert story.server.ended is not None
        assert story.server.ended.state == resources_pb2.Install.FAILED
    assert (story.server.serving, story.server.failures) == (1, {})


def test_a_profiled_install_that_tears_the_weights_is_mended_as_any_other() -> None:
    story = Story()
    story.happens(Reinstalled())
    assert story.server.install is not None
    torn = story.server.install.id
    story.worker(resources_pb2.Worker.STAGED, 1, torn)
    assert [order.profile for order in story.orders if order.kind == server_pb2.Order.APPLY] == [True]
    story.report(server_pb2.Order.APPLY, torn, ok=False)
    assert (story.server.serving, story.server.failures[1].count) == (0, 1)
    story.happens(Ticked(), now=SETTINGS.first_retry + 2)
    assert [(order.kind, order.version, order.profile) for order in story.orders] == [(server_pb2.Order.STAGE, 1, False)]
    install = story.installed(1)
    story.report(server_pb2.Order.RESUME, install)
    assert story.server.serving == 1


def test_a_server_that_is_at_anything_else_is_not_profiled() -> None:
    story = Story()
    story.ready(1, 2)
    before = story.server
    story.happens(Reinstalled())
    assert (story.server, story.orders) == (before, ())


def test_an_install_that_is_given_up_for_the_next_one_is_kept_too() -> None:
    story = Story()
    story.ready(1, 2)
    first = story.server.install
    assert first is not None
    story.report(server_pb2.Order.STAGE, first.id, ok=False)
    assert story.server.ended is not None
    assert (story.server.ended.id, story.server.ended.state) == (first.id, resources_pb2.Install.FAILED)
