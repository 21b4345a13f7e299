"""A fleet of two servers that lives: everything around it is killed in every phase, it moves in every way, sleeps and wakes,
while clients keep asking both servers.

The tests share the servers and run in order; each leaves the fleet serving, and looks at every answer that clients got in it.
"""

import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from resharder.client import Publisher, connect
from resharder.client.operator import Operator
from resharder.client.waiting import went_well
from resharder.v1 import resources_pb2

from tests.support.asking import Asked, Client, Turned, wrong
from tests.support.daemon import Daemon
from tests.support.operating import servers, wait_serving, wait_until
from tests.support.tiny_hf import save_tokenizer, tiny_config
from tests.support.vllm_server import VllmServer
from tests.support.weights import Reference, random_weights

CONFIG = tiny_config("qwen3_tied")
LEASE = 3.0
LONG = 120.0  # seconds that nothing here takes
PLUGINS = Path(__file__).parents[1] / "support" / "raw_mode"
Server, Move, Motion, Want = resources_pb2.Server, resources_pb2.Move, resources_pb2.Motion, resources_pb2.Want
ALL_AT_ONCE = Motion(kind=Motion.ALL_AT_ONCE)


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
    _references: dict[int, Reference] = field(default_factory=dict)
    _step: int = 0
    _jobs: int = 0

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

    def new_publisher(self) -> None:
        self.publisher.close()
        self._jobs += 1
        self.publisher = job(self.daemon.endpoint, self.folder, f"job-{self._jobs}")

    def reference(self, version: int) -> Reference:
        if version not in self._references:
            self._references[version] = Reference(CONFIG, random_weights(CONFIG, self.steps[version]))
        return self._references[version]

    # What is asked of it

    def arrives(self, version: int) -> None:
        wait_serving(self.daemon, version, LONG)

    def set(self, motion: resources_pb2.Motion, want: resources_pb2.Want | None = None) -> None:
        self.operator.update_fleet("policy", motion=motion, want=want)

    @property
    def move(self) -> resources_pb2.Move:
        return self.operator.fleet("policy").move

    def comes_to(self, state: int, version: int) -> resources_pb2.Move:
        """Once the move to this version is in this state."""

        def there() -> bool:
            return (self.move.to_version, self.move.state) == (version, state)

        try:
            wait_until(there, f"the move to version {version} is {Move.State.Name(state)}", LONG)  # type: ignore[arg-type]
        except TimeoutError as error:
            raise TimeoutError(f"{error}; it is {self.operator.fleet('policy')}, of {servers(self.daemon)}") from None
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
    def faults(self, name: str, **said: object) -> Iterator[None]:
        """How installs of one server go wrong; see `resharder_faulty_installs`."""
        file = faults_of(self.folder, name)
        file.write_text(json.dumps(said))
        try:
            yield
        finally:
            file.unlink()

    # What clients got

    def judge(self) -> tuple[list[Asked], list[Turned]]:
        """All that clients got since the last time, each answer of the versions that it names."""
        answers, turned = [], []
        for client in self.clients:
            count, others = len(client.answers), len(client.turned)
            answers += client.answers[:count]
            turned += client.turned[:others]
            del client.answers[:count], client.turned[:others]
        assert not [found for answer in answers if (found := wrong(answer, self.reference))]
        for one in turned:
            refused = one.status == 503 and "not serving: " in one.reason
            assert refused or (one.status == 0 and one.server in self.killed), one
        return answers, turned

    def everyone_gets(self, version: int) -> None:
        """From now on, answers of this version alone, of every server."""
        self.judge()
        names = {(name, (str(version),)) for name in self.servers}
        wait_until(lambda: names <= {(a.server, a.versions) for c in self.clients for a in list(c.answers)}, "answers", LONG)


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
    with Daemon(lease_seconds=LEASE, keep_count=4, config=folder / "daemon.yaml") as daemon, ExitStack() as stack:
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
        operator = stack.enter_context(Operator(daemon.endpoint, patience=30))
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


def test_a_canary_serves_alone_until_an_operator_lets_the_rest_follow(fleet: Fleet) -> None:
    fleet.arrives(1)
    fleet.everyone_gets(1)
    fleet.set(Motion(kind=Motion.CANARY, canaries=1, approval=True))
    version = fleet.publish()
    (canary,) = fleet.comes_to(Move.HOLDING, version).servers
    other = "right" if canary == "left" else "left"
    assert fleet.serving() == {canary: version, other: 1}
    asked = fleet.operator.decide("policy", go_on=True, reason="the answers look right")
    assert went_well(asked, fleet.operator.wait_moved(asked, timeout=LONG))
    assert fleet.serving() == {canary: version, other: version}
    fleet.everyone_gets(version)
