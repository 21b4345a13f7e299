"""A daemon at work among requests that make no sense: good ranks publish, good servers follow, and nothing of it may suffer.

with fuzzed(folder) as world:
    world.call(Random(7))
    world.check()           # nothing failed inside, no byte of a READY version changed, what is shown is well formed
"""

import json
import threading
import urllib.request
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from random import Random
from types import SimpleNamespace

import grpc
import structlog
import xxhash
from google.protobuf.message_factory import GetMessageClass
from resharder.converters.geometry.layout import Layout, Piece, Range, TensorSpec, full_box
from resharder.converters.geometry.piece_arrays import pack
from resharder.converters.wire.boxes import boxes_to_proto
from resharder.converters.wire.direct import layout_to_proto
from resharder.server.main import Daemon
from resharder.server.state.version import READY, VersionRecord
from resharder.v1 import (
    direct_pb2,
    direct_pb2_grpc,
    operator_pb2,
    operator_pb2_grpc,
    publisher_pb2,
    resources_pb2,
    server_pb2,
    server_pb2_grpc,
)

from tests.support.fuzzing import METHODS, UPLOAD, Names, requests
from tests.support.in_process_daemon import InProcessChannel, Refused, in_process_daemon
from tests.support.publishing import Held, Job, random_weights, read_folder
from tests.support.simulated_server import SimulatedServer

SPECS = [TensorSpec("a", "BF16", (16, 64)), TensorSpec("b", "F32", (8,)), TensorSpec("c", "U8", ())]
TOP, BOTTOM = (Range(0, 8), Range(0, 64)), (Range(8, 8), Range(0, 64))
HELD: list[list[Held]] = [[("a", TOP, False), ("b", full_box((8,)), False)], [("a", BOTTOM, False), ("c", (), False)]]
MODELS = ("policy", "draft")
OPTIONS = {
    "lease_seconds": 3600,
    "chunk_bytes": 1024,
    "store_limit_bytes": 16 << 20,
    "threads": 64,
    "checks": {"pass": ["true"]},
    "drain_seconds": 0,
}
# Half of all calls would be of services that are read through quickly; these have more to get wrong.
_PATHS = [*METHODS, *[UPLOAD] * 6, *[path for path in METHODS if path.endswith(("RegisterSlot", "SealSlot", "ReportWorker"))] * 3]


class World:
    def __init__(self, daemon: Daemon, door: InProcessChannel, logged: list[dict[str, object]]) -> None:
        self.daemon, self.door, self.outcomes, self.calls = daemon, door, Counter[str](), 0
        self.names = Names()
        self.published = self.transfers = 0
        self._followers: dict[str, Follower] = {}
        self._logged, self._seen, self._jobs = logged, dict[tuple[str, str], dict[str, int]](), 0
        self._web = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        door.asked, door.answered = self._asked, self._answered

    # Good clients

    def work(self) -> None:
        """What they do all day: so there are good requests of every kind to be changed, and something that they are about."""
        self._follow()
        for model in MODELS:
            self.publish(model)
            self._look(model)
        self._job(MODELS[1]).register(0)
        self._begin(MODELS[0])

    def publish(self, model: str) -> resources_pb2.Version:
        """By a new job; the READY version, whose bytes are looked at."""
        job, weights = self._job(model).connect(), random_weights(SPECS, self._jobs)
        version = job.publish(1, weights)
        assert version.state == resources_pb2.Version.READY, version
        self.published += 1
        found = read_folder(version.folder)
        assert all(found[name].tobytes() == weights[name].tobytes() for name in weights), version.name
        return version

    def _begin(self, model: str) -> None:
        """A version that one rank has delivered, and the other in part; both offer it, and a server takes it directly."""
        job, weights = self._job(model).connect(), random_weights(SPECS, self._jobs)
        version = job.begin(1)
        job.upload(version.number, 0, weights)
        job.upload(version.number, 1, weights, only=[0])
        job.seal(version.name, 0, weights)
        members = [direct_pb2.Member(owner=job.name, rank=rank, process=f"rank-{rank}") for rank in range(len(HELD))]
        for member in members:
            self._declare(member, HELD[member.rank])
            threading.Thread(target=self._offer, args=(member, version.name), daemon=True).start()
        self._take(version.name, self._followers[model])

    def _job(self, model: str) -> Job:
        self._jobs += 1
        job = Job(self.door, SPECS, HELD, model=model, job=_unguessed("job", str(self._jobs)))  # type: ignore[arg-type]
        job.create()
        return job

    def _follow(self) -> None:
        """A fresh process of the one server of each model."""
        for model in MODELS:
            if model in self._followers:
                self._followers[model].__exit__(None, None, None)
            try:
                self._followers[model] = Follower(self.door, f"server-{model}", model, self._jobs)
            except Refused as refused:  # once it had left, a request with a changed name claimed its id for another fleet
                if "follows" not in refused.details():
                    raise
                self._followers[model] = Follower(self.door, _unguessed("server", f"{model} {self._jobs}"), model, self._jobs)

    def close(self) -> None:
        for follower in self._followers.values():
            follower.__exit__(None, None, None)

    def _look(self, model: str) -> None:
        operator, version = operator_pb2_grpc.OperatorServiceStub(self.door), self.daemon.store.catalogue.newest(model)
        update = operator_pb2.UpdateFleetRequest(fleet=resources_pb2.Fleet(name=model), accept_refused=True)
        update.fleet.target.kind, update.fleet.strategy.kind = (
            resources_pb2.VersionTarget.LATEST,
            resources_pb2.UpdateStrategy.ALL_AT_ONCE,
        )
        update.update_mask.paths.extend(["target", "strategy"])
        with suppress(grpc.RpcError):
            operator.UpdateFleet(update)
        with suppress(grpc.RpcError):
            operator.SetPower(operator_pb2.SetPowerRequest(fleet=model, power=resources_pb2.AWAKE))
            operator.SetDrained(operator_pb2.SetDrainedRequest(fleet=model))
        assert version is not None
        boxes = boxes_to_proto((i, full_box(spec.shape), False) for i, spec in enumerate(SPECS))
        wanted = server_pb2.BoxesRequest(version=version.name, tensors=[spec.name for spec in SPECS], boxes=boxes)
        servers = server_pb2_grpc.ServerServiceStub(self.door)
        servers.DigestBoxes(wanted)
        list(servers.DownloadChunks(wanted))
        operator.ArchiveVersion(operator_pb2.ArchiveVersionRequest(version=version.name))
        operator.ListServers(operator_pb2.ListServersRequest())
        operator.ListVersions(operator_pb2.ListVersionsRequest(page_size=3))

    # The direct path

    def _declare(self, member: direct_pb2.Member, held: list[Held]) -> None:
        pieces = tuple(Piece(name, box, name, 0, (64, 1)[-len(box) :] if box else ()) for name, box, _ in held)
        layout = layout_to_proto(pack({member.rank: Layout({spec.name: spec for spec in SPECS}, pieces)}))
        request = direct_pb2.DeclareMemoryRequest(member=member, fingerprint="memory", layout=layout)
        direct_pb2_grpc.DirectServiceStub(self.door).DeclareMemory(request)

    def _offer(self, member: direct_pb2.Member, version: str) -> None:
        request = direct_pb2.OfferVersionRequest(member=member, version=version, memory="memory", wait_seconds=0.5)
        with suppress(grpc.RpcError):
            list(direct_pb2_grpc.DirectServiceStub(self.door).OfferVersion(request))

    def _take(self, version: str, follower: "Follower") -> None:
        """As far as what the others did lets it."""
        stub = direct_pb2_grpc.DirectServiceStub(self.door)
        member = direct_pb2.Member(owner=f"servers/{follower.id}", rank=0, process=follower.process)
        everything = [(spec.name, full_box(spec.shape), False) for spec in SPECS]
        with suppress(grpc.RpcError):
            self._declare(member, everything)
            join = direct_pb2.JoinTransferRequest(member=member, version=version, install="i-1", memory="memory")
            group = stub.JoinTransfer(join).group
            stub.SetGroupKey(direct_pb2.SetGroupKeyRequest(group=group, key="key", value=b"value"))
            stub.GetGroupKey(direct_pb2.GetGroupKeyRequest(group=group, key="key"))
            stub.StartTransfer(direct_pb2.TransferRequest(member=member, group=group, install="i-1"))
            stub.FinishTransfer(direct_pb2.FinishTransferRequest(member=member, group=group, ok=True))
            self.transfers += 1

    # The others

    def call(self, random: Random) -> None:
        """One call of any method."""
        path = random.choice(_PATHS)
        self.send(path, requests(random, path, self.names))

    def send(self, path: str, messages: list[bytes]) -> str:
        """How it ended: OK, or with which status."""
        self.calls += 1
        try:
            for _ in self.door.call(path, messages):
                pass
            outcome = "OK"
        except Refused as error:
            outcome = error.code().name
        except Exception:
            outcome = "FAULT"  # it is in `door.faults`
        self.outcomes[outcome] += 1
        if outcome == "FAULT":
            raise AssertionError(f"{path} failed on {[message[:2000] for message in messages]}") from self.door.faults[-1]
        return outcome

    def _asked(self, path: str, message: bytes) -> None:
        self.names.sample(path, message)
        self.names.learn(GetMessageClass(METHODS[path].input_type).FromString(message))

    def _answered(self, path: str, message: bytes) -> None:
        kind = GetMessageClass(METHODS[path].output_type)
        if kind is not publisher_pb2.Chunk:
            self.names.learn(kind.FromString(message))

    # Invariants

    def check(self) -> None:
        assert not self.door.faults, self.door.faults
        errors = [entry for entry in self._logged if entry["log_level"] in ("error", "critical")]
        self._logged.clear()
        assert not errors, errors
        self._check_versions()
        with self._web.open(f"http://{self.daemon.shown.listen}/api/status") as answer:
            shown = answer.read().decode()
        json.loads(shown, parse_constant=_no_json)
        with self._web.open(f"http://{self.daemon.shown.listen}/metrics") as answer:
            text = answer.read().decode()
        assert not [line for line in text.splitlines() if line.endswith(" NaN")], text

    def _check_versions(self) -> None:
        """Files of READY versions are as they were when they were seen first."""
        found = {}
        for record in self.ready():
            with suppress(FileNotFoundError):  # it leaves just now
                found[record.name, record.fingerprint] = _hashes(self.daemon.store.folder.path(record))
        still = {(record.name, record.fingerprint) for record in self.ready()}
        changed = [key for key in still & found.keys() & self._seen.keys() if found[key] != self._seen[key]]
        assert not changed, changed
        self._seen = found

    def ready(self) -> list[VersionRecord]:
        store = self.daemon.store
        return [
            record for model in store.catalogue.models() for record in store.catalogue.versions(model) if record.state == READY
        ]


def _unguessed(kind: str, of: str) -> str:
    """Return a name that no changed name becomes by chance."""
    return f"{kind}-{xxhash.xxh64_hexdigest(of.encode())}"


def _hashes(folder: Path) -> dict[str, int]:
    return {path.name: xxhash.xxh3_64_intdigest(path.read_bytes()) for path in sorted(folder.iterdir())}


class Follower(SimulatedServer):
    """Rank of a model; `life` names its process."""

    def __init__(self, door: InProcessChannel, id: str, model: str, life: int) -> None:
        self.process = f"process-{model}-{life}"
        super().__init__(SimpleNamespace(channel=door), id, model=model)  # type: ignore[arg-type]

    def _attach(self) -> None:
        former = self.__dict__.get("_reports")
        super()._attach()
        if former is not None:
            former.put(server_pb2.ControlReport())  # which the stream that was taken over ends after

    def _worker(self, state: int, version: int, install: str = "") -> resources_pb2.Worker:
        worker = super()._worker(state, version, install)
        worker.process, worker.memory = self.process, "memory"
        return worker

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._report_control()  # which its stream ends after
        self._thread.join()


@contextmanager
def started(folder: Path) -> Iterator[tuple[Daemon, InProcessChannel]]:
    """On what lies there."""
    folders = {"store": folder / "store", "archive_url": f"{folder}/archive"}
    with in_process_daemon(**folders, web_listen="127.0.0.1:0", **OPTIONS) as made:
        yield made


@contextmanager
def fuzzed_daemon(folder: Path) -> Iterator[World]:
    """With READY versions of each model, a server that follows each, and one UPLOADING."""
    with ExitStack() as held:
        logged = held.enter_context(structlog.testing.capture_logs())
        daemon, door = held.enter_context(started(folder))
        world = World(daemon, door, logged)
        for model in MODELS:
            world.publish(model)
        world.work()
        world.check()
        try:
            yield world
            world.check()
        finally:
            world.close()


def _no_json(name: str) -> None:
    raise AssertionError(f"{name} is no JSON")
