"""One cycle of an adapter beside its base, with one fault in the server: versions are staged, served, and leave their slots."""

import uuid
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import torch
from resharder.client import connect
from resharder.client.inference.vllm import engine_core, worker_rpc
from resharder.client.inference.worker.adapter_agent import adapter_id
from resharder.v1 import resources_pb2

from tests.failpoints.checks import nothing_is_left_behind
from tests.failpoints.cycle import Cycle, Failed
from tests.failpoints.light_server import WORKER_METHODS, Core, LightServer, Worker, configuration, fingerprint
from tests.failpoints.roles import PATIENCE
from tests.support.remote import Gone, Refusal, Remote

ADAPTER, SLOTS = "lora", 3
CONFIG = {"peft_type": "LORA", "r": 4, "lora_alpha": 4, "target_modules": ["q_proj"]}
_QUERY = "base_model.model.model.layers.0.self_attn.q_proj"
SHAPES = {f"{_QUERY}.lora_A.weight": (4, 32), f"{_QUERY}.lora_B.weight": (64, 4)}


def adapter_weights(step: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    return {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}


class AdapterTrainer:
    """A rank with the adapter. Its steps are the seeds of its weights."""

    def __init__(self, endpoint: str) -> None:
        self._endpoint, self._publisher = endpoint, None  # type: str, Publisher | None

    def register(self) -> None:
        job = uuid.uuid4().hex
        self._publisher = connect(self._endpoint, model=ADAPTER, base="policy", job=job, rank=0, world_size=1, config=CONFIG)

    def publish(self, step: int) -> int:
        """The number of a READY version."""
        assert self._publisher is not None
        handle = self._publisher.publish_tensors(step, adapter_weights(step).items())
        handle.wait_ready(PATIENCE)
        return handle.version


class Slots:
    """`inference.engine.AdapterSlots` of a few tensors, as they are published."""

    dtype = torch.float32

    def __init__(self) -> None:
        self.ids: list[int | None] = [None] * SLOTS
        self.memory = {name: torch.zeros(SLOTS, *shape) for name, shape in SHAPES.items()}
        self.entered = set[int]()

    @classmethod
    def of_worker(cls, worker: Any) -> "Slots":
        found: Slots = worker.slots
        return found

    def whole(self) -> bool:
        return True

    def check(self, config: Mapping[str, Any], names: Mapping[str, tuple[int, ...]]) -> None:
        pass

    def reserve(self, id: int) -> int | None:
        slot = next((slot for slot, taken in enumerate(self.ids) if taken is None), None)
        if slot is not None:
            self.ids[slot] = id
        return slot

    def full(self) -> str:
        return "no slot is free"

    def write(self, slot: int, id: int, tensors: Mapping[str, torch.Tensor], config: Mapping[str, Any]) -> Any:
        for name, tensor in tensors.items():
            self.memory[name][slot] = tensor
        return object()

    def read(self, slot: int) -> dict[str, torch.Tensor]:
        return {name: tensor[slot] for name, tensor in self.memory.items()}

    def holds(self, slot: int, id: int) -> bool:
        return self.ids[slot] == id

    def marks(self, slot: int) -> dict[str, torch.Tensor]:
        return {}

    def renamed(self, adapter: Any, id: int) -> Any:
        return adapter

    def enter(self, id: int, adapter: Any) -> None:
        self.entered.add(id)

    def release(self, id: int) -> None:
        self.entered.discard(id)
        self.ids = [None if taken == id else taken for taken in self.ids]

    def scaling(self, config: Mapping[str, Any], name: str) -> float:
        return 1.0

    def unscaled(self, config: Mapping[str, Any]) -> dict[str, Any]:
        return dict(config)


class EngineCore:
    """The part of vLLM's engine core that the plugin's methods use."""

    resharder_fenced, resharder_adapter = engine_core.resharder_fenced, engine_core.resharder_adapter

    def __init__(self, worker: Worker) -> None:
        self._worker, self.scheduler = worker, SimpleNamespace(requests={})

    def collective_rpc(self, method: str, args: tuple[Any, ...]) -> list[Any]:
        return [WORKER_METHODS[method](self._worker, *args)]


class AdapterCore(Core):
    """The client of an engine core, and the core."""

    def __init__(self, worker: Worker) -> None:
        self._core = EngineCore(worker)

    async def call_utility_async(self, method: str, *args: Any) -> Any:
        return await self._call_utility_async(method, *args)

    async def _call_utility_async(self, method: str, *args: Any, **to: Any) -> Any:
        return getattr(self._core, method)(*args)


class AdapterServer(LightServer):
    """A server that follows the adapter too, and notes the memory of the version that new requests get."""

    preloaded = ("tests.failpoints.adapter_cycle",)

    def __init__(self, served: str) -> None:
        super().__init__(served)
        self.slots = Slots()
        worker_rpc.LoraSlots = Slots  # type: ignore[attr-defined, assignment, misc]

    def worker(self, vllm_config: Any) -> Worker:
        worker = super().worker(vllm_config)
        worker.slots = self.slots  # type: ignore[attr-defined]
        return worker

    def core(self, worker: Worker) -> Core:
        return AdapterCore(worker)

    def configuration(self) -> Any:
        found = configuration()
        found.lora_config = SimpleNamespace(max_loras=SLOTS)
        return found

    def version(self) -> int:
        """The adapter's version in service, 0 for none."""
        return self._handle.adapters[ADAPTER].gate.serving if self._handle else 0

    def memory(self) -> str:
        """The fingerprint of what a request for the version in service computes with."""
        id = adapter_id(0, self.version())
        return fingerprint(self.slots.read(self.slots.ids.index(id)).items()) if id in self.slots.entered else "none"

    def taken(self) -> int:
        """How many slots are taken."""
        return sum(id is not None for id in self.slots.ids)


class AdapterCycle(Cycle):
    """The cycle of a case whose point is in the adapter's agent."""

    server = AdapterServer

    def _run(self) -> None:
        self.daemon.keep()
        self.register("a", "auto")
        self.base = self.publish(1)
        self.actor("server")
        found = {}
        for step in (1, 2, 3):
            number = int(self.do("adapter", "publish", step))
            found[number] = step
            self.follows(number)
        self.achieve(lambda: None, lambda: self._taken() == 1, "superseded versions are released")
        for line in self.served.read_text().splitlines():
            version, memory = line.split()
            if memory != fingerprint(adapter_weights(found[int(version)]).items()):
                raise Failed(f"version {version} of the adapter was served with other weights")
        nothing_is_left_behind(self, {self.base})

    def _begin(self, place: str) -> Remote:
        if place != "adapter":
            return super()._begin(place)
        actor = Remote(AdapterTrainer, self.daemon.endpoint)
        actor.call("register")
        return actor

    def environment(self, place: str) -> dict[str, str]:
        return super().environment(place) | ({"RESHARDER_ADAPTERS": ADAPTER} if place == "server" else {})

    def serves(self, version: int) -> bool:
        """Whether the adapter's server and the gate are at a version, beside the base's."""
        expected = {"servers/s": self.base, f"servers/s.{ADAPTER}": version}
        states = {server.name: server.version for server in self.servers() if server.state == resources_pb2.Server.SERVING}
        try:
            return states == expected and self.actors["server"].call("version") == version
        except (Gone, Refusal):
            return False

    def _taken(self) -> int:
        try:
            return int(self.actors["server"].call("taken"))
        except (Gone, Refusal):
            return 0
