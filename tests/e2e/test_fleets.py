"""A fleet of two servers that lives: everything around it is killed in every phase, it moves in every way, sleeps and wakes,
while clients keep asking both servers.

The tests share the servers and run in order; each leaves the fleet serving, and looks at every answer that clients got in it.
"""

import json
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
from resharder.client import Publisher, connect
from resharder.client.errors import ResharderError
from resharder.client.operator import Operator
from resharder.client.operator.answers import Move, Power, UpdateStrategy, VersionTarget
from resharder.client.operator.waiting import went_well
from resharder.v1 import resources_pb2

from demo.trainer_job import TrainerJob
from tests.support.client_traffic import PROMPTS, Client, ClientAnswer, FailedRequest, Judge, ask
from tests.support.daemon import Daemon
from tests.support.observing import servers, wait_serving, wait_until
from tests.support.tiny_hf import save_tokenizer, tiny_config
from tests.support.vllm_server import Token, VllmServer
from tests.support.weights import Reference, random_weights

pytestmark = pytest.mark.full

CONFIG = tiny_config("qwen3_tied")
LEASE = 20.0  # long enough for a busy machine: whoever is lost is not waited for
LONG = 120.0  # seconds that nothing here takes
PLUGINS = Path(__file__).parents[1] / "support" / "raw_mode"
Server = resources_pb2.Server
ALL_AT_ONCE = UpdateStrategy(UpdateStrategy.Kind.ALL_AT_ONCE)


@dataclass
class Fleet:
    folder: Path
    daemon: Daemon
    publisher: Publisher
    servers: dict[str, VllmServer]
    operator: Operator
    clients: list[Client] = field(default_factory=list)
    steps: dict[int, int] = field(default_factory=dict)  # {version: step}; a step is the seed of its weights
    killed: set[str] = field(default_factory=set)  # servers
    killed_at: float = 0.0
    phase: str = ""
    say: Callable[[str], None] = print
    _step: int = 0

    def __post_init__(self) -> None:
        self.truth = Judge(lambda version: Reference(CONFIG, random_weights(CONFIG, self.steps[version])))

    # Versions

    def publish(self, halfway: Callable[[], None] = lambda: None) -> int:
        """A version with weights of its own, READY; its number. `halfway` is called in the middle of each upload of it."""
        self._step += 1
        step = self._step

        def items() -> Iterator[tuple[str, object]]:
            for at, item in enumerate(random_weights(CONFIG, step).items()):
                if at == 10:
                    halfway()
                yield item

        handle = self.publisher.publish_tensors(step, items)  # type: ignore[arg-type]
        handle.wait_ready(LONG)
        self.steps[handle.version] = step
        return handle.version

    @property
    def newest(self) -> int:
        return max(self.steps)

    # What is asked of it

    def arrives(self, version: int) -> None:
        wait_serving(self.daemon, version, LONG)

    def set(self, strategy: UpdateStrategy, target: VersionTarget | None = None) -> None:
        self.operator.set_fleet("policy", strategy=strategy, target=target)

    def restart_daemon(self, phase: str) -> None:
        self.daemon.kill()
        self.killed_at, self.phase = time.monotonic(), f"daemon killed {phase}"
        self.daemon.start()

    def in_time(self, version: int) -> None:
        """Arrives after what was killed, and says how long it took."""
        self.arrives(version)
        self.say(f"{self.phase}: all serve version {version} after {time.monotonic() - self.killed_at:.1f} s")
        self.everyone_gets(version)

    @property
    def move(self) -> Move | None:
        return self.operator.fleet("policy").move

    def comes_to(self, state: Move.State, version: int) -> Move:
        """Once the move to this version is in this state."""

        def there() -> bool:
            move = self.move
            return move is not None and (move.to_version, move.state) == (version, state)

        try:
            wait_until(there, f"the move to version {version} is {state}", LONG)
        except TimeoutError as error:
            raise TimeoutError(f"{error}; it is {self.operator.fleet('policy')}, of {servers(self.daemon)}") from None
        assert self.move is not None
        return self.move

    def server(self, name: str) -> resources_pb2.Server:
        return next(server for server in servers(self.daemon) if server.name == f"servers/{name}")

    def wait_state(self, name: str, state: int, version: int = 0) -> None:
        """`version`: that it installs."""

        def there() -> bool:
            found = self.server(name)
            return found.state == state and version in (0, found.install.version)

        wait_until(there, f"{name} is {Server.State.Name(state)}", LONG)  # type: ignore[arg-type]

    def serving(self) -> dict[str, int]:
        return {server.name.removeprefix("servers/"): server.version for server in servers(self.daemon)}

    @contextmanager
    def faults(self, name: str, **settings: object) -> Iterator[None]:
        """How installs of one server stop and go wrong; see `resharder_faulty_installs`."""
        file = faults_of(self.folder, name)
        written = file.with_suffix(".new")
        written.write_text(json.dumps(settings))
        written.rename(file)
        try:
            yield
        finally:
            file.unlink()

    # What clients got

    def judge(self) -> tuple[list[ClientAnswer], list[FailedRequest]]:
        """All that clients got since the last time, each answer of the versions that it names. What they are still waiting for
        comes later, whatever it began on."""
        answers, turned = [], []
        for client in self.clients:
            count, others = len(client.answers), len(client.failed)
            answers += client.answers[:count]
            turned += client.failed[:others]
            del client.answers[:count], client.failed[:others]
        assert not [found for answer in answers if (found := self.truth.wrong(answer))]
        for one in turned:
            refused = one.status == 503 and "not serving: " in one.reason
            assert refused or (one.status == 0 and one.server in self.killed), one
        return answers, turned

    def everyone_gets(self, version: int) -> None:
        self.each_gets(dict.fromkeys(self.servers, version))

    def each_gets(self, versions: dict[str, int]) -> None:
        """From some moment on, of each server, answers of this version alone."""
        self.judge()
        expected = {(name, (str(version),)) for name, version in versions.items()}
        wait_until(lambda: expected <= {(a.server, a.versions) for c in self.clients for a in list(c.answers)}, "answers", LONG)


def job(endpoint: str, folder: Path, name: str) -> Publisher:
    return connect(endpoint, model="policy", job=name, rank=0, world_size=1, config=CONFIG, tokenizer=folder)


def faults_of(folder: Path, name: str) -> Path:
    return folder / f"faults-{name}.json"


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    folder = tmp_path_factory.mktemp("config")
    save_tokenizer(folder, CONFIG["vocab_size"])
    (folder / "config.json").write_text(json.dumps(CONFIG))
    (folder / "daemon.yaml").write_text("checks:\n  answers: [sh, -c, 'echo version $RESHARDER_VERSION is worse; exit 1']\n")
    options = {"lease_seconds": LEASE, "keep_count": 4, "config": folder / "daemon.yaml", "log_format": "json"}
    with Daemon(**options) as daemon, ExitStack() as stack:
        found = {}
        for name in ("left", "right"):
            environment = {
                "RESHARDER_ENDPOINT": daemon.endpoint,
                "RESHARDER_SERVER_ID": name,
                "VLLM_PLUGINS": "resharder,raw_mode,dropping_sleep,faulty_installs",
                "PYTHONPATH": str(PLUGINS),
                "FAULTY_INSTALLS": str(faults_of(folder, name)),
            }
            found[name] = VllmServer(folder, ["--load-format", "resharder"], environment)
        operator = stack.enter_context(Operator(daemon.endpoint))
        built = Fleet(folder, daemon, job(daemon.endpoint, folder, "job-0"), found, operator)
        built.publish()
        for server in found.values():
            server.start()
            stack.callback(server.stop)
        for server in found.values():
            server.wait_ready()
        for name, server in found.items():
            built.clients.append(stack.enter_context(Client({name: server})))
        yield built
        built.publisher.close()


@pytest.fixture(autouse=True)
def _aloud(fleet: Fleet, capsys: pytest.CaptureFixture[str]) -> None:
    def say(line: str) -> None:
        with capsys.disabled():
            print(f"\n{line}", end=" ", flush=True)

    fleet.say = say


def test_a_canary_serves_alone_until_an_operator_lets_the_rest_follow(fleet: Fleet) -> None:
    fleet.arrives(1)
    fleet.everyone_gets(1)
    fleet.set(UpdateStrategy(UpdateStrategy.Kind.CANARY, canaries=1, approval=True))
    version = fleet.publish()
    (canary,) = fleet.comes_to(Move.State.HOLDING, version).servers
    other = "right" if canary == "left" else "left"
    assert fleet.serving() == {canary: version, other: 1}
    asked = fleet.operator.approve("policy", reason="the answers look right")
    assert went_well(asked, fleet.operator.wait_moved(asked, timeout=LONG))
    assert fleet.serving() == {canary: version, other: version}
    fleet.everyone_gets(version)


def test_a_canary_whose_check_fails_goes_back_by_itself_as_one_does_that_an_operator_sends_back(fleet: Fleet) -> None:
    before = fleet.newest
    fleet.set(UpdateStrategy(UpdateStrategy.Kind.CANARY, check="answers"))
    worse = fleet.publish()
    move = fleet.comes_to(Move.State.FAILED, worse)
    assert f"version {worse} is worse" in move.reason
    assert fleet.serving() == {"left": before, "right": before}
    fleet.set(UpdateStrategy(UpdateStrategy.Kind.CANARY, approval=True))
    other = fleet.publish()
    fleet.comes_to(Move.State.HOLDING, other)
    fleet.operator.back("policy", reason="too talkative")
    fleet.comes_to(Move.State.FAILED, other)
    fleet.everyone_gets(before)
    assert [refusal.version for refusal in fleet.operator.fleet("policy").refused] == [worse, other]


def test_a_rolling_move_stops_at_the_first_failed_install_and_goes_on_when_told_to(fleet: Fleet) -> None:
    before = fleet.serving()["left"]
    fleet.set(UpdateStrategy(UpdateStrategy.Kind.ROLLING, at_a_time=1, max_failures=1))
    with fleet.faults("left", torn_after=fleet.newest):
        version = fleet.publish()
        move = fleet.comes_to(Move.State.STOPPED, version)
        assert list(move.failed) == ["left"]
        assert "torn half-way by the test" in move.reason
        fleet.each_gets({"left": before, "right": before})
    asked = fleet.operator.approve("policy")
    assert went_well(asked, fleet.operator.wait_moved(asked, timeout=LONG))
    fleet.everyone_gets(version)


def test_an_atomic_move_shows_nobody_an_old_version_after_the_new_one(fleet: Fleet) -> None:
    before = fleet.newest
    fleet.set(UpdateStrategy(UpdateStrategy.Kind.ATOMIC))
    with Client(fleet.servers) as both:
        wait_until(lambda: bool(both.answers), "an answer of the old version", LONG)
        with fleet.faults("right", held="apply"):
            version = fleet.publish()
            fleet.wait_state("right", Server.APPLYING, version)
            fleet.wait_state("left", Server.WAITING, version)
        fleet.comes_to(Move.State.DONE, version)
        wait_until(lambda: both.answers[-1].versions == (str(version),), "an answer of the new version alone", LONG)
    seen = [answer.versions for answer in both.answers]
    new = seen.index((str(version),))
    assert set(seen[new:]) == {(str(version),)}
    assert seen[0] == (str(before),)
    fleet.everyone_gets(version)


def test_an_atomic_move_that_one_server_cannot_make_is_made_by_none(fleet: Fleet) -> None:
    before = fleet.newest
    fleet.everyone_gets(before)
    fleet.judge()  # whatever clients get from now on began on this version
    with fleet.faults("right", torn_after=before):
        version = fleet.publish()
        assert "right: " in fleet.comes_to(Move.State.FAILED, version).reason
        fleet.arrives(before)
        answers, _ = fleet.judge()
        assert not [found for one in answers if (found := fleet.truth.wrong(replace(one, versions=(str(before),))))]
        fleet.everyone_gets(before)


def test_a_rolled_back_version_is_not_installed_again_by_itself(fleet: Fleet) -> None:
    fleet.set(ALL_AT_ONCE)
    good, bad = fleet.publish(), fleet.publish()
    fleet.arrives(bad)
    asked = fleet.operator.rollback("policy", good, reason="too talkative")
    assert went_well(asked, fleet.operator.wait_moved(asked, timeout=LONG))
    fleet.everyone_gets(good)
    fleet.restart_daemon("after a rollback")
    fleet.in_time(good)
    assert fleet.operator.fleet("policy").wanted_version == good
    fleet.arrives(fleet.publish())


def test_a_drained_server_answers_what_it_has_begun_and_nothing_else(fleet: Fleet) -> None:
    tokens: list[Token] = []
    asking = threading.Thread(target=lambda: tokens.extend(token for token in fleet.servers["left"].stream(PROMPTS[0], 300)))
    asking.start()
    wait_until(lambda: len(tokens) > 5, "the answer is on its way", LONG)
    fleet.operator.drain("policy", "left")
    fleet.operator.wait_drained("policy", "left", timeout=LONG)
    asking.join(LONG)
    assert len(tokens) == 300
    refusal = ask("left", fleet.servers["left"], PROMPTS[0])
    assert isinstance(refusal, FailedRequest)
    assert "drained for maintenance" in refusal.reason
    assert fleet.server("left").state == Server.DRAINED
    fleet.operator.resume("policy", "left")
    fleet.operator.wait_serving("policy", "left", timeout=LONG)
    fleet.everyone_gets(fleet.newest)


def test_servers_that_dropped_their_weights_wake_with_what_was_published_meanwhile(fleet: Fleet) -> None:
    fleet.operator.sleep("policy", level=2)
    fleet.operator.wait_power("policy", Power.ASLEEP_2, timeout=LONG)
    for name, server in fleet.servers.items():
        refusal = ask(name, server, PROMPTS[0])
        assert isinstance(refusal, FailedRequest)
        assert "sleep" in refusal.reason
    version = fleet.publish()
    fleet.operator.wake("policy")
    fleet.operator.wait_power("policy", Power.AWAKE, timeout=LONG)
    fleet.arrives(version)
    fleet.everyone_gets(version)


def test_a_daemon_killed_while_a_trainer_uploads_gets_it_all_again(fleet: Fleet) -> None:
    kills = iter([fleet.restart_daemon])
    fleet.in_time(fleet.publish(lambda: next(kills, lambda _: None)("in mid-upload")))


def test_a_daemon_killed_while_it_commits_leaves_no_half_version_and_takes_the_next(fleet: Fleet) -> None:
    before = fleet.newest
    fleet.set(ALL_AT_ONCE)
    fleet.daemon.kill()
    fleet.daemon.start(failpoint="commit.before-rename=kill")

    def publish() -> None:
        with suppress(ResharderError):  # it is READY later, or its trainer hears that it is not
            fleet.publish()

    publishing = threading.Thread(target=publish)
    publishing.start()
    assert fleet.daemon.wait(LONG) == -signal.SIGKILL
    fleet.killed_at, fleet.phase = time.monotonic(), "daemon killed in mid-commit"
    fleet.each_gets(dict.fromkeys(fleet.servers, before))
    fleet.daemon.start()
    publishing.join(LONG)
    fleet.in_time(fleet.publish())


@pytest.mark.parametrize("phase", ["stage", "apply"])
def test_a_daemon_killed_while_servers_install_finds_them_and_goes_on(fleet: Fleet, phase: str) -> None:
    with fleet.faults("left", held=phase), fleet.faults("right", held=phase):
        version = fleet.publish()
        for name in ("left", "right"):
            fleet.wait_state(name, {"stage": Server.STAGING, "apply": Server.APPLYING}[phase], version)
        fleet.restart_daemon(f"while servers {phase}")
    fleet.in_time(version)


def test_servers_killed_while_they_stage_and_while_they_apply_boot_on_the_newest_version(fleet: Fleet) -> None:
    with fleet.faults("left", held="stage"), fleet.faults("right", held="apply"):
        version = fleet.publish()
        fleet.wait_state("left", Server.STAGING, version)
        fleet.wait_state("right", Server.APPLYING, version)
        fleet.killed |= fleet.servers.keys()
        for server in fleet.servers.values():
            server.kill()
    fleet.killed_at, fleet.phase = time.monotonic(), "both servers killed in mid-install"
    version = fleet.publish()
    for server in fleet.servers.values():
        server.start()
    for server in fleet.servers.values():
        server.wait_ready()
    fleet.in_time(version)


def test_servers_take_versions_from_a_replica_each(fleet: Fleet, tmp_path: Path) -> None:
    settings = {"config": CONFIG, "connect": {"direct_wait": 60.0}}
    with TrainerJob(fleet.daemon.endpoint, "policy", tmp_path, settings, ranks=2) as trainer:  # two replicas of all weights
        fleet.set(ALL_AT_ONCE)
        for step in (100, 101):
            version = int(trainer.ask(do="publish", step=step)["version"])
            fleet.steps[version] = step
            fleet.arrives(version)
            fleet.everyone_gets(version)
    log = [json.loads(line) for line in fleet.daemon.log.read_text().splitlines() if line.startswith("{")]
    groups = {line["server"]: line["senders"] for line in log if line["event"] == "direct_group"}
    assert groups == {"left": 1, "right": 1}
    sent = [(line["server"], line["version"]) for line in log if line["event"] == "direct_transfer"]
    assert sorted(sent) == [(name, version - 1 + i) for name in ("left", "right") for i in range(2)]
    assert not [line for line in log if line["event"] == "direct_failed"]
